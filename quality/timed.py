"""Runs of our own loop that end when their minutes of training are over, and the curves they leave."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from allmask.data import Batch
from allmask.model import Model
from allmask.tasks.seq2seq import Seq2SeqWorkload
from allmask.training import Paused, Score, Settings, checkpoint, train
from allmask.training.log import read_metrics

ENDLESS = 1_000_000  # steps: minutes end a run
Curve = list[tuple[int, float, Any]]  # steps, minutes of training, a score on dev


@dataclass
class Timed:
    """Workload that ends when its minutes are over; only those of training count."""

    work: Seq2SeqWorkload
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
    for line in read_metrics(run):
        if f"eval_{metric}" in line:
            curve.append((line["step"], seconds / 60, line[f"eval_{metric}"]))
        else:
            step, seconds = line["step"], seconds + line["tokens"] / max(line["speed"], 1e-9)
    return [*curve, (step, seconds / 60, None)]


def learn(model: Model, timed: Timed, how: Settings) -> None:
    """Until the minutes are over; a run that was stopped goes on."""
    with suppress(Paused):
        train(model, timed, how, timed.run, resume=bool(checkpoint.checkpoints(timed.run)))


def options(
    description: str | None, files: str, systems: Sequence[str], minutes: float, warmup: int, eval_every: int
) -> argparse.ArgumentParser:
    """What all scripts of such runs are asked; `files` says what their folder of data holds."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path, help=f"a folder with {files}")
    parser.add_argument("--systems", default=",".join(systems))
    parser.add_argument("--minutes", type=float, default=minutes, help="of training, for each system")
    parser.add_argument("--batch-tokens", type=int, default=4096)
    parser.add_argument("--warmup", type=int, default=warmup, help="steps")
    parser.add_argument("--eval-every", type=int, default=eval_every)
    parser.add_argument("--precision", default="auto", choices=("auto", "fp32", "bf16"))
    parser.add_argument("--limit", type=int, help="records of each file")
    parser.add_argument("--seed", type=int, default=1)
    return parser
