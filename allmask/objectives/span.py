"""Span corruption (T5, arXiv 1910.10683): sentinels replace spans in the encoder; the decoder predicts the spans."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from allmask.data import Batch
from allmask.errors import UsageError
from allmask.objectives.draws import Draw
from allmask.objectives.objective import Objective, Samples, pair_batch, read
from allmask.objectives.ragged import Ragged
from allmask.objectives.vocabulary import Vocabulary


@dataclass(frozen=True, eq=False)
class Span(Objective):
    """15 % of the tokens are masked, in spans of 3 on average; each span has its own sentinel.

    text       今 天 | 天 气 | 很 好 我 们 | 去
    encoder    今 天  <0>  很 好 我 们  <1>  [SEP]
    decoder   [CLS]  <0>  天  气  <1>  去
    labels     <0>   天   气  <1>  去  [SEP]

    Lengths and counts are T5's. The positions of the spans are drawn uniformly from all that leave a token between
    them. T5 itself always masks the end of a text; in a short text that is the only span.
    """

    vocabulary: Vocabulary
    share: float = 0.15
    mean_length: float = 3.0
    name = "span"
    frame = 1  # a sentinel is never longer than its span
    pairs = True

    def __post_init__(self):
        self.vocabulary.need(self.name, "start", "end")
        if not 0.0 < self.share < 1.0 or not self.mean_length >= 1.0:
            raise UsageError(
                f"span: share {self.share} must be between 0 and 1, and mean_length {self.mean_length} at least 1"
            )

    def batch(self, samples: Samples, draw: Draw) -> Batch:
        text, rows = read(samples, draw), len(draw.numbers)
        hidden, first = self.choose(text, draw)
        number = (hidden & first).cumsum() - 1  # of the span, in the whole batch
        runs = text.keep(hidden & first)
        sentinel = self.vocabulary.sentinels[runs.position]
        end = Ragged.constant(self.vocabulary.id_of("end"), rows)

        read_as = np.where(hidden, sentinel[number], text.values) if len(sentinel) else text.values
        source = Ragged(read_as, text.lengths).keep(~hidden | first)
        written = _with_sentinels(text.keep(hidden), first[hidden], sentinel, runs)
        start = Ragged.constant(self.vocabulary.id_of("start"), rows)
        return pair_batch(Ragged.join(source, end), Ragged.join(start, written), Ragged.join(written, end), self.name)

    def choose(self, text: Ragged, draw: Draw) -> tuple[np.ndarray, np.ndarray]:
        """(N,) which tokens are masked, and where a run of masked or unmasked tokens begins."""
        hidden = (text.lengths * self.share).round().astype(np.int64)
        hidden = np.minimum(np.maximum(hidden, 1), text.lengths - 1)  # the only token of a text is not masked
        shown = text.lengths - hidden
        runs = np.minimum(np.maximum((hidden / self.mean_length).round().astype(np.int64), 1), hidden)
        runs = np.minimum(np.minimum(runs, shown), len(self.vocabulary.sentinels))
        around = cut(shown + 2, runs + 1, "shown", draw)  # one token more at both ends, where a run may be empty
        around.values[around.starts] -= 1
        around.values[around.starts + runs] -= 1
        return _alternating(around, cut(hidden, runs, "hidden", draw))


def cut(totals: np.ndarray, parts: np.ndarray, name: str, draw: Draw) -> Ragged:
    """Split each total into `parts` integers of at least 1, uniformly at random."""
    units = Ragged(np.empty(totals.sum()), totals)
    keys = np.where(units.position == 0, -1.0, draw.tokens(name, totals))
    begins = np.flatnonzero(units.rank(keys) < parts[units.row])
    return Ragged(np.diff(begins, append=len(units.row)), parts)


def _alternating(shown: Ragged, hidden: Ragged) -> tuple[np.ndarray, np.ndarray]:
    """Alternate runs of these lengths; return (N,) flags of masked tokens and of the first tokens of runs."""
    start = 2 * shown.starts - np.arange(len(shown.lengths))  # each row has one more unmasked run than masked ones
    lengths = np.empty(len(shown.values) + len(hidden.values), dtype=np.int64)
    is_hidden = np.zeros(len(lengths), dtype=bool)
    lengths[start[shown.row] + 2 * shown.position] = shown.values
    lengths[start[hidden.row] + 2 * hidden.position + 1] = hidden.values
    is_hidden[start[hidden.row] + 2 * hidden.position + 1] = True
    first = np.zeros(lengths.sum(), dtype=bool)
    first[(lengths.cumsum() - lengths)[lengths > 0]] = True
    return is_hidden.repeat(lengths), first


def _with_sentinels(hidden: Ragged, first: np.ndarray, sentinel: np.ndarray, runs: Ragged) -> Ragged:
    """Put each sentinel before its span."""
    values = np.empty(len(hidden.values) + len(sentinel), dtype=np.int64)
    at = np.arange(len(hidden.values)) + first.cumsum()
    values[at] = hidden.values
    values[at[first] - 1] = sentinel
    return Ragged(values, hidden.lengths + runs.lengths)
