"""The one training loop: steps over packed batches, evaluations, checkpoints, and exact resumption.

A step depends only on the weights, the optimizer's state and the number of the step: the data order follows from (seed,
epoch), dropout from (seed, step). So a resumed run equals an uninterrupted one bit for bit.
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

from allmask.data import Batch, Loader, plan_epoch
from allmask.errors import CheckpointError, DivergedError, Interrupted, ResourceError, out_of_memory
from allmask.files import Seal
from allmask.kernels.memory import heap_in_huge_pages, keep_freed_memory, large_blocks_from_the_heap
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
from allmask.training.log import Metrics, read_metrics
from allmask.training.optimizer import ClippingAdamW, RowGradient, clip, embedding_gradient, optimizer_for
from allmask.training.process_group import Group, SingleProcess, expect_alone
from allmask.training.progress import Progress
from allmask.training.schedule import SCHEDULES
from allmask.training.strategy import strategy_for

log = logging.getLogger("allmask")
SINGLE_PROCESS = SingleProcess()
EVALUATIONS = 10  # per run, at most, without --eval-every
APART = 10  # steps between two evaluations, at least, without --eval-every
SAVED_NUMBERS = ("best_step", "because", "stale", "skipped", "bad_steps")  # attributes of Trainer, in state.json
SHOWN = 5  # show samples at every fifth evaluation, and at the last


# ---- evaluations ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Score:
    """The result of an evaluation.

    `value` is that of the main `metric`, higher is better; `stderr` is its standard error over the held-out records,
    and `loss` their mean loss. `why_better` compares these.
    """

    value: float
    metrics: dict[str, float]
    samples: Sequence[str] = ()  # lines to print now and then
    pause: bool = False  # save and stop; the run can be continued later
    stop: bool = False  # end the run here, with the best weights so far
    loss: float | None = None
    stderr: float | None = None
    metric: str = "the score"  # "−frechet" if lower is better
    warnings: Sequence[str] = ()  # lines to print at once

    def __str__(self) -> str:
        return "  ".join(f"{name} {value:.4g}" for name, value in self.metrics.items())


def why_better(score: Score, best: Score) -> str | None:
    """Explain why an evaluation is better than the best so far; None if it is not.

    A metric of a few held-out records is noisy: a difference counts only if it exceeds its standard error, otherwise
    the lower held-out loss decides. Without standard errors and losses the values are compared directly.
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
    """Return the standard error of the mean of values, one per record; None for fewer than two."""
    found = np.fromiter(values, dtype=np.float64)
    return float(found.std(ddof=1) / math.sqrt(len(found))) if len(found) > 1 else None


class Paused(Exception):
    """Training stopped before its last step because an evaluation asked for a pause; everything is saved."""


# ---- workloads -----------------------------------------------------------------------------------------------


class TrainingBatch(Protocol):
    """A batch of packed texts, images, …"""

    @property
    def tokens(self) -> int: ...  # number of tokens, or of images

    @property
    def counts(self) -> dict[str, int]: ...  # number of targets by the name of the loss

    def to(self, device: torch.device | str) -> Any: ...


class Share(NamedTuple):
    """The part of a batch that one process computes."""

    batch: Any  # a TrainingBatch
    weight: float = 1.0  # 0: computed only to take part in the exchange of gradients

    def counted(self, value: float) -> float:
        return value if self.weight else 0


class Workload(Protocol):
    """What to train on: examples by number, and an evaluation.

    Optional attributes: `step_spec`, a `StepSpec`, for data other than packed texts; `part(numbers, whole, epoch)`, the
    batch of some examples of a whole batch, if it depends on the others; `evaluates_shards`, True if `evaluate` calls
    only the forward pass, so that each process needs only its part of the weights.
    """

    @property
    def lengths(self) -> Sequence[int] | np.ndarray: ...  # tokens of each example

    def batch(self, numbers: Sequence[int], epoch: int) -> TrainingBatch: ...

    def evaluate(self, model: Any, step: int) -> Score | None: ...  # after `step` steps


@dataclass(frozen=True)
class StepSpec:
    """How batches are planned and trained on; the defaults are for packed texts."""

    unit: str = "tokens"  # in which the size of a batch is measured
    plan: Callable[[Any, int, int, int], Sequence[list[int]]] = plan_epoch  # lengths, batch size, seed, epoch
    losses: Callable[[Any, Any, float], Losses] = losses_of  # model, batch, label smoothing
    operations: Callable[[Any, Any], int] = lambda model, batch: operations(model.config, batch)


def share_of(work: Workload, numbers: Sequence[int], epoch: int, rank: int = 0, size: int = 1) -> Share:
    """Return the part of the batch of these examples that one of `size` processes computes."""
    if size == 1:
        return Share(work.batch(numbers, epoch))
    mine, weight = divided(numbers, rank, size)
    part = getattr(work, "part", lambda mine, whole, epoch: work.batch(mine, epoch))
    return Share(part(mine, numbers, epoch), weight)


def divided(numbers: Sequence[int], rank: int, size: int) -> tuple[Sequence[int], float]:
    """Return the examples of a batch that a process computes, and their weight.

    Every `size`-th example belongs to one process. A plan sorts them by length, so the processes' tokens differ by at
    most the longest example (twice that where two pools of the plan meet). With fewer examples than processes some
    repeat an example with weight 0: all must take part when gradients are added.
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
    waited: float = 0.0  # seconds spent waiting for batches
    stopped_early: bool = False
    weights: dict[str, Tensor] = field(default_factory=dict)  # of the whole model
    kept_because: str = "nothing is held out"  # why these weights were kept
    checkpoints: tuple[int, ...] = ()  # steps of those that are whole, newest first


def train(
    model: nn.Module, work: Workload, settings: Settings, run: Path, resume: bool = False, quiet: bool = False,
    group: Group = SINGLE_PROCESS, evaluations: int | None = None, held_out: int = 0, identity: str = "",
    ended: bool = False,
) -> Result:  # fmt: skip
    """Train in place. In the end the model has the weights of the best evaluation, or of the last step.

    With `settings.ema` the moving average of the weights is evaluated and kept. Every process of a group calls this
    with the same arguments. In a sharded group each ends with its part of the model; the result has all weights.

    Without `settings.eval_every` there are `evaluations` evaluations, by default a number that suits the steps and the
    `held_out` tokens. `identity` is a word that tells this run from others: it is written into its checkpoints, and
    those of other runs are not loaded, counted or removed. `ended`: the run was finished before, so its checkpoints may
    have no optimizer; the newest one then needs no more steps.
    """
    if group.size == 1:
        expect_alone()
    group.first(lambda: checkpoint.prepare(run, resume))
    with _memory_hints(settings, getattr(work, "step_spec", StepSpec()), group):
        trainer = Trainer(
            model, work, settings, run, quiet or not group.lead, group, evaluations=evaluations, held_out=held_out,
            identity=identity, ended=ended,
        )  # fmt: skip
        if resume:
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
    group: Group = SINGLE_PROCESS
    step: int = 0
    bad_steps: int = 0
    skipped: int = 0
    best_step: int | None = None
    best: Score | None = None
    because: str = Result.kept_because  # why best_step is the best
    stale: int = 0  # evaluations since the best
    stop_signal: int = 0  # number of the signal that asked to stop
    pausing: bool = False
    stopping: bool = False
    latest: dict[str, float] = field(default_factory=dict)  # the last loss of each name
    unseen: Sequence[str] = ()  # samples of the last evaluation that were not printed
    evaluations: int | None = None
    held_out: int = 0
    identity: str = ""
    ended: bool = False
    saved_step: int | None = None  # of the last checkpoint
    history: checkpoint.History = field(default_factory=checkpoint.History)
    metrics: Metrics | None = None
    sealed_metrics: Seal | None = None  # size and checksum of metrics.jsonl in the checkpoint

    def __post_init__(self):
        self.step_spec: StepSpec = getattr(self.work, "step_spec", StepSpec())
        self.device = next(self.model.parameters()).device.type
        if self.device == "cpu":
            keep_freed_memory()
            heap_in_huge_pages()
        # Before anything else uses the weights: a strategy may replace them by other tensors
        self.strategy = strategy_for(self.model, self.group, getattr(self.work, "evaluates_shards", False))
        self.optimizer = optimizer_for(self.model, self.settings)
        self.embedding = embedding_gradient(self.model, self.group)
        if isinstance(self.optimizer, ClippingAdamW) and isinstance(self.embedding, RowGradient):
            self.optimizer.table = self.embedding
        if self.settings.dropout is not None:
            set_dropout(self.model, self.settings.dropout)
        if isinstance(self.model, Model):
            self.model.body.recompute = self.settings.recompute
            if self.settings.recompute and self.model.config.family in ("lstm", "elmo"):
                log.warning("--recompute has no effect on recurrent layers; smaller batches need less memory")
        self.average = Average(self.model, self.settings.ema) if self.settings.ema else None
        saved = self.model.state_dict().keys()
        self.statistics = [buffer for name, buffer in self.model.named_buffers() if name in saved]  # of batch norm
        self.plans: dict[int, Sequence[list[int]]] = {}
        self.steps = self.settings.steps or self._steps_of_epochs()
        self.eval_every = self.settings.eval_every or self._steps_between_evaluations()
        self.save_every = self.settings.save_every or self.eval_every
        self.dtype = resolve_precision(self.settings.precision, self.device)
        self.peak = measured_peak(self.dtype, self.device)  # operations per second

    def _steps_between_evaluations(self) -> int:
        """Allow at most ten evaluations, fewer in a short run, and no more tokens evaluated than trained on.

        Without a backward pass a token takes a third of the time, so evaluations take at most a quarter of the run.
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
        """Yield (epoch, example numbers) of all batches from number `batch` on, epoch after epoch."""
        epoch = 0
        while True:
            plan = self.plan(epoch)
            for numbers in plan[batch:]:
                yield epoch, numbers
            epoch, batch = epoch + 1, max(0, batch - len(plan))

    def batches_from(self, batch: int) -> Loader[Share]:
        rank, size = self.group.rank, self.group.size
        return Loader(lambda entry: share_of(self.work, entry[1], entry[0], rank, size), self._plan_from(batch))

    # ---- steps ---------------------------------------------------------------------------------------------

    def run_to_end(self) -> Result:
        started = time.monotonic()
        metrics = Metrics(self.run, self.step, self.settings.tensorboard, self.group.lead, self.sealed_metrics)
        self.metrics = metrics
        bar = Progress(self.steps, "step", self.quiet)
        source = self.batches_from(self.step * self.settings.accumulate)
        try:
            patience = self.settings.patience
            while self.step < self.steps and not self.stopping and (patience is None or self.stale < patience):
                self._one_step(source, metrics, bar)
                if number := self.group.most(self.stop_signal):
                    self.save()
                    raise Interrupted(f"stopped after step {self.step} of {self.steps}; saved", 128 + number)
                if self.pausing and self.step < self.steps:
                    raise Paused
            for line in self.unseen:
                bar.say(line)
        finally:
            bar.close()
            source.close()
            metrics.close()
        self._take_best()
        seconds = time.monotonic() - started
        early, weights = self.step < self.steps, self.strategy.weights()
        return Result(
            self.step, self.best_step, self.best, seconds, source.waited, early, weights, kept_because=self.because,
            checkpoints=self.history.steps,
        )  # fmt: skip

    def _one_step(self, source: Loader[Share], metrics: Metrics, bar: Progress) -> None:
        started = time.monotonic()
        micro = [next(source) for _ in range(self.settings.accumulate)]
        losses, norm, rate = self._learn(micro)
        loss = sum(losses.values())
        self.step += 1
        seconds = max(1e-9, time.monotonic() - started)
        sizes = [sum(share.counted(share.batch.tokens) for share in micro)]
        sizes += [sum(self.step_spec.operations(self.model, share.batch) for share in micro)]
        units, flops = (round(total) for total in self.group.total(sizes))
        reached = flops / seconds / self.group.size
        self.peak = max(self.peak, reached)  # the peak was measured too low if the machine was busy
        mfu = reached / self.peak
        parts = {f"loss_{name}": _finite(value) for name, value in losses.items() if len(losses) > 1 or name != "lm"}
        metrics.add(
            step=self.step, loss=_finite(loss), **parts, norm=_finite(norm), lr=rate, **{self.step_spec.unit: units},
            speed=round(units / seconds, 1), mfu=float(f"{mfu:.3g}"),
        )  # fmt: skip
        self.latest |= losses
        speed = f"{units / seconds:,.0f} {self.step_spec.unit}/s"
        bar.update(self.step, f"{_in_words(self.latest)}  {speed}  MFU {mfu:.0%}")
        if self.bad_steps and self.group.lead:
            what = "the loss" if not math.isfinite(loss) else "the gradient"
            bar.warn(f"step {self.step}: {what} was not finite; skipped, no weight was changed")
        last = self.step == self.steps
        if self.step % self.eval_every == 0 or last:
            self._evaluate(metrics, bar)
        if self.step % self.save_every == 0 or last or self.best_step == self.step or self.pausing:
            self.save()

    def _seed(self, seed: int) -> None:
        """Seed the devices in use: `torch.manual_seed` formats the call stack for each kind that is absent."""
        torch.default_generator.manual_seed(seed)
        if torch.cuda.is_available():
            torch.cuda.manual_seed_all(seed)

    @large_blocks_from_the_heap()
    def _learn(self, batches: Sequence[TrainingBatch | Share]) -> tuple[dict[str, float], float, float]:
        """Make one optimizer step. If a loss or gradient is not finite, weights and statistics stay as they were."""
        micro = [batch if isinstance(batch, Share) else Share(batch) for batch in batches]
        before = [buffer.clone() for buffer in self.statistics]
        warmup = self.settings.warmup_steps(self.steps)
        rate = self.settings.lr * SCHEDULES[self.settings.schedule](self.step, self.steps, warmup)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        dropout_seed = (self.settings.seed << 32) + self.step + self.group.rank * 0x9E3779B97F4A7C15
        self._seed(dropout_seed % (1 << 64))
        self.model.train()
        counts = self._counts(micro)
        losses = dict.fromkeys(counts, 0.0)
        for number, share in enumerate(micro, 1):
            with self.strategy.summing(last=number == len(micro)), self.embedding.collecting():
                self._backward(share, counts, losses)
        losses = self._added(losses)
        norm = clip(self.model, self.settings.clip, self.optimizer)
        if math.isfinite(sum(losses.values())) and math.isfinite(norm):
            self.bad_steps = 0
            self.optimizer.step()
            if self.average is not None:
                self.average.update(self.step)
        else:
            for buffer, kept in zip(self.statistics, before, strict=True):
                buffer.copy_(kept)
            self.bad_steps += 1
            self.skipped += 1
            if self.bad_steps >= self.settings.max_bad_steps:
                hint = f"none of these steps changed a weight; start again with a lower --lr (now {self.settings.lr})"
                spoiled = (name for name, weight in self.model.named_parameters() if not weight.isfinite().all())
                if name := next(spoiled, None):
                    hint += f"\n{name} has numbers that are not finite; if the model was given so, it is damaged"
                bad = f"the loss was not finite for {self.bad_steps} steps in a row, up to step {self.step + 1}"
                raise DivergedError(bad, hint)
        self.optimizer.zero_grad(set_to_none=True)
        self.embedding.clear()
        return losses, norm, rate

    def _counts(self, micro: Sequence[Share]) -> dict[str, float]:
        """Return the number of targets of each loss in this step, over all batches and processes."""
        counts: dict[str, float] = {}
        for share in micro:
            for name, count in share.batch.counts.items():
                counts[name] = counts.get(name, 0) + share.counted(count)
        return self._added(counts)

    def _added(self, values: dict[str, float]) -> dict[str, float]:
        """Return the sums over all processes; their values have the same names in the same order."""
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
        self.pausing, self.stopping = score.pause, score.stop
        because = self._why_best(score)
        if because is None:
            self.stale += 1
        else:
            self.best, self.best_step, self.stale, self.because = score, self.step, 0, because

    def _why_best(self, score: Score) -> str | None:
        """Explain why this step has the best weights so far; None if it has not."""
        if self.best is None:
            if score.value == -math.inf:
                return None
            return "it is the only evaluation" if self.step == self.steps else "no later evaluation was better"
        better = why_better(score, self.best)
        return better and f"since step {self.best_step} {better}"

    def averaged(self) -> AbstractContextManager[None]:
        """Give the model the weights to evaluate and keep, within this context."""
        return nullcontext() if self.average is None else self.average.in_place()

    def save(self) -> None:
        """Write a checkpoint of this step, unless there is one, and remove older ones."""
        if self.saved_step == self.step:
            return
        best = None
        if self.best is not None:
            best = {name: getattr(self.best, name) for name in ("value", "metrics", "loss", "stderr", "metric")}
        numbers = {"best": best, **{name: getattr(self, name) for name in SAVED_NUMBERS}}
        numbers |= {checkpoint.RUN: self.identity} if self.identity else {}
        sealed = self.sealed_metrics if self.metrics is None else self.metrics.seal
        numbers |= {checkpoint.METRICS: sealed} if sealed else {}
        average = None if self.average is None else self.average.tensors()
        optimizer = checkpoint.optimizer_tensors(self.optimizer)
        state = checkpoint.State(self.step, self.model.state_dict(), optimizer, numbers, average)
        self.strategy.save(self.run, state)
        self.saved_step, best_step = self.step, self.best_step
        known = self.history.with_step(self.step)
        pruned = self.group.first(
            lambda: checkpoint.prune(self.run, known, self.step, self.settings.keep, best_step)
        )  # fmt: skip
        self.history = pruned or known

    def restore(self) -> None:
        """Continue from the newest checkpoint that is whole; from the beginning, if there never was one."""

        def look() -> checkpoint.History:
            found = checkpoint.history(self.run, self.identity)
            if not found.resumable and not (self.ended and found.weights):
                self._expect_no_checkpoint(found)
            return found

        self.history = self.group.shared(self.group.first(look)) or checkpoint.History()
        if self.group.lead:
            for line in self.history.notes:
                log.warning("%s", line)
        if not self.history.steps:
            if self.group.lead and read_metrics(self.run):
                log.warning("%s: it was ended before its first checkpoint; begins again at step 1", self.run)
            return
        self.stopping = not self.history.resumable  # a finished run: its last weights are all that is left
        newest = (self.history.resumable or self.history.weights)[0]
        if self.history.damaged and self.group.lead:
            log.warning("%s: continuing from step %d", self.run, newest)
        folder = checkpoint.folder_of(self.run, newest)
        state = self.strategy.load(folder, self.optimizer)
        self.model.load_state_dict(state.model)
        if state.optimizer:
            checkpoint.restore_optimizer(self.optimizer, state.optimizer)
        if self.average is not None:
            self.average.restore(state.average or {})
        self.step = self.saved_step = state.step
        self.best = None if state.numbers["best"] is None else Score(**state.numbers["best"])
        for name in SAVED_NUMBERS:
            setattr(self, name, state.numbers[name])
        self.sealed_metrics = state.numbers.get(checkpoint.METRICS)

    def _expect_no_checkpoint(self, found: checkpoint.History) -> None:
        """Refuse to begin again if there was a checkpoint: it must not be lost without a word."""
        if found.damaged:
            raise CheckpointError("\n".join([f"{self.run}: no checkpoint is whole", *found.notes]), "start a new run")
        reached = max((line["step"] for line in read_metrics(self.run)), default=0)
        if found.weights or reached > self.save_every:  # a step is saved before the next one is recorded
            lost = f"although there was one: metrics.jsonl ends at step {reached}"
            raise CheckpointError(
                f"{self.run}: no checkpoint to resume from, {lost}",
                "restore the folder checkpoints/, or start a new run with another --out",
            )

    def _take_best(self) -> None:
        """Load the weights of the best evaluation into the model, or their moving average at that step."""
        if self.best_step is not None and self.best_step != self.step:
            folder = checkpoint.folder_of(self.run, self.best_step)
            problem = self.group.shared(self.group.first(lambda: checkpoint.problem_of(folder)))
            if problem is None:
                state = self.strategy.load(folder, self.optimizer)
                self.model.load_state_dict({**state.model, **(state.average or {})})
                return
            if self.group.lead:
                log.warning("%s: %s; the weights of step %d are kept instead", folder, problem, self.step)
            self.because = f"the checkpoint of the best step, {self.best_step}, is damaged"
            self.best_step = self.step
        if self.average is not None:
            self.model.load_state_dict(self.average.tensors(), strict=False)


def set_dropout(model: nn.Module, p: float) -> None:
    """Train with another dropout; the saved model keeps its own.

    It is set only where the model has dropout, for example not in attention if that has none; in a model without any
    dropout it is set everywhere.
    """
    places = [(module, "p") for module in model.modules() if isinstance(module, Dropout)]
    places += [(module, "dropout") for module in model.modules() if isinstance(module, Attention)]
    for module, name in [place for place in places if getattr(*place)] or places:
        setattr(module, name, p)


def loss_of(model: Model, batch: Batch, smoothing: float = 0.0) -> Tensor:
    """Return the summed cross-entropy of the tokens that have a label."""
    return losses_of(model, batch, smoothing)[batch.name][0]


@torch.no_grad()
def mean_loss(model: Model, held_out: Sequence[Batch]) -> float:
    """Return the mean cross-entropy per target of held-out batches."""
    model.eval()
    total = sum(loss_of(model, batch.to(model.device)).item() for batch in held_out)
    return total / max(1, sum(batch.targets for batch in held_out))


def _in_words(losses: Mapping[str, float]) -> str:
    """Format losses: "loss 2.345", or for several objectives "loss mlm 2.345  causal 3.456"."""
    named = [f"{value:.3f}" if name == "lm" else f"{name} {value:.3f}" for name, value in losses.items()]
    return f"loss {'  '.join(named)}"


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


@contextmanager
def _memory_hints(settings: Settings, spec: StepSpec, group: Group) -> Iterator[None]:
    """Say which options need less memory if there is not enough, on a CPU or a GPU."""
    try:
        yield
    except Exception as error:
        wanted = out_of_memory(error)
        if wanted is None:
            raise
        batch = f"--batch-{spec.unit} (now {settings.batch_tokens:,})"
        tips = [f"halve {batch} and double --accumulate (now {settings.accumulate}): the steps stay the same"]
        if spec.unit == "tokens" and not settings.recompute:
            tips.append("--recompute: activations take a fraction, a step a third more time")
        if spec.unit == "tokens" and not group.sharded:
            tips.append("torchrun … --shard: each process holds a part of the model")
        tips.append("these options change the run: start it again with another --out")
        raise ResourceError(f"out of memory{wanted}", "\n".join(tips)) from error


@contextmanager
def _signals(trainer: Trainer) -> Iterator[None]:
    """Let Ctrl-C and SIGTERM finish the step, save, and explain how to resume; a second signal ends it at once.

    When a process fails, torchrun sends SIGTERM to the others. So one of several keeps the handlers after an error, in
    order to live long enough to report it.
    """

    def stop(number: int, frame: object) -> None:
        if trainer.stop_signal:  # not an error of ours: code that handles those must not handle this
            raise SystemExit(128 + number)
        trainer.stop_signal = number

    before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    failed = True
    try:
        yield
        failed = False
    finally:
        if trainer.group.size == 1 or not failed:
            for number, handler in before.items():
                signal.signal(number, handler)
