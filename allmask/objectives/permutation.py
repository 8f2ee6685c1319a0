"""Permutation language model (XLNet, arXiv 1906.08237; for any body): tokens are predicted in a random order."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from allmask.data import NO_LABEL, Batch, pack_flat
from allmask.errors import UsageError
from allmask.objectives.draws import Draw
from allmask.objectives.objective import Objective, Samples, read
from allmask.objectives.ragged import Ragged
from allmask.objectives.vocabulary import Vocabulary

CLOSING = 2  # the segment of XLNet's <cls>


@dataclass(frozen=True, eq=False)
class Permutation(Objective):
    """1/`part` of the tokens of each text are predicted in a random order; all others are known from the start.

            [CLS]  北    京    欢    迎    你    们  [SEP]
    order     0     0     2     0     1     0     0    0
    labels   -1    -1    京    -1    迎    -1    -1   -1       (part = 3)

    Known tokens attend to each other in both directions, as they do when blanks are filled or a text is classified.
    Special tokens are never predicted. With `two_streams`, a second stream that attends to older tokens only predicts
    each token at its own position. Without, the tokens are reordered but keep their positions, and each token predicts
    the next one in the order, without knowing its position:

             [CLS]  北    欢    你    们  [SEP]  迎    京
    position   0     1     3     5     6     7     4     2
    labels    -1    -1    -1    -1    -1    迎    京    -1

    The input is the same in both cases: a batch is always sorted by order, so that its mask is a prefix mask.
    """

    vocabulary: Vocabulary
    part: int = 6
    two_streams: bool = True
    name = "permutation"

    def __post_init__(self):
        if self.part < 1:
            raise UsageError(f"permutation: part is {self.part}; expected 1 (predict all) or more")
        if self.two_streams:
            self.vocabulary.need(self.name, "mask")

    def batch(self, samples: Samples, draw: Draw) -> Batch:
        text = self.vocabulary.framed(read(samples, draw))
        order, guessed = self.order(text, draw)
        if self.two_streams:
            labels, query = np.where(guessed, text.values, NO_LABEL), self.vocabulary.id_of("mask")
        else:
            labels, query = _next_in_order(text, order, guessed), None
        segments = np.where(text.values == self.vocabulary.closing, CLOSING, 0)
        return pack_flat(text.lengths, text.values, order, segments, labels, self.name, query)

    def order(self, text: Ragged, draw: Draw) -> tuple[np.ndarray, np.ndarray]:
        """Return the order, and which tokens are predicted: the last ones of a random order, numbered from 1."""
        special = self.vocabulary.special[text.values]
        rank = text.rank(np.where(special, -1.0, draw.tokens("order", text.lengths)))
        tokens = text.lengths - np.bincount(text.row[special], minlength=len(text.lengths))
        guesses = np.minimum(-(-tokens // self.part), text.lengths - 1)  # at least one token must be known first
        order = np.maximum(0, rank - (text.lengths - guesses)[text.row] + 1)
        return order, order > 0


def _next_in_order(text: Ragged, order: np.ndarray, guessed: np.ndarray) -> np.ndarray:
    """(N,) the token after each one in the order, as a label, if that token is to be predicted."""
    by_order = np.lexsort((order, text.row))
    follower = np.append(by_order[1:], 0)
    asked = guessed[follower] & np.append(text.row[by_order[1:]] == text.row[by_order[:-1]], False)
    labels = np.full_like(text.values, NO_LABEL)
    labels[by_order[asked]] = text.values[follower[asked]]
    return labels
