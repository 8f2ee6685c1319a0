"""Memory of tensors: huge pages for packed weights, and reuse of freed memory."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

HUGE_PAGE = 2 << 20
MADV_HUGEPAGE = 14  # on Linux
CACHE_LINE = 64


def to_huge_pages(tensors: Sequence[Tensor]) -> None:
    """Move the data of all tensors, in place, into one block of memory, in huge pages where the system has them.

    Weights that are read from end to end at every step then cause fewer TLB misses.
    """
    sizes = [-(-x.nbytes // CACHE_LINE) * CACHE_LINE for x in tensors]
    block = torch.empty(sum(sizes) + HUGE_PAGE, dtype=torch.uint8)
    start = -block.data_ptr() % HUGE_PAGE
    try:
        address = ctypes.c_void_p(block.data_ptr() + start)
        ctypes.CDLL(None).madvise(address, ctypes.c_size_t(sum(sizes)), MADV_HUGEPAGE)
    except (AttributeError, OSError, TypeError):  # this system has no madvise, which is only advice
        pass
    for x, size in zip(tensors, sizes, strict=True):
        moved = block[start : start + x.nbytes].view(x.dtype).view(x.shape)
        x.data = moved.copy_(x)
        start += size


def keep_freed_memory() -> None:
    """Make the C library reuse freed memory instead of returning it to the system, which would zero it page by page.

    glibc returns unused memory beyond twice the largest block ever freed, counting blocks up to the size of this one.
    """
    torch.empty((32 << 20) - (1 << 16), dtype=torch.uint8)
