"""The folder of a run: its files before the first step and after the last.

runs/a/
  config.yaml        the plan with every value, and checksums of the data; written last when a run begins
  start/             the model before its first step; removed when the run is finished
  checkpoints/       see allmask/training/checkpoint.py; after the run, the weights of the last ones
  metrics.jsonl      a line per step, a line per evaluation
  loss.png           the loss by step
  result.json        the result, as printed at the end
  final/             the trained model; written last when a run ends
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from allmask.files import new_folder, write_atomically
from allmask.model import Model
from allmask.runs.options import CONFIG, START, saved_values
from allmask.runs.plan import Plan
from allmask.tasks.task import save_task
from allmask.training import Result, checkpoint
from allmask.training.log import read_metrics

RESULT, CHECKSUMS = "result.json", "checksums"
FINAL = "final"


def write_config(plan: Plan, checksums: dict[str, str], out: Path) -> None:
    out.mkdir(parents=True, exist_ok=True)
    values = plan.to_dict() | {CHECKSUMS: checksums}
    write_atomically(out / CONFIG, yaml.safe_dump(values, sort_keys=False, allow_unicode=True))


def saved_plan(out: Path) -> Plan:
    """Return the plan of a run that has begun."""
    values = {name: value for name, value in saved_values(out).items() if name != CHECKSUMS}
    return Plan.from_dict(values, out / CONFIG)


# ---- finished ------------------------------------------------------------------------------------------------


def is_finished(out: Path) -> bool:
    return (out / FINAL).is_dir() and (out / RESULT).is_file()


def finished_result(out: Path) -> dict[str, Any] | None:
    """Return the result of a finished run; None if it is not finished."""
    return json.loads((out / RESULT).read_text(encoding="utf-8")) if is_finished(out) else None


def outcome(result: Result, out: Path) -> dict[str, Any]:
    """Return the part of result.json that every run has."""
    losses = [line["loss"] for line in read_metrics(out) if line.get("loss") is not None]
    trained = {"train_loss": losses[-1]} if losses else {}
    return {
        "final": str(out / FINAL),
        "steps": result.steps,
        "best_step": result.best_step or result.steps,
        "kept_because": result.kept_because,
        "score": result.best.value if result.best else None,
        "metrics": result.best.metrics if result.best else trained,
        "seconds": round(result.seconds, 1),
        "stopped_early": result.stopped_early,
    }


def write_result(result: dict[str, Any], out: Path) -> None:
    write_atomically(out / RESULT, json.dumps(result, indent=2, ensure_ascii=False) + "\n")


def drop_spent(out: Path, keep: int) -> None:
    """Remove what a finished run does not need: start/, and checkpoints except the weights of the last `keep`.

    Those are for `allmask average`; the best weights are in final/.
    """
    shutil.rmtree(out / START, ignore_errors=True)
    for number, folder in enumerate(checkpoint.checkpoints(out)):
        if number < keep:
            checkpoint.drop_optimizer(folder)
        else:
            shutil.rmtree(folder, ignore_errors=True)


def save_model(model: Model, task: Any | None, folder: Path, also: Sequence[Any] = ()) -> None:
    """Write a model folder with its tasks, and checksums for `allmask verify`; completely or not at all."""
    with new_folder(folder) as beside:
        model.save(beside)
        if task is not None:
            save_task(task, beside, also)
        checkpoint.sign(beside)
