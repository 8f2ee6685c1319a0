"""Titles get the length that people write: bisection, what it may cost, and what is said."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from allmask.data import Record
from allmask.model import Model, load
from allmask.tasks.common import calibration
from allmask.tasks.common.calibration import COST, NEAR, TRIES, Measured, calibrated, nearest
from allmask.tasks.metrics.text import score_texts
from allmask.tasks.seq2seq import Title
from tests import tiny


@given(st.floats(-3.9, 3.9), st.floats(0.5, 3), st.booleans())
def test_bisection_finds_the_value_with_the_wanted_length(answer: float, slope: float, rising: bool):
    def measure(value: float) -> Measured:
        calls.append(value)
        return Measured(value, 20 + (1 if rising else -1) * slope * (value - answer), 30.0)

    calls: list[float] = []
    first = measure(0.0)
    found = nearest(measure, first, (-4.0, 4.0), 20.0, rising)
    assert len(calls) <= 1 + TRIES
    assert abs(found.value - answer) <= max(4 / 2**TRIES, NEAR * 20 / slope) + 1e-9  # halved each time, or near enough
    assert abs(found.length - 20) <= abs(first.length - 20)


def test_a_length_that_costs_too_much_is_not_taken():
    worse = nearest(lambda bias: Measured(bias, 10, 30 - COST - 0.1), Measured(0, 5, 30), (-4, 4), 10, rising=False)
    assert worse == Measured(0, 5, 30)
    same = nearest(lambda bias: Measured(bias, 10, 30 - COST), Measured(0, 5, 30), (-4, 4), 10, rising=False)
    assert same.length == 10


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return load(tiny.bert(tmp_path_factory.mktemp("tiny") / "bert")).with_language_model(
        torch.Generator().manual_seed(1)
    )


def records(length: int) -> list[Record]:
    return [Record({"source": f"北京 欢迎 你 {number}", "target": "你 " * length}, "") for number in range(24)]


@pytest.mark.parametrize("length", [2, 6])
def test_titles_get_the_length_of_the_references(model: Model, length: int, monkeypatch, caplog):
    monkeypatch.setattr(calibration, "COST", 100.0)
    caplog.set_level(logging.INFO, "allmask")
    others = records(length)
    task = Title(max_source=9, max_target=8)
    found = calibrated(task, model, others)
    assert None not in (found.end_bias, found.length_penalty, found.no_repeat_ngram)

    def mean(task: Title, **options) -> float:
        written = task.predictor(model)([record.fields["source"] for record in others], **options)
        return score_texts(written, [record.fields["target"] for record in others])["length"]

    best = [written[0][1] for written in found.predictor(model).write([record.fields["source"] for record in others])]
    assert found.usual_score == pytest.approx(sorted(one.score for one in best)[1])  # of 24; divided by the length
    for options in ({}, {"beams": 4}):
        assert abs(mean(found, **options) - length) <= abs(mean(task, **options) - length)
    assert "people write" in caplog.text and "of the first sentence" in caplog.text


def test_given_values_stay(model: Model):
    task = Title(max_source=9, max_target=8, end_bias=1.5, length_penalty=0.3, no_repeat_ngram=0)
    assert replace(calibrated(task, model, records(3)), usual_score=None) == task
    task = replace(task, usual_score=-9.0)
    assert calibrated(task, model, records(3)) == task
    assert task.decoding(model).end_bias == 1.5 and task.decoding(model, beams=2).end_bias == 0.0
    assert task.decoding(model, beams=2).length_penalty == 0.3
    assert task.decoding(model, end_bias=-1.0).end_bias == -1.0


def test_too_few_records(model: Model, caplog):
    caplog.set_level(logging.INFO, "allmask")
    task = Title(max_source=9, max_target=8)
    assert calibrated(task, model, records(3)[:19]) == task
    assert "not calibrated" in caplog.text
    assert "ROUGE-L of 19 held-out titles" in caplog.text  # compared all the same


def test_a_model_worse_than_the_first_sentence_is_called_so(model: Model, caplog):
    """The reference is the first sentence itself, so nothing can be better."""
    others = [
        Record({"source": f"the mask decides every role {n}.", "target": f"the mask decides every role {n}."}, "")
        for n in range(20)
    ]
    calibrated(Title(max_source=9, max_target=8), model, others)
    assert "NOT better than the first sentence" in caplog.text and "more pairs" in caplog.text


def test_the_calibration_is_saved_with_the_model(model: Model, tmp_path: Path):
    from allmask.runs.folder import save_model
    from allmask.tasks.task import load_task

    task = Title(max_source=9, max_target=8, end_bias=-0.5, length_penalty=0.75, no_repeat_ngram=2)
    save_model(model, task, tmp_path / "final")
    assert load_task(tmp_path / "final") == task
