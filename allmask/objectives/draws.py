"""Randomness that belongs to a sample, not to a batch: a pure function of (seed, epoch, sample, name, place).

So a sample is corrupted alike in any batch, on any number of workers or processes, before and after an interruption,
and anew in each epoch. The numbers are those of SplitMix64, one stream for every sample and name: a whole batch is one
call, and no version of a library can change them.
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
    """What chance decides about the samples `numbers` of a batch."""

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
        """(B,) where the streams of each sample begin."""
        key = np.zeros(1, dtype=np.uint64)
        for part in (self.seed, self.epoch, self.numbers):
            key = _mix(key + _GOLDEN * (np.atleast_1d(np.asarray(part, dtype=np.uint64)) + np.uint64(1)))
        return key

    def tokens(self, name: str, lengths: np.ndarray) -> np.ndarray:
        """Uniform numbers in [0, 1): `lengths[b]` of them for sample b, one after another."""
        place = np.arange(1, lengths.sum() + 1, dtype=np.uint64)
        place -= (lengths.cumsum() - lengths).astype(np.uint64).repeat(lengths)
        return _uniform(_mix(self._stream(name).repeat(lengths) + _GOLDEN * place))

    def rows(self, name: str) -> np.ndarray:
        """(B,) a uniform number for each sample."""
        return _uniform(_mix(self._stream(name) + _GOLDEN))

    def batch(self, name: str) -> float:
        """A uniform number for these samples together, in whatever order they come."""
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
