"""Runs of our own loop that end when their minutes of training are over, and the curves they leave."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from allmask.data import Batch
from allmask.model import Model
from allmask.tasks.title import TitleWork
from allmask.training import Paused, Score, Settings, runs, train

ENDLESS = 1_000_000  # steps: minutes end a run
Curve = list[tuple[int, float, Any]]  # steps, minutes of training, a score on dev


@dataclass
class Timed:
    """Work that ends when its minutes are over; only those of training count."""

    work: TitleWork
    run: Path
    minutes: float
    metric: str

    @property
    def lengths(self) -> Sequence[int]:
        return self.work.lengths

    def batch(self, numbers: Sequence[int], epoch: int) -> Batch:
        return self.work.batch(numbers, epoch)

    def evaluate(self, model: Model, step: int = 0) -> Score | None:
        score = self.work.evaluate(model, step)
        assert score is not None
        return replace(score, pause=curve_of(self.run, self.metric)[-1][1] >= self.minutes)


def curve_of(run: Path, metric: str) -> Curve:
    """Steps, minutes, and the score where it was judged; the last entry is the last step, judged or not."""
    seconds, curve, step = 0.0, [], 0
    for line in runs.read_metrics(run):
        if f"eval_{metric}" in line:
            curve.append((line["step"], seconds / 60, line[f"eval_{metric}"]))
        else:
            step, seconds = line["step"], seconds + line["tokens"] / max(line["speed"], 1e-9)
    return [*curve, (step, seconds / 60, None)]


def learn(model: Model, timed: Timed, how: Settings, quiet: bool = False) -> None:
    """Until the minutes are over; a run that was stopped goes on."""
    with suppress(Paused):
        train(model, timed, how, timed.run, resume=bool(runs.checkpoints(timed.run)), quiet=quiet)
