"""Model FLOPs utilization (MFU): the operations of a step per second, as a share of the machine's peak."""

from __future__ import annotations

import time
from dataclasses import replace
from functools import cache

import torch

from allmask.config import Config
from allmask.data import Batch
from allmask.mask import Mask

SIDE, ROUNDS = 1024, 8
ENOUGH = 0.2  # seconds to measure for
TRAINING = 3  # a backward pass takes twice the operations of a forward pass


@cache
def measured_peak(dtype: torch.dtype, device: str = "cpu") -> float:
    """Measure the operations per second of a matrix product on this machine, the fastest of a few.

    A small product comes first: where bf16 is emulated, a large one takes seconds and is slower still. Where other
    programs run, a large one is interrupted, and a smaller one, which takes less than a millisecond, is the faster.
    """
    small = _speed(SIDE // 8, dtype, device)
    return small if 2 * SIDE**3 / small > ENOUGH else max(_speed(side, dtype, device) for side in (SIDE // 4, SIDE))


def _speed(side: int, dtype: torch.dtype, device: str) -> float:
    """Measure the operations per second of the product of two square matrices."""
    a, b = (torch.ones(side, side, dtype=dtype, device=device) for _ in range(2))
    seconds: list[float] = []
    while len(seconds) < 2 or (len(seconds) < ROUNDS and sum(seconds) < ENOUGH):  # the first may load a library
        started = time.perf_counter()
        torch.mm(a, b)
        if device != "cpu":
            torch.accelerator.synchronize()
        seconds.append(time.perf_counter() - started)
    return 2 * side**3 / min(seconds)


def operations(config: Config, batch: Batch) -> int:
    """Count the additions and multiplications in the matrix products of a training step on a batch.

    Recomputed and unused results do not count, so a slower way to the same result has a lower MFU.
    """
    if batch.also is not None:
        return operations(config, replace(batch, also=None)) + operations(config, batch.also)
    if batch.hidden is not None:  # cached features: the body is not run
        return 0
    tokens, asked = batch.tokens, batch.targets
    if batch.query is not None:  # the query stream has a row of its own for the positions that predict
        tokens += asked
    if config.family in ("lstm", "elmo"):
        return TRAINING * (_recurrences(config, batch) + asked * 2 * config.width * config.vocab_size)
    if config.decoder_layers:
        return TRAINING * (_two_stacks(config, batch) + asked * 2 * config.width * config.vocab_size)
    answered = 0 if batch.asked is None else int(batch.asked.where.sum())
    whole, last = (config.layers - 1) * tokens, asked + answered  # tokens of all layers but one, and of the last
    projected = (2 * (whole + tokens) + 2 * (whole + last)) * 2 * config.width**2  # keys and values of all tokens
    scored = 4 * config.width * ((config.layers - 1) * visible_pairs(batch.mask) + _pairs_of_last(batch))
    attended, fed = projected + scored, (whole + last) * 4 * config.width * config.ffn_width
    head = 2 * config.width * (config.vocab_size + (config.width if config.is_bert else 0))
    return TRAINING * (attended + fed + asked * head)


def _pairs_of_last(batch: Batch) -> int:
    """Count the pairs (query, key) of the last layer, which has queries only where something is predicted."""
    wanted = batch.labels >= 0 if batch.asked is None else (batch.labels >= 0) | batch.asked.where
    return visible_pairs(batch.mask, wanted)


def _two_stacks(config: Config, batch: Batch) -> int:
    """Count the operations of a forward pass through the layers of an encoder and a decoder."""
    is_source = batch.mask.first_known[0]
    read, seen = visible_pairs(batch.mask[:, is_source]), visible_pairs(batch.mask)
    sources, targets = int(is_source.sum()), int((~is_source).sum())
    projection, scores = 2 * config.width * config.attention_width, 4 * config.attention_width
    encoder = sources * 4 * projection + scores * read
    decoder = targets * 6 * projection + sources * 2 * projection + scores * (seen - read)
    fed = config.layers * sources + (config.decoder_layers - 1) * targets + batch.targets
    matrices = 3 if config.gated else 2
    return (
        config.layers * encoder + config.decoder_layers * decoder + fed * matrices * 2 * config.width * config.ffn_width
    )


def _recurrences(config: Config, batch: Batch) -> int:
    """Count the operations of a forward pass through LSTMs, each with four gates that read its input and its state."""
    width, gates = config.width, 8 * config.width
    if config.family == "elmo":
        return batch.tokens * config.layers * gates * 2 * width * (1 if batch.asked is None else 2)
    is_source = batch.mask.first_known[0]
    sources, targets = int(is_source.sum()), int((~is_source).sum())
    encoder = sources * config.layers * gates * (width * 3 // 2 if config.both_ways else 2 * width)
    begun = len(batch.mask.group.unique()) * config.decoder_layers * 4 * width**2
    heard = width * (2 if config.source_attention else 1)
    decoder = targets * gates * (2 * width + (config.decoder_layers - 1) * (heard + width))
    if not config.source_attention:
        return encoder + begun + decoder
    within = visible_pairs(batch.mask[:, is_source]) + visible_pairs(batch.mask[:, ~is_source])
    seen = visible_pairs(batch.mask) - within
    scores = 2 * width * config.ffn_width * (sources + targets) + 2 * (config.ffn_width + width) * seen
    return encoder + begun + decoder + scores + targets * 2 * heard * width


def visible_pairs(mask: Mask, wanted: torch.Tensor | None = None) -> int:
    """Count the pairs (query, key) that order and group allow, of queries `wanted` (B, T) or of all.

    A window or a matrix is ignored.
    """
    valid = mask.valid
    rows = torch.arange(len(valid), device=valid.device)[:, None] * (mask.group.max() + 1)
    order, group = mask.order[valid], (mask.group + rows)[valid]
    if not len(order):
        return 0
    span = int(order.max() - order.min()) + 1
    keys = (group * span + order - order.min()).sort().values
    queries = keys if wanted is None else (group * span + order - order.min())[wanted[valid]]
    older = torch.searchsorted(keys, queries, right=True)
    first = torch.searchsorted(keys, queries // span * span)
    return int((older - first).sum())
