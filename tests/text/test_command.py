"""`allmask tokenizer`: results on stdout, progress on stderr, whole folders or none, errors in words."""

from __future__ import annotations

import csv
import gzip
import json
import os
import subprocess
import sys
from pathlib import Path

import pyarrow as arrow
import pytest
from pyarrow import parquet

from allmask import files
from allmask.data import Texts
from allmask.text import Tokenizer, train_tokenizer
from tests.text.references import CORPUS


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_train_writes_what_the_library_trains(cli, corpus: Path, uncased: Tokenizer, tmp_path: Path):
    ran = cli("tokenizer", "train", corpus, "--size", 200, "--out", tmp_path / "deep/tok")
    assert (ran.code, ran.out) == (0, f"wordpiece tokenizer with 200 tokens in {tmp_path / 'deep/tok'}\n")
    assert "reading 100%" in ran.err
    assert Tokenizer.load(tmp_path / "deep/tok") == uncased
    assert names(tmp_path / "deep") == {"tok"}


def test_train_as_json(cli, corpus: Path, tmp_path: Path):
    ran = cli(
        "tokenizer", "train", corpus, corpus, "--kind", "byte-bpe", "--size", 9999, "-o", tmp_path / "t", "--json"
    )
    data = json.loads(ran.out)
    assert data["kind"] == "byte-bpe" and data["specials"]["eos"] == "<|endoftext|>" and data["size"] < 9999
    assert Tokenizer.load(data["out"]) == train_tokenizer(Texts([corpus, corpus]), "byte-bpe", 9999)


def test_options_reach_the_training(cli, corpus: Path, tmp_path: Path):
    options = ["--cased", "--min-count", 3, "--alphabet", 50]
    ran = cli("tokenizer", "train", corpus, "--size", 200, "--out", tmp_path / "t", *options)
    assert ran.code == 0
    expected = train_tokenizer(Texts([corpus]), "wordpiece", 200, lowercase=False, minimum=3, alphabet=50)
    assert Tokenizer.load(tmp_path / "t") == expected


def test_a_folder_is_replaced_only_with_force(
    cli, corpus: Path, byte_bpe: Tokenizer, uncased: Tokenizer, tmp_path: Path
):
    out = tmp_path / "tok"
    byte_bpe.save(out)
    line = ("tokenizer", "train", corpus, "--size", 200, "--out", out)
    refused = cli(*line)
    assert refused.code == 2 and "the folder is not empty" in refused.err and refused.out == ""
    assert Tokenizer.load(out) == byte_bpe
    assert cli(*line, "--force").code == 0
    assert Tokenizer.load(out) == uncased
    assert names(out) == {"tokenizer.json", "tokenizer_config.json", "vocab.txt"}
    assert names(tmp_path) == {"tok"}


def test_force_does_not_delete_what_is_not_a_tokenizer(cli, corpus: Path, tmp_path: Path):
    (tmp_path / "thesis.tex").write_text("years of work")
    ran = cli("tokenizer", "train", corpus, "--size", 300, "--out", tmp_path, "--force")
    assert ran.code == 2 and "thesis.tex" in ran.err
    assert names(tmp_path) == {"thesis.tex"}


def test_an_empty_folder_is_taken_and_a_file_is_not(cli, corpus: Path, tmp_path: Path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("x")
    assert cli("tokenizer", "train", corpus, "--size", 300, "--out", tmp_path / "empty").code == 0
    assert cli("tokenizer", "train", corpus, "--size", 300, "--out", tmp_path / "file").code == 2


def test_a_failure_leaves_nothing_behind(cli, corpus: Path, uncased: Tokenizer, tmp_path: Path, monkeypatch):
    out = tmp_path / "tok"
    uncased.save(out)
    monkeypatch.setattr(Tokenizer, "save", lambda self, folder: ((folder / "vocab.txt").touch(), 1 / 0))
    assert cli("tokenizer", "train", corpus, "--size", 300, "--out", out, "--force").code == 1
    assert names(tmp_path) == {"tok"} and Tokenizer.load(out) == uncased


def test_a_failed_rename_puts_the_old_folder_back(cli, corpus: Path, byte_bpe: Tokenizer, tmp_path: Path, monkeypatch):
    out, rename = tmp_path / "tok", os.rename
    byte_bpe.save(out)

    def full_disk(path: Path, target: Path) -> None:
        if path.name.endswith(".partial"):
            raise OSError(28, "No space left on device", str(path))
        rename(path, target)

    monkeypatch.setattr(files, "_exchange", lambda one, other: False)  # as where folders cannot swap names
    monkeypatch.setattr(os, "rename", full_disk)
    ran = cli("tokenizer", "train", corpus, "--size", 300, "--out", out, "--force")
    assert ran.code == 5 and "No space left" in ran.err
    assert names(tmp_path) == {"tok"} and Tokenizer.load(out) == byte_bpe


@pytest.mark.parametrize("name", ["folder", "a.txt.gz", "a.jsonl", "a.jsonl.gz", "a.csv", "a.parquet"])
def test_train_reads_what_pretrain_reads(cli, uncased: Tokenizer, tmp_path: Path, name: str):
    rows = [{"body": line} for line in CORPUS if line.strip()]
    lines = "\n".join(json.dumps(row) for row in rows)
    if name == "folder":
        (tmp_path / name / "b").mkdir(parents=True)
        (tmp_path / name / "a.txt").write_text("\n".join(CORPUS[:9]), encoding="utf-8")
        (tmp_path / name / "b" / "c.txt").write_text("\n".join(CORPUS[9:]), encoding="utf-8")
        (tmp_path / name / "README.md").write_text("not a part of the corpus")
    elif name == "a.parquet":
        parquet.write_table(arrow.Table.from_pylist(rows), tmp_path / name)
    elif name == "a.csv":
        with (tmp_path / name).open("w", encoding="utf-8", newline="") as stream:
            csv.writer(stream).writerows([["body"], *([row["body"]] for row in rows)])
    else:
        text = "\n".join(CORPUS) if name == "a.txt.gz" else lines
        (tmp_path / name).write_bytes(gzip.compress(text.encode()) if name.endswith(".gz") else text.encode())
    ran = cli(
        "tokenizer", "train", tmp_path / name, "--text-field", "body", "--size", 200, "--out", tmp_path / "tok"
    )  # fmt: skip
    assert ran.code == 0, ran.err
    assert Tokenizer.load(tmp_path / "tok") == uncased


def test_bad_records_are_skipped_on_request(cli, uncased: Tokenizer, tmp_path: Path):
    lines = [json.dumps({"text": line}) for line in CORPUS]
    (tmp_path / "a.jsonl").write_text("\n".join([*lines, "{", '{"txt": 1}', "{"]))
    line = ("tokenizer", "train", tmp_path / "a.jsonl", "--size", 200, "--out", tmp_path / "tok")
    refused = cli(*line)
    assert refused.code == 3 and f"a.jsonl:{len(lines) + 1}: not valid JSON" in refused.err
    ran = cli(*line, "--on-bad-record", "skip", "--json")
    assert "skipped records: 2 × malformed JSON, 1 × missing field" in ran.err
    assert json.loads(ran.out)["skipped"] == {"malformed JSON": 2, "missing field": 1}
    assert Tokenizer.load(tmp_path / "tok") == uncased


def test_training_does_not_import_torch(corpus: Path, tmp_path: Path):
    code = (
        "import sys; from allmask.cli.main import main; "
        f"main(['tokenizer', 'train', {str(corpus)!r}, '--size', '200', '--out', {str(tmp_path / 'tok')!r}]); "
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
    assert (tmp_path / "tok" / "vocab.txt").is_file()


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (["absent.txt"], 3, "absent.txt: no such file"),
        (["CORPUS", "--size", "20"], 2, "alone need"),
        (["CORPUS", "--kind", "sentence"], 2, "'sentence' is not one of"),
        ([], 2, "FILES"),
    ],
)
def test_errors_of_train(cli, corpus: Path, tmp_path: Path, words: list[str], code: int, message: str):
    words = [str(corpus) if word == "CORPUS" else word for word in words]
    ran = cli("tokenizer", "train", *words, "--out", tmp_path / "tok")
    assert (ran.code, ran.out) == (code, "")
    assert message.lower() in ran.err.lower()
    assert not (tmp_path / "tok").exists()


def test_show_prints_the_pieces(cli, uncased: Tokenizer, tmp_path: Path):
    uncased.save(tmp_path)
    ran = cli("tokenizer", "show", tmp_path, "--text", "The 北京", "--pair", "读")
    rows = [line.split() for line in ran.out.splitlines()]
    encoded = uncased.encode("The 北京", "读")
    assert [row[-1] for row in rows] == encoded.tokens
    assert [int(row[0]) for row in rows] == encoded.ids
    assert [int(row[1]) for row in rows] == encoded.segments
    assert rows[2][2] == "4–5"


def test_show_takes_the_name_of_a_bundled_model(cli):
    rows = json.loads(cli("tokenizer", "show", "allmask-zh", "--text", "北京欢迎你", "--json").out)
    assert [row["token"] for row in rows] == ["[CLS]", *"北京欢迎你", "[SEP]"]


def test_show_as_json_without_special_tokens(cli, uncased: Tokenizer, tmp_path: Path):
    uncased.save(tmp_path)
    ran = cli("tokenizer", "show", tmp_path / "vocab.txt", "--text", "北", "--no-special", "--json")
    assert json.loads(ran.out) == [
        {"id": uncased.token_to_id("北"), "segment": 0, "start": 0, "end": 1, "token": "北"},
    ]
    assert cli("tokenizer", "show", tmp_path, "--text", "", "--no-special").out == "(no tokens)\n"


def test_show_names_a_damaged_file(cli, tmp_path: Path):
    (tmp_path / "vocab.txt").write_text("[UNK]\n[CLS]\n[SEP]\n\na\n")
    ran = cli("tokenizer", "show", tmp_path, "--text", "a")
    assert ran.code == 4 and "vocab.txt:4: the line is blank" in ran.err
