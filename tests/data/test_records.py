"""Records: what four kinds of files hold is what was written to them; what is wrong is said with its line."""

from __future__ import annotations

import csv
import gc
import gzip
import json
import tracemalloc
from collections import Counter
from pathlib import Path

import pyarrow as arrow
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from pyarrow import parquet

from allmask.data import Bad, Maybe, expect_held_out, label, list_of, read_records, text, usable
from allmask.errors import DataError, UsageError

PAIR = {"source": text, "target": text}
ROWS = [{"source": "北京欢迎你", "target": "欢迎"}, {"source": 'He said, "no"\nand left', "target": "No 🙂"}]
SKIP = "or pass --on-bad-record skip"


def write_jsonl(path: Path, rows: list[dict]) -> None:
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")


def write_csv(path: Path, rows: list[dict]) -> None:
    with path.open("w", encoding="utf-8", newline="") as stream:
        writer = csv.DictWriter(stream, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)


def write_parquet(path: Path, rows: list[dict]) -> None:
    parquet.write_table(arrow.Table.from_pylist(rows), path)


WRITERS = {"jsonl": write_jsonl, "ndjson": write_jsonl, "json": write_jsonl, "csv": write_csv, "parquet": write_parquet}


@pytest.fixture
def give(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """`give("a.csv", b"…")` writes the file where the test runs and returns its name."""
    monkeypatch.chdir(tmp_path)

    def write(name: str, content: bytes | str) -> str:
        Path(name).write_bytes(content.encode() if isinstance(content, str) else content)
        return name

    return write


def read(path, fields=None, **options) -> list[dict]:
    return [record.fields for record in read_records(path, fields or PAIR, **options)]


def failure(path, fields=None, **options) -> DataError:
    with pytest.raises(DataError) as caught:
        read(path, fields, **options)
    return caught.value


# ---- what is written is what is read -----------------------------------------------------------------------


@pytest.mark.parametrize("kind", WRITERS)
def test_every_format_holds_the_same(kind: str, tmp_path: Path):
    path = tmp_path / f"data.{kind}"
    WRITERS[kind](path, ROWS)
    assert read(path) == ROWS


LINES = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=20)
TEXTS = LINES.filter(lambda words: words.strip())


@pytest.mark.parametrize("kind", ["jsonl", "csv", "parquet"])
@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(rows=st.lists(st.fixed_dictionaries({"source": TEXTS, "target": TEXTS}), min_size=1, max_size=5))
@example(rows=[{"source": "\r\n,a", "target": '"'}, {"source": "\u2028x\x85", "target": "\ufeffy\r"}])
def test_any_text_survives(kind: str, rows: list[dict], tmp_path: Path):
    path = tmp_path / f"data.{kind}"
    WRITERS[kind](path, rows)
    assert read(path) == rows


@pytest.mark.parametrize("kind", ["jsonl", "csv"])
def test_gzip(kind: str, tmp_path: Path):
    WRITERS[kind](tmp_path / f"data.{kind}", ROWS)
    (tmp_path / f"data.{kind}.gz").write_bytes(gzip.compress((tmp_path / f"data.{kind}").read_bytes()))
    assert read(tmp_path / f"data.{kind}.gz") == ROWS


def test_plain_text(give):
    path = give("corpus.txt", "\ufeff北京\r\n\r\n  欢迎 你\nlast")
    records = list(read_records(path, {"text": text}))
    assert [record.fields["text"] for record in records] == ["北京", "  欢迎 你", "last"]
    assert [record.where for record in records] == ["corpus.txt:1", "corpus.txt:3", "corpus.txt:4"]
    assert read(path, {"source": text, "target": Maybe(text)})[0] == {"source": "北京", "target": None}
    assert "has one field" in failure(path).message


@pytest.mark.parametrize("kind", ["jsonl", "csv"])
def test_a_byte_order_mark_and_windows_line_ends_do_no_harm(kind: str, give):
    rows = {"jsonl": '{"source": "a", "target": "b"}\r\n\r\n', "csv": "source,target\r\na,b\r\n\r\n"}[kind]
    assert read(give(f"data.{kind}", "\ufeff" + rows)) == [{"source": "a", "target": "b"}]


def test_only_the_requested_fields_with_their_locations(give):
    path = give("data.csv", 'id,source,target\n1,"two\nlines",b\n\n2,c,d\n')
    assert [(r.where, r.fields) for r in read_records(path, PAIR)] == [
        ("data.csv:2", {"source": "two\nlines", "target": "b"}),
        ("data.csv:5", {"source": "c", "target": "d"}),
    ]
    write_parquet(Path("data.parquet"), [{"id": 1, **row} for row in ROWS])
    records = list(read_records("data.parquet", {"target": text}))
    assert [(r.where, r.fields) for r in records] == [
        ("data.parquet: row 1", {"target": "欢迎"}),
        ("data.parquet: row 2", {"target": "No 🙂"}),
    ]


def test_typed_fields_are_the_same_from_every_format(tmp_path: Path):
    rows = [{"tokens": ["我", "来"], "score": 3, "name": "积极", "note": None}]
    fields = {"tokens": list_of(text), "score": float, "name": label, "note": Maybe(text)}
    for kind, writer in WRITERS.items():
        cells = [{**rows[0], "tokens": json.dumps(rows[0]["tokens"])}] if kind == "csv" else rows
        writer(tmp_path / f"data.{kind}", cells)
        assert read(tmp_path / f"data.{kind}", fields) == rows


# ---- what is wrong with a record ---------------------------------------------------------------------------

GOOD = '{"source": "北京", "target": "京"}'
BAD_LINES = {  # a line of a .jsonl -> the reason it is counted under, what is said, what to do
    '{"source": "a"}': ("missing field", 'no "target"; found "source"', f"fix the line, {SKIP}"),
    "{}": ("missing field", 'no "source"; found no fields at all', f"fix the line, {SKIP}"),
    '{"source": "a", "traget": "b"}': (
        "missing field", 'no "target"; found "source", "traget"',
        f'did you mean "target" by "traget"? fix the line, {SKIP}',
    ),
    '{"source": "", "target": "b"}': ('blank "source"', '"source" is empty', f"fix the line, {SKIP}"),
    '{"source": "a", "target": " \\u3000\\n"}': ('blank "target"', '"target" is blank', f"fix the line, {SKIP}"),
    '{"source": "a", "target": 3}': ("wrong type", '"target" is 3 (a number); expected text', f"fix the line, {SKIP}"),
    '{"source": null, "target": "b"}': ("wrong type", '"source" is null; expected text', f"fix the line, {SKIP}"),
    '{"source": ["a"], "target": "b"}': (
        "wrong type", '"source" is ["a"] (a list); expected text', f"fix the line, {SKIP}",
    ),
    '{"source": "a" "target": "b"}': (
        "malformed JSON", "not valid JSON: expecting ',' delimiter at column 16", f"fix the line, {SKIP}",
    ),
    '{"source": "北京", "target': (
        "malformed JSON", "not valid JSON: unterminated string starting at column 18", f"fix the line, {SKIP}",
    ),
    '[{"source": "a"}]': (
        "not an object", 'expected a JSON object, found [{"source": "a"}]',
        f"if the file is one array, call it .json, {SKIP}",
    ),
    "{": (
        "malformed JSON",
        "not valid JSON: expecting property name enclosed in double quotes at column 2",
        f"write one object a line (jq -c . in.json > out.jsonl), {SKIP}",
    ),
    '"text"': ("not an object", 'expected a JSON object, found "text"', f"fix the line, {SKIP}"),
    '{"source": "a", "source": "c", "target": "b"}': (
        "duplicate key", '"source" occurs twice in one object', f"fix the line, {SKIP}",
    ),
    '{"source": "a\\u0000", "target": "b"}': (
        "NUL byte", '"source" has a NUL byte at character 2', f"fix the line, {SKIP}",
    ),
    '{"source": "a\\ud83d", "target": "b"}': (
        "broken character", '"source" has half a surrogate pair, \\ud83d, at character 2', f"fix the line, {SKIP}",
    ),
    '{"source": %s, "target": "b"}' % ("9" * 5000): (
        "malformed JSON", "not valid JSON: a number too long or nested too deeply", f"fix the line, {SKIP}",
    ),
    "[" * 100_000: ("malformed JSON", "not valid JSON: a number too long or nested too deeply", None),
    b'{"source": "\xb1\xb1\xbe\xa9", "target": "b"}': (
        "not UTF-8", "not UTF-8: 0xb1 at byte 13 of the line (offset 50)",
        f"if it is Chinese, pass --encoding gb18030, or save it as UTF-8, {SKIP}",
    ),
    b'{"source": "\xff", "target": "b"}': (
        "not UTF-8", "not UTF-8: 0xff at byte 13 of the line (offset 50)",
        f"name its encoding with --encoding, or save it as UTF-8, {SKIP}",
    ),
    b'{"source": "a\0", "target": "b"}': (
        "NUL byte", "NUL byte at byte 14 of the line (offset 51)",
        f"the file may be damaged, or UTF-16: pass --encoding utf-16, {SKIP}",
    ),
    '{"source": "%s", "target": "b"}' % ("a" * 200_000): (
        "line too long", "the line is longer than 200,000 bytes", f"split it, {SKIP}",
    ),
}  # fmt: skip


@pytest.fixture
def no_collection():
    """Whatever is collected at the bottom of a deep recursion cannot be finalized, which pytest would report."""
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("no_collection")
@pytest.mark.parametrize("line", BAD_LINES, ids=lambda line: str(line)[:40])
def test_a_bad_line_is_named_or_counted(line: str | bytes, give):
    raw = line.encode() if isinstance(line, str) else line
    path = give("train.jsonl", GOOD.encode() + b"\n" + raw + b"\n" + GOOD.encode())
    reason, what, hint = BAD_LINES[line]
    error = failure(path, max_line=200_000)
    assert (error.message, error.exit_code) == (f"train.jsonl:2: {what}", 3)
    assert hint is None or error.hint == hint
    skipped = Counter()
    assert len(read(path, on_bad_record="skip", skipped=skipped, max_line=200_000)) == 2
    assert skipped == {reason: 1}


BAD_CSV = {  # lines after the header -> where, the reason, what is said; how many records are left
    "a\nc,d": (2, "wrong number of columns", "1 column; the header has 2 (source, target)", 1),
    "a,b,c\nc,d": (2, "wrong number of columns", "3 columns; the header has 2 (source, target)", 1),
    "a,b\nc,\n": (3, 'blank "target"', '"target" is empty', 1),
    'a,"b\nc,d\n\ne,f': (2, "unclosed quote", "a quoted cell begins here and never ends", 2),
    '"a"b,c\nc,d': (2, "malformed csv", "not valid csv: ',' expected after '\"'", 1),
    b'a,b\n"two\n\xff lines",d\n"e\n",f': (4, "not UTF-8", "not UTF-8: 0xff at byte 1 of the line (offset 23)", 2),
    b"a\0,b\nc,d": (2, "NUL byte", "NUL byte at byte 2 of the line (offset 15)", 1),
    "a," + "b" * 60_000 + "\nc,d": (2, "line too long", "the line is longer than 50,000 bytes", 1),
}


@pytest.mark.parametrize("rows", BAD_CSV, ids=lambda rows: str(rows)[:30])
def test_a_bad_row_of_a_csv_is_named_or_counted(rows: str | bytes, give):
    line, reason, what, left = BAD_CSV[rows]
    path = give("train.csv", b"source,target\n" + (rows.encode() if isinstance(rows, str) else rows))
    error = failure(path, max_line=50_000)
    assert (error.message, error.exit_code) == (f"train.csv:{line}: {what}", 3)
    assert error.hint is not None and error.hint.endswith(SKIP)
    skipped = Counter()
    assert len(read(path, on_bad_record="skip", skipped=skipped, max_line=50_000)) == left
    assert skipped == {reason: 1}


def test_a_quote_that_never_closes_does_not_swallow_the_file(give):
    many = "".join(f"{number},b\n" for number in range(30_000))
    path = give("train.csv", 'source,target\na,"b\n' + many)
    assert "goes on for more than 50,000 bytes" in failure(path, max_line=50_000).message
    assert len(read(path, on_bad_record="skip", max_line=50_000)) == 30_000


def test_a_long_cell_is_no_error(give):
    """The csv module by itself refuses cells over 131,072 characters."""
    path = give("train.csv", f'source,target\n"{"长" * 200_000}",b\n')
    assert len(read(path)[0]["source"]) == 200_000


def test_bad_rows_of_a_parquet(give):
    raw = arrow.array([b"a", b"x\xff", b"c", b"d"])
    broken = arrow.StringArray.from_buffers(4, *raw.buffers()[1:])  # nothing checks it, as in the wild
    target = arrow.array(["a", "b", None, "  "])
    parquet.write_table(arrow.table({"source": broken, "target": target}), give("t.parquet", b""))
    assert failure("t.parquet").message == 't.parquet: row 2: "source" is not UTF-8: 0xff at byte 2'
    skipped = Counter()
    assert read("t.parquet", on_bad_record="skip", skipped=skipped) == [{"source": "a", "target": "a"}]
    assert skipped == {"not UTF-8": 1, "wrong type": 1, 'blank "target"': 1}
    write_parquet(Path("n.parquet"), [{"source": "a", "target": 3}])
    error = failure("n.parquet")
    assert error.message == 'n.parquet: row 1: "target" is 3 (a number); expected text'
    assert error.hint == f"fix the row, {SKIP}"
    write_parquet(Path("l.parquet"), [{"source": "a" * 2000, "target": "b"}])
    assert failure("l.parquet", max_line=1000).message == 'l.parquet: row 1: "source" is longer than 1,000 characters'
    message = failure("l.parquet", max_line=1000, on_bad_record="skip").message
    assert message == "l.parquet: no record can be used; skipped 1 × cell too long"  # a parquet file has no lines


# ---- tagged text in columns (CoNLL) ------------------------------------------------------------------------

TAGGED = {"tokens": list_of(lambda value: value), "tags": list_of(text)}


def written(folder: Path, content: str, name: str = "a.conll") -> Path:
    (folder / name).write_text(content, encoding="utf-8")
    return folder / name


@pytest.mark.parametrize("name", ["a.conll", "a.bio", "a.txt"])
def test_sentences_in_columns(tmp_path: Path, name: str):
    content = "-DOCSTART- -X- O O\n\nEU NNP B-NP B-ORG\nrejects VBZ B-VP O\n\n\n北\tO\n\u3000 O\r\n京 B-LOC"
    rows = list(read_records(written(tmp_path, content, name), TAGGED))
    assert [row.fields for row in rows] == [
        {"tokens": ["EU", "rejects"], "tags": ["B-ORG", "O"]},
        {"tokens": ["北", "\u3000", "京"], "tags": ["O", "O", "B-LOC"]},
    ]
    assert [row.where for row in rows] == [f"{tmp_path / name}:3", f"{tmp_path / name}:7"]


def test_bad_sentences_in_columns_are_named_or_skipped(tmp_path: Path):
    file = written(tmp_path, "a O\nb\n\nc O\n")
    with pytest.raises(DataError, match=r"a.conll:2: 1 column; the sentence began with 2"):
        list(read_records(file, TAGGED))
    skipped: Counter[str] = Counter()
    assert len(list(read_records(file, TAGGED, "skip", skipped))) == 1 and skipped == {"wrong number of columns": 1}


def test_without_a_second_column_there_are_no_tags(tmp_path: Path):
    with pytest.raises(DataError, match=r'a.conll:1: no "tags"'):
        list(read_records(written(tmp_path, "a\nb\n"), TAGGED))


# ---- what is wrong with a file -----------------------------------------------------------------------------

BAD_FILES = {  # name -> content, what is said
    "empty.jsonl": (b"", "empty.jsonl: the file is empty"),
    "empty.parquet": (b"", "empty.parquet: the file is empty"),
    "blank.jsonl": (b"\xef\xbb\xbf\n  \r\n\n", "blank.jsonl: there are no records in it"),
    "blank.csv": (b"\n\n", "blank.csv: nothing but blank lines"),
    "header.csv": (b"source,target\n", "header.csv: there are no records in it"),
    "misspelt.csv": (b"source,traget\na,b\n", 'misspelt.csv:1: no column "target"; found "source", "traget"'),
    "late.csv": (b"\nsource\na\n", 'late.csv:2: no column "target"; found "source"'),
    "twice.csv": (b"source,target,source\na,b,c\n", 'twice.csv:1: two columns are called "source"'),
    "latin.csv": (
        b"source,t\xe4rget\na,b\n",
        "latin.csv:1: the header cannot be read: not UTF-8: 0xe4 at byte 9 of the line (offset 8)",
    ),
    "wide.jsonl": (b"\xff\xfea", "wide.jsonl: not utf-16: truncated data"),
    "data.docx": (b"x", 'data.docx: unknown kind of file ".docx"'),
    "data": (b"x", 'data: unknown kind of file ""'),
    "data.gz": (b"x", 'data.gz: unknown kind of file ".gz"'),
    "data.parquet.gz": (b"x", 'data.parquet.gz: unknown kind of file ".gz"'),
    "plain.jsonl.gz": (b"x", "plain.jsonl.gz: cannot be decompressed: Not a gzipped file (b'x')"),
    "nothing.jsonl.gz": (gzip.compress(b""), "nothing.jsonl.gz: there are no records in it"),
}


@pytest.mark.parametrize("mode", ["stop", "skip"])
@pytest.mark.parametrize("name", BAD_FILES)
def test_a_bad_file_is_an_error_in_both_modes(name: str, mode: str, give):
    content, what = BAD_FILES[name]
    error = failure(give(name, content), on_bad_record=mode)
    assert error.message == what
    assert error.hint


def test_hints_for_whole_files(give):
    hint = failure(give("a.csv", "source,traget\na,b")).hint
    assert hint and hint.startswith('did you mean "target" by "traget"? fix the names of the columns, or ')
    assert hint.endswith(" name its column: --columns target=traget")
    hint = failure(give("c.docx", "x")).hint
    assert (
        hint
        == "expected one of .jsonl, .ndjson, .json, .csv, .tsv, .xlsx, .parquet, .txt, .conll, .bio, or .gz of a text"
    )


def test_paths_that_are_no_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    assert failure(tmp_path).message == f"{tmp_path}: is a folder"
    assert failure(tmp_path / "none.jsonl").message == f"{tmp_path}/none.jsonl: no such file"
    assert "File name too long" in failure(tmp_path / ("x" * 300 + ".jsonl")).message
    write_jsonl(tmp_path / "secret.jsonl", ROWS)

    def refuse(*_):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "open", refuse)
    assert failure(tmp_path / "secret.jsonl").message == f"{tmp_path}/secret.jsonl: cannot be read: Permission denied"


def test_a_file_is_checked_before_the_first_record_is_asked_for(give):
    with pytest.raises(DataError, match="is empty"):
        read_records(give("a.jsonl", b""), PAIR)


@pytest.mark.parametrize("cut", [0.3, 0.9, -4])
def test_cut_off_files(cut: float, give):
    rows = [{"source": f"文 {number}", "target": "b"} for number in range(2000)]
    write_jsonl(Path(give("a.jsonl", b"")), rows)
    packed = gzip.compress(Path("a.jsonl").read_bytes())
    end = cut if cut < 0 else int(cut * len(packed))
    assert "cannot be decompressed" in failure(give("cut.jsonl.gz", packed[: int(end)])).message
    write_parquet(Path("a.parquet"), rows)
    whole = Path("a.parquet").read_bytes()
    end = cut if cut < 0 else int(cut * len(whole))
    assert "cut.parquet: not a readable parquet file" in failure(give("cut.parquet", whole[: int(end)])).message


def test_a_parquet_without_rows_or_with_other_columns(give):
    schema = arrow.schema({"source": arrow.string(), "traget": arrow.string()})
    parquet.write_table(schema.empty_table(), give("a.parquet", b""))
    assert failure("a.parquet", {"source": text}).message == "a.parquet: there are no records in it"
    error = failure("a.parquet", on_bad_record="skip")
    assert error.message == 'a.parquet: no column "target"; found "source", "traget"'


def test_all_skipped_is_an_error(give):
    path = give("a.jsonl", '{"source": ""}\n{"source": " "}\n[]\n')
    skipped = Counter({'blank "source"': 5})
    error = failure(path, {"source": text}, on_bad_record="skip", skipped=skipped)
    assert error.message == 'a.jsonl: no record can be used; skipped 2 × blank "source", 1 × not an object'
    assert error.hint == 'the first: a.jsonl:1: "source" is empty\nfix the line'
    assert skipped == {'blank "source"': 7, "not an object": 1}


def test_all_skipped_for_reasons_found_at_two_stages(give):
    """The message counts the records that cannot be read and those whose fields do not fit together."""

    def differ(fields: dict[str, str]) -> None:
        if fields["source"] == fields["target"]:
            raise Bad("copy", "the target is the source")

    same = '{"source": "a", "target": "a"}'
    path = Path(give("a.jsonl", f"{same}\n{{\n{same}\n[]\n{same}\n"))
    skipped = Counter({"copy": 1})
    records = usable(path, read_records(path, PAIR, "skip", skipped), differ, "skip", skipped)
    with pytest.raises(DataError) as caught:
        list(records)
    what = "no record can be used; skipped 3 × copy, 1 × malformed JSON, 1 × not an object"
    assert caught.value.message == f"a.jsonl: {what}"
    assert caught.value.hint == "the first: a.jsonl:1: the target is the source\nfix the line"
    assert skipped == {"copy": 4, "malformed JSON": 1, "not an object": 1}
    with pytest.raises(DataError, match=r"a\.jsonl:1: the target is the source"):
        list(usable(path, read_records(path, PAIR, "skip"), differ, "stop"))


def test_a_parquet_without_the_optional_columns_has_its_rows(give):
    write_parquet(Path("a.parquet"), [{"source": "a"}, {"source": "b"}])
    assert read("a.parquet", {"target": Maybe(text)}) == [{"target": None}] * 2


def test_misuse(give):
    path = give("a.jsonl", GOOD)
    with pytest.raises(UsageError, match="on_bad_record"):
        read_records(path, PAIR, on_bad_record="ignore")
    with pytest.raises(UsageError, match="at least one field"):
        read_records(path, {})
    with pytest.raises(UsageError, match="expected str, float or a checker"):
        read_records(path, {"source": int})


# ---- any bytes at all --------------------------------------------------------------------------------------


@st.composite
def damaged(draw) -> bytes:
    """A good file with a few bytes replaced, removed or put in."""
    seed = draw(st.sampled_from([(GOOD + "\n") * 3, 'source,target\n"a\nb",c\nd,e\n']))
    data = bytearray(seed.encode())
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, len(data) - 1))
        data[at : at + draw(st.integers(0, 1))] = draw(st.sampled_from([b'"', b"\n", b"\r", b"\0", b"\xff", b",", b""]))
    return bytes(data)


@pytest.mark.parametrize("kind", ["jsonl", "csv", "txt", "parquet", "jsonl.gz"])
@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(content=st.binary(max_size=80) | damaged())
def test_any_bytes_give_records_or_a_data_error(kind: str, content: bytes, tmp_path: Path):
    path = tmp_path / f"data.{kind}"
    path.write_bytes(content)
    for mode in ("stop", "skip"):
        try:
            found = read(path, {"source": text}, on_bad_record=mode)
        except DataError as error:
            assert error.message.startswith(str(path)) and error.hint
        else:
            assert found and all(fields["source"].strip() for fields in found)


# ---- memory ------------------------------------------------------------------------------------------------


def peak_of(records) -> tuple[int, int]:
    """How many records there are, and the most bytes that Python held while reading them."""
    tracemalloc.start()
    try:
        count = sum(1 for _ in records)
        return count, tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("kind", ["jsonl", "csv"])
def test_a_file_is_never_in_memory_as_a_whole(kind: str, tmp_path: Path):
    path = tmp_path / f"data.{kind}"
    WRITERS[kind](path, [{"source": "a" * 1000, "target": "b"}] * 5000)
    count, peak = peak_of(read_records(path, PAIR))
    assert count == 5000 and peak < 500_000 < path.stat().st_size / 8


def test_a_parquet_is_read_in_pieces(tmp_path: Path):
    path = tmp_path / "data.parquet"
    table = arrow.Table.from_pylist([{"source": f"{number} " * 300, "target": "b"} for number in range(5000)])
    parquet.write_table(table, path, row_group_size=500, compression="none", use_dictionary=False)
    size = table.nbytes
    del table
    before = arrow.total_allocated_bytes()
    records = read_records(path, PAIR)
    next(records)
    assert arrow.total_allocated_bytes() - before < size / 4
    assert sum(1 for _ in records) == 4999


@pytest.mark.parametrize("kind", ["jsonl", "csv", "txt"])
def test_an_endless_line_is_refused_without_reading_it_into_memory(kind: str, tmp_path: Path):
    path = tmp_path / f"data.{kind}"
    first = {"jsonl": '{"source": "a"}', "csv": "source", "txt": "a"}[kind]
    path.write_text(f"{first}\n{'x' * 20_000_000}\n{first}\n")
    count, peak = peak_of(read_records(path, {"source": text}, "skip", max_line=100_000))
    assert count == (1 if kind == "csv" else 2) and peak < 4_000_000
    assert failure(path, {"source": text}).message == f"{path}:2: the line is longer than 10,000,000 bytes"


# ---- what is held out ----------------------------------------------------------------------------------------------


def test_training_files_are_refused_for_evaluation(give):
    for name, content in (("a.jsonl", "1\n"), ("copy.jsonl", "1\n"), ("other.jsonl", "2\n"), ("longer.jsonl", "33\n")):
        give(name, content)
    Path("link.jsonl").symlink_to("a.jsonl")
    expect_held_out(["a.jsonl"], ["other.jsonl", "longer.jsonl"])
    expect_held_out(["a.jsonl"], [])
    expect_held_out(["absent.jsonl", "."], ["absent.jsonl", "."])  # whoever reads them says it
    for same in ("a.jsonl", "./a.jsonl", "link.jsonl"):
        with pytest.raises(UsageError, match=r"(a|link)\.jsonl: is also trained on"):
            expect_held_out(["other.jsonl", "a.jsonl"], ["longer.jsonl", same])
    with pytest.raises(UsageError, match=r"--eval copy.jsonl: has the same content as a.jsonl, which is also "):
        expect_held_out([Path("a.jsonl")], [Path("copy.jsonl")])
