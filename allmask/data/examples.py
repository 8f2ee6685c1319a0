"""Examples and batches: what a model reads, when each token becomes known, and what it must predict from it.

A batch is one flat row without padding. Its documents do not see each other, because they are different groups of the
mask; so a batch costs what its tokens cost, whatever their lengths.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

import numpy as np
import torch
from torch import Tensor

from allmask.errors import UsageError
from allmask.masks import Mask

NO_LABEL = -1  # the `ignore_index` of a loss


@dataclass(frozen=True, eq=False)
class Example:
    """One document, token by token. Any four sequences of numbers will do; they are kept as int32 arrays.

                [CLS]   你    吃  [SEP]   白    鸡  [SEP]
    order         0     0     0     0     1     2     3
    segments      0     0     0     0     1     1     1
    labels       -1    -1    -1    白    鸡  [SEP]   -1
    """

    ids: np.ndarray
    order: np.ndarray  # when a token becomes known, see Mask
    segments: np.ndarray
    labels: np.ndarray  # the token that a position must predict; -1 is none

    def __post_init__(self):
        for field in fields(self):
            object.__setattr__(self, field.name, np.asarray(getattr(self, field.name), dtype=np.int32))
        shapes = {field.name: getattr(self, field.name).shape for field in fields(self)}
        if self.ids.ndim != 1 or len(set(shapes.values())) > 1:
            raise UsageError(f"example: ids, order, segments and labels must be rows of one length, not {shapes}")
        if len(self) == 0:
            raise UsageError("example: it has no tokens")

    def __len__(self) -> int:
        return len(self.ids)


@dataclass(frozen=True, eq=False)
class Batch:
    """Examples in one row. `mask.group` is the number of the example that a token came from."""

    ids: Tensor  # (1, N)
    mask: Mask  # (1, N)
    segments: Tensor  # (1, N)
    labels: Tensor  # (1, N), -1 where nothing is predicted

    @property
    def tokens(self) -> int:
        return self.ids.numel()

    @property
    def targets(self) -> int:
        """How many positions have a label: what a mean loss is divided by."""
        return int((self.labels != NO_LABEL).sum())

    def to(self, device: torch.device | str) -> Batch:
        return replace(self, **{field.name: getattr(self, field.name).to(device) for field in fields(self)})


def pack(examples: Sequence[Example]) -> Batch:
    """One row of all examples, shortest first, so that those of equal length are one call of a kernel.

    Within an example tokens stand by their order, and carry their place: it is the row that `Mask.flatten` makes of a
    padded batch.
    """
    if not examples:
        raise UsageError("pack: there are no examples to make a batch of")
    lengths = np.array([len(example) for example in examples])
    by_length = lengths.argsort(kind="stable")
    ordered, lengths = [examples[number] for number in by_length], lengths[by_length]
    starts = np.cumsum(lengths) - lengths
    group = by_length.repeat(lengths)
    place = np.arange(len(group)) - starts.repeat(lengths)
    order = np.concatenate([example.order for example in ordered])
    sort = np.lexsort((order, np.arange(len(ordered)).repeat(lengths)))  # stable: by document, then by order

    def row(values: np.ndarray) -> Tensor:
        return torch.from_numpy(values[sort].astype(np.int64))[None]

    ids, segments, labels = (
        row(np.concatenate([getattr(example, name) for example in ordered])) for name in ("ids", "segments", "labels")
    )
    return Batch(ids, Mask(row(order), row(group), row(place)), segments, labels)
