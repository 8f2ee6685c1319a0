"""How a network learns images: which make a batch, how they become one, what its losses are, what it is asked later."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from allmask.data.plan import Plan
from allmask.errors import UsageError
from allmask.objectives.draws import Draw
from allmask.options import FEWEST_IMAGES as FEWEST
from allmask.vision.augment import random_crop, random_flip
from allmask.vision.labelled import Images, Preparation

_AT_ONCE = 256  # images asked about together


@dataclass(frozen=True, eq=False)
class ImageBatch:
    """Images that a step learns from, as the network reads them."""

    pixels: Tensor  # (B, C, H, W)
    labels: Tensor  # (B,)
    name: str = "image"  # what its loss is called

    @property
    def tokens(self) -> int:
        return len(self.labels)

    @property
    def counts(self) -> dict[str, int]:
        return {self.name: len(self.labels)}

    def to(self, device: torch.device | str) -> ImageBatch:
        return ImageBatch(self.pixels.to(device), self.labels.to(device), self.name)


@dataclass(frozen=True)
class Augmented:
    """Images by their numbers, in every epoch a little different."""

    images: Images
    preparation: Preparation
    seed: int = 0
    crop: int = 0  # pixels around an image, out of which one of its size is cut
    flip: bool = False  # left and right may be exchanged

    def batch(self, numbers: Sequence[int], epoch: int) -> ImageBatch:
        chosen, draw = torch.tensor(numbers), Draw(self.seed, epoch, numbers)
        pixels = self.images.pixels[chosen]
        pixels = random_crop(pixels, draw, self.crop) if self.crop else pixels
        pixels = random_flip(pixels, draw) if self.flip else pixels
        return ImageBatch(self.preparation(pixels), self.images.labels[chosen])


def plan_images(lengths: Sequence[int] | np.ndarray, most: int, seed: int, epoch: int) -> Plan:
    """Batches of numbers, each number once, none of them larger than `most` and all about as large.

    A last batch of the few images that are left would give its norms a strange mean. The result depends on the
    arguments alone.
    """
    if most < FEWEST:
        raise UsageError(f"batches of {most} images are too small for batch norm", f"take {FEWEST} or more")
    count = len(lengths)
    bits = np.random.PCG64(np.random.SeedSequence([seed, epoch]))
    order = bits.random_raw(count).argsort(kind="stable")
    parts = -(-count // most)
    bounds = np.arange(parts + 1) * count // parts
    return Plan(order, bounds[:-1], bounds[1:])


def losses_of(model: nn.Module, batch: ImageBatch, smoothing: float = 0.0) -> dict[str, tuple[Tensor, int]]:
    """The summed cross-entropy."""
    scores = model(batch.pixels).float()
    loss = F.cross_entropy(scores, batch.labels, reduction="sum", label_smoothing=smoothing)
    return {batch.name: (loss, len(batch.labels))}


@torch.no_grad()
def scores_of(model: nn.Module, pixels: Tensor, preparation: Preparation, dtype: torch.dtype = torch.float32) -> Tensor:
    """(N, classes): what a network in eval mode says of images as they are stored."""
    found = []
    for part in pixels.split(_AT_ONCE):
        with torch.autocast(part.device.type, dtype, dtype != torch.float32):
            found.append(model(preparation(part)).float())
    return torch.cat(found)
