"""Assign examples to batches, in a random order that depends on the arguments alone, so that runs can be resumed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import overload

import numpy as np

from allmask.errors import UsageError

POOL_BATCHES = 64  # batches' worth of shuffled examples that are sorted by length together


@dataclass(frozen=True, eq=False)
class Plan(Sequence[list[int]]):
    """Batches of example numbers, stored as arrays; a batch becomes a list when it is accessed."""

    numbers: np.ndarray
    begins: np.ndarray  # index in `numbers` of the first example of each batch
    ends: np.ndarray  # and of the one after its last

    def __len__(self) -> int:
        return len(self.begins)

    @overload
    def __getitem__(self, index: int) -> list[int]: ...
    @overload
    def __getitem__(self, index: slice) -> Plan: ...
    def __getitem__(self, index: int | slice) -> list[int] | Plan:
        if isinstance(index, slice):
            return Plan(self.numbers, self.begins[index], self.ends[index])
        return self.numbers[self.begins[index] : self.ends[index]].tolist()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and list(self) == list(other)


def plan_epoch(lengths: Sequence[int] | np.ndarray, batch_tokens: int, seed: int, epoch: int) -> Plan:
    """Return batches of at most `batch_tokens` tokens that contain each example once; a longer example is alone.

    Examples are shuffled, sorted by length within pools of 64 batches, and cut into batches, which are shuffled. The
    result depends on the arguments alone.
    """
    sizes = np.asarray(lengths, dtype=np.int64)
    if sizes.ndim != 1 or (sizes < 1).any():
        raise UsageError("plan_epoch: lengths must be a row of positive whole numbers")
    if batch_tokens < 1:
        raise UsageError(f"a batch of {batch_tokens} tokens cannot hold an example", "pass --batch-tokens 1024 or more")
    if seed < 0 or epoch < 0:
        raise UsageError(f"seed {seed} and epoch {epoch} must not be negative")
    # Raw bits and a stable sort are the same in every version of numpy; its shuffle need not be
    bits = np.random.PCG64(np.random.SeedSequence([seed, epoch]))
    shuffled = bits.random_raw(len(sizes)).argsort(kind="stable")
    pool = (sizes[shuffled].cumsum() - 1) // (POOL_BATCHES * batch_tokens)
    order = shuffled[np.lexsort((sizes[shuffled], pool))]  # sorted by length within each pool
    bounds = np.array(_cut(sizes[order], batch_tokens))
    chosen = bits.random_raw(len(bounds) - 1).argsort(kind="stable")
    return Plan(order, bounds[chosen], bounds[chosen + 1])


def _cut(sizes: np.ndarray, batch_tokens: int) -> list[int]:
    """Return where batches begin, and the end: each takes as many examples as fit, and at least one."""
    ends = sizes.cumsum()
    following = ends.searchsorted(ends - sizes + batch_tokens, side="right")
    following = np.maximum(following, np.arange(len(sizes)) + 1)
    bounds = [0]
    while bounds[-1] < len(sizes):
        bounds.append(int(following[bounds[-1]]))
    return bounds
