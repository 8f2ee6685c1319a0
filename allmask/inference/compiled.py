"""An optional kernel in C for rows of short documents. Where it cannot be built, torch's own kernels do the work."""

from __future__ import annotations

import ctypes
from concurrent.futures import ThreadPoolExecutor
from functools import cache, lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from allmask import native
from allmask.attention import Block, KeyValue, Route

SOURCE = Path(__file__).with_name("documents.c")
INSTRUCTIONS = ("avx512f", "avx512bw", "avx512dq", "avx512vl", "fma")
LONGEST = 512  # tokens; beyond, torch's kernel has enough work in a call
LANES = 16


class Documents(NamedTuple):
    """Keys and values (B, K, H, D) that are read by the kernel here where a row is made of short whole documents."""

    keys: Tensor
    values: Tensor

    def append(self, new: KeyValue) -> KeyValue:
        return KeyValue(*self).append(new)

    def attend(self, q: Tensor, route: Route, dropout: float = 0.0, bias: Tensor | None = None) -> Tensor:
        starts = document_starts(route.blocks)
        if starts is None or bias is not None or not self._suit(q):
            return KeyValue(*self).attend(q, route, dropout, bias)
        return attend_documents(q, self.keys, self.values, starts)

    def _suit(self, q: Tensor) -> bool:
        alike = q.shape == self.keys.shape and q.shape[0] == 1 and q.shape[-1] % LANES == 0
        kind = q.device.type == "cpu" and q.dtype in (torch.float32, torch.bfloat16) and not q.requires_grad
        return alike and kind and all(x.is_contiguous() for x in (q, self.keys, self.values))


@lru_cache(maxsize=8)  # asked by every layer
def document_starts(blocks: tuple[Block, ...]) -> Tensor | None:
    """Where each document of a row begins, and the end; None if any is long or does not read all of itself."""
    starts = [0]
    for block in blocks:
        length = (block.stop - block.start) // block.documents
        if block.kind != "full" or not 0 < length <= LONGEST:
            return None
        starts += [block.start + (number + 1) * length for number in range(block.documents)]
    return torch.tensor(starts)


def attend_documents(q: Tensor, k: Tensor, v: Tensor, starts: Tensor) -> Tensor:
    """Attention of each document over itself, on as many threads as torch has; (1, T, H, D) in and out."""
    out = torch.empty_like(q)
    threads = min(torch.get_num_threads(), len(starts) - 1)  # shares of whole documents
    shares = torch.linspace(0, len(starts) - 1, threads + 1).long().tolist()

    def run(share: int) -> None:
        first, last = shares[share], shares[share + 1]
        pointers = [x.data_ptr() for x in (q, k, v, out, starts[first:])]
        sizes = (last - first, q.shape[2], q.shape[3], q.shape[3] ** -0.5, q.dtype == torch.bfloat16)
        if _library().attend_documents(*pointers, *sizes):
            raise MemoryError

    if threads == 1:
        run(0)
    else:
        list(_pool(threads).map(run, range(threads)))
    return out


def available() -> bool:
    """Whether the kernel is there, building it if need be (once for a machine, about a second)."""
    return _library() is not None


def _library() -> Any:
    built = native.library(SOURCE, INSTRUCTIONS)
    if built is not None and built.attend_documents.argtypes is None:
        pointer, size = ctypes.c_void_p, ctypes.c_int64
        built.attend_documents.argtypes = [*[pointer] * 5, *[size] * 3, ctypes.c_float, ctypes.c_int]
    return built


@cache
def _pool(threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(threads)
