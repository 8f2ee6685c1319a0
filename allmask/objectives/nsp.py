"""Next sentence prediction beside a masked language model (BERT, arXiv 1810.04805): does B follow A, or not?"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np

from allmask.data import Batch, pack_flat
from allmask.errors import DataError
from allmask.objectives.draws import Draw
from allmask.objectives.mlm import Mlm
from allmask.objectives.objective import Passages
from allmask.objectives.ragged import Ragged
from allmask.objectives.vocabulary import Vocabulary

FOLLOWS, ELSEWHERE = 0, 1  # as BERT numbers its answers


@dataclass(frozen=True, eq=False)
class Nsp:
    """A sample is cut between two sentences; half of the time what follows comes from another document.

              [CLS]  北    京  [SEP]  白    鸡  [SEP]
    order       0     0     0     0     0     0     0
    segments    0     0     0     0     1     1     1
    relation    1: 白鸡 does not follow 北京

    Tokens are hidden and guessed as `Mlm` does it, with its options. A text from elsewhere is never longer than the one
    it stands for, and begins with a sentence. A sample of one sentence is cut inside it.
    """

    vocabulary: Vocabulary
    share: float = 0.15
    whole_words: bool = False
    ngrams: Sequence[float] = (1.0,)
    mlm: Mlm = field(init=False)  # how tokens are hidden
    name: ClassVar[str] = "nsp"
    frame: ClassVar[int] = 3
    heads: ClassVar[tuple[str, ...]] = ("lm", "nsp")
    pairs: ClassVar[bool] = False

    def __post_init__(self):
        self.vocabulary.need(self.name, "begin", "end", "mask")
        object.__setattr__(self, "mlm", Mlm(self.vocabulary, self.share, self.whole_words, self.ngrams))

    def batch(self, samples: Passages, draw: Draw) -> Batch:
        first, second, relations = pairs(samples, draw)
        text = self.vocabulary.framed(first, second)
        ids, labels = self.mlm.corrupt(text, draw)
        segments = text.position >= first.lengths[text.row] + 2
        return pack_flat(
            text.lengths, ids, np.zeros_like(ids), segments, labels, self.mlm.name, relations=np.array(relations)
        )


def pairs(samples: Passages, draw: Draw) -> tuple[Ragged, Ragged, list[int]]:
    """A and B of each sample, and whether B follows."""
    cuts, lots, strangers, begins = (draw.rows(name) for name in ("cut", "elsewhere", "stranger", "begin"))
    first, second, relations = [], [], []
    for row, number in enumerate(map(int, draw.numbers)):
        text = samples[number]
        cut = _cut(samples.sentences(number), len(text), cuts[row])
        elsewhere = lots[row] < 0.5 or cut == len(text)
        first.append(text[:cut])
        second.append(
            _stranger(samples, number, strangers[row], begins[row], max(1, len(text) - cut))
            if elsewhere
            else text[cut:]
        )
        relations.append(ELSEWHERE if elsewhere else FOLLOWS)
    return Ragged.of(first), Ragged.of(second), relations


def _cut(sentences: np.ndarray, length: int, lot: float) -> int:
    """Where B begins: with one of the sentences but the first; if there is only one, with any token but the first."""
    if len(sentences) > 1:
        return int(sentences[1 + int(lot * (len(sentences) - 1))])
    return min(1 + int(lot * (length - 1)), length)


def _stranger(samples: Passages, number: int, lot: float, begin: float, limit: int) -> np.ndarray:
    """At most `limit` tokens of another document, from one of the sentences that leave so many, or from its first."""
    mine, other = samples.document(number), int(lot * len(samples))
    for _ in range(len(samples)):
        if samples.document(other) != mine:
            break
        other = (other + 1) % len(samples)
    else:
        raise DataError("nsp: there is only one document", "put a blank line between documents, or leave nsp out")
    text, starts = samples[other], samples.sentences(other)
    starts = starts[: max(1, int(np.searchsorted(starts, len(text) - limit, side="right")))]
    start = int(starts[int(begin * len(starts))])
    return text[start : start + limit]
