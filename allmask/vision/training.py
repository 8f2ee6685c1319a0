"""Train an image classifier from scratch (residual networks, arXiv 1512.03385).

The run folder is that of every run, with confusion.png besides. Models are folders as allmask/vision/checkpoints.py
writes them.
"""

from __future__ import annotations

import hashlib
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from allmask.data.plan import Plan as BatchPlan
from allmask.errors import UsageError
from allmask.files import new_folder
from allmask.nn.heads import Labels
from allmask.objectives.draws import Draw
from allmask.options import FEWEST_IMAGES as FEWEST
from allmask.options import ImageOptions
from allmask.runs.plan import Job, Plan
from allmask.tasks.common.marks import Marks, mark
from allmask.tasks.metrics.confusion import draw_confusion
from allmask.training import Result, Score, Settings, StepSpec, Workload, checkpoint, resolve_precision
from allmask.training.flops import TRAINING
from allmask.vision import checkpoints
from allmask.vision.datasets import has_part, read
from allmask.vision.images import Images, Preparation
from allmask.vision.resnet import PRESETS, ResNet, fresh, multiply_adds, shape_of

log = logging.getLogger("allmask")
BATCH_NORM = "batch norm needs the statistics of the whole batch"
_EVAL_BATCH = 256


# ---- augmentation ------------------------------------------------------------------------------------------------
# Random changes are a function of (seed, epoch, number of the image) alone, whatever batch the image is in.


def random_crop(pixels: Tensor, draw: Draw, padding: int = 4) -> Tensor:
    """Pad images (B, C, H, W) with `padding` black pixels on each side and cut out a random window of H × W."""
    _check_draw(pixels, draw)
    height, width = pixels.shape[2:]
    top, left = (
        torch.from_numpy(np.floor(draw.rows(name) * (2 * padding + 1)).astype(np.int64))
        for name in ("crop top", "crop left")
    )
    windows = F.pad(pixels, (padding,) * 4).unfold(2, height, 1).unfold(3, width, 1)  # a view of all windows
    return windows[torch.arange(len(pixels)), :, top, left]


def random_flip(pixels: Tensor, draw: Draw) -> Tensor:
    """Mirror each image of (B, C, H, W) horizontally with probability 0.5."""
    _check_draw(pixels, draw)
    chosen = torch.from_numpy(draw.rows("flip") < 0.5)
    return torch.where(chosen[:, None, None, None], pixels.flip(3), pixels)


def _check_draw(pixels: Tensor, draw: Draw) -> None:
    if len(pixels) != len(draw.numbers):
        raise UsageError(f"{len(pixels)} images, but a draw for {len(draw.numbers)}")


# ---- batches, loss, logits -----------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class ImageBatch:
    pixels: Tensor  # (B, C, H, W), normalized
    labels: Tensor  # (B,)

    @property
    def tokens(self) -> int:
        return len(self.labels)

    @property
    def counts(self) -> dict[str, int]:
        return {"image": len(self.labels)}

    def to(self, device: torch.device | str) -> ImageBatch:
        return ImageBatch(self.pixels.to(device), self.labels.to(device))


def plan_images(lengths: Sequence[int] | np.ndarray, most: int, seed: int, epoch: int) -> BatchPlan:
    """Shuffle the images of an epoch into batches of at most `most`, all of about the same size.

    A small last batch would distort the statistics of batch norm. The result depends on the arguments alone.
    """
    if most < FEWEST:
        raise UsageError(f"batches of {most} images are too small for batch norm", f"take {FEWEST} or more")
    count = len(lengths)
    bits = np.random.PCG64(np.random.SeedSequence([seed, epoch]))
    order = bits.random_raw(count).argsort(kind="stable")
    parts = -(-count // most)
    bounds = np.arange(parts + 1) * count // parts
    return BatchPlan(order, bounds[:-1], bounds[1:])


def losses_of(model: nn.Module, batch: ImageBatch, smoothing: float = 0.0) -> dict[str, tuple[Tensor, int]]:
    """The summed cross-entropy, and the number of images."""
    logits = model(batch.pixels).float()
    loss = F.cross_entropy(logits, batch.labels, reduction="sum", label_smoothing=smoothing)
    return {"image": (loss, len(batch.labels))}


def device_of(model: nn.Module) -> torch.device:
    return next(model.parameters()).device


@torch.no_grad()
def logits_of(model: nn.Module, pixels: Tensor, preparation: Preparation, dtype: torch.dtype = torch.float32) -> Tensor:
    """Logits (N, classes) of a model in eval mode for images as bytes."""
    logits, device = [], device_of(model)
    for part in pixels.split(_EVAL_BATCH):
        with torch.autocast(device.type, dtype, dtype != torch.float32):
            logits.append(model(preparation(part).to(device)).float().cpu())
    return torch.cat(logits)


# ---- a training run --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ImageData:
    """The images of a run."""

    train: Images
    held_out: Images | None
    preparation: Preparation


def _checksum(images: Images) -> str:
    """A checksum of the content, independent of the files it came from."""
    digest = hashlib.sha256(repr((tuple(images.pixels.shape), images.names)).encode())
    for tensor in (images.pixels, images.labels):
        digest.update(np.ascontiguousarray(tensor.numpy()).data)
    return digest.hexdigest()


@dataclass(frozen=True)
class ImageTraining(ImageOptions, Job):
    """Train a new network to classify images."""

    one_process: ClassVar[str] = BATCH_NORM

    def read(self, plan: Plan, out: Path, quiet: bool) -> ImageData:
        return self.images()

    def images(self) -> ImageData:
        """Read training and held-out images: the test part of --eval, or all of it, or the test part of the data."""
        images = read(self.data, "train", self.size, self.channels)
        preparation = Preparation.of(images.pixels)
        held_out, where = None, self.eval or self.data
        if self.eval is not None or has_part(where, "test"):
            held_out = read(where, "test" if has_part(where, "test") else "train", self.size, self.channels)
            held_out = held_out.with_names(images.names, where)
            preparation.expect(where, held_out.pixels)
            if _checksum(held_out) == _checksum(images):
                hint = "a score on training images means nothing: name others, or leave --eval out"
                raise UsageError(f"--eval {where}: the same images are trained on (--data)", hint)
        count = f"{len(held_out):,} held out" if held_out is not None else "none held out"
        log.info("data: %s images of %d classes, %s", f"{len(images):,}", len(images.names), count)
        return ImageData(images, held_out, preparation)

    def checksums(self, data: ImageData) -> dict[str, str]:
        parts = {"data": data.train, "eval": data.held_out}
        return {name: _checksum(images) for name, images in parts.items() if images is not None}

    def settled(self, images: Images) -> ImageTraining:
        """The same job with `crop` and `flip` chosen to suit the images, unless they were given."""
        height, width = images.pixels.shape[2:]
        crop = min(height, width) // 8 if self.crop is None else self.crop
        if crop >= min(height, width):
            raise UsageError(f"crop is {crop}; it must be smaller than the images, {width} × {height} pixels")
        return replace(self, crop=crop, flip=images.pixels.shape[1] > 1 if self.flip is None else self.flip)

    def begin(self, plan: Plan, data: ImageData) -> tuple[Plan, ResNet]:
        plan = replace(plan, job=self.settled(data.train))
        config = replace(PRESETS[self.preset](), channels=data.preparation.channels, classes=len(data.train.names))
        model = fresh(config, torch.Generator().manual_seed(plan.settings.seed))
        size = sum(parameter.numel() for parameter in model.parameters())
        log.info("a new %s: %d layers, %s parameters", self.preset, config.depth, f"{size:,}")
        return plan, model

    def save(self, model: ResNet, data: ImageData, folder: Path) -> None:
        """Write a model folder, signed for `allmask verify`; it appears only when it is complete."""
        with new_folder(folder) as unfinished:
            checkpoints.save(unfinished, model, Labels("single", data.train.names), data.preparation)
            checkpoint.sign(unfinished)

    def load(self, folder: Path, device: torch.device) -> ResNet:
        return checkpoints.load(folder).model.to(device)

    def workload(self, plan: Plan, data: ImageData, model: ResNet, out: Path, quiet: bool) -> ImageWorkload:
        if data.held_out is None:
            log.info("no images are held out: the weights of the last step are kept")
        return self.work(data, model, plan.settings)

    def work(self, data: ImageData, model: ResNet, settings: Settings) -> ImageWorkload:
        """The workload of a job that is settled."""
        assert self.crop is not None and self.flip is not None
        shape = data.preparation
        example = torch.empty(1, shape.channels, shape.height, shape.width, device="meta")
        held_out = data.held_out
        evaluator = None if held_out is None else ImageEvaluator(held_out, shape, settings.precision)
        operations = 2 * multiply_adds(shape_of(model.config), example)
        return ImageWorkload(data.train, shape, settings.seed, self.crop, self.flip, evaluator, operations)

    def evaluation_size(self, data: ImageData, work: Workload) -> int:
        return 0 if data.held_out is None else len(data.held_out)

    def finish(
        self, plan: Plan, data: ImageData, work: Workload, model: ResNet, result: Result, out: Path
    ) -> tuple[ImageTraining, dict[str, Any]]:
        if data.held_out is not None:
            evaluator = ImageEvaluator(data.held_out, data.preparation, plan.settings.precision)
            draw_confusion(evaluator.marks(model)[1].confusion, data.train.names, out / "confusion.png")
        waited = round(result.waited / max(result.seconds, 1e-9), 4)  # share of the time in which no batch was ready
        return self, {"task": self.task_name, "preset": self.preset, "images": len(data.train), "waited": waited}

    def hints(self, result: Mapping[str, Any]) -> list[str]:
        return [f"use it: allmask predict {result['final']} images/ -o classes.jsonl"]


@dataclass
class ImageWorkload:
    """Augmented training images for the training loop, and an evaluator."""

    images: Images
    preparation: Preparation
    seed: int = 0
    crop: int = 0  # padding of `random_crop`
    flip: bool = False
    evaluator: Callable[[ResNet], Score] | None = None
    operations: int = 0  # of the network for one image, forward

    def __post_init__(self):
        self.lengths = np.ones(len(self.images), dtype=np.int64)
        self.step_spec = StepSpec(
            "images", plan_images, losses_of, lambda model, batch: TRAINING * self.operations * batch.tokens
        )

    def batch(self, numbers: Sequence[int], epoch: int) -> ImageBatch:
        chosen, draw = torch.tensor(numbers), Draw(self.seed, epoch, numbers)
        pixels = self.images.pixels[chosen]
        pixels = random_crop(pixels, draw, self.crop) if self.crop else pixels
        pixels = random_flip(pixels, draw) if self.flip else pixels
        return ImageBatch(self.preparation(pixels), self.images.labels[chosen])

    def evaluate(self, model: ResNet, step: int = 0) -> Score | None:
        return None if self.evaluator is None else self.evaluator(model)


@dataclass
class ImageEvaluator:
    """All metrics on held-out images."""

    images: Images
    preparation: Preparation
    precision: str = "auto"

    def __call__(self, model: ResNet) -> Score:
        loss, marks = self.marks(model)
        accuracy = marks.scores["accuracy"]
        stderr = math.sqrt(accuracy * (1.0 - accuracy) / len(self.images))
        return Score(accuracy, {"loss": loss, **marks.scores}, loss=loss, stderr=stderr, metric="accuracy")

    def marks(self, model: ResNet) -> tuple[float, Marks]:
        """The mean loss, and all metrics with the confusion matrix."""
        dtype = resolve_precision(self.precision, device_of(model))
        logits = logits_of(model.eval(), self.images.pixels, self.preparation, dtype)
        loss = F.cross_entropy(logits, self.images.labels).item()
        return loss, mark(Labels("single", self.images.names), logits, self.images.labels)
