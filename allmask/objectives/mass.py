"""MASS (arXiv 1905.02450): the encoder reads a text with a masked span, the decoder predicts the span."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from allmask.data import Batch
from allmask.errors import UsageError
from allmask.objectives.draws import Draw
from allmask.objectives.objective import Objective, Samples, pair_batch, read
from allmask.objectives.ragged import Ragged
from allmask.objectives.vocabulary import Vocabulary


@dataclass(frozen=True, eq=False)
class Mass(Objective):
    """A random span of half the tokens is masked in the encoder; the decoder reads and predicts only that span.

    encoder   [CLS]  北  [MASK] [MASK] [MASK]  你    好  [SEP]
    decoder                [MASK]  京    欢
    position                 2     3     4
    labels                   京    欢    迎
    """

    vocabulary: Vocabulary
    share: float = 0.5
    name = "mass"
    pairs = True

    def __post_init__(self):
        self.vocabulary.need(self.name, "mask")
        if not 0.0 < self.share <= 1.0:
            raise UsageError(f"mass: share is {self.share}; expected more than 0 and at most 1")

    def batch(self, samples: Samples, draw: Draw) -> Batch:
        text = read(samples, draw)
        hidden, mask = self.choose(text, draw), self.vocabulary.id_of("mask")
        source = self.vocabulary.framed(Ragged(np.where(hidden, mask, text.values), text.lengths))
        labels = text.keep(hidden)
        position = text.position[hidden] + (self.vocabulary.begin is not None)
        ids = np.where(labels.position == 0, mask, np.append(0, labels.values[:-1]))
        return pair_batch(source, Ragged(ids, labels.lengths), labels, self.name, position)

    def choose(self, text: Ragged, draw: Draw) -> np.ndarray:
        """(N,) which tokens are masked: one span, of at least one token."""
        size = np.maximum((text.lengths * self.share).round().astype(np.int64), 1)
        start = (draw.rows("start") * (text.lengths - size + 1)).astype(np.int64)[text.row]
        return (text.position >= start) & (text.position < start + size[text.row])
