"""Attention of packed rows of documents, in training and inference, by an optional C kernel.

Shapes: B rows, T tokens, N = B·T tokens of all rows, H heads, D head width, K keys.
"""

from __future__ import annotations

import ctypes
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from allmask.kernels import build
from allmask.kernels.build import int64s, pointers, structure

SOURCE = Path(__file__).with_suffix(".c")
MAX_LENGTH = 2048 if build.has(build.AVX512) else 512  # of a document: above it torch is faster, or it was not measured
LANES = 16


class Block(NamedTuple):
    """A range of tokens with one kind of mask, so that its kernel needs no boolean matrix, or only a small one.

    `full`: every query reads every key. `causal`: each reads the keys up to itself. `prefix`: the first `source` tokens
    read each other, the rest is causal. `dense`: any boolean matrix. `empty`: padding, which reads nothing.
    """

    start: int
    stop: int
    kind: str
    source: int = 0
    documents: int = 1  # of equal length, one after another

    @property
    def length(self) -> int:
        """The length of each document."""
        return (self.stop - self.start) // self.documents


def attend_documents(
    q: Tensor, k: Tensor, v: Tensor, blocks: tuple[Block, ...], dropout: float = 0.0, scale: float | None = None
) -> Tensor:
    """Compute attention of every document over itself, (B, T, H, D) in and out; each row consists of these blocks.

    Call it only if `suits`. Dropout hashes one number from torch's generator, so a seed gives the same result on any
    number of threads.
    """
    documents = layout(blocks, *q.shape[:2])
    assert documents is not None
    return attend_partners(q, k, v, documents, dropout, scale)


def attend_partners(
    q: Tensor, k: Tensor, v: Tensor, documents: np.ndarray, dropout: float = 0.0, scale: float | None = None,
    places: np.ndarray | None = None,
) -> Tensor:  # fmt: skip
    """Compute attention of q (B, T, H, D) over k, v (B, K, H, D); `documents` comes from `layout` or `partners`.

    If q has only some queries of each document, `documents` and `places` come from `chosen`.
    """
    seed = int(torch.empty((), dtype=torch.int64, device="cpu").random_()) if dropout else 0
    options = _Options(documents, min(round(dropout * 2**32), 2**32 - 1), seed, scale or q.shape[-1] ** -0.5, places)
    return _Documents.apply(*(x.flatten(0, 1) for x in (q, k, v)), options).view(q.shape)  # type: ignore[union-attr]


def suits(q: Tensor, k: Tensor, v: Tensor, blocks: tuple[Block, ...], dropout: float = 0.0) -> bool:
    """Whether the kernel is available and supports this: on a CPU, no dense block, no long document."""
    return q.shape == k.shape and _suits(q, k, v, dropout) and layout(blocks, *q.shape[:2]) is not None


def suits_partners(q: Tensor, k: Tensor, v: Tensor, documents: np.ndarray, dropout: float = 0.0) -> bool:
    """Whether the kernel is available and supports these arguments of `attend_partners`."""
    return _suits(q, k, v, dropout) and documents[:, [1, 4]].max() <= MAX_LENGTH


def _suits(q: Tensor, k: Tensor, v: Tensor, dropout: float) -> bool:
    if q.device.type != "cpu" or k.shape != v.shape or q.shape[-1] % LANES:
        return False
    if not q.dtype == k.dtype == v.dtype or dropout >= 1.0 or build.is_traced():
        return False
    return library(q.dtype) is not None


@lru_cache(maxsize=8)  # called by every layer
def layout(blocks: tuple[Block, ...], rows: int, tokens: int) -> np.ndarray | None:
    """(documents, 5): start, length, source length, start of the keys, number of keys. None if one is long or dense."""
    found = []
    for block in blocks:
        if block.kind == "empty" or block.length == 0:
            continue
        if block.kind == "dense" or block.length > MAX_LENGTH:
            return None
        source = {"full": block.length, "causal": 0}.get(block.kind, block.source)
        found += [(block.start + i * block.length, block.length, source) for i in range(block.documents)]
    each = np.array(found, dtype=np.int64).reshape(1, -1, 3)
    own = (each + np.arange(rows).reshape(-1, 1, 1) * np.array([tokens, 0, 0])).reshape(-1, 3)
    return np.ascontiguousarray(own[:, [0, 1, 2, 0, 1]])


def partners(starts: np.ndarray, lengths: np.ndarray, key_starts: np.ndarray, key_lengths: np.ndarray) -> np.ndarray:
    """(documents, 5), as in `layout`, for documents that each read all of a partner."""
    sources = np.maximum(lengths, key_lengths)
    return np.stack([starts, lengths, sources, key_starts, key_lengths], axis=1).astype(np.int64)


def chosen(documents: np.ndarray, where: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The documents of a `layout` with only the queries where `where` (N,) is True, and the place of each in its."""
    tokens = np.flatnonzero(where)
    starts, ends = np.searchsorted(tokens, documents[:, 0]), np.searchsorted(tokens, documents[:, 0] + documents[:, 1])
    found = np.stack([starts, ends - starts, *documents[:, 2:].T], axis=1)[ends > starts]
    places = np.zeros(len(tokens), dtype=np.int64)
    for (start, count, *_), first in zip(found.tolist(), documents[ends > starts, 0].tolist(), strict=True):
        places[start : start + count] = tokens[start : start + count] - first
    return np.ascontiguousarray(found.astype(np.int64)), places


class _Options(NamedTuple):
    documents: np.ndarray
    dropped: int  # dropout probability · 2^32
    seed: int
    scale: float
    places: np.ndarray | None = None  # of chosen queries


class _Documents(torch.autograd.Function):
    """q (N, H, D), k and v (K, H, D) to (N, H, D). Outputs and gradients of tokens outside documents are zeros."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, options: _Options) -> Tensor:
        q, k, v = (_contiguous_heads(x) for x in (q, k, v))
        out = q.new_zeros(q.shape)
        rows = q.new_empty(2, q.shape[1], q.shape[0], dtype=torch.float32)  # largest score and sum of each row
        _run(options, q, k, v, rows, out=out)
        ctx.save_for_backward(q, k, v, rows)
        ctx.options = options
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, rows = ctx.saved_tensors
        q_grad, k_grad, v_grad = grads = _gradients(q, k, v)
        _run(ctx.options, q, k, v, rows, grad=_contiguous_heads(grad), q_grad=q_grad, k_grad=k_grad, v_grad=v_grad)
        return *grads, None


def _gradients(q: Tensor, k: Tensor, v: Tensor) -> list[Tensor]:
    """Zeros like q, k and v; if these are columns of one matrix (see nn/project.py), so are the gradients."""
    together = q.shape == k.shape and q.stride(0) == k.stride(0) == v.stride(0) == 3 * q[0].numel()
    if not together or q.untyped_storage().data_ptr() != k.untyped_storage().data_ptr():
        return [x.new_zeros(x.shape) for x in (q, k, v)]
    heads, width = q.shape[1:]
    return list(q.new_zeros(len(q), 3 * heads, width).split(heads, dim=1))


_Call = structure(
    **pointers("q k v out tops sums grad q_grad k_grad v_grad documents"),
    **int64s("number tokens heads width q_row k_row v_row grad_row q_grad_row k_grad_row v_grad_row"),
    **pointers("places"), **int64s("half threads"),
    seed=ctypes.c_uint64, dropped=ctypes.c_uint32, scale=ctypes.c_float,
)  # fmt: skip


def _run(options: _Options, q: Tensor, k: Tensor, v: Tensor, rows: Tensor, **others: Tensor) -> None:
    tokens, heads, width = q.shape
    tensors = {"q": q, "k": k, "v": v, "tops": rows[0], "sums": rows[1], **others}
    strided = ("q", "k", "v", "grad", "q_grad", "k_grad", "v_grad")
    strides = {f"{name}_row": x.stride(0) for name, x in tensors.items() if name in strided}
    call = _Call(
        **{name: x.data_ptr() for name, x in tensors.items()}, **strides, documents=options.documents.ctypes.data,
        places=None if options.places is None else options.places.ctypes.data,
        number=len(options.documents), tokens=tokens, heads=heads, width=width, half=q.dtype == torch.bfloat16,
        threads=torch.get_num_threads(), seed=options.seed, dropped=options.dropped, scale=options.scale,
    )  # fmt: skip
    if library(q.dtype).attend_documents(ctypes.byref(call)):
        raise MemoryError


def _contiguous_heads(x: Tensor) -> Tensor:
    """x with the heads of each token contiguous; tokens may have any stride."""
    return x if x.stride()[1:] == (x.shape[2], 1) else x.contiguous()


def library(dtype: torch.dtype) -> Any:
    """The compiled kernel; for bf16 only where the processor has bf16 products, without which bf16 is slow anyway."""
    if dtype == torch.bfloat16:
        return build.library(SOURCE, build.AVX512_BF16, build.NEON_BF16)
    return build.library(SOURCE, build.AVX512, build.AVX2, build.NEON) if dtype == torch.float32 else None
