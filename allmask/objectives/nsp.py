"""Next sentence prediction together with a masked language model (BERT, arXiv 1810.04805): does B follow A?"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from allmask.data import Batch, pack_flat
from allmask.errors import DataError
from allmask.objectives.draws import Draw
from allmask.objectives.mlm import CORRUPTION, Mlm
from allmask.objectives.objective import Objective, Passages
from allmask.objectives.ragged import Ragged
from allmask.objectives.vocabulary import Vocabulary

FOLLOWS, ELSEWHERE = 0, 1  # BERT's numbering


@dataclass(frozen=True, eq=False)
class Nsp(Objective):
    """A sample is split between two sentences; with probability 0.5 the second part is from another document.

              [CLS]  北    京  [SEP]  白    鸡  [SEP]
    order       0     0     0     0     0     0     0
    segments    0     0     0     0     1     1     1
    relation    1: 白鸡 does not follow 北京

    Tokens are masked as in `Mlm`, with its options. The text from another document is never longer than the one it
    replaces, and begins at a sentence. A sample of one sentence is split inside it.
    """

    vocabulary: Vocabulary
    share: float = 0.15
    whole_words: bool = False
    ngrams: Sequence[float] = (1.0,)
    corruption: Sequence[float] = CORRUPTION
    mlm: Mlm = field(init=False)  # masks the tokens
    name = "nsp"
    frame = 3
    heads = ("lm", "nsp")

    def __post_init__(self):
        self.vocabulary.need(self.name, "begin", "end", "mask")
        mlm = Mlm(self.vocabulary, self.share, self.whole_words, self.ngrams, self.corruption)
        object.__setattr__(self, "mlm", mlm)

    def batch(self, samples: Passages, draw: Draw) -> Batch:
        first, second, relations = pairs(samples, draw)
        text = self.vocabulary.framed(first, second)
        ids, labels = self.mlm.corrupt(text, draw)
        segments = text.position >= first.lengths[text.row] + 2
        return pack_flat(
            text.lengths, ids, np.zeros_like(ids), segments, labels, self.mlm.name, relations=np.array(relations)
        )


def pairs(samples: Passages, draw: Draw) -> tuple[Ragged, Ragged, list[int]]:
    """Return A and B of each sample, and their relations."""
    cuts, coins, others, begins = (draw.rows(name) for name in ("cut", "elsewhere", "stranger", "begin"))
    first, second, relations = [], [], []
    for row, number in enumerate(map(int, draw.numbers)):
        text = samples[number]
        cut = _cut(samples.sentences(number), len(text), cuts[row])
        elsewhere = coins[row] < 0.5 or cut == len(text)
        first.append(text[:cut])
        room = max(1, len(text) - cut)
        second.append(_other_text(samples, number, others[row], begins[row], room) if elsewhere else text[cut:])
        relations.append(ELSEWHERE if elsewhere else FOLLOWS)
    return Ragged.of(first), Ragged.of(second), relations


def _cut(sentences: np.ndarray, length: int, uniform: float) -> int:
    """Return where B begins: at a random sentence but the first; in a single sentence, at any token but the first."""
    if len(sentences) > 1:
        return int(sentences[1 + int(uniform * (len(sentences) - 1))])
    return min(1 + int(uniform * (length - 1)), length)


def _other_text(samples: Passages, number: int, which: float, begin: float, limit: int) -> np.ndarray:
    """Return at most `limit` tokens of another document, from a random sentence that leaves so many, or the first."""
    own, other = samples.document(number), int(which * len(samples))
    for _ in range(len(samples)):
        if samples.document(other) != own:
            break
        other = (other + 1) % len(samples)
    else:
        raise DataError("nsp: there is only one document", "put a blank line between documents, or leave nsp out")
    text, starts = samples[other], samples.sentences(other)
    starts = starts[: max(1, int(np.searchsorted(starts, len(text) - limit, side="right")))]
    start = int(starts[int(begin * len(starts))])
    return text[start : start + limit]
