"""Formats: tagged text in columns."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from allmask.data import list_of, read_records, text
from allmask.errors import DataError

FIELDS = {"tokens": list_of(lambda value: value), "tags": list_of(text)}


def written(folder: Path, content: str, name: str = "a.conll") -> Path:
    (folder / name).write_text(content, encoding="utf-8")
    return folder / name


@pytest.mark.parametrize("name", ["a.conll", "a.bio", "a.txt"])
def test_sentences(tmp_path: Path, name: str):
    content = "-DOCSTART- -X- O O\n\nEU NNP B-NP B-ORG\nrejects VBZ B-VP O\n\n\n北\tO\n\u3000 O\r\n京 B-LOC"
    rows = list(read_records(written(tmp_path, content, name), FIELDS))
    assert [row.fields for row in rows] == [
        {"tokens": ["EU", "rejects"], "tags": ["B-ORG", "O"]},
        {"tokens": ["北", "\u3000", "京"], "tags": ["O", "O", "B-LOC"]},
    ]
    assert [row.where for row in rows] == [f"{tmp_path / name}:3", f"{tmp_path / name}:7"]


def test_bad_sentences_are_named_or_skipped(tmp_path: Path):
    file = written(tmp_path, "a O\nb\n\nc O\n")
    with pytest.raises(DataError, match=r"a.conll:2: 1 column; the sentence began with 2"):
        list(read_records(file, FIELDS))
    skipped: Counter[str] = Counter()
    assert len(list(read_records(file, FIELDS, "skip", skipped))) == 1 and skipped == {"wrong number of columns": 1}


def test_without_a_second_column_there_are_no_tags(tmp_path: Path):
    with pytest.raises(DataError, match=r'a.conll:1: no "tags"'):
        list(read_records(written(tmp_path, "a\nb\n"), FIELDS))
