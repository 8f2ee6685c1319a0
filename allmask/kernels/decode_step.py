"""Structures and calls of decode_step.c: one decoding step of a Transformer in one call (VNNI or AVX2)."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from allmask.kernels import build
from allmask.kernels.build import int64s, pointer, pointers, structure
from allmask.kernels.int8 import KIND, Linear, Norm

SOURCE = Path(__file__).with_suffix(".c")
Layer = structure(
    **dict.fromkeys(("qkv", "output", "cross_query", "cross_output", "expand", "up", "contract"), Linear),
    **dict.fromkeys(("attention_norm", "cross_norm", "feed_forward_norm"), Norm),
)
Network = structure(
    **int64s("depth width heads head_width ffn_width pre activation distances"),
    epsilon=ctypes.c_double, head_epsilon=ctypes.c_double, distance_bias=ctypes.c_void_p,
    layers=ctypes.c_void_p, last_norm=Norm, transform=Linear, head_norm=Norm, head=Linear,
)  # fmt: skip
Memory = structure(**pointers("keys values lengths owner path own"), **int64s("kind texts padded rows slots room time"))


def library() -> Any:
    """The compiled decode_step.c; None if it cannot be compiled."""
    return build.library(SOURCE, build.AVX512_VNNI, build.AVX_VNNI, build.AVX2)


def step(
    network: ctypes.Structure, x: Tensor, vocab_size: int, *, keys: Tensor, values: Tensor, lengths: Tensor,
    owner: Tensor, path: Tensor, own: Tensor,
) -> Tensor:  # fmt: skip
    """Return logits (R, V) after one more embedded token x (R, W) per row; x is overwritten.

    `keys` (L, S, H, D, K) and `values` (L, S, H, K, D) are those of S texts of `lengths` (S,). Row r continues text
    owner[r]; its generated token t is in slot path[r, t] of `own` (L, 2, room, slots, H·D), which receives the new keys
    and values.
    """
    owner, path = owner.int(), path.contiguous()
    sizes = (keys.shape[1], keys.shape[-1], len(path), own.shape[3], own.shape[2], path.shape[1] - 1)
    memory = Memory(*map(pointer, (keys, values, lengths, owner, path, own)), KIND[keys.dtype], *sizes)
    x, logits = x.contiguous(), torch.empty(len(x), vocab_size)
    if not library().step(ctypes.byref(network), ctypes.byref(memory), pointer(x), pointer(logits)):
        raise MemoryError("no memory for a decoding step")
    return logits


def output_logits(network: ctypes.Structure, hidden: Tensor, vocab_size: int) -> Tensor:
    """Return the logits (R, V) of hidden states (R, W)."""
    x, logits = hidden.clone(memory_format=torch.contiguous_format), torch.empty(len(hidden), vocab_size)
    if not library().output_logits(ctypes.byref(network), ctypes.c_int64(len(x)), pointer(x), pointer(logits)):
        raise MemoryError("no memory for the logits")
    return logits
