"""How long `allmask generate` takes to start: seconds until its first token, and until its end, for one line of text.

    python benchmarks/startup.py [--model allmask-en] [--quick] [--json] [--isa avx2]

Each run is a new process on one core, with compiled bytecode, as pip installs it, and with files in the disk's cache.
`import torch` alone is measured in the same rounds. Wall time and CPU time, medians and the least of all rounds.
"""

from __future__ import annotations

import timing  # first: it sets what libraries read when they are loaded

# isort: split
import argparse
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time

TEXT = "A library to read and write zip, tar, gz and xz files. It is fast, small and easy to use."
ROUNDS = 9


def main() -> None:
    options = timing.arguments(__doc__, add=add_options)
    words = [sys.executable, "-m", "allmask", "generate", options.model, "--text", TEXT]
    cases = {"generate": words, "generate --stream": [*words, "--stream"]}
    cases["import torch"] = [sys.executable, "-c", "import torch; print()"]
    if hasattr(os, "sched_setaffinity"):  # this process and those that it starts
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    with tempfile.TemporaryDirectory() as bytecode:
        env = {**os.environ, "PYTHONPYCACHEPREFIX": os.environ.get("PYTHONPYCACHEPREFIX", bytecode)}
        env.pop("PYTHONDONTWRITEBYTECODE", None)
        for command in cases.values():  # writes the bytecode, compiles the kernels
            run(command, env)
        times: dict[str, list[tuple[float, float, float]]] = {name: [] for name in cases}
        for _ in range(2 if options.quick else ROUNDS):
            for name, command in cases.items():
                times[name].append(run(command, env))
    measures = ("first token, s", "end, s", "CPU, s")
    rows: list[dict[str, object]] = [
        {"process": name}
        | {measure: spread([each[i] for each in found]) for i, measure in enumerate(measures)}
        for name, found in times.items()
    ]  # fmt: skip
    timing.show("Start-up, median (least)", rows, timing.versions(), options.json)


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", default="allmask-en", help="the model that writes")


def run(command: list[str], env: dict[str, str]) -> tuple[float, float, float]:
    """Seconds until the first byte of output, until the end, and of CPU time."""
    before, started = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    with subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        assert process.stdout is not None
        if not process.stdout.read(1):
            raise SystemExit(f"{' '.join(command)}: no output")
        first = time.perf_counter() - started
        process.stdout.read()
    taken, after = time.perf_counter() - started, resource.getrusage(resource.RUSAGE_CHILDREN)
    return first, taken, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def spread(values: list[float]) -> str:
    return f"{statistics.median(values):.2f} ({min(values):.2f})"


if __name__ == "__main__":
    main()
