"""The folder of a run: its files before the first step and after the last.

runs/a/
  config.yaml        the plan with every value, checksums of the data, of start/ and of itself; written last when a
                     run begins
  .lock              while a process works in the folder
  start/             the model before its first step; removed when the run is finished
  checkpoints/       see allmask/training/checkpoint.py; after the run, the weights of the last ones
  metrics.jsonl      a line per step, a line per evaluation
  loss.png           the loss by step
  result.json        the result, as printed at the end
  final/             the trained model; written last when a run ends
  final.damaged/     what was left of it, if it was damaged and has been made again
"""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from allmask.errors import CheckpointError
from allmask.files import (
    MANIFEST,
    new_folder,
    put_in_place,
    remove_folder,
    sha256,
    special_file,
    verify,
    write_atomically,
)
from allmask.model import Model
from allmask.runs.options import CHECKSUMS, CONFIG, SEAL, START, saved_values, sealed_values
from allmask.runs.plan import Plan
from allmask.tasks.task import save_task
from allmask.training import Result, checkpoint
from allmask.training.log import points, read_metrics

log = logging.getLogger("allmask")
RESULT, FINAL, DAMAGED = "result.json", "final", "final.damaged"


def write_config(plan: Plan, checksums: dict[str, str], out: Path) -> None:
    out.mkdir(parents=True, exist_ok=True)
    signed = out / START / MANIFEST
    checksums = checksums | ({START: sha256(signed)} if signed.is_file() else {})
    values = sealed_values(plan.to_dict(), checksums)
    write_atomically(out / CONFIG, yaml.safe_dump(values, sort_keys=False, allow_unicode=True))


def saved_plan(out: Path) -> Plan:
    """Return the plan of a run that has begun."""
    values = {name: value for name, value in saved_values(out).items() if name != CHECKSUMS}
    return Plan.from_dict(values, out / CONFIG)


def identity_of(out: Path) -> str:
    """Return a word that tells this run from others: the checksum of its plan, data and first model."""
    return saved_values(out)[CHECKSUMS][SEAL]


def expect_plain_files(out: Path) -> None:
    """Refuse a run with a pipe or a device among its files, or a link that leads nowhere: to open it could hang."""
    for path in (out, *out.rglob("*")):
        what = special_file(path) or ("a link that leads nowhere" if path.is_symlink() and not path.exists() else None)
        if what is not None:
            raise CheckpointError(f"{path}: {what}, not a file", "a run has no such files: remove it")


def expect_start(out: Path) -> None:
    """Refuse to resume from a model that is damaged, or is not the one that the run began with."""
    folder, then = out / START, saved_values(out)[CHECKSUMS].get(START)
    problem = verify(folder)
    if problem is None and sha256(folder / MANIFEST) != then:
        problem = "not the model that this run began with"
    if problem is not None:
        raise CheckpointError(f"{folder}: {problem}", "restore the folder, or start a new run with another --out")


# ---- finished ------------------------------------------------------------------------------------------------


def is_finished(out: Path) -> bool:
    return (out / FINAL).is_dir() and (out / RESULT).is_file()


def finished_result(out: Path) -> dict[str, Any] | None:
    """Return the result of a finished run; None if it is not finished, or if its model or result.json is damaged."""
    if not is_finished(out):
        return None
    problem = verify(out / FINAL)
    if problem is not None:
        log.warning("%s: %s", out / FINAL, problem)
        return None
    try:
        found = json.loads((out / RESULT).read_text(encoding="utf-8"))
        if _is_result(found):
            return found
    except (OSError, ValueError, RecursionError):
        pass
    log.warning("%s: damaged", out / RESULT)
    return None


def _is_result(found: Any) -> bool:
    """Whether this is what `outcome` writes. Results of several runs have other fields: there, the model's name."""
    if not isinstance(found, dict) or not isinstance(found.get("final"), str):
        return False
    if "seeds" in found or "tried" in found:
        return True
    kinds = {"steps": int, "best_step": int | None, "seconds": int | float | None, "stopped_early": bool}
    if not all(name in found and isinstance(found[name], kind) for name, kind in kinds.items()):
        return False
    metrics = found.get("metrics")
    return isinstance(metrics, dict) and all(isinstance(value, int | float) for value in metrics.values())


def final_problem(out: Path) -> str | None:
    """Return what is wrong with the model of a run that was finished; None if nothing is, or it was not finished."""
    if (out / FINAL).is_dir():
        return verify(out / FINAL)
    return "missing" if (out / RESULT).is_file() and not (out / START).is_dir() else None


def reopen_finished(plan: Plan, data: Any, out: Path, problem: str) -> None:
    """Prepare a finished run whose model is damaged for making it again from the checkpoints that are left.

    start/, which was removed, is made again. It must be the one that the run began with.
    """
    final, lost = out / FINAL, f"{out / FINAL}: {problem}"
    if not checkpoint.history(out, identity_of(out)).steps:
        raise CheckpointError(f"{lost}; no checkpoint is whole either", "copy the folder again, or train again")
    remove_folder(out / START)
    try:
        plan.job.save(plan.job.begin(plan, data)[1], data, out / START)
        expect_start(out)
    except CheckpointError as error:
        remove_folder(out / START)
        why = f"it cannot be made again, since the model that it began with cannot: {error.message}"
        raise CheckpointError(lost, f"{why}\ncopy the folder again, or train again") from error
    if final.is_dir():
        put_in_place(final, out / DAMAGED)
        log.warning("%s: moved to %s", final, DAMAGED)
    log.warning("%s: made again from the checkpoints", final)


def rebuilt_result(out: Path) -> dict[str, Any] | None:
    """Write result.json of a finished run again, from its metrics, if final/ is whole; otherwise return None."""
    if not (out / FINAL).is_dir() or verify(out / FINAL) is not None:
        return None
    lines = read_metrics(out)
    steps = max((line["step"] for line in lines), default=0)
    evaluated = [line for line in lines if any(name.startswith("eval_") for name in line)]
    metrics = {
        name.removeprefix("eval_"): value
        for name, value in (evaluated or [{}])[-1].items()
        if name != "step" and isinstance(value, int | float)
    }
    losses = points(lines, "loss")[1]
    result = {
        "final": str(out / FINAL), "steps": steps, "best_step": None,
        "kept_because": f"{RESULT} was damaged; this one is made from metrics.jsonl, with the last evaluation",
        "score": None, "metrics": metrics or ({"train_loss": losses[-1]} if losses else {}), "seconds": None,
        "stopped_early": False,
    }  # fmt: skip
    log.warning("%s: made again from metrics.jsonl, with the last evaluation", out / RESULT)
    write_result(result, out)
    return result


def outcome(result: Result, out: Path) -> dict[str, Any]:
    """Return the part of result.json that every run has."""
    losses = points(read_metrics(out), "loss")[1]
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


def drop_spent(out: Path, steps: Sequence[int], keep: int) -> None:
    """Remove what a finished run does not need: start/, and checkpoints except the weights of the last `keep`.

    Those are for `allmask average`; the best weights are in final/. `steps` are the run's own checkpoints, newest
    first; others are left alone.
    """
    remove_folder(out / START)
    for number, folder in enumerate(checkpoint.folder_of(out, step) for step in steps):
        if number < keep:
            checkpoint.drop_optimizer(folder)
        else:
            remove_folder(folder)


def save_model(model: Model, task: Any | None, folder: Path, also: Sequence[Any] = ()) -> None:
    """Write a model folder with its tasks, and checksums for `allmask verify`; completely or not at all."""
    with new_folder(folder) as beside:
        model.save(beside)
        if task is not None:
            save_task(task, beside, also)
        checkpoint.sign(beside)
