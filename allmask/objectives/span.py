"""Span corruption (T5, arXiv 1910.10683): the encoder reads sentinels for runs of tokens, the decoder writes them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from allmask.data import PairBatch
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

    Runs alternate with what is read, beginning with the latter and so ending with a run, as T5 draws them.
    """

    vocabulary: Vocabulary
    share: float = 0.15
    mean_length: float = 3.0
    name: ClassVar[str] = "span"
    frame: ClassVar[int] = 1  # a sentinel is never longer than its run
    heads: ClassVar[tuple[str, ...]] = ()

    def __post_init__(self):
        self.vocabulary.need(self.name, "begin", "end")
        if not 0.0 < self.share < 1.0 or not self.mean_length >= 1.0:
            raise UsageError(
                f"span: share {self.share} must lie between 0 and 1, mean_length {self.mean_length} be ≥ 1"
            )

    def batch(self, samples: Samples, draw: Draw) -> PairBatch:
        text, rows = read(samples, draw), len(draw.numbers)
        hidden, first = self.choose(text, draw)
        number = (hidden & first).cumsum() - 1  # of the run, in the whole batch
        runs = text.keep(hidden & first)
        sentinel = self.vocabulary.sentinels[runs.place]
        end = Ragged.constant(self.vocabulary.id_of("end"), rows)

        read_as = np.where(hidden, sentinel[number], text.values) if len(sentinel) else text.values
        source = Ragged(read_as, text.lengths).keep(~hidden | first)
        written = _with_sentinels(text.keep(hidden), first[hidden], sentinel, runs)
        begin = Ragged.constant(self.vocabulary.id_of("begin"), rows)
        return pair_batch(Ragged.join(source, end), Ragged.join(begin, written), Ragged.join(written, end), self.name)

    def choose(self, text: Ragged, draw: Draw) -> tuple[np.ndarray, np.ndarray]:
        """(N,) which tokens are hidden, and where a run, hidden or not, begins."""
        hidden = (text.lengths * self.share).round().astype(np.int64)
        hidden = np.minimum(np.maximum(hidden, 1), text.lengths - 1)  # a single token is left alone
        runs = np.maximum((hidden / self.mean_length).round().astype(np.int64), 1)
        runs = np.minimum(np.minimum(runs, text.lengths - hidden), len(self.vocabulary.sentinels))
        shown_runs, hidden_runs = cut(text.lengths - hidden, runs, "shown", draw), cut(hidden, runs, "hidden", draw)
        lengths = np.stack([shown_runs, hidden_runs], axis=1).flatten()
        is_hidden = np.tile([False, True], len(shown_runs)).repeat(lengths)
        first = np.zeros(len(is_hidden), dtype=bool)
        first[(lengths.cumsum() - lengths)[lengths > 0]] = True
        return is_hidden, first


def cut(totals: np.ndarray, parts: np.ndarray, name: str, draw: Draw) -> np.ndarray:
    """Each total as so many parts of at least 1, all ways alike likely, row after row. A total of 0 is one part."""
    units = Ragged(np.empty(np.maximum(totals, 1).sum()), np.maximum(totals, 1))
    keys = np.where(units.place == 0, -1.0, draw.tokens(name, units.lengths))
    begins = np.flatnonzero(units.rank(keys) < parts[units.row])
    return np.diff(begins, append=len(units.row)) * (totals > 0)[units.row[begins]]


def _with_sentinels(hidden: Ragged, first: np.ndarray, sentinel: np.ndarray, runs: Ragged) -> Ragged:
    """Each run with its sentinel before it."""
    values = np.empty(len(hidden.values) + len(sentinel), dtype=np.int64)
    at = np.arange(len(hidden.values)) + first.cumsum()
    values[at] = hidden.values
    values[at[first] - 1] = sentinel
    return Ragged(values, hidden.lengths + runs.lengths)
