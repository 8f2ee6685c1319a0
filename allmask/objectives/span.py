"""Span corruption (T5, arXiv 1910.10683): the encoder reads sentinels for runs of tokens, the decoder writes them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from allmask.data import Batch
from allmask.errors import UsageError
from allmask.objectives.draws import Draw
from allmask.objectives.objective import Samples, read
from allmask.objectives.pairs import pair_batch
from allmask.objectives.ragged import Ragged
from allmask.objectives.vocabulary import Vocabulary


@dataclass(frozen=True, eq=False)
class Span:
    """15 % of the tokens in runs of 3 on average, each hidden behind a sentinel of its own.

    text       今 天 | 天 气 | 很 好 我 们 | 去
    encoder    今 天  <0>  很 好 我 们  <1>  [SEP]
    decoder   [CLS]  <0>  天  气  <1>  去
    labels     <0>   天   气  <1>  去  [SEP]

    Lengths and counts are T5's. Where the runs stand is drawn among all ways that leave a token between them; T5 always
    hides the end of a text, which in a short one is all there is to hide.
    """

    vocabulary: Vocabulary
    share: float = 0.15
    mean_length: float = 3.0
    name: ClassVar[str] = "span"
    frame: ClassVar[int] = 1  # a sentinel is never longer than its run
    heads: ClassVar[tuple[str, ...]] = ("lm",)
    pairs: ClassVar[bool] = True

    def __post_init__(self):
        self.vocabulary.need(self.name, "start", "end")
        if not 0.0 < self.share < 1.0 or not self.mean_length >= 1.0:
            raise UsageError(
                f"span: share {self.share} must lie between 0 and 1, mean_length {self.mean_length} be ≥ 1"
            )

    def batch(self, samples: Samples, draw: Draw) -> Batch:
        text, rows = read(samples, draw), len(draw.numbers)
        hidden, first = self.choose(text, draw)
        number = (hidden & first).cumsum() - 1  # of the run, in the whole batch
        runs = text.keep(hidden & first)
        sentinel = self.vocabulary.sentinels[runs.position]
        end = Ragged.constant(self.vocabulary.id_of("end"), rows)

        read_as = np.where(hidden, sentinel[number], text.values) if len(sentinel) else text.values
        source = Ragged(read_as, text.lengths).keep(~hidden | first)
        written = _with_sentinels(text.keep(hidden), first[hidden], sentinel, runs)
        start = Ragged.constant(self.vocabulary.id_of("start"), rows)
        return pair_batch(Ragged.join(source, end), Ragged.join(start, written), Ragged.join(written, end), self.name)

    def choose(self, text: Ragged, draw: Draw) -> tuple[np.ndarray, np.ndarray]:
        """(N,) which tokens are hidden, and where a run, hidden or shown, begins."""
        hidden = (text.lengths * self.share).round().astype(np.int64)
        hidden = np.minimum(np.maximum(hidden, 1), text.lengths - 1)  # a single token is left alone
        shown = text.lengths - hidden
        runs = np.minimum(np.maximum((hidden / self.mean_length).round().astype(np.int64), 1), hidden)
        runs = np.minimum(np.minimum(runs, shown), len(self.vocabulary.sentinels))
        around = cut(shown + 2, runs + 1, "shown", draw)  # one token too many at both ends, where there may be none
        around.values[around.starts] -= 1
        around.values[around.starts + runs] -= 1
        return _alternating(around, cut(hidden, runs, "hidden", draw))


def cut(totals: np.ndarray, parts: np.ndarray, name: str, draw: Draw) -> Ragged:
    """Each total as so many parts of at least 1, all ways alike likely."""
    units = Ragged(np.empty(totals.sum()), totals)
    keys = np.where(units.position == 0, -1.0, draw.tokens(name, totals))
    begins = np.flatnonzero(units.rank(keys) < parts[units.row])
    return Ragged(np.diff(begins, append=len(units.row)), parts)


def _alternating(shown: Ragged, hidden: Ragged) -> tuple[np.ndarray, np.ndarray]:
    """Runs of these lengths in turn, as (N,) flags: which tokens are hidden, and where a run begins."""
    start = 2 * shown.starts - np.arange(len(shown.lengths))  # in each row, one more is shown than hidden
    lengths = np.empty(len(shown.values) + len(hidden.values), dtype=np.int64)
    is_hidden = np.zeros(len(lengths), dtype=bool)
    lengths[start[shown.row] + 2 * shown.position] = shown.values
    lengths[start[hidden.row] + 2 * hidden.position + 1] = hidden.values
    is_hidden[start[hidden.row] + 2 * hidden.position + 1] = True
    first = np.zeros(lengths.sum(), dtype=bool)
    first[(lengths.cumsum() - lengths)[lengths > 0]] = True
    return is_hidden.repeat(lengths), first


def _with_sentinels(hidden: Ragged, first: np.ndarray, sentinel: np.ndarray, runs: Ragged) -> Ragged:
    """Each run with its sentinel before it."""
    values = np.empty(len(hidden.values) + len(sentinel), dtype=np.int64)
    at = np.arange(len(hidden.values)) + first.cumsum()
    values[at] = hidden.values
    values[at[first] - 1] = sentinel
    return Ragged(values, hidden.lengths + runs.lengths)
