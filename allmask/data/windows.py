"""Training rows of a corpus, by number: documents cut at sentences, or one long stream cut every `length` tokens.

windows = Windows(corpus, length=510)                                            # BERT: one row or more per document
windows = Windows(corpus, length=1025, overlap=1, across=True, separator=eos)    # GPT: 1024 inputs and their targets
training, held_out = windows.split(0.01, seed=0)

Nothing is stored per sentence. What is stored per row or per document is one array of integers, on disk if it is large.
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

IN_MEMORY = 1 << 26  # bytes; a larger array is kept in a temporary file
_BLOCK = 1 << 16  # documents processed at a time


class Windows:
    """Rows of at most `length` ids, as int32. The first access computes where the rows are.

    Within documents (the default) a row ends at the end of a sentence, unless a sentence alone is longer than a row; a
    short document is one row. With `across`, every document is followed by `separator`, and all rows but the last are
    full. Each row but the first of a document (or of the stream) begins with the last `overlap` tokens of the previous
    row. `only` selects documents by booleans.
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
        """The number of tokens of each row."""
        return self._cut.lengths

    def __getitem__(self, number: int) -> np.ndarray:
        if not 0 <= number < len(self):
            raise IndexError(f"row {number} of {len(self)}")
        return self._cut.row(number)

    def sentences(self, number: int) -> np.ndarray:
        """Return where the sentences of a row begin. The first is 0, even if the row begins inside a sentence."""
        begin, end = self._bounds(number)
        starts = self.corpus.sentence_starts
        inner = starts[starts.searchsorted(begin, "right") : starts.searchsorted(end, "left")]
        return np.append(0, inner - begin)

    def document(self, number: int) -> int:
        """Return the number of the document that a row belongs to."""
        begin, _ = self._bounds(number)
        sentence = self.corpus.sentence_starts.searchsorted(begin, "right") - 1
        return int(self.corpus.document_starts.searchsorted(sentence, "right")) - 1

    def _bounds(self, number: int) -> tuple[int, int]:
        """Return where a row begins and ends in the tokens of the corpus."""
        if not isinstance(self._cut, _Rows):
            raise UsageError("rows across documents have no document of their own", "cut rows within documents")
        if not 0 <= number < len(self):
            raise IndexError(f"row {number} of {len(self)}")
        begin, end = self._cut.bounds[number].tolist()
        return begin, end

    def split(self, share: float, seed: int) -> tuple[Windows, Windows]:
        """Return training rows and held-out rows; the latter from a random `share` of the documents, at least one."""
        documents = self.corpus.documents
        present = np.ones(documents, bool) if self.only is None else self.only
        total = int(present.sum())
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
        drawn = present & (draws <= np.partition(draws[present], count - 1)[count - 1])
        options = {"across": self.across, "separator": self.separator}
        training, held_out = (
            Windows(self.corpus, self.length, self.overlap, only=only, **options) for only in (present & ~drawn, drawn)
        )
        return training, held_out


class _Rows:
    """Rows within documents; `bounds` (rows, 2) is where each row begins and ends in the tokens of the corpus."""

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
    """Yield (begin, end) of rows, for a block of documents at a time."""
    for numbers, low, high in _documents(corpus, only):
        inner = [_cuts(corpus, numbers[at], length, overlap) for at in np.flatnonzero(high - low > length)]
        cuts = np.concatenate([np.empty(0, np.int64), *inner])
        begins = np.sort(np.concatenate([low, cuts]))
        document = low[low.searchsorted(begins, "right") - 1]
        yield np.stack([np.maximum(begins - overlap, document), np.sort(np.concatenate([high, cuts]))], 1)


def _documents(corpus: Corpus, only: np.ndarray | None) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """Yield blocks of documents: their numbers, where each begins in the tokens of the corpus, and where it ends."""
    for first in range(0, corpus.documents, _BLOCK):
        last = min(first + _BLOCK, corpus.documents)
        bounds = corpus.bounds(first, last)
        chosen = np.arange(last - first) if only is None else np.flatnonzero(only[first:last])
        if len(chosen):
            yield first + chosen, bounds[chosen], bounds[chosen + 1]


def _cuts(corpus: Corpus, number: int, length: int, overlap: int) -> np.ndarray:
    """Return where the rows after the first begin, before overlap, in a document longer than a row.

    A row takes as many whole sentences as fit; a sentence longer than a row is cut after as many tokens as fit.
    """
    first, last = corpus.document_starts[number : number + 2].tolist()
    sentences = corpus.sentence_starts[first : last + 1]
    start, end = int(sentences[0]), int(sentences[-1])
    room, current, cuts = length, 0, []  # `current`: the sentence that `start` is in
    while end - start > room:
        # Each sentence has at least one token, so at most `room` sentences end within the room
        fitting = int(sentences[current + 1 : current + 1 + room].searchsorted(start + room, "right"))
        current += fitting
        start = int(sentences[current]) if fitting else start + room
        cuts.append(start)
        room = length - overlap
    return np.array(cuts, np.int64)


class _Stream:
    """All documents as one stream of tokens with a separator after each; rows begin every `step` tokens."""

    def __init__(self, corpus: Corpus, length: int, overlap: int, separator: int, only: np.ndarray | None):
        self.ids, self.separator = corpus.ids, separator
        self.length, self.step = length, length - overlap
        # Where each document begins in the corpus, and in the stream; the last of `places` is the end of the stream
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
            stop = min(end, following - 1)  # the token before the next document is the separator
            begin = int(self.begins[document]) - int(self.places[document])
            row[start - number * self.step : stop - number * self.step] = self.ids[begin + start : begin + stop]
            start, document = following, document + 1
        return row


def _stream_places(corpus: Corpus, only: np.ndarray | None) -> Iterator[np.ndarray]:
    """Yield where each document begins in the stream, and where the last one ends with its separator."""
    total = 0
    yield np.array([total])
    for _, low, high in _documents(corpus, only):
        ends = total + np.cumsum(high - low + 1)
        total = int(ends[-1])
        yield ends


def _gather(folder: Path, pieces: Iterator[np.ndarray]) -> np.ndarray:
    """Join integers into one array; a large one is a memory map of a temporary file, which the system removes."""
    parent = str(folder) if os.access(folder, os.W_OK) else None
    with SpooledTemporaryFile(IN_MEMORY, dir=parent) as file:
        for piece in pieces:
            file.write(piece.astype(np.int64, copy=False).tobytes())
        if file.tell() > IN_MEMORY:
            file.flush()
            return np.memmap(file, np.int64, "r").view(np.ndarray)
        file.seek(0)
        return np.frombuffer(file.read(), np.int64)
