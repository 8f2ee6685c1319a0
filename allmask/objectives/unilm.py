"""UniLM's pretraining (arXiv 1905.03197): a masked language model under four orders, one per batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from allmask.data import Batch, pack_flat
from allmask.errors import UsageError
from allmask.objectives.draws import Draw
from allmask.objectives.mlm import CORRUPTION, Mlm
from allmask.objectives.objective import Objective, Samples, read
from allmask.objectives.prefix import source_and_target
from allmask.objectives.ragged import Ragged
from allmask.objectives.vocabulary import Vocabulary

WAYS = ("bidirectional", "left-to-right", "right-to-left", "seq2seq")


@dataclass(frozen=True, eq=False)
class Unilm(Objective):
    """Tokens are masked as in `Mlm` and predicted at their own positions; the order determines the context.

                     [CLS]  北  [MASK]  欢  [SEP]              [CLS]  北  [SEP] [MASK] 欢  [SEP]
    bidirectional      0     0     0     0     0      seq2seq    0     0     0     1     2     3
    left-to-right      0     1     2     3     4      segments   0     0     0     1     1     1
    right-to-left      4     3     2     1     0
    labels            -1    -1    京    -1    -1                -1    -1    -1    京    -1    -1

    80 % of the masked units are single tokens, the others two or three in a row.
    """

    vocabulary: Vocabulary
    weights: Sequence[float] = (1 / 3, 1 / 6, 1 / 6, 1 / 3)  # of the four orders
    share: float = 0.15
    ngrams: Sequence[float] = (0.8, 0.1, 0.1)
    corruption: Sequence[float] = CORRUPTION
    mlm: Mlm = field(init=False)  # masks the tokens
    name = "unilm"
    frame = 3

    def __post_init__(self):
        self.vocabulary.need(self.name, "end", "mask")
        if len(self.weights) != len(WAYS) or min(self.weights) < 0 or not 0 < sum(self.weights) < float("inf"):
            raise UsageError(f"unilm: weights are {self.weights}; expected one for each of {', '.join(WAYS)}")
        object.__setattr__(self, "mlm", Mlm(self.vocabulary, self.share, False, self.ngrams, self.corruption))

    def batch(self, samples: Samples, draw: Draw) -> Batch:
        text, order, segments = self.lay_out(read(samples, draw), draw)
        ids, labels = self.mlm.corrupt(text, draw)
        return pack_flat(text.lengths, ids, order, segments, labels, self.name)

    def way(self, draw: Draw) -> str:
        """Return the order of all samples of a batch: documents of equal length and order are one kernel call."""
        shares = np.cumsum(self.weights) / np.sum(self.weights)
        return WAYS[int(shares.searchsorted(draw.batch("way"), side="right"))]

    def lay_out(self, samples: Ragged, draw: Draw) -> tuple[Ragged, np.ndarray, np.ndarray]:
        """Return the text with special tokens, its order and its segments."""
        way = self.way(draw)
        if way == "seq2seq":
            text, order = source_and_target(samples, self.vocabulary, draw)
            return text, order, order > 0
        text = self.vocabulary.framed(samples)
        orders = {
            "bidirectional": np.zeros_like(text.position),
            "left-to-right": text.position,
            "right-to-left": text.lengths[text.row] - 1 - text.position,
        }
        return text, orders[way], np.zeros_like(text.position)
