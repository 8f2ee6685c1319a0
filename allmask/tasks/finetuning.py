"""Fine-tuning as a whole: what a run is told, what it keeps on disk, and how it goes on where it stopped.

runs/title/
  config.yaml        the plan, every value resolved; checksums of the data
  start/             the model before its first step: with a head, its vocabulary pruned
  checkpoints/, metrics.jsonl      see allmask/training/runs.py
  loss.png           the loss by step
  result.json        what is printed at the end
  final/             the model, and allmask.json, which says what it was trained for
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from allmask.data import Record
from allmask.errors import CheckpointError, DataError, ResourceError
from allmask.model import Model, load
from allmask.tasks.plan import Plan, read_yaml
from allmask.tasks.saved import save_task
from allmask.tasks.title import Title
from allmask.training import Result, runs, train
from allmask.training.plots import plot_run

log = logging.getLogger("allmask")
CONFIG, RESULT = "config.yaml", "result.json"


@dataclass(frozen=True)
class Data:
    """The records of a run, read and checked before anything else happens."""

    train: list[Record]
    held_out: list[Record]
    skipped: Counter[str]


def finetune(plan: Plan, out: Path, quiet: bool = False) -> dict[str, Any]:
    """Start a run and see it through. Nothing is written before the data is checked and the model loaded."""
    expect_free(out)
    data = read_data(plan)
    plan = begin(plan, data, out)
    return _go_on(plan, data, out, quiet)


def resume(out: Path, quiet: bool = False) -> dict[str, Any]:
    """Go on with a run that was interrupted, exactly as if it had not been; a finished one is left as it is."""
    if is_finished(out):
        return json.loads((out / RESULT).read_text(encoding="utf-8"))
    plan = saved_plan(out)
    data = read_data(plan)
    _expect_same_data(plan, out)
    return _go_on(plan, data, out, quiet)


def _go_on(plan: Plan, data: Data, out: Path, quiet: bool) -> dict[str, Any]:
    model = load(out / "start")  # also in a run's first session, so that all begin from the same bytes
    work = plan.task.work(model, data.train, data.held_out)
    if not data.held_out:
        log.info("no --eval file: the weights of the last step are kept")
    result = train(model, work, plan.settings, out, resume=True, quiet=quiet)
    return finish(plan, data, model, result, out)


# ---- before --------------------------------------------------------------------------------------------------


def expect_free(out: Path) -> None:
    """Said before any work: an occupied folder, or a place where nothing can be written. Writes nothing itself."""
    if out.is_file() or (out.is_dir() and any(out.iterdir())):
        hint = "to go on with this run: --resume" if (out / CONFIG).is_file() else "name another --out"
        raise ResourceError(f"{out}: already there", hint)
    above = next(folder for folder in (out.absolute(), *out.absolute().parents) if folder.exists())
    if not above.is_dir() or not os.access(above, os.W_OK | os.X_OK):
        raise ResourceError(f"{out}: cannot write in {above}", "choose another --out")


def read_data(plan: Plan) -> Data:
    skipped: Counter[str] = Counter()
    data = Data(
        plan.task.read(Path(plan.data), plan.on_bad_record, skipped),
        plan.task.read(Path(plan.eval), plan.on_bad_record, skipped) if plan.eval else [],
        skipped,
    )
    log.info("data: %s to learn from, %s held out", f"{len(data.train):,}", f"{len(data.held_out):,}")
    if skipped:
        reasons = ", ".join(f"{count:,} × {reason}" for reason, count in skipped.most_common())
        log.info("skipped records: %s", reasons)
    return data


def begin(plan: Plan, data: Data, out: Path) -> Plan:
    """Make the run's folder, whole or not at all: the model as it starts, and the plan with nothing left open."""
    model = load(plan.model)
    plan = replace(plan, task=plan.task.fitted(model))
    model = plan.task.prepare(model, data.train, plan.settings.seed, plan.prune)
    with _made_beside(out) as folder:
        save_model(model, plan.task, folder / "start")
        config = plan.to_dict() | {"checksums": _checksums(plan)}
        (folder / CONFIG).write_text(_yaml(config), encoding="utf-8")
    return plan


def saved_plan(out: Path) -> Plan:
    """The plan of a run that was begun."""
    if not (out / CONFIG).is_file():
        raise CheckpointError(f"{out}: no {CONFIG}, so there is no run to resume", "leave --resume out to start one")
    values = read_yaml(out / CONFIG)
    values.pop("checksums", None)
    return Plan.from_dict(values, out / CONFIG)


def is_finished(out: Path) -> bool:
    return (out / "final").is_dir() and (out / RESULT).is_file()


def _checksums(plan: Plan) -> dict[str, str]:
    files = {"data": plan.data, "eval": plan.eval}
    return {name: _checksum(Path(path)) for name, path in files.items() if path}


def _checksum(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _expect_same_data(plan: Plan, out: Path) -> None:
    """Other data would make another run, in another order."""
    then = read_yaml(out / CONFIG).get("checksums", {})
    for name, now in _checksums(plan).items():
        if then.get(name) != now:
            path = getattr(plan, name)
            raise DataError(f"{path}: changed since {out} was started", "restore the file, or start a new run")


def _yaml(values: dict[str, Any]) -> str:
    import yaml

    return yaml.safe_dump(values, sort_keys=False, allow_unicode=True)


# ---- after ---------------------------------------------------------------------------------------------------


def finish(plan: Plan, data: Data, model: Model, result: Result, out: Path) -> dict[str, Any]:
    """Write the picture, the result and last the model: where there is a final/, the run is complete."""
    plot_run(out)
    told = {
        "final": str(out / "final"),
        "steps": result.steps,
        "best_step": result.best_step or result.steps,
        "metrics": result.best.metrics if result.best else _last_loss(out),
        "seconds": round(result.seconds, 1),
        "stopped_early": result.stopped_early,
        "examples": len(data.train),
        "skipped": dict(data.skipped),
    }
    (out / RESULT).write_text(json.dumps(told, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    save_model(model, plan.task, out / "final")
    return told


def _last_loss(out: Path) -> dict[str, float]:
    losses = [line["loss"] for line in runs.read_metrics(out) if line.get("loss") is not None]
    return {"train_loss": losses[-1]} if losses else {}


def save_model(model: Model, task: Title, folder: Path) -> None:
    """A model folder that knows its task, signed for `allmask verify`; whole or not at all."""
    with _made_beside(folder) as beside:
        model.save(beside)
        save_task(task, beside)
        runs.sign(beside)


@contextmanager
def _made_beside(folder: Path) -> Iterator[Path]:
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
