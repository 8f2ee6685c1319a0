"""One process of a test with several: `torchrun … crew_member.py JOBS.json` does jobs, one after another.

A job is a run of pretraining: {"do": "pretrain" | "resume", "out": …, "shard": …, …}. Disasters happen here, not in the
library: its functions are replaced by ones that kill the process at the moment that is asked for.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from allmask.cli.main import main
from allmask.errors import DataError, Interrupted
from allmask.tasks import parts, pretraining
from allmask.tasks.pretraining import pretrain, resume
from allmask.tasks.recipe import Recipe
from allmask.tasks.rows import RowWork
from allmask.training import loop, runs, sharding
from allmask.training.distributed import Alone, Crew, company

RANK, ATTEMPT = (int(os.environ.get(name, 0)) for name in ("RANK", "TORCHELASTIC_RESTART_COUNT"))


def die() -> None:
    Path(f"{sys.argv[1]}.died-in-{ATTEMPT}").touch()
    os.kill(os.getpid(), signal.SIGKILL)


def log_samples(out: Path) -> None:
    """Write down which samples each batch is made of, and which of them this process computes."""
    make, deal = RowWork.batch, parts.dealt

    def note(rank: int, everything: Any, mine: Any) -> None:
        with (out.parent / f"{out.name}.{rank}.jsonl").open("a") as file:
            file.write(json.dumps({"all": list(map(int, everything)), "mine": list(map(int, mine))}) + "\n")

    def batch(self: RowWork, numbers: Any, epoch: int) -> Any:
        note(0, numbers, numbers)
        return make(self, numbers, epoch)

    def dealt(numbers: Any, rank: int, size: int) -> Any:
        mine, weight = deal(numbers, rank, size)
        note(rank, numbers, mine if weight else [])
        return mine, weight

    RowWork.batch, parts.dealt = batch, dealt  # type: ignore[method-assign]


def at_step(number: int, do: Callable[[], None]) -> None:
    learn = loop.Trainer._learn

    def learning(self: loop.Trainer, micro: Any) -> Any:
        if self.step == number:
            do()
        return learn(self, micro)

    loop.Trainer._learn = learning  # type: ignore[method-assign]


def while_saving(number: int, do: Callable[[], None]) -> None:
    """When this process has written its tensors of that step, and nothing is renamed yet."""
    signed, write = runs._signed, sharding.write

    def signing(files: Any) -> Any:
        files = list(files)
        if any(f"step-{number:08d}.partial" in str(file) for file in files):
            do()
        return signed(files)

    def writing(folder: Path, tensors: Any) -> None:
        write(folder, tensors)
        if RANK and f"step-{number:08d}" in folder.name:
            do()

    runs._signed, sharding.write = signing, writing


def fail() -> None:
    raise DataError("text.txt: process 1 cannot read this", "let it")


def perform(job: dict[str, Any], crew: Alone | Crew) -> None:
    crew = replace(crew, sharded=job.get("shard", False))
    out = Path(job["out"])
    if "stop" in job:  # politely, and only this process is asked
        at_step(job["stop"], lambda: os.kill(os.getpid(), signal.SIGTERM) if crew.rank == crew.size - 1 else None)
    if job.get("log"):
        log_samples(out)
    try:
        if job["do"] == "pretrain":
            pretrain(Recipe.from_dict(job["recipe"]), out, True, crew)
        else:
            resume(out, True, crew)
    except Interrupted as error:
        assert error.exit_code == 143 and "stop" in job
    else:
        assert "stop" not in job


def do_all(jobs: list[dict[str, Any]]) -> int:
    """All jobs, by whoever is there: also by a test itself, which is one process."""
    originals = RowWork.batch, parts.dealt, loop.Trainer._learn
    with company() as crew:
        for job in jobs:
            try:
                perform(job, crew)
            finally:
                RowWork.batch, parts.dealt, loop.Trainer._learn = originals  # type: ignore[method-assign]
    return 0


def command(words: list[str], disasters: list[dict[str, Any]]) -> int:
    """The command line, as torchrun would start it, with the disasters of this attempt."""
    for disaster in disasters:
        if (disaster["attempt"], disaster["rank"]) == (ATTEMPT, RANK):
            when = {"step": at_step, "save": while_saving}[disaster["when"]]
            when(disaster["number"], fail if disaster.get("politely") else die)
    return main(words)


if __name__ == "__main__":
    pretraining.plot_run = lambda run: run / "loss.png"  # which takes longer than these runs
    asked = json.loads(Path(sys.argv[1]).read_text())
    sys.exit(do_all(asked) if isinstance(asked, list) else command(asked["command"], asked["disasters"]))
