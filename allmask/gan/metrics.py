"""Quality and variety of generated images, measured by a classifier that was trained on the real ones.

frechet   Fréchet distance between the features of real and generated images, the inputs of the classifier's output
          layer (arXiv 1706.08500, there with Inception): 0 for the same mean and covariance
classes   effective number of classes among generated images, the exponential of their entropy; 1 is mode collapse
covered   share of the classes that are at least a tenth as frequent as among real images
"""

from __future__ import annotations

import logging
import shutil
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from allmask.errors import DataError
from allmask.options import IMAGES as DEFAULTS
from allmask.runs.folder import FINAL, drop_spent
from allmask.training import checkpoint, train
from allmask.vision import checkpoints
from allmask.vision.images import Preparation, evenly_spaced
from allmask.vision.resnet import ResNet, fresh, small
from allmask.vision.training import ImageData, ImageTraining

log = logging.getLogger("allmask")
MAX_STEPS = 400  # of the classifier
MAX_IMAGES = 5000  # real images that are compared with
_BATCH = 256
_COVERED = 0.1  # a class is covered if its share is at least this part of its share among real images


@dataclass(frozen=True, eq=False)
class Moments:
    """Mean and covariance of features."""

    mean: Tensor  # (F,)
    covariance: Tensor  # (F, F)

    @classmethod
    def of(cls, features: Tensor) -> Moments:
        rows = features.double()
        return cls(rows.mean(0), torch.cov(rows.T))


def frechet(one: Moments, other: Moments) -> float:
    """|μ − ν|² + tr(A + B − 2 (A^½ B A^½)^½): symmetric, and needs square roots of symmetric matrices only."""
    values, vectors = torch.linalg.eigh(one.covariance)
    root = vectors * values.clamp(min=0.0).sqrt() @ vectors.T
    mixed = torch.linalg.eigvalsh(root @ other.covariance @ root).clamp(min=0.0).sqrt().sum()
    distance = (one.mean - other.mean).square().sum()
    return max(0.0, (distance + one.covariance.trace() + other.covariance.trace() - 2.0 * mixed).item())


@dataclass(frozen=True, eq=False)
class Evaluator:
    """A classifier, and its features and predictions for real images."""

    network: ResNet
    preparation: Preparation
    real: Moments
    shares: Tensor  # (classes,) predicted for real images

    @classmethod
    def of(cls, classifier: checkpoints.Loaded, pixels: Tensor, where: str | Path) -> Evaluator:
        """From a classifier and real images, as bytes (N, C, H, W)."""
        preparation = expect_fit(classifier, pixels, where)
        network = classifier.model.eval()
        features, classes = _features(network, preparation, pixels[evenly_spaced(len(pixels), MAX_IMAGES)])
        return cls(network, preparation, Moments.of(features), _shares(classes, network.config.classes))

    def __call__(self, pixels: Tensor) -> dict[str, float]:
        """The metrics of generated images, as bytes (N, C, H, W)."""
        features, classes = _features(self.network, self.preparation, pixels)
        shares = _shares(classes, len(self.shares))
        real = self.shares > 0
        return {
            "frechet": frechet(self.real, Moments.of(features)),
            "classes": torch.special.entr(shares).sum().exp().item(),
            "covered": (shares >= _COVERED * self.shares)[real].double().mean().item(),
        }


def expect_fit(classifier: checkpoints.Loaded, pixels: Tensor, where: str | Path) -> Preparation:
    """The input normalization of a classifier, after checking that it fits the images."""
    if classifier.preparation is None:
        raise DataError(f"{where}: has no input normalization", "train it with: allmask train --task image")
    classifier.preparation.expect(where, pixels)
    return classifier.preparation


@torch.no_grad()
def _features(network: ResNet, preparation: Preparation, pixels: Tensor) -> tuple[Tensor, Tensor]:
    """Features (N, F) and predicted classes (N,)."""
    features = torch.cat([network.features(preparation(part)) for part in pixels.split(_BATCH)])
    return features, network.head(features).argmax(1)


def _shares(classes: Tensor, count: int) -> Tensor:
    return torch.bincount(classes, minlength=count).double() / len(classes)


def train_classifier(
    job: ImageTraining, data: ImageData, seed: int, folder: Path, quiet: bool = False
) -> checkpoints.Loaded:
    """Train a small classifier in its own run folder, or load it if this was done before."""
    final = folder / FINAL
    if not final.is_dir():
        if folder.exists() and not checkpoint.checkpoints(folder):  # interrupted before the first checkpoint
            shutil.rmtree(folder)
        config = replace(small(8), channels=data.preparation.channels, classes=len(data.train.names))
        model = fresh(config, torch.Generator().manual_seed(seed))
        log.info("training a classifier on the real images, to evaluate generated ones")
        steps = max(1, min(MAX_STEPS, 20 * len(data.train) // 64))  # about twenty epochs
        settings = replace(DEFAULTS, steps=steps, batch_tokens=64, eval_every=max(1, steps // 4), seed=seed)
        work = job.settled(data.train).work(data, model, settings)
        result = train(model, work, settings, folder, resume=folder.exists(), quiet=quiet)
        job.save(model, data, final)
        drop_spent(folder, result.checkpoints, keep=0)
    return checkpoints.load(final)
