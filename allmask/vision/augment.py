"""Images changed by chance: a pure function of (seed, epoch, number of the image), whatever batch it comes in."""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from allmask.errors import UsageError
from allmask.objectives.draws import Draw


def random_crop(pixels: Tensor, draw: Draw, padding: int = 4) -> Tensor:
    """(B, C, H, W): as large as before, from anywhere in the image with `padding` black pixels around it."""
    _check(pixels, draw)
    height, width = pixels.shape[2:]
    top, left = (torch.from_numpy(np.floor(draw.rows(side) * (2 * padding + 1)).astype(np.int64)) for side in _SIDES)
    windows = F.pad(pixels, (padding,) * 4).unfold(2, height, 1).unfold(3, width, 1)  # a view of all places
    return windows[torch.arange(len(pixels)), :, top, left]


def random_flip(pixels: Tensor, draw: Draw) -> Tensor:
    """(B, C, H, W): every second image, about, with left and right exchanged."""
    _check(pixels, draw)
    chosen = torch.from_numpy(draw.rows("flip") < 0.5)
    return torch.where(chosen[:, None, None, None], pixels.flip(3), pixels)


_SIDES = ("crop top", "crop left")


def _check(pixels: Tensor, draw: Draw) -> None:
    if len(pixels) != len(draw.numbers):
        raise UsageError(f"{len(pixels)} images, but a draw for {len(draw.numbers)}")
