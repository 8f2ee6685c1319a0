"""Shared by the scripts: options, tables, a training step for other libraries' models, runs with a time limit."""

from __future__ import annotations

import argparse
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from allmask.data import Batch
from allmask.model import Model
from allmask.tasks.seq2seq import Seq2SeqWorkload
from allmask.training import Paused, Score, Settings, checkpoint, resolve_precision, train
from allmask.training.log import read_metrics

ENDLESS = 1_000_000  # steps of a run that ends by time
Curve = list[tuple[int, float, Any]]  # steps, minutes of training, a score on dev


def parser(description: str | None) -> argparse.ArgumentParser:
    return argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)


def log_to_stderr() -> None:
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    logging.getLogger("absl").setLevel(logging.WARNING)  # rouge-score


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table in Markdown."""
    lines = [f"| {' | '.join(row)} |" for row in (head, *rows)]
    return "\n".join([lines[0], "|---" * len(head) + "|", *lines[1:]])


# ---- training other libraries' models ------------------------------------------------------------------------


@contextmanager
def autocast(precision: str = "auto") -> Iterator[None]:
    dtype = resolve_precision(precision)
    with torch.autocast("cpu", dtype, dtype != torch.float32):
        yield


def train_step(
    model: Any, optimizer: torch.optim.Optimizer, rate: float, clip: float, loss_of: Callable[[], Tensor],
    precision: str = "auto",
) -> float:  # fmt: skip
    """One step at a learning rate, with gradients clipped; return the loss."""
    for group in optimizer.param_groups:
        group["lr"] = rate
    model.train()
    with autocast(precision):
        loss = loss_of()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return loss.item()


# ---- runs with a time limit ----------------------------------------------------------------------------------


@dataclass
class Timed:
    """A workload that pauses the run after `minutes` of training; evaluations do not count."""

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
    """Steps, minutes and scores at each evaluation of a run, and a last entry without score for the last step."""
    seconds, curve, step = 0.0, [], 0
    for line in read_metrics(run):
        if f"eval_{metric}" in line:
            curve.append((line["step"], seconds / 60, line[f"eval_{metric}"]))
        else:
            step, seconds = line["step"], seconds + line["tokens"] / max(line["speed"], 1e-9)
    return [*curve, (step, seconds / 60, None)]


def train_timed(model: Model, timed: Timed, settings: Settings) -> None:
    """Train until the time is over; an interrupted run is resumed."""
    with suppress(Paused):
        train(model, timed, settings, timed.run, resume=bool(checkpoint.checkpoints(timed.run)))


def timed_parser(
    description: str | None, files: str, systems: Sequence[str], minutes: float, warmup: int, eval_every: int
) -> argparse.ArgumentParser:
    """Options of scripts with timed runs; `files` are the files in their data folder."""
    made = parser(description)
    made.add_argument("data", type=Path, help=f"a folder with {files}")
    made.add_argument("--systems", default=",".join(systems), help="separated by commas [default: all]")
    made.add_argument("--minutes", type=float, default=minutes, help="of training, for each system")
    made.add_argument("--batch-tokens", type=int, default=4096)
    made.add_argument("--warmup", type=int, default=warmup, help="steps")
    made.add_argument("--eval-every", type=int, default=eval_every, help="steps")
    made.add_argument("--precision", default="auto", choices=("auto", "fp32", "bf16"))
    made.add_argument("--limit", type=int, help="records of each file")
    made.add_argument("--seed", type=int, default=1)
    return made
