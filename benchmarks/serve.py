"""Titles and embeddings over HTTP under load: latency and requests per second, against other servers.

    python benchmarks/serve.py [--quick] [--only titles|embeddings] [--seconds 10] [--peers PYTHON]
    python benchmarks/serve.py --soak 30 [--rate 5]        # memory over 30 minutes, 8 clients

Embeddings: MiniLM, texts of 8 to 64 tokens, vectors of length 1. Titles: 128 source tokens and exactly 16 new ones,
greedy, by allmask-en; the peer is a GPT-2 of its size, since transformers cannot cache a prefix mask. One text per
request. The peers are transformers' pipelines behind FastAPI (serve_peer.py), which batch what waits, and, for
embeddings, infinity-emb with ONNX Runtime in fp32 and int8, the fastest server for CPUs that pip installs. They need
packages that allmask does not: --peers names the Python of an environment with fastapi and transformers, --infinity
that of one with infinity-emb[server,optimum], optimum-onnx[onnxruntime], "transformers<5" and "click<8.2". It imports
BetterTransformer and BetterTransformerManager from optimum.bettertransformer, which is gone, but not used with ONNX:
write a file with two empty classes there. allmask computes in the precision that it chooses itself (auto). All servers
run at the same time and are loaded in turn. Each computes with as many threads as there are cores; on a machine that
others use, choose --threads 1: threads that share a core with another program wait for each other. "CPU ms" is the CPU
time of a server per request, which depends less on what else the machine does. Overhead: the mean latency of one
client, less the mean time that the server says it computed.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "quality"))

from http_client import Client
from serve_faults import Running, metric, serving

from allmask.devices import usable_cores

CLIENTS = (1, 8, 64)
NEW, SOURCE = 16, 128
ROUNDS = 2


@dataclass(frozen=True)
class Case:
    """A server, and what is asked of it."""

    name: str
    server: Running
    path: str
    content: Callable[[str], Any]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=("titles", "embeddings"))
    parser.add_argument("--seconds", type=float, default=10.0, help="for each server, number of clients and round")
    parser.add_argument("--peers", default=sys.executable, metavar="PYTHON", help="of an environment with the peers")
    parser.add_argument("--infinity", metavar="PYTHON", help="of an environment with infinity-emb; default: --peers")
    parser.add_argument("--threads", type=int, default=usable_cores(), help="of each server (ONNX takes all)")
    parser.add_argument("--workers", type=int, default=1, help="processes of allmask")
    parser.add_argument("--soak", type=float, metavar="MINUTES", help="watch the memory of allmask instead")
    parser.add_argument("--rate", type=float, help="requests per second of the soak; without it, as many as it can")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--quick", action="store_true", help="less work: to check that it runs, not to measure")
    given = parser.parse_args()
    given.infinity = given.infinity or given.peers
    os.environ["OMP_NUM_THREADS"] = str(given.threads)  # inherited by all servers
    if given.soak:
        print(json.dumps(soak(given.soak, given.rate)))
        return
    seconds, clients = (1.0, (1, 4)) if given.quick else (given.seconds, CLIENTS)
    for job in ("titles", "embeddings"):
        if given.only in (None, job):
            texts = titles_texts() if job == "titles" else embeddings_texts()
            with ExitStack() as stack:
                cases = [*JOBS[job](stack, given)]
                rows = asyncio.run(measure(cases, texts, clients, seconds, 1 if given.quick else ROUNDS))
                overhead = asyncio.run(overhead_of(cases[0], texts, seconds))
            import timing  # only now: it limits the number of threads

            os.environ["OMP_NUM_THREADS"] = str(given.threads)
            os.environ.pop("MKL_NUM_THREADS", None)
            about = timing.versions("starlette", "uvicorn") | peer_versions(given)
            about |= {"cores": usable_cores(), "threads": given.threads, "workers": given.workers}
            about |= {"overhead of HTTP and queue, ms": round(overhead, 2)}
            timing.show(f"{job.capitalize()} over HTTP", rows, about, given.json)


# ---- load --------------------------------------------------------------------------------------------------------


async def measure(
    cases: list[Case], texts: list[str], clients: tuple[int, ...], seconds: float, rounds: int
) -> list[dict[str, Any]]:
    for case in cases:
        await load(case, texts, 2, 1.0)  # warm up
    times: dict[tuple[str, int], list[float]] = {}
    work: dict[tuple[str, int], list[float]] = {}
    rates: dict[tuple[str, int], list[float]] = {}
    for _ in range(rounds):
        for count in clients:
            for case in cases:
                start, worked = time.perf_counter(), case.server.cpu()
                taken = await load(case, texts, count, seconds)
                work.setdefault((case.name, count), []).append(case.server.cpu() - worked)
                times.setdefault((case.name, count), []).extend(taken)
                rates.setdefault((case.name, count), []).append(len(taken) / (time.perf_counter() - start))
    rows = []
    for (name, count), taken in times.items():
        cuts = statistics.quantiles(taken, n=100) if len(taken) > 1 else taken * 99
        rate = statistics.mean(rates[name, count])
        ours = statistics.mean(rates["allmask", count])
        cpu, our_cpu = (sum(work[who, count]) / len(times[who, count]) for who in (name, "allmask"))
        rows.append({
            "clients": count, "server": name, "p50 ms": round(1000 * cuts[49], 2), "p99 ms": round(1000 * cuts[98], 2),
            "requests/s": round(rate, 1), "allmask ×": round(ours / rate, 2), "CPU ms": round(1000 * cpu, 2),
            "in CPU ×": round(cpu / our_cpu, 2),
        })  # fmt: skip
    return rows


async def load(case: Case, texts: list[str], clients: int, seconds: float, pause: float = 0.0) -> list[float]:
    """Keep so many clients busy for a while; return the time that each request took. They pause after each answer."""
    end, times = time.perf_counter() + seconds, []
    rng = random.Random(0)

    async def ask() -> None:
        client = Client(case.server.url)
        while (start := time.perf_counter()) < end:
            answer = await client.post(case.path, case.content(rng.choice(texts)))
            assert answer.status == 200, answer
            times.append(time.perf_counter() - start)
            if pause:
                await asyncio.sleep(pause)
        await client.close()

    await asyncio.gather(*(ask() for _ in range(clients)))
    return times


async def overhead_of(case: Case, texts: list[str], seconds: float) -> float:
    """The mean time of a request that was not spent computing, in ms; one client."""

    async def computed() -> tuple[float, float]:
        name = "allmask_batch_seconds"
        return await metric(case.server.url, f"{name}_sum"), await metric(case.server.url, f"{name}_count")

    before = await computed()
    taken = await load(case, texts, 1, seconds)
    after = await computed()
    return 1000 * (statistics.mean(taken) - (after[0] - before[0]) / (after[1] - before[1]))


def embeddings_texts() -> list[str]:
    from texts import pieces

    import allmask

    rng = random.Random(0)
    tokenizer = allmask.load("minilm").tokenizer
    assert tokenizer is not None
    return [piece.text for piece in pieces(tokenizer, [rng.randint(8, 64) for _ in range(256)])]


def titles_texts() -> list[str]:
    from texts import pieces

    import allmask

    tokenizer = allmask.load("allmask-en").tokenizer
    assert tokenizer is not None
    return [piece.text for piece in pieces(tokenizer, [SOURCE] * 128)]


# ---- servers -----------------------------------------------------------------------------------------------------


def titles(stack: ExitStack, given: argparse.Namespace) -> Iterator[Case]:
    server = stack.enter_context(serving("allmask-en", "--tasks", "title", "--workers", given.workers))
    options = {"min_new": NEW, "max_new": NEW}
    yield Case("allmask", server, "/v1/tasks/title", lambda text: {"input": text, **options})
    if has(given.peers, "fastapi"):
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        peer_writer(folder)
        for dtype in ("float32", "bfloat16"):
            server = stack.enter_context(peer(given.peers, "titles", folder, dtype))
            yield Case(f"transformers {dtype}", server, "/predict", lambda text: {"input": text})


def embeddings(stack: ExitStack, given: argparse.Namespace) -> Iterator[Case]:
    from allmask.checkpoints import resolve

    def ask(text: str) -> Any:
        return {"model": "minilm", "input": text}

    for name, precision in (("allmask", "auto"), ("allmask bf16", "bf16")):
        options = ("--tasks", "embed", "--workers", given.workers, "--precision", precision)
        yield Case(name, stack.enter_context(serving("minilm", *options)), "/v1/embeddings", ask)
    folder = str(resolve("minilm"))
    if has(given.peers, "fastapi"):
        for dtype in ("float32", "bfloat16"):
            server = stack.enter_context(peer(given.peers, "embeddings", folder, dtype))
            yield Case(f"transformers {dtype}", server, "/predict", lambda text: {"input": text})
    if has(given.infinity, "infinity_emb"):
        made = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        subprocess.run([given.infinity, "-c", EXPORT, folder, str(made)], check=True, capture_output=True)
        for precision in ("fp32", "int8"):
            server = stack.enter_context(infinity(given.infinity, made / precision, made / f"cache-{precision}"))
            yield Case(f"infinity-emb ONNX {precision}", server, "/embeddings", ask)


JOBS = {"titles": titles, "embeddings": embeddings}


def has(python: str, module: str) -> bool:
    code = f"import importlib.util, sys; sys.exit(importlib.util.find_spec({module!r}) is None)"
    found = subprocess.run([python, "-c", code], check=False).returncode == 0
    if not found:
        print(f"{module} is not installed: it is left out", file=sys.stderr)
    return found


def peer_versions(given: argparse.Namespace) -> dict[str, str]:
    code = "import importlib.metadata as m, sys\nfor name in sys.argv[1:]:\n"
    code += " try: print(name, m.version(name))\n except m.PackageNotFoundError: pass"
    found = ""
    for python, names in ((given.peers, "transformers fastapi"), (given.infinity, "infinity-emb onnxruntime")):
        command = [python, "-c", code, *names.split()]
        found += subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return dict(line.split() for line in found.splitlines())


def peer_writer(folder: str) -> None:
    """Write a GPT-2 with the shape and the vocabulary of allmask-en; its weights are random, its work is the same."""
    from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

    import allmask
    from allmask.checkpoints import resolve

    config = allmask.load("allmask-en").config
    names = {"n_embd": config.width, "n_layer": config.layers, "n_head": config.heads, "n_inner": config.ffn_width}
    made = GPT2Config(vocab_size=config.vocab_size, n_positions=512, bos_token_id=1, eos_token_id=1, **names)
    GPT2LMHeadModel(made).save_pretrained(folder)
    file = str(resolve("allmask-en") / "tokenizer.json")
    special = {"sep_token": "[SEP]", "cls_token": "[CLS]", "unk_token": "[UNK]", "pad_token": "[PAD]"}
    PreTrainedTokenizerFast(tokenizer_file=file, **special).save_pretrained(folder)
    settings = Path(folder, "tokenizer_config.json")  # transformers 5 writes a name that 4 does not know
    named = {**json.loads(settings.read_text()), "tokenizer_class": "PreTrainedTokenizerFast"}
    settings.write_text(json.dumps(named))


@contextmanager
def peer(python: str, task: str, folder: str, dtype: str) -> Iterator[Running]:
    values = {"PEER_MODEL": folder, "PEER_TASK": task, "PEER_DTYPE": dtype, "PEER_NEW": str(NEW)}
    port = free_port()
    words = ["-m", "uvicorn", "--app-dir", str(Path(__file__).parent), "serve_peer:app", "--log-level", "error"]
    with started([python, *words, "--port", str(port)], port, values, "/predict", {"input": "a"}) as server:
        yield server


EXPORT = """
import sys
from pathlib import Path
from optimum.onnxruntime import ORTModelForFeatureExtraction, ORTQuantizer
from optimum.onnxruntime.configuration import AutoQuantizationConfig
from transformers import AutoTokenizer

fp32, int8 = (Path(sys.argv[2], name) for name in ("fp32", "int8"))
ORTModelForFeatureExtraction.from_pretrained(sys.argv[1], export=True).save_pretrained(fp32)
dynamic = AutoQuantizationConfig.avx512_vnni(is_static=False, per_channel=False)
ORTQuantizer.from_pretrained(fp32).quantize(save_dir=int8, quantization_config=dynamic)
for folder in (fp32, int8):
    AutoTokenizer.from_pretrained(sys.argv[1]).save_pretrained(folder)
"""  # the plain graph is quantized: quantizing the optimized one is not faster


@contextmanager
def infinity(python: str, made: Path, cache: Path) -> Iterator[Running]:
    """infinity-emb with the ONNX graph in the folder `made`, in which it works; it optimizes the graph in `cache`."""
    port, name = free_port(), "minilm"
    words = [str(Path(python).with_name("infinity_emb")), "v2", "--model-id", ".", "--served-model-name", name]
    words += ["--engine", "optimum", "--device", "cpu", "--port", str(port), "--log-level", "error"]
    words += ["--no-bettertransformer", "--pooling-method", "mean"]
    values = {"DO_NOT_TRACK": "1", "INFINITY_ANONYMOUS_USAGE_STATS": "0", "HF_HOME": str(cache)}
    with started(words, port, values, "/embeddings", {"model": name, "input": "a"}, made) as server:
        yield server


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


@contextmanager
def started(
    command: list[str], port: int, environment: dict[str, str], path: str, content: Any, folder: Path | None = None
) -> Iterator[Running]:
    """Start a server and wait until it answers."""
    env = {**os.environ, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", **environment}
    url = f"http://127.0.0.1:{port}"

    async def answers() -> bool:
        try:
            return (await Client(url).post(path, content)).status == 200
        except OSError:
            return False

    with subprocess.Popen(command, env=env, cwd=folder, text=True) as process:
        try:
            while not asyncio.run(answers()):
                if process.poll() is not None:
                    raise RuntimeError(f"{command[0]} ended with {process.returncode}")
                time.sleep(0.5)
            yield Running(process, url)
        finally:
            process.terminate()


# ---- memory ------------------------------------------------------------------------------------------------------


def soak(minutes: float, rate: float | None = None) -> dict[str, Any]:
    """Ask for titles and embeddings, 4 clients each; report memory every 15 s, and what the last half added."""
    texts, memory, clients = embeddings_texts(), [], 4
    parts = max(4, round(minutes * 4))
    pause = 2 * clients / rate if rate else 0.0

    async def run(server: Running) -> int:
        title = Case("titles", server, "/v1/tasks/title", lambda text: {"input": text})
        embed = Case("vectors", server, "/v1/embeddings", lambda text: {"model": "minilm", "input": text})
        count = 0
        for _ in range(parts):
            both = (load(case, texts, clients, minutes * 60 / parts, pause) for case in (title, embed))
            count += sum(map(len, await asyncio.gather(*both)))
            memory.append(server.memory())
            print(memory[-1], "MB after", count, "requests", file=sys.stderr, flush=True)
        return count

    with serving("allmask-en", "minilm", "--tasks", "title,embed") as server:
        requests = asyncio.run(run(server))
    added = memory[-1] - memory[len(memory) // 2]
    return {"minutes": minutes, "requests": requests, "memory_mb": memory, "last_half_added_mb": added}


if __name__ == "__main__":
    main()
