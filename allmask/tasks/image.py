"""Images: a network learns to tell which class each is of. What a run is told, what it keeps on disk, how it goes on.

runs/a/ is as every other run (see finetuning.py): config.yaml, start/, checkpoints/, metrics.jsonl, loss.png,
confusion.png, result.json, final/. The two models are folders as allmask/vision/files.py writes them.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from allmask.errors import DataError, UsageError
from allmask.heads import Labels
from allmask.tasks import values as flat
from allmask.tasks.confusion import draw_confusion
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
from allmask.tasks.marks import Marks, mark
from allmask.training import Result, Score, Settings, Way, resolve_precision, runs, train
from allmask.training.distributed import expect_alone
from allmask.training.peak import TRAINING
from allmask.training.plots import plot_run
from allmask.vision import files
from allmask.vision.images import has_part, read
from allmask.vision.labelled import Images, Preparation
from allmask.vision.learning import FEWEST, Augmented, Lot, losses_of, plan_images, scores_of
from allmask.vision.operations import multiply_adds
from allmask.vision.resnet import PRESETS, ResNet, fresh, shape_of

log = logging.getLogger("allmask")
TASK = "image"
DEFAULTS = Settings(
    epochs=30.0, batch_tokens=128, lr=2e-3, schedule="cosine", warmup=0.05, weight_decay=0.05, keep=2
)  # fmt: skip
SGD = replace(  # as arXiv 1512.03385 has it for CIFAR-10
    DEFAULTS, optimiser="sgd", lr=0.1, schedule="steps", warmup=0.0, weight_decay=1e-4, clip=1e9
)


@dataclass(frozen=True)
class ImagePlan:
    """All that a run is told, flat as it stands in config.yaml; saved, with nothing left open."""

    data: str = "digits"
    eval: str | None = None  # None: the test part of the data, if there is one
    preset: str = "resnet20"
    size: int | None = None  # of a folder's images: they are scaled to it
    channels: int | None = None  # of a folder's images: they are converted to it
    crop: int | None = None  # pixels around an image, out of which one of its size is cut; None: an eighth of its side
    flip: bool | None = None  # None: where images have colours; a digit has no mirror image
    settings: Settings = field(default=DEFAULTS)

    def __post_init__(self):
        if self.preset not in PRESETS:
            close = get_close_matches(self.preset, PRESETS, 1)
            hint = f"did you mean {close[0]}? " if close else ""
            raise UsageError(f"preset is {self.preset!r}", f"{hint}there are: {', '.join(PRESETS)}")
        if self.crop is not None and self.crop < 0:
            raise UsageError(f"crop is {self.crop}; expected a number of pixels, 0 for none")
        if self.settings.batch_tokens < FEWEST:
            raise UsageError(f"{BATCH} is {self.settings.batch_tokens}; expected {FEWEST} or more")

    def settled(self, images: Images) -> ImagePlan:
        """The same with nothing left open."""
        sides = images.pixels.shape[2:]
        crop = min(sides) // 8 if self.crop is None else self.crop
        if crop >= min(sides):
            raise UsageError(f"crop is {crop}; an image of {sides[1]} × {sides[0]} could be shifted out of sight")
        return replace(self, crop=crop, flip=images.pixels.shape[1] > 1 if self.flip is None else self.flip)

    def to_dict(self) -> dict[str, Any]:
        return LAYOUT.to_dict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any], where: Path | str = "--config") -> ImagePlan:
        """From flat values; those left out have their defaults, and a name that is none of ours is an error."""
        values = LAYOUT.typed(values, where)
        return cls(**LAYOUT.fields_of(values, SGD if values.get("optimiser") == "sgd" else DEFAULTS))

    def differences(self, given: dict[str, Any]) -> list[str]:
        """Where values given anew contradict this plan."""
        return LAYOUT.differences(self, given)


LAYOUT = Layout(TASK, ImagePlan, paths=("data", "eval"))


# ---- data ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ImageData:
    """The images of a run, read and checked before anything else happens."""

    train: Images
    held_out: Images | None
    preparation: Preparation

    @classmethod
    def read(cls, plan: ImagePlan) -> ImageData:
        images = read(plan.data, "train", plan.size, plan.channels)
        preparation = Preparation.of(images.pixels)
        others = _held_out(plan)
        if others is not None:
            where = plan.eval or plan.data
            others = others.renumbered(images.names, where)
            preparation.expect(where, others.pixels)
        told = f"{len(others):,} held out" if others is not None else "none held out"
        log.info("data: %s images of %d classes, %s", f"{len(images):,}", len(images.names), told)
        return cls(images, others, preparation)

    def checksums(self) -> dict[str, str]:
        parts = {"data": self.train, "eval": self.held_out}
        return {name: _checksum(images) for name, images in parts.items() if images is not None}


def _held_out(plan: ImagePlan) -> Images | None:
    """What --eval names, of which a part for tests is enough; without it, that part of the data, if there is one."""
    if plan.eval is not None:
        return read(plan.eval, "test" if has_part(plan.eval, "test") else "train", plan.size, plan.channels)
    return read(plan.data, "test", plan.size, plan.channels) if has_part(plan.data, "test") else None


def _checksum(images: Images) -> str:
    """Of what is in them, wherever it came from."""
    found = hashlib.sha256(repr((tuple(images.pixels.shape), images.names)).encode())
    for tensor in (images.pixels, images.labels):
        found.update(np.ascontiguousarray(tensor.numpy()).data)
    return found.hexdigest()


# ---- learning ------------------------------------------------------------------------------------------------


@dataclass
class ImageWork:
    """What the training loop asks for: images by number, and a judge."""

    source: Augmented
    judge: Callable[[ResNet], Score] | None = None
    operations: int = 0  # of the network, on one image

    def __post_init__(self):
        self.lengths = np.ones(len(self.source.images), dtype=np.int64)
        self.way = Way("images", plan_images, losses_of, self._operations)

    def _operations(self, model: ResNet, lot: Lot) -> int:
        return TRAINING * self.operations * lot.tokens

    def batch(self, numbers: Sequence[int], epoch: int) -> Lot:
        return self.source.batch(numbers, epoch)

    def evaluate(self, model: ResNet, step: int = 0) -> Score | None:
        return None if self.judge is None else self.judge(model)


@dataclass
class ImageJudge:
    """All metrics on images that are held out."""

    images: Images
    preparation: Preparation
    precision: str = "auto"

    def __call__(self, model: ResNet) -> Score:
        loss, marks = self.marks(model)
        return Score(marks.scores["accuracy"], {"loss": loss, **marks.scores})

    def marks(self, model: ResNet) -> tuple[float, Marks]:
        """The mean loss, and how often each class was taken for which."""
        dtype = resolve_precision(self.precision)
        scores = scores_of(model.eval(), self.images.pixels, self.preparation, dtype)
        loss = F.cross_entropy(scores, self.images.labels).item()
        return loss, mark(Labels("single", self.images.names), scores, self.images.labels)


def work_of(plan: ImagePlan, data: ImageData, model: ResNet) -> ImageWork:
    """What a network learns by a plan that is settled."""
    assert plan.crop is not None and plan.flip is not None
    source = Augmented(data.train, data.preparation, plan.settings.seed, plan.crop, plan.flip)
    shape = data.preparation
    each = 2 * multiply_adds(shape_of(model.config), shape.channels, shape.height, shape.width)
    return ImageWork(source, judge_of(plan, data), each)


def judge_of(plan: ImagePlan, data: ImageData) -> ImageJudge | None:
    return None if data.held_out is None else ImageJudge(data.held_out, data.preparation, plan.settings.precision)


# ---- a run ---------------------------------------------------------------------------------------------------


def start(plan: ImagePlan, out: Path, quiet: bool = False) -> dict[str, Any]:
    """Start a run and see it through. Nothing is written before the data is checked."""
    expect_alone()
    expect_free(out)
    data = ImageData.read(plan)
    return _go_on(_begin(plan, data, out), data, out, quiet)


def resume(out: Path, quiet: bool = False) -> dict[str, Any]:
    """Go on with a run that was interrupted, exactly as if it had not been; a finished one is left as it is."""
    told = finished_result(out)
    if told is not None:
        return told
    plan = saved_plan(out)
    data = ImageData.read(plan)
    then = saved_values(out).get(CHECKSUMS, {})
    for name, now in data.checksums().items():
        if then.get(name) != now:
            path = getattr(plan, name) or plan.data
            raise DataError(f"{path}: changed since {out} was started", "restore the images, or start a new run")
    return _go_on(plan, data, out, quiet)


def saved_plan(out: Path) -> ImagePlan:
    """The plan of a run that was begun."""
    return ImagePlan.from_dict(begun(out), out / CONFIG)


def _begin(plan: ImagePlan, data: ImageData, out: Path) -> ImagePlan:
    """Make the run's folder, whole or not at all: the network as it starts, and the plan with nothing left open."""
    plan = plan.settled(data.train)
    labels = Labels("single", data.train.names)
    config = replace(PRESETS[plan.preset](), channels=data.preparation.channels, classes=len(labels))
    model = fresh(config, torch.Generator().manual_seed(plan.settings.seed))
    size = sum(parameter.numel() for parameter in model.parameters())
    log.info("a new %s: %d layers, %s parameters", plan.preset, config.depth, f"{size:,}")
    with made_beside(out) as folder:
        _save(model, labels, data.preparation, folder / "start")
        values = plan.to_dict() | {CHECKSUMS: data.checksums()}
        (folder / CONFIG).write_text(flat.as_yaml(values), encoding="utf-8")
    return plan


def _go_on(plan: ImagePlan, data: ImageData, out: Path, quiet: bool) -> dict[str, Any]:
    """From the last checkpoint of a run that was begun, or its start, to the end."""
    model = files.load(out / "start").model  # also in a run's first session, so that all begin from the same bytes
    if data.held_out is None:
        log.info("no images are held out: the weights of the last step are kept")
    work = work_of(plan, data, model)
    result = train(model, work, plan.settings, out, resume=True, quiet=quiet)
    return _finish(plan, data, model, result, out)


def _finish(plan: ImagePlan, data: ImageData, model: ResNet, result: Result, out: Path) -> dict[str, Any]:
    """Write the pictures, the result and last the model: where there is a final/, the run is complete."""
    plot_run(out)
    judge = judge_of(plan, data)
    if judge is not None:
        draw_confusion(judge.marks(model)[1].confusion, data.train.names, out / "confusion.png")
    waited = round(result.waited / max(result.seconds, 1e-9), 4)  # the share of the time in which no batch was ready
    told = outcome(result, out) | {"task": TASK, "preset": plan.preset, "images": len(data.train), "waited": waited}
    write_result(told, out)
    _save(model, Labels("single", data.train.names), data.preparation, out / "final")
    return told


def _save(model: ResNet, labels: Labels, preparation: Preparation, folder: Path) -> None:
    """A model folder, signed for `allmask verify`; whole or not at all."""
    with made_beside(folder) as beside:
        files.save(beside, model, labels, preparation)
        runs.sign(beside)
