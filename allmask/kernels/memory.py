"""Memory of tensors: huge pages for packed weights and for training, and reuse of freed memory."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor

HUGE_PAGE = 2 << 20
MADV_HUGEPAGE = 14  # on Linux
M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4  # of glibc's mallopt
MAPPED = 65536  # glibc's default of M_MMAP_MAX
CACHE_LINE = 64
HEAP = 1 << 30  # bytes of the heap for which huge pages are asked in advance


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


@contextmanager
def large_blocks_from_the_heap() -> Iterator[None]:
    """Within it, the C library takes blocks of any size from its heap, and reuses them when they are freed.

    Otherwise it maps blocks of more than 32 MB one by one, such as the gradient of an embedding, and unmaps them when
    they are freed. The system then zeroes them again, page by page: 54,000 page faults in a step of BERT-small.
    """
    mallopt = _mallopt()
    if mallopt is None:
        yield
        return
    mallopt(M_MMAP_MAX, 0)
    try:
        yield
    finally:
        mallopt(M_MMAP_MAX, MAPPED)


def heap_in_huge_pages() -> None:
    """Ask for huge pages in the next gigabyte of the C library's heap, from which blocks of any size then come.

    Gradients, the optimizer's averages and activations are written and read from end to end in every step. Nothing is
    used in advance: a page is there when it is first written.
    """
    if _mallopt() is None:
        return
    library = ctypes.CDLL(None)
    library.malloc.restype = ctypes.c_void_p
    with large_blocks_from_the_heap():
        block = library.malloc(ctypes.c_size_t(HEAP))
    if not block:
        return
    start = block + -block % HUGE_PAGE
    library.madvise(
        ctypes.c_void_p(start), ctypes.c_size_t((block + HEAP - start) // HUGE_PAGE * HUGE_PAGE), MADV_HUGEPAGE
    )
    library.free(ctypes.c_void_p(block))  # the heap keeps it


@cache
def _mallopt() -> Any:
    """Let glibc keep up to 2 GB of freed memory, and return its mallopt; None in other C libraries."""
    try:
        library = ctypes.CDLL(None)
        getattr(library, "gnu_get_libc_version")  # noqa: B009 - other C libraries have none
        library.mallopt(M_TRIM_THRESHOLD, 2**31 - 1)
    except (AttributeError, OSError, TypeError):
        return None
    return library.mallopt
