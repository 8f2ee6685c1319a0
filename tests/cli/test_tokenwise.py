"""Tags and answers on the command line: learnt, asked and scored; what bad input is told."""

from __future__ import annotations

import json
import os
import random
from pathlib import Path

import pytest
import transformers

import allmask
from allmask.errors import CheckpointError
from allmask.tasks.answer import Answerer
from allmask.tasks.common.evaluation import Worst
from allmask.tasks.tag import Tagger
from allmask.tasks.task import load_task
from tests import tiny

transformers.logging.set_verbosity_error()
QUICK = ("--steps", 3, "--lr", 0.01, "--precision", "fp32", "--batch-tokens", 256)


def tagged(count: int, seed: int = 0) -> list[dict]:
    """Chinese among English words is marked, character by character."""
    rng = random.Random(seed)
    made = []
    for number in range(count):
        tokens, tags = [], []
        for _ in range(rng.randint(2, 5)):
            chinese = rng.random() < 0.4 and tags[-1:] in ([], ["O"])
            some = rng.sample(tiny.CHARACTERS, rng.randint(1, 3)) if chinese else [rng.choice(tiny.WORDS)]
            tokens += some
            tags += ["B-中文", *["I-中文"] * (len(some) - 1)] if chinese else ["O"]
        made.append({"id": number, "tokens": tokens, "tags": tags})
    return made


def asked(count: int, seed: int = 0, none: bool = False) -> dict:
    """The answer is what is Chinese in an English context; some have none."""
    rng = random.Random(seed)
    paragraphs = []
    for number in range(count):
        said = "" if none and number % 3 == 0 else "".join(rng.sample(tiny.CHARACTERS, rng.randint(1, 3)))
        before, after = (" ".join(rng.sample(tiny.WORDS, rng.randint(1, 4))) for _ in range(2))
        answers = [{"text": said, "answer_start": len(before) + 1}] if said else []
        entry = {"id": f"q{number}", "question": "there", "answers": answers, "is_impossible": not said}
        paragraphs.append({"context": f"{before} {said} {after}", "qas": [entry]})
    return {"version": "2.0", "data": [{"paragraphs": paragraphs}]}


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokens")
    tiny.write_jsonl(folder / "train.jsonl", tagged(64))
    tiny.write_jsonl(folder / "dev.jsonl", tagged(12, seed=1))
    for name, data in (("train", asked(64, none=True)), ("dev", asked(12, 1, none=True)), ("plain", asked(12, 2))):
        (folder / f"{name}.json").write_text(json.dumps(data, ensure_ascii=False), encoding="utf-8")
    return folder


def words(task: str, model: Path, files: Path, out: Path) -> tuple:
    end = "jsonl" if task == "tag" else "json"
    names = ("--data", files / f"train.{end}", "--eval", files / f"dev.{end}", "--out", out)
    return ("finetune", model, "--task", task, *names)


@pytest.fixture(scope="module")
def runs(bert: Path, files: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    from allmask.runs.driver import start
    from allmask.runs.plan import Plan

    made = {}
    for task, end, more in (("tag", "jsonl", {}), ("chain", "jsonl", {"crf": True}), ("answer", "json", {})):
        made[task] = tmp_path_factory.mktemp("runs") / task
        values = {
            "steps": 90,
            "lr": 0.01,
            "precision": "fp32",
            "batch_tokens": 512,
            "eval_every": 45,
            "seed": 2,
            **more,
        }
        names = {"model": str(bert), "data": str(files / f"train.{end}"), "eval": str(files / f"dev.{end}")}
        kind = "answer" if task == "answer" else "tag"
        start(Plan.from_dict({"task": kind, **names, **values}), made[task], quiet=True)
    return made


# ---- tags --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("task", ["tag", "chain"])
def test_tags_are_learnt_saved_and_scored(cli, runs, files: Path, tmp_path: Path, task: str):
    told = json.loads(cli("evaluate", runs[task], files / "dev.jsonl", "--json", "--show", 3).out)
    assert told["scores"]["f1"] > 0.9 and told["records"] == 12 and set(told["types"]) == {"中文"}
    out = tmp_path / "out.jsonl"
    ran = cli("predict", runs[task], files / "dev.jsonl", "-o", out, "--precision", "fp32")
    assert ran.code == 0 and ran.out == "", ran.err
    rows = tiny.read_jsonl(out)
    assert [row["id"] for row in rows] == list(range(12)) and rows[0].keys() >= {
        "tokens",
        "tags",
        "prediction",
        "entities",
    }
    tag = allmask.pipeline("tag", runs[task], precision="fp32")
    assert [row["prediction"] for row in rows] == [one.tags for one in tag([row["tokens"] for row in rows])]
    found = tag("red cat 北京 here").entities
    assert [(one.kind, one.text, one.start, one.end) for one in found] == [("中文", "北京", 8, 10)]
    saved = load_task(runs[task] / "final")
    assert saved.scheme == "bio" and saved.crf == (task == "chain") and saved.max_length == 48
    theirs = transformers.AutoModelForTokenClassification.from_pretrained(runs[task] / "final")
    assert theirs.config.id2label == {0: "O", 1: "B-中文", 2: "I-中文"}


def test_texts_in_any_form(cli, runs, tmp_path: Path, monkeypatch):
    monkeypatch.setattr(Tagger, "window", 2)
    texts = ["red cat 北京 here", "cafe\u0301 👍🏽 欢迎 dog", "blue"]
    (tmp_path / "in.txt").write_text("\n".join(texts), encoding="utf-8")
    tiny.write_jsonl(tmp_path / "in.jsonl", [{"text": text} for text in texts])
    (tmp_path / "in.conll").write_text("red\ncat\n北\n京\nhere\n", encoding="utf-8")
    lines = {}
    for name in ("in.txt", "in.jsonl", "in.conll"):
        ran = cli("predict", runs["tag"], tmp_path / name, "-o", "-", "-q")
        assert ran.code == 0, ran.err
        lines[name] = [json.loads(line) for line in ran.out.splitlines()]
    assert lines["in.txt"] == lines["in.jsonl"] and len(lines["in.txt"]) == 3
    for row, text in zip(lines["in.txt"], texts, strict=True):
        assert all(text[one["start"] : one["end"]] == one["text"] for one in row["entities"])
    assert lines["in.txt"][0]["tokens"] == lines["in.conll"][0]["tokens"]
    assert lines["in.conll"][0]["entities"][0]["words"] == [2, 4]


def test_lines_of_stdin(cli, runs, monkeypatch):
    read, write = os.pipe()
    os.write(write, "red 北京\n\nblue\n".encode())
    os.close(write)
    with os.fdopen(read) as stream:
        monkeypatch.setattr("sys.stdin", stream)
        ran = cli("predict", runs["tag"], "-", "-o", "-")
    first, blank, second = ran.out.split("\n")[:3]
    assert json.loads(first)["entities"][0]["text"] == "北京" and blank == "" and json.loads(second)["entities"] == []


def test_a_table_of_types_and_errors(cli, runs, tmp_path: Path):
    rows = tagged(6, seed=3)
    rows[2] = {"tokens": ["北", "red", "京", "red", "欢", "red", "迎"], "tags": ["O"] * 7}  # four that are not so
    file = tiny.write_jsonl(tmp_path / "test.jsonl", rows)
    out = cli("evaluate", runs["tag"], file, "--show", 1).out
    assert out.startswith("| 6 records | f1 | precision | recall | accuracy |") and "| 中文 |" in out
    assert f"{file}:3: " in out and "  true       nothing" in out and "  predicted  " in out
    assert "| type | entities | precision | recall | F1 |" in out


def test_columns_are_learnt_from(cli, bert, tmp_path: Path):
    sentences = ["\n".join(map(" ".join, zip(r["tokens"], r["tags"], strict=True))) for r in tagged(12)]
    (tmp_path / "a.conll").write_text("\n\n".join(sentences), encoding="utf-8")
    (tmp_path / "b.conll").write_text("\n\n".join(sentences[::-1]), encoding="utf-8")
    names = ("--data", tmp_path / "a.conll", "--eval", tmp_path / "b.conll", "--out", tmp_path / "run")
    ran = cli("finetune", bert, "--task", "tag", *names, *QUICK, "--lm-weight", 0.5, "--json")
    assert ran.code == 0 and "f1" in json.loads(ran.out)["metrics"], ran.err
    lines = [line for line in tiny.read_jsonl(tmp_path / "run" / "metrics.jsonl") if "loss" in line]
    assert all(line["loss"] == pytest.approx(line["loss_tag"] + line["loss_mlm"]) for line in lines)


# ---- answers -----------------------------------------------------------------------------------------------------


def test_answers_are_learnt_saved_and_scored(cli, runs, files: Path, tmp_path: Path, monkeypatch):
    monkeypatch.setattr(Answerer, "window", 5)
    told = json.loads(cli("evaluate", runs["answer"], files / "dev.json", "--json", "--show", 3).out)
    assert told["scores"]["f1"] > 80 and told["scored_as"] == "CMRC 2018" and told["records"] == 12
    assert set(told["scores"]) == {"exact", "f1", "answered_exact", "answered_f1", "unanswerable_exact"}
    out = tmp_path / "out.jsonl"
    ran = cli("predict", runs["answer"], files / "dev.json", "-o", out, "--precision", "fp32", "--keep", "context")
    assert ran.code == 0, ran.err
    rows = tiny.read_jsonl(out)
    assert [row["id"] for row in rows] == [f"q{number}" for number in range(12)]
    for row in rows:
        assert row["answer"] == (row["context"][row["start"] : row["end"]] if row["answer"] else "")
        assert (row["start"] is None) == (row["answer"] == "")
    answer = allmask.pipeline("answer", runs["answer"], precision="fp32")
    alone = [answer(row["question"], row["context"]) for row in rows]
    assert [one.text for one in alone] == [row["answer"] for row in rows]
    saved = load_task(runs["answer"] / "final")
    assert saved.threshold is not None and saved.max_answer == 30
    theirs = transformers.AutoModelForQuestionAnswering.from_pretrained(runs["answer"] / "final")
    assert theirs.config.architectures == ["BertForQuestionAnswering"]


def test_several_answers_and_a_table(cli, runs, files: Path):
    ran = cli("predict", runs["answer"], files / "plain.json", "-o", "-", "--n-best", 3, "-q")
    rows = [json.loads(line) for line in ran.out.splitlines()]
    assert all(len(row["answers"]) == 3 and "context" not in row for row in rows)
    out = cli("evaluate", runs["answer"], files / "plain.json", "--show", 2).out
    assert out.startswith("| 12 records | exact | f1 |")


def test_a_question_a_line(cli, runs, bert, tmp_path: Path):
    rows = [{"question": "there", "context": "red 北京 cat", "answer": "北京", "url": 7}] * 6
    file = tiny.write_jsonl(tmp_path / "q.jsonl", rows)
    out = cli("predict", runs["answer"], file, "-o", "-", "--keep", "url", "-q").out
    told = json.loads(out.splitlines()[0])
    assert told["url"] == 7 and set(told) == {"url", "answer", "start", "end", "score"}
    dev = tiny.write_jsonl(tmp_path / "dev.jsonl", rows[:5])
    names = ("--data", file, "--eval", dev, "--out", tmp_path / "run", "--lm-weight", 0.5)
    ran = cli("finetune", bert, "--task", "answer", *names, *QUICK, "--json")
    assert ran.code == 0 and json.loads(ran.out)["task"] == "answer", ran.err
    assert load_task(tmp_path / "run" / "final").threshold is None  # all have an answer
    lines = [line for line in tiny.read_jsonl(tmp_path / "run" / "metrics.jsonl") if "loss" in line]
    assert all(line["loss"] == pytest.approx(line["loss_answer"] + line["loss_mlm"]) for line in lines)


# ---- both --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("task", "more"), [("tag", ["--crf"]), ("answer", [])])
def test_a_finished_run_is_left_as_it_is(cli, bert, files: Path, tmp_path: Path, task: str, more: list):
    from allmask.runs.driver import resume

    ran = cli(*words(task, bert, files, tmp_path / "run"), *QUICK, *more)
    assert ran.code == 0, ran.err
    assert resume(tmp_path / "run")["task"] == task
    ran = cli("finetune", "--resume", "--out", tmp_path / "run", "--max-length", 999)
    assert ran.code == 0 and "this run is finished" in ran.err


@pytest.mark.parametrize(
    ("task", "given", "code", "says"),
    [
        ("tag", ["--data", "{short}"], 3, "short.jsonl:1: 2 tokens but 1 tags"),
        ("tag", ["--eval", "{odd}"], 3, 'odd.jsonl:1: "tags" has an item 1 that is "B-英文"; expected one of O'),
        ("tag", ["--data", "{empty}"], 3, "empty.jsonl: the file is empty"),
        ("tag", ["--stride", 9], 2, "--stride is for --task answer, not for tag"),
        (
            "tag",
            ["--truncate", "head"],
            2,
            "--truncate is for --task title, translate, classify or choose",
        ),
        ("answer", ["--data", "{moved}"], 3, 'question q0: the answer "北京" is not at 1 of its context'),
        ("answer", ["--data", "{short}"], 3, 'short.jsonl:1: no "question"'),
        ("answer", ["--crf"], 2, "--crf is for --task tag, not for answer"),
        ("answer", ["--max-length", 2], 2, "--max-length is 2"),
    ],
)
def test_refusals_before_anything_is_written(cli, bert, files, tmp_path: Path, task, given, code, says):
    moved = {
        "context": "a 北京",
        "qas": [{"id": "q0", "question": "a", "answers": [{"text": "北京", "answer_start": 1}]}],
    }
    (tmp_path / "moved.json").write_text(json.dumps({"data": [{"paragraphs": [moved]}]}))
    (tmp_path / "empty.jsonl").write_text("")
    tiny.write_jsonl(tmp_path / "short.jsonl", [{"tokens": ["a", "b"], "tags": ["O"]}])
    tiny.write_jsonl(tmp_path / "odd.jsonl", [{"tokens": ["a"], "tags": ["B-英文"]}])
    names = {name.split(".")[0]: tmp_path / name for name in ("moved.json", "empty.jsonl", "short.jsonl", "odd.jsonl")}
    ran = cli(*words(task, bert, files, tmp_path / "run"), *[str(word).format(**names) for word in given])
    assert ran.code == code and says in ran.err, ran.err
    assert not (tmp_path / "run").exists()


def test_gpt2_is_refused(cli, gpt2, files: Path, tmp_path: Path):
    for task in ("tag", "answer"):
        ran = cli(*words(task, gpt2, files, tmp_path / "run"))
        assert ran.code == 2 and "reads from left to right" in ran.err
        assert not (tmp_path / "run").exists()


def test_bad_records_are_skipped(cli, runs, tmp_path: Path):
    rows = [*tagged(4), {"tokens": ["a"], "tags": ["B-英文"]}, {"tokens": ["a"], "tags": []}]
    file = tiny.write_jsonl(tmp_path / "test.jsonl", rows)
    assert cli("evaluate", runs["tag"], file).code == 3
    ran = cli("evaluate", runs["tag"], file, "--on-bad-record", "skip", "--json")
    assert ran.code == 0 and json.loads(ran.out)["records"] == 4 and "1 × unknown label" in ran.err


def test_refusals_of_the_others(cli, runs, bert, files: Path):
    assert (
        "tags, it does not generate text"
        in cli("predict", runs["tag"], files / "dev.jsonl", "-o", "-", "--beams", 4).err
    )
    assert "answers questions" in cli("predict", runs["answer"], "-", "-o", "-").err
    ran = cli("evaluate", runs["answer"], files / "dev.json", "--beams", 2)
    assert ran.code == 2 and "--beams" in ran.err
    for task in ("tag", "answer"):
        with pytest.raises(CheckpointError, match=f'was not trained for "{task}"'):
            allmask.pipeline(task, bert)
        with pytest.raises(CheckpointError, match=f'fine-tuned for "{task}", not to write'):
            allmask.pipeline("generate", runs[task])
        with pytest.raises(CheckpointError, match=f'was trained for "{task}", not for "classify"'):
            allmask.pipeline("classify", runs[task])


def test_folders_of_transformers_are_asked(cli, runs, files: Path, tmp_path: Path):
    kinds = {"tag": transformers.AutoModelForTokenClassification, "answer": transformers.AutoModelForQuestionAnswering}
    for task, kind in kinds.items():
        kind.from_pretrained(runs[task] / "final").save_pretrained(tmp_path / task)
        transformers.AutoTokenizer.from_pretrained(runs[task] / "final").save_pretrained(tmp_path / task)
    ran = cli("evaluate", tmp_path / "tag", files / "dev.jsonl", "--json")
    assert ran.code == 0 and json.loads(ran.out)["scores"]["f1"] > 0.9, ran.err
    ran = cli("evaluate", tmp_path / "answer", files / "plain.json", "--json")
    assert ran.code == 0 and json.loads(ran.out)["scores"]["f1"] > 50, ran.err


def test_the_largest_errors_are_kept():
    worst = Worst(2)
    for number, size in enumerate([1.0, 0.0, 3.0, 2.0, 3.0]):
        worst.add(size, lambda number=number: {"number": number})
    assert [row["number"] for row in worst.rows()] == [2, 4] and worst.seen == 5
