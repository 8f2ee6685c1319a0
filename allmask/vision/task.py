"""Images: a network learns which class each is of (residual networks, arXiv 1512.03385).

The run's folder is that of every run, with confusion.png besides. Models are folders as allmask/vision/files.py writes
them.
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

from allmask.errors import UsageError
from allmask.files import new_folder
from allmask.nn.heads import Labels
from allmask.options import ImageOptions
from allmask.runs.plan import Job, Plan
from allmask.tasks.common.marks import Marks, mark
from allmask.tasks.metrics.confusion import draw_confusion
from allmask.training import Result, Score, Settings, StepSpec, Workload, checkpoint, resolve_precision
from allmask.training.flops import TRAINING
from allmask.vision import files
from allmask.vision.images import has_part, read
from allmask.vision.labelled import Images, Preparation
from allmask.vision.learning import Augmented, ImageBatch, losses_of, plan_images, scores_of
from allmask.vision.operations import multiply_adds
from allmask.vision.resnet import PRESETS, ResNet, fresh, shape_of

log = logging.getLogger("allmask")
BATCH_NORM = "the statistics of batch norm are those of the whole batch"


@dataclass(frozen=True)
class ImageData:
    """The images of a run."""

    train: Images
    held_out: Images | None
    preparation: Preparation

    def checksums(self) -> dict[str, str]:
        parts = {"data": self.train, "eval": self.held_out}
        return {name: _checksum(images) for name, images in parts.items() if images is not None}


def _checksum(images: Images) -> str:
    """Of what is in them, wherever it came from."""
    found = hashlib.sha256(repr((tuple(images.pixels.shape), images.names)).encode())
    for tensor in (images.pixels, images.labels):
        found.update(np.ascontiguousarray(tensor.numpy()).data)
    return found.hexdigest()


@dataclass(frozen=True)
class ImageTraining(ImageOptions, Job):
    """A new network learns the classes of images."""

    one_process: ClassVar[str] = BATCH_NORM

    # ---- data and model ------------------------------------------------------------------------------------

    def read(self, plan: Plan, out: Path, quiet: bool) -> ImageData:
        return self.images()

    def images(self) -> ImageData:
        images = read(self.data, "train", self.size, self.channels)
        preparation = Preparation.of(images.pixels)
        others = self._held_out()
        if others is not None:
            where = self.eval or self.data
            others = others.renumbered(images.names, where)
            preparation.expect(where, others.pixels)
            if _checksum(others) == _checksum(images):
                hint = "a score on images that were learnt says nothing: name others, or leave --eval out"
                raise UsageError(f"--eval {where}: the same images are trained on (--data)", hint)
        held_out = f"{len(others):,} held out" if others is not None else "none held out"
        log.info("data: %s images of %d classes, %s", f"{len(images):,}", len(images.names), held_out)
        return ImageData(images, others, preparation)

    def _held_out(self) -> Images | None:
        """The images that --eval names, or their test part; without it the test part of the data, if there is one."""
        if self.eval is not None:
            return read(self.eval, "test" if has_part(self.eval, "test") else "train", self.size, self.channels)
        return read(self.data, "test", self.size, self.channels) if has_part(self.data, "test") else None

    def checksums(self, data: ImageData) -> dict[str, str]:
        return data.checksums()

    def settled(self, images: Images) -> ImageTraining:
        """The same with nothing left open."""
        sides = images.pixels.shape[2:]
        crop = min(sides) // 8 if self.crop is None else self.crop
        if crop >= min(sides):
            raise UsageError(f"crop is {crop}; an image of {sides[1]} × {sides[0]} could be shifted out of sight")
        return replace(self, crop=crop, flip=images.pixels.shape[1] > 1 if self.flip is None else self.flip)

    def begin(self, plan: Plan, data: ImageData) -> tuple[Plan, ResNet]:
        plan = replace(plan, job=self.settled(data.train))
        config = replace(PRESETS[self.preset](), channels=data.preparation.channels, classes=len(data.train.names))
        model = fresh(config, torch.Generator().manual_seed(plan.settings.seed))
        size = sum(parameter.numel() for parameter in model.parameters())
        log.info("a new %s: %d layers, %s parameters", self.preset, config.depth, f"{size:,}")
        return plan, model

    def save(self, model: ResNet, data: ImageData, folder: Path) -> None:
        save_network(model, data, folder)

    def load(self, folder: Path, device: torch.device) -> ResNet:
        return files.load(folder).model

    # ---- training ------------------------------------------------------------------------------------------

    def workload(self, plan: Plan, data: ImageData, model: ResNet, out: Path, quiet: bool) -> ImageWorkload:
        if data.held_out is None:
            log.info("no images are held out: the weights of the last step are kept")
        return self.work(data, model, plan.settings)

    def work(self, data: ImageData, model: ResNet, settings: Settings) -> ImageWorkload:
        """What a network learns, with nothing left open."""
        assert self.crop is not None and self.flip is not None
        source = Augmented(data.train, data.preparation, settings.seed, self.crop, self.flip)
        shape = data.preparation
        each = 2 * multiply_adds(shape_of(model.config), shape.channels, shape.height, shape.width)
        evaluator = None
        if data.held_out is not None:
            evaluator = ImageEvaluator(data.held_out, data.preparation, settings.precision)
        return ImageWorkload(source, evaluator, each)

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


def save_network(model: ResNet, data: ImageData, folder: Path) -> None:
    """Write a model folder, signed for `allmask verify`; whole or not at all."""
    with new_folder(folder) as beside:
        files.save(beside, model, Labels("single", data.train.names), data.preparation)
        checkpoint.sign(beside)


@dataclass
class ImageWorkload:
    """What the training loop asks for: images by number, and an evaluator."""

    source: Augmented
    evaluator: Callable[[ResNet], Score] | None = None
    operations: int = 0  # of the network, on one image

    def __post_init__(self):
        self.lengths = np.ones(len(self.source.images), dtype=np.int64)
        self.step_spec = StepSpec("images", plan_images, losses_of, self._operations)

    def _operations(self, model: ResNet, batch: ImageBatch) -> int:
        return TRAINING * self.operations * batch.tokens

    def batch(self, numbers: Sequence[int], epoch: int) -> ImageBatch:
        return self.source.batch(numbers, epoch)

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
        dtype = resolve_precision(self.precision)
        scores = scores_of(model.eval(), self.images.pixels, self.preparation, dtype)
        loss = F.cross_entropy(scores, self.images.labels).item()
        return loss, mark(Labels("single", self.images.names), scores, self.images.labels)
