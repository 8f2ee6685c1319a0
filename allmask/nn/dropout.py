"""Dropout with cheap randomness: each 64-bit random number decides four elements, where torch draws one for each."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

_LOWEST = torch.iinfo(torch.int64).min


def drop(x: Tensor, p: float) -> Tensor:
    """Zero each element with probability p, and scale the others so that the mean stays the same."""
    if x.device.type != "cpu":
        return F.dropout(x, p)
    return x * dropout_mask(x, p) * (1.0 / (1.0 - p))


def dropout_mask(like: Tensor, p: float) -> Tensor:
    """Ones and zeros in the shape and dtype of `like`; each is zero with probability p, to within 1/65536."""
    draws = torch.empty(math.ceil(like.numel() / 4), dtype=torch.int64).random_(_LOWEST, None).view(torch.int16)
    kept = draws[: like.numel()] >= round(p * 65536) - 32768
    return kept.view(like.shape).to(like.dtype)


class Dropout(nn.Module):
    def __init__(self, p: float):
        super().__init__()
        self.p = p

    def forward(self, x: Tensor) -> Tensor:
        return drop(x, self.p) if self.training and self.p else x
