"""Batches for an encoder–decoder, from rows of different lengths."""

from __future__ import annotations

import numpy as np

from allmask.data import NO_LABEL, Batch, pack_flat
from allmask.objectives.ragged import Ragged


def pair_batch(source: Ragged, target: Ragged, labels: Ragged, name: str, place: np.ndarray | None = None) -> Batch:
    """The encoder reads all at order 0; the decoder's tokens come at 1, 2, 3, … and stand at `place`, or one by one."""
    nothing = Ragged(np.full(len(source.values), NO_LABEL), source.lengths)
    order = _joined(source, np.zeros_like(source.place), target, target.place + 1)
    places = _joined(source, source.place, target, target.place if place is None else place)
    ids, wanted = Ragged.join(source, target), Ragged.join(nothing, labels).values
    return pack_flat(ids.lengths, ids.values, order, order > 0, wanted, name, place=places)


def _joined(source: Ragged, of_source: np.ndarray, target: Ragged, of_target: np.ndarray) -> np.ndarray:
    """Values of the tokens of sources and targets, row by row."""
    return Ragged.join(Ragged(of_source, source.lengths), Ragged(of_target, target.lengths)).values
