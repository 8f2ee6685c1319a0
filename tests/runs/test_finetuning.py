"""What a run on records decides for itself: which of them it holds out."""

from __future__ import annotations

import json
import logging
import random
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from allmask.data import Record
from allmask.model import load
from allmask.registry import TASKS
from allmask.runs.finetuning import FineTuning, divided
from tests import tiny


def source(record: Record) -> str:
    return record.fields["source"]


@given(st.lists(st.sampled_from("abcdefghij"), min_size=1, max_size=40), st.floats(0, 0.99), st.randoms())
def test_equal_texts_are_on_one_side_in_any_order(texts: list[str], share: float, rng):
    records = [Record({"source": text, "number": number}, "") for number, text in enumerate(texts)]
    train, held_out = divided(records, share, source)
    assert train and sorted(r.fields["number"] for r in (*train, *held_out)) == list(range(len(texts)))
    assert not {*map(source, train)} & {*map(source, held_out)}
    others = rng.sample(records, len(records))
    assert {*map(source, divided(others, share, source)[0])} == {*map(source, train)}


def test_about_the_share_is_held_out():
    records = [Record({"source": str(number)}, "") for number in range(10_000)]
    held_out = len(divided(records, 0.1, source)[1])
    assert 900 < held_out < 1100  # three standard deviations
    assert not divided(records, 0.0, source)[1]


def test_a_run_without_held_out_records_takes_some(cli, tmp_path: Path):
    bert = tiny.bert(tmp_path / "bert")
    data = tiny.write_jsonl(tmp_path / "data.jsonl", tiny.english(150))
    words = ("finetune", bert, "--data", data, "--max-target", 8, "--steps", 2)
    ran = cli(*words, "--out", tmp_path / "run")
    assert ran.code == 0, ran.err
    (said,) = (line for line in ran.err.splitlines() if line.startswith("data: "))
    learnt, held_out = (int(word) for word in said.split() if word.isdigit())
    assert learnt + held_out == 150 and 5 <= held_out <= 30
    assert "rouge_l" in ran.out
    ran = cli(*words, "--held-out", 0, "--out", tmp_path / "all")
    assert ran.code == 0 and "data: 150 to learn from, 0 held out" in ran.err and "nothing is held out" in ran.err


def test_a_model_that_does_not_know_the_words_is_warned_of(cli, tmp_path: Path):
    """Of ten records nothing is held out, and the reason is said, too."""
    bert = tiny.bert(tmp_path / "bert")
    rows = [{"source": f"red {word}", "target": "red"} for word in ("ж", "red") * 5]
    words = (
        "finetune",
        bert,
        "--data",
        tiny.write_jsonl(tmp_path / "data.jsonl", rows),
        "--max-target",
        8,
        "--steps",
        1,
    )
    ran = cli(*words, "--out", tmp_path / "run")
    assert ran.code == 0, ran.err
    assert "data: 10 to learn from, 0 held out (fewer than 100 records; name others with --eval)" in ran.err
    assert f"17% of the tokens are unknown to {bert}; allmask-en may know them" in ran.err  # 5 of 30
    ran = cli("check", tmp_path / "data.jsonl", bert, "--max-target", 8, "--json")
    assert ran.code == 0, ran.err
    found = json.loads(ran.out)
    assert found["unknown"] == pytest.approx(5 / 30)
    assert "17% of the tokens" in cli("check", tmp_path / "data.jsonl", bert, "--max-target", 8).out
    known = tiny.write_jsonl(tmp_path / "known.jsonl", tiny.english(10))
    ran = cli("check", known, bert, "--max-target", 8)
    assert "it can be trained on" in ran.out and "unknown" not in ran.out


@pytest.mark.parametrize("task", ["title", "classify"])
def test_a_smaller_vocabulary_keeps_all_characters(cli, tmp_path: Path, task: str):
    bert = tiny.bert(tmp_path / "bert")
    rows = [{"source": "red cat", "target": "red", "text": "red cat", "label": word} for word in "abab"]
    train = tiny.write_jsonl(tmp_path / "train.jsonl", rows)
    limit = ("--max-target", 8) if task == "title" else ()
    ran = cli(
        "finetune", bert, "--task", task, "--data", train, *limit, "--steps", 1, "--prune", "--out", tmp_path / "a"
    )
    assert ran.code == 0, ran.err
    whole, small = load(bert).tokenizer, load(tmp_path / "a" / "final").tokenizer
    assert whole is not None and small is not None and small.size < whole.size
    assert "北" in whole.encode("北京").tokens and small.encode("北京").tokens == whole.encode("北京").tokens


ROWS = {  # many records, few inputs
    "title": [{"source": f"s{n % 130}", "target": f"t{n}"} for n in range(260)],
    "translate": [{"source": f"北{n % 130}", "target": f"t{n}"} for n in range(260)],
    "classify": [{"text": f"s{n % 130}", "label": n % 2} for n in range(260)],
    "tag": [{"tokens": [f"s{n % 130}", "x"], "tags": ["B-a", "O"]} for n in range(260)],
    "choose": [{"context": f"s{n % 130}", "choices": [f"{n}", "x"], "label": n % 2} for n in range(260)],
    "answer": [{"question": f"q{n}", "context": f"s{n % 130} x", "answer": "x"} for n in range(260)],
}


@pytest.mark.parametrize("task", ROWS)
def test_every_task_holds_out_the_same_records_every_time(task: str, tmp_path: Path, caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("allmask"), "propagate", True)
    caplog.set_level(logging.INFO, "allmask")
    parts = []
    for seed in (0, 1):  # in another order
        rows = random.Random(seed).sample(ROWS[task], 260)
        file = tiny.write_jsonl(tmp_path / f"{seed}.jsonl", rows)
        found = FineTuning(str(file), "minilm", task=TASKS[task]()).records()
        parts.append({str(sorted(record.fields.items())) for record in found.held_out})
        inputs = [{found.task.unit(record) for record in part} for part in (found.train, found.held_out)]
        assert not inputs[0] & inputs[1] and 6 < len(inputs[1]) < 26
        said = (
            f"data: {len(found.train)} to learn from, {len(found.held_out)} held out (10% of the inputs, by their hash"
        )
        assert any(said in record.getMessage() for record in caplog.records)
    assert parts[0] == parts[1]
