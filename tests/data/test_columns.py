"""Columns: the field's own name wins, aliases are said, two that could fit are an error."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pyarrow as arrow
import pytest
from pyarrow import parquet

from allmask.data import DataFile, Maybe, label, list_of, read_records, text
from allmask.data.columns import parse_columns, parse_names
from allmask.errors import DataError, UsageError

PAIR = {"source": text, "target": text}
TEXTS = {"text": text, "text_b": Maybe(text), "label": label}
TAGGED = {"tokens": list_of(text), "tags": list_of(text)}


@pytest.fixture
def said(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(logging.getLogger("allmask"), "propagate", True)  # a command may have turned it off
    caplog.set_level(logging.INFO, "allmask")
    return lambda: [record.getMessage() for record in caplog.records]


def table(folder: Path, header: str, *rows: str, name: str = "a.csv") -> Path:
    (folder / name).write_text("\n".join([header, *(rows or [",".join("abcdefgh"[: header.count(",") + 1])])]))
    return folder / name


def first(path: Path, fields, **how) -> dict:
    return next(read_records(DataFile(path, **how), fields)).fields


@pytest.mark.parametrize(
    ("header", "fields", "found", "message"),
    [
        ("target,source", PAIR, "ba", None),
        ("Body,Subject", PAIR, "ab", "columns: Body → source, Subject → target"),
        ("Source,TARGET", PAIR, "ab", "columns: Source → source, TARGET → target"),
        ("content,source,title,target", PAIR, "bd", None),
        ("title,abstract", PAIR, "ba", "columns: abstract → source, title → target"),
        ("headline,article", PAIR, "ba", "columns: article → source, headline → target"),
        ("标题,正文", PAIR, "ba", "columns: 正文 → source, 标题 → target"),
        ("摘要,题目", PAIR, "ab", "columns: 摘要 → source, 题目 → target"),
        ("摘要,正文", PAIR, "ba", "columns: 正文 → source, 摘要 → target"),
        ("邮件内容,邮件标题", PAIR, "ab", "columns: 邮件内容 → source, 邮件标题 → target"),
        ("description,text,title", PAIR, "bc", "columns: text → source, title → target"),
        ("description,synopsis", PAIR, "ab", "columns: description → source, synopsis → target"),
        ("sentence,label", TEXTS, ["a", None, "b"], "columns: sentence → text"),
        ("review,stars", TEXTS, ["a", None, "b"], "columns: review → text, stars → label"),
        ("premise,hypothesis,label", TEXTS, "abc", "columns: premise → text, hypothesis → text_b"),
        ("Text 1,Text 2,label", TEXTS, "abc", "columns: Text 1 → text, Text 2 → text_b"),
        ("text,title,content,label", TEXTS, ["a", None, "d"], None),
    ],
)
def test_names_and_aliases(header: str, fields: dict, found, message: str | None, tmp_path: Path, said):
    path = table(tmp_path, header)
    assert list(first(path, fields).values()) == list(found)
    assert said() == ([] if message is None else [message])
    keys = header.split(",")
    row = dict(zip(keys, "abcdefgh", strict=False))
    (tmp_path / "a.jsonl").write_text(json.dumps(row, ensure_ascii=False))
    assert list(first(tmp_path / "a.jsonl", fields).values()) == list(found)


def test_then_what_a_model_learnt_from(tmp_path: Path, said):
    """It goes before the name of the field, since a file like that of the run has both."""
    path, usual = table(tmp_path, "source,Inhalt,body"), {"source": "Inhalt", "target": "Betreff"}
    assert first(path, {"source": text}, usual=usual) == {"source": "b"} and said() == ["columns: Inhalt → source"]
    assert first(path, {"source": text}, usual=usual, columns={"source": "body"}) == {"source": "c"}
    other = table(tmp_path, "id;body", "1;x", name="b.csv")
    assert first(other, {"source": text}, usual=usual) == {"source": "x"}


def test_what_the_user_says_goes_first(tmp_path: Path, said):
    path = table(tmp_path, "source,target,Long Text")
    assert first(path, PAIR, columns={"source": "long_text"}) == {"source": "c", "target": "b"}
    assert said() == ["columns: Long Text → source"]
    assert first(path, PAIR, columns={"source": "target", "target": "source"}) == {"source": "b", "target": "a"}


@pytest.mark.parametrize(
    ("header", "fields", "columns", "message", "hint"),
    [
        ("text,title,summary", PAIR, {}, '"title" and "summary" could both be "target"',
         "say which: --columns target=title, or target=summary"),
        ("article,abstract,title", PAIR, {}, '"article" and "abstract" could both be "source"',
         "say which: --columns source=article, or source=abstract"),
        ("body,subject", PAIR, {"source": "boddy"},
         'no column "boddy"; found "body", "subject" (--columns source=boddy)',
         "did you mean --columns source=body?"),
        ("foo,title", PAIR, {}, 'no column "source"; found "foo", "title"',
         "fix the names of the columns, or name its column: --columns source=NAME"),
        ("Nr,Note", TEXTS, {}, 'no column "text"; found "Nr", "Note"',
         "fix the names of the columns, or name their columns: --columns text=NAME,label=NAME"),
        ("Nr,Mail body,Kurz", PAIR, {}, 'no column "source"; found "Nr", "Mail body", "Kurz"',
         'fix the names of the columns, or name their columns: --columns "source=Mail body,target=NAME"'),
        ("编号,来信正文,主题", PAIR, {}, 'no column "source"; found "编号", "来信正文", "主题"',
         "fix the names of the columns, or name its column: --columns source=来信正文"),
        ("long text,short text", PAIR, {}, 'no column "source"; found "long text", "short text"',
         "fix the names of the columns, or name their columns: --columns source=NAME,target=NAME"),
        ("text,label", PAIR, {}, 'no column "target"; found "text", "label"',
         "fix the names of the columns, or name its column: --columns target=NAME; a file like this one is for "
         "--task classify"),
    ],
)  # fmt: skip
def test_errors_show_what_to_type(header: str, fields, columns, message: str, hint: str, tmp_path: Path):
    for path in (table(tmp_path, header), table(tmp_path, header.replace(",", "\t"), "a\tb\tc", name="a.tsv")):
        with pytest.raises(DataError) as caught:
            first(path, fields, columns=columns)
        assert caught.value.message == f"{path}:1: {message}" and caught.value.hint == hint


def test_rows_of_json_do_not_change_their_columns(tmp_path: Path):
    rows = [{"body": "a", "title": "b"}, {"id": 1, "title": "d", "body": "c"}, {"text": "e", "title": "f"}]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, rows)))
    records = read_records(tmp_path / "a.jsonl", PAIR)
    assert [next(records).fields["source"] for _ in range(2)] == ["a", "c"]
    with pytest.raises(DataError, match=r'a\.jsonl:3: no "source"; found "text", "title"'):
        next(records)


def test_optional_fields_are_left_out_where_two_columns_fit(tmp_path: Path, said):
    path = table(tmp_path, "text,sentence2,hypothesis,label")
    assert first(path, TEXTS) == {"text": "a", "text_b": None, "label": "d"}
    assert said()[0].startswith('columns: "sentence2" and "hypothesis" could both be text_b, so none is used')


def test_the_whole_row_is_kept_under_its_own_names(tmp_path: Path):
    path = table(tmp_path, "Nr,words,x", '1,"[""我"", ""来""]",')
    record = next(read_records(DataFile(path, whole=True), {"tokens": list_of(text)}))
    assert record.row == {"Nr": "1", "words": ["我", "来"], "x": ""}
    write = arrow.Table.from_pylist([{"n": 1, "text": "a", "when": None}])
    parquet.write_table(write, tmp_path / "a.parquet")
    assert next(read_records(DataFile(tmp_path / "a.parquet", whole=True), {"text": text})).row == write.to_pylist()[0]


# ---- numbers with names ------------------------------------------------------------------------------------


def test_a_column_beside_the_label_has_its_names(tmp_path: Path, said):
    path = table(tmp_path, "text,label,label_text", "x,0,negative", "y,1,positive")
    assert [one.fields["label"] for one in read_records(path, TEXTS)] == ["negative", "positive"]
    assert said() == ["columns: label_text → the names of label"]
    assert first(path, TEXTS, columns={"label": "label"})["label"] == "0"
    path = table(tmp_path, "context,choices,label,label_text", 'x,"[""a"", ""b""]",1,b')
    fields = {"context": text, "choices": list_of(text), "label": label}
    assert first(path, fields)["label"] == "1"  # an index, not a name


def test_names_that_are_given(tmp_path: Path):
    path = table(tmp_path, "text,label", "x,1", "y,pos", "z,7")
    records = read_records(DataFile(path, label_names=("neg", "pos")), TEXTS)
    assert [next(records).fields["label"] for _ in range(2)] == ["pos", "pos"]
    with pytest.raises(DataError, match=r'a\.csv:4: "label" is 7; 0 to 1 have names'):
        next(records)
    (tmp_path / "t.jsonl").write_text('{"tokens": ["a", "b"], "ner_tags": [0, 1]}')
    assert first(tmp_path / "t.jsonl", TAGGED, label_names=("O", "B-X"))["tags"] == ["O", "B-X"]


def test_names_in_a_parquet_of_datasets(tmp_path: Path):
    """As the `datasets` library writes them."""
    names = {"names": ["O", "B-地"], "_type": "ClassLabel"}
    features = {"tokens": {}, "ner_tags": {"feature": names, "_type": "Sequence"}}
    made = arrow.Table.from_pylist([{"tokens": ["我", "北"], "ner_tags": [0, 1]}])
    about = {"huggingface": json.dumps({"info": {"features": features}})}
    parquet.write_table(made.replace_schema_metadata(about), tmp_path / "a.parquet")
    assert first(tmp_path / "a.parquet", TAGGED)["tags"] == ["O", "B-地"]
    features = {"label": {"names": ["neg", "pos"], "_type": "ClassLabel"}}
    made = arrow.Table.from_pylist([{"text": "x", "label": 1}])
    about = {"huggingface": json.dumps({"info": {"features": features}})}
    parquet.write_table(made.replace_schema_metadata(about), tmp_path / "b.parquet")
    assert first(tmp_path / "b.parquet", TEXTS)["label"] == "pos"


# ---- options -----------------------------------------------------------------------------------------------


def test_options(tmp_path: Path):
    assert parse_columns('source=body, "target=a, b"') == {"source": "body", "target": "a, b"}
    assert parse_columns("source=a, b ,target = c, d, e") == {"source": "a, b", "target": "c, d, e"}
    for wrong in ("body", "source=", "=body", "", "source=a,source=b", "body,target=a"):
        with pytest.raises(UsageError, match="--columns"):
            parse_columns(wrong)
    (tmp_path / "names.txt").write_text("负面\n正面\n", encoding="utf-8")
    assert parse_names(str(tmp_path / "names.txt")) == ("负面", "正面") and parse_names("a, b") == ("a", "b")
    for wrong in ("a", "a,,b", "a,b,a"):
        with pytest.raises(UsageError, match="--label-names"):
            parse_names(wrong)
    path = table(tmp_path, 'body,"Short, subject"', "a,b")
    assert first(path, PAIR, columns=parse_columns("target=Short, subject")) == {"source": "a", "target": "b"}
    with pytest.raises(DataError) as wrong_name:
        first(path, PAIR, columns={"target": "Short, subjekt"})
    assert wrong_name.value.hint == 'did you mean --columns "target=Short, subject"?'
    path = table(tmp_path, "body,subject")
    with pytest.raises(UsageError) as caught:
        first(path, PAIR, columns={"body": "source"})
    assert caught.value.hint == "write source=body"
    with pytest.raises(UsageError) as caught:
        first(path, PAIR, columns={"sorce": "body"})
    assert caught.value.hint == "did you mean source?"
