"""transformers behind FastAPI, as its documentation shows it: a queue, and a pipeline that computes a batch at a time.

    uvicorn --app-dir benchmarks serve_peer:app      # PEER_MODEL: a folder; PEER_TASK: titles or embeddings

Started by benchmarks/serve.py. Requests that wait together are one batch, padded to the longest.
"""

from __future__ import annotations

import asyncio
import os
from contextlib import asynccontextmanager
from typing import Any

import torch
from fastapi import FastAPI
from pydantic import BaseModel
from transformers import pipeline

MODEL, TASK, NEW = os.environ["PEER_MODEL"], os.environ["PEER_TASK"], int(os.environ.get("PEER_NEW", "16"))
DTYPE = getattr(torch, os.environ.get("PEER_DTYPE", "float32"))
BATCH = 32


class Body(BaseModel):
    input: str


def load() -> Any:
    if TASK == "titles":
        write = pipeline("text-generation", model=MODEL, dtype=DTYPE, device="cpu")
        write.tokenizer.padding_side, write.tokenizer.pad_token = "left", write.tokenizer.sep_token
        options = {"max_new_tokens": NEW, "min_new_tokens": NEW, "do_sample": False, "return_full_text": False}
        return lambda texts: [row[0]["generated_text"] for row in write(texts, batch_size=BATCH, **options)]
    embed = pipeline("feature-extraction", model=MODEL, dtype=DTYPE, device="cpu")

    def vectors(texts: list[str]) -> list[list[float]]:
        hidden = embed(texts, batch_size=BATCH, return_tensors=True)
        lengths = [len(row) for row in embed.tokenizer(texts)["input_ids"]]
        means = [one[0, :length].float().mean(0) for one, length in zip(hidden, lengths, strict=True)]
        return torch.nn.functional.normalize(torch.stack(means)).tolist()

    return vectors


@asynccontextmanager
async def lifespan(app: FastAPI):
    app.state.queue = asyncio.Queue()
    worker = asyncio.create_task(serve(app.state.queue, load()))
    yield
    worker.cancel()


async def serve(queue: asyncio.Queue, compute: Any) -> None:
    while True:
        entries = [await queue.get()]
        while not queue.empty() and len(entries) < BATCH:
            entries.append(queue.get_nowait())
        found = await asyncio.to_thread(compute, [text for text, _ in entries])
        for (_, future), one in zip(entries, found, strict=True):
            if not future.done():
                future.set_result(one)


app = FastAPI(lifespan=lifespan)


@app.post("/predict")
async def predict(body: Body) -> dict[str, Any]:
    future = asyncio.get_running_loop().create_future()
    await app.state.queue.put((body.input, future))
    return {"output": await future}
