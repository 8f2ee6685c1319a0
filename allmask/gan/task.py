"""Games: a generator and a discriminator from scratch (arXiv 1406.2661).

The run's folder is that of every run, and besides:
  frames/, strip.png     toy: densities and the discriminator at each evaluation; four of them in one picture
  grids/                 images: a sheet of 64 at each evaluation, always of the same noise
  judge/                 images: the classifier that evaluates them, unless --judge names one
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from allmask.gan import files, judging, toy
from allmask.gan.learning import GanWorkload
from allmask.gan.networks import PRESETS, Gan, GanConfig, fresh
from allmask.gan.pictures import as_examples, as_pixels, write_grid
from allmask.options import GanOptions
from allmask.runs.plan import Job, Plan
from allmask.training import Result, Score, Workload, checkpoint
from allmask.training.log import points, read_metrics, smoothed
from allmask.vision import files as networks
from allmask.vision.task import BATCH_NORM, ImageData, ImageTraining

log = logging.getLogger("allmask")
SHOWN, COLUMNS = 64, 8  # images of a grid
EVALUATED = 1000  # images made for an evaluation
FRAMES = 30  # evaluations of a toy's run


@dataclass(frozen=True, eq=False)
class GanData:
    """What is real: numbers, or images as bytes; these once more with their classes, for the classifier."""

    examples: Tensor
    images: ImageData | None = None
    judge: networks.Loaded | None = None  # the classifier, where one was named

    def checksum(self) -> str:
        found = hashlib.sha256(repr(tuple(self.examples.shape)).encode())
        found.update(self.examples.contiguous().numpy().data)
        return found.hexdigest()

    def config(self, preset: str) -> GanConfig:
        return GanConfig(preset, tuple(self.examples.shape[1:]), **PRESETS[preset])


@dataclass(frozen=True)
class GanTraining(GanOptions, Job):
    """Two new networks: a generator makes examples out of noise, a discriminator tells them from real ones."""

    one_process: ClassVar[str] = BATCH_NORM

    # ---- data and model ------------------------------------------------------------------------------------

    def read(self, plan: Plan, out: Path, quiet: bool) -> GanData:
        return self.examples(plan.settings.seed)

    def examples(self, seed: int) -> GanData:
        if self.is_toy:
            return GanData(toy.examples(torch.Generator().manual_seed(seed)))
        images = self._image_job.images()
        judge = None
        if self.judge is not None:
            judge = networks.load(self.judge)
            judging.expect_fit(judge, images.train.pixels, self.judge)
        return GanData(images.train.pixels, images, judge)

    @property
    def _image_job(self) -> ImageTraining:
        """How the images are read, and a classifier of them trained."""
        return ImageTraining(data=self.data or "digits", size=self.size, channels=self.channels)

    def checksums(self, data: GanData) -> dict[str, str]:
        return {"data": data.checksum()}

    def begin(self, plan: Plan, data: GanData) -> tuple[Plan, Gan]:
        plan = self.settled(plan, len(data.examples))
        model = fresh(data.config(self.preset), torch.Generator().manual_seed(plan.settings.seed))
        sizes = [sum(weight.numel() for weight in part.parameters()) for part in (model.generator, model.discriminator)]
        numbers = (f"{size:,}" for size in sizes)
        log.info("a new %s: a generator of %s parameters, a discriminator of %s", self.preset, *numbers)
        return plan, model

    def settled(self, plan: Plan, examples: int) -> Plan:
        """The plan with nothing left open: an evaluation per epoch, of a toy so many in all."""
        settings = plan.settings
        batches = -(-examples // settings.batch_tokens)
        epoch = max(1, round(batches * (self.k + 1) / self.k))
        steps = settings.steps or round(settings.epochs * epoch)
        every = settings.eval_every or (max(1, steps // FRAMES) if self.is_toy else epoch)
        kept = settings.save_every or max(every, steps // 10)
        data = None if self.is_toy else self.data or "digits"
        return Plan(replace(self, data=data), replace(settings, eval_every=every, save_every=kept))

    def save(self, model: Gan, data: GanData, folder: Path) -> None:
        files.save(folder, model)

    def load(self, folder: Path, device: torch.device) -> Gan:
        return files.load(folder)

    # ---- training ------------------------------------------------------------------------------------------

    def workload(self, plan: Plan, data: GanData, model: Gan, out: Path, quiet: bool) -> GanWorkload:
        evaluator, prepared = self._evaluator(plan, data, out, quiet)
        if not checkpoint.checkpoints(out):
            evaluator(model, 0)
        return GanWorkload(data.examples, self.k, self.loss, plan.settings.batch_tokens, evaluator, prepared)

    def _evaluator(
        self, plan: Plan, data: GanData, out: Path, quiet: bool
    ) -> tuple[ToyEvaluator | ImageEvaluator, Callable[[Tensor], Tensor]]:
        """What evaluates the generator, and how examples become what the discriminator reads."""
        if self.is_toy:
            return ToyEvaluator(out), lambda examples: examples
        assert data.images is not None
        seed = plan.settings.seed
        found = data.judge or judging.trained(self._image_job, data.images, seed, out / "judge", quiet)
        judge = judging.Evaluator.of(found, data.examples, self.judge or out / "judge")
        if data.images.held_out is not None:
            floor = judge(data.images.held_out.pixels)
            log.info("real images that are held out: frechet %.3g, classes %.3g", floor["frechet"], floor["classes"])
        return ImageEvaluator(out, judge, seed), as_examples

    def plot(self, out: Path) -> None:
        draw_losses(out)

    def finish(
        self, plan: Plan, data: GanData, work: Workload, model: Gan, result: Result, out: Path
    ) -> tuple[GanTraining, dict[str, Any]]:
        best = result.best_step or result.steps
        picture = out / "strip.png" if self.is_toy else _place(out, "grids", best).with_suffix(".png")
        if self.is_toy:
            frames = {int(path.stem.split("-")[1]): toy.Frame.load(path) for path in (out / "frames").glob("*.npz")}
            toy.draw(toy.strip(frames, best), picture)
        options = {"task": self.task_name, "preset": self.preset, "loss": self.loss, "k": self.k}
        return self, options | {"picture": str(picture)}

    def hints(self, result: Mapping[str, Any]) -> list[str]:
        return [f"see it: {result['picture']}"]


@dataclass(frozen=True)
class ToyEvaluator:
    """Draws a frame of the game, and measures the divergence of the two densities."""

    out: Path

    def __call__(self, model: Gan, step: int) -> Score:
        frame = toy.frame_of(model)
        path = _place(self.out, "frames", step)
        frame.save(path.with_suffix(".npz"))
        toy.draw([(f"step {step}", frame)], path.with_suffix(".png"))
        return toy.judged(frame)


@dataclass(frozen=True)
class ImageEvaluator:
    """Draws a sheet of images and has the classifier judge them; always of the same noise, to compare sheets."""

    out: Path
    judge: judging.Evaluator
    seed: int

    @torch.no_grad()
    def __call__(self, model: Gan, step: int) -> Score:
        rng = torch.Generator().manual_seed(self.seed)
        pixels = torch.cat(
            [as_pixels(model.sample(min(250, EVALUATED - done), rng)) for done in range(0, EVALUATED, 250)]
        )
        write_grid(pixels[:SHOWN], COLUMNS, _place(self.out, "grids", step).with_suffix(".png"))
        found = self.judge(pixels)
        return Score(-found["frechet"], found, metric="−frechet")


def _place(out: Path, folder: str, step: int) -> Path:
    """Where the picture of an evaluation goes, without its suffix."""
    (out / folder).mkdir(exist_ok=True)
    return out / folder / f"step-{step:08d}"


def draw_losses(out: Path) -> None:
    """Draw loss.png: both losses by step, smoothed, and the loss of a discriminator that cannot tell anything."""
    from matplotlib.figure import Figure

    lines = read_metrics(out)
    figure = Figure(figsize=(7, 4), dpi=120, layout="constrained")
    axes = figure.subplots()
    for name, colour in (("discriminator", "#5B84D7"), ("generator", "#5BA886")):
        steps, losses = points(lines, f"loss_{name}")
        axes.plot(steps, smoothed(losses), color=colour, label=name)
    axes.axhline(1.3862943611198906, color="#9A9A9A", linewidth=0.8, linestyle=":", label="log 4: D = ½")
    axes.set_xlabel("step")
    axes.set_ylabel("loss (nats)")
    axes.grid(alpha=0.2)
    axes.legend(frameon=False)
    figure.savefig(out / "loss.png")
