"""Rows of different lengths in one flat array, so that batches are split, joined and corrupted without loops."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np


@dataclass(frozen=True, eq=False)
class Ragged:
    """B rows, one after another: 北 京 | 你 好 吗 has lengths 2 3."""

    values: np.ndarray  # (N,)
    lengths: np.ndarray  # (B,)

    @classmethod
    def of(cls, rows: list[np.ndarray]) -> Ragged:
        values = np.concatenate(rows).astype(np.int64) if rows else np.empty(0, np.int64)
        return cls(values, np.array([len(row) for row in rows], dtype=np.int64))

    @classmethod
    def constant(cls, value: int, rows: int) -> Ragged:
        """Make rows that each contain this one value."""
        return cls(np.full(rows, value), np.ones(rows, dtype=np.int64))

    @classmethod
    def join(cls, *parts: Ragged) -> Ragged:
        """Concatenate parts row by row."""
        lengths = np.sum([part.lengths for part in parts], axis=0)
        values = np.empty(lengths.sum(), dtype=np.int64)
        begin = lengths.cumsum() - lengths
        for part in parts:
            values[begin[part.row] + part.position] = part.values
            begin = begin + part.lengths
        return cls(values, lengths)

    @cached_property
    def starts(self) -> np.ndarray:
        """(B,) where each row begins."""
        return self.lengths.cumsum() - self.lengths

    @cached_property
    def row(self) -> np.ndarray:
        """(N,) the row of each value."""
        return np.arange(len(self.lengths)).repeat(self.lengths)

    @cached_property
    def position(self) -> np.ndarray:
        """(N,) the index of each value within its row."""
        return np.arange(len(self.values)) - self.starts[self.row]

    def keep(self, where: np.ndarray) -> Ragged:
        """Select values by (N,) booleans."""
        return Ragged(self.values[where], np.bincount(self.row[where], minlength=len(self.lengths)))

    def rank(self, keys: np.ndarray) -> np.ndarray:
        """(N,) the rank of each value within its row when rows are sorted by `keys`, from 0."""
        rank = np.empty(len(keys), dtype=np.int64)
        rank[np.lexsort((keys, self.row))] = self.position
        return rank
