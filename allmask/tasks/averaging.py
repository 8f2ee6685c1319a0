"""The mean of a run's last checkpoints: weights that wander around a valley meet near its floor (arXiv 1706.03762)."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from allmask.errors import CheckpointError, UsageError
from allmask.model import Model, load
from allmask.tasks.folders import CONFIG, saved_values
from allmask.tasks.saved import Task, load_task
from allmask.training import Result, runs
from allmask.training.loop import Work

log = logging.getLogger("allmask")


def mean_model(run: Path, last: int | None = None, usual: int = 5) -> tuple[Model, Task | None, list[int]]:
    """The model of a run with the mean weights of its `last` checkpoints, its task, and which steps these are."""
    if not runs.checkpoints(run) or not (run / "start").is_dir():
        raise CheckpointError(f"{run}: no run with checkpoints", "name the folder that was its --out")
    steps, weights = mean_weights(run, min(usual, len(_in_a_row(run))) if last is None else last)
    model = load(run / "start")
    model.load_state_dict(weights)
    return model, load_task(run / "final") or load_task(run / "start"), steps


def mean_weights(run: Path, last: int) -> tuple[list[int], dict[str, Tensor]]:
    """Of the last checkpoints of a run, every byte of which is checked; a damaged one is an error."""
    found = _in_a_row(run)
    chosen = found[:last]
    if len(chosen) < last or last < 1:
        raise UsageError(f"{run}: has {len(found)} checkpoints, not {last}", "ask for fewer, or train with --keep")
    for folder in chosen:
        problem = runs.verify(folder)
        if problem is not None:
            raise CheckpointError(f"{folder}: {problem}", "leave it out: ask for fewer, or remove the folder")
    steps, sums = [], {}
    for folder in reversed(chosen):
        state = runs.load_state(folder)
        steps.append(state.step)
        for name, tensor in {**state.model, **(state.average or {})}.items():
            sums[name] = sums[name] + tensor.double() if name in sums else tensor.double()
    return steps, {name: (total / len(chosen)).float() for name, total in sums.items()}


def _in_a_row(run: Path) -> list[Path]:
    """The newest ones, as many as the run was told to keep: the best one, from long ago, may be there, too."""
    keep = saved_values(run).get("keep") if (run / CONFIG).is_file() else None
    return runs.checkpoints(run)[: keep if isinstance(keep, int) else None]


@torch.no_grad()
def take_mean(model: Model, work: Work, result: Result, run: Path, last: int) -> Sequence[int]:
    """Leave the mean in the model, unless held-out records say that the best step alone is better.

    Gives the steps of which it is the mean, none if it was not taken; the result tells what was found of what is left.
    """
    best = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    steps, weights = mean_weights(run, min(last, len(_in_a_row(run))))
    model.load_state_dict(weights)
    score = work.evaluate(model.eval(), result.steps)
    if score is None:
        return steps
    told = "  ".join(f"{name} {value:.4g}" for name, value in score.metrics.items())
    better = result.best is None or score.value > result.best.value
    verdict = "better" if better else "no better"
    log.info("the mean of %d checkpoints: %s (%s than step %s)", len(steps), told, verdict, result.best_step)
    if better:
        result.best = score
        return steps
    model.load_state_dict(best)
    return ()
