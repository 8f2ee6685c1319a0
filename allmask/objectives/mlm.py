"""Masked language model (BERT, arXiv 1810.04805): mask some tokens and predict them from both sides."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from allmask.data import NO_LABEL, Batch, pack_flat
from allmask.errors import UsageError
from allmask.objectives.draws import Draw
from allmask.objectives.objective import Objective, Samples, read
from allmask.objectives.ragged import Ragged
from allmask.objectives.vocabulary import Vocabulary

CORRUPTION = (0.8, 0.1, 0.1)  # of the chosen tokens: [MASK], a random token, unchanged


@dataclass(frozen=True, eq=False)
class Mlm(Objective):
    """15 % of the tokens are chosen and predicted: 80 % become [MASK], 10 % a random token, 10 % are unchanged.

    text        [CLS]  北    京    欢    迎    你  [SEP]
    input       [CLS]  北  [MASK]  欢    迎    好  [SEP]
    order         0     0     0     0     0     0     0
    labels       -1    -1    京    -1    -1    你    -1

    `whole_words` chooses whole words. `ngrams` are the weights of choosing 1, 2, 3, … tokens (or words) together;
    (6, 3, 2) is ALBERT's. Each unit is chosen with probability `share`; special tokens are never chosen. `corruption`
    are other weights than 80, 10 and 10 %.
    """

    vocabulary: Vocabulary
    share: float = 0.15
    whole_words: bool = False
    ngrams: Sequence[float] = (1.0,)
    corruption: Sequence[float] = CORRUPTION
    name = "mlm"

    def __post_init__(self):
        self.vocabulary.need(self.name, "mask")
        if not 0.0 < self.share < 1.0:
            raise UsageError(f"mlm: share is {self.share}; expected more than 0 and less than 1")
        if not self.ngrams or min(self.ngrams) < 0 or not 0 < sum(self.ngrams) < float("inf"):
            raise UsageError(f"mlm: ngrams are {self.ngrams}; expected weights, not all 0")
        weights = self.corruption
        if len(weights) != 3 or min(weights) < 0 or not 0 < sum(weights) < float("inf"):
            hint = "such as 0.8, 0.1 and 0.1"
            raise UsageError(f"mlm: corruption is {weights}; expected weights of [MASK], random, unchanged", hint)

    def batch(self, samples: Samples, draw: Draw) -> Batch:
        text = self.vocabulary.framed(read(samples, draw))
        ids, labels = self.corrupt(text, draw)
        zeros = np.zeros_like(ids)
        return pack_flat(text.lengths, ids, zeros, zeros, labels, self.name)

    def corrupt(self, text: Ragged, draw: Draw) -> tuple[np.ndarray, np.ndarray]:
        """Return the corrupted ids and the labels."""
        chosen, ordinary = self.choose(text, draw), self.vocabulary.ordinary
        fate, other = (draw.tokens(name, text.lengths)[chosen] for name in ("fate", "other"))
        ids, labels = text.values.copy(), np.full_like(text.values, NO_LABEL)
        labels[chosen] = ids[chosen]
        random = ordinary[(other * len(ordinary)).astype(np.int64)]
        hidden, replaced = (weight / sum(self.corruption) for weight in self.corruption[:2])
        unmasked = np.where(fate < hidden + replaced, random, ids[chosen])
        ids[chosen] = np.where(fate < hidden, self.vocabulary.id_of("mask"), unmasked)
        return ids, labels

    def choose(self, text: Ragged, draw: Draw) -> np.ndarray:
        """(N,) which tokens are chosen: the units whose first token drew a number below `share`."""
        uniform = draw.tokens("chosen", text.lengths)
        first = np.maximum.accumulate(np.where(self.units(text, draw), np.arange(len(uniform)), 0))
        return (uniform[first] < self.share) & ~self.vocabulary.special[text.values]

    def units(self, text: Ragged, draw: Draw) -> np.ndarray:
        """(N,) where units begin: tokens, words or n-grams that are chosen as a whole."""
        special = self.vocabulary.special[text.values]
        edge = special | np.append(True, special[:-1]) | (text.position == 0)
        words = edge | ~self.vocabulary.continues[text.values] if self.whole_words else np.ones_like(edge)
        return words if len(self.ngrams) == 1 else edge | self._grouped(text.keep(words), words, draw)

    def _grouped(self, row: Ragged, words: np.ndarray, draw: Draw) -> np.ndarray:
        """(N,) where n-grams of words begin; `row` has only the first token of each word, lengths are drawn."""
        weights = np.cumsum(self.ngrams) / np.sum(self.ngrams)
        length = 1 + weights.searchsorted(draw.tokens("length", row.lengths), side="right")
        ends = length.cumsum()
        begin = ends - length - np.append(0, ends)[row.starts[row.row]]  # counted in words from the row's first
        inside = begin < row.lengths[row.row]
        begins = np.zeros(len(row.values), dtype=bool)
        begins[(row.starts[row.row] + begin)[inside]] = True
        grouped = words.copy()
        grouped[words] = begins
        return grouped
