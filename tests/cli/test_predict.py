"""`allmask predict`: a line for each record, in order, whole or not at all. `allmask verify`: every byte."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections import Counter
from pathlib import Path
from threading import Thread

import pytest

from allmask.cli import _output, predict
from allmask.tasks.common import generator
from tests import tiny

ROWS = [{**row, "id": number, "url": f"/{number}"} for number, row in enumerate(tiny.english(40, seed=2))]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tiny.write_jsonl(tmp_path / "in.jsonl", ROWS)


def test_every_record_in_its_order(cli, titles: Path, file: Path, tmp_path: Path, monkeypatch):
    monkeypatch.setattr(generator.TextGenerator, "window", 7)
    monkeypatch.setattr(generator, "BATCH", 3)
    ran = cli("predict", titles, file, "-o", tmp_path / "out.jsonl", "--precision", "fp32")
    assert ran.code == 0 and ran.out == "", ran.err
    found = tiny.read_jsonl(tmp_path / "out.jsonl")
    assert [{name: row[name] for name in ROWS[0]} for row in found] == ROWS
    assert list(found[0]) == [*ROWS[0], "prediction", "score"]
    for number in (0, 20, 39):
        ran = cli("generate", titles, "--text", ROWS[number]["source"], "--json", "--precision", "fp32")
        alone = json.loads(ran.out)["written"][0]
        assert alone["text"] == found[number]["prediction"]
        assert alone["score"] == pytest.approx(found[number]["score"], abs=1e-4)
    assert {path.name for path in tmp_path.iterdir()} == {"in.jsonl", "out.jsonl"}


def test_n_best_and_other_fields(cli, titles: Path, file: Path, tmp_path: Path):
    words = ("--beams", 3, "--n-best", 2, "--keep", "url, nosuch")
    cli("predict", titles, file, "-o", tmp_path / "out.jsonl", *words)
    found = tiny.read_jsonl(tmp_path / "out.jsonl")
    assert [row["url"] for row in found] == [row["url"] for row in ROWS]
    assert all(len(row["predictions"]) == 2 and set(row) == {"url", "predictions"} for row in found)


def test_only_the_source_is_needed_in_any_format(cli, titles: Path, tmp_path: Path):
    import pyarrow
    from pyarrow import parquet

    rows = [{"source": row["source"]} for row in ROWS[:5]]
    tiny.write_jsonl(tmp_path / "in.jsonl", rows)
    (tmp_path / "in.csv").write_text("\n".join(["source", *(row["source"] for row in rows)]))
    (tmp_path / "in.txt").write_text("\n".join(row["source"] for row in rows))
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "in.parquet")
    kinds = ("jsonl", "csv", "txt", "parquet")
    outputs = {cli("predict", titles, tmp_path / f"in.{kind}", "-o", "-").out for kind in kinds}
    assert len(outputs) == 1 and len(outputs.pop().splitlines()) == 5


def test_gpt2_predicts_too(cli, gpt2: Path, file: Path):
    ran = cli("predict", gpt2, file, "-o", "-", "--max-new", 4)
    assert ran.code == 0 and len(ran.out.splitlines()) == 40


def test_a_bad_record_leaves_what_was_there(cli, titles: Path, file: Path, tmp_path: Path):
    file.write_text(file.read_text() + '{"text": "no source"}\n')
    (tmp_path / "out.jsonl").write_text("old")
    ran = cli("predict", titles, file, "-o", tmp_path / "out.jsonl")
    assert ran.code == 3 and f'{file}:41: no "source"' in ran.err
    assert (tmp_path / "out.jsonl").read_text() == "old"
    ran = cli("predict", titles, file, "-o", tmp_path / "out.jsonl", "--on-bad-record", "skip")
    assert ran.code == 0 and "skipped records: 1 × missing field" in ran.err
    assert len(tiny.read_jsonl(tmp_path / "out.jsonl")) == 40


def test_a_pipe_is_written_to_and_not_replaced(cli, titles: Path, file: Path, tmp_path: Path):
    os.mkfifo(tmp_path / "pipe")
    read: list[str] = []
    reader = Thread(target=lambda: read.append((tmp_path / "pipe").read_text()), daemon=True)
    reader.start()
    assert cli("predict", titles, file, "-o", tmp_path / "pipe").code == 0
    reader.join(timeout=300)
    assert len(read[0].splitlines()) == 40 and (tmp_path / "pipe").is_fifo()
    assert {path.name for path in tmp_path.iterdir()} == {"in.jsonl", "pipe"}


def test_a_link_stays_a_link(cli, titles: Path, file: Path, tmp_path: Path):
    (tmp_path / "link").symlink_to("real.jsonl")
    assert cli("predict", titles, file, "-o", tmp_path / "link").code == 0
    assert (tmp_path / "link").is_symlink() and len(tiny.read_jsonl(tmp_path / "real.jsonl")) == 40


def test_an_interruption_leaves_nothing(cli, titles: Path, file: Path, tmp_path: Path, monkeypatch):
    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(predict.Rows, "row", interrupt)
    assert cli("predict", titles, file, "-o", tmp_path / "out.jsonl").code == 130
    assert [path.name for path in tmp_path.iterdir()] == ["in.jsonl"]


def test_memory_is_given_back_as_lines_are_written(tmp_path: Path, monkeypatch):
    asked, real = [], _output._trim_memory
    monkeypatch.setattr(_output, "TRIM_EVERY", 3)
    monkeypatch.setattr(_output, "_trim_memory", lambda: asked.append(real()))
    with _output.output(str(tmp_path / "out.jsonl")) as put:
        for number in range(8):
            put({"number": number})
    assert [row["number"] for row in tiny.read_jsonl(tmp_path / "out.jsonl")] == list(range(8))
    assert len(asked) == 2


@pytest.mark.parametrize(
    ("out", "code", "says"),
    [
        ("{tmp}", 2, "is a folder"),
        ("{tmp}/in.jsonl", 2, "is the input itself"),
        ("{tmp}/no/out.jsonl", 5, "cannot write in"),
        ("{tmp}/out.docx", 2, "expected one of .jsonl, .json, .csv, .tsv, .parquet"),
        ("{tmp}/out", 2, "expected one of .jsonl, .json, .csv, .tsv, .parquet"),
    ],
)
def test_refusals(cli, titles: Path, file: Path, tmp_path: Path, out: str, code: int, says: str):
    ran = cli("predict", titles, file, "-o", out.format(tmp=tmp_path))
    assert ran.code == code and says in ran.err


# ---- kinds of files ------------------------------------------------------------------------------------------------


def read_back(path: Path) -> list[dict]:
    """The rows of a file; the cells of a table as text."""
    import csv

    from pyarrow import parquet

    if path.suffix == ".parquet":
        return parquet.read_table(path).to_pylist()
    text = path.read_text(encoding="utf-8")
    if path.suffix in (".csv", ".tsv"):
        return list(csv.DictReader(text.splitlines(keepends=True), delimiter="\t" if path.suffix == ".tsv" else ","))
    return json.loads(text) if path.suffix == ".json" else [json.loads(line) for line in text.splitlines()]


@pytest.mark.parametrize("kind", ["jsonl", "json", "csv", "tsv", "parquet", "CSV"])
def test_the_name_says_what_kind_of_file_is_written(cli, titles: Path, file: Path, tmp_path: Path, kind: str):
    (tmp_path / f"out.{kind}").write_text("old")
    ran = cli("predict", titles, file, "-o", tmp_path / f"out.{kind}", "--keep", "url", "--precision", "fp32")
    assert ran.code == 0 and ran.out == "", ran.err
    lines = cli("predict", titles, file, "-o", "-", "--keep", "url", "--precision", "fp32").out.splitlines()
    expected = [json.loads(line) for line in lines]
    path = tmp_path / f"out.{kind}"
    found = read_back(path.rename(path.with_suffix(f".{kind.lower()}")))
    if kind.lower() in ("csv", "tsv"):
        expected = [{name: _output._cell(value) for name, value in row.items()} for row in expected]
    assert found == expected and len(found) == 40
    assert {path.name for path in tmp_path.iterdir()} == {"in.jsonl", f"out.{kind.lower()}"}


def test_tables_of_rows_that_differ(tmp_path: Path, monkeypatch):
    """Fields that only some rows have, lists, objects, and a column of numbers and words."""
    monkeypatch.setattr(_output, "ROWS", 2)
    rows = [
        {"id": 1, "tags": [], "text": 'a, "b"\n北京'},
        {"id": 2, "tags": [], "text": "x"},
        {"id": "three", "tags": [{"type": "place", "words": [0, 2]}], "text": "x", "score": 0.5},
        {"id": 4.5, "tags": [{"type": "name", "words": [1, 2], "score": 1.0}], "text": "x", "score": 1},
    ]
    for kind in ("json", "csv", "tsv", "parquet"):
        with _output.output(str(tmp_path / f"out.{kind}")) as put:
            for row in rows:
                put(row)
    assert read_back(tmp_path / "out.json") == rows
    names = ["id", "tags", "text", "score"]
    cells = [{name: _output._cell(row.get(name)) for name in names} for row in rows]
    assert read_back(tmp_path / "out.csv") == read_back(tmp_path / "out.tsv") == cells
    table = read_back(tmp_path / "out.parquet")
    assert [row["id"] for row in table] == ["1", "2", "three", "4.5"]
    assert [row["score"] for row in table] == [None, None, 0.5, 1.0] and table[0]["text"] == rows[0]["text"]
    assert [len(row["tags"]) for row in table] == [0, 0, 1, 1] and table[3]["tags"][0]["words"] == [1, 2]


@pytest.mark.parametrize("kind", ["json", "csv", "parquet"])
def test_an_interrupted_table_leaves_nothing(cli, titles: Path, file: Path, tmp_path: Path, monkeypatch, kind: str):
    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setitem(_output.FORMATS, f".{kind}", interrupt)
    (tmp_path / f"out.{kind}").write_text("old")
    assert cli("predict", titles, file, "-o", tmp_path / f"out.{kind}").code == 130
    assert (tmp_path / f"out.{kind}").read_text() == "old"
    assert {path.name for path in tmp_path.iterdir()} == {"in.jsonl", f"out.{kind}"}


# ---- models --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("command", ["predict", "evaluate"])
def test_a_model_without_a_head_is_named_before_the_file_is_read(cli, bert: Path, tmp_path: Path, command: str):
    out = ("-o", "-") if command == "predict" else ()
    ran = cli(command, bert, tmp_path / "nosuch.jsonl", *out)
    assert ran.code == 4 and f"{bert}: has no head for a task" in ran.err
    assert f"allmask finetune {bert} --task classify" in ran.err and "nosuch" not in ran.err


@pytest.mark.parametrize("command", ["predict", "evaluate", "generate"])
def test_a_model_folder_is_opened_once(cli, titles: Path, file: Path, monkeypatch, command: str):
    """Found, its task parsed and its weights read, each once."""
    from allmask import checkpoints
    from allmask.tasks import task

    counts: Counter[str] = Counter()

    def counted(module, name: str):
        real = getattr(module, name)
        monkeypatch.setattr(module, name, lambda *words, **more: (counts.update([name]), real(*words, **more))[1])

    for module, name in ((checkpoints, "resolve"), (checkpoints, "read"), (task, "from_dict")):
        counted(module, name)
    words = {"predict": (file, "-o", "-"), "evaluate": (file,), "generate": ("--text", "red cat")}[command]
    ran = cli(command, titles, *words)
    assert ran.code == 0, ran.err
    assert counts == {"resolve": 1, "read": 1, "from_dict": 1}


@pytest.mark.parametrize(
    "words",
    [
        ("embed", "{bert}", "--text", "red cat"),
        ("audit", "{bert}", "--tokens", "4"),
        ("inspect", "{bert}"),
        ("convert", "{bert}", "--out", "{new}"),
    ],
    ids=lambda words: words[0],
)
def test_a_pretrained_model_is_opened_once(cli, bert: Path, tmp_path: Path, monkeypatch, words: tuple[str, ...]):
    from allmask import checkpoints

    counts: Counter[str] = Counter()
    for name in ("resolve", "read"):
        real = getattr(checkpoints, name)
        monkeypatch.setattr(
            checkpoints, name, lambda *given, name=name, real=real: (counts.update([name]), real(*given))[1]
        )
    ran = cli(*(word.format(bert=bert, new=tmp_path / "new") for word in words))
    assert ran.code == 0, ran.err
    assert counts == {"resolve": 1, "read": 1}


def test_a_run_remembers_its_columns(cli, titles: Path, tmp_path: Path):
    shutil.copytree(titles, tmp_path / "run")
    config = (titles / "config.yaml").read_text(encoding="utf-8")
    assert "columns: null" in config
    config = config.replace("columns: null", "columns: source=Inhalt,target=Betreff")
    (tmp_path / "run" / "config.yaml").write_text(config, encoding="utf-8")
    (tmp_path / "new.csv").write_text("Nr,Inhalt,Betreff\n1,red cat runs here,red cat\n", encoding="utf-8")
    for model in (tmp_path / "run", tmp_path / "run" / "final"):
        ran = cli("predict", model, tmp_path / "new.csv", "--json")
        assert list(json.loads(ran.out)[0]) == ["Nr", "Inhalt", "Betreff", "prediction", "score"], ran.err
        assert "columns: Inhalt → source\n" in ran.err
    ran = cli("evaluate", tmp_path / "run", tmp_path / "new.csv")
    assert ran.code == 0 and "columns: Inhalt → source, Betreff → target" in ran.err
    assert cli("predict", titles, tmp_path / "new.csv").code == 3


def test_a_run_remembers_its_encoding(cli, titles: Path, tmp_path: Path):
    shutil.copytree(titles, tmp_path / "run")
    config = (titles / "config.yaml").read_text(encoding="utf-8")
    assert "encoding: null" in config
    (tmp_path / "run" / "config.yaml").write_text(config.replace("encoding: null", "encoding: gb18030"))
    for encoding in ("gb18030", "utf-8"):
        (tmp_path / "new.csv").write_text("source,target\n北京欢迎你,欢迎\n", encoding=encoding)
        for command in ("predict", "evaluate"):
            ran = cli(command, tmp_path / "run", tmp_path / "new.csv", "--json")
            assert ran.code == 0, ran.err
            assert ("encoding: gb18030, as in training" in ran.err) == (encoding == "gb18030")
            assert command == "evaluate" or json.loads(ran.out)[0]["source"] == "北京欢迎你"
    (tmp_path / "new.csv").write_text("source,target\n北京欢迎你,欢迎\n", encoding="gb18030")
    ran = cli("predict", titles, tmp_path / "new.csv")
    assert ran.code == 3 and "if it is Chinese, pass --encoding gb18030" in ran.err


def test_all_records_as_one_array(cli, titles: Path, file: Path, tmp_path: Path):
    lines = cli("predict", titles, file, "-o", "-").out
    ran = cli("predict", titles, file, "--json", "-q")
    assert (ran.code, ran.err) == (0, "")
    assert json.loads(ran.out) == [json.loads(line) for line in lines.splitlines()] and len(json.loads(ran.out)) == 40
    ran = cli("predict", titles, file, "--json", "-o", tmp_path / "out.jsonl")
    assert json.loads(ran.out) == {"out": str(tmp_path / "out.jsonl"), "records": 40, "skipped": {}, "cut": 0}
    assert (tmp_path / "out.jsonl").read_text(encoding="utf-8") == lines
    assert cli("predict", titles, file, "--json", "-o", "-").code == 2


def test_a_converted_model_still_knows_its_task(cli, titles: Path, tmp_path: Path):
    cli("convert", titles, "--out", tmp_path / "out")
    words = ("--text", "red cat runs here", "--precision", "fp32")
    ran = cli("generate", tmp_path / "out", *words)
    assert ran.code == 0 and ran.out == cli("generate", titles, *words).out != "\n"


# ---- verify --------------------------------------------------------------------------------------------------------


def test_a_whole_run(cli, titles: Path):
    ran = cli("verify", titles)
    assert ran.code == 0
    names = [line.split()[0].removeprefix(str(titles)) for line in ran.out.splitlines()]
    assert names[-2:] == ["/final", "/metrics.jsonl"] and "/checkpoints/step-00000040" in names
    assert all(line.endswith("intact") for line in ran.out.splitlines())


@pytest.mark.parametrize(("damage", "says"), [("flip", "model.safetensors is damaged"), ("remove", "is missing")])
def test_damage_is_found(cli, titles: Path, tmp_path: Path, damage: str, says: str):
    import shutil

    copy = shutil.copytree(titles / "final", tmp_path / "final")
    weights = copy / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-5] ^= 1
    weights.write_bytes(content) if damage == "flip" else weights.unlink()
    ran = cli("verify", copy, "--json")
    assert ran.code == 4 and says in json.loads(ran.out)[0]["problem"]


@pytest.mark.parametrize("name", ["allmask-en", "allmask-zh"])
def test_a_bundled_model_by_its_name(cli, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    ran = cli("verify", name, "--json")
    (row,) = json.loads(ran.out)
    assert ran.code == 0 and row["problem"] is None and row["bytes"] > 20e6
    assert (Path(row["folder"]) / "model.safetensors").is_file()
    monkeypatch.chdir(tmp_path)  # a folder of this name goes first
    (tmp_path / name).mkdir()
    assert cli("verify", name).code == 4


def test_nothing_to_verify(cli, bert: Path, tmp_path: Path):
    assert cli("verify", tmp_path / "nowhere").code == 4
    ran = cli("verify", bert)
    assert ran.code == 4 and "nothing to compare with" in ran.err


# ---- one's own columns ---------------------------------------------------------------------------------------------


def test_all_columns_are_kept_and_names_that_are_taken_are_changed(cli, titles: Path, tmp_path: Path):
    import csv

    rows = [{"Nr": str(n), "score": "5", "Body": row["source"], "": ""} for n, row in enumerate(ROWS[:6])]
    with (tmp_path / "in.csv").open("w", encoding="gb18030", newline="") as stream:
        writer = csv.DictWriter(stream, list(rows[0]), delimiter=";")
        writer.writeheader()
        writer.writerows([*rows, {"Nr": "北", "score": "", "Body": "北京欢迎你", "": "x"}])
    words = ("predict", titles, tmp_path / "in.csv", "--encoding", "gb18030", "-o")
    ran = cli(*words, tmp_path / "out.csv")
    assert ran.code == 0, ran.err
    found = read_back(tmp_path / "out.csv")
    assert list(found[0]) == ["Nr", "score", "Body", "column 4", "prediction", "model_score"]
    assert [row["Body"] for row in found[:6]] == [row["Body"] for row in rows] and found[6]["column 4"] == "x"
    assert ran.err.count('the file has a column "score", so that of the model is called "model_score"') == 1
    assert ran.err.count("columns: Body → source") == 1
    again = cli("predict", titles, tmp_path / "out.csv", "-o", "-", "--keep", "Nr,prediction")
    assert set(json.loads(again.out.splitlines()[0])) == {"Nr", "prediction", "model_prediction", "score"}


def test_without_out_the_first_ten_are_shown(cli, titles: Path, file: Path):
    ran = cli("predict", titles, file, "--precision", "fp32")
    assert ran.code == 0, ran.err
    for number in (0, 9):
        assert f"{file}:{number + 1}\n  source      {ROWS[number]['source']}\n" in ran.out
    assert f"{file}:11" not in ran.out and "  prediction  " in ran.out
    last = ran.out.splitlines()[-1]
    assert last == f"10 of 40 records; for all of them: allmask predict {titles} {file} -o in-predictions.jsonl"
    spaced = file.with_name("in two.jsonl")
    spaced.write_bytes(file.read_bytes())
    assert cli("predict", titles, spaced).out.endswith(f"'{spaced}' -o 'in two-predictions.jsonl'\n")
    evil = file.with_name("in\x1b[2J.jsonl")  # which would clear the screen
    evil.write_bytes(file.read_bytes())
    assert "\x1b" not in cli("predict", titles, evil).out


def test_if_all_are_shown_it_does_not_promise_more(cli, titles: Path, tmp_path: Path):
    few = tmp_path / "few.jsonl"
    tiny.write_jsonl(few, ROWS[:2])
    last = cli("predict", titles, few).out.splitlines()[-1]
    assert last == f"to write a file: allmask predict {titles} {few} -o few-predictions.jsonl"


def test_columns_with_chinese_names_stand_below_each_other(cli, titles: Path, tmp_path: Path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    file = tiny.write_jsonl(tmp_path / "a.jsonl", [{"编号": 7, "发件人": "北" * 99, "source": ROWS[0]["source"]}])
    shown = cli("predict", titles, file).out.splitlines()
    assert shown[1:3] == ["  编号        7", f"  发件人      {'北' * 42}…"]
    assert shown[4].startswith("  prediction  ")


def test_texts_of_another_kind_than_those_in_training_are_counted(cli, titles: Path, file: Path, tmp_path: Path):
    model = tmp_path / "model"
    shutil.copytree(titles / "final", model)
    (model / "manifest.json").unlink()  # allmask.json is changed on purpose
    task = json.loads((model / "allmask.json").read_text())
    assert task["usual_score"] is None  # fewer than 20 records were held out
    scores = sorted(row["score"] for row in json.loads(cli("predict", model, file, "--json").out))
    (model / "allmask.json").write_text(json.dumps({**task, "usual_score": (scores[4] + scores[5]) / 2}))
    said = "5 of 40 have a lower score than 95 % of the held-out records: probably unlike the texts in training"
    assert said in cli("predict", model, file, "-o", tmp_path / "out.csv", "--quiet").err
    (model / "allmask.json").write_text(json.dumps({**task, "usual_score": (scores[2] + scores[3]) / 2}))
    assert "lower score" not in cli("predict", model, file, "-o", tmp_path / "out.csv").err  # about as many as always
    (model / "allmask.json").write_text(json.dumps({**task, "usual_score": 0.0}))
    assert "10 of 10 have a lower score" in cli("predict", model, file).err
    text = ROWS[0]["source"]
    assert "it has a lower score than 95 % of the held-out records" in cli("generate", model, "--text", text).err


def test_the_printed_command_can_be_typed_where_allmask_is_not_in_the_path(
    cli, titles: Path, tmp_path: Path, monkeypatch
):
    few, program = tmp_path / "few.jsonl", tmp_path / "bin" / "allmask"
    tiny.write_jsonl(few, ROWS[:2])
    program.parent.mkdir()
    program.touch(0o755)
    monkeypatch.setattr(sys, "argv", [str(program)])
    last = cli("predict", titles, few).out.splitlines()[-1]
    assert last == f"to write a file: {program} predict {titles} {few} -o few-predictions.jsonl"


def test_excel(cli, titles: Path, tmp_path: Path):
    openpyxl = pytest.importorskip("openpyxl")
    rows = [{"source": row["source"], "n": number, "x": "a\x07北"} for number, row in enumerate(ROWS[:4])]
    tiny.write_jsonl(tmp_path / "in.jsonl", rows)
    assert cli("predict", titles, tmp_path / "in.jsonl", "-o", tmp_path / "out.xlsx", "--precision", "fp32").code == 0
    header, *found = openpyxl.load_workbook(tmp_path / "out.xlsx").active.iter_rows(values_only=True)
    assert header == ("source", "n", "x", "prediction", "score")
    assert [row[:3] for row in found] == [(row["source"], row["n"], "a北") for row in rows]
    ran = cli("predict", titles, tmp_path / "out.xlsx", "-o", "-", "--precision", "fp32")
    assert [json.loads(line)["model_prediction"] for line in ran.out.splitlines()] == [row[3] or "" for row in found]


def test_xlsx_without_the_package_is_refused_before_any_work(
    cli, titles: Path, file: Path, tmp_path: Path, monkeypatch
):
    monkeypatch.setitem(__import__("sys").modules, "openpyxl", None)
    ran = cli("predict", titles, file, "-o", tmp_path / "out.xlsx")
    assert ran.code == 5 and "pip install openpyxl" in ran.err
