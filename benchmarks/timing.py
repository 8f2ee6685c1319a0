"""Shared by the benchmarks: CPU time of one thread, interleaved cases, medians, tables, versions."""

from __future__ import annotations

import environment  # first: it sets what libraries read when they are loaded

# isort: split
import argparse
import json
import multiprocessing
import platform
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from multiprocessing.connection import Connection
from pathlib import Path

import torch
import torch.nn.functional as F

from allmask.data import Batch
from allmask.decoding import Writer
from allmask.training import Settings
from allmask.training.loop import Trainer

Case = Callable[[], object]

WARM_UP = 2  # rounds that do not count: in its first two steps, our loop gets its memory


def arguments(
    description: str | None, parts: tuple[str, ...] = (), add: Callable[[argparse.ArgumentParser], None] | None = None
) -> argparse.Namespace:
    """Parse the options; `parts` are the values of --only, `add` adds options of one benchmark."""
    parser = argparse.ArgumentParser(description=description, parents=[environment.PARSER])
    if parts:
        parser.add_argument("--only", choices=parts, help="only this table")
    if add is not None:
        add(parser)
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument("--quick", action="store_true", help="less work: to check that it runs, not to measure")
    return parser.parse_args()


def seconds(case: Case) -> float:
    """CPU time of this process, which other processes affect little."""
    before = time.process_time()
    case()
    return time.process_time() - before


def medians(cases: Mapping[str, Case], rounds: int, warm_up: bool = True) -> dict[str, float]:
    """The median time of each case. In each round all cases run in turn, so that a disturbance affects all of them."""
    if warm_up:
        for case in cases.values():
            case()
    times: dict[str, list[float]] = {name: [] for name in cases}
    for _ in range(rounds):
        for name, case in cases.items():
            times[name].append(seconds(case))
    return {name: statistics.median(taken) for name, taken in times.items()}


def medians_apart(makers: Mapping[str, Callable[[], Case]], rounds: int) -> dict[str, float]:
    """Like `medians`, but each case is made and run in a process of its own, and they take turns.

    Our training loop, and frozen models, make the C library keep freed memory; in one process this would serve the
    peers, too. So call it before anything is frozen: the processes are copies of this one.
    """
    with ExitStack() as stack:
        cases = [stack.enter_context(elsewhere(partial(_answer, make))) for make in makers.values()]
        times: list[list[float]] = [[] for _ in cases]
        for _ in range(WARM_UP + rounds):
            for case, taken in zip(cases, times, strict=True):
                case.send(True)
                taken.append(case.recv())
    return {name: statistics.median(taken[WARM_UP:]) for name, taken in zip(makers, times, strict=True)}


@contextmanager
def elsewhere(serve: Callable[[Connection], None]) -> Iterator[Connection]:
    """Run a function in a copy of this process, with one end of a pipe; False through the other end is to end it."""
    context = multiprocessing.get_context("fork")
    here, there = context.Pipe()
    process = context.Process(target=serve, args=(there,), daemon=True)
    process.start()
    there.close()  # so that reading fails if the process ends
    yield here
    here.send(False)
    process.join()


def _answer(make: Callable[[], Case], pipe: Connection) -> None:
    case = make()
    while pipe.recv():
        pipe.send(seconds(case))


def fastest(make: Callable[[int], Case], choices: tuple[int, ...]) -> int:
    """The choice (a batch size) with the fastest case."""
    return min(choices, key=lambda choice: seconds(make(choice)))


def versions(*packages: str) -> dict[str, str]:
    """Versions of the packages, of Python, and the processor."""
    found = {"python": platform.python_version(), "processor": _processor()}
    if environment.ISA is not None:
        found["restricted to"] = environment.ISA.upper() + (
            " (except ONNX Runtime)" if "onnxruntime" in packages else ""
        )
    for package in ("allmask", "torch", *packages):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "from source" if package == "allmask" else "not installed"
    return found


def _processor() -> str:
    path = Path("/proc/cpuinfo")
    lines = path.read_text().splitlines() if path.exists() else []
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())


def show(title: str, rows: list[dict[str, object]], about: Mapping[str, object], as_json: bool) -> None:
    """Print a table in Markdown, or the same as JSON."""
    if as_json:
        print(json.dumps({"title": title, "about": dict(about), "rows": rows}, ensure_ascii=False, indent=2))
        return
    print(f"{title}\n")
    print(" · ".join(f"{name} {value}" for name, value in about.items()) + "\n")
    header = list(rows[0])
    cells = [[str(row[name]) for name in header] for row in rows]
    widths = [max(len(line[i]) for line in [header, *cells]) for i in range(len(header))]
    for line in [header, ["-" * width for width in widths], *cells]:
        print("| " + " | ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) + " |")


# ---- steps that several benchmarks measure -------------------------------------------------------------------


def train_step(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, loss_of: Callable[[], torch.Tensor], autocast: bool = True
) -> None:
    """Forward, backward and optimizer, in bf16 autocast unless it is turned off."""
    model.train()
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        loss = loss_of()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


class NoData:
    """A workload that is never asked for a batch."""

    lengths = (1,)

    def batch(self, numbers: Sequence[int], epoch: int) -> Batch:
        raise NotImplementedError

    def evaluate(self, model: torch.nn.Module, step: int = 0) -> None:
        return None


def own_step(model: torch.nn.Module, batch: Batch, **settings: object) -> Case:
    """A step of allmask's training loop: forward, backward, clipping, optimizer."""
    trainer = Trainer(model, NoData(), Settings(steps=10**6, **settings), Path(), quiet=True)  # type: ignore[arg-type]
    return lambda: trainer._learn([batch])


@torch.inference_mode()
def agreement(writers: Mapping[str, Writer], prompts: list[list[int]], tokens: torch.Tensor) -> str:
    """The lowest cosine of each writer's logits to those of the first, all fed the same tokens (steps, rows)."""
    found = {}
    for name, writer in writers.items():
        logits, state = writer.begin(prompts)
        parts = [logits.float()]
        for row in tokens:
            logits, state = writer.step(row, state)
            parts.append(logits.float())
        found[name] = torch.cat(parts)
    exact = found.pop(next(iter(found)))
    return ", ".join(f"{name} {F.cosine_similarity(exact, other).min():.4f}" for name, other in found.items())


def writing_row(name: str, who: str, times: dict[str, float], tokens: int, peers: Iterable[str]) -> dict[str, object]:
    """A row of a table of systems that write: seconds, tokens per second, and how much faster than each peer."""
    ratios = {f"vs {peer}": f"{times[peer] / times[who]:.2f}" if peer in times else "" for peer in peers}
    speed = {"seconds": f"{times[who]:.3f}", "tokens/s": f"{tokens / times[who]:,.0f}"}
    return {"task": name, "system": who, **speed, **ratios}
