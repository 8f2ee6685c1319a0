"""Causal language model (GPT-2): each position predicts the token after it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from allmask.data import Batch, pack_flat
from allmask.objectives.draws import Draw
from allmask.objectives.objective import Objective, Samples, next_in_row, read
from allmask.objectives.vocabulary import Vocabulary


@dataclass(frozen=True, eq=False)
class Causal(Objective):
    """From left to right, nothing masked.

            [CLS]  北    京    欢    迎  [SEP]
    order     0     1     2     3     4     5
    labels   北    京    欢    迎  [SEP]  -1

    `framed` adds the special tokens; it is off for rows that are cut from one long stream of text.
    """

    vocabulary: Vocabulary
    framed: bool = True
    name = "causal"

    def batch(self, samples: Samples, draw: Draw) -> Batch:
        text = read(samples, draw)
        text = self.vocabulary.framed(text) if self.framed else text
        zeros = np.zeros_like(text.values)
        return pack_flat(text.lengths, text.values, text.position, zeros, next_in_row(text), self.name)
