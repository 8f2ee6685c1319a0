"""Reverse language model: each position predicts the token before it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from allmask.data import NO_LABEL, Batch, pack_flat
from allmask.objectives.draws import Draw
from allmask.objectives.objective import Objective, Samples, read
from allmask.objectives.vocabulary import Vocabulary


@dataclass(frozen=True, eq=False)
class Reverse(Objective):
    """From right to left, nothing masked; the last prediction is [CLS].

            [CLS]  北    京    欢    迎  [SEP]
    order     5     4     3     2     1     0
    labels   -1   [CLS]  北    京    欢    迎

    `framed` adds the special tokens, as in `Causal`.
    """

    vocabulary: Vocabulary
    framed: bool = True
    name = "reverse"

    def batch(self, samples: Samples, draw: Draw) -> Batch:
        text = read(samples, draw)
        text = self.vocabulary.framed(text) if self.framed else text
        order = text.lengths[text.row] - 1 - text.position
        labels = np.where(text.position == 0, NO_LABEL, np.append(NO_LABEL, text.values[:-1]))
        return pack_flat(text.lengths, text.values, order, np.zeros_like(order), labels, self.name)
