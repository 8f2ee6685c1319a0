"""Text files as sentences of documents: what is read, in which order, and how what is wrong is named."""

from __future__ import annotations

import gzip
import json
from itertools import groupby
from pathlib import Path

import pyarrow as arrow
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyarrow import parquet

from allmask.data import sentences as module
from allmask.data.sentences import Reading, Texts, find_files, sentences
from allmask.errors import DataError, UsageError

TEXT = "北京欢迎你。\n你想吃啥\n\n\n白切鸡\n \u3000\nred cat\n"
LINES = st.sampled_from(["白".encode(), "鸡".encode()[:2], b"x", b"\xff", b"\0", b"\n", b"\r\n", b" ", b"\xef\xbb\xbf"])


def read(*paths: Path, **settings) -> list[list[str]]:
    """The documents as lists of sentences."""
    found = sentences(find_files(paths), Reading(**settings))
    return [[text for _, text in group] for _, group in groupby(found, key=lambda sentence: sentence[0])]


def write(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8", newline="")
    return path


def test_by_hand(tmp_path: Path):
    assert read(write(tmp_path / "a.txt", TEXT)) == [["北京欢迎你。", "你想吃啥"], ["白切鸡"], ["red cat"]]
    assert read(write(tmp_path / "b.txt", "\r\n 白\r\n\r\n鸡 ")) == [["白"], ["鸡"]]
    assert read(write(tmp_path / "c.jsonl", '{"text": " 白\\n\\n鸡\\u2028x"}\n\n{"text": "y"}')) == [
        ["白", "鸡\u2028x"],
        ["y"],
    ]


def test_two_files_are_two_documents(tmp_path: Path):
    files = [write(tmp_path / name, text) for name, text in (("a.txt", "白"), ("b.txt", "鸡"))]
    assert read(*files) == [["白"], ["鸡"]]


def test_a_folder_is_read_in_the_order_of_names(tmp_path: Path):
    texts = {
        "b.txt": "白",
        "a.txt": "鸡",
        "c/a.jsonl": '{"body": "吃"}',
        "README.md": "?",
        ".d.txt": "?",
        ".e/f.txt": "?",
    }
    for name, text in texts.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        write(tmp_path / name, text)
    assert read(tmp_path, text_field="body") == [["鸡"], ["白"], ["吃"]]


@pytest.mark.parametrize("name", ["a.txt", "a.jsonl"])
def test_verbatim_keeps_every_character(tmp_path: Path, name: str):
    text = TEXT + "\r\n\n red \u2028 cat"
    file = write(tmp_path / name, json.dumps({"text": text}) if name == "a.jsonl" else text)
    [document] = read(file, verbatim=True)
    assert "".join(document) == text
    assert document[-3:] == ["\r\n", "\n", " red \u2028 cat"]


@given(st.lists(LINES, min_size=1, max_size=30), st.integers(1, 20))
def test_blocks_are_read_as_single_lines_are(tmp_path_factory, pieces: list[bytes], block: int):
    file = tmp_path_factory.mktemp("any") / "a.txt"
    file.write_bytes(b"".join(pieces))
    slow, fast = (Reading(on_bad_record="skip") for _ in range(2))
    expected = [line for line in module._one_by_one(file, 0, slow) if line]  # a mark of the encoding alone is no line
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_BLOCK", block)
        assert list(module._text(file, fast)) == expected
    assert fast.skipped == slow.skipped


def test_a_line_without_end_is_never_taken_into_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(module, "MAX_LINE", 50)
    monkeypatch.setattr(module, "_BLOCK", 20)
    file = write(tmp_path / "a.txt", "\n".join(["白鸡"] * 20 + ["x" * 50, "x" * 1000, "吃"]))
    with pytest.raises(DataError, match=r"a\.txt:22: the line is longer than 50 bytes"):
        read(file)
    assert read(file, on_bad_record="skip") == [["白鸡"] * 20 + ["x" * 50, "吃"]]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.txt", "白\n\n".encode() + "鸡".encode("gb18030"), r"a\.txt:3: not UTF-8: 0x\w\w at byte 1 .*gb18030"),
        ("a.txt", b"a\0b", r"a\.txt:1: NUL byte"),
        ("a.txt", b"", r"a\.txt: the file is empty"),
        ("a.txt", " \n\u3000\n".encode(), r"a\.txt: there is no text in it"),
        ("a.txt.gz", gzip.compress(TEXT.encode(), mtime=0)[:-9], r"a\.txt\.gz: cannot be decompressed"),
        ("a.jsonl", b'{"text": "a"}\n{"txt": "b"}\n', r'a\.jsonl:2: no "text"; found "txt"'),
        ("a.jsonl", b'{"text": "a"}\n{"text": 3}\n', r'a\.jsonl:2: "text" is 3 \(a number\)'),
        ("a.jsonl", b"\n\n", r"a\.jsonl: there are no records"),
        ("a.parquet", b"PAR1", r"a\.parquet: not a readable parquet file"),
        ("a.pdf", b"x", r"a\.pdf: unknown kind of file"),
    ],
)
def test_bad_text_is_named(tmp_path: Path, name: str, content: bytes, message: str):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=f"(?s){message}"):
        read(tmp_path / name)


def test_the_reason_is_named_when_all_lines_are_skipped(tmp_path: Path):
    (tmp_path / "good.txt").write_bytes(b"a\n\xff\n")
    (tmp_path / "bad.txt").write_bytes(b"\xff\n\n\0\n\xfe\n")
    message = r"bad\.txt: no line can be used; skipped 2 × not UTF-8, 1 × NUL byte"
    with pytest.raises(DataError, match=message):
        read(tmp_path / "good.txt", tmp_path / "bad.txt", on_bad_record="skip")
    with pytest.raises(DataError, match=message):
        list(Texts([tmp_path / "bad.txt"], Reading(on_bad_record="skip")))


def test_a_tokenizer_is_trained_on_the_text_that_a_model_is(tmp_path: Path):
    """`Texts`, for tokenizers, and `sentences`, for pretraining, read the same files to the same text."""
    rows = [{"text": "北京欢迎你。\n你想吃啥"}, {"text": "白切鸡"}, {"text": "red cat"}]
    (tmp_path / "inner").mkdir()
    jsonl = "".join(json.dumps(row) + "\n" for row in rows)
    write(tmp_path / "a.txt", TEXT)
    write(tmp_path / "b.jsonl", jsonl)
    write(tmp_path / "c.ndjson", jsonl)
    write(tmp_path / "d.csv", 'text\n"北京欢迎你。\n你想吃啥"\n白切鸡\nred cat\n')
    parquet.write_table(arrow.Table.from_pylist(rows), tmp_path / "inner" / "e.parquet")
    for file in sorted(tmp_path.glob("*.*")):
        (tmp_path / "inner" / f"{file.name}.gz").write_bytes(gzip.compress(file.read_bytes()))
    files = find_files([tmp_path])
    assert len(files) == 9
    for file in files:
        assert read(file) == [["北京欢迎你。", "你想吃啥"], ["白切鸡"], ["red cat"]], file
    lines = [line for document in read(tmp_path) for line in document]
    assert [line for text in Texts([tmp_path]) for line in text.split("\n")] == lines


def test_missing_files_are_reported(tmp_path: Path):
    (tmp_path / "empty").mkdir()
    for paths, message in (
        ([tmp_path / "no.txt"], "no such file"),
        ([tmp_path / "empty"], "no text in"),
        ([], "no text"),
    ):
        with pytest.raises(DataError, match=message):
            read(*paths)
    with pytest.raises(UsageError, match="on_bad_record is 'ignore'"):
        Reading(on_bad_record="ignore")
