"""Permutation language model (XLNet, arXiv 1906.08237, on any body): tokens are guessed in a drawn order."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from allmask.data import NO_LABEL, Batch, pack_flat
from allmask.errors import UsageError
from allmask.objectives.draws import Draw
from allmask.objectives.objective import Samples, read
from allmask.objectives.ragged import Ragged
from allmask.objectives.vocabulary import Vocabulary

CLOSING = 2  # the segment of XLNet's <cls>


@dataclass(frozen=True, eq=False)
class Permutation:
    """Of each text 1/`part` of the tokens is guessed, in an order drawn anew; all the others are known first.

            [CLS]  北    京    欢    迎    你    们  [SEP]
    order     0     0     2     0     1     0     0    0
    labels   -1    -1    京    -1    迎    -1    -1   -1       (part = 3)

    What is known reads both ways, as it will when blanks are filled in or a text is classified; special tokens are
    never guessed. With `two_streams` a second stream, which sees only what is older, guesses at the position itself.
    Without, the input is plainly shuffled: an ordinary model over moved tokens that carry their places. Each predicts
    the next one of the order, and is not told where that stands:

            [CLS]  北    欢    你    们  [SEP]  迎    京
    position     0     1     3     5     6     7     4     2
    labels   -1    -1    -1    -1    -1    迎    京    -1

    Both read the same: a batch always stands in its order, which turns the permuted mask into a prefix mask.
    """

    vocabulary: Vocabulary
    part: int = 6
    two_streams: bool = True
    name: ClassVar[str] = "permutation"
    frame: ClassVar[int] = 2
    heads: ClassVar[tuple[str, ...]] = ("lm",)
    pairs: ClassVar[bool] = False

    def __post_init__(self):
        if self.part < 1:
            raise UsageError(f"permutation: part is {self.part}; expected 1 (guess all) or more")
        if self.two_streams:
            self.vocabulary.need(self.name, "mask")

    def batch(self, samples: Samples, draw: Draw) -> Batch:
        text = self.vocabulary.framed(read(samples, draw))
        order, guessed = self.order(text, draw)
        if self.two_streams:
            labels, query = np.where(guessed, text.values, NO_LABEL), self.vocabulary.id_of("mask")
        else:
            labels, query = _of_the_next(text, order, guessed), None
        segments = np.where(text.values == self.vocabulary.closing, CLOSING, 0)
        return pack_flat(text.lengths, text.values, order, segments, labels, self.name, query)

    def order(self, text: Ragged, draw: Draw) -> tuple[np.ndarray, np.ndarray]:
        """When each token becomes known, and which are guessed: these are the last of a drawn order, from 1 on."""
        special = self.vocabulary.special[text.values]
        rank = text.rank(np.where(special, -1.0, draw.tokens("order", text.lengths)))
        tokens = text.lengths - np.bincount(text.row[special], minlength=len(text.lengths))
        guesses = np.minimum(-(-tokens // self.part), text.lengths - 1)  # something must be known before all else
        order = np.maximum(0, rank - (text.lengths - guesses)[text.row] + 1)
        return order, order > 0


def _of_the_next(text: Ragged, order: np.ndarray, guessed: np.ndarray) -> np.ndarray:
    """For each token the one that follows it in the order, where that is to be guessed."""
    by_order = np.lexsort((order, text.row))
    follower = np.append(by_order[1:], 0)
    asked = guessed[follower] & np.append(text.row[by_order[1:]] == text.row[by_order[:-1]], False)
    labels = np.full_like(text.values, NO_LABEL)
    labels[by_order[asked]] = text.values[follower[asked]]
    return labels
