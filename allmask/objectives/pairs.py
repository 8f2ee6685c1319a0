"""Batches for an encoder–decoder, from rows of different lengths."""

from __future__ import annotations

import numpy as np

from allmask.data import NO_LABEL, Batch, pack_flat
from allmask.objectives.ragged import Ragged


def pair_batch(source: Ragged, target: Ragged, labels: Ragged, name: str, position: np.ndarray | None = None) -> Batch:
    """Sources have order 0, targets 1, 2, 3, … and the given `position`, or 0, 1, 2, … if there is none."""
    nothing = Ragged(np.full(len(source.values), NO_LABEL), source.lengths)
    order = _joined(source, np.zeros_like(source.position), target, target.position + 1)
    places = _joined(source, source.position, target, target.position if position is None else position)
    ids, wanted = Ragged.join(source, target), Ragged.join(nothing, labels).values
    return pack_flat(ids.lengths, ids.values, order, order > 0, wanted, name, position=places)


def _joined(source: Ragged, of_source: np.ndarray, target: Ragged, of_target: np.ndarray) -> np.ndarray:
    """Values of the tokens of sources and targets, row by row."""
    return Ragged.join(Ragged(of_source, source.lengths), Ragged(of_target, target.lengths)).values
