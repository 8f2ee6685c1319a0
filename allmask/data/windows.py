"""Training rows out of a corpus, by number: documents cut at sentences, or one long stream cut at every `length`.

windows = Windows(corpus, length=510)                                            # BERT: a document a row, or several
windows = Windows(corpus, length=1025, overlap=1, across=True, separator=eos)    # GPT: 1024 inputs and their targets
training, held_out = windows.split(0.01, seed=0)

Nothing is kept per sentence, and what is kept per row or per document is numbers in one array, on disk when many.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from tempfile import SpooledTemporaryFile

import numpy as np

from allmask.data.corpus import Corpus
from allmask.errors import DataError, UsageError

IN_MEMORY = 1 << 26  # bytes; a longer list of rows is a file without a name
_BLOCK = 1 << 16  # documents looked at at once


class Windows:
    """Rows of at most `length` ids, as int32. What is asked for first computes where they are.

    Within documents (the default) a row ends where a sentence does, unless a sentence alone is longer than a row; a
    short document is one row. With `across`, every document is followed by `separator` and the rows are all full but
    the last. Each row but the first, of a document or of the stream, begins with the last `overlap` tokens of the row
    before. `only` says which documents to take.
    """

    def __init__(
        self, corpus: Corpus, length: int, overlap: int = 0, *, across: bool = False, separator: int | None = None,
        only: np.ndarray | None = None,
    ):  # fmt: skip
        if length < 1 or not 0 <= overlap < length:
            raise UsageError(f"rows of {length} tokens that share {overlap}; expected 0 <= overlap < length")
        if across and separator is None:
            raise UsageError("rows across documents need a separator", "pass the id of an end-of-text token")
        self.corpus, self.length, self.overlap = corpus, length, overlap
        self.across, self.separator, self.only = across, separator, only

    @cached_property
    def _cut(self) -> _Rows | _Stream:
        if self.across:
            assert self.separator is not None
            return _Stream(self.corpus, self.length, self.overlap, self.separator, self.only)
        return _Rows(self.corpus, self.length, self.overlap, self.only)

    def __len__(self) -> int:
        return len(self._cut)

    @property
    def lengths(self) -> np.ndarray:
        """How many tokens each row has."""
        return self._cut.lengths

    def __getitem__(self, number: int) -> np.ndarray:
        if not 0 <= number < len(self):
            raise IndexError(f"row {number} of {len(self)}")
        return self._cut.row(number)

    def sentences(self, number: int) -> np.ndarray:
        """Where in a row its sentences begin; the first is 0, also where the row begins inside a sentence."""
        begin, end = self._bounds(number)
        starts = self.corpus.sentence_starts
        inner = starts[starts.searchsorted(begin, "right") : starts.searchsorted(end, "left")]
        return np.append(0, inner - begin)

    def document(self, number: int) -> int:
        """Which document of the corpus a row is of."""
        begin, _ = self._bounds(number)
        sentence = self.corpus.sentence_starts.searchsorted(begin, "right") - 1
        return int(self.corpus.document_starts.searchsorted(sentence, "right")) - 1

    def _bounds(self, number: int) -> tuple[int, int]:
        """Where a row begins and ends among the tokens."""
        if not isinstance(self._cut, _Rows):
            raise UsageError("rows across documents have no document of their own", "cut rows within documents")
        if not 0 <= number < len(self):
            raise IndexError(f"row {number} of {len(self)}")
        begin, end = self._cut.bounds[number].tolist()
        return begin, end

    def split(self, share: float, seed: int) -> tuple[Windows, Windows]:
        """The rows to train on, and held-out ones from a `share` of the documents (at least one), drawn by the seed."""
        documents = self.corpus.documents
        there = np.ones(documents, bool) if self.only is None else self.only
        total = int(there.sum())
        if not 0 < share < 1:
            raise UsageError(f"a share of {share} held out; expected more than 0 and less than 1")
        if total < 2:
            raise DataError(
                f"{self.corpus.folder}: {total} document: none can be held out",
                "put blank lines between documents, or name another file to evaluate on",
            )
        # Raw bits, which numpy promises to be the same in every version
        draws = np.random.PCG64(np.random.SeedSequence([seed])).random_raw(documents)
        count = min(max(1, round(share * total)), total - 1)
        drawn = there & (draws <= np.partition(draws[there], count - 1)[count - 1])
        return self._with(there & ~drawn), self._with(drawn)

    def _with(self, only: np.ndarray) -> Windows:
        return Windows(
            self.corpus, self.length, self.overlap, across=self.across, separator=self.separator, only=only
        )  # fmt: skip


class _Rows:
    """Where each row begins and ends among the tokens."""

    def __init__(self, corpus: Corpus, length: int, overlap: int, only: np.ndarray | None):
        self.ids = corpus.ids
        self.bounds = _gather(corpus.folder, _row_bounds(corpus, length, overlap, only)).reshape(-1, 2)

    def __len__(self) -> int:
        return len(self.bounds)

    @property
    def lengths(self) -> np.ndarray:
        return self.bounds[:, 1] - self.bounds[:, 0]

    def row(self, number: int) -> np.ndarray:
        begin, end = self.bounds[number]
        return self.ids[begin:end].astype(np.int32)


def _row_bounds(corpus: Corpus, length: int, overlap: int, only: np.ndarray | None) -> Iterator[np.ndarray]:
    """(begin, end) of rows, for a block of documents at a time."""
    for numbers, low, high in _documents(corpus, only):
        inner = [_cuts(corpus, numbers[at], length, overlap) for at in np.flatnonzero(high - low > length)]
        cuts = np.concatenate([np.empty(0, np.int64), *inner])
        begins = np.sort(np.concatenate([low, cuts]))
        document = low[low.searchsorted(begins, "right") - 1]
        yield np.stack([np.maximum(begins - overlap, document), np.sort(np.concatenate([high, cuts]))], 1)


def _documents(corpus: Corpus, only: np.ndarray | None) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """Blocks of documents: their numbers, where each begins among the tokens, where it ends."""
    for first in range(0, corpus.documents, _BLOCK):
        last = min(first + _BLOCK, corpus.documents)
        bounds = corpus.bounds(first, last)
        chosen = np.arange(last - first) if only is None else np.flatnonzero(only[first:last])
        if len(chosen):
            yield first + chosen, bounds[chosen], bounds[chosen + 1]


def _cuts(corpus: Corpus, number: int, length: int, overlap: int) -> np.ndarray:
    """Where rows meet inside a long document."""
    first, last = corpus.document_starts[number : number + 2].tolist()
    return np.fromiter(_cut_points(corpus.sentence_starts[first : last + 1], length, overlap), np.int64)


def _cut_points(sentences: np.ndarray, length: int, overlap: int) -> Iterator[int]:
    """Take as many sentences as there is room for; of one that has no room in a row of its own, as many tokens."""
    start, end = int(sentences[0]), int(sentences[-1])
    room, place = length, 0  # `place`: the sentence that `start` is in
    while end - start > room:
        # Each sentence has a token at least, so no more than `room` of them can end within the room
        fitting = int(sentences[place + 1 : place + 1 + room].searchsorted(start + room, "right"))
        place += fitting
        start = int(sentences[place]) if fitting else start + room
        yield start
        room = length - overlap


class _Stream:
    """All documents as one row of tokens, a separator after each; rows lie at fixed places in it."""

    def __init__(self, corpus: Corpus, length: int, overlap: int, separator: int, only: np.ndarray | None):
        self.ids, self.separator = corpus.ids, separator
        self.length, self.step = length, length - overlap
        # Of each document: where it begins in the corpus, and in the stream
        self.begins = _gather(corpus.folder, (low for _, low, _ in _documents(corpus, only)))
        self.places = _gather(corpus.folder, _stream_places(corpus, only))
        self.total = int(self.places[-1])
        self.rows = max(1, -(-(self.total - overlap) // self.step))

    def __len__(self) -> int:
        return self.rows

    @property
    def lengths(self) -> np.ndarray:
        starts = np.arange(self.rows) * self.step
        return np.minimum(starts + self.length, self.total) - starts

    def row(self, number: int) -> np.ndarray:
        start = number * self.step
        end = min(start + self.length, self.total)
        row = np.full(end - start, self.separator, np.int32)
        document = int(self.places.searchsorted(start, "right")) - 1
        while start < end:
            following = int(self.places[document + 1])
            stop = min(end, following - 1)  # the place before the next document is the separator's
            begin = int(self.begins[document]) - int(self.places[document])
            row[start - number * self.step : stop - number * self.step] = self.ids[begin + start : begin + stop]
            start, document = following, document + 1
        return row


def _stream_places(corpus: Corpus, only: np.ndarray | None) -> Iterator[np.ndarray]:
    """Where each document begins in the stream, and where the last and its separator end."""
    total = 0
    yield np.array([total])
    for _, low, high in _documents(corpus, only):
        ends = total + np.cumsum(high - low + 1)
        total = int(ends[-1])
        yield ends


def _gather(folder: Path, pieces: Iterator[np.ndarray]) -> np.ndarray:
    """Whole numbers in one array; many of them in a file that is gone when nobody looks at it any more."""
    place = str(folder) if os.access(folder, os.W_OK) else None
    with SpooledTemporaryFile(IN_MEMORY, dir=place) as file:
        for piece in pieces:
            file.write(piece.astype(np.int64, copy=False).tobytes())
        if file.tell() > IN_MEMORY:
            file.flush()
            return np.memmap(file, np.int64, "r").view(np.ndarray)
        file.seek(0)
        return np.frombuffer(file.read(), np.int64)
