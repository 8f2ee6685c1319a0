"""Prefix language model (UniLM's seq2seq order): bidirectional attention in the first part, the rest is predicted."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from allmask.data import NO_LABEL, Batch, pack_flat
from allmask.objectives.draws import Draw
from allmask.objectives.objective import Objective, Samples, next_in_row, read
from allmask.objectives.ragged import Ragged
from allmask.objectives.vocabulary import Vocabulary


@dataclass(frozen=True, eq=False)
class Prefix(Objective):
    """A sample is split at a random position into a source and a target, as for title generation.

              [CLS]  北    京  [SEP]  欢    迎  [SEP]
    order       0     0     0     0     1     2     3
    segments    0     0     0     0     1     1     1
    labels     -1    -1    -1    欢    迎  [SEP]  -1
    """

    vocabulary: Vocabulary
    name = "prefix"
    frame = 3

    def __post_init__(self):
        self.vocabulary.need(self.name, "end")

    def batch(self, samples: Samples, draw: Draw) -> Batch:
        text, order = source_and_target(read(samples, draw), self.vocabulary, draw)
        following = next_in_row(text)
        labels = np.where(np.append(order[1:], 0) > 0, following, NO_LABEL)
        return pack_flat(text.lengths, text.values, order, order > 0, labels, self.name)


def source_and_target(text: Ragged, vocabulary: Vocabulary, draw: Draw) -> tuple[Ragged, np.ndarray]:
    """Return [CLS] source [SEP] target [SEP] and its order: 0 in the source, then 1, 2, 3, …

    Neither part is empty, except the source of a single token.
    """
    cut = np.minimum(1 + (draw.rows("cut") * (text.lengths - 1)).astype(np.int64), text.lengths - 1)
    in_source = text.position < cut[text.row]
    framed = vocabulary.framed(text.keep(in_source), text.keep(~in_source))
    target = text.lengths - cut + 1  # with its [SEP]
    return framed, np.maximum(framed.position - (framed.lengths - target)[framed.row] + 1, 0)
