"""Weights side by side in large pages: what is read from end to end at every step waits less for addresses."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

PAGE = 2 << 20
HUGE = 14  # Linux's MADV_HUGEPAGE
ALIGNED = 64


def side_by_side(tensors: Sequence[Tensor]) -> None:
    """Move what they hold, in place, into one area of memory, of large pages where there are such."""
    sizes = [-(-x.nbytes // ALIGNED) * ALIGNED for x in tensors]
    area = torch.empty(sum(sizes) + PAGE, dtype=torch.uint8)
    begin = -area.data_ptr() % PAGE
    _advise(area.data_ptr() + begin, sum(sizes))
    for x, size in zip(tensors, sizes, strict=True):
        moved = area[begin : begin + x.nbytes].view(x.dtype).view(x.shape)
        x.data = moved.copy_(x)
        begin += size


def _advise(address: int, size: int) -> None:
    try:
        ctypes.CDLL(None).madvise(ctypes.c_void_p(address), ctypes.c_size_t(size), HUGE)
    except (AttributeError, OSError, TypeError):  # no such call here; it is advice only
        return
