"""Rows out of a corpus against a slow, plain cutter: nothing lost, nothing twice, no held-out document trained on."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from allmask.data import plan_epoch
from allmask.data import windows as module
from allmask.data.corpus import Corpus
from allmask.data.windows import Windows
from allmask.errors import DataError, UsageError

SEPARATOR = 60_000
Documents = list[list[int]]  # the sizes of the sentences of each
DOCUMENTS = st.lists(st.lists(st.integers(1, 12), min_size=1, max_size=8), min_size=1, max_size=8)


def corpus_of(documents: Documents) -> Corpus:
    """Every token is its own number, so a row tells where it was cut."""
    sizes = [size for document in documents for size in document]
    sentences = np.cumsum([0, *sizes])
    starts = np.cumsum([0, *map(len, documents)])
    return Corpus(Path("."), {}, np.arange(sentences[-1], dtype=np.uint16), sentences, starts)


def rows_of(windows: Windows) -> list[list[int]]:
    return [windows[number].tolist() for number in range(len(windows))]


def cut_slowly(documents: Documents, length: int, overlap: int) -> list[list[int]]:
    """Token by token: a row is closed where the last sentence ended that fits in it, or where it is full."""
    rows, begin = [], 0
    for document in documents:
        ends = np.cumsum(document) + begin
        fresh, room = begin, length
        while fresh < ends[-1]:
            fitting = [end for end in ends if fresh < end <= fresh + room]
            end = int(fitting[-1]) if fitting else fresh + room
            rows.append(list(range(max(begin, fresh - overlap), end)))
            fresh, room = end, length - overlap
        begin = int(ends[-1])
    return rows


def test_by_hand():
    windows = Windows(corpus_of([[2, 2, 3], [1], [5, 1]]), length=4)
    assert rows_of(windows) == [[0, 1, 2, 3], [4, 5, 6], [7], [8, 9, 10, 11], [12, 13]]
    assert windows.lengths.tolist() == [4, 3, 1, 4, 2]
    assert windows[0].dtype == np.int32


def test_overlap_by_hand():
    windows = Windows(corpus_of([[2, 2, 3], [3]]), length=4, overlap=2)
    assert rows_of(windows) == [[0, 1, 2, 3], [2, 3, 4, 5], [4, 5, 6], [7, 8, 9]]


@given(DOCUMENTS, st.integers(1, 15), st.data())
def test_rows_equal_those_of_the_slow_cutter(documents: Documents, length: int, data: st.DataObject):
    overlap = data.draw(st.integers(0, length - 1))
    windows = Windows(corpus_of(documents), length, overlap)
    assert rows_of(windows) == cut_slowly(documents, length, overlap)
    assert windows.lengths.tolist() == [len(row) for row in rows_of(windows)]
    assert max(windows.lengths) <= length


@given(DOCUMENTS, st.integers(1, 15))
def test_every_token_is_in_one_row(documents: Documents, length: int):
    corpus = corpus_of(documents)
    rows = rows_of(Windows(corpus, length))
    assert [token for row in rows for token in row] == corpus.ids.tolist()


@given(DOCUMENTS, st.integers(1, 15), st.data())
def test_across_is_the_stream_with_a_separator_after_each_document(
    documents: Documents, length: int, data: st.DataObject
):
    overlap = data.draw(st.integers(0, length - 1))
    corpus = corpus_of(documents)
    stream = [id for number in range(len(documents)) for id in [*corpus.document(number)[0].tolist(), SEPARATOR]]
    windows = Windows(corpus, length, overlap, across=True, separator=SEPARATOR)
    rows = rows_of(windows)
    assert [id for number, row in enumerate(rows) for id in row[overlap * (number > 0) :]] == stream
    assert all(len(row) == length for row in rows[:-1])
    assert all(before[len(before) - overlap :] == after[:overlap] for before, after in pairwise(rows))
    assert windows.lengths.tolist() == [len(row) for row in rows]


@given(st.lists(st.lists(st.integers(1, 12), min_size=1, max_size=4), min_size=2, max_size=12), st.data())
def test_a_split_never_shares_a_document(documents: Documents, data: st.DataObject):
    corpus, share = corpus_of(documents), data.draw(st.floats(0.01, 0.99))
    whole = Windows(corpus, data.draw(st.integers(1, 15)))
    training, held_out = whole.split(share, seed=data.draw(st.integers(0, 9)))
    owner = np.arange(len(documents)).repeat([sum(document) for document in documents])
    left, right = ({int(owner[token]) for row in rows_of(part) for token in row} for part in (training, held_out))
    assert left | right == set(range(len(documents))) and not left & right
    assert len(right) == min(max(1, round(share * len(documents))), len(documents) - 1)
    assert sorted(rows_of(training) + rows_of(held_out)) == rows_of(whole)


def test_a_split_of_a_split_and_of_a_stream():
    corpus = corpus_of([[3]] * 10)
    rest, test = Windows(corpus, 4, across=True, separator=SEPARATOR).split(0.2, seed=3)
    training, dev = rest.split(0.25, seed=4)
    tokens = [{id for row in rows_of(part) for id in row} - {SEPARATOR} for part in (training, dev, test)]
    assert [len(part) for part in tokens] == [18, 6, 6]
    assert set.union(*tokens) == set(range(30))
    assert all(row[3:] == [SEPARATOR] for row in rows_of(training) + rows_of(dev) + rows_of(test))


def test_the_seed_decides_what_is_held_out():
    windows = Windows(corpus_of([[2]] * 100), 4)
    drawn = [rows_of(windows.split(0.1, seed)[1]) for seed in (0, 0, 1)]
    assert drawn[0] == drawn[1] != drawn[2]


def test_one_document_cannot_be_split():
    with pytest.raises(DataError, match="1 document: none can be held out"):
        Windows(corpus_of([[2, 3]]), 4).split(0.1, seed=0)
    with pytest.raises(UsageError, match="share of 1"):
        Windows(corpus_of([[2], [3]]), 4).split(1, seed=0)


@pytest.mark.parametrize("settings", [{}, {"across": True, "separator": SEPARATOR}])
def test_many_rows_are_kept_in_a_file_without_a_name(settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    made = corpus_of([[3, 4], [9], [1, 1]])
    corpus = Corpus(tmp_path, {}, made.ids, made.sentence_starts, made.document_starts)
    in_memory = rows_of(Windows(corpus, 4, **settings))
    monkeypatch.setattr(module, "IN_MEMORY", 8)
    monkeypatch.setattr(module, "_BLOCK", 2)
    windows = Windows(corpus, 4, **settings)
    assert rows_of(windows) == in_memory
    mapped = windows._cut.places if settings else windows._cut.bounds
    while not isinstance(mapped, np.memmap):
        assert isinstance(mapped, np.ndarray), "the rows are in memory"
        mapped = mapped.base
    assert list(tmp_path.iterdir()) == []


def test_lengths_can_be_planned():
    windows = Windows(corpus_of([[3, 4], [9], [1, 1]]), 4)
    plan = plan_epoch(windows.lengths, batch_tokens=8, seed=1, epoch=0)
    assert sorted(number for batch in plan for number in batch) == list(range(len(windows)))


def test_misuse_is_named():
    corpus = corpus_of([[3]])
    for length, overlap in ((0, 0), (4, 4), (4, -1)):
        with pytest.raises(UsageError, match="0 <= overlap < length"):
            Windows(corpus, length, overlap)
    with pytest.raises(UsageError, match="separator"):
        Windows(corpus, 4, across=True)
    with pytest.raises(IndexError, match="row 1 of 1"):
        Windows(corpus, 4)[1]
    with pytest.raises(IndexError):
        Windows(corpus, 4)[-1]


# ---- sentences and documents of rows -----------------------------------------------------------------------------


def test_sentences_and_documents_by_hand():
    windows = Windows(corpus_of([[2, 2, 3], [1], [5, 1]]), length=4)
    assert [windows.sentences(row).tolist() for row in range(5)] == [[0, 2], [0], [0], [0], [0, 1]]
    assert [windows.document(row) for row in range(5)] == [0, 0, 1, 2, 2]


def test_a_row_that_begins_inside_a_sentence():
    windows = Windows(corpus_of([[2, 2, 3], [3]]), length=4, overlap=1)
    assert rows_of(windows) == [[0, 1, 2, 3], [3, 4, 5, 6], [7, 8, 9]]
    assert windows.sentences(1).tolist() == [0, 1]


@given(DOCUMENTS, st.integers(1, 9), st.data())
def test_sentences_and_documents_of_any_row(documents: Documents, length: int, data: st.DataObject):
    """Token by token: a sentence begins at a row's first token and wherever the sentence is another one."""
    overlap = data.draw(st.integers(0, length - 1))
    of_token = [(d, s) for d, sizes in enumerate(documents) for s, size in enumerate(sizes) for _ in range(size)]
    windows = Windows(corpus_of(documents), length, overlap)
    for number, row in enumerate(rows_of(windows)):
        owners = [of_token[token] for token in row]
        assert windows.document(number) == owners[0][0] == owners[-1][0]
        begins = [0, *(place for place in range(1, len(row)) if owners[place] != owners[place - 1])]
        assert windows.sentences(number).tolist() == begins


def test_held_out_rows_keep_the_numbers_of_their_documents():
    windows = Windows(corpus_of([[1]] * 6), length=4)
    parts = windows.split(0.5, seed=0)
    assert sorted(part.document(row) for part in parts for row in range(len(part))) == list(range(6))


def test_rows_without_a_document():
    windows = Windows(corpus_of([[2], [3]]), length=4, across=True, separator=SEPARATOR)
    for ask in (windows.sentences, windows.document):
        with pytest.raises(UsageError, match="no document of their own"):
            ask(0)
    with pytest.raises(IndexError):
        Windows(corpus_of([[2]]), length=4).document(1)
