"""The comparison is fair: both sides learn and are judged by the same rows, and nothing is computed twice."""

from __future__ import annotations

import argparse
import json
from collections import Counter
from pathlib import Path
from typing import Any

import common
import peers
import pytest
import sheets
import tasks
import torch

from allmask.model import load
from allmask.objectives import losses_of
from allmask.registry import TASKS
from allmask.training import Settings
from tests import tiny

CONTEXT = "北京欢迎你 red cat runs here there 白切鸡"
RECORDS: dict[str, list[dict[str, Any]]] = {
    "classify": [
        {"text": "red cat", "text_b": "北京", "label": "yes"},
        {"text": "blue dog runs", "text_b": "sings", "label": "no"},
        {"text": "你想吃啥", "text_b": "白切鸡 here", "label": "yes"},
    ],
    "tag": [
        {"tokens": ["red", "cat", "runs"], "tags": ["B-a", "I-a", "O"]},
        {"tokens": ["北", "京"], "tags": ["B-b", "I-b"]},
        {"tokens": ["zebraquartz", "there"], "tags": ["O", "B-a"]},
    ],
    "answer": [
        {"question": "red?", "context": CONTEXT, "answer": "cat", "start": CONTEXT.index("cat")},
        {"question": "吃啥", "context": CONTEXT * 3, "answer": ["白切鸡"], "start": [CONTEXT.index("白")]},
    ],
    "choose": [
        {"context": "red cat", "choices": ["runs", "sleeps here"], "label": 1},
        {"context": "你想吃啥", "choices": ["白", "切", "鸡 dog"], "label": 0},
    ],
}


@pytest.fixture(scope="module")
def body(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.bert(tmp_path_factory.mktemp("tiny") / "bert")


@pytest.fixture
def exact(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(common, "resolve_precision", lambda name: torch.float32)


@pytest.mark.parametrize("kind", RECORDS)
def test_both_sides_read_learn_and_score_alike(kind: str, body: Path, tmp_path: Path, exact):
    file = tiny.write_jsonl(tmp_path / "train.jsonl", RECORDS[kind])
    task, records, _ = TASKS[kind]().read_data(file, None, "stop", Counter())
    task = task.fitted(load(body))
    model = task.prepare(load(body), records, seed=3)
    with torch.no_grad():
        model.task_head.output.weight.mul_(30)  # so that scores differ by more than rounding
    model.save(tmp_path / "tuned")
    sheet = sheets.sheet_of(task, model, records)
    peer = peers.load(tmp_path / "tuned", sheet).eval()
    ours, theirs = sheets.logits_of(model, sheet, "fp32"), peers.peer_logits(peer, sheet)
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, other, atol=1e-4, rtol=1e-4)
    assert sheet.score(ours) == sheet.score(theirs)
    work = task.workload(model, records, records, precision="fp32")
    assert sheet.score(ours)[sheet.metric] == pytest.approx(work.evaluate(model).value * (kind == "answer" or 100))
    units = list(range(len(sheet.lengths)))[::-1]
    units = units[:1] if kind == "answer" else units  # transformers lets padding be an answer
    ((loss, count),) = losses_of(model, work.batch(units, 0)).values()
    assert peers.loss_of(peer, sheet, units).item() == pytest.approx(loss.item() / count, rel=1e-4)


@pytest.mark.parametrize("kind", RECORDS)
def test_perfect_answers_are_worth_everything(kind: str, body: Path, tmp_path: Path):
    file = tiny.write_jsonl(tmp_path / "train.jsonl", RECORDS[kind])
    task, records, _ = TASKS[kind]().read_data(file, None, "stop", Counter())
    task = task.fitted(load(body))
    sheet = sheets.sheet_of(task, task.prepare(load(body), records), records)
    assert sheet.score(perfect(sheet))[sheet.metric] == 100.0


def perfect(sheet: sheets.Sheet) -> list[torch.Tensor]:
    if isinstance(sheet, sheets.Labelled):
        return list(torch.eye(len(sheet.model.labels))[sheet.targets])
    if isinstance(sheet, sheets.Tagged):
        return [torch.eye(len(sheet.names))[torch.from_numpy(targets)] for targets in sheet.targets]
    if isinstance(sheet, sheets.Offered):
        units = range(len(sheet.targets))
        return [
            torch.tensor([float(row == sheet.rows_of(u)[sheet.targets[u]])]) for u in units for row in sheet.rows_of(u)
        ]
    return [spans(len(row), *span) for row, span in zip(sheet.rows, sheet.targets, strict=True)]


def spans(length: int, start: int, end: int) -> torch.Tensor:
    """Sure of a span, which at [CLS] is none: there nothing stands out."""
    scores = torch.zeros(length, 2)
    scores[start, 0] = scores[end, 1] = 9.0
    return scores


def test_one_softmax_for_the_choices_of_a_question(body: Path, tmp_path: Path):
    """Against cross-entropy by hand, question by question."""
    file = tiny.write_jsonl(tmp_path / "train.jsonl", RECORDS["choose"])
    task, records, _ = TASKS["choose"]().read_data(file, None, "stop", Counter())
    sheet = sheets.sheet_of(task, task.prepare(load(body), records), records)
    scores = torch.tensor([0.5, -1.0, 2.0, 0.25, -0.5])

    def peer(**inputs: torch.Tensor) -> argparse.Namespace:
        return argparse.Namespace(logits=scores[:, None])

    by_hand = [-scores[:2].log_softmax(0)[1], -scores[2:].log_softmax(0)[0]]
    torch.testing.assert_close(peers.loss_of(peer, sheet, [0, 1]), torch.stack(by_hand).mean())


def test_the_peer_is_tuned(body: Path, tmp_path: Path):
    file = tiny.write_jsonl(tmp_path / "train.jsonl", RECORDS["classify"])
    task, records, _ = TASKS["classify"]().read_data(file, None, "stop", Counter())
    sheet = sheets.sheet_of(task, task.prepare(load(body), records), records)
    tuned = peers.tune(body, sheet, sheet, Settings(epochs=40.0, batch_tokens=64, lr=1e-2, seed=1))
    assert tuned.dev == 100.0 and sheet.score(peers.peer_logits(tuned.model, sheet))["accuracy"] == 100.0


# ---- records -------------------------------------------------------------------------------------------------


def test_records_are_spread_evenly():
    assert tasks.spread(list(range(10)), 4) == [0, 2, 5, 7]
    assert tasks.spread([1, 2], 5) == [1, 2]
    assert tasks.spread([], 5) == []


def test_what_is_missing_is_taken_from_the_end_of_train():
    train, dev, test = list(range(20)), [100, 101], [200, 201]
    whole = {"train": train, "dev": dev, "test": test}
    assert tasks.split(train, dev, test, 99, 99, 99) == whole
    assert tasks.split(train, [], test, 99, 2, 99) == {"train": train[:18], "dev": [18, 19], "test": test}
    assert tasks.split(train, dev, [], 99, 99, 99) == {"train": train[:16], "dev": train[16:], "test": dev}
    assert tasks.split(train, dev, test, 2, 1, 1) == {"train": [0, 10], "dev": [100], "test": [200]}


def test_squad_becomes_lines_and_what_cannot_be_learnt_is_left_out(tmp_path: Path):
    entry = {"id": "a", "question": "cat?", "answers": [{"text": "cat", "answer_start": CONTEXT.index("cat")}]}
    empty = {**entry, "id": "d", "question": ""}
    wrong = {"id": "b", "question": "cat?", "answers": [{"text": "cat", "answer_start": 0}]}
    paragraphs = [{"context": CONTEXT, "qas": [entry, wrong, empty, {**entry, "id": "c"}]}]
    for part in ("train", "test"):
        (tmp_path / f"{part}.json").write_text(json.dumps({"data": [{"paragraphs": paragraphs}]}), encoding="utf-8")
    about = tasks.DataSet("answer", True, 9, 9, 9)
    assert tasks.prepare(tmp_path, about, None, tmp_path / "out") == {"train": 2, "dev": 0, "test": 2}
    _, records, _ = TASKS["answer"]().read_data(tmp_path / "out" / "train.jsonl", None, "stop", Counter())
    assert [record.fields["answers"] for record in records] == [[("cat", CONTEXT.index("cat"))]] * 2


def test_answers_move_with_what_is_left_of_their_context(tmp_path: Path):
    context = "red dog. blue cat. cat runs here."
    answers = [{"text": "cat", "answer_start": place} for place in (14, 19)]
    entry = {"id": "a", "question": "cat?", "answers": answers}
    content = json.dumps({"data": [{"paragraphs": [{"context": context, "qas": [entry]}]}]})
    (tmp_path / "train.json").write_text(content, encoding="utf-8")
    tasks.prepare(tmp_path, tasks.DataSet("answer", True, 9, 9, 9, longest=10), None, tmp_path / "out")
    (told,) = tiny.read_jsonl(tmp_path / "out" / "train.jsonl")
    assert (told["context"], told["answer"], told["start"]) == ("blue cat. ", ["cat"], [5])


def test_a_context_is_cut_around_the_answer_that_is_in_its_place(tmp_path: Path):
    answers = [{"text": "cat", "answer_start": 0}, {"text": "cat", "answer_start": 14}]
    entry = {"id": "a", "question": "cat?", "answers": answers}
    paragraphs = [{"context": "red dog. blue cat. sings here.", "qas": [entry]}]
    (tmp_path / "train.json").write_text(json.dumps({"data": [{"paragraphs": paragraphs}]}), encoding="utf-8")
    tasks.prepare(tmp_path, tasks.DataSet("answer", True, 9, 9, 9, longest=10), None, tmp_path / "out")
    (told,) = tiny.read_jsonl(tmp_path / "out" / "train.jsonl")
    assert (told["context"], told["answer"], told["start"]) == ("blue cat. ", ["cat"], [5])


def test_a_context_is_cut_to_sentences_around_its_answer():
    context = "一二三。四五六七。八九十！甲乙丙丁？戊己庚辛。"
    found = {tasks.around(context, 11, 12, 10, str(seed)) for seed in range(20)}
    assert found == {(4, 13), (9, 18)}  # either neighbour, and no room for both
    assert tasks.around(context, 11, 12, 3, "") == (9, 13)  # its own sentence in any case
    assert tasks.around(context, 7, 12, 1, "") == (4, 13)  # or the two that it stands in
    assert tasks.around(context, 0, 1, 999, "") == (0, len(context))
    assert tasks.around("没有句号", 1, 2, 2, "") == (0, 4)


# ---- results -------------------------------------------------------------------------------------------------


def row(seed: int, score: float, rate: float = 1e-4) -> dict[str, Any]:
    return {"seed": seed, "lr": rate, "dev": score, "scores": {"F1": score}, "metric": "F1", "minutes": 2.0}


def test_the_table():
    line = tasks.Compared(
        "x", {"train": 1000, "dev": 20, "test": 30}, 3.0, [row(0, 80.0), row(1, 82.0)], [row(0, 79.5)]
    )
    *_, last = tasks.table([line]).splitlines()
    assert last == "| x | F1 | 1,000 / 20 / 30 | 3 | 2 | 0.0001 / 0.0001 | 81.0 ± 1.4 | 79.5 | +1.5 | 2.0 / 2.0 |"


def test_nothing_is_computed_twice_and_the_rate_is_chosen_on_dev(tmp_path: Path, body: Path, monkeypatch):
    folder = tmp_path / "data" / "sst2"
    folder.mkdir(parents=True)
    for part in ("train", "dev", "test"):
        rows = RECORDS["classify"] if part == "train" else RECORDS["classify"][::-1]
        tiny.write_jsonl(folder / f"{part}.jsonl", rows)
    done = []

    def ours(case: tasks.Case, seed: int, run: Path) -> dict[str, Any]:
        done.append(("allmask", seed))
        return {name: row(seed, 90.0)[name] for name in ("dev", "scores", "metric", "minutes")}

    def theirs(case: tasks.Case, seed: int, rate: float) -> dict[str, Any]:
        done.append(("transformers", seed, rate))
        return {
            name: row(seed, 91.0 if rate == 5e-5 else 85.0)[name] for name in ("dev", "scores", "metric", "minutes")
        }

    monkeypatch.setattr(tasks, "ours", ours)
    monkeypatch.setattr(tasks, "theirs", theirs)
    args = argparse.Namespace(
        data=tmp_path / "data", out=tmp_path / "out", limit=None, epochs=None, english=str(body), chinese=None
    )
    results = tasks.Results(tmp_path / "results.jsonl")
    line = tasks.compare(tasks.Case.of("sst2", args), 2, results, tmp_path / "runs")
    assert [found["lr"] for found in line.theirs] == [5e-5, 5e-5]
    asked = [("allmask", 0), ("allmask", 1), ("transformers", 0, 1e-4), ("transformers", 0, 5e-5)]
    assert done == [*asked, ("transformers", 1, 5e-5)]
    assert tasks.compare(tasks.Case.of("sst2", args), 2, results, tmp_path / "runs") == line
    assert len(done) == 5
    args.limit = 2  # another question
    tasks.compare(tasks.Case.of("sst2", args), 1, results, tmp_path / "runs")
    assert len(done) == 8
