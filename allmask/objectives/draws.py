"""Random numbers per sample, not per batch: a pure function of (seed, epoch, sample, name, index).

So a sample is corrupted in the same way in any batch, with any number of workers or processes, before and after an
interruption, and differently in each epoch. The generator is SplitMix64 with one stream per sample and name: a whole
batch is one call, and no library version can change the numbers.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from allmask.errors import UsageError

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


@dataclass(frozen=True, eq=False)
class Draw:
    """The random numbers of the samples `numbers` of a batch."""

    seed: int
    epoch: int
    numbers: Sequence[int] | np.ndarray

    def __post_init__(self):
        if min(self.seed, self.epoch, *self.numbers, 0) < 0 or max(self.seed, self.epoch) >= 1 << 63:
            raise UsageError(f"seed {self.seed}, epoch {self.epoch} and sample numbers must be from 0 to 2^63 - 1")
        if not len(self.numbers):
            raise UsageError("draw: there are no samples to make a batch of")

    @cached_property
    def keys(self) -> np.ndarray:
        """(B,) the state from which the streams of each sample are derived."""
        key = np.zeros(1, dtype=np.uint64)
        for part in (self.seed, self.epoch, self.numbers):
            key = _mix(key + _GOLDEN * (np.atleast_1d(np.asarray(part, dtype=np.uint64)) + np.uint64(1)))
        return key

    def tokens(self, name: str, lengths: np.ndarray) -> np.ndarray:
        """(N,) uniform numbers in [0, 1): `lengths[b]` for each sample b, one after another."""
        index = np.arange(1, lengths.sum() + 1, dtype=np.uint64)
        index -= (lengths.cumsum() - lengths).astype(np.uint64).repeat(lengths)
        return _uniform(_mix(self._stream(name).repeat(lengths) + _GOLDEN * index))

    def rows(self, name: str) -> np.ndarray:
        """(B,) one uniform number per sample."""
        return _uniform(_mix(self._stream(name) + _GOLDEN))

    def batch(self, name: str) -> float:
        """One uniform number for the batch, independent of the order of its samples."""
        total = self._stream(name).sum(dtype=np.uint64, keepdims=True)
        return float(_uniform(_mix(total))[0])

    def _stream(self, name: str) -> np.ndarray:
        return _mix(self.keys ^ np.uint64(zlib.crc32(name.encode())))


def _mix(z: np.ndarray) -> np.ndarray:
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def _uniform(bits: np.ndarray) -> np.ndarray:
    return (bits >> np.uint64(11)) * 2.0**-53
