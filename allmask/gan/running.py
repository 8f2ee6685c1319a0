"""A run: two networks from nothing, what it is told, what it keeps on disk, how it goes on.

runs/gan/
  config.yaml, start/, checkpoints/, metrics.jsonl, result.json, final/      as every run
  loss.png                      both losses by step
  frames/, strip.png              toy: densities and the discriminator at each evaluation; four of them
  grids/, judge/                  images: a sheet of them at each evaluation, always of the same noise; the classifier
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from allmask.errors import DataError, UsageError
from allmask.gan import files, judging, toy
from allmask.gan.learning import LOSSES, GanWork
from allmask.gan.networks import PRESETS, Gan, GanConfig, fresh
from allmask.gan.pictures import as_examples, as_pixels, write_grid
from allmask.tasks import image
from allmask.tasks import values as flat
from allmask.tasks.folders import (
    CHECKSUMS,
    CONFIG,
    expect_free,
    finished_result,
    made_beside,
    outcome,
    saved_values,
    write_result,
)
from allmask.tasks.layout import BATCH, Layout, begun
from allmask.training import Result, Score, Settings, runs, train
from allmask.training.distributed import expect_alone
from allmask.training.plots import points, smoothed
from allmask.vision import files as networks
from allmask.vision.learning import FEWEST

log = logging.getLogger("allmask")
TASK = "gan"
DEFAULTS = Settings(
    epochs=100.0, batch_tokens=64, lr=2e-4, schedule="constant", warmup=0.0, weight_decay=0.0, betas=(0.5, 0.999),
    clip=1e9, precision="fp32",
)  # fmt: skip
TOY, TOY_K = replace(DEFAULTS, epochs=70.0, batch_tokens=256, lr=5e-3, schedule="linear"), 3
SHOWN, COLUMNS = 64, 8  # images of a grid
JUDGED = 1000  # images made for an evaluation
FRAMES = 30  # of a toy's run


@dataclass(frozen=True)
class GanPlan:
    """All that a run is told, flat as it stands in config.yaml; saved, with nothing left open."""

    data: str | None = None  # of images; None: digits, and of a toy numbers of a normal distribution
    preset: str = "dcgan"
    loss: str = LOSSES[0]
    k: int = 1  # steps of the discriminator for each of the generator
    size: int | None = None  # of a folder's images: they are scaled to it
    channels: int | None = None  # of a folder's images: they are converted to it
    judge: str | None = None  # a classifier of such images; None: one is trained
    settings: Settings = field(default=DEFAULTS)

    def __post_init__(self):
        if self.preset not in PRESETS:
            raise UsageError(f"preset is {self.preset!r}", f"for --task gan there are: {', '.join(PRESETS)}")
        if self.loss not in LOSSES:
            raise UsageError(f"loss is {self.loss!r}; expected {' or '.join(LOSSES)}")
        if self.k < 1:
            raise UsageError(f"k is {self.k}; expected steps of the discriminator, 1 or more")
        if self.settings.batch_tokens < FEWEST:
            raise UsageError(f"{BATCH} is {self.settings.batch_tokens}; expected {FEWEST} or more")
        strange = [name for name in ("data", "size", "channels", "judge") if getattr(self, name) is not None]
        if self.is_toy and strange:
            raise UsageError(f"{', '.join(strange)}: for images, not for a toy", "leave it out, or --preset dcgan")

    @property
    def is_toy(self) -> bool:
        return self.preset == "toy"

    def settled(self, examples: int) -> GanPlan:
        """The same with nothing left open: an evaluation an epoch, of a toy so many in all."""
        batches = -(-examples // self.settings.batch_tokens)
        epoch = max(1, round(batches * (self.k + 1) / self.k))
        steps = self.settings.steps or round(self.settings.epochs * epoch)
        every = self.settings.eval_every or (max(1, steps // FRAMES) if self.is_toy else epoch)
        kept = self.settings.save_every or max(every, steps // 10)
        data = None if self.is_toy else self.data or "digits"
        return replace(self, data=data, settings=replace(self.settings, eval_every=every, save_every=kept))

    def to_dict(self) -> dict[str, Any]:
        return LAYOUT.to_dict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any], where: Path | str = "--config") -> GanPlan:
        """From flat values; those left out have their defaults, and a name that is none of ours is an error."""
        values = LAYOUT.typed(values, where)
        usual, values = (TOY, {"k": TOY_K} | values) if values.get("preset") == "toy" else (DEFAULTS, values)
        return cls(**LAYOUT.fields_of(values, usual))

    def differences(self, given: dict[str, Any]) -> list[str]:
        """Where values given anew contradict this plan."""
        return LAYOUT.differences(self, given)


LAYOUT = Layout(TASK, GanPlan, paths=("data", "judge"), unused=("label_smoothing", "accumulate"))


# ---- data ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Data:
    """What is real: numbers, or images as bytes, and these once more for the classifier."""

    examples: Tensor
    images: image.ImageData | None = None
    plan: image.ImagePlan | None = None  # of the classifier
    network: networks.Loaded | None = None  # the classifier itself, where one was named

    @classmethod
    def read(cls, plan: GanPlan) -> Data:
        if plan.is_toy:
            return cls(toy.examples(torch.Generator().manual_seed(plan.settings.seed)))
        asked = image.ImagePlan(data=plan.data or "digits", size=plan.size, channels=plan.channels)
        images = image.ImageData.read(asked)
        pixels = images.train.pixels
        learns = judging.plan_of(asked.data, plan.size, plan.channels, len(pixels), plan.settings.seed)
        network = None
        if plan.judge is not None:
            network = networks.load(plan.judge)
            judging.expect_fit(network, pixels, plan.judge)
        return cls(pixels, images, learns, network)

    def checksum(self) -> str:
        found = hashlib.sha256(repr(tuple(self.examples.shape)).encode())
        found.update(self.examples.contiguous().numpy().data)
        return found.hexdigest()

    def config(self, preset: str) -> GanConfig:
        return GanConfig(preset, tuple(self.examples.shape[1:]), **PRESETS[preset])


# ---- a run ---------------------------------------------------------------------------------------------------


def start(plan: GanPlan, out: Path, quiet: bool = False) -> dict[str, Any]:
    """Start a run and see it through. Nothing is written before the data is checked."""
    expect_alone()
    expect_free(out)
    data = Data.read(plan)
    return _go_on(_begin(plan, data, out), data, out, quiet)


def resume(out: Path, quiet: bool = False) -> dict[str, Any]:
    """Go on with a run that was interrupted, exactly as if it had not been; a finished one is left as it is."""
    told = finished_result(out)
    if told is not None:
        return told
    plan = saved_plan(out)
    data = Data.read(plan)
    if saved_values(out).get(CHECKSUMS, {}).get("data") != data.checksum():
        raise DataError(f"{plan.data}: changed since {out} was started", "restore the images, or start a new run")
    return _go_on(plan, data, out, quiet)


def saved_plan(out: Path) -> GanPlan:
    """The plan of a run that was begun."""
    return GanPlan.from_dict(begun(out), out / CONFIG)


def _begin(plan: GanPlan, data: Data, out: Path) -> GanPlan:
    """Make the run's folder, whole or not at all: the networks as they start, and the plan with nothing left open."""
    plan = plan.settled(len(data.examples))
    model = fresh(data.config(plan.preset), torch.Generator().manual_seed(plan.settings.seed))
    sizes = [sum(weight.numel() for weight in part.parameters()) for part in (model.generator, model.discriminator)]
    log.info("a new %s: a generator of %s parameters, a discriminator of %s", plan.preset, *(f"{n:,}" for n in sizes))
    with made_beside(out) as folder:
        files.save(folder / "start", model)
        values = plan.to_dict() | {CHECKSUMS: {"data": data.checksum()}}
        (folder / CONFIG).write_text(flat.as_yaml(values), encoding="utf-8")
    return plan


def _go_on(plan: GanPlan, data: Data, out: Path, quiet: bool) -> dict[str, Any]:
    """From the last checkpoint of a run that was begun, or its start, to the end."""
    judge, prepared = _judge(plan, data, out, quiet)
    model = files.load(out / "start")  # also in a run's first session, so that all begin from the same bytes
    if not runs.checkpoints(out):
        judge(model, 0)
    work = GanWork(data.examples, plan.k, plan.loss, plan.settings.batch_tokens, judge, prepared)
    result = train(model, work, plan.settings, out, resume=True, quiet=quiet)
    return _finish(plan, model, result, out)


def _judge(
    plan: GanPlan, data: Data, out: Path, quiet: bool
) -> tuple[ToyJudge | ImageJudge, Callable[[Tensor], Tensor]]:
    """What looks at the generator now and then, and how examples become what the discriminator reads."""
    if plan.is_toy:
        return ToyJudge(out), lambda examples: examples
    assert data.images is not None and data.plan is not None
    found = data.network or judging.trained(data.plan, data.images, out / "judge", quiet)
    judge = judging.Judge.of(found, data.examples, plan.judge or out / "judge")
    if data.images is not None and data.images.held_out is not None:
        floor = judge(data.images.held_out.pixels)
        log.info("real images that are held out: frechet %.3g, classes %.3g", floor["frechet"], floor["classes"])
    return ImageJudge(out, judge, plan.settings.seed), as_examples


@dataclass(frozen=True)
class ToyJudge:
    out: Path

    def __call__(self, model: Gan, step: int) -> Score:
        frame = toy.frame_of(model)
        path = _place(self.out, "frames", step)
        frame.save(path.with_suffix(".npz"))
        toy.draw([(f"step {step}", frame)], path.with_suffix(".png"))
        return toy.judged(frame)


@dataclass(frozen=True)
class ImageJudge:
    """The same noise is looked at every time, so that sheets can be compared."""

    out: Path
    judge: judging.Judge
    seed: int

    @torch.no_grad()
    def __call__(self, model: Gan, step: int) -> Score:
        rng = torch.Generator().manual_seed(self.seed)
        pixels = torch.cat([as_pixels(model.sample(min(250, JUDGED - done), rng)) for done in range(0, JUDGED, 250)])
        write_grid(pixels[:SHOWN], COLUMNS, _place(self.out, "grids", step).with_suffix(".png"))
        found = self.judge(pixels)
        return Score(-found["frechet"], found)


def _place(out: Path, folder: str, step: int) -> Path:
    """Where the picture of an evaluation goes, without its ending."""
    (out / folder).mkdir(exist_ok=True)
    return out / folder / f"step-{step:08d}"


def _finish(plan: GanPlan, model: Gan, result: Result, out: Path) -> dict[str, Any]:
    """Write the pictures, the result and last the networks: where there is a final/, the run is complete."""
    draw_losses(out)
    told = outcome(result, out) | {"task": TASK, "preset": plan.preset, "loss": plan.loss, "k": plan.k}
    if plan.is_toy:
        frames = {int(path.stem.split("-")[1]): toy.Frame.load(path) for path in (out / "frames").glob("*.npz")}
        toy.draw(toy.strip(frames, told["best_step"]), out / "strip.png")
    told["picture"] = str(out / ("strip.png" if plan.is_toy else f"grids/step-{told['best_step']:08d}.png"))
    write_result(told, out)
    files.save(out / "final", model)
    return told


def draw_losses(out: Path) -> None:
    """loss.png: of both by step, smoothed; what they are where nothing can be told apart as lines."""
    from matplotlib.figure import Figure

    lines = runs.read_metrics(out)
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
