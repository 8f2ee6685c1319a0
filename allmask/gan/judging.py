"""The quality and variety of generated images, measured by a classifier that was trained on the real ones.

frechet   Fréchet distance of the features of real and generated images, those of the classifier's last layer
          (arXiv 1706.08500, there with another network): 0 if they have the same mean and covariance
classes   effective number of classes among generated images, the exponential of their entropy: 1 is a collapse
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
from allmask.training import Settings, checkpoint, train
from allmask.vision import files
from allmask.vision.labelled import Preparation, all_over
from allmask.vision.resnet import ResNet, fresh, small
from allmask.vision.task import ImageData, ImageTraining, save_network

log = logging.getLogger("allmask")
STEPS = 400  # of the classifier, at most
MOST = 5000  # real images that are used
_AT_ONCE = 256
_PRESENT = 0.1  # of its share among real images: a class that has less is lost


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
    """|μ − ν|² + tr(A + B − 2 (A^½ B A^½)^½), which is symmetric and needs roots of symmetric matrices only."""
    values, vectors = torch.linalg.eigh(one.covariance)
    root = vectors * values.clamp(min=0.0).sqrt() @ vectors.T
    mixed = torch.linalg.eigvalsh(root @ other.covariance @ root).clamp(min=0.0).sqrt().sum()
    apart = (one.mean - other.mean).square().sum()
    return max(0.0, (apart + one.covariance.trace() + other.covariance.trace() - 2.0 * mixed).item())


@dataclass(frozen=True, eq=False)
class Evaluator:
    """A classifier, and what it sees in real images."""

    network: ResNet
    preparation: Preparation
    real: Moments
    shares: Tensor  # (classes,) of real images, as the network sees them

    @classmethod
    def of(cls, found: files.Loaded, pixels: Tensor, where: str | Path) -> Evaluator:
        """From a network and real images."""
        preparation = expect_fit(found, pixels, where)
        network = found.model.eval()
        features, classes = _seen(network, preparation, pixels[all_over(len(pixels), MOST)])
        return cls(network, preparation, Moments.of(features), _shares(classes, network.config.classes))

    def __call__(self, pixels: Tensor) -> dict[str, float]:
        """The metrics of images, given as bytes (N, C, H, W)."""
        features, classes = _seen(self.network, self.preparation, pixels)
        shares = _shares(classes, len(self.shares))
        there = self.shares > 0
        return {
            "frechet": frechet(self.real, Moments.of(features)),
            "classes": torch.special.entr(shares).sum().exp().item(),
            "covered": (shares >= _PRESENT * self.shares)[there].double().mean().item(),
        }


def expect_fit(found: files.Loaded, pixels: Tensor, where: str | Path) -> Preparation:
    """How a network reads such images; refused if it does not."""
    if found.preparation is None:
        raise DataError(f"{where}: does not say what images it reads", "train it with: allmask train --task image")
    found.preparation.expect(where, pixels)
    return found.preparation


@torch.no_grad()
def _seen(network: ResNet, preparation: Preparation, pixels: Tensor) -> tuple[Tensor, Tensor]:
    """Features (N, F) and classes (N,)."""
    features = torch.cat([network.features(preparation(part)) for part in pixels.split(_AT_ONCE)])
    return features, network.head(features).argmax(1)


def _shares(classes: Tensor, count: int) -> Tensor:
    return torch.bincount(classes, minlength=count).double() / len(classes)


def trained(job: ImageTraining, data: ImageData, seed: int, folder: Path, quiet: bool = False) -> files.Loaded:
    """Train a small classifier in a folder of its own, with the same loop; one that is there is loaded."""
    final = folder / FINAL
    if not final.is_dir():
        if folder.exists() and not checkpoint.checkpoints(folder):  # interrupted before the first checkpoint
            shutil.rmtree(folder)
        config = replace(small(8), channels=data.preparation.channels, classes=len(data.train.names))
        model = fresh(config, torch.Generator().manual_seed(seed))
        log.info("training a classifier of the real images, to judge the others by")
        settings = settings_for(len(data.train), seed)
        work = job.settled(data.train).work(data, model, settings)
        train(model, work, settings, folder, resume=folder.exists(), quiet=quiet)
        save_network(model, data, final)
        drop_spent(folder, keep=0)
    return files.load(final)


def settings_for(images: int, seed: int) -> Settings:
    """How the classifier learns: about twenty epochs, of many images fewer."""
    steps = max(1, min(STEPS, 20 * images // 64))
    return replace(DEFAULTS, steps=steps, batch_tokens=64, eval_every=max(1, steps // 4), seed=seed)
