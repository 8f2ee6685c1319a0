"""Attention of packed rows of documents, in training and inference, by an optional kernel in C.

Shapes: B rows, T tokens, N = B·T of them one after another, H heads, D width of a head, K keys.
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

SOURCE = Path(__file__).with_suffix(".c")
LONGEST = 2048 if build.has(build.AVX512) else 512  # tokens: torch is faster with more, or it was not measured
LANES = 16


class Block(NamedTuple):
    """A stretch of tokens whose sight has a name, so that its kernel needs no matrix, or at most a small one.

    `full`: every query reads every key. `causal`: each reads those up to itself. `prefix`: the first `source` tokens
    read each other, the rest is causal. `dense`: a boolean matrix. `empty`: padding, which reads nothing.
    """

    start: int
    stop: int
    kind: str
    source: int = 0
    documents: int = 1  # of equal length, side by side

    @property
    def length(self) -> int:
        """Of each document."""
        return (self.stop - self.start) // self.documents


def attend_documents(
    q: Tensor, k: Tensor, v: Tensor, blocks: tuple[Block, ...], dropout: float = 0.0, scale: float | None = None
) -> Tensor:
    """Attention of every document over itself, (B, T, H, D) in and out; each row is made of these blocks.

    Weights are dropped by a hash of one number from torch's generator, so the same seed drops the same, on any number
    of threads. `suits` says whether it can be called.
    """
    documents = layout(blocks, *q.shape[:2])
    assert documents is not None
    return attend_partners(q, k, v, documents, dropout, scale)


def attend_partners(
    q: Tensor, k: Tensor, v: Tensor, documents: np.ndarray, dropout: float = 0.0, scale: float | None = None
) -> Tensor:
    """The same of q (B, T, H, D) over any k, v (B, K, H, D), where `layout` or `partners` says who reads what."""
    seed = int(torch.empty((), dtype=torch.int64, device="cpu").random_()) if dropout else 0
    how = _How(documents, min(round(dropout * 2**32), 2**32 - 1), seed, scale or q.shape[-1] ** -0.5)
    return _Documents.apply(*(x.flatten(0, 1) for x in (q, k, v)), how).view(q.shape)  # type: ignore[union-attr]


def suits(q: Tensor, k: Tensor, v: Tensor, blocks: tuple[Block, ...], dropout: float = 0.0) -> bool:
    """Whether the kernel is there and made for this: a CPU, documents that are not long and whose sight has a name."""
    return q.shape == k.shape and _suits(q, k, v, dropout) and layout(blocks, *q.shape[:2]) is not None


def suits_partners(q: Tensor, k: Tensor, v: Tensor, documents: np.ndarray, dropout: float = 0.0) -> bool:
    """The same of `attend_partners`."""
    return _suits(q, k, v, dropout) and documents[:, [1, 4]].max() <= LONGEST


def _suits(q: Tensor, k: Tensor, v: Tensor, dropout: float) -> bool:
    if q.device.type != "cpu" or k.shape != v.shape or q.shape[-1] % LANES:
        return False
    if not q.dtype == k.dtype == v.dtype or dropout >= 1.0 or build.is_traced():
        return False
    return _library(q.dtype) is not None


@lru_cache(maxsize=8)  # asked by every layer
def layout(blocks: tuple[Block, ...], rows: int, tokens: int) -> np.ndarray | None:
    """(documents, 5): start, length, how many tokens are read by all from there, and start and number of the keys.

    None if any is long or dense.
    """
    found = []
    for block in blocks:
        if block.kind == "empty" or block.length == 0:
            continue
        if block.kind == "dense" or block.length > LONGEST:
            return None
        source = {"full": block.length, "causal": 0}.get(block.kind, block.source)
        found += [(block.start + i * block.length, block.length, source) for i in range(block.documents)]
    each = np.array(found, dtype=np.int64).reshape(1, -1, 3)
    own = (each + np.arange(rows).reshape(-1, 1, 1) * np.array([tokens, 0, 0])).reshape(-1, 3)
    return np.ascontiguousarray(own[:, [0, 1, 2, 0, 1]])


def partners(starts: np.ndarray, lengths: np.ndarray, key_starts: np.ndarray, key_lengths: np.ndarray) -> np.ndarray:
    """(documents, 5), as in `layout`, of documents that read all of a partner each."""
    sources = np.maximum(lengths, key_lengths)
    return np.stack([starts, lengths, sources, key_starts, key_lengths], axis=1).astype(np.int64)


class _How(NamedTuple):
    documents: np.ndarray
    dropped: int  # of 2^32
    seed: int
    scale: float


class _Documents(torch.autograd.Function):
    """q (N, H, D), k and v (K, H, D) to (N, H, D); tokens of no document give zeros and get zeros."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, how: _How) -> Tensor:
        q, k, v = (_by_rows(x) for x in (q, k, v))
        out = q.new_zeros(q.shape)
        rows = q.new_empty(2, q.shape[1], q.shape[0], dtype=torch.float32)  # the largest score and the sum of each
        _run(how, q, k, v, rows, out=out)
        ctx.save_for_backward(q, k, v, rows)
        ctx.how = how
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, rows = ctx.saved_tensors
        grads = [x.new_zeros(x.shape) for x in (q, k, v)]
        q_grad, k_grad, v_grad = grads
        _run(ctx.how, q, k, v, rows, grad=_by_rows(grad), q_grad=q_grad, k_grad=k_grad, v_grad=v_grad)
        return *grads, None


class _Call(ctypes.Structure):
    """As in the C file."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("q", "k", "v", "out", "tops", "sums")),
        *((name, ctypes.c_void_p) for name in ("grad", "q_grad", "k_grad", "v_grad", "documents")),
        *((name, ctypes.c_int64) for name in ("number", "tokens", "heads", "width")),
        *((name, ctypes.c_int64) for name in ("q_row", "k_row", "v_row", "grad_row", "half", "threads")),
        ("seed", ctypes.c_uint64),
        ("dropped", ctypes.c_uint32),
        ("scale", ctypes.c_float),
    )


def _run(how: _How, q: Tensor, k: Tensor, v: Tensor, rows: Tensor, **others: Tensor) -> None:
    tokens, heads, width = q.shape
    tensors = {"q": q, "k": k, "v": v, "tops": rows[0], "sums": rows[1], **others}
    strides = {f"{name}_row": x.stride(0) for name, x in tensors.items() if name in ("q", "k", "v", "grad")}
    call = _Call(
        **{name: x.data_ptr() for name, x in tensors.items()}, **strides, documents=how.documents.ctypes.data,
        number=len(how.documents), tokens=tokens, heads=heads, width=width, half=q.dtype == torch.bfloat16,
        threads=torch.get_num_threads(), seed=how.seed, dropped=how.dropped, scale=how.scale,
    )  # fmt: skip
    if _library(q.dtype).attend_documents(ctypes.byref(call)):
        raise MemoryError


def _by_rows(x: Tensor) -> Tensor:
    """With the heads of a token side by side; how far apart tokens are does not matter."""
    return x if x.stride()[1:] == (x.shape[2], 1) else x.contiguous()


def _library(dtype: torch.dtype) -> Any:
    """For bf16 the processor must multiply it itself: otherwise bf16 makes no sense anyway."""
    if dtype == torch.bfloat16:
        return build.library(SOURCE, build.AVX512_BF16)
    return build.library(SOURCE, build.AVX512, build.AVX2) if dtype == torch.float32 else None
