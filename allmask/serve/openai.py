"""/v1/models, /v1/embeddings and /v1/completions, as clients of OpenAI speak them.

Options of the command line, such as `beams`, can be added to the body (`extra_body` of the client). Where OpenAI's own
fields cannot be honoured, they are refused, not ignored.
"""

from __future__ import annotations

import asyncio
import base64
import json
import time
import uuid
from collections.abc import AsyncIterator, Mapping
from typing import Any

import numpy as np
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from allmask.errors import UsageError
from allmask.serve.batching import Compute, Job
from allmask.serve.problems import as_response
from allmask.serve.tasks import Call, as_json, not_numbers, read_json, run, submit, too_late
from allmask.tasks.common.generator import TextGenerator
from allmask.tasks.embed import Embedder, vector_as_json
from allmask.tasks.task import Predictor

IGNORED = ("user", "metadata", "store")
NEUTRAL = (None, False, 0, "", [], {})  # values of a field that ask for nothing


async def get_models(request: Request) -> Response:
    data = [
        {"id": one.name, "object": "model", "created": one.created, "owned_by": "allmask", "tasks": [*one.predictors],
         "precision": one.precisions}
        for one in request.app.state.models.values()
    ]  # fmt: skip
    return as_json({"object": "list", "data": data})


def _leave(body: dict[str, Any], *unsupported: str) -> None:
    """Remove fields that say nothing here; refuse one that would change the result."""
    for name in IGNORED:
        body.pop(name, None)
    for name in unsupported:
        if body.pop(name, None) not in NEUTRAL:
            raise UsageError(f"{name} is not supported", "leave it out")


def _texts(body: dict[str, Any], name: str) -> list[str]:
    given = body.pop(name, None)
    texts = given if isinstance(given, list) else [given]
    if not all(isinstance(text, str) for text in texts):
        raise UsageError(f"{name} is neither a text nor a list of texts", f'pass {{"{name}": "…"}}')
    return texts


# ---- embeddings --------------------------------------------------------------------------------------------------


async def post_embeddings(request: Request) -> Response:
    """Vectors of length 1, as OpenAI's are, unless `normalize` is false."""
    request.scope["allmask.task"] = "embed"
    body = await read_json(request, request.app.state.settings)
    name, texts = body.pop("model", None), _texts(body, "input")
    form = body.pop("encoding_format", None) or "float"
    if form not in ("float", "base64"):
        raise UsageError(f"encoding_format is {json.dumps(form)[:40]}; expected float or base64")
    _leave(body, "dimensions")

    def compute(predictor: Predictor, options: dict[str, Any]) -> Compute:
        assert isinstance(predictor, Embedder)
        return lambda texts: predictor.vectors_of(texts, **options)

    call = Call(
        "embed", name, texts, {"normalize": True, **body}, compute, "vectors", lambda _, number, encoded: encoded[0]
    )
    model, vectors, tokens = await run(request, call)
    if not all(np.isfinite(vector).all() for vector in vectors):
        raise not_numbers()
    write = vector_as_json if form == "float" else _base64
    data = ", ".join(
        f'{{"object": "embedding", "index": {number}, "embedding": {write(vector)}}}'
        for number, vector in enumerate(vectors)
    )
    rest = json.dumps({"model": model.name, "usage": {"prompt_tokens": sum(tokens), "total_tokens": sum(tokens)}})
    return Response(f'{{"object": "list", "data": [{data}], {rest[1:]}', media_type="application/json")


def _base64(vector: np.ndarray) -> str:
    return f'"{base64.b64encode(vector.astype("<f4").tobytes()).decode()}"'


# ---- completions -------------------------------------------------------------------------------------------------


async def post_completions(request: Request) -> Response:
    """What the model writes for each prompt: a title, a translation or a continuation, as it was trained."""
    request.scope["allmask.task"] = "generate"
    body = await read_json(request, request.app.state.settings)
    name, prompts = body.pop("model", None), _texts(body, "prompt")
    streamed, usage = _flag(body, "stream"), _with_usage(body)
    options = _decoding(body)
    if streamed:
        return await _streamed(request, name, prompts, options, usage)

    def compute(predictor: Predictor, options: dict[str, Any]) -> Compute:
        assert isinstance(predictor, TextGenerator)
        return lambda records: predictor.write([record.fields["source"] for record in records], **options)

    model, found, tokens = await run(request, Call("generate", name, prompts, options, compute, "write"))
    every = [one for best in found for one in best]
    choices = [_choice(number, text, _reason(one)) for number, (text, one) in enumerate(every)]
    content = {**_head(model.name), "choices": choices}
    return as_json({**content, "usage": _usage(tokens, [len(one.tokens) for _, one in every])})


def _flag(body: dict[str, Any], name: str) -> bool:
    found = body.pop(name, None) or False
    if not isinstance(found, bool):
        raise UsageError(f"{name} is {json.dumps(found)[:40]}; expected true or false")
    return found


def _with_usage(body: dict[str, Any]) -> bool:
    found = body.pop("stream_options", None) or {}
    if not isinstance(found, dict):
        raise UsageError("stream_options is not an object")
    return found.get("include_usage") is True


def _decoding(body: dict[str, Any]) -> dict[str, Any]:
    """Return OpenAI's fields as options of the command line. Without a temperature the likeliest token is written."""
    _leave(body, "suffix", "echo", "logprobs", "stop", "presence_penalty", "frequency_penalty", "logit_bias")
    if body.pop("best_of", None) not in (None, 1, body.get("n")):
        raise UsageError("best_of is not supported", 'leave it out, or pass "beams"')
    options: dict[str, Any] = {}
    for theirs, ours in (("max_tokens", "max_new"), ("n", "n_best")):
        if body.get(theirs) is not None and body.get(ours) is not None:
            raise UsageError(f"{theirs} and {ours} are the same", "leave one of them out")
        if (value := body.pop(theirs, None)) is not None:
            options[ours] = value
    options |= body
    if options.get("temperature") in (0, None) and not isinstance(options.get("temperature"), bool):
        options.pop("temperature", None)  # greedy; a seed or top_p alone change nothing then
        if not options.get("sample"):
            for name in ("top_p", "seed"):
                options.pop(name, None)
    elif options.get("sample") is None:
        options["sample"] = True
    return options


def _head(model: str) -> dict[str, Any]:
    name = f"cmpl-{uuid.uuid4().hex}"
    return {"id": name, "object": "text_completion", "created": int(time.time()), "model": model}


def _choice(number: int, text: str, reason: str | None) -> dict[str, Any]:
    return {"index": number, "text": text, "finish_reason": reason, "logprobs": None}


def _reason(hypothesis: Any) -> str:
    return "stop" if hypothesis.finished else "length"


def _usage(read: list[int], written: list[int]) -> dict[str, int]:
    counts = {"prompt_tokens": sum(read), "completion_tokens": sum(written)}
    return {**counts, "total_tokens": sum(counts.values())}


# ---- server-sent events ------------------------------------------------------------------------------------------


class Outlet:
    """The way of pieces from the thread of the model to one request. What was sent is not sent again by a retry."""

    def __init__(self) -> None:
        self.loop, self.pieces = asyncio.get_running_loop(), asyncio.Queue[tuple[int, str]]()
        self.sent: dict[int, int] = {}  # characters by number of the prompt
        self.seen: dict[int, int] = {}

    def begin(self, number: int) -> None:
        self.seen[number] = 0

    def put(self, number: int, piece: str) -> None:
        before = self.seen[number]
        self.seen[number] += len(piece)
        new = piece[max(0, self.sent.get(number, 0) - before) :]
        if new:
            self.sent[number] = self.seen[number]
            self.loop.call_soon_threadsafe(self.pieces.put_nowait, (number, new))


async def _streamed(
    request: Request, name: Any, prompts: list[str], options: Mapping[str, Any], usage: bool
) -> Response:
    outlet = Outlet()

    def compute(predictor: Predictor, options: dict[str, Any]) -> Compute:
        assert isinstance(predictor, TextGenerator)
        predictor.expect_streamable(**options)

        def written(entries: list[tuple[Any, int, Outlet]]) -> list[Any]:
            for _, number, its in entries:
                its.begin(number)

            def put(place: int, piece: str) -> None:
                _, number, its = entries[place]
                its.put(number, piece)

            return predictor.stream_all([record.fields["source"] for record, _, _ in entries], put, **options)

        return written

    call = Call(
        "generate", name, prompts, options, compute, "stream", lambda record, number, _: (record, number, outlet)
    )
    model, job, tokens = await submit(request, call)
    events = _events(request, job, outlet, _head(model.name), tokens if usage else None)
    return StreamingResponse(events, media_type="text/event-stream", headers={"Cache-Control": "no-store"})


async def _events(
    request: Request, job: Job, outlet: Outlet, head: dict[str, Any], tokens: list[int] | None
) -> AsyncIterator[str]:
    """Yield an event for each piece, one that ends each text, and [DONE]; an error is an event, too."""
    end = asyncio.get_running_loop().time() + request.app.state.settings.timeout
    try:
        async with asyncio.timeout_at(end):
            while not (job.future.done() and outlet.pieces.empty()):
                next_piece = asyncio.ensure_future(outlet.pieces.get())
                await asyncio.wait({next_piece, job.future}, return_when=asyncio.FIRST_COMPLETED)
                if next_piece.done():
                    number, piece = next_piece.result()
                    yield _event({**head, "choices": [_choice(number, piece, None)]})
                else:
                    next_piece.cancel()
            found = job.future.result()
        for number, (_, one) in enumerate(found):
            yield _event({**head, "choices": [_choice(number, "", _reason(one))]})
        if tokens is not None:
            written = [len(one.tokens) for _, one in found]
            yield _event({**head, "choices": [], "usage": _usage(tokens, written)})
        yield "data: [DONE]\n\n"
    except TimeoutError:
        yield _problem(too_late(request.app.state.settings.timeout))
    except Exception as error:
        yield _problem(error)
    finally:
        job.cancel()


def _problem(error: Exception) -> str:
    return _event(json.loads(bytes(as_response(error).body)))


def _event(content: Any) -> str:
    return f"data: {json.dumps(content, ensure_ascii=False)}\n\n"
