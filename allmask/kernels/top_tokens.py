"""What a search asks of logits (R, V) at every step: what all of a row sum to, and the best few.

Both are one pass over a large vocabulary in C (top_tokens.c), where that can be had, and torch's own elsewhere.
"""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from allmask.kernels import build
from allmask.kernels.build import pointer

SOURCE = Path(__file__).with_suffix(".c")
FEW = 64  # more are found faster by sorting


def library() -> Any:
    """The compiled code, built if need be; None where it cannot be had."""
    return build.library(SOURCE, build.AVX512, build.AVX2)


def log_totals(logits: Tensor) -> Tensor:
    """(R,) log Σ exp of each row: a log-probability is a logit less this. NaN if a logit is NaN or infinite upwards."""
    if not _fits(logits):
        return logits.logsumexp(1).masked_fill(~logits.amax(1).isfinite(), torch.nan)
    totals = torch.empty(len(logits))
    library().log_totals(pointer(logits), *map(ctypes.c_int64, logits.shape), pointer(totals))
    return totals


def best(scores: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The highest scores of each row, best first, and their tokens, (R, count) each."""
    count = min(count, scores.shape[1])
    if not _fits(scores) or count > FEW:
        found = scores.topk(count)
        return found.values, found.indices
    values = torch.empty(len(scores), count)
    tokens = torch.empty(values.shape, dtype=torch.long)
    library().best(pointer(scores), *map(ctypes.c_int64, (*scores.shape, count)), pointer(values), pointer(tokens))
    return values, tokens


def _fits(x: Tensor) -> bool:
    plain = x.device.type == "cpu" and x.dtype == torch.float32 and x.is_contiguous()
    return plain and library() is not None
