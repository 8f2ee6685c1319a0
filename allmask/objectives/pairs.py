"""Batches for an encoder–decoder, from rows of different lengths."""

from __future__ import annotations

import numpy as np
import torch

from allmask.data import NO_LABEL, PairBatch
from allmask.masks import Mask
from allmask.objectives.ragged import Ragged


def pair_batch(source: Ragged, target: Ragged, labels: Ragged, name: str, place: np.ndarray | None = None) -> PairBatch:
    """The encoder reads all at order 0; the decoder's tokens come at 1, 2, 3, … and stand at `place`, or one by one."""
    zeros, order = np.zeros_like(source.place), target.place + 1
    return PairBatch(
        source_ids=torch.from_numpy(source.padded()),
        source_mask=_mask(source, zeros, source.place),
        ids=torch.from_numpy(target.padded()),
        mask=_mask(target, order, target.place if place is None else place),
        labels=torch.from_numpy(labels.padded(NO_LABEL)),
        name=name,
    )


def _mask(rows: Ragged, order: np.ndarray, place: np.ndarray) -> Mask:
    def table(values: np.ndarray, fill: int = 0) -> torch.Tensor:
        return torch.from_numpy(Ragged(values, rows.lengths).padded(fill))

    return Mask(table(order), table(np.zeros_like(order), -1), table(place))
