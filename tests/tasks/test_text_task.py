"""A small task on `TextTask`: pairs of texts, numbers as labels, windows of long texts."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

import pytest
import torch

from allmask.data import DataFile, number, text
from allmask.errors import DataError, UsageError
from allmask.model import load
from allmask.nn.heads import Labels
from allmask.tasks.common.auxiliary import Auxiliary
from allmask.tasks.text_task import TextTask
from tests import tiny


class Closeness(TextTask):
    """How alike two texts are, and how alike their lengths are: two numbers."""

    name = "closeness"
    inputs: ClassVar = {"first": text, "second": text}
    targets: ClassVar = {"likeness": number, "length": number}
    labels = Labels("number", ("likeness", "length"))

    def target(self, fields):
        return [fields["likeness"], fields["length"]]

    def prediction(self, scores):
        return {"prediction": scores[0].item(), "length_prediction": scores[1].item()}

    def score(self, predictions, records):
        errors = [
            abs(one["prediction"] - row.fields["likeness"]) for one, row in zip(predictions, records, strict=True)
        ]
        return {"negative_error": -sum(errors) / len(errors)}


ROWS = [
    {"id": 1, "first": "red cat", "second": "red dog", "likeness": 0.5, "length": 1.0},
    {"id": 2, "first": "blue bird sings", "second": "cat", "likeness": 0.0, "length": 0.3},
    {"id": 3, "first": "dog sleeps here " * 20, "second": "dog sleeps", "likeness": 0.9, "length": 0.1},
]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tiny.write_jsonl(tmp_path / "pairs.jsonl", ROWS)


@pytest.fixture
def trained(tmp_path: Path, file: Path):
    """The task as a run has it, its records, and a model with its head."""
    model = load(tiny.bert(tmp_path / "bert"))
    task, records, held_out = Closeness(truncate="windows").read_data(file, file, "stop", Counter())
    task = task.fitted(model)
    return task, records, held_out, task.prepare(model, records)


def test_a_run_learns_it(trained):
    task, records, held_out, model = trained
    assert task == Closeness(max_length=48, truncate="windows") and model.labels == Closeness.labels
    settings = task.suggested_settings(model, records)
    assert settings.keys() == task.open_settings == {"lr", "batch_tokens"}
    work = task.workload(model, records, held_out, precision="fp32")
    assert len(work.lengths) == 3 and work.lengths[2] > 48  # in windows
    batch = work.batch([2, 0], epoch=0)
    assert batch.asked.name == "closeness" and batch.counts == {"closeness": 4}
    assert torch.equal(batch.asked.gold, torch.tensor([[0.9, 0.1], [0.5, 1.0]]))
    mixed = replace(work, auxiliary=Auxiliary.of(task.prepare(model, records, language=True), 0.5, seed=0))
    assert mixed.batch([0], epoch=0).counts.keys() == {"closeness", "mlm"}
    score = work.evaluate(model)
    assert score.metric == "negative_error" and score.value == score.metrics["negative_error"] < 0
    work.cache_features(model, "fp32")
    assert work.evaluate(model).metrics == pytest.approx(score.metrics, abs=1e-6)


def test_it_predicts_what_its_evaluation_scores(trained, file: Path):
    task, records, held_out, model = trained
    predictor = task.predictor(model, "fp32")
    found = list(predictor.predict(list(predictor.read(file))))
    expected = task.workload(model, records, held_out, precision="fp32").evaluate(model)
    assert task.score(found, records) == pytest.approx({"negative_error": expected.value}, abs=1e-6)
    evaluated = predictor.evaluate(predictor.read(file, targets=True, limit=2), show=1)
    assert evaluated.count == 2 and evaluated.values["scores"] == pytest.approx(task.score(found[:2], records[:2]))
    (error,) = evaluated.values["errors"]
    assert error["where"].endswith("pairs.jsonl:1") and error["prediction"] == pytest.approx(found[0]["prediction"])
    assert 'first "red cat"' in evaluated.markdown() and "likeness 0.5" in evaluated.markdown()

    pair = {"first": "red cat", "second": "red dog"}
    assert predictor(pair) == pytest.approx(found[0], abs=1e-6) == predictor([pair])[0]
    with pytest.raises(UsageError, match='closeness: no "second"'):
        predictor("red cat")
    with pytest.raises(UsageError, match="a line of stdin is a text"):
        predictor.expect_lines()


def test_targets_are_needed_to_evaluate_and_not_to_predict(trained, tmp_path: Path):
    predictor = trained[0].predictor(trained[3], "fp32")
    rows = [{name: row[name] for name in ("id", "first", "second")} | {"source": "web"} for row in ROWS]
    file = tiny.write_jsonl(tmp_path / "new.jsonl", rows)
    found = next(predictor.read(DataFile(file, whole=True)))
    assert found.fields == {name: rows[0][name] for name in ("first", "second")} and found.row == rows[0]
    with pytest.raises(DataError, match=r'new.jsonl:1: no "likeness"'):
        list(predictor.read(file, targets=True))


def test_texts_that_are_cut_are_counted(trained):
    task, records, _, model = trained
    predictor = replace(task, truncate="head").predictor(model, "fp32")
    list(predictor.predict(records))
    assert predictor.cut == 1 and predictor.max_tokens == 48


def test_a_line_of_stdin_may_be_the_only_input(tmp_path: Path):
    class Words(Closeness):
        name = "words"
        inputs: ClassVar = {"text": text}
        labels = Labels("single", ("few", "many"))

        def prediction(self, scores):
            return {"prediction": self.labels.names[int(scores.argmax())]}

    predictor = Words().predictor(Words().prepare(load(tiny.bert(tmp_path / "bert")), []), "fp32")
    predictor.expect_lines()
    assert predictor("red cat")["prediction"] in ("few", "many")
    with pytest.raises(UsageError, match=r'words: "text" is blank'):
        predictor(" ")
