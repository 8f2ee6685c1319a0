"""The folder of a run: what is in it before the first step and after the last.

runs/a/
  config.yaml        the plan, every value resolved, and checksums of the data: where it is, a run has begun
  start/             the model before its first step; removed when the run is finished
  checkpoints/       see allmask/training/checkpoint.py; of a finished run the weights of the last ones
  metrics.jsonl      a line per step, a line per evaluation
  loss.png           the loss by step
  result.json        what is printed at the end
  final/             the model: where it is, the run is finished
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Collection
from pathlib import Path
from typing import Any

from allmask.errors import CheckpointError, ResourceError
from allmask.files import is_leftover, new_folder, write_atomically
from allmask.model import Model
from allmask.runs.plan import Plan
from allmask.runs.values import as_yaml, read_yaml
from allmask.tasks.task import save_task
from allmask.training import Result, checkpoint
from allmask.training.log import read_metrics

CONFIG, RESULT, CHECKSUMS = "config.yaml", "result.json", "checksums"
START, FINAL = "start", "final"


def expect_free(out: Path, leaves: Collection[str] = ()) -> None:
    """Refuse an occupied folder, or one where nothing can be written, before any work. Writes nothing itself.

    What a run may leave that ended before it began, and what has a name in `leaves`, is not in the way.
    """
    if out.is_file() or (out.is_dir() and not _is_unbegun(out, leaves)):
        hint = "to go on with this run: --resume" if (out / CONFIG).is_file() else "name another --out"
        raise ResourceError(f"{out}: already there", hint)
    if out.absolute() == Path.cwd():
        raise ResourceError(f"{out}: the folder you are in cannot become a run's", "name another: --out run")
    above = next(folder for folder in (out.absolute(), *out.absolute().parents) if folder.exists())
    if not above.is_dir() or not os.access(above, os.W_OK | os.X_OK):
        raise ResourceError(f"{out}: cannot write in {above}", "choose another --out")


def _is_unbegun(out: Path, leaves: Collection[str]) -> bool:
    """Whether there is nothing but ours in a folder; a start/ that we did not write is somebody else's."""
    if (out / START).exists() and not (out / START / checkpoint.MANIFEST).is_file():
        return False
    return all(item.name in (START, *leaves) or is_leftover(item.name) for item in out.iterdir())


# ---- begun ---------------------------------------------------------------------------------------------------


def write_config(plan: Plan, checksums: dict[str, str], out: Path) -> None:
    """Last of all that a run begins with."""
    out.mkdir(parents=True, exist_ok=True)
    write_atomically(out / CONFIG, as_yaml(plan.to_dict() | {CHECKSUMS: checksums}))


def saved_values(out: Path) -> dict[str, Any]:
    """What the config.yaml of a run says."""
    if not (out / CONFIG).is_file():
        raise CheckpointError(f"{out}: no {CONFIG}, so there is no run to resume", "leave --resume out to start one")
    return read_yaml(out / CONFIG)


def saved_plan(out: Path) -> Plan:
    """The plan of a run that has begun."""
    values = {name: value for name, value in saved_values(out).items() if name != CHECKSUMS}
    return Plan.from_dict(values, out / CONFIG)


# ---- finished ------------------------------------------------------------------------------------------------


def is_finished(out: Path) -> bool:
    return (out / FINAL).is_dir() and (out / RESULT).is_file()


def finished_result(out: Path) -> dict[str, Any] | None:
    """The result of a finished run."""
    return json.loads((out / RESULT).read_text(encoding="utf-8")) if is_finished(out) else None


def outcome(result: Result, out: Path) -> dict[str, Any]:
    """What result.json says of every run."""
    return {
        "final": str(out / FINAL),
        "steps": result.steps,
        "best_step": result.best_step or result.steps,
        "kept_because": result.kept_because,
        "score": result.best.value if result.best else None,
        "metrics": result.best.metrics if result.best else _last_loss(out),
        "seconds": round(result.seconds, 1),
        "stopped_early": result.stopped_early,
    }


def _last_loss(out: Path) -> dict[str, float]:
    losses = [line["loss"] for line in read_metrics(out) if line.get("loss") is not None]
    return {"train_loss": losses[-1]} if losses else {}


def write_result(result: dict[str, Any], out: Path) -> None:
    write_atomically(out / RESULT, json.dumps(result, indent=2, ensure_ascii=False) + "\n")


def drop_spent(out: Path, keep: int) -> None:
    """Remove what a finished run does not need: the start, and all but the weights of the last `keep` checkpoints.

    These are for `allmask average`; the best weights are in final/.
    """
    shutil.rmtree(out / START, ignore_errors=True)
    for number, folder in enumerate(checkpoint.checkpoints(out)):
        if number < keep:
            checkpoint.drop_optimizer(folder)
        else:
            shutil.rmtree(folder, ignore_errors=True)


# ---- models --------------------------------------------------------------------------------------------------


def save_model(model: Model, task: Any | None, folder: Path) -> None:
    """Write a model folder that names its task, signed for `allmask verify`; whole or not at all."""
    with new_folder(folder) as beside:
        model.save(beside)
        if task is not None:
            save_task(task, beside)
        checkpoint.sign(beside)
