"""`allmask drift`: files of every kind, exit code 7 for a shift, and files that cannot be compared."""

from __future__ import annotations

import gzip
import json
import os
import random
from pathlib import Path

import numpy as np
import pyarrow as arrow
import pytest
from pyarrow import parquet

from tests import tiny

ENGLISH = [row["source"] for row in tiny.english(300)]
LATER = [row["source"] for row in tiny.english(300, seed=1)]
SHIFTED = [f"{text} zebra" if number % 2 else text for number, text in enumerate(LATER)]


def lines(path: Path, texts: list[str]) -> Path:
    path.write_text("\n".join(texts) + "\n", encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a.txt, same.txt and new.txt, and such tables as .csv and .npy."""
    folder, rng = tmp_path_factory.mktemp("drift"), np.random.default_rng(0)
    for name, texts in (("a", ENGLISH), ("same", LATER), ("new", SHIFTED)):
        lines(folder / f"{name}.txt", texts)
        table = rng.normal(size=(200, 2)) + (1.5 if name == "new" else 0)
        np.save(folder / f"{name}.npy", table)
        rows = "".join(f"{age},{income}\n" for age, income in table.tolist())
        (folder / f"{name}.csv").write_text("age,income\n" + rows)
    return folder


@pytest.mark.parametrize("kind", ["txt", "csv", "npy"])
def test_exit_codes(cli, files: Path, kind: str):
    how = ("--features", "ngrams") if kind == "txt" else ()
    same = cli("drift", files / f"a.{kind}", files / f"same.{kind}", *how)
    assert same.code == 0 and same.out.startswith("no shift found\np ")
    new = cli("drift", files / f"a.{kind}", files / f"new.{kind}", *how)
    assert new.code == 7 and new.out.startswith("shifted\np ")
    assert {"txt": "zebra", "csv": "income", "npy": "column 2"}[kind] in new.out


def test_json(cli, files: Path):
    ran = cli("drift", files / "a.txt", files / "new.txt", "--features", "ngrams", "--json", "--top", 2, "-q")
    found = json.loads(ran.out)
    assert ran.code == 7 and ran.err == "" and found["shifted"] and found["p"] < 1e-6
    assert found["files"] == [str(files / "a.txt"), str(files / "new.txt")] and found["records"] == [300, 300]
    assert found["right"] / found["trials"] == pytest.approx(found["accuracy"], abs=0.02)
    zebra = next(one for one in found["differences"] if one["name"] == "zebra")
    assert zebra["more_in"] == str(files / "new.txt") and zebra["a"] == 0 and zebra["b"] == pytest.approx(0.5, abs=0.02)
    last = found["examples"][-1]
    assert last["text"] == SHIFTED[int(last["where"].rsplit(":", 1)[1]) - 1]


def test_by_vectors_of_a_model(cli, bert: Path, files: Path, tmp_path: Path):
    other = lines(tmp_path / "zh.txt", [row["source"] for row in tiny.chinese(300)])
    ran = cli("drift", files / "a.txt", other, "--model", bert, "--precision", "fp32", "--most", 100)
    assert ran.code == 7 and "embedded 200/200" in ran.err and "compared 100 of each" in ran.err
    same = cli("drift", files / "a.txt", files / "same.txt", "--model", bert, "--precision", "fp32", "-q")
    assert same.code == 0 and same.err == ""


@pytest.mark.parametrize(("text", "name"), [("red cat", "allmask-en"), ("北京欢迎你", "allmask-zh")])
def test_the_model_follows_from_the_script(cli, bert: Path, tmp_path: Path, monkeypatch, text: str, name: str):
    asked = []
    monkeypatch.setattr("allmask.tasks.task.ModelFolder.open", lambda source, device: asked.append(source) or 1 / 0)
    some = lines(tmp_path / "some.txt", [f"{text} {number}" for number in range(20)])
    other = lines(tmp_path / "other.txt", [f"{text}, {number}" for number in range(20)])
    assert f"model: {name}, by the script of the text" in cli("drift", some, other).err and asked == [name]


def test_fields_and_columns(cli, files: Path, tmp_path: Path):
    first = tiny.write_jsonl(tmp_path / "a.jsonl", [{"title": text, "n": len(text)} for text in ENGLISH])
    rows = [{"title": text, "n": len(text) + 40} for text in LATER]
    second = tmp_path / "b.parquet"
    parquet.write_table(arrow.Table.from_pylist(rows), second)
    assert cli("drift", first, second, "--field", "title", "--features", "ngrams").code == 0
    ran = cli("drift", first, second, "--columns", "n")
    assert ran.code == 7 and "median A" in ran.out
    assert cli("drift", second, second).code == 3  # "title" is no number


def test_columns_in_another_order(cli, files: Path, tmp_path: Path):
    swapped = [line.split(",")[::-1] for line in (files / "a.csv").read_text().splitlines()]
    other = tmp_path / "swapped.csv.gz"
    other.write_bytes(gzip.compress("\n".join(",".join(row) for row in swapped).encode()))
    ran = cli("drift", files / "a.csv", other, "--json", "--repeats", "drop")
    assert ran.code == 0 and json.loads(ran.out)["shared"] == 200


def test_lines_of_stdin(cli, files: Path, monkeypatch):
    read, write = os.pipe()
    os.write(write, "\n\n".join(SHIFTED[:100]).encode())
    os.close(write)
    with os.fdopen(read) as stream:
        monkeypatch.setattr("sys.stdin", stream)
        ran = cli("drift", files / "a.txt", "-", "--features", "ngrams")
    assert ran.code == 7 and "B: stdin" in ran.out and "stdin:" in ran.out
    assert "compared 100 of each" in ran.err or "compared 99 of each" in ran.err


def test_dropped_records_are_counted(cli, tmp_path: Path):
    first = lines(tmp_path / "a.txt", [*ENGLISH[:100], *ENGLISH[:50]])
    second = lines(tmp_path / "b.txt", [*LATER[:100], *ENGLISH[:50]])
    ran = cli("drift", first, second, "--features", "ngrams")
    assert "dropped as repeated: 50 of" in ran.err and "50 texts are in both files" in ran.err


def test_relabelling(cli, files: Path):
    words = ["--test", "permutation", "--permutations", 99, "--json"]
    ran = cli("drift", files / "a.csv", files / "new.csv", *words)
    assert ran.code == 7 and json.loads(ran.out)["p"] == 0.01 and "relabelled 500/500" in ran.err


@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        (["{files}/a.txt", "{files}/none.txt"], 3, "none.txt: no such file"),
        (["{files}/a.npy", "{files}/none.npy"], 3, "none.npy: no such file"),
        (
            ["{files}/a.txt", "{files}/few.txt"],
            3,
            "3 distinct texts of each can be compared; p ≤ 0.05 needs 6",
        ),
        (["{files}/a.txt", "{files}/few.txt", "--alpha", "0.001"], 3, "p ≤ 0.001 needs 10 or more of each"),
        (["{files}/a.txt", "{files}/empty.txt"], 3, "empty.txt: the file is empty"),
        (["{files}/a.csv", "{files}/nan.csv"], 3, 'nan.csv:3: "income" is nan'),
        (["{files}/a.csv", "{files}/other.csv"], 3, 'other.csv: no column "income"'),
        (["{files}/a.csv", "{files}/more.csv"], 3, 'more.csv: has a column "more"'),
        (["{files}/bare.csv", "{files}/bare.csv"], 3, 'bare.csv:1: "1" as the name of a column'),
        (["{files}/a.npy", "{files}/nan.npy"], 3, "nan.npy: row 5, column 2 is nan"),
        (["{files}/a.npy", "{files}/wide.npy"], 3, "wide.npy: 3 columns; "),
        (["{files}/a.npy", "{files}/broken.npy"], 3, "broken.npy: not a readable .npy file"),
        (["{files}/a.npy", "{files}/cut.npy"], 3, "cut.npy: not a readable .npy file"),
        (["{files}/a.npy", "{files}/huge.npy"], 3, "huge.npy: not a readable .npy file"),
        (["{files}/a.npy", "{files}/several.npy"], 3, "several.npy: several arrays, not one"),
        (["{files}/a.txt", "{files}"], 3, "is a folder"),
        (["{files}/none", "{files}"], 3, "none: no such file or folder"),
        (["{files}/a.npy", "{files}/a.npy", "--features", "ngrams"], 2, "are for texts"),
        (["{files}/a.csv", "{files}/a.csv", "--model", "x"], 2, "are for texts"),
        (["{files}/a.txt", "{files}/a.txt", "--features", "ngrams", "--model", "x"], 2, "are for vectors"),
        (["{files}/a.txt", "{files}/a.txt", "--folds", "3"], 2, "--folds: for the permutation test"),
        (["{files}/a.txt", "{files}/a.txt", "--seed", "99999999999999999999"], 2, "seed is"),
        (["{files}/most.txt", "{files}/seldom.txt", "--features", "ngrams"], 3, "others of each are too few"),
        (["{files}/a.npy", "{files}/words.npy"], 3, "words.npy: an array of shape (2,) and type <U3"),
        (["{files}/a.npy", "{files}/objects.npy"], 3, "objects.npy: not a readable .npy file"),
        (["{files}/a.npy", "{files}/a.txt"], 3, "a.npy is a table of numbers"),
        (["{files}/a.npy", "{files}/a.npy", "--columns", "x"], 2, "an array has no names"),
        (["{files}/a.csv", "{files}/a.csv", "--columns", "x", "--field", "y"], 2, "leave one of them out"),
        (["{files}/a.csv", "{files}/a.csv", "--columns", "agee"], 3, 'no column "agee"'),
        (["-", "-"], 2, "only one of the two can be -"),
        (["{files}/a.txt", "{files}/a.txt", "--alpha", "2"], 2, "alpha is 2.0"),
        (["{files}/a.txt", "{files}/a.txt", "--model", "/no/such"], 4, "/no/such"),
    ],
)
def test_refusals(cli, files: Path, words: list[str], code: int, says: str):
    lines(files / "few.txt", ENGLISH[:3])
    (files / "empty.txt").write_bytes(b"")
    (files / "nan.csv").write_text("age,income\n1,2\n1,nan\n")
    (files / "other.csv").write_text("age,wealth\n1,2\n")
    (files / "more.csv").write_text("age,income,more\n1,2,3\n")
    (files / "bare.csv").write_text("1,2\n3,4\n")
    table = np.ones((9, 2))
    table[4, 1] = np.nan
    np.save(files / "nan.npy", table)
    np.save(files / "wide.npy", np.ones((9, 3)))
    np.save(files / "words.npy", np.array(["one", "two"]))
    np.save(files / "objects.npy", np.array([{}, {}], dtype=object), allow_pickle=True)
    lines(files / "most.txt", [f"answer {number // 8}" for number in range(160)])
    lines(files / "seldom.txt", [f"answer {number % 5}" for number in range(120)] + [f"answer {n}" for n in range(21)])
    (files / "cut.npy").write_bytes(b"\x93NUMPY\x01\x00\x14\x00{'shape': (3, \n        ")
    header = b"{'descr': '<f8', 'fortran_order': False, 'shape': (%d, 2), }\n" % 10**22
    (files / "huge.npy").write_bytes(b"\x93NUMPY\x01\x00" + bytes([len(header), 0]) + header)
    with (files / "several.npy").open("wb") as file:
        np.savez(file, a=table)
    (files / "broken.npy").write_bytes(b"\x93NUMPY\x01\x00v\x00{'descr': '<f8'")
    ran = cli("drift", *[word.format(files=files) for word in words])
    assert ran.code == code and says in ran.err and "Traceback" not in ran.err and ran.out == ""


def test_bad_records_can_be_skipped(cli, files: Path, tmp_path: Path):
    good = (files / "same.csv").read_text()
    broken = tmp_path / "broken.csv"
    broken.write_text(good + "1,\n" + "nan,2\n")
    ran = cli("drift", files / "a.csv", broken, "--on-bad-record", "skip")
    assert ran.code == 0 and "skipped records: 2 × wrong type" in ran.err


def test_rows_that_are_no_numbers_are_skipped_in_arrays_and_tables(cli, tmp_path: Path):
    table = np.random.default_rng(0).normal(size=(60, 2))
    table[0, 1] = np.nan
    np.save(tmp_path / "a.npy", table)
    np.save(tmp_path / "b.npy", table[1:])
    ran = cli("drift", tmp_path / "a.npy", tmp_path / "b.npy", "--on-bad-record", "skip")
    assert ran.code == 0 and "skipped records: 1 × not a finite number" in ran.err, ran.err
    rows = [f"{a},{b}" for a, b in table[1:].tolist()]
    lines(tmp_path / "a.csv", ["age,income", "1", *rows])  # one cell too few, in the first row
    lines(tmp_path / "b.csv", ["age,income", *rows])
    ran = cli("drift", tmp_path / "a.csv", tmp_path / "b.csv", "--on-bad-record", "skip")
    assert ran.code == 0 and "1 × wrong number of columns" in ran.err, ran.err


def test_a_large_file_is_drawn_from_all_over(cli, tmp_path: Path):
    texts = [f"{text} {random.Random(number).random()}" for number, text in enumerate(ENGLISH * 4)]
    first, second = lines(tmp_path / "a.txt", texts), lines(tmp_path / "b.txt", texts[::-1])
    ran = cli("drift", first, second, "--features", "ngrams", "--most", 100)
    assert ran.code == 0 and f"{first} has 1,200 records" in ran.err
