"""Which examples make a batch, and in what order: a pure function, so that a resumed run sees the same."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import overload

import numpy as np

from allmask.errors import UsageError

POOL_BATCHES = 64  # batches' worth of shuffled examples sorted together: neighbours get similar lengths, batches differ


@dataclass(frozen=True, eq=False)
class Plan(Sequence[list[int]]):
    """Batches of example numbers. They become lists when they are asked for: a plan of many rows is kept as arrays."""

    numbers: np.ndarray
    begins: np.ndarray  # where each batch begins among the numbers, and where it ends
    ends: np.ndarray

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
    """Batches of example numbers, each number once, within `batch_tokens`; an example over the budget stands alone.

    Examples are shuffled, pools of them sorted by length, cut into batches, and the batches shuffled. The result
    depends on the arguments alone.
    """
    sizes = np.asarray(lengths, dtype=np.int64)
    _check(sizes, batch_tokens, seed, epoch)
    # Raw bits and a stable sort: numpy promises the same for every version, which it does not for its shuffle.
    bits = np.random.PCG64(np.random.SeedSequence([seed, epoch]))
    shuffled = bits.random_raw(len(sizes)).argsort(kind="stable")
    order = _sort_pools(shuffled, sizes, batch_tokens)
    bounds = np.array(_cut(sizes[order], batch_tokens))
    chosen = bits.random_raw(len(bounds) - 1).argsort(kind="stable")
    return Plan(order, bounds[chosen], bounds[chosen + 1])


def _check(sizes: np.ndarray, batch_tokens: int, seed: int, epoch: int) -> None:
    if sizes.ndim != 1 or (sizes < 1).any():
        raise UsageError("plan_epoch: lengths must be a row of positive whole numbers")
    if batch_tokens < 1:
        raise UsageError(f"a batch of {batch_tokens} tokens holds nothing", "pass --batch-tokens 1024 or more")
    if seed < 0 or epoch < 0:
        raise UsageError(f"seed {seed} and epoch {epoch} must not be negative")


def _sort_pools(shuffled: np.ndarray, sizes: np.ndarray, batch_tokens: int) -> np.ndarray:
    """The shuffled numbers, sorted by length within each pool."""
    pool = (sizes[shuffled].cumsum() - 1) // (POOL_BATCHES * batch_tokens)
    return shuffled[np.lexsort((sizes[shuffled], pool))]


def _cut(sizes: np.ndarray, batch_tokens: int) -> list[int]:
    """Where batches begin, and the end: each takes as many examples as fit, and at least one."""
    ends = sizes.cumsum()
    following = ends.searchsorted(ends - sizes + batch_tokens, side="right")
    following = np.maximum(following, np.arange(len(sizes)) + 1)
    bounds = [0]
    while bounds[-1] < len(sizes):
        bounds.append(int(following[bounds[-1]]))
    return bounds
