"""Tiny models for every task, an application in this process, and server processes."""

from __future__ import annotations

import asyncio
import json
import shutil
import sys
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "quality"))

from serve_faults import Running, serving

from allmask.model import load
from allmask.registry import TASKS
from allmask.tasks.task import save_task
from tests import tiny

RECORDS: dict[str, list[dict[str, Any]]] = {
    "translate": [{"source": row["source"], "target": row["target"]} for row in tiny.chinese(12)],
    "classify": [{"text": row["source"], "label": "ab"["北" in row["source"]]} for row in tiny.chinese(24)],
    "choose": [{"context": row["source"], "choices": [row["target"], "red cat"], "label": 0}
               for row in tiny.chinese(9)],
    "tag": [{"tokens": [*row["source"]], "tags": ["B-地名", *["O"] * (len(row["source"]) - 1)]}
            for row in tiny.chinese(9)],
    "answer": [{"question": "red cat", "context": row["source"], "answer": row["source"][:2], "start": 0}
               for row in tiny.chinese(9)],
}  # fmt: skip


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model for each task; their heads are new, so what they predict is arbitrary but fixed."""
    folder = tmp_path_factory.mktemp("served")
    tiny.writer(folder / "writer")
    tiny.gpt2(folder / "gpt2")
    body = tiny.bert(folder / "bert", ["lm"])
    for name, rows in RECORDS.items():
        file = tiny.write_jsonl(folder / f"{name}.jsonl", rows)
        short = {"max_target": 8} if name == "translate" else {}
        task, records, _ = TASKS[name](**short).read_data(file, None, "stop", Counter())
        model = load(body)
        task = task.fitted(model)
        task.prepare(model, records).save(folder / name)
        save_task(task, folder / name)
    return folder


@pytest.fixture(scope="session")
def app(folder: Path) -> Any:
    from allmask.serve.app import make_app
    from allmask.serve.models import load_models
    from allmask.serve.settings import Settings

    settings = Settings(max_items=40, queue=64, batch=8, max_tokens=4096, max_body=50_000)
    return make_app(load_models([str(folder / name) for name in ("writer", "gpt2", *RECORDS)], settings), settings)


@pytest.fixture
def ask(app: Any) -> Callable[..., Any]:
    """`ask(path, content)` posts to the application in this process; `ask([(path, content), …])` does so at once."""
    import httpx

    async def all_of(requests: list[tuple[str, Any]]) -> list[httpx.Response]:
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://test", timeout=60) as client:
            waiting: list[Awaitable[httpx.Response]] = [
                client.post(path, content=json.dumps(content), headers={"Content-Type": "application/json"})
                for path, content in requests
            ]
            return await asyncio.gather(*waiting)

    def ask(path: Any, content: Any = None) -> Any:
        return asyncio.run(all_of(path)) if isinstance(path, list) else asyncio.run(all_of([(path, content)]))[0]

    return ask


@pytest.fixture(scope="session")
def server(folder: Path, python: str) -> Iterator[Running]:
    """A server process with three models, for tests that do not end it; one of them is replaced by a test."""
    shutil.copytree(folder / "writer", folder / "replaced")
    models = (folder / "writer", folder / "gpt2", folder / "replaced")
    with serving(*models, "--max-body", 50_000, python=python) as running:
        yield running
