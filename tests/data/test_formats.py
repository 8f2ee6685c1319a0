"""Formats: what csv, json and openpyxl write is what is read, whatever the separator."""

from __future__ import annotations

import csv
import datetime
import gzip
import json
from pathlib import Path

import pyarrow
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pyarrow import parquet

from allmask.data import DataFile, Maybe, formats, label, list_of, parquet_pages, read_records, text
from allmask.data.formats import columns_of
from allmask.errors import DataError, ResourceError
from tests import hostile

PAIR = {"source": text, "target": text}


def read(path: Path, fields=None) -> list[tuple[str, dict]]:
    return [(one.where.removeprefix(str(path)), one.fields) for one in read_records(path, fields or PAIR)]


def pairs(*rows: str) -> list[dict]:
    return [dict(zip(PAIR, row.split("|"), strict=True)) for row in rows]


# ---- csv ---------------------------------------------------------------------------------------------------

TEXTS = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=20).filter(str.strip)


@pytest.mark.parametrize("separator", [",", ";", "|", "\t"])
@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(rows=st.lists(st.fixed_dictionaries({"source": TEXTS, "n": TEXTS, "target": TEXTS}), min_size=1, max_size=5))
def test_any_separator_is_found(separator: str, rows: list[dict], tmp_path: Path):
    if separator == "\t":  # where quotes may mean nothing
        rows = [{name: " ".join(value.split()) or "x" for name, value in row.items()} for row in rows]
    path = tmp_path / "a.csv"
    with path.open("w", encoding="utf-8", newline="") as stream:
        writer = csv.DictWriter(stream, list(rows[0]), delimiter=separator)
        writer.writeheader()
        writer.writerows(rows)
    assert [one.fields for one in read_records(path, dict.fromkeys(rows[0], text))] == rows


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("source;target\na, b, c;d\n", "a, b, c|d"),
        ("source,target\na;b;c,d\n", "a;b;c|d"),
        ('"source, long";"source";target\nx;a,b;c\n', "a,b|c"),
        ("source,note;x,target\na,b,c\n", "a|c"),  # a header with both
        ("sep=;\nsource;target\na,a;b\n", "a,a|b"),
        ('"sep=|"\r\nsource|target\r\na|b\r\n', "a|b"),
        (",source,target\n0,a,b\n", "a|b"),  # the numbers of pandas
        ("source;target;\na;b;\n", "a|b"),
        ('source;target\n"a ""x""; y\nz";b\n', 'a "x"; y\nz|b'),
    ],
)
def test_separators(content: str, expected: str, tmp_path: Path):
    (tmp_path / "a.csv").write_text(content, encoding="utf-8")
    assert [fields for _, fields in read(tmp_path / "a.csv")] == pairs(expected)


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        (['"a" said b\tc', 'd\te "f"'], [(":2", '"a" said b|c'), (":3", 'd|e "f"')]),  # as in GLUE
        (['"a\tb', 'c\td"'], [(":2", '"a|b'), (":3", 'c|d"')]),
        (['"a\tb"\tc', "d\te"], [(":2", "a\tb|c"), (":3", "d|e")]),
        (['"a', 'b"\tc', "d\te"], [(":2", "a\nb|c"), (":4", "d|e")]),
        (['x\t"a ""q""', 'b"', "d\te"], [(":2", 'x|a "q"\nb'), (":4", "d|e")]),
        (["北京\t京"], [(":2", "北京|京")]),
    ],
)
def test_tabs_with_and_without_quotes(lines: list[str], expected: list[tuple[str, str]], tmp_path: Path):
    for name in ("a.tsv", "a.csv"):
        (tmp_path / name).write_text("\n".join(["source\ttarget", *lines, ""]), encoding="utf-8")
        assert read(tmp_path / name) == [(where, *pairs(row)) for where, row in expected]


def test_the_columns_of_a_table(tmp_path: Path):
    (tmp_path / "a.csv").write_text("年龄;income\n1;2\n", encoding="utf-8")
    assert columns_of(tmp_path / "a.csv", 1000) == ["年龄", "income"]
    assert columns_of(tmp_path / "none.csv", 1000) is None


# ---- JSON --------------------------------------------------------------------------------------------------

VALUES = st.recursive(st.none() | st.integers() | st.text(max_size=5), lambda inner: st.lists(inner, max_size=2))


@settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    rows=st.lists(st.fixed_dictionaries({"source": TEXTS, "target": TEXTS, "x": VALUES}), min_size=1, max_size=4),
    indent=st.sampled_from([None, 0, 2]), start=st.sampled_from(["", "\ufeff", "\n \r\n"]),
)  # fmt: skip
def test_arrays(rows: list[dict], indent: int | None, start: str, tmp_path: Path):
    path, written = tmp_path / "a.json", start + json.dumps(rows, ensure_ascii=False, indent=indent)
    path.write_text(written, encoding="utf-8", newline="")
    fields = {**PAIR, "x": Maybe(lambda value: value)}
    found = read(path, fields)
    blank = [isinstance(row["x"], str) and not row["x"].strip() for row in rows]
    assert [one for _, one in found] == [row | ({"x": None} if no else {}) for row, no in zip(rows, blank, strict=True)]
    for where, _ in found:  # a record begins on its line
        assert "{" in written.split("\n")[int(where[1:]) - 1]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('[{"source": "a", "target": "b"},\n {"source": "c"}]', 'a.json:2: no "target"; found "source"'),
        ('[\n{"source": "a", "target": "b"}\n{"source": "c"}]', "a.json:3: not valid JSON: expecting ',' or ']'"),
        ('[{"source": "a", "target": "b"},\n{"source": ]', "a.json:2: not valid JSON: expecting value at column 12"),
        ('[{"source": "a", "target": "b"}] x', "a.json:1: not valid JSON: more text after the array at column 34"),
        ('[{"source": "a", "target": "b"}', "a.json:1: not valid JSON: expecting ',' or ']' at column 32"),
        ('[\n3]', "a.json:2: expected a JSON object, found 3"),
        ('[{"source": "a", "source": "b"}]', 'a.json:1: "source" occurs twice in one object'),
        ("[]", "a.json: there are no records in it"),
        (b'[{"source": "a",\n"target": "\xff"}]', "a.json:2: not UTF-8: 0xff"),
    ],
)  # fmt: skip
def test_what_is_wrong_with_an_array(content: str | bytes, message: str, tmp_path: Path):
    (tmp_path / "a.json").write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(DataError) as caught:
        read(tmp_path / "a.json")
    assert message in caught.value.message and caught.value.hint


# ---- Excel -------------------------------------------------------------------------------------------------


def test_excel(tmp_path: Path):
    openpyxl = pytest.importorskip("openpyxl")
    book = openpyxl.Workbook()
    book.create_sheet("notes", 0)  # empty
    sheet = book["Sheet"]
    day = datetime.date(2024, 2, 1)
    for row in ([], ["评论", "stars", None, "day"], ["很好\n吃", 5, None, day], [], [17, 4.5, None, None]):
        sheet.append(row)
    book.save(tmp_path / "a.xlsx")
    rows = list(read_records(DataFile(tmp_path / "a.xlsx", whole=True), {"text": text, "label": label}))
    assert [one.where.removeprefix(str(tmp_path)) for one in rows] == ["/a.xlsx: row 3", "/a.xlsx: row 5"]
    assert [one.fields for one in rows] == [{"text": "很好\n吃", "label": "5"}, {"text": "17", "label": "4.5"}]
    assert rows[0].row == {"评论": "很好\n吃", "stars": "5", "column 3": "", "day": "2024-02-01 00:00:00"}
    assert columns_of(tmp_path / "a.xlsx", 1000) == ["评论", "stars", "column 3", "day"]
    with pytest.raises(DataError, match=r'a\.xlsx: row 2: no column "tokens"'):
        read(tmp_path / "a.xlsx", {"tokens": list_of(text)})
    (tmp_path / "b.xlsx").write_bytes((tmp_path / "a.xlsx").read_bytes()[:900])
    with pytest.raises(DataError, match=r"b\.xlsx: not a readable \.xlsx file"):
        read(tmp_path / "b.xlsx")


def test_excel_without_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(__import__("sys").modules, "openpyxl", None)
    (tmp_path / "a.xlsx").write_bytes(b"x")
    with pytest.raises(ResourceError) as caught:
        read(tmp_path / "a.xlsx")
    assert "pip install openpyxl" in (caught.value.hint or "")


# ---- compressed data that is large, but not absurd -----------------------------------------------------------------


def test_parquet_texts_that_are_stored_once_are_read_as_often_as_they_occur(tmp_path: Path):
    """A dictionary of 4 MB, beginnings that texts share, and lists; what pyarrow reads is the reference."""
    long, rows = "北京" * 700_000, 7
    table = pyarrow.table(
        {
            "source": [long if row % 2 else "短" for row in range(rows)],
            "target": ["prefix " * 1_000 + str(row) for row in range(rows)],
            "tokens": [["一", "只", "猫"] * (row + 1) for row in range(rows)],
        }
    )
    encodings = {"target": "DELTA_BYTE_ARRAY"}
    parquet.write_table(table, tmp_path / "a.parquet", use_dictionary=["source", "tokens"], column_encoding=encodings,
                        dictionary_pagesize_limit=1 << 30, compression="zstd")  # fmt: skip
    found = list(read_records(tmp_path / "a.parquet", {"source": text, "target": text, "tokens": list_of(text)}))
    assert [record.fields for record in found] == table.to_pylist()


def test_the_size_of_a_dictionary_decides_how_many_rows_are_decoded_at_once(tmp_path: Path):
    """Each text of a dictionary has four bytes for its length before it."""
    texts = ["a" * 3_000_000, "b" * 999_000]
    file = tmp_path / "a.parquet"
    for compression in ("none", "zstd"):
        parquet.write_table(pyarrow.table({"source": texts * 9}), file, compression=compression,
                            dictionary_pagesize_limit=1 << 30)  # fmt: skip
        metadata = parquet.read_metadata(file)
        column, schema = metadata.row_group(0).column(0), metadata.schema.column(0)
        with file.open("rb") as stream:
            chunk = parquet_pages.measure(stream, file.stat().st_size, column, schema, 1 << 30)
        assert chunk.dictionary == 3_999_008
        assert formats._parquet_measured(DataFile(file), metadata, ["source"]) == ((16 << 20) // 3_999_008, [])


def test_rows_and_strings_of_an_excel_file_are_not_bombs(tmp_path: Path):
    """More elements than a part other than rows may have, but in rows; and strings that cells share."""
    openpyxl = pytest.importorskip("openpyxl")
    book = openpyxl.Workbook(write_only=True)
    sheet = book.create_sheet()
    sheet.append(["source", *map(str, range(60))])
    for row in range(1_000):
        sheet.append([f"文 {row}", *range(60)])
    book.save(tmp_path / "a.xlsx")
    found = [record.fields["source"] for record in read_records(tmp_path / "a.xlsx", {"source": text})]
    assert found == [f"文 {row}" for row in range(1_000)]
    found = list(read_records(hostile.many_strings(tmp_path / "b", 100), {"source": text, "target": text}))
    assert [record.fields for record in found] == [{"source": "a cat", "target": "一只猫"}]


def test_a_gz_file_that_shrinks_a_lot_is_read(tmp_path: Path):
    line = json.dumps({"source": "一只猫坐在垫子上。" * 20}, ensure_ascii=False) + "\n"
    with gzip.open(tmp_path / "a.jsonl.gz", "wt", encoding="utf-8") as stream:
        stream.write(line * 2_000)
    assert (tmp_path / "a.jsonl.gz").stat().st_size * 100 < len(line.encode()) * 2_000 < 32 << 20
    assert sum(1 for _ in read_records(tmp_path / "a.jsonl.gz", {"source": text})) == 2_000
