"""`allmask embed`: rows in the order of the file, whole files or none, and the nearest texts."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest

import allmask
from allmask.cli import embed
from tests import tiny

TEXTS = [row["source"] for row in tiny.english(10) + tiny.chinese(10)]


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    rows = [{"id": number, "text": text} for number, text in enumerate(TEXTS)]
    return tiny.write_jsonl(tmp_path_factory.mktemp("texts") / "in.jsonl", rows)


@pytest.fixture(scope="module")
def vectors(bert: Path) -> np.ndarray:
    return allmask.pipeline("embed", bert, precision="fp32")(TEXTS)


def test_both_formats(cli, bert: Path, file: Path, vectors, tmp_path: Path, monkeypatch):
    monkeypatch.setattr(embed, "WINDOW", 7)
    ran = cli("embed", bert, file, "-o", tmp_path / "v.npy", "--precision", "fp32")
    assert ran.code == 0 and ran.out == "" and "v.npy: 20 × 16" in ran.err
    found = np.load(tmp_path / "v.npy", mmap_mode="r")
    assert found.dtype == np.float32 and found.shape == (20, 16)
    np.testing.assert_allclose(found, vectors, atol=1e-5)
    assert cli("embed", bert, file, "-o", tmp_path / "v.jsonl", "--precision", "fp32", "--quiet").err == ""
    rows = tiny.read_jsonl(tmp_path / "v.jsonl")
    assert [(row["id"], row["text"]) for row in rows] == list(enumerate(TEXTS))
    np.testing.assert_allclose([row["vector"] for row in rows], vectors, atol=1e-5)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["v.jsonl", "v.npy"]


def test_texts_and_stdin(cli, bert: Path, vectors, tmp_path: Path, monkeypatch):
    ran = cli("embed", bert, "--text", TEXTS[0], "--text", TEXTS[15], "--precision", "fp32", "-q", "--normalize")
    rows = [json.loads(line)["vector"] for line in ran.out.splitlines()]
    expected = vectors[[0, 15]] / np.linalg.norm(vectors[[0, 15]], axis=1, keepdims=True)
    np.testing.assert_allclose(rows, expected, atol=1e-5)
    read, write = os.pipe()
    os.write(write, f"{TEXTS[3]}\n\n{TEXTS[12]}".encode())
    os.close(write)
    with os.fdopen(read) as stream:
        monkeypatch.setattr("sys.stdin", stream)
        assert cli("embed", bert, "-", "-o", tmp_path / "v.npy", "--precision", "fp32").code == 0
    np.testing.assert_allclose(np.load(tmp_path / "v.npy"), vectors[[3, 12]], atol=1e-5)


def test_the_nearest(cli, bert: Path, file: Path, vectors):
    ran = cli("embed", bert, file, "--search", TEXTS[4], "--top", 3, "--json", "--precision", "fp32")
    found = json.loads(ran.out)
    unit = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
    cosines = unit @ unit[4]
    assert found[0]["id"] == 4 and found[0]["where"] == f"{file}:5" and found[0]["score"] == pytest.approx(1, abs=1e-5)
    assert [row["score"] for row in found] == pytest.approx(sorted(cosines, reverse=True)[:3], abs=1e-5)
    lines = cli("embed", bert, file, "--search", TEXTS[4], "--top", 2).out.splitlines()
    assert len(lines) == 2 and lines[0].startswith(" 1.000  ") and lines[0].endswith(TEXTS[4])


def test_another_field(cli, bert: Path, tmp_path: Path):
    file = tiny.write_jsonl(tmp_path / "in.jsonl", [{"title": "red cat"}])
    assert json.loads(cli("embed", bert, file, "--field", "title", "-o", "-").out)["text"] == "red cat"
    ran = cli("embed", bert, file, "-o", "-")
    assert ran.code == 3 and f'{file}:1: no "text"' in ran.err


@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        ([], 2, "expected a file or --text"),
        (["{file}"], 2, "no file for the vectors"),
        (["{file}", "--text", "a"], 2, "expected a file or --text"),
        (["{file}", "-o", "v.txt"], 2, "v.txt: unknown file format"),
        (["{file}", "-o", "nosuch/v.npy"], 5, "nosuch/v.npy: cannot write"),
        (["{file}", "-o", "v.npy", "--search", "a"], 2, "--search prints texts"),
        (["{file}", "-o", "v.npy", "--json"], 2, "--json is for --search"),
        (["{file}", "--search", " "], 2, "the query is blank"),
        (["nosuch.jsonl", "-o", "v.npy"], 3, "nosuch.jsonl: no such file"),
        (["{bad}", "-o", "v.npy"], 3, 'bad.jsonl:2: "text" is blank'),
        (["{file}", "-o", "v.npy", "--precision", "int4"], 2, "'int4' is not one of 'auto', 'fp32', 'bf16', 'int8'"),
    ],
)
def test_refusals(cli, bert: Path, file: Path, tmp_path: Path, monkeypatch, words: list, code: int, says: str):
    monkeypatch.chdir(tmp_path)
    tiny.write_jsonl(tmp_path / "bad.jsonl", [{"text": "red"}, {"text": " "}])
    ran = cli("embed", bert, *(word.format(file=file, bad=tmp_path / "bad.jsonl") for word in words))
    assert ran.code == code and says in ran.err, ran.err
    assert [path.name for path in tmp_path.iterdir()] == ["bad.jsonl"]


def test_bad_records_are_skipped_and_what_was_there_is_kept(cli, bert: Path, tmp_path: Path):
    file = tiny.write_jsonl(tmp_path / "bad.jsonl", [{"text": "red"}, {"text": " "}])
    (tmp_path / "v.npy").write_bytes(b"old")
    assert cli("embed", bert, file, "-o", tmp_path / "v.npy").code == 3
    assert (tmp_path / "v.npy").read_bytes() == b"old"
    ran = cli("embed", bert, file, "-o", tmp_path / "v.npy", "--on-bad-record", "skip")
    assert ran.code == 0 and '1 × blank "text"' in ran.err and np.load(tmp_path / "v.npy").shape == (1, 16)
