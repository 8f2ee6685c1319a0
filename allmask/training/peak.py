"""How much of what the machine can do is put to use: the products a step needs, against those a second holds."""

from __future__ import annotations

import time
from dataclasses import replace
from functools import cache

import torch
from torch import Tensor

from allmask.config import Config
from allmask.data import Batch
from allmask.masks import Mask

SIDE, ROUNDS = 1024, 8
TRAINING = 3  # one pass forward, two backward


@cache
def measured_peak(dtype: torch.dtype, device: str = "cpu") -> float:
    """Operations a second of the fastest of a few large matrix products: what there is to have here."""
    a, b = (torch.ones(SIDE, SIDE, dtype=dtype, device=device) for _ in range(2))
    best = min(_seconds(a, b, device) for _ in range(ROUNDS))
    return 2 * SIDE**3 / best


def _seconds(a: Tensor, b: Tensor, device: str) -> float:
    began = time.perf_counter()
    torch.mm(a, b)
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - began


def operations(config: Config, batch: Batch) -> int:
    """Additions and multiplications of a training step on a batch, in matrix products alone.

    What is computed again, or where nobody asks for it, is not counted: slower ways to the same end score lower.
    """
    if batch.also is not None:
        return operations(config, replace(batch, also=None)) + operations(config, batch.also)
    if batch.hidden is not None:  # the body was asked before
        return 0
    tokens, asked = batch.tokens, batch.targets
    if batch.query is not None:  # the query stream is a second row, of the places asked for
        tokens += asked
    attended = config.layers * (tokens * 8 * config.width**2 + 4 * config.width * visible_pairs(batch.mask))
    answered = 0 if batch.asked is None else int(batch.asked.where.sum())
    fed = ((config.layers - 1) * tokens + asked + answered) * 4 * config.width * config.inner
    head = 2 * config.width * (config.vocabulary + (config.width if config.family == "bert" else 0))
    return TRAINING * (attended + fed + asked * head)


def visible_pairs(mask: Mask) -> int:
    """How many tokens all tokens read, counted from their order: a window or a matrix beside it is not looked at."""
    valid = mask.valid
    rows = torch.arange(len(valid), device=valid.device)[:, None] * (mask.group.max() + 1)
    order, group = mask.order[valid], (mask.group + rows)[valid]
    if not len(order):
        return 0
    span = int(order.max() - order.min()) + 1
    keys = (group * span + order - order.min()).sort().values
    older = torch.searchsorted(keys, keys, right=True)
    first = torch.searchsorted(keys, keys // span * span)
    return int((older - first).sum())
