"""Train a generator and a discriminator from scratch (arXiv 1406.2661).

A step of the training loop is a step of one of the two networks (Algorithm 1): k of the discriminator, each with a
batch of real examples and as many generated ones, then one of the generator. Optimizers skip weights without a
gradient, so one optimizer serves both. Noise comes from the generator that the loop seeds by (seed, step), as dropout
does, so a resumed run continues with the same noise.

The run folder is that of every run, and besides:
  frames/, strip.png     toy: densities and the discriminator at each evaluation; four of them in one picture
  grids/                 images: a grid of 64 at each evaluation, always from the same noise
  judge/                 images: the classifier that evaluates them, unless --judge names one
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from allmask.errors import UsageError
from allmask.gan import metrics, networks, toy
from allmask.gan.networks import PRESETS, Gan, GanConfig, fresh
from allmask.options import GAN_LOSSES as LOSSES
from allmask.options import GanOptions
from allmask.runs.plan import Job, Plan
from allmask.training import Result, Score, StepSpec, Workload, checkpoint
from allmask.training.log import points, read_metrics, smoothed
from allmask.vision import checkpoints
from allmask.vision.resnet import multiply_adds
from allmask.vision.training import BATCH_NORM, ImageData, ImageTraining, plan_images

log = logging.getLogger("allmask")
GRID, COLUMNS = 64, 8  # images in a grid
EVALUATED = 1000  # images generated for an evaluation
GRID_PIXELS = 640  # approximate width of a grid
FRAMES = 30  # evaluations of a toy's run


# ---- losses and turns ------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Turn:
    """The batch of a step: real examples for the discriminator; none for the generator."""

    real: Tensor | None
    count: int

    @property
    def tokens(self) -> int:
        return self.count

    @property
    def counts(self) -> dict[str, int]:
        return {"generator" if self.real is None else "discriminator": self.count}

    def to(self, device: torch.device | str) -> Turn:
        return self if self.real is None else Turn(self.real.to(device), self.count)


def discriminator_loss(real: Tensor, generated: Tensor) -> Tensor:
    """−log D(x) − log(1 − D(G(z))), summed, from log-odds: the negative of what Algorithm 1 maximizes."""
    return F.softplus(-real).sum() + F.softplus(generated).sum()


def generator_loss(generated: Tensor, kind: str) -> Tensor:
    """The generator's loss from log-odds, summed.

    saturating: log(1 − D(G(z))), the game itself; its gradient vanishes where the discriminator is certain.
    non-saturating: −log D(G(z)), with the same optimum and the largest gradient there.
    """
    return F.softplus(-generated).sum() if kind == "non-saturating" else -F.softplus(generated).sum()


@contextmanager
def frozen(network: nn.Module) -> Iterator[None]:
    """Within this context gradients pass through a network but are not accumulated in its parameters."""
    network.requires_grad_(False)
    try:
        yield
    finally:
        network.requires_grad_(True)


class GanWorkload:
    """Turns for the training loop, their losses, and an evaluator.

    `prepare` converts stored examples to what the discriminator reads.
    """

    def __init__(
        self, examples: Tensor, k: int = 1, loss: str = LOSSES[0], batch: int = 64,
        evaluator: Callable[[Gan, int], Score | None] = lambda model, step: None,
        prepare: Callable[[Tensor], Tensor] = lambda examples: examples,
    ):  # fmt: skip
        if k < 1 or loss not in LOSSES:
            raise UsageError(f"k is {k}, loss is {loss!r}; expected k from 1 and {' or '.join(LOSSES)}")
        self.examples, self.k, self.loss, self.size = examples, k, loss, batch
        self.evaluator, self.prepare = evaluator, prepare
        self.lengths = np.ones(len(examples), dtype=np.int64)
        self.step_spec = StepSpec("examples", self.plan, self.losses, self.operations)
        self.costs: tuple[int, int] | None = None

    def plan(self, lengths: np.ndarray, most: int, seed: int, epoch: int) -> Sequence[list[int]]:
        """The discriminator's batches of an epoch, and an empty batch (a generator step) after every k of them.

        Batches are counted across epochs.
        """
        batches = list(plan_images(lengths, most, seed, epoch))
        turns: list[list[int]] = []
        for number, batch in enumerate(batches, epoch * len(batches) + 1):
            turns += [batch] if number % self.k else [batch, []]
        return turns

    def batch(self, numbers: Sequence[int], epoch: int) -> Turn:
        if not numbers:
            return Turn(None, self.size)
        return Turn(self.prepare(self.examples[torch.tensor(numbers)]), len(numbers))

    def evaluate(self, model: Gan, step: int = 0) -> Score | None:
        return self.evaluator(model, step)

    def losses(self, model: Gan, turn: Turn, smoothing: float = 0.0) -> dict[str, tuple[Tensor, int]]:
        if turn.real is None:
            with frozen(model.discriminator):
                loss = generator_loss(model.log_odds(model.sample(turn.count)), self.loss)
        else:
            with torch.no_grad():
                generated = model.sample(len(turn.real))
            loss = discriminator_loss(model.log_odds(turn.real), model.log_odds(generated))
        return {name: (loss, count) for name, count in turn.counts.items()}

    def operations(self, model: Gan, turn: Turn) -> int:
        """FLOPs of a step: forward through both networks, backward through the trained one, or through to it."""
        if self.costs is None:
            noise = torch.zeros(1, model.config.noise)
            example = torch.zeros(1, *model.config.shape)
            self.costs = multiply_adds(model.generator, noise), multiply_adds(model.discriminator, example)
        generator, discriminator = self.costs
        each = 3 * generator + 2 * discriminator if turn.real is None else generator + 6 * discriminator
        return 2 * turn.count * each


# ---- a training run --------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class GanData:
    """Real examples: numbers, or images as bytes."""

    examples: Tensor
    images: ImageData | None = None  # the same with labels, for the classifier
    judge: checkpoints.Loaded | None = None  # the classifier of --judge


@dataclass(frozen=True)
class GanTraining(GanOptions, Job):
    """Train a generator of examples, and a discriminator that distinguishes them from real ones."""

    one_process: ClassVar[str] = BATCH_NORM

    def read(self, plan: Plan, out: Path, quiet: bool) -> GanData:
        return self.examples(plan.settings.seed)

    def examples(self, seed: int) -> GanData:
        if self.is_toy:
            return GanData(toy.examples(torch.Generator().manual_seed(seed)))
        images = self._image_job.images()
        judge = None
        if self.judge is not None:
            judge = checkpoints.load(self.judge)
            metrics.expect_fit(judge, images.train.pixels, self.judge)
        return GanData(images.train.pixels, images, judge)

    @property
    def _image_job(self) -> ImageTraining:
        """The job that reads the images and trains the classifier."""
        return ImageTraining(data=self.data or "digits", size=self.size, channels=self.channels)

    def checksums(self, data: GanData) -> dict[str, str]:
        digest = hashlib.sha256(repr(tuple(data.examples.shape)).encode())
        digest.update(data.examples.contiguous().numpy().data)
        return {"data": digest.hexdigest()}

    def begin(self, plan: Plan, data: GanData) -> tuple[Plan, Gan]:
        plan = self.settled(plan, len(data.examples))
        config = GanConfig(self.preset, tuple(data.examples.shape[1:]), **PRESETS[self.preset])
        model = fresh(config, torch.Generator().manual_seed(plan.settings.seed))
        sizes = [sum(weight.numel() for weight in part.parameters()) for part in (model.generator, model.discriminator)]
        numbers = (f"{size:,}" for size in sizes)
        log.info("a new %s: a generator of %s parameters, a discriminator of %s", self.preset, *numbers)
        return plan, model

    def settled(self, plan: Plan, examples: int) -> Plan:
        """The plan with evaluations and checkpoints scheduled: one evaluation per epoch; for a toy, FRAMES in all."""
        settings = plan.settings
        batches = -(-examples // settings.batch_tokens)
        epoch = max(1, round(batches * (self.k + 1) / self.k))
        steps = settings.steps or round(settings.epochs * epoch)
        every = settings.eval_every or (max(1, steps // FRAMES) if self.is_toy else epoch)
        kept = settings.save_every or max(every, steps // 10)
        data = None if self.is_toy else self.data or "digits"
        return Plan(replace(self, data=data), replace(settings, eval_every=every, save_every=kept))

    def save(self, model: Gan, data: GanData, folder: Path) -> None:
        networks.save(folder, model)

    def load(self, folder: Path, device: torch.device) -> Gan:
        if device.type != "cpu":
            log.info("gan: trained on the CPU, as its evaluations need it")
        return networks.load(folder)

    def workload(self, plan: Plan, data: GanData, model: Gan, out: Path, quiet: bool) -> GanWorkload:
        evaluator = ToyEvaluator(out) if self.is_toy else self._image_evaluator(plan.settings.seed, data, out, quiet)
        if not checkpoint.checkpoints(out):
            evaluator(model, 0)
        how = {} if self.is_toy else {"prepare": as_examples}
        return GanWorkload(data.examples, self.k, self.loss, plan.settings.batch_tokens, evaluator, **how)

    def _image_evaluator(self, seed: int, data: GanData, out: Path, quiet: bool) -> ImageEvaluator:
        assert data.images is not None
        classifier = data.judge or metrics.train_classifier(self._image_job, data.images, seed, out / "judge", quiet)
        evaluator = metrics.Evaluator.of(classifier, data.examples, self.judge or out / "judge")
        if data.images.held_out is not None:
            floor = evaluator(data.images.held_out.pixels)
            log.info("held-out real images: frechet %.3g, classes %.3g", floor["frechet"], floor["classes"])
        return ImageEvaluator(out, evaluator, seed)

    def plot(self, out: Path) -> None:
        """Draw loss.png: both losses by step, smoothed, and the loss of a discriminator that always says ½."""
        from matplotlib.figure import Figure

        lines = read_metrics(out)
        figure = Figure(figsize=(7, 4), dpi=120, layout="constrained")
        axes = figure.subplots()
        for name, colour in (("discriminator", "#5B84D7"), ("generator", "#5BA886")):
            steps, losses = points(lines, f"loss_{name}")
            axes.plot(steps, smoothed(losses), color=colour, label=name)
        axes.axhline(-toy.LOWEST_VALUE, color="#9A9A9A", linewidth=0.8, linestyle=":", label="log 4 (D = ½)")
        axes.set_xlabel("step")
        axes.set_ylabel("loss (nats)")
        axes.grid(alpha=0.2)
        axes.legend(frameon=False)
        figure.savefig(out / "loss.png")

    def finish(
        self, plan: Plan, data: GanData, work: Workload, model: Gan, result: Result, out: Path
    ) -> tuple[GanTraining, dict[str, Any]]:
        best = result.best_step or result.steps
        picture = out / "strip.png" if self.is_toy else _picture(out, "grids", best).with_suffix(".png")
        if self.is_toy:
            frames = {int(path.stem.split("-")[1]): toy.Frame.load(path) for path in (out / "frames").glob("*.npz")}
            toy.draw(toy.strip(frames, best), picture)
        options = {"task": self.task_name, "preset": self.preset, "loss": self.loss, "k": self.k}
        return self, options | {"picture": str(picture)}

    def hints(self, result: Mapping[str, Any]) -> list[str]:
        return [f"see it: {result['picture']}"]


@dataclass(frozen=True)
class ToyEvaluator:
    """Draw a frame, and measure the divergence of the two densities."""

    out: Path

    def __call__(self, model: Gan, step: int) -> Score:
        frame = toy.frame_of(model)
        path = _picture(self.out, "frames", step)
        frame.save(path.with_suffix(".npz"))
        toy.draw([(f"step {step}", frame)], path.with_suffix(".png"))
        found = frame.metrics()
        return Score(-found["divergence"], found, metric="−divergence")


@dataclass(frozen=True)
class ImageEvaluator:
    """Draw a grid of generated images and measure them; always from the same noise, so that grids can be compared."""

    out: Path
    evaluator: metrics.Evaluator
    seed: int

    @torch.no_grad()
    def __call__(self, model: Gan, step: int) -> Score:
        rng = torch.Generator().manual_seed(self.seed)
        pixels = torch.cat(
            [as_pixels(model.sample(min(250, EVALUATED - done), rng)) for done in range(0, EVALUATED, 250)]
        )
        write_grid(pixels[:GRID], COLUMNS, _picture(self.out, "grids", step).with_suffix(".png"))
        found = self.evaluator(pixels)
        return Score(-found["frechet"], found, metric="−frechet")


def _picture(out: Path, folder: str, step: int) -> Path:
    """The path of an evaluation's picture, without its suffix."""
    (out / folder).mkdir(exist_ok=True)
    return out / folder / f"step-{step:08d}"


# ---- images ----------------------------------------------------------------------------------------------------


def as_pixels(examples: Tensor) -> Tensor:
    """Convert −1…1 to bytes."""
    return ((examples.float().clamp(-1.0, 1.0) + 1.0) * 127.5).round().to(torch.uint8)


def as_examples(pixels: Tensor) -> Tensor:
    """Convert bytes to −1…1."""
    return pixels.float().div_(127.5).sub_(1.0)


def write_grid(pixels: Tensor, columns: int, path: Path) -> None:
    """Write a PNG of images (N, C, H, W) in a grid, enlarged by a whole factor, with grey lines between them."""
    from PIL import Image

    count, channels, height, width = pixels.shape
    rows = -(-count // columns)
    factor = max(1, GRID_PIXELS // (columns * (width + 1)))
    large = pixels.repeat_interleave(factor, 2).repeat_interleave(factor, 3)
    tall, wide = height * factor + 1, width * factor + 1
    grid = torch.full((channels, rows * tall + 1, columns * wide + 1), 128, dtype=torch.uint8)
    for number, image in enumerate(large):
        top, left = (number // columns) * tall + 1, (number % columns) * wide + 1
        grid[:, top : top + tall - 1, left : left + wide - 1] = image
    array = grid.permute(1, 2, 0).numpy()
    Image.fromarray(array[:, :, 0] if channels == 1 else array).save(path)
