"""The folder of a run, before its first step and after its last: what is made there is whole or not there at all."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from allmask.errors import CheckpointError, ResourceError
from allmask.model import Model
from allmask.tasks.saved import Task, save_task
from allmask.tasks.values import read_yaml
from allmask.training import Result, runs

CONFIG, RESULT, CHECKSUMS = "config.yaml", "result.json", "checksums"


def expect_free(out: Path, ours: frozenset[str] = frozenset()) -> None:
    """Said before any work: an occupied folder, or a place where nothing can be written. Writes nothing itself.

    What has one of the names of `ours` is left from a run that was never begun, and no obstacle.
    """
    if out.is_file() or (out.is_dir() and not ours.issuperset(item.name for item in out.iterdir())):
        hint = "to go on with this run: --resume" if (out / CONFIG).is_file() else "name another --out"
        raise ResourceError(f"{out}: already there", hint)
    if out.absolute() == Path.cwd():
        raise ResourceError(f"{out}: the folder you are in cannot become a run's", "name another: --out run")
    above = next(folder for folder in (out.absolute(), *out.absolute().parents) if folder.exists())
    if not above.is_dir() or not os.access(above, os.W_OK | os.X_OK):
        raise ResourceError(f"{out}: cannot write in {above}", "choose another --out")


def saved_values(out: Path) -> dict[str, Any]:
    """What the config.yaml of a run that was begun says."""
    if not (out / CONFIG).is_file():
        raise CheckpointError(f"{out}: no {CONFIG}, so there is no run to resume", "leave --resume out to start one")
    return read_yaml(out / CONFIG)


def finished_result(out: Path) -> dict[str, Any] | None:
    """What a finished run told at its end."""
    return json.loads((out / RESULT).read_text(encoding="utf-8")) if is_finished(out) else None


def is_finished(out: Path) -> bool:
    return (out / "final").is_dir() and (out / RESULT).is_file()


def outcome(result: Result, out: Path) -> dict[str, Any]:
    """What every run tells at its end."""
    return {
        "final": str(out / "final"),
        "steps": result.steps,
        "best_step": result.best_step or result.steps,
        "score": result.best.value if result.best else None,  # what chose the best step
        "metrics": result.best.metrics if result.best else _last_loss(out),
        "seconds": round(result.seconds, 1),
        "stopped_early": result.stopped_early,
    }


def _last_loss(out: Path) -> dict[str, float]:
    losses = [line["loss"] for line in runs.read_metrics(out) if line.get("loss") is not None]
    return {"train_loss": losses[-1]} if losses else {}


def write_result(told: dict[str, Any], out: Path) -> None:
    (out / RESULT).write_text(json.dumps(told, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def save_model(model: Model, task: Task | None, folder: Path) -> None:
    """A model folder that knows its task, signed for `allmask verify`; whole or not at all."""
    with made_beside(folder) as beside:
        model.save(beside)
        if task is not None:
            save_task(task, beside)
        runs.sign(beside)


@contextmanager
def made_beside(folder: Path) -> Iterator[Path]:
    """A folder to fill under another name; it gets its own when all went well, and is removed otherwise."""
    beside = folder.with_name(f".{folder.name}.partial")
    try:
        shutil.rmtree(beside, ignore_errors=True)
        beside.mkdir(parents=True)
        yield beside
        os.replace(beside, folder)
    except OSError as error:
        raise ResourceError(f"{folder}: cannot be written: {error.strerror or error}", "free some space") from error
    finally:
        shutil.rmtree(beside, ignore_errors=True)
