"""The log-sum-exp and the best tokens of logits (R, V), which a search needs at every step.

Each takes one pass over the vocabulary in C (top_tokens.c); where that cannot be compiled, torch computes them.
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
MAX_COUNT = 64  # above it, torch is faster


def library() -> Any:
    """The compiled top_tokens.c; None if it cannot be compiled."""
    return build.library(SOURCE, build.AVX512, build.AVX2, build.NEON)


def log_totals(logits: Tensor) -> Tensor:
    """Return the log-sum-exp of each row, (R,); NaN if a logit is NaN or +inf, or all are -inf."""
    if not _suits(logits):
        return logits.logsumexp(1).masked_fill(~logits.amax(1).isfinite(), torch.nan)
    totals = torch.empty(len(logits))
    library().log_totals(pointer(logits), *map(ctypes.c_int64, logits.shape), pointer(totals))
    return totals


def best(scores: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return the highest scores of each row, best first, and their tokens, (R, count) each."""
    count = min(count, scores.shape[1])
    if not _suits(scores) or count > MAX_COUNT:
        found = scores.topk(count)
        return found.values, found.indices
    values = torch.empty(len(scores), count)
    tokens = torch.empty(values.shape, dtype=torch.long)
    library().best(pointer(scores), *map(ctypes.c_int64, (*scores.shape, count)), pointer(values), pointer(tokens))
    return values, tokens


def _suits(x: Tensor) -> bool:
    plain = x.device.type == "cpu" and x.dtype == torch.float32 and x.is_contiguous()
    return plain and library() is not None
