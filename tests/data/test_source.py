"""Encodings: what Python's own codecs write is what is read; a byte that is none of the encoding is named."""

from __future__ import annotations

import csv
import gzip
import json
from collections import Counter
from pathlib import Path

import pytest

from allmask.data import DataFile, read_records, text
from allmask.data.sentences import Reading, Texts
from allmask.errors import DataError, UsageError

CHINESE = [{"source": "北京欢迎你，朋友", "target": "欢迎"}, {"source": '他说："好"\n走了', "target": "鸡🐔"}]
WESTERN = [{"source": "Größe; naïve, “café”", "target": "Ümit"}, {"source": "two\nlines", "target": "€ 5"}]
FIELDS = {"source": text, "target": text}


def read(path: Path, encoding: str | None = None, fields=None, **options) -> list[dict]:
    return [one.fields for one in read_records(DataFile(path, encoding=encoding), fields or FIELDS, **options)]


def write_csv(path: Path, rows: list[dict], encoding: str) -> None:
    with path.open("w", encoding=encoding, newline="") as stream:
        writer = csv.DictWriter(stream, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)


@pytest.mark.parametrize(
    ("encoding", "rows", "named"),
    [
        ("gb18030", CHINESE, True), ("cp1252", WESTERN, True), ("utf-8-sig", CHINESE, False),
        ("utf-8", CHINESE, True), ("utf-16", CHINESE, False), ("utf-32", CHINESE, False), ("utf-16-le", CHINESE, True),
    ],
)  # fmt: skip
def test_what_is_written_is_read(encoding: str, rows: list[dict], named: bool, tmp_path: Path):
    given = encoding if named else None
    write_csv(tmp_path / "a.csv", rows, encoding)
    assert read(tmp_path / "a.csv", given) == rows
    (tmp_path / "a.csv.gz").write_bytes(gzip.compress((tmp_path / "a.csv").read_bytes()))
    assert read(tmp_path / "a.csv.gz", given) == rows
    lines = "".join(json.dumps(row, ensure_ascii=False) + "\r\n" for row in rows)
    (tmp_path / "a.jsonl").write_bytes(lines.encode(encoding))
    assert read(tmp_path / "a.jsonl", given) == rows
    (tmp_path / "a.txt").write_bytes("\n\n".join(row["source"] for row in rows).encode(encoding))
    assert "".join(Texts([tmp_path / "a.txt"], Reading(encoding=given))) == "".join(
        line.strip() for row in rows for line in row["source"].split("\n")
    )


def test_a_long_file_is_converted_in_pieces(tmp_path: Path):
    rows = [{"source": f"北京{number}" * 50, "target": "京"} for number in range(10_000)]
    write_csv(tmp_path / "a.csv", rows, "gb18030")
    assert (tmp_path / "a.csv").stat().st_size > 3 << 20
    assert read(tmp_path / "a.csv", "gb18030") == rows


@pytest.mark.parametrize(
    ("line", "hint"),
    [
        ("a,Größe".encode("cp1252"), "if it is Western European, pass --encoding cp1252"),
        ("北京欢迎,你".encode("gb18030"), "if it is Chinese, pass --encoding gb18030"),
        ("a,鸡".encode("gb18030"), "if it is Chinese, pass --encoding gb18030"),
        (b"a,b\x81c", "name its encoding with --encoding"),
    ],
)
def test_the_byte_and_an_encoding_are_named(line: bytes, hint: str, tmp_path: Path):
    (tmp_path / "a.csv").write_bytes(b"source,target\nx,y\n" + line + b"\n")
    with pytest.raises(DataError) as caught:
        read(tmp_path / "a.csv")
    at = next(place for place, byte in enumerate(line) if byte > 127)
    offset = len(b"source,target\nx,y\n") + at
    said = f"a.csv:3: not UTF-8: 0x{line[at]:02x} at byte {at + 1} of the line (offset {offset})"
    assert caught.value.message.endswith(said)
    assert (caught.value.hint or "").startswith(f"{hint}, or save it as UTF-8")


def test_a_byte_that_is_not_of_the_named_encoding(tmp_path: Path):
    (tmp_path / "a.csv").write_bytes("source,target\n北京,京\n你,".encode("gb18030") + b"\xff\nx,y\n")
    with pytest.raises(DataError, match=r"a\.csv:3: not gb18030: 0xff at byte 4 of the line"):
        read(tmp_path / "a.csv", "gb18030")
    skipped: Counter[str] = Counter()
    found = read(tmp_path / "a.csv", "gb18030", on_bad_record="skip", skipped=skipped)
    assert len(found) == 2 and skipped == {"not gb18030": 1}
    with pytest.raises(UsageError, match="'gb18031' is unknown"):
        read(tmp_path / "a.csv", "gb18031")
    with pytest.raises(UsageError, match="'hex' is unknown"):
        read(tmp_path / "a.csv", "hex")


# ---- the usual encoding ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rows", "usual", "written", "said"),
    [
        (CHINESE, "gb18030", "gb18030", True),
        (WESTERN, "cp1252", "cp1252", True),
        ([{"source": "plain", "target": "x"}, {"source": "then", "target": "café"}], "cp1252", "cp1252", True),
        (CHINESE, "utf-16-le", "utf-16-le", True),
        (CHINESE, "gb18030", "utf-8", False),
        (CHINESE, "gb18030", "utf-8-sig", False),
        (CHINESE, "gb18030", "utf-16", False),
        ([{"source": "all of it", "target": "ASCII"}], "utf-16", "utf-8", False),
    ],
)
def test_the_usual_encoding_is_for_files_that_are_not_utf8(rows, usual, written, said, tmp_path: Path, caplog):
    caplog.set_level("INFO", "allmask")
    write_csv(tmp_path / "a.csv", rows, written)
    file = DataFile(tmp_path / "a.csv", usual_encoding=usual)
    assert [one.fields for one in read_records(file, FIELDS)] == rows
    assert (f"encoding: {usual}, as in training" in caplog.text) == said


def test_a_long_first_line_is_cut_between_its_bytes(tmp_path: Path):
    rows = [{"source": "北京" * 200_000, "target": "x"}]
    (tmp_path / "a.jsonl").write_bytes(json.dumps(rows[0], ensure_ascii=False).encode())
    assert len((tmp_path / "a.jsonl").read_bytes()) > 1 << 20
    file = DataFile(tmp_path / "a.jsonl", usual_encoding="gb18030")
    assert [one.fields for one in read_records(file, FIELDS)] == rows


def test_a_named_encoding_goes_before_the_usual_one(tmp_path: Path):
    write_csv(tmp_path / "a.csv", WESTERN, "cp1252")
    file = DataFile(tmp_path / "a.csv", encoding="cp1252", usual_encoding="gb18030")
    assert [one.fields for one in read_records(file, FIELDS)] == WESTERN
