"""The mean of a run's last checkpoints, which is often better than any of them (arXiv 1706.03762)."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from allmask.errors import CheckpointError, UsageError
from allmask.model import Model, load
from allmask.runs.folder import FINAL, START
from allmask.runs.options import CHECKSUMS, CONFIG, SEAL, saved_values
from allmask.tasks.task import load_task
from allmask.training import Result, Workload, checkpoint
from allmask.training.loop import why_better

log = logging.getLogger("allmask")


def mean_model(run: Path, last: int | None = None) -> tuple[Model, Any | None, list[int]]:
    """Return the model of a run with the mean weights of its `last` checkpoints (or 5), its task and their steps."""
    shape = next((run / name for name in (FINAL, START) if (run / name).is_dir()), None)
    if shape is None or not checkpoint.checkpoints(run):
        raise CheckpointError(f"{run}: no run with checkpoints", "name the folder that was its --out")
    steps, weights = mean_weights(run, min(5, len(_latest(run))) if last is None else last)
    model = load(shape)
    model.load_state_dict(weights)
    return model, load_task(shape), steps


def mean_weights(run: Path, last: int) -> tuple[list[int], dict[str, Tensor]]:
    """Return the steps of the last checkpoints of a run and the mean of their weights; a damaged one is an error."""
    found = _latest(run)
    chosen = found[:last]
    if len(chosen) < last or last < 1:
        raise UsageError(f"{run}: has {len(found)} checkpoints, not {last}", "ask for fewer, or train with --keep")
    for folder in chosen:
        problem = checkpoint.problem_of(folder)
        if problem is not None:
            raise CheckpointError(f"{folder}: {problem}", "leave it out: ask for fewer, or remove the folder")
    steps, sums = [], {}
    for folder in reversed(chosen):
        state = checkpoint.load_state(folder)
        steps.append(state.step)
        for name, tensor in {**state.model, **(state.average or {})}.items():
            sums[name] = sums[name] + tensor.double() if name in sums else tensor.double()
    return steps, {name: (total / len(chosen)).float() for name, total in sums.items()}


def _latest(run: Path) -> list[Path]:
    """List the newest checkpoints, as many as the run keeps. An older best one is left out."""
    values = saved_values(run) if (run / CONFIG).is_file() else {}
    keep, identity = values.get("keep"), values.get(CHECKSUMS, {}).get(SEAL, "")
    own = [folder for folder in checkpoint.checkpoints(run) if checkpoint.belongs(folder, identity)]
    return own[: keep if isinstance(keep, int) else None]


@torch.no_grad()
def take_mean(model: Model, work: Workload, result: Result, run: Path, last: int) -> Sequence[int]:
    """Put the mean weights into the model, unless the best step alone does better on the held-out records.

    Returns the steps that were averaged, empty if the mean was not taken. `result` is updated accordingly.
    """
    best = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    steps, weights = mean_weights(run, min(last, len(_latest(run))))
    model.load_state_dict(weights)
    score = work.evaluate(model.eval(), result.steps)
    if score is None:
        return steps
    because = "nothing else was evaluated" if result.best is None else why_better(score, result.best)
    verdict = "no better" if because is None else "better"
    log.info("the mean of %d checkpoints: %s (%s than step %s)", len(steps), score, verdict, result.best_step)
    if because is not None:
        result.best, result.kept_because = score, f"with the mean of {len(steps)} checkpoints {because}"
        return steps
    model.load_state_dict(best)
    return ()
