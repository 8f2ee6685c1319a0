"""How good made images are, and how varied, as a classifier sees them that was trained apart, on the real ones.

frechet   the distance of two normal distributions: of what the classifier's last layer reads of real images, and of
          made ones (arXiv 1706.08500, there with another network). 0 is the same; more of anything wrong is more.
classes   into how many classes made images fall, as many as evenly filled ones would count: 1 is a collapse
covered   the share of the classes that have at least a tenth of what they have among real images
"""

from __future__ import annotations

import logging
import shutil
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from allmask.errors import DataError
from allmask.heads import Labels
from allmask.tasks import image
from allmask.tasks.folders import made_beside
from allmask.training import runs, train
from allmask.vision import files
from allmask.vision.labelled import Preparation, all_over
from allmask.vision.resnet import ResNet, fresh, small

log = logging.getLogger("allmask")
STEPS = 400  # of the classifier, at most
MOST = 5000  # real images that are looked at
_AT_ONCE = 256
_PRESENT = 0.1  # of its share among real images: a class that has less is lost


@dataclass(frozen=True, eq=False)
class Moments:
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
class Judge:
    network: ResNet
    preparation: Preparation
    real: Moments
    shares: Tensor  # (classes,) of real images, as the network sees them

    @classmethod
    def of(cls, found: files.Loaded, pixels: Tensor, where: str | Path) -> Judge:
        """A network of image classes, with what it says of real images."""
        preparation = expect_fit(found, pixels, where)
        network = found.model.eval()
        features, classes = _seen(network, preparation, pixels[all_over(len(pixels), MOST)])
        return cls(network, preparation, Moments.of(features), _shares(classes, network.config.classes))

    def __call__(self, pixels: Tensor) -> dict[str, float]:
        """Of images as bytes (N, C, H, W)."""
        features, classes = _seen(self.network, self.preparation, pixels)
        shares = _shares(classes, len(self.shares))
        there = self.shares > 0
        return {
            "frechet": frechet(self.real, Moments.of(features)),
            "classes": torch.special.entr(shares).sum().exp().item(),
            "covered": (shares >= _PRESENT * self.shares)[there].double().mean().item(),
        }


def expect_fit(found: files.Loaded, pixels: Tensor, where: str | Path) -> Preparation:
    """How a network reads such images, if it does."""
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


def trained(plan: image.ImagePlan, data: image.ImageData, folder: Path, quiet: bool = False) -> files.Loaded:
    """A small classifier, learnt by the same loop in a run of its own; one that is there is taken."""
    final = folder / "final"
    if not final.is_dir():
        if folder.exists() and not runs.checkpoints(folder):  # interrupted before there was anything to go on with
            shutil.rmtree(folder)
        labels = Labels("single", data.train.names)
        config = replace(small(8), channels=data.preparation.channels, classes=len(labels))
        model = fresh(config, torch.Generator().manual_seed(plan.settings.seed))
        log.info("a classifier learns the real images, to judge the others by")
        work = image.work_of(plan.settled(data.train), data, model)
        train(model, work, plan.settings, folder, resume=folder.exists(), quiet=quiet)
        with made_beside(final) as beside:
            files.save(beside, model, labels, data.preparation)
            runs.sign(beside)
    return files.load(final)


def plan_of(data: str, size: int | None, channels: int | None, images: int, seed: int) -> image.ImagePlan:
    """How the classifier learns: about twenty epochs, of many images fewer."""
    steps = max(1, min(STEPS, 20 * images // 64))
    settings = replace(image.DEFAULTS, steps=steps, batch_tokens=64, eval_every=max(1, steps // 4), seed=seed)
    return image.ImagePlan(data=data, size=size, channels=channels, settings=settings)
