"""Faults that a server must survive, against real processes on 127.0.0.1: what is sent, and what came of it.

    python quality/serve_faults.py MODEL                 # all of them, in the long form
    python quality/serve_faults.py MODEL --only fuzz --count 10000

    fuzz       random bodies, headers and lines of requests; none may be answered with 5xx, or not at all
    overload   four times as many clients as the queue holds: 429, /health answers, memory is bounded
    stop       SIGTERM under load; no request that was accepted may stay without an answer
    leave      clients that leave; the server must not compute for them

Prints a line of JSON for each, and exits with 1 if one of them failed. The tests run the same in a short form.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[1] / "benchmarks"))  # some files of both folders have the same name

from http_client import Answer, Client, Refused

PATIENCE = 60  # seconds for an answer
TEXT = "We show that the attention mask decides every role of a Transformer. 北京欢迎你。"


# ---- servers -----------------------------------------------------------------------------------------------------


@dataclass
class Running:
    """A server process."""

    process: subprocess.Popen[str]
    url: str
    said: list[str] = field(default_factory=list)

    @property
    def pid(self) -> int:
        return self.process.pid

    def memory(self) -> int:
        """Resident memory in MB, with that of its children."""
        total = 0
        for pid in [self.pid, *_children(self.pid)]:
            with suppress(OSError):
                pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
                total += pages * os.sysconf("SC_PAGE_SIZE")
        return total >> 20

    def cpu(self) -> float:
        """CPU time in seconds, with that of its children."""
        total = 0
        for pid in [self.pid, *_children(self.pid)]:
            with suppress(OSError):
                words = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
                total += int(words[11]) + int(words[12])  # user and system
        return total / os.sysconf("SC_CLK_TCK")

    def stop(self, number: int = signal.SIGTERM, timeout: float = PATIENCE) -> int:
        self.process.send_signal(number)
        return self.process.wait(timeout)


def _children(pid: int) -> list[int]:
    with suppress(OSError):
        return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return []


@contextmanager
def serving(
    *words: object, python: str = sys.executable, environment: dict[str, str] | None = None
) -> Iterator[Running]:
    """Start `allmask serve` with these words on a free port; it is ended at the end."""
    command = [python, "-m", "allmask", "serve", *map(str, words), "--port", "0"]
    env = {**os.environ, **(environment or {})}
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=env) as process:
        said: list[str] = []
        try:
            assert process.stderr is not None
            for line in process.stderr:
                said.append(line)
                if found := re.search(r"at (http://\S+)", line):
                    break
            else:
                raise RuntimeError(f"the server did not start: {''.join(said)}")
            yield Running(process, found[1], said)
        finally:
            process.terminate()
            try:
                process.wait(PATIENCE)
            except subprocess.TimeoutExpired:
                process.kill()


# ---- fuzzing -----------------------------------------------------------------------------------------------------

ODD_PATHS = ("/", "/v1/tasks/%2e%2e%2f", "/../../etc/passwd", "/" + "a" * 3000, "*", "/%ff%00", "/?q=%")
PATHS = ("/v1/tasks/title", "/v1/tasks/embed", "/v1/tasks/fill", "/v1/tasks/generate", "/v1/embeddings",
         "/v1/completions", "/v1/tasks/classify", "/v1/tasks/none", "/v1/models", "/docs", "/health")  # fmt: skip
NAMES = ("input", "prompt", "model", "beams", "n_best", "max_new", "min_new", "length_penalty", "end_bias", "top",
         "no_repeat_ngram", "sample", "temperature", "top_k", "top_p", "seed", "pool", "normalize", "stream", "n",
         "max_tokens", "encoding_format", "stop", "echo", "zzz", "", "_", "__class__")  # fmt: skip
TEXTS = ("", " ", "a", "[MASK]", "北京[MASK]你", "\0", "\ud800", "\U0010ffff", "‮", "../../etc/passwd", "x" * 5000,
         "[CLS] [SEP] [PAD]", "a " * 700, "\n\r\t", "{}", "mean", "cls", "float", "base64")  # fmt: skip
NUMBERS = (0, 1, 2, 3, -1, 5, 64, 10**6, 10**9, 2**63, 10**30, 0.5, -0.0, 1e308, -1e308, 1e-308, float("inf"),
           float("nan"), 20, -20)  # fmt: skip


def value(rng: random.Random, depth: int = 0) -> Any:
    """A random JSON value."""
    kind = rng.random()
    if kind < 0.45:
        return rng.choice(TEXTS)
    if kind < 0.7:
        return rng.choice(NUMBERS)
    if kind < 0.8:
        return rng.choice((None, True, False))
    if depth > 3:
        return []
    if kind < 0.9:
        return [
            value(rng, depth + 1) for _ in range(rng.choice((0, 1, 2, 3, 300)) if depth == 0 else rng.randint(0, 3))
        ]
    keys = ("source", "text", "text_b", "context", "question", "choices", "tokens", *NAMES)
    return {rng.choice(keys): value(rng, depth + 1) for _ in range(rng.randint(0, 4))}


def body(rng: random.Random, path: str) -> bytes:
    """A body: half of them are sensible, perhaps but for a field or two; some are not JSON at all."""
    kind = rng.random()
    if kind < 0.1:
        return rng.randbytes(rng.choice((0, 1, 10, 1000)))
    if kind < 0.15:
        depth = rng.choice((10, 1000, 100_000))
        return b'{"input":' + b"[" * depth + b"]" * rng.choice((0, depth)) + b"}"
    base: dict[str, Any] = {} if kind < 0.5 else {"prompt" if path == "/v1/completions" else "input": "a [MASK] cat"}
    base |= {rng.choice(NAMES): value(rng) for _ in range(rng.choice((0, 0, 1, 1, 2, 3)))}
    made = json.dumps(base, ensure_ascii=rng.random() < 0.5).encode("utf-8", "surrogatepass")
    if kind > 0.95:
        made = made[: rng.randrange(len(made) + 1)]
    return made


def request(rng: random.Random) -> bytes:
    """A whole request, mostly well-formed HTTP."""
    method, path = ("POST", rng.choice(PATHS)) if rng.random() > 0.1 else (
        rng.choice(("GET", "PUT", "DELETE", "OPTIONS", "HEAD", "PATCH", "BREW", "\x00")),
        rng.choice((*PATHS, *ODD_PATHS)),
    )  # fmt: skip
    content = body(rng, path)
    headers = {"Host": "x", "Content-Type": "application/json", "Content-Length": str(len(content))}
    if rng.random() < 0.2:
        name, text = rng.choice((
            ("Content-Type", "text/plain"), ("Content-Type", ""), ("Content-Type", "application/json; charset=gbk"),
            ("Content-Length", "-1"), ("Content-Length", "9" * 30), ("Content-Length", "abc"), ("Host", ""),
            ("Transfer-Encoding", "chunked"), ("Transfer-Encoding", "gzip"), ("Authorization", "Bearer \xff\xfe"),
            ("Expect", "100-continue"), ("Connection", "close"), ("Connection", "upgrade"), ("Upgrade", "websocket"),
            ("X" * 200, "y" * 5000), ("Range", "bytes=0-"), ("Content-Encoding", "gzip"), ("Accept", "nothing/at-all"),
        ))  # fmt: skip
        headers[name] = text
    head = "".join(f"{name}: {text}\r\n" for name, text in headers.items())
    return f"{method} {path} HTTP/1.1\r\n{head}\r\n".encode("latin-1") + content


async def fuzz(url: str, count: int, seed: int = 0, clients: int = 4) -> dict[str, Any]:
    """Send random requests, each on its own connection. `silent` were left without any answer, and are listed."""
    statuses: Counter[str] = Counter()
    silent: list[int] = []
    numbers = iter(range(count))

    async def work() -> None:
        for number in numbers:
            client = Client(url)
            try:
                async with asyncio.timeout(PATIENCE):
                    status = (await client.raw(request(random.Random(f"{seed} {number}")))).status
                statuses[str(status)] += 1
                if status >= 500:
                    silent.append(number)
            except (ConnectionError, ValueError):
                statuses["closed"] += 1
            except TimeoutError:
                statuses["silent"] += 1
                silent.append(number)
            await client.close()

    # a body that is announced and never sent is waited for, so such a client gives up
    await asyncio.gather(*(work() for _ in range(clients)))
    failed = sum(found for status, found in statuses.items() if status.startswith("5") or status == "silent")
    alive = (await Client(url).get("/health")).status == 200
    return {"requests": count, "failed": failed, "alive": alive, "statuses": dict(statuses), "numbers": silent[:20]}


# ---- overload ----------------------------------------------------------------------------------------------------


async def overload(server: Running, seconds: float, clients: int, path: str, content: Any) -> dict[str, Any]:
    """Keep more clients busy than the queue holds; note the statuses, the slowest /health, and memory."""
    statuses: Counter[int] = Counter()
    slowest, before, most = 0.0, server.memory(), 0
    without_hint, end = 0, time.monotonic() + seconds

    async def ask() -> None:
        nonlocal without_hint
        client = Client(server.url)
        while time.monotonic() < end:
            answer = await client.post(path, content)
            statuses[answer.status] += 1
            if answer.status == 429:
                without_hint += "retry-after" not in answer.headers
                await asyncio.sleep(0.05)
        await client.close()

    async def watch() -> None:
        nonlocal slowest, most
        client = Client(server.url)
        while time.monotonic() < end:
            start = time.monotonic()
            assert (await client.get("/health")).status == 200
            slowest = max(slowest, time.monotonic() - start)
            most = max(most, server.memory())
            await asyncio.sleep(0.2)
        await client.close()

    await asyncio.gather(watch(), *(ask() for _ in range(clients)))
    failed = sum(found for status, found in statuses.items() if status not in (200, 429)) + without_hint
    memory = {"before": before, "most": most, "after": server.memory()}
    return {"seconds": seconds, "clients": clients, "failed": failed, "statuses": dict(statuses),
            "slowest_health_ms": round(1000 * slowest), "memory_mb": memory}  # fmt: skip


# ---- SIGTERM -----------------------------------------------------------------------------------------------------


async def stop_under_load(server: Running, path: str, content: Any, clients: int, after: float) -> dict[str, Any]:
    """Send SIGTERM while clients ask; a request that went out on a connection must have a whole answer."""
    outcomes: Counter[str] = Counter()
    stopped = False

    async def ask(keep: bool) -> None:
        client = Client(server.url)
        while True:
            try:
                answer = await client.post(path, content)
            except Refused:
                outcomes["refused"] += 1
                return
            except ConnectionError:
                outcomes["dropped"] += 1
                return
            outcomes[str(answer.status)] += 1
            if stopped and answer.headers.get("connection") == "close":
                outcomes["told to leave"] += 1
                await client.close()
                return
            if not keep:
                await client.close()

    async def terminate() -> None:
        nonlocal stopped
        await asyncio.sleep(after)
        stopped = True
        server.process.send_signal(signal.SIGTERM)

    await asyncio.gather(terminate(), *(ask(number % 2 == 0) for number in range(clients)))
    code = await asyncio.to_thread(server.process.wait, PATIENCE)
    bad = outcomes["dropped"] + sum(found for status, found in outcomes.items() if status.startswith("5"))
    return {"failed": bad + (code != 0), "code": code, "outcomes": dict(outcomes)}


# ---- clients that leave ------------------------------------------------------------------------------------------


async def metric(url: str, name: str) -> float:
    """The sum of a metric over its labels."""
    text = (await Client(url).get("/metrics")).body.decode()
    return sum(float(line.split()[-1]) for line in text.splitlines() if re.match(rf"{re.escape(name)}[{{ ]", line))


async def leave(url: str, path: str, content: Any, clients: int) -> dict[str, Any]:
    """Clients ask and leave at once. How long until the queue is empty, and how many tokens were written for them?"""
    before = await metric(url, "allmask_tokens_total")
    for _ in range(clients):
        client = Client(url)
        await client.open()
        assert client.writer is not None
        made = json.dumps(content).encode()
        head = (
            f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(made)}\r\n\r\n"
        )
        client.writer.write(head.encode() + made)
        await client.writer.drain()
        await client.close()
    start = time.monotonic()
    while await metric(url, "allmask_queue_inputs") and time.monotonic() - start < PATIENCE:
        await asyncio.sleep(0.02)
    seconds = time.monotonic() - start
    answer: Answer = await Client(url).post(path, {**content, "max_new": 2})
    tokens = await metric(url, "allmask_tokens_total") - before
    return {"clients": clients, "seconds": round(seconds, 2), "tokens": tokens, "failed": int(answer.status != 200)}


# ---- the long form -----------------------------------------------------------------------------------------------


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="a model that writes titles")
    parser.add_argument("--only", choices=("fuzz", "overload", "stop", "leave"))
    parser.add_argument("--count", type=int, default=10_000, help="fuzzed requests")
    parser.add_argument("--seconds", type=float, default=60, help="of overload")
    parser.add_argument("--times", type=int, default=20, help="SIGTERM")
    given = parser.parse_args(argv)
    failed = 0

    def report(name: str, found: dict[str, Any]) -> None:
        nonlocal failed
        failed += bool(found["failed"])
        print(json.dumps({"fault": name, **found}, ensure_ascii=False), flush=True)

    title = "/v1/tasks/title", {"input": TEXT}
    if given.only in (None, "fuzz"):
        with serving(given.model, "--timeout", 5) as server:
            found = asyncio.run(fuzz(server.url, given.count))
            report("fuzz", {**found, "memory_mb": server.memory()})
    if given.only in (None, "overload"):
        with serving(given.model, "--queue", 32, "--max-items", 8, "--batch", 8) as server:
            report("overload", asyncio.run(overload(server, given.seconds, 4 * (32 + 8), *title)))
    if given.only in (None, "stop"):
        rounds = []
        for number in range(given.times):
            with serving(given.model) as server:
                rounds.append(asyncio.run(stop_under_load(server, *title, clients=16, after=0.3 + 0.1 * (number % 5))))
        outcomes = sum((Counter(one["outcomes"]) for one in rounds), Counter())
        report("stop", {"times": len(rounds), "failed": sum(one["failed"] for one in rounds), "outcomes": outcomes})
    if given.only in (None, "leave"):
        with serving(given.model) as server:
            report("leave", asyncio.run(leave(server.url, title[0], {**title[1], "beams": 8}, 50)))
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
