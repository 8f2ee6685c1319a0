"""What the benchmarks share: CPU time of one thread, cases interleaved, medians, tables, versions."""

from __future__ import annotations

import os

os.environ["OMP_NUM_THREADS"] = "1"  # before torch and the peers are imported
os.environ["MKL_NUM_THREADS"] = "1"
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable, Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

Case = Callable[[], object]


def arguments(description: str | None, parts: tuple[str, ...] = ()) -> argparse.Namespace:
    """`parts` are tables of which one may be asked for alone."""
    parser = argparse.ArgumentParser(description=description)
    if parts:
        parser.add_argument("--only", choices=parts, help="one of the tables")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument("--quick", action="store_true", help="less work: a first look, not a measurement")
    return parser.parse_args()


def seconds(case: Case) -> float:
    """CPU time of this process, so that a busy machine disturbs little."""
    begin = time.process_time()
    case()
    return time.process_time() - begin


def medians(cases: Mapping[str, Case], rounds: int) -> dict[str, float]:
    """Each case once a round, all in turn, so that what disturbs one round disturbs them alike. Warm up before."""
    times: dict[str, list[float]] = {name: [] for name in cases}
    for _ in range(rounds):
        for name, case in cases.items():
            times[name].append(seconds(case))
    return {name: statistics.median(taken) for name, taken in times.items()}


def fastest(make: Callable[[int], Case], choices: tuple[int, ...]) -> int:
    """The choice (a batch size) with which a case is quickest."""
    return min(choices, key=lambda choice: seconds(make(choice)))


def versions(*packages: str) -> dict[str, str]:
    """What was measured and on what."""
    found = {"python": platform.python_version(), "processor": _processor()}
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
    """A table in Markdown, or the same as JSON."""
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
