"""The one training loop: steps over packed batches, evaluations, checkpoints, and exact resumption.

A step is a pure function of the weights, the optimizer's state and its number: the data order comes from (seed, epoch),
dropout from (seed, step). So a resumed run is bit for bit the run that was never stopped.
"""

from __future__ import annotations

import logging
import math
import signal
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from allmask.data import Batch, Loader, batches, plan_epoch
from allmask.errors import CheckpointError, DivergedError, Interrupted
from allmask.kernels.memory import keep_freed_memory
from allmask.kernels.precision import resolve_precision
from allmask.losses import Losses
from allmask.model import Model
from allmask.nn.attention import Attention
from allmask.nn.dropout import Dropout
from allmask.objectives import losses_of
from allmask.options import Settings
from allmask.training import checkpoint
from allmask.training.ema import Average
from allmask.training.flops import measured_peak, operations
from allmask.training.log import Board, Metrics
from allmask.training.optimizer import clip, embedding_gradient, optimizer_for
from allmask.training.process_group import ProcessGroup, SingleProcess, expect_alone
from allmask.training.progress import Progress
from allmask.training.schedule import SCHEDULES
from allmask.training.strategy import strategy_for

log = logging.getLogger("allmask")
SINGLE_PROCESS = SingleProcess()
EVALUATIONS = 10  # of a run, at most, unless --eval-every says otherwise
APART = 10  # steps between two of them, at least, in a short run
SHOWN = 5  # samples are shown at each fifth evaluation, and at the last


# ---- evaluations ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Score:
    """The result of an evaluation.

    `value`, higher is better, is that of the main `metric`; `stderr` is its standard error over the held-out records,
    and `loss` their mean loss. `why_better` compares evaluations by these.
    """

    value: float
    metrics: dict[str, float]
    samples: Sequence[str] = ()  # lines to show now and then
    pause: bool = False  # save now, and leave the rest of the run for another time
    loss: float | None = None
    stderr: float | None = None
    metric: str = "the score"  # "−frechet" if less of it is better
    warnings: Sequence[str] = ()  # lines to show at once

    def __str__(self) -> str:
        return "  ".join(f"{name} {value:.4g}" for name, value in self.metrics.items())


def why_better(score: Score, best: Score) -> str | None:
    """Say why an evaluation is better than the best so far; None if it is not.

    A metric of a few held-out records is noisy: only a difference larger than its standard error counts, otherwise the
    lower held-out loss decides. Scores that know neither are compared as they are.
    """
    difference, noise = score.value - best.value, None
    if score.stderr is not None and best.stderr is not None:
        noise = math.hypot(score.stderr, best.stderr)
        if abs(difference) > noise:
            return f"{score.metric} rose by {difference:.3g} ± {noise:.2g}" if difference > 0 else None
    if score.loss is not None and best.loss is not None:
        if score.loss >= best.loss:
            return None
        fell = f"the held-out loss fell from {best.loss:.4g} to {score.loss:.4g}"
        return fell if noise is None else f"{fell} ({score.metric}: {difference:+.3g} ± {noise:.2g}, which is noise)"
    if not difference > 0:
        return None
    if score.metric.startswith("−"):
        return f"{score.metric[1:]} fell from {-best.value:.4g} to {-score.value:.4g}"
    return f"{score.metric} rose from {best.value:.4g} to {score.value:.4g}"


def standard_error(values: Iterable[float]) -> float | None:
    """Of the mean of values, one per record; None for fewer than two."""
    found = np.fromiter(values, dtype=np.float64)
    return float(found.std(ddof=1) / math.sqrt(len(found))) if len(found) > 1 else None


class Paused(Exception):
    """Training ended before its last step because an evaluation asked for it; all is saved."""


# ---- what is trained on --------------------------------------------------------------------------------------


class TrainingBatch(Protocol):
    """What a step learns from: packed texts, images, …"""

    @property
    def tokens(self) -> int: ...  # or images: how many there are

    @property
    def counts(self) -> dict[str, int]: ...  # of each loss by name, how many targets its mean is over

    def to(self, device: torch.device | str) -> Any: ...


class Share(NamedTuple):
    """The part of a batch that one process computes."""

    batch: Any  # a TrainingBatch
    weight: float = 1.0  # 0: it only takes part in the exchange of gradients

    def counted(self, value: float) -> float:
        return value if self.weight else 0


class Workload(Protocol):
    """What is learnt: examples by number, and an evaluation.

    Optional: `step_spec`, a `StepSpec`, for other things than packed texts; `part(numbers, whole, epoch)`, the batch of
    some of the examples of a whole batch, where that depends on the others; `evaluates_shards`, True if `evaluate`
    calls nothing but the forward pass, so that each process needs only its part of the weights.
    """

    @property
    def lengths(self) -> Sequence[int] | np.ndarray: ...  # tokens of each example

    def batch(self, numbers: Sequence[int], epoch: int) -> TrainingBatch: ...

    def evaluate(self, model: Any, step: int) -> Score | None: ...  # after so many steps


@dataclass(frozen=True)
class StepSpec:
    """How batches are drawn and learnt from; the defaults are for packed texts."""

    unit: str = "tokens"  # what a batch is measured in
    plan: Callable[[Any, int, int, int], Sequence[list[int]]] = plan_epoch  # lengths, most of a batch, seed, epoch
    losses: Callable[[Any, Any, float], Losses] = losses_of  # model, batch, label smoothing
    operations: Callable[[Any, Any], int] = lambda model, batch: operations(model.config, batch)


@dataclass(frozen=True, eq=False)
class Dealt:
    """A workload as one of `size` processes sees it: its share of each batch, as it is in the whole batch."""

    work: Workload
    rank: int = 0
    size: int = 1

    def share(self, numbers: Sequence[int], epoch: int) -> Share:
        if self.size == 1:
            return Share(self.work.batch(numbers, epoch))
        mine, weight = dealt(numbers, self.rank, self.size)
        part = getattr(self.work, "part", lambda mine, whole, epoch: self.work.batch(mine, epoch))
        return Share(part(mine, numbers, epoch), weight)


def dealt(numbers: Sequence[int], rank: int, size: int) -> tuple[Sequence[int], float]:
    """The examples of a batch that a process gets, and the weight of what it computes.

    They are dealt one by one. A plan has them sorted by length, so the processes' tokens differ by at most the longest
    example (twice that where two pools of the plan meet). With fewer examples than processes some repeat an example
    with weight 0: all must take part when gradients are added.
    """
    if rank < len(numbers):
        return numbers[rank::size], 1.0
    return [numbers[rank % len(numbers)]], 0.0


# ---- the loop ------------------------------------------------------------------------------------------------


@dataclass
class Result:
    steps: int
    best_step: int | None
    best: Score | None
    seconds: float
    waited: float = 0.0  # seconds of them in which no batch was ready
    stopped_early: bool = False
    weights: dict[str, Tensor] = field(default_factory=dict)  # of the whole model
    kept_because: str = "nothing is held out"  # why the weights of this step are the ones that are kept


def train(
    model: nn.Module, work: Workload, settings: Settings, run: Path, resume: bool = False, quiet: bool = False,
    group: SingleProcess | ProcessGroup = SINGLE_PROCESS, evaluations: int | None = None, held_out: int = 0,
) -> Result:  # fmt: skip
    """Train in place, leaving the weights of the best evaluation (or the last step) in the model.

    With `settings.ema` their running mean is evaluated and kept. Every process of a group calls this with the same
    arguments. In a sharded one each is left with its part of the model, and the result has the whole.

    Without `settings.eval_every` there are so many `evaluations`, or as many as suit the number of steps and the tokens
    that are `held_out`.
    """
    if isinstance(group, SingleProcess):
        expect_alone()
    group.first(lambda: checkpoint.prepare(run, resume))
    trainer = Trainer(
        model, work, settings, run, quiet or not group.lead, group, evaluations=evaluations, held_out=held_out
    )
    if resume and group.shared(bool(checkpoint.checkpoints(run))):
        trainer.restore()
    with _signals(trainer):
        return trainer.run_to_end()


@dataclass
class Trainer:
    model: nn.Module
    work: Workload
    settings: Settings
    run: Path
    quiet: bool = False
    group: SingleProcess | ProcessGroup = SINGLE_PROCESS
    step: int = 0
    bad_steps: int = 0
    skipped: int = 0
    best_step: int | None = None
    best: Score | None = None
    because: str = Result.kept_because
    stale: int = 0  # evaluations since the best
    asked_to_stop: int = 0  # a signal's number
    asked_to_pause: bool = False
    latest: dict[str, float] = field(default_factory=dict)  # the last loss of each name
    unseen: Sequence[str] = ()  # samples of the last evaluation that were not shown
    evaluations: int | None = None
    held_out: int = 0

    def __post_init__(self):
        self.step_spec: StepSpec = getattr(self.work, "step_spec", StepSpec())
        self.dealt = Dealt(self.work, self.group.rank, self.group.size)
        # First of all: it may put other tensors in the weights' places
        self.strategy = strategy_for(self.model, self.group, getattr(self.work, "evaluates_shards", False))
        self.optimizer = optimizer_for(self.model, self.settings)
        self.embedding = embedding_gradient(self.model, self.group)
        if self.settings.dropout is not None:
            set_dropout(self.model, self.settings.dropout)
        if isinstance(self.model, Model):
            self.model.body.recompute = self.settings.recompute
            if self.settings.recompute and self.model.config.family in ("lstm", "elmo"):
                log.warning("--recompute does nothing for recurrent layers; smaller batches need less memory")
        self.average = Average(self.model, self.settings.ema) if self.settings.ema else None
        self.device = next(self.model.parameters()).device.type
        saved = self.model.state_dict().keys()
        self.statistics = [buffer for name, buffer in self.model.named_buffers() if name in saved]  # of batch norms
        self.plans: dict[int, Sequence[list[int]]] = {}
        self.steps = self.settings.steps or self._steps_of_epochs()
        self.eval_every = self.settings.eval_every or self._steps_between_evaluations()
        self.save_every = self.settings.save_every or self.eval_every
        self.dtype = resolve_precision(self.settings.precision, self.device)
        self.peak = measured_peak(self.dtype, self.device)  # operations per second
        if self.device == "cpu":
            keep_freed_memory()

    def _steps_between_evaluations(self) -> int:
        """At most ten evaluations, fewer in a short run, and no more tokens evaluated than trained on.

        A token costs a third of the time without its backward pass, so evaluations take a quarter of the run at most.
        """
        count = self.evaluations
        if count is None:
            trained = self.steps * self.settings.batch_tokens * self.settings.accumulate
            affordable = trained // self.held_out if self.held_out else EVALUATIONS
            count = max(1, min(EVALUATIONS, self.steps // APART, affordable))
        return max(1, math.ceil(self.steps / count))

    # ---- the order of the data -----------------------------------------------------------------------------

    def plan(self, epoch: int) -> Sequence[list[int]]:
        if epoch not in self.plans:
            made = self.step_spec.plan(self.work.lengths, self.settings.batch_tokens, self.settings.seed, epoch)
            self.plans = {epoch: made}
        return self.plans[epoch]

    def _steps_of_epochs(self) -> int:
        whole, part = divmod(self.settings.epochs, 1)
        total = sum(len(self.plan(epoch)) for epoch in range(int(whole)))
        total += round(part * len(self.plan(int(whole)))) if part else 0
        return max(1, math.ceil(total / self.settings.accumulate))

    def _plan_from(self, batch: int) -> Iterator[tuple[int, list[int]]]:
        """(epoch, example numbers) of all batches from one on; epochs follow each other without a break."""
        epoch = 0
        while True:
            plan = self.plan(epoch)
            for numbers in plan[batch:]:
                yield epoch, numbers
            epoch, batch = epoch + 1, max(0, batch - len(plan))

    def batches_from(self, batch: int) -> Loader[Share]:
        return batches(lambda entry: self.dealt.share(entry[1], entry[0]), self._plan_from(batch))

    # ---- steps ---------------------------------------------------------------------------------------------

    def run_to_end(self) -> Result:
        began = time.monotonic()
        board = Board(self.run, self.step) if self.settings.tensorboard and self.group.lead else None
        metrics = Metrics(self.run, self.step, board, write=self.group.lead)
        bar = Progress(self.steps, "step", self.step, self.quiet)
        source = self.batches_from(self.step * self.settings.accumulate)
        try:
            while self.step < self.steps and not self._out_of_patience():
                self._one_step(source, metrics, bar)
                if asked := self.group.most(self.asked_to_stop):
                    self._stop(asked)
                if self.asked_to_pause and self.step < self.steps:
                    raise Paused
            for line in self.unseen:
                bar.say(line)
        finally:
            bar.close()
            source.close()
            metrics.close()
        self._take_best()
        seconds = time.monotonic() - began
        early, weights = self.step < self.steps, self.strategy.weights()
        return Result(
            self.step, self.best_step, self.best, seconds, source.waited, early, weights, kept_because=self.because
        )

    def _one_step(self, source: Loader[Share], metrics: Metrics, bar: Progress) -> None:
        started = time.monotonic()
        micro = [next(source) for _ in range(self.settings.accumulate)]
        losses, norm, rate = self._learn(micro)
        loss = sum(losses.values())
        self.step += 1
        seconds = max(1e-9, time.monotonic() - started)
        made = [
            (share.counted(share.batch.tokens), self.step_spec.operations(self.model, share.batch)) for share in micro
        ]
        units, work = (round(total) for total in self.group.total([sum(column) for column in zip(*made, strict=True)]))
        reached = work / seconds / self.group.size
        self.peak = max(self.peak, reached)  # measured while the machine was busy, it was too low
        mfu = reached / self.peak
        parts = {f"loss_{name}": _finite(value) for name, value in losses.items() if len(losses) > 1 or name != "lm"}
        metrics.add(
            step=self.step, loss=_finite(loss), **parts, norm=_finite(norm), lr=rate, **{self.step_spec.unit: units},
            speed=round(units / seconds, 1), mfu=float(f"{mfu:.3g}"),
        )  # fmt: skip
        self.latest |= losses
        speed = f"{units / seconds:,.0f} {self.step_spec.unit}/s"
        bar.update(self.step, f"{_in_words(self.latest)}  {speed}  MFU {mfu:.0%}")
        last = self.step == self.steps
        if self.step % self.eval_every == 0 or last:
            self._evaluate(metrics, bar)
        if self.step % self.save_every == 0 or last or self.best_step == self.step or self.asked_to_pause:
            self.save()

    def _learn(self, batches: Sequence[TrainingBatch | Share]) -> tuple[dict[str, float], float, float]:
        """One optimizer step; a loss or gradient that is not finite leaves weights and statistics as they were."""
        micro = [batch if isinstance(batch, Share) else Share(batch) for batch in batches]
        before = [buffer.clone() for buffer in self.statistics]
        rate = self.settings.lr * self.factor()
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        torch.manual_seed(self._seed())
        self.model.train()
        counts = self._counts(micro)
        losses = dict.fromkeys(counts, 0.0)
        for number, share in enumerate(micro, 1):
            with self.strategy.summing(last=number == len(micro)), self.embedding.collecting():
                self._backward(share, counts, losses)
        losses = self._added(losses)
        norm = clip(self.model, self.settings.clip)
        good = math.isfinite(sum(losses.values())) and math.isfinite(norm)
        if not good:
            for buffer, kept in zip(self.statistics, before, strict=True):
                buffer.copy_(kept)
        self._count_bad(good)
        if good:
            self.optimizer.step()
            if self.average is not None:
                self.average.update(self.step)
        self.optimizer.zero_grad(set_to_none=True)
        self.embedding.clear()
        return losses, norm, rate

    def _seed(self) -> int:
        """Of dropout: the same at this step in any run, another one in each process."""
        return ((self.settings.seed << 32) + self.step + self.group.rank * 0x9E3779B97F4A7C15) % (1 << 64)

    def _counts(self, micro: Sequence[Share]) -> dict[str, float]:
        """How many targets each loss of the step has, over all batches and processes."""
        counts: dict[str, float] = {}
        for share in micro:
            for name, count in share.batch.counts.items():
                counts[name] = counts.get(name, 0) + share.counted(count)
        return self._added(counts)

    def _added(self, values: dict[str, float]) -> dict[str, float]:
        """The sums over all processes, whose losses have the same names in the same order."""
        return dict(zip(values, self.group.total(list(values.values())), strict=True))

    def _backward(self, share: Share, counts: Mapping[str, float], losses: dict[str, float]) -> None:
        """Backpropagate this process's share of the step's mean losses, and add them to `losses`."""
        batch = share.batch.to(self.device)
        with torch.autocast(self.device, self.dtype, self.dtype != torch.float32):
            found = self.strategy(lambda model: self.step_spec.losses(model, batch, self.settings.label_smoothing))
        means = {name: share.weight * loss / max(1, counts[name]) for name, (loss, _) in found.items()}
        total = torch.stack(list(means.values())).sum()
        (total * self.group.size).backward()  # DDP and FSDP average gradients over processes; their sum is wanted
        for name, mean in means.items():
            losses[name] += mean.item()

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

    # ---- evaluating and keeping ----------------------------------------------------------------------------

    def _evaluate(self, metrics: Metrics, bar: Progress) -> None:
        self.model.eval()
        with torch.no_grad(), self.averaged():
            score = self.group.shared(self.strategy.evaluate(lambda model: self.work.evaluate(model, self.step)))
        if score is None:
            return
        if score.metrics:
            metrics.add(step=self.step, **{f"eval_{name}": value for name, value in score.metrics.items()})
            bar.say(f"step {self.step}: {score}")
        for line in score.warnings:
            bar.say(line)
        self.unseen = score.samples
        if self.step % (SHOWN * self.eval_every) == 0:
            for line in self.unseen:
                bar.say(line)
            self.unseen = ()
        self.asked_to_pause = score.pause
        self._compare(score)

    def _compare(self, score: Score) -> None:
        """Take an evaluation for the best one if it is."""
        if self.best is None:
            because = "it was the first evaluation" if score.value > -math.inf else None
        else:
            because = why_better(score, self.best)
            because = because and f"since step {self.best_step} {because}"
        if because is None:
            self.stale += 1
        else:
            self.best, self.best_step, self.stale, self.because = score, self.step, 0, because

    def averaged(self) -> AbstractContextManager[None]:
        """Within it the model has the weights that are evaluated and kept."""
        return nullcontext() if self.average is None else self.average.in_place()

    def _out_of_patience(self) -> bool:
        return self.settings.patience is not None and self.stale >= self.settings.patience

    def save(self) -> None:
        best = None
        if self.best is not None:
            best = {name: getattr(self.best, name) for name in ("value", "metrics", "loss", "stderr", "metric")}
        numbers = {"best": best, "best_step": self.best_step, "because": self.because, "stale": self.stale}
        numbers |= {"skipped": self.skipped, "bad_steps": self.bad_steps}
        average = None if self.average is None else self.average.tensors()
        optimizer = checkpoint.optimizer_tensors(self.optimizer)
        state = checkpoint.State(self.step, self.model.state_dict(), optimizer, numbers, average)
        self.strategy.save(self.run, state)
        self.group.first(lambda: checkpoint.prune(self.run, self.settings.keep, self.best_step))

    def restore(self) -> None:
        state = self.strategy.load(self._newest(), self.optimizer)
        self.model.load_state_dict(state.model)
        checkpoint.restore_optimizer(self.optimizer, state.optimizer)
        if self.average is not None:
            self.average.restore(state.average or {})
        numbers = state.numbers
        self.step, self.best_step, self.because = state.step, numbers["best_step"], numbers["because"]
        self.best = None if numbers["best"] is None else Score(**numbers["best"])
        self.stale, self.skipped, self.bad_steps = numbers["stale"], numbers["skipped"], numbers["bad_steps"]

    def _newest(self) -> Path:
        """The newest intact checkpoint, as the first process sees it."""
        warnings: list[str] = []
        folder = self.group.shared(self.group.first(lambda: checkpoint.newest_resumable(self.run, warnings.append)))
        for line in warnings:
            Progress(0, "", quiet=self.quiet).say(line)
        if folder is None:
            raise CheckpointError(f"{self.run}: no checkpoint is whole", "start a new run")
        return folder

    def _take_best(self) -> None:
        """Leave the weights of the best evaluation in the model, or their running mean at the time."""
        if self.best_step not in (None, self.step):
            folder = self.run / "checkpoints" / f"step-{self.best_step:08d}"
            if self.group.shared(self.group.first(lambda: checkpoint.verify(folder) is None)):
                state = self.strategy.load(folder, self.optimizer)
                self.model.load_state_dict({**state.model, **(state.average or {})})
                return
            self.because = f"the checkpoint of the best step, {self.best_step}, is damaged"
        if self.average is not None:
            self.model.load_state_dict(self.average.tensors(), strict=False)

    def _stop(self, signal_number: int) -> None:
        self.save()
        raise Interrupted(f"stopped after step {self.step} of {self.steps}; saved", 128 + signal_number)


def set_dropout(model: nn.Module, p: float) -> None:
    """Train with another dropout; what is saved keeps the model's own.

    It is set where the model drops anything, so one without dropout in its attention stays so; in a model without any
    dropout it is set everywhere.
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
    """Mean cross-entropy per target over held-out batches."""
    model.eval()
    total = sum(loss_of(model, batch).item() for batch in held_out)
    return total / max(1, sum(batch.targets for batch in held_out))


def _in_words(losses: Mapping[str, float]) -> str:
    """loss 2.345, or with several objectives, which take turns: loss mlm 2.345 causal 3.456."""
    named = [f"{value:.3f}" if name == "lm" else f"{name} {value:.3f}" for name, value in losses.items()]
    return f"loss {'  '.join(named)}"


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


@contextmanager
def _signals(trainer: Trainer) -> Iterator[None]:
    """Let Ctrl-C and SIGTERM finish the step, save, and explain how to resume; a second one stops at once."""

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
