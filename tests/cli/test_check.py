"""`allmask check`: what is in a file, what a model would cut, and what is wrong with it, without training."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest

from allmask.checkpoints.formats import weights
from tests import tiny


@pytest.fixture
def no_weights(monkeypatch: pytest.MonkeyPatch):
    """Whoever opens weights fails."""
    monkeypatch.setattr(weights, "open_weights", None)
    monkeypatch.setattr("allmask.checkpoints.reader.open_weights", None)


def mails(folder: Path, rows: list[tuple[str, str]], name: str = "mails.csv") -> Path:
    with (folder / name).open("w", encoding="cp1252", newline="") as stream:
        csv.writer(stream, delimiter=";").writerows([("Body", "Subject"), *rows])
    return folder / name


def test_a_good_file(cli, bert: Path, tmp_path: Path, no_weights):
    rows = [(row["source"], row["target"]) for row in tiny.english(150)]
    file = mails(tmp_path, [*rows, ("naïve red", "naïve"), ("red " * 45, "red")])
    words = ("check", file, bert, "--encoding", "cp1252", "--max-target", 8)
    ran = cli(*words)
    assert ran.code == 0 and ran.err == "", ran.err
    assert "columns     Body → source, Subject → target" in ran.out
    training = f"finetune {bert} --data {file} --encoding cp1252 --max-target 8 --out runs/title"
    assert ran.out.endswith(f"\n\nit can be trained on: allmask {training}\n")
    assert "1 of 152 have more than 37 and are cut" in ran.out and "█" in ran.out  # 48 - 8 - [CLS], [SEP], [SEP]
    found = json.loads(cli(*words, "--json").out)
    assert found["trainable"] and found["records"] == 152 and found["train"] + found["held_out"] == 152
    assert found["columns"] == ["columns: Body → source, Subject → target"]
    texts = [" ".join(source.lower().split()) for source, _ in rows]
    assert found["duplicates"] == len(texts) - len(set(texts))
    assert found["lengths"]["target"]["limit"] == 8 and found["lengths"]["target"]["max"] < 10
    assert sum(bar["count"] for bar in found["lengths"]["source"]["histogram"]) == 152


def test_what_the_model_would_cut(cli, bert: Path, tmp_path: Path, no_weights):
    """48 positions, less [CLS] and [SEP]."""
    rows = [{"text": "red " * count, "label": "ab"[count % 2]} for count in (3, 46, 47, 60)]
    file = tiny.write_jsonl(tmp_path / "a.jsonl", rows)
    ran = cli("check", file, bert, "--task", "classify")
    assert "text        5 to 62 tokens" in ran.out and "2 of 4 have more than 48 and are cut" in ran.out
    assert "labels      b (2), a (2)" in ran.out and "4 to learn from, 0 held out" in ran.out


def test_labels_that_may_be_one(cli, bert: Path, tmp_path: Path, no_weights):
    rows = [
        {"text": f"red {label}", "label": label}
        for label in ("gut", "Gut", "schlecht", "好", "very good", "Very  good")
    ]
    ran = cli("check", tiny.write_jsonl(tmp_path / "a.jsonl", rows), bert, "--task", "classify")
    assert "gut and Gut differ only in capitals or spaces" in ran.out
    assert "very good and Very  good differ" in ran.out and ran.out.count("differ only") == 2


def test_problems_with_their_lines(cli, bert: Path, tmp_path: Path):
    lines = ["text,label", *(f"red {number},{number % 2}" for number in range(5)), *["blue,"] * 12]
    file = tmp_path / "a.csv"
    file.write_text("\n".join(lines))
    ran = cli("check", file, bert, "--task", "classify")
    assert ran.code == 3 and "problems    12 records cannot be used" in ran.out
    assert [f'{file}:{line}: "label" is empty' in ran.out for line in (6, 7, 16, 17)] == [False, True, True, False]
    assert '… and 2 more; in all: 12 × blank "label"' in ran.out
    assert cli("check", file, bert, "--task", "classify", "--on-bad-record", "skip").code == 0
    found = json.loads(cli("check", file, bert, "--task", "classify", "--json").out)
    assert not found["trainable"] and found["skipped"] == {'blank "label"': 12}
    assert found["problems"][0]["message"] == f'{file}:7: "label" is empty'


def test_a_file_in_another_encoding(cli, bert: Path, tmp_path: Path):
    """The remedy is its encoding, said once: skipping would lose most of the file."""
    lines = ["text,label", *(f"grün {number},{number % 2}" for number in range(30)), "red,1", "blue,0"]
    file = tmp_path / "a.csv"
    file.write_text("\n".join(lines), "cp1252")
    ran = cli("check", file, bert, "--task", "classify")
    assert ran.code == 3 and ran.out.endswith("a run would stop at the first problem: try --encoding cp1252\n")
    assert ran.out.count("if it is Western European, pass --encoding cp1252") == 1
    assert cli("check", file, bert, "--task", "classify", "--encoding", "cp1252").code == 0


def test_duplicates_and_leaks(cli, bert: Path, tmp_path: Path):
    long = "北京欢迎你来这里吃白切鸡，我们一起想想今天晚上还要吃啥好呢"
    rows = [("red cat", "a"), ("Red  cat!", "b"), ("blue dog", "a"), (long, "b")]
    file = tiny.write_jsonl(tmp_path / "a.jsonl", [{"text": text, "label": label} for text, label in rows])
    dev = [("BLUE DOG", "a"), (long.replace("晚上", "早上"), "b"), ("something else", "a")]
    held_out = tiny.write_jsonl(tmp_path / "dev.jsonl", [{"text": text, "label": label} for text, label in dev])
    words = ("check", file, bert, "--task", "classify", "--eval", held_out)
    found = json.loads(cli(*words, "--json").out)
    assert (found["duplicates"], found["contradictions"], found["leaked"]) == (2, 1, 1)
    assert found["duplicate_examples"][0] == {"where": f"{file}:2", "other": f"{file}:1", "alike": 1.0}
    assert found["leak_examples"] == [{"where": f"{held_out}:1", "other": f"{file}:3", "alike": 1.0}]
    near = tiny.write_jsonl(tmp_path / "near.jsonl", [{"text": long + "吗", "label": "b"}])
    (leak,) = json.loads(cli(*words[:-1], near, "--json").out)["leak_examples"]
    assert leak["other"] == f"{file}:4" and 0.9 < leak["alike"] < 1


RECORDS = {
    "tag": [{"words": ["red", "北"], "ner_tags": ["B-c", "O"]}, {"words": ["cat"], "ner_tags": ["O"]}],
    "choose": [{"context": "red", "options": ["a", "b"], "label": 1}],
    "answer": [{"question": "red?", "passage": "red cat", "answer": "cat"}],
    "translate": [{"src": "red", "tgt": "红"}],
}


@pytest.mark.parametrize("task", RECORDS)
def test_every_task(cli, bert: Path, tmp_path: Path, task: str, no_weights):
    (tmp_path / "a.json").write_text(json.dumps(RECORDS[task]))
    limit = ("--max-target", 8) if task == "translate" else ()
    ran = cli("check", tmp_path / "a.json", bert, "--task", task, "--json", *limit)
    assert ran.code == 0, ran.err
    found = json.loads(ran.out)
    labels = {"tag": {"c": 1}, "choose": {"choice 1": 1}, "answer": {"an answer": 1}, "translate": {}}
    assert found["labels"] == labels[task] and found["lengths"] and len(found["columns"]) == 1


def test_refusals(cli, bert: Path, tmp_path: Path):
    file = tiny.write_jsonl(tmp_path / "a.jsonl", tiny.english(3))
    (tmp_path / "link.jsonl").symlink_to(file)
    for words, code, says in [
        (("check", file, bert, "--eval", tmp_path / "link.jsonl"), 2, "is also trained on"),
        (("check", file, bert, "--task", "titel"), 2, "did you mean title?"),
        (("check", tmp_path / "no.csv"), 3, "no such file"),
        (("check", file, tmp_path / "nomodel"), 4, "no such folder or file"),
        (("check", file, bert, "--task", "classify"), 3, 'no "text"'),
        (("check", file, bert, "--task", "classify", "--max-source", 9), 2, "--max-source is for"),
        (("check", file, bert, "--columns", "body=source"), 2, "write source=body"),
    ]:
        ran = cli(*words)
        assert ran.code == code and says in ran.err, (words, ran.err)
