"""Where tensors lie in memory: huge pages for packed weights, and freed memory that is reused."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

HUGE_PAGE = 2 << 20
MADV_HUGEPAGE = 14  # of Linux
CACHE_LINE = 64


def to_huge_pages(tensors: Sequence[Tensor]) -> None:
    """Move the data of all tensors, in place, into one block of memory, in huge pages where the system has them.

    Weights that are read from end to end at every step then cost fewer TLB misses.
    """
    sizes = [-(-x.nbytes // CACHE_LINE) * CACHE_LINE for x in tensors]
    block = torch.empty(sum(sizes) + HUGE_PAGE, dtype=torch.uint8)
    start = -block.data_ptr() % HUGE_PAGE
    try:
        address = ctypes.c_void_p(block.data_ptr() + start)
        ctypes.CDLL(None).madvise(address, ctypes.c_size_t(sum(sizes)), MADV_HUGEPAGE)
    except (AttributeError, OSError, TypeError):  # only advice: this system has no such call
        pass
    for x, size in zip(tensors, sizes, strict=True):
        moved = block[start : start + x.nbytes].view(x.dtype).view(x.shape)
        x.data = moved.copy_(x)
        start += size


def keep_freed_memory() -> None:
    """Let the C library reuse freed memory instead of returning it to the system, which would zero it page by page.

    glibc returns what is unused beyond twice the largest block that was ever freed; this block is the largest that it
    takes into account.
    """
    torch.empty((32 << 20) - (1 << 16), dtype=torch.uint8)
