"""Tiny models for every task, an application, and a server that listens, both in this process."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

with suppress(ImportError):  # before a test has workers: imported then, it counts in their files in this process, too
    import prometheus_client  # noqa: F401

sys.path.insert(0, str(Path(__file__).parents[2] / "quality"))

from serve_faults import Running

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


@pytest.fixture
def serve_here(cli: Any, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """`serve_here(trial, "folder", …)` runs `allmask serve` in this process, which gets the signals of the trial.

    The trial gets a `Running` and runs in another thread; then the server is ended, and what the command said returned.
    """
    from allmask.serve import server, workers

    def run(trial: Callable[[Running], None], *words: object) -> Any:
        bound, failed, ended = list[Any](), list[BaseException](), threading.Event()

        class Here:
            """This process, as that of a server."""

            pid = os.getpid()

            def send_signal(self, number: int) -> None:
                os.kill(self.pid, number)

            def wait(self, timeout: float) -> int:
                """The code of a server that has ended. It is still to return, but nothing else is done here."""
                assert ended.wait(timeout)
                return 0

        def attempt() -> None:
            try:
                assert ready.wait(300)
                trial(Running(Here(), server.address(bound[0])))  # type: ignore[arg-type]
            except BaseException as error:
                failed.append(error)
            while not ended.wait(0.5):
                os.kill(os.getpid(), signal.SIGTERM)

        ready = threading.Event()
        bind, serving = server.bind, workers.run

        def binding(settings: Any) -> Any:
            bound.append(bind(settings))
            return bound[0]

        def running(plan: Any, listener: Any, say: Callable[[str], None]) -> int:
            def saying(message: str) -> None:
                say(message)
                ready.set()

            try:
                return serving(plan, listener, saying)
            finally:
                ended.set()

        numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
        handlers = {number: signal.getsignal(number) for number in numbers}
        thread = threading.Thread(target=attempt, daemon=True)
        with monkeypatch.context() as patch:
            patch.setattr(server, "bind", binding)
            patch.setattr(workers, "run", running)
            patch.setenv(workers.FOLDER, "")  # so that it is as before afterwards
            patch.delenv(workers.FOLDER)
            thread.start()
            try:
                ran = cli("serve", *words, "--port", 0)
            finally:
                ended.set()
                ready.set()
                thread.join(60)
                for number, handler in handlers.items():
                    signal.signal(number, handler)
        if failed:
            raise failed[0]
        return ran

    return run


@pytest.fixture(scope="session")
def server(folder: Path) -> Iterator[str]:
    """The address of three models, served by a thread of this process, for tests that do not end it."""
    from allmask.serve import server as listening
    from allmask.serve.settings import Settings
    from allmask.serve.workers import Plan, run

    shutil.copytree(folder / "writer", folder / "replaced")
    settings = Settings(port=0, max_body=50_000, grace=5)
    plan = Plan([str(folder / name) for name in ("writer", "gpt2", "replaced")], settings)
    made: list[listening.Server] = []

    class Noted(listening.Server):
        def __init__(self, *how: Any):
            super().__init__(*how)
            made.append(self)

    said, listener = list[str](), listening.bind(settings)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(listening, "Server", Noted)
        thread = threading.Thread(target=run, args=(plan, listener, said.append))
        thread.start()
        while not said:
            assert thread.is_alive(), "the server did not start"
            time.sleep(0.01)
    assert said == [f"serving writer, gpt2, replaced at {listening.address(listener)} "
                    f"(what there is: {listening.address(listener)}/docs)"]  # fmt: skip
    yield listening.address(listener)
    made[0].should_exit = True
    thread.join(60)
    assert not thread.is_alive()
