"""The one training loop: steps over packed batches, evaluations, checkpoints, and a way back from any interruption.

A step is a pure function of the weights, the optimiser's state and its number: the data order comes from (seed, epoch),
dropout from (seed, step). So a resumed run is bit for bit the run that was never stopped.
"""

from __future__ import annotations

import logging
import math
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from allmask import native
from allmask.attention import Attention
from allmask.data import Batch, Loader, batches, plan_epoch
from allmask.dropout import Dropout
from allmask.errors import DivergedError, Interrupted
from allmask.model import Model
from allmask.objectives import losses_of
from allmask.objectives.losses import Losses
from allmask.training import runs
from allmask.training.average import Average
from allmask.training.board import Board
from allmask.training.distributed import Alone, Crew, expect_alone
from allmask.training.gradients import clip, embedding_gradient
from allmask.training.optimiser import optimiser_of
from allmask.training.peak import measured_peak, operations
from allmask.training.progress import Progress
from allmask.training.schedule import SCHEDULES
from allmask.training.settings import Settings
from allmask.training.stages import stage_of

log = logging.getLogger("allmask")
ALONE = Alone()


@dataclass(frozen=True)
class Score:
    """What an evaluation found. `value` chooses the best checkpoint: higher is better."""

    value: float
    metrics: dict[str, float]
    samples: Sequence[str] = ()  # lines to show
    pause: bool = False  # enough for now: save, and leave the rest of the run for another time


class Paused(Exception):
    """Training ended before its last step because an evaluation asked for it; all is saved."""


class Lot(Protocol):
    """What a step learns from: packed texts, images, …"""

    @property
    def tokens(self) -> int: ...  # or images: how many there are

    @property
    def counts(self) -> dict[str, int]: ...  # of each loss by name, what its mean is over

    def to(self, device: torch.device | str) -> Any: ...


class Share(NamedTuple):
    """What a process computes of a batch."""

    batch: Any  # a Lot
    weight: float = 1.0  # 0: nothing, but it takes part

    @classmethod
    def of(cls, made: Lot | Share) -> Share:
        return made if isinstance(made, Share) else cls(made)

    def counted(self, value: float) -> float:
        return value if self.weight else 0


class Work(Protocol):
    """What is learnt: examples by number, and a way to judge the model now and then.

    A batch is made whole, or, by one of several processes, its share of it.
    """

    @property
    def lengths(self) -> Sequence[int] | np.ndarray: ...  # tokens of each example

    def batch(self, numbers: Sequence[int], epoch: int) -> Lot | Share: ...

    def evaluate(self, model: Any, step: int) -> Score | None: ...  # after so many steps


@dataclass(frozen=True)
class Way:
    """How batches are drawn and learnt from. This is the way of packed texts; a work on other things has a `way`."""

    unit: str = "tokens"  # what a batch has so many of
    plan: Callable[[Any, int, int, int], Sequence[list[int]]] = plan_epoch  # lengths, most of a batch, seed, epoch
    losses: Callable[[Any, Any, float], Losses] = losses_of  # model, batch, label smoothing
    operations: Callable[[Any, Any], int] = lambda model, batch: operations(model.config, batch)


@dataclass
class Result:
    steps: int
    best_step: int | None
    best: Score | None
    seconds: float
    waited: float = 0.0  # seconds of them in which no batch was ready
    stopped_early: bool = False
    weights: dict[str, Tensor] = field(default_factory=dict)  # of the whole model


def train(
    model: nn.Module, work: Work, settings: Settings, run: Path, resume: bool = False, quiet: bool = False,
    crew: Alone | Crew = ALONE,
) -> Result:  # fmt: skip
    """Train in place, leaving the weights of the best evaluation (or the last step) in the model.

    With `settings.ema` it is their running mean that is judged and left there. Every process of a crew calls this with
    the same arguments. In a sharded one each is left with its part of the model, and the result has the whole.
    """
    if isinstance(crew, Alone):
        expect_alone()
    crew.first(lambda: runs.prepare(run, resume))
    trainer = Trainer(model, work, settings, run, quiet or not crew.lead, crew)
    if resume and crew.shared(bool(runs.checkpoints(run))):
        trainer.restore()
    with _signals(trainer):
        return trainer.run_to_end()


@dataclass
class Trainer:
    model: nn.Module
    work: Work
    settings: Settings
    run: Path
    quiet: bool = False
    crew: Alone | Crew = ALONE
    step: int = 0
    bad_steps: int = 0
    skipped: int = 0
    best_step: int | None = None
    best: float = -math.inf
    stale: int = 0  # evaluations since the best
    asked_to_stop: int = 0  # a signal's number
    asked_to_pause: bool = False
    history: dict[str, Any] = field(default_factory=dict)
    latest: dict[str, float] = field(default_factory=dict)  # the last loss of each name

    def __post_init__(self):
        self.way: Way = getattr(self.work, "way", Way())
        self.stage = stage_of(self.model, self.crew)  # first of all: it may put other tensors in the weights' places
        self.optimiser = optimiser_of(self.model, self.settings)
        self.embedding = embedding_gradient(self.model, self.crew)
        if self.settings.dropout is not None:
            set_dropout(self.model, self.settings.dropout)
        if isinstance(self.model, Model):
            self.model.body.recompute = self.settings.recompute
            if self.settings.recompute and self.model.config.family in ("lstm", "elmo"):
                log.warning("recompute: recurrent layers remember all of it; smaller batches need less memory")
        self.average = Average(self.model, self.settings.ema) if self.settings.ema else None
        self.device = next(self.model.parameters()).device.type
        saved = self.model.state_dict().keys()
        self.statistics = [buffer for name, buffer in self.model.named_buffers() if name in saved]  # of batch norms
        self.plans: dict[int, Sequence[list[int]]] = {}
        self.steps = self.settings.steps or self._steps_of_epochs()
        self.eval_every = self.settings.eval_every or max(1, math.ceil(self.steps / 10))
        self.save_every = self.settings.save_every or self.eval_every
        self.dtype = resolve_precision(self.settings.precision)
        self.peak = measured_peak(self.dtype, self.device)
        if self.device == "cpu":
            native.keep_freed_memory()

    # ---- the order of the data -----------------------------------------------------------------------------

    def plan(self, epoch: int) -> Sequence[list[int]]:
        if epoch not in self.plans:
            made = self.way.plan(self.work.lengths, self.settings.batch_tokens, self.settings.seed, epoch)
            self.plans = {epoch: made}
        return self.plans[epoch]

    def _steps_of_epochs(self) -> int:
        whole, part = divmod(self.settings.epochs, 1)
        total = sum(len(self.plan(epoch)) for epoch in range(int(whole)))
        total += round(part * len(self.plan(int(whole)))) if part else 0
        return max(1, math.ceil(total / self.settings.accumulate))

    def _plan_from(self, batch: int) -> Iterator[tuple[int, list[int]]]:
        """(epoch, example numbers) of all batches of the run from one on; epochs follow each other without a seam."""
        epoch = 0
        while True:
            plan = self.plan(epoch)
            for numbers in plan[batch:]:
                yield epoch, numbers
            epoch, batch = epoch + 1, max(0, batch - len(plan))

    def batches_from(self, batch: int) -> Loader[Share]:
        return batches(lambda entry: Share.of(self.work.batch(entry[1], entry[0])), self._plan_from(batch))

    # ---- steps ---------------------------------------------------------------------------------------------

    def run_to_end(self) -> Result:
        began = time.monotonic()
        board = Board(self.run, self.step) if self.settings.tensorboard and self.crew.lead else None
        metrics = runs.Metrics(self.run, self.step, board, write=self.crew.lead)
        bar = Progress(self.steps, "step", self.step, self.quiet)
        source = self.batches_from(self.step * self.settings.accumulate)
        try:
            while self.step < self.steps and not self._out_of_patience():
                self._one_step(source, metrics, bar)
                if asked := self.crew.most(self.asked_to_stop):
                    self._stop(asked)
                if self.asked_to_pause and self.step < self.steps:
                    raise Paused
        finally:
            bar.close()
            source.close()
            metrics.close()
        self._take_best()
        best = Score(self.best, self.history.get("best", {})) if self.best_step is not None else None
        seconds = time.monotonic() - began
        early, weights = self.step < self.steps, self.stage.weights()
        return Result(self.step, self.best_step, best, seconds, source.waited, early, weights)

    def _one_step(self, source: Loader[Share], metrics: runs.Metrics, bar: Progress) -> None:
        started = time.monotonic()
        micro = [next(source) for _ in range(self.settings.accumulate)]
        losses, norm, rate = self._learn(micro)
        loss = sum(losses.values())
        self.step += 1
        seconds = max(1e-9, time.monotonic() - started)
        made = [(share.counted(share.batch.tokens), self.way.operations(self.model, share.batch)) for share in micro]
        units, work = (round(total) for total in self.crew.total([sum(column) for column in zip(*made, strict=True)]))
        reached = work / seconds / self.crew.size
        self.peak = max(self.peak, reached)  # measured while the machine was busy, it was too low
        share = reached / self.peak
        parts = {f"loss_{name}": _finite(value) for name, value in losses.items() if len(losses) > 1 or name != "lm"}
        metrics.add(
            step=self.step, loss=_finite(loss), **parts, norm=_finite(norm), lr=rate, **{self.way.unit: units},
            speed=round(units / seconds, 1), peak=float(f"{share:.3g}"),
        )  # fmt: skip
        self.latest |= losses
        speed = f"{units / seconds:,.0f} {self.way.unit}/s"
        bar.update(self.step, f"{_in_words(self.latest)}  {speed}  {share:.0%} of peak")
        last = self.step == self.steps
        if self.step % self.eval_every == 0 or last:
            self._evaluate(metrics, bar)
        if self.step % self.save_every == 0 or last or self.best_step == self.step or self.asked_to_pause:
            self.save()

    def _learn(self, batches: Sequence[Lot | Share]) -> tuple[dict[str, float], float, float]:
        """One optimiser step; a loss or gradient that is not finite leaves weights and statistics as they were."""
        micro = [Share.of(batch) for batch in batches]
        before = [buffer.clone() for buffer in self.statistics]
        rate = self.settings.lr * self.factor()
        for group in self.optimiser.param_groups:
            group["lr"] = rate
        torch.manual_seed(self._seed())
        self.model.train()
        counts = self._counts(micro)
        told = dict.fromkeys(counts, 0.0)
        for number, share in enumerate(micro, 1):
            with self.stage.summing(last=number == len(micro)), self.embedding.collecting():
                self._backward(share, counts, told)
        told = self._added(told)
        norm = clip(self.model, self.settings.clip)
        good = math.isfinite(sum(told.values())) and math.isfinite(norm)
        if not good:
            for buffer, kept in zip(self.statistics, before, strict=True):
                buffer.copy_(kept)
        self._count_bad(good)
        if good:
            self.optimiser.step()
            if self.average is not None:
                self.average.update(self.step)
        self.optimiser.zero_grad(set_to_none=True)
        self.embedding.clear()
        return told, norm, rate

    def _seed(self) -> int:
        """Of dropout: the same at this step in any run, another in each process."""
        return ((self.settings.seed << 32) + self.step + self.crew.rank * 0x9E3779B97F4A7C15) % (1 << 64)

    def _counts(self, micro: list[Share]) -> dict[str, float]:
        """How many targets the step's losses have, over all batches and processes."""
        counts: dict[str, float] = {}
        for share in micro:
            for name, count in share.batch.counts.items():
                counts[name] = counts.get(name, 0) + share.counted(count)
        return self._added(counts)

    def _added(self, values: dict[str, float]) -> dict[str, float]:
        """Over all processes, whose losses have the same names in the same order."""
        return dict(zip(values, self.crew.total(list(values.values())), strict=True))

    def _backward(self, share: Share, counts: Mapping[str, float], told: dict[str, float]) -> None:
        """Gradients of this process's share of the step's mean losses; what they are is added to `told`."""
        batch = share.batch.to(self.device)
        with torch.autocast(self.device, self.dtype, self.dtype != torch.float32):
            found = self.stage(lambda model: self.way.losses(model, batch, self.settings.label_smoothing))
        means = {name: share.weight * loss / max(1, counts[name]) for name, (loss, _) in found.items()}
        total = torch.stack(list(means.values())).sum()
        (total * self.crew.size).backward()  # the mean over processes of which is the sum that is wanted
        for name, mean in means.items():
            told[name] += mean.item()

    def factor(self) -> float:
        return SCHEDULES[self.settings.schedule](self.step, self.steps, self.settings.warmup_steps(self.steps))

    def _count_bad(self, good: bool) -> None:
        if good:
            self.bad_steps = 0
            return
        self.bad_steps += 1
        self.skipped += 1
        if self.bad_steps >= self.settings.max_bad_steps:
            raise DivergedError(
                f"the loss was not finite for {self.bad_steps} steps in a row, up to step {self.step + 1}",
                f"no such step changed a weight; start again with a lower --lr (now {self.settings.lr})",
            )

    # ---- judging and keeping -------------------------------------------------------------------------------

    def _evaluate(self, metrics: runs.Metrics, bar: Progress) -> None:
        self.model.eval()
        with torch.no_grad(), self.averaged():
            score = self.crew.shared(self.stage(lambda model: self.work.evaluate(model, self.step)))
        if score is None:
            return
        if score.metrics:
            metrics.add(step=self.step, **{f"eval_{name}": value for name, value in score.metrics.items()})
            bar.say(f"step {self.step}: " + "  ".join(f"{name} {value:.4g}" for name, value in score.metrics.items()))
        for line in score.samples:
            bar.say(line)
        self.asked_to_pause = score.pause
        if score.value > self.best:
            self.best, self.best_step, self.stale = score.value, self.step, 0
            self.history["best"] = dict(score.metrics)
        else:
            self.stale += 1

    def averaged(self) -> AbstractContextManager[None]:
        """Within it the model has the weights that are judged and kept."""
        return nullcontext() if self.average is None else self.average.in_place()

    def _out_of_patience(self) -> bool:
        return self.settings.patience is not None and self.stale >= self.settings.patience

    def save(self) -> None:
        numbers = {"best": self.best if self.best_step is not None else None, "best_step": self.best_step}
        numbers |= {"stale": self.stale, "skipped": self.skipped, "bad_steps": self.bad_steps, "history": self.history}
        average = None if self.average is None else self.average.tensors()
        state = runs.State(self.step, self.model.state_dict(), runs.optimiser_tensors(self.optimiser), numbers, average)
        self.stage.save(self.run, state)
        self.crew.first(lambda: runs.prune(self.run, self.settings.keep, self.best_step))

    def restore(self) -> None:
        state = self.stage.load(self._newest(), self.optimiser)
        self.model.load_state_dict(state.model)
        runs.restore_optimiser(self.optimiser, state.optimiser)
        if self.average is not None:
            self.average.restore(state.average or {})
        self.step, self.best_step = state.step, state.numbers["best_step"]
        self.best = -math.inf if self.best_step is None else state.numbers["best"]
        self.stale, self.skipped = state.numbers["stale"], state.numbers["skipped"]
        self.bad_steps, self.history = state.numbers["bad_steps"], state.numbers["history"]

    def _newest(self) -> Path:
        """The newest checkpoint that is whole, as the first process sees it."""
        warnings: list[str] = []
        folder = self.crew.shared(self.crew.first(lambda: runs.newest_verified(self.run, warnings.append)))
        for line in warnings:
            Progress(0, "", quiet=self.quiet).say(line)
        if folder is None:
            raise runs.CheckpointError(f"{self.run}: no checkpoint is whole", "start a new run")
        return folder

    def _take_best(self) -> None:
        """Leave the weights of the best evaluation in the model, or their running mean at the time."""
        if self.best_step not in (None, self.step):
            folder = self.run / "checkpoints" / f"step-{self.best_step:08d}"
            if self.crew.shared(self.crew.first(lambda: runs.verify(folder) is None)):
                state = self.stage.load(folder, self.optimiser)
                self.model.load_state_dict({**state.model, **(state.average or {})})
                return
        if self.average is not None:
            self.model.load_state_dict(self.average.tensors(), strict=False)

    def _stop(self, signal_number: int) -> None:
        self.save()
        raise Interrupted(f"stopped after step {self.step} of {self.steps}; saved", 128 + signal_number)


def set_dropout(model: nn.Module, p: float) -> None:
    """Another dropout for this training; what is saved keeps the model's own.

    It goes where the model drops anything, so one without dropout in its attention stays so; everywhere, where the
    model drops nothing at all.
    """
    places = [(module, "p") for module in model.modules() if isinstance(module, Dropout)]
    places += [(module, "dropout") for module in model.modules() if isinstance(module, Attention)]
    for module, name in [place for place in places if getattr(*place)] or places:
        setattr(module, name, p)


def loss_of(model: Model, batch: Batch, smoothing: float = 0.0) -> Tensor:
    """Summed cross-entropy over the tokens that have a label."""
    return losses_of(model, batch, smoothing)[batch.name][0]


@torch.no_grad()
def mean_loss(model: Model, held_out: Sequence[Batch]) -> float:
    """Cross-entropy a target over batches that are not trained on."""
    model.eval()
    total = sum(loss_of(model, batch).item() for batch in held_out)
    return total / max(1, sum(batch.targets for batch in held_out))


def resolve_precision(precision: str) -> torch.dtype:
    if precision == "auto":
        precision = "bf16" if torch.cpu._is_avx512_bf16_supported() or torch.cuda.is_available() else "fp32"
    return torch.bfloat16 if precision == "bf16" else torch.float32


def _in_words(losses: Mapping[str, float]) -> str:
    """loss 2.345, or with several objectives, which take turns: loss mlm 2.345 causal 3.456."""
    told = [f"{value:.3f}" if name == "lm" else f"{name} {value:.3f}" for name, value in losses.items()]
    return f"loss {'  '.join(told)}"


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


@contextmanager
def _signals(trainer: Trainer) -> Iterator[None]:
    """Ctrl-C and SIGTERM let the step end, save and say how to go on; a second one stops at once."""

    def ask(number: int, frame: object) -> None:
        if trainer.asked_to_stop:
            raise KeyboardInterrupt
        trainer.asked_to_stop = number

    before = {number: signal.signal(number, ask) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
