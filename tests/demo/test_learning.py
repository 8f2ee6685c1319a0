"""Learning by the clock, and words that follow the numbers."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from allmask.data import Record
from allmask.demo import learning
from allmask.demo.learning import BEFORE, LABELS, LEAD, MODEL, Lesson, draw_learning, table, verdict
from allmask.tasks.task import ModelFolder
from allmask.training import Score
from tests import tiny

METRICS = {"loss": 4.0, "rouge_l": 20.0}


def scores(lead: float, before: float, model: float) -> learning.Scores:
    rows = {LEAD: lead, BEFORE: before, MODEL: model}
    other = {"length": 7.0, "reference_length": 8.0}
    return {name: {**dict.fromkeys(LABELS, value), **other} for name, value in rows.items()}


# ---- the clock -------------------------------------------------------------------------------------------------------


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [1000.0]
    monkeypatch.setattr(learning.time, "monotonic", lambda: now[0])
    return now


def test_evaluations_take_a_small_part_of_the_time(clock: list[float]):
    def evaluator(model: Any) -> Score:
        clock[0] += 10.0
        return Score(1.0, METRICS)

    lesson, model = Lesson([], evaluator, ends=1500.0, last=10_000), None
    evaluated = 0.0
    for step in range(5, 10_000, 5):
        clock[0] += 5.0
        before, score = clock[0], lesson.evaluate(model, step)  # type: ignore[arg-type]
        evaluated += clock[0] - before
        if score is not None and score.stop:
            break
    assert 1500 <= before < 1500 + 10 + 5  # it stops at the first look after the end
    assert 60 <= evaluated <= (clock[0] - 1000) / 4


def test_the_last_step_is_evaluated(clock: list[float]):
    lesson: Any = Lesson([], lambda model: Score(1.0, METRICS), ends=math.inf, last=7)
    assert not lesson.evaluate(None, 5).stop  # the first look
    assert lesson.evaluate(None, 6) is None
    assert lesson.evaluate(None, 7) is not None


def test_a_model_learns_and_stops_in_time(writer: ModelFolder, tmp_path: Path):
    rows = [Record(row, str(number)) for number, row in enumerate(tiny.english(80))]
    model, said = learning.TASK.prepare(writer.model, rows, 1), []
    none = learning.learn(model, rows[:60], rows[60:], tmp_path, 0.0, 256, 2, written=2, say=said.append)
    assert none.steps == learning.LOOK and none.why == "the time was over"
    some = learning.learn(model, rows[:60], rows[60:], tmp_path, math.inf, 256, 2, steps=12, written=2, say=said.append)
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    losses = [line["eval_loss"] for line in lines if "eval_loss" in line]
    assert some.steps == 12 and [line["step"] for line in lines][-1] == 12
    assert losses[-1] < losses[0] and lines[0]["eval_lead_rouge_l"] > 0
    assert not (tmp_path / "training").exists() and not model.training
    assert [int(line.split()[1]) for line in said] == [0, learning.LOOK, 0, 12]


# ---- words -----------------------------------------------------------------------------------------------------------


def test_the_verdict_follows_the_numbers():
    assert "beats the first sentence by 6.0 ROUGE-L." in verdict(scores(20, 18, 26))
    assert "changed its ROUGE-L by +8.0" in verdict(scores(20, 18, 26))
    assert "only; the goal is 5" in verdict(scores(20, 18, 24.9))
    for failed in (scores(20, 18, 20), scores(20, 21, 12)):
        assert "does NOT beat" in verdict(failed) and "--minutes" in verdict(failed)
    assert "changed its ROUGE-L by -9.0" in verdict(scores(20, 21, 12))


def test_the_table_has_all_rows():
    rows = [line.split() for line in table(scores(20, 18, 26)).splitlines()]
    assert rows[1] == ["first", "sentence", "20.0", "20.0", "20.0", "7.0"]
    assert rows[3] == ["model", "26.0", "26.0", "26.0", "7.0"] and rows[4] == ["people", "8.0"]


def test_the_first_sentence_as_a_title():
    records = [Record({"source": "Read a file. Then stop.", "target": "Read a file"}, "a:1")]
    records += [Record({"source": "Nothing alike. Then stop.", "target": "Read a file"}, "a:2")]
    assert learning.lead_rouge_l(records) == pytest.approx(50.0)
    found = learning.score(["read a file"] * 2, ["none", "read a file"], records)
    assert [found[name]["rouge_l"] for name in (LEAD, BEFORE, MODEL)] == pytest.approx([50.0, 100.0, 50.0])


def test_samples_are_the_first_short_texts_with_their_own_titles():
    texts = ["long " * 50, "one", "two", "three"]
    records = [Record({"source": text, "target": f"people of {text}"}, "") for text in texts]
    shown = learning.samples(records, [f"before {t}" for t in texts], [f"after {t}" for t in texts], 2)
    values = [line.split(maxsplit=1)[1] for line in shown.splitlines() if line]
    assert values == [
        "one",
        "people of one",
        "before one",
        "after one",
        "two",
        "people of two",
        "before two",
        "after two",
    ]
    assert learning.samples(records[:1], ["b"], ["a"], 3)


def test_the_picture_is_a_png(tmp_path: Path):
    metrics = [{"step": 0, "eval_loss": 9.0, "eval_rouge_l": 0.0, "eval_lead_rouge_l": 11.0}, {"step": 1, "loss": 8.0}]
    draw_learning(tmp_path / "a.png", metrics, scores(20, 18, 26))
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
