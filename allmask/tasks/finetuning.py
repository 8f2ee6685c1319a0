"""Learning a task, from a pretrained model or from nothing: what a run is told, what it keeps on disk, how it goes on.

runs/a/
  config.yaml        the plan, every value resolved; checksums of the data
  start/             the model before its first step: with a head, perhaps its vocabulary pruned
  checkpoints/, metrics.jsonl      see allmask/training/runs.py
  loss.png           the loss by step; of a classifier confusion.png, too
  result.json        what is printed at the end
  final/             the model, and allmask.json, which says what it was trained for

Several runs (see allmask/tasks/several.py) have a folder each in it.
"""

from __future__ import annotations

import hashlib
import logging
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from allmask.attention import Attention
from allmask.data import Record
from allmask.dropout import Dropout
from allmask.errors import DataError
from allmask.model import Model, load
from allmask.tasks.answer import Answer
from allmask.tasks.auxiliary import Auxiliary
from allmask.tasks.averaging import take_mean
from allmask.tasks.choose import ChooseWork
from allmask.tasks.classify import Classify, ClassifyWork
from allmask.tasks.folders import (
    CHECKSUMS,
    CONFIG,
    expect_free,
    finished_result,
    made_beside,
    outcome,
    save_model,
    saved_values,
    write_result,
)
from allmask.tasks.plan import Plan, TaskOfPlan
from allmask.tasks.values import as_yaml
from allmask.training import Result, train
from allmask.training.distributed import expect_alone
from allmask.training.loop import Work
from allmask.training.plots import plot_run

log = logging.getLogger("allmask")


@dataclass(frozen=True)
class Data:
    """The records of a run, read and checked before anything else happens, and the task as they have it."""

    train: list[Record]
    held_out: list[Record]
    skipped: Counter[str]
    task: TaskOfPlan


def finetune(plan: Plan, out: Path, quiet: bool = False) -> dict[str, Any]:
    """Start a run and see it through. Nothing is written before the data is checked and the model loaded."""
    expect_alone()
    expect_free(out)
    data = read_data(plan)
    if plan.several:
        from allmask.tasks import several  # it is made of runs as they are here

        return several.go_on(several.begin(plan, data, out), data, out, quiet)
    return go_on(begin(plan, data, out), data, out, quiet)


def resume(out: Path, quiet: bool = False) -> dict[str, Any]:
    """Go on with a run that was interrupted, exactly as if it had not been; a finished one is left as it is."""
    told = finished_result(out)
    if told is not None:
        return told
    plan = saved_plan(out)
    data = read_data(plan)
    _expect_same_data(plan, out)
    if plan.several:
        from allmask.tasks import several

        return several.go_on(plan, data, out, quiet)
    return go_on(plan, data, out, quiet)


def go_on(
    plan: Plan, data: Data, out: Path, quiet: bool, watched: Callable[[Work], Work] = lambda work: work
) -> dict[str, Any]:
    """From the last checkpoint of a run that was begun, or its start, to the end, unless who watches stops it."""
    model = load(out / "start")  # also in a run's first session, so that all begin from the same bytes
    auxiliary = Auxiliary.of(model, plan.lm_weight, plan.settings.seed)
    work = plan.task.work(model, data.train, data.held_out, auxiliary, plan.settings.precision)
    if not data.held_out:
        log.info("no --eval file: the weights of the last step are kept")
    if plan.freeze:
        _freeze(model, work, plan.settings.precision)
    result = train(model, watched(work), plan.settings, out, resume=True, quiet=quiet)
    averaged = take_mean(model, work, result, out, plan.average) if plan.average else ()
    return finish(plan, data, model, result, out, averaged)


def _freeze(model: Model, work: Work, precision: str) -> None:
    """Features, not fine-tuning: the body learns nothing and forgets nothing, so once is enough for each text."""
    model.body.requires_grad_(False)
    for module in model.body.modules():
        if isinstance(module, Dropout):
            module.p = 0.0
        elif isinstance(module, Attention):
            module.dropout = 0.0
    if isinstance(work, ClassifyWork | ChooseWork):
        log.info("the body is frozen; what it makes of each text is computed once")
        work.remember(model, precision)


# ---- before --------------------------------------------------------------------------------------------------


def read_data(plan: Plan) -> Data:
    skipped: Counter[str] = Counter()
    held_out = Path(plan.eval) if plan.eval else None
    task, train, others = plan.task.read_both(Path(plan.data), held_out, plan.on_bad_record, skipped)
    data = Data(train, others, skipped, task)
    log.info("data: %s to learn from, %s held out", f"{len(data.train):,}", f"{len(data.held_out):,}")
    if skipped:
        reasons = ", ".join(f"{count:,} × {reason}" for reason, count in skipped.most_common())
        log.info("skipped records: %s", reasons)
    return data


def begin(plan: Plan, data: Data, out: Path) -> Plan:
    """Make the run's folder, whole or not at all: the model as it starts, and the plan with nothing left open."""
    model = first_model(plan, data)
    plan = replace(plan, task=data.task).settled(model, data.train)
    model = plan.task.prepare(model, data.train, plan.settings.seed, bool(plan.prune), plan.lm_weight > 0)
    Auxiliary.of(model, plan.lm_weight, plan.settings.seed)  # a tokenizer that it cannot use is refused now
    with made_beside(out) as folder:
        save_model(model, plan.task, folder / "start")
        config = plan.to_dict() | {CHECKSUMS: checksums(plan)}
        (folder / CONFIG).write_text(as_yaml(config), encoding="utf-8")
    return plan


def first_model(plan: Plan, data: Data) -> Model:
    """What a run begins with: the model that was named, or a new one, its vocabulary made for the data."""
    if plan.fresh is None:
        assert plan.model is not None
        return load(plan.model)
    model = plan.fresh.model(data.train, plan.settings.seed)
    size = sum(parameter.numel() for parameter in model.parameters())
    log.info("a new %s: %s tokens, %.1fM parameters", plan.fresh.preset, f"{model.config.vocabulary:,}", size / 1e6)
    return model


def saved_plan(out: Path) -> Plan:
    """The plan of a run that was begun."""
    values = saved_values(out)
    values.pop(CHECKSUMS, None)
    return Plan.from_dict(values, out / CONFIG)


def checksums(plan: Plan) -> dict[str, str]:
    files = {"data": plan.data, "eval": plan.eval}
    return {name: _checksum(Path(path)) for name, path in files.items() if path}


def _checksum(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _expect_same_data(plan: Plan, out: Path) -> None:
    """Other data would make another run, in another order."""
    then = saved_values(out).get(CHECKSUMS, {})
    for name, now in checksums(plan).items():
        if then.get(name) != now:
            path = getattr(plan, name)
            raise DataError(f"{path}: changed since {out} was started", "restore the file, or start a new run")


# ---- after ---------------------------------------------------------------------------------------------------


def finish(
    plan: Plan, data: Data, model: Model, result: Result, out: Path, averaged: Sequence[int] = ()
) -> dict[str, Any]:
    """Write the pictures, the result and last the model: where there is a final/, the run is complete."""
    plot_run(out)
    if isinstance(plan.task, Classify):
        plan.task.draw(model.eval(), data.held_out, out, plan.settings.precision)
    task = plan.task
    if isinstance(task, Answer):
        task = task.tuned(model.eval(), data.held_out, plan.settings.precision)
    told = outcome(result, out) | {
        "task": plan.to_dict()["task"],
        "examples": len(data.train),
        "skipped": dict(data.skipped),
        **({"averaged": list(averaged)} if averaged else {}),
    }
    write_result(told, out)
    save_model(model, task, out / "final")
    return told
