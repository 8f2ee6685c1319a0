"""Faults against servers; the long form is quality/serve_faults.py."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import socket
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from http_client import Client
from serve_faults import Running, fuzz, leave, metric, overload, serving, stop_under_load

from allmask.model import load
from allmask.serve.server import JoinedWrites

TITLE = "/v1/tasks/title", {"input": "red cat runs here."}


def test_fuzzed_requests_are_answered_without_5xx(server: str):
    found = asyncio.run(fuzz(server, 250))
    assert found["failed"] == 0 and found["alive"], found
    assert {"200", "400", "404", "415", "422"} <= found["statuses"].keys()


def test_a_body_that_is_too_large(server: str):
    async def trial() -> None:
        client = Client(server)
        assert (await client.send("POST", TITLE[0], b'{"input": "' + b"a" * 200_000 + b'"}')).status == 413
        huge = await Client(server).send("POST", TITLE[0], b"{", Content_Length="9000000000")
        assert huge.status == 413

    asyncio.run(trial())


@asynccontextmanager
async def in_this_process(app: Any) -> AsyncIterator[str]:
    """Serve an application here; yields its address."""
    import uvicorn

    from allmask.serve.server import Protocol

    running = uvicorn.Server(uvicorn.Config(app, http=Protocol, lifespan="off", log_config=None, port=0))
    task = asyncio.create_task(running.serve())
    while not running.started:
        await asyncio.sleep(0.01)
    host, port = running.servers[0].sockets[0].getsockname()[:2]
    yield f"http://{host}:{port}"
    running.should_exit = True
    await task


def test_a_body_that_never_comes(app: Any):
    from allmask.serve.app import make_app
    from allmask.serve.settings import Settings

    async def trial() -> None:
        async with in_this_process(make_app(app.state.models, Settings(timeout=0.3))) as url:
            announced = await Client(url).send("POST", TITLE[0], b"{", Content_Length="20")
        assert announced.status == 408 and b"did not arrive in time" in announced.body

    asyncio.run(trial())


def test_clients_that_leave_are_not_computed_for(server: str):
    many = {"input": ["red cat."] * 4, "beams": 8}
    found = asyncio.run(leave(server, TITLE[0], many, clients=20))
    assert found["failed"] == 0
    assert found["tokens"] < 0.5 * 20 * 4 * 8 * 24, found  # what it would have cost to write all


def test_too_many_requests_and_sigterm(folder: Path, python: str):
    """Four times as many clients as there is room for; batches of one, so that a queue builds up. Then SIGTERM."""
    limits = ("--queue", 4, "--max-items", 4, "--batch", 1)
    with serving(folder / "writer", "--tasks", "title", *limits, python=python) as server:
        found = asyncio.run(overload(server, 1.0, 20, TITLE[0], {**TITLE[1], "beams": 8}))
        assert found["failed"] == 0 and found["statuses"][429] > 0 and found["statuses"][200] > 0, found
        assert found["memory_mb"]["most"] < found["memory_mb"]["before"] + 100
        found = asyncio.run(stop_under_load(server, *TITLE, clients=6, after=0.5))
        assert found["failed"] == 0 and found["outcomes"].get("200", 0) > 2, found


def test_workers_share_their_metrics_and_lose_no_request(folder: Path, serve_here: Callable, warm_spawn: None):
    """The parent is this process."""

    def trial(server: Running) -> None:
        async def ask() -> None:
            for _ in range(8):
                assert (await Client(server.url).post(*TITLE)).status == 200
            for _ in range(50):  # a request is counted just after it is answered
                if (counted := await metric(server.url, "allmask_requests_total")) == 8:
                    break
                await asyncio.sleep(0.1)
            assert counted == 8
            assert await metric(server.url, "allmask_queue_limit") == 2 * 512

        asyncio.run(ask())
        found = asyncio.run(stop_under_load(server, *TITLE, clients=6, after=0.5))
        assert found["failed"] == 0 and found["outcomes"].get("200", 0) > 2, found

    assert serve_here(trial, folder / "writer", "--workers", 2, "--tasks", "title").code == 0


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux can drop what arrives for a socket")
def test_what_waits_is_accepted_and_nothing_else_comes():
    from allmask.serve.server import refuse_new

    with socket.create_server(("127.0.0.1", 0)) as listener, socket.socket() as late:
        place = listener.getsockname()
        with socket.create_connection(place) as early:
            refuse_new(listener)
            late.settimeout(0.2)
            with pytest.raises(TimeoutError):
                late.connect(place)
            early.sendall(b"red")
            accepted, _ = listener.accept()
            with accepted:
                assert accepted.recv(3) == b"red"
                accepted.sendall(b"cat")
            assert early.recv(3) == b"cat"
            listener.setblocking(False)
            with pytest.raises(BlockingIOError):
                listener.accept()


def test_keys(app: Any, monkeypatch: pytest.MonkeyPatch):
    from starlette.testclient import TestClient

    from allmask.cli.serve import settings_of
    from allmask.serve.app import make_app

    monkeypatch.setenv("ALLMASK_API_KEY", "secret 密")
    client = TestClient(make_app(app.state.models, settings_of({"port": 0})))
    good, bad = "Bearer secret 密".encode(), b"Bearer secret"
    for path in ("/v1/models", "/metrics"):
        assert client.get(path).status_code == 401
        assert client.get(path, headers={b"Authorization": bad}).json()["detail"] == "the key is wrong"
        assert client.get(path, headers={b"Authorization": good}).status_code == 200
    assert client.post(TITLE[0], json=TITLE[1]).status_code == 401
    assert client.get("/health").status_code == client.get("/ready").status_code == 200


def test_other_origins(app: Any):
    """Web pages of others are not allowed to read answers, unless --cors names them."""
    from starlette.testclient import TestClient

    from allmask.serve.app import make_app
    from allmask.serve.settings import Settings

    origin = {"Origin": "https://a.example", "Access-Control-Request-Method": "POST"}
    assert "access-control-allow-origin" not in TestClient(app).options("/v1/models", headers=origin).headers
    allowed = TestClient(make_app(app.state.models, Settings(cors=("https://a.example",))))
    assert allowed.get("/v1/models", headers=origin).headers["access-control-allow-origin"] == "https://a.example"


def test_a_replaced_model_is_used_after_a_reload(folder: Path, serve_here: Callable, tmp_path: Path):
    """The folder is written over in place, then broken, then good again; two models are served at once."""
    shutil.copytree(folder / "writer", tmp_path / "replaced")
    weights = next((tmp_path / "replaced").glob("*.safetensors"))
    another = load(tmp_path / "replaced")
    another.body.embedding.tokens.weight.data.neg_()
    another.save(tmp_path / "another")
    changed = (tmp_path / "another" / weights.name).read_bytes()

    async def ask(server: Running) -> None:
        client = Client(server.url)

        async def vector(name: str) -> list[float]:
            answer = await client.post("/v1/tasks/embed", {"input": "red cat", "model": name})
            return answer.json()["output"]["vector"]

        async def reloaded(result: str) -> None:
            name = f'allmask_reloads_total{{result="{result}"}}'
            before = await metric(server.url, name)
            os.kill(server.pid, signal.SIGHUP)
            end = time.monotonic() + 60
            while await metric(server.url, name) == before:
                assert time.monotonic() < end
                await asyncio.sleep(0.05)

        before, beside = await vector("replaced"), await vector("writer")
        weights.write_bytes(changed)
        assert await vector("replaced") == before
        await reloaded("done")
        after = await vector("replaced")
        assert after != before and await vector("writer") == beside
        weights.write_bytes(b"broken")
        await reloaded("failed")
        assert await vector("replaced") == after

    ran = serve_here(lambda server: asyncio.run(ask(server)), tmp_path / "replaced", folder / "writer")
    assert ran.code == 0 and "reload: " in ran.err and "the old models stay" in ran.err


def test_answers_are_sent_at_once():
    """asyncio sets TCP_NODELAY if a socket names its protocol; without it, the second packet waits for 40 ms."""
    from allmask.serve.server import bind
    from allmask.serve.settings import Settings

    with bind(Settings(port=0)) as listener:
        assert listener.proto == socket.IPPROTO_TCP


def test_head_and_body_are_sent_together():
    class Transport:
        def __init__(self) -> None:
            self.calls: list[Any] = []

        def write(self, data: bytes) -> None:
            self.calls.append(data)

        def close(self) -> None:
            self.calls.append("close")

        def is_closing(self) -> bool:
            return "close" in self.calls

    async def body() -> None:
        inner = Transport()
        joined = JoinedWrites(inner, asyncio.get_running_loop())
        joined.write(b"head")
        assert inner.calls == []
        joined.write(b" and body")
        assert inner.calls == [b"head and body"] and not joined.is_closing()
        joined.write(b"an event")
        joined.write(b"")
        joined.write(b"")
        await asyncio.sleep(0)
        assert inner.calls.pop() == b"an event" and len(inner.calls) == 1
        joined.write(b"another")
        await asyncio.sleep(0)
        assert inner.calls.pop() == b"another"
        joined.write(b"the last")
        joined.close()
        await asyncio.sleep(0)
        assert inner.calls == [b"head and body", b"the last", "close"] and joined.is_closing()

    asyncio.run(body())


def test_slow_heads_are_closed(monkeypatch: pytest.MonkeyPatch):
    """A connection that sends half a head is closed after a while."""
    from starlette.applications import Starlette

    monkeypatch.setattr("allmask.serve.server.HEADER_SECONDS", 0.2)

    async def trial() -> None:
        async with in_this_process(Starlette()) as url:
            host, _, port = url.removeprefix("http://").partition(":")
            reader, writer = await asyncio.open_connection(host, int(port))
            writer.write(b"GET / HTTP/1.1\r\nHost:")
            assert await asyncio.wait_for(reader.read(), 60) == b""
            writer.close()

    asyncio.run(trial())


def test_usage_errors(cli: Callable, folder: Path, server: str):
    taken = server.rpartition(":")[2]
    for words, code, said in (
        (["nowhere"], 4, "no such"),
        ([folder / "writer", folder / "writer"], 2, "two models are called 'writer'"),
        ([folder / "writer", "--tasks", "tittle"], 2, "did you mean title"),
        ([folder / "writer", "--max-items", 9, "--queue", 8], 2, "more than the queue holds"),
        ([folder / "writer", "--port", taken], 5, "choose another --port"),
        ([folder / "writer", "--tasks", "classify"], 4, "can do none of classify"),
        ([folder / "writer", "--page", "--api-key", "a"], 2, "--page has no key"),
    ):
        ran = cli("serve", *words, *([] if "--port" in words else ["--port", 0]))  # the usual one may be taken
        assert ran.code == code and said in ran.err, (words, ran)
