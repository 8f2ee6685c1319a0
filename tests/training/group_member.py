"""One process of a test with several: `torchrun … group_member.py JOBS.json` does jobs, one after another.

A job starts or resumes a run: {"plan": … or null, "out": …, "shard": …, …}. Disasters happen here, not in the library:
its functions are replaced by ones that kill the process at the moment that is asked for.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from allmask.cli.main import main
from allmask.errors import DataError, Interrupted
from allmask.runs import driver, plan
from allmask.runs.plan import Plan
from allmask.training import checkpoint, loop, process_group
from allmask.training.process_group import ProcessGroup, SingleProcess, join_processes

RANK, ATTEMPT = (int(os.environ.get(name, 0)) for name in ("RANK", "TORCHELASTIC_RESTART_COUNT"))


def die() -> None:
    Path(f"{sys.argv[1]}.died-in-{ATTEMPT}").touch()
    os.kill(os.getpid(), signal.SIGKILL)


def stop() -> None:
    Path(f"{sys.argv[1]}.stopped").write_text(str(os.getpid()))
    os.kill(os.getpid(), signal.SIGSTOP)


def log_samples(out: Path) -> None:
    """Write down which samples each batch is made of, and which of them this process computes."""
    share_of = loop.share_of

    def logged(work: Any, numbers: Any, epoch: int, rank: int, size: int) -> Any:
        mine, weight = loop.divided(numbers, rank, size)
        line = {"all": list(map(int, numbers)), "mine": list(map(int, mine)) if weight else []}
        with (out.parent / f"{out.name}.{rank}.jsonl").open("a") as file:
            file.write(json.dumps(line) + "\n")
        return share_of(work, numbers, epoch, rank, size)

    loop.share_of = logged


def at_step(number: int, do: Callable[[], None]) -> None:
    learn = loop.Trainer._learn

    def learning(self: loop.Trainer, micro: Any) -> Any:
        if self.step == number:
            do()
        return learn(self, micro)

    loop.Trainer._learn = learning  # type: ignore[method-assign]


def while_saving(number: int, do: Callable[[], None]) -> None:
    """When this process has written its tensors of that step, and nothing is renamed yet."""
    checksums, write = checkpoint.checksums, checkpoint.write_shards

    def signing(files: Any) -> Any:
        files = list(files)
        if any(f"step-{number:08d}.partial" in str(file) for file in files):
            do()
        return checksums(files)

    def writing(folder: Path, tensors: Any) -> None:
        write(folder, tensors)
        if RANK and f"step-{number:08d}" in folder.name:
            do()

    checkpoint.checksums, checkpoint.write_shards = signing, writing


def report_late() -> None:
    """Let torchrun's SIGTERM, which follows the death of a process, always reach the others before they report."""
    first_code = ProcessGroup._first_code

    def late(self: ProcessGroup, error: BaseException) -> Any:
        time.sleep(1)
        return first_code(self, error)

    ProcessGroup._first_code = late  # type: ignore[method-assign]


def fail() -> None:
    raise DataError("text.txt: process 1 cannot read this", "let it")


def perform(job: dict[str, Any], group: SingleProcess | ProcessGroup) -> None:
    group = replace(group, sharded=job.get("shard", False))
    out = Path(job["out"])
    if "stop" in job:  # politely, and only this process is asked
        at_step(job["stop"], lambda: os.kill(os.getpid(), signal.SIGTERM) if group.rank == group.size - 1 else None)
    if job.get("log"):
        log_samples(out)
    try:
        if job["plan"]:
            driver.start(Plan.from_dict(job["plan"]), out, True, group)
        else:
            driver.resume(out, True, group)
    except Interrupted as error:
        assert error.exit_code == 143 and "stop" in job
    else:
        assert "stop" not in job


def do_all(jobs: list[dict[str, Any]]) -> int:
    """All jobs, by whoever is there: also by a test itself, which is one process."""
    originals = loop.share_of, loop.Trainer._learn
    with join_processes() as group:
        for job in jobs:
            try:
                perform(job, group)
            finally:
                loop.share_of, loop.Trainer._learn = originals  # type: ignore[method-assign]
    return 0


def command(words: list[str], disasters: list[dict[str, Any]]) -> int:
    """The command line, as torchrun would start it, with the disasters of this attempt."""
    for disaster in disasters:
        if (disaster["attempt"], disaster["rank"]) == (ATTEMPT, RANK):
            when = {"step": at_step, "save": while_saving}[disaster["when"]]
            when(disaster["number"], {"fails": fail, "stops": stop}.get(disaster.get("how", ""), die))
    report_late()
    return main(words)


if __name__ == "__main__":
    plan.plot_run = lambda run: run / "loss.png"  # which takes longer than these runs
    os.fsync = lambda handle: None  # as in tests/conftest.py
    process_group.STORE = 1
    asked = json.loads(Path(sys.argv[1]).read_text())
    sys.exit(do_all(asked) if isinstance(asked, list) else command(asked["command"], asked["disasters"]))
