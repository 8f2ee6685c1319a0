"""Answering: files of questions, windows and spans, the loss it learns from, and what is made of what a model says."""

from __future__ import annotations

import json
import random
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st

from allmask.data import Record
from allmask.errors import CheckpointError, DataError, UsageError
from allmask.model import Model, load
from allmask.nn.heads import SPAN
from allmask.objectives import losses_of
from allmask.tasks.answer import (
    Answer,
    Answerer,
    Span,
    best_spans,
    read_contexts,
    read_questions,
    replies,
)
from allmask.tasks.common.heads import HeldOut, token_answers
from tests import tiny

transformers.logging.set_verbosity_error()
transformers.utils.logging.disable_progress_bar()
ODD = "Zoë cafe\u0301 北京，👩🏽‍🚀! 𠀀 red\u3000cat 👍🏽 end"


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return load(tiny.bert(tmp_path_factory.mktemp("models") / "bert"))


@pytest.fixture(scope="module")
def model(bert: Model) -> Model:
    """With a head whose answers differ: fresh ones are all near zero."""
    rng = torch.Generator().manual_seed(1)
    made = bert.with_labels(SPAN, rng)
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=rng) * 0.3 + ("norm.weight" in name))
    return made


def rows(count: int = 10, longest: int = 60, seed: int = 0, none: bool = False) -> list[Record]:
    rng = random.Random(seed)
    made = []
    for number in range(count):
        words = [rng.choice([*tiny.WORDS, "北京", "欢迎"]) for _ in range(rng.randint(2, longest))]
        first = rng.randrange(len(words))
        predicted = " ".join(words[first : first + rng.randint(1, 4)])
        start = len(" ".join(words[:first])) + (first > 0)
        answers = [] if none and number % 3 == 0 else [(predicted, start)]
        fields = {"id": str(number), "question": rng.choice(tiny.WORDS), "context": " ".join(words), "answers": answers}
        made.append(Record(fields, f"rows:{number}"))
    return made


# ---- windows and spans -------------------------------------------------------------------------------------------


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 80), st.integers(12, 40), st.integers(0, 12))
def test_windows_cover_the_context_and_each_token_belongs_to_one(bert, length: int, size: int, stride: int):
    task = Answer(max_length=size, max_question=4, stride=stride)
    context = " ".join(["red", "blue"] * length)[: 5 * length].strip()
    (read,), (views,) = task.rows(bert, [("cat dog bird runs sleeps sings", context)])
    home = np.zeros(len(read.ids), dtype=int)
    for view in views:
        assert len(view.example) <= size and view.offset == 6
        tokens = view.example.ids[view.offset : view.offset + view.count]
        assert tokens.tolist() == read.ids[view.start : view.start + view.count]
        assert view.example.segments.tolist() == [0] * 6 + [1] * (view.count + 1)
        home[view.start : view.start + view.count] += view.own
    assert (home == 1).all()


def test_same_rows_as_transformers(bert, tmp_path: Path):
    bert.tokenizer.save(tmp_path)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    question, context = "red cat", "blue dog runs here. 北京欢迎你 " * 4
    expected = theirs(
        question, context, truncation="only_second", max_length=20, stride=6, return_overflowing_tokens=True
    )
    _, (views,) = Answer(max_length=20, stride=6).rows(bert, [(question, context)])
    ours = [view.example.ids.tolist() for view in views]
    assert ours[:-1] == expected["input_ids"][: len(ours) - 1]  # the last of ours is moved back to be full
    assert views[0].example.segments.tolist() == expected["token_type_ids"][0]


@pytest.mark.parametrize("text", [ODD, "北京欢迎你。", "a\u200bb cafe\u0301s", "👩🏽‍🚀👩🏽‍🚀 x"])
def test_characters_of_spans_are_exact(bert, text: str):
    (context,) = read_contexts(bert.tokenizer, [text])
    for first in range(len(context.ids)):
        for last in range(first, len(context.ids)):
            start, end = context.characters(first, last)
            assert context.span_of(start, end) == (first, last)
            follows = text[end : end + 1]
            assert not follows or not (0x300 <= ord(follows) < 0x370 or ord(follows) in (0x200D, 0xFE0F, 0x1F3FD))
    start = text.find("cafe\u0301")
    if start >= 0:
        span = context.span_of(start, start + 5)
        assert span is not None and text[slice(*context.characters(*span))].startswith("cafe\u0301")


def brute(views, answers, longest: int) -> dict[tuple[int, int], float]:
    found: dict[tuple[int, int], float] = {}
    for view, scores in zip(views, answers, strict=True):
        for a in range(view.count):
            for b in range(a, min(a + longest, view.count)):
                if view.own[a]:
                    key = (view.start + a, view.start + b)
                    score = float(scores[view.offset + a, 0] + scores[view.offset + b, 1])
                    found[key] = max(score, found.get(key, -1e9))
    return found


@pytest.mark.parametrize("longest", [1, 3, 99])
def test_the_best_spans_are_the_best_of_all_that_are_valid(model, longest: int):
    task = Answer(max_length=24, stride=6)
    for seed, record in enumerate(rows(6)):
        _, (views,) = task.reading(model, [record])
        rng = torch.Generator().manual_seed(seed)
        answers = [torch.randn(len(view.example), 2, generator=rng) for view in views]
        spans, null = best_spans(views, answers, longest)
        every = brute(views, answers, longest)
        best = sorted(every.values(), reverse=True)[: len(spans)]
        assert [span.score for span in spans] == pytest.approx(best)
        assert all(every[span.first, span.last] == pytest.approx(span.score) for span in spans)
        assert null == pytest.approx(min(float(scores[0].sum()) for scores in answers))


def test_no_answer_by_its_threshold(bert):
    (context,) = read_contexts(bert.tokenizer, ["red cat runs"])
    spans = [Span(0, 0, 2.0), Span(1, 2, 1.0)]
    assert [one.text for one in replies(context, spans, 9.0, None).best] == ["red", "cat runs"]
    assert [one.text for one in replies(context, spans, 3.0, 0.5).best] == ["", "red", "cat runs"]
    assert [one.text for one in replies(context, spans, 3.0, 1.5).best] == ["red", "", "cat runs"]
    found = replies(context, spans, 3.0, 0.5)
    assert found.null == 1.0 and sum(one.score for one in found.best) == pytest.approx(1.0)
    assert replies(context, [], 3.0, None).best[0].text == ""


# ---- the loss, against transformers ------------------------------------------------------------------------------


def test_forward_loss_and_gradient_are_those_of_transformers(model, tmp_path: Path):
    model.save(tmp_path / "model")
    theirs = transformers.AutoModelForQuestionAnswering.from_pretrained(tmp_path / "model").eval()
    work = Answer(max_length=24, stride=6).workload(model.eval(), rows(8))
    model.zero_grad()
    numbers = [number for number, length in enumerate(work.lengths) if length == 24]  # its softmax sees padding
    loss, count = losses_of(model, work.batch(numbers, 0))["answer"]
    (loss / count).backward()
    stacked = [
        torch.from_numpy(np.stack([getattr(work.windows[n].example, name) for n in numbers])).long()
        for name in ("ids", "segments")
    ]
    true = torch.from_numpy(work.targets[numbers])
    result = theirs(stacked[0], token_type_ids=stacked[1], start_positions=true[:, 0], end_positions=true[:, 1])
    result.loss.backward()
    assert len(set(map(tuple, work.targets[numbers].tolist()))) > 2  # answers at several places
    torch.testing.assert_close(loss / count, result.loss, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(model.task_head.output.weight.grad, theirs.qa_outputs.weight.grad, atol=1e-5, rtol=1e-4)
    predicted = token_answers(model, [work.windows[n].example for n in numbers], [np.arange(24)] * len(numbers))
    torch.testing.assert_close(torch.stack(predicted)[..., 0], result.start_logits, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(torch.stack(predicted)[..., 1], result.end_logits, atol=1e-5, rtol=1e-5)


def test_there_and_back(model, tmp_path: Path):
    model.save(tmp_path / "ours")
    theirs = transformers.AutoModelForQuestionAnswering.from_pretrained(tmp_path / "ours").eval()
    assert type(theirs).__name__ == "BertForQuestionAnswering"
    theirs.save_pretrained(tmp_path / "theirs")
    ids = torch.tensor([[2, 7, 9, 11, 3]])
    for folder in ("ours", "theirs"):
        again = load(tmp_path / folder)
        assert again.labels == SPAN and again.pooler is None
        for name, tensor in model.state_dict().items():
            assert torch.equal(again.state_dict()[name], tensor)
        torch.testing.assert_close(again(ids).answers[:, 0], theirs(ids).start_logits[0], atol=1e-5, rtol=1e-5)


def test_packed_is_one_by_one(model):
    work = Answer(max_length=24, stride=6).workload(model, rows(8))
    numbers = [7, 2, 9, 0, 4]
    together = losses_of(model, work.batch(numbers, 0))["answer"]
    alone = [losses_of(model, work.batch([number], 0))["answer"] for number in numbers]
    assert together[0].item() == pytest.approx(sum(loss.item() for loss, _ in alone), rel=1e-5)
    assert together[1] == sum(count for _, count in alone) == 10


def test_the_true_span_is_the_answer(model):
    records = rows(12)
    work = Answer(max_length=24, stride=6).workload(model, records)
    contexts, views = Answer(max_length=24, stride=6).reading(model, records)
    true = iter(work.targets.tolist())
    for record, context, some in zip(records, contexts, views, strict=True):
        predicted, start = record.fields["answers"][0]
        places = [next(true) for _ in some]
        for view, (first, last) in zip(some, places, strict=True):
            if (first, last) != (0, 0):
                shift = view.start - view.offset
                assert context.characters(first + shift, last + shift) == (start, start + len(predicted))
        assert any(first for first, _ in places)


# ---- at work -----------------------------------------------------------------------------------------------------


def test_answers_do_not_depend_on_the_batch(model):
    answer = Answerer(model, Answer(max_length=24, stride=6), "fp32")
    pairs = [Answer().input_of(record) for record in rows(12)] + [("red", ODD)]
    result = answer(pairs)
    alone = [answer(*pair) for pair in pairs]
    assert [(one.text, one.start, one.end) for one in result] == [(one.text, one.start, one.end) for one in alone]
    assert [one.text for one in answer(pairs[::-1])] == [one.text for one in result[::-1]]
    assert [one.score for one in result] == pytest.approx([one.score for one in alone], abs=1e-5)
    for one, (_, context) in zip(result, pairs, strict=True):
        assert context[one.start : one.end] == one.text and 0 < one.score <= 1
    assert len(answer.n_best(*pairs[0], 3)) == 3
    with pytest.raises(UsageError, match="not a question"):
        answer("red")


def test_an_evaluator_knows_perfection_and_tunes_the_threshold(model, tmp_path):
    task = Answer(max_length=24, stride=6, max_answer=30)
    records = rows(12)
    predicted = Answerer(model, task, "fp32")([Answer().input_of(record) for record in records])
    perfect = [
        Record({**r.fields, "answers": [(one.text, one.start)]}, r.where)
        for r, one in zip(records, predicted, strict=True)
    ]
    evaluator = HeldOut(task, perfect, task.reading(model, perfect), "fp32")
    assert evaluator(model).metrics == {"exact": 100.0, "f1": 100.0} and evaluator(model).samples == []
    mixed = [Record({**r.fields, "answers": []}, r.where) if n % 2 else r for n, r in enumerate(perfect)]
    open_task = Answer(max_length=24, stride=6, max_answer=30, threshold=0.0)
    tuned = open_task.finish(model, mixed, tmp_path, "fp32")
    scores = []
    for threshold in (tuned.threshold, -1e9, 1e9, 0.0):
        answer = Answerer(model, Answer(max_length=24, stride=6, max_answer=30, threshold=threshold), "fp32")
        result = answer([Answer().input_of(record) for record in mixed])
        scores.append(
            sum(
                (one.text == r.fields["answers"][0][0]) if r.fields["answers"] else not one.text
                for one, r in zip(result, mixed, strict=True)
            )
        )
    assert scores[0] >= max(scores) and scores[1] == scores[2] == 6
    assert task.finish(model, mixed, tmp_path) is task and open_task.finish(model, perfect, tmp_path) is open_task


def test_only_a_body_that_reads_both_ways(tmp_path: Path, bert):
    with pytest.raises(UsageError, match="left to right"):
        Answer().fitted(load(tiny.gpt2(tmp_path / "gpt2")))
    with pytest.raises(CheckpointError, match='no head for "answer"'):
        Answerer(bert, Answer())


# ---- files -------------------------------------------------------------------------------------------------------


def squad(folder: Path, qas: list, context: str = "北京 欢迎 red cat", name: str = "a.json") -> Path:
    data = {"version": "2.0", "data": [{"title": "x", "paragraphs": [{"context": context, "qas": qas}]}]}
    (folder / name).write_text(json.dumps(data, ensure_ascii=False, indent=1), encoding="utf-8")
    return folder / name


def question(text: str = "red cat", start: int = 6, **more) -> dict:
    return {"id": "q1", "question": "what?", "answers": [{"text": text, "answer_start": start}], **more}


def test_squad_of_both_versions(tmp_path: Path):
    none = {"id": "q2", "question": "why?", "answers": [], "is_impossible": True, "plausible_answers": []}
    several = question()
    several["answers"].append({"text": "cat", "answer_start": 10})
    found = [record.fields for record in read_questions(squad(tmp_path, [several, none]), True)]
    assert found[0]["answers"] == [("red cat", 6), ("cat", 10)] and found[1]["answers"] == []
    assert found[0]["context"] == "北京 欢迎 red cat" and found[1]["id"] == "q2"
    bare = squad(tmp_path, [{"id": 7, "question": "what?"}])
    assert [record.where for record in read_questions(bare, False)] == [f"{bare}: question 7"]


def test_a_question_a_line(tmp_path: Path):
    lines = [
        {"question": "a", "context": "red cat", "answer": "cat"},
        {"question": "a", "context": "red cat cat", "answer": "cat", "start": 8},
        {"question": "a", "context": "red cat", "answer": None},
        {"question": "a", "context": "red cat", "answer": ["cat", "red"]},
    ]
    expected = [[("cat", 4)], [("cat", 8)], [], [("cat", 4), ("red", 0)]]
    for name in ("a.jsonl", "a.json"):
        found = list(read_questions(tiny.write_jsonl(tmp_path / name, lines), True))
        assert [record.fields["answers"] for record in found] == expected
    (tmp_path / "a.csv").write_text("question,context,answer,start\na,red cat,cat,4\nb,red cat,,\n")
    found = list(read_questions(tmp_path / "a.csv", True))
    assert [record.fields["answers"] for record in found] == [[("cat", 4)], []]
    several = 'a,red cat,"[""cat"", ""red""]","[4, 0]"'
    (tmp_path / "a.csv").write_text(f"question,context,answer,start\n{several}\nb,a [cat,[cat,2\n")
    found = list(read_questions(tmp_path / "a.csv", True))
    assert [record.fields["answers"] for record in found] == [[("cat", 4), ("red", 0)], [("[cat", 2)]]


@pytest.mark.parametrize(
    ("start", "says"),
    [
        ("four", r'a.jsonl:1: "start" is "four" .text.; expected a number'),
        (4.5, r'a.jsonl:1: "start" is 4.5; expected a whole number'),
        ([4, 0], r"a.jsonl:1: 1 answers but 2 starts"),
    ],
)
def test_bad_starts_are_named(tmp_path: Path, start, says: str):
    row = {"question": "a", "context": "red cat", "answer": "cat", "start": start}
    with pytest.raises(DataError, match=says):
        list(read_questions(tiny.write_jsonl(tmp_path / "a.jsonl", [row]), True))


@pytest.mark.parametrize(
    ("qas", "says"),
    [
        ([question(start=5)], r'a.json: question q1: the answer "red cat" is not at 5 of its context, " red ca" is'),
        ([question("dog", 6)], r'the answer "dog" is not at 6'),
        ([question(start=99)], r"is not at 99"),
        ([question(start="6")], r'question q1: "answer_start" is "6" .text.; expected a number'),
        ([question(""), question()], r'question q1: "text" is empty'),
        ([{"id": "q1", "answers": []}], r'question q1: no "question"'),
        ([{"question": "what?"}], r'article 1, paragraph 1, question 1: no "answers"'),
        ([{**question(), "answers": [], "is_impossible": False}], r'question q1: no "answers"'),
        ([7], r"question 1: is 7; expected an object"),
        ([], r"a.json: (no|there are no) record"),
    ],
)
def test_bad_questions_are_named(tmp_path: Path, qas: list, says: str):
    with pytest.raises(DataError, match=says):
        Answer().read_data(squad(tmp_path, qas), None, "stop", Counter())


def test_bad_questions_are_skipped_and_counted(tmp_path: Path, caplog):
    qas = [question(start=5), question(), question(""), question("dog", -1)]
    skipped: Counter[str] = Counter()
    file = squad(tmp_path, qas)
    task, train, held_out = Answer().read_data(file, file, "skip", skipped)
    assert len(train) == 1 and task.max_answer == 30 and task.threshold is None
    assert len(held_out) == 3 and "2 questions have no answer at its offset" in caplog.text  # they are scored by text
    assert skipped == {"answer not at its offset": 2, 'blank "text"': 2}


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ('{"data": 7}', r'"data" is 7; expected a list'),
        ('{"data": [{}]}', r'article 1: no "paragraphs"'),
        ('{"data": [{"paragraphs": [{"context": "a"}]}]}', r'paragraph 1: no "qas"'),
        ("", r"the file is empty"),
        ('{"data": [', r"a.json:1: not valid JSON"),
    ],
)
def test_bad_files(tmp_path: Path, content: str, says: str):
    (tmp_path / "a.json").write_text(content)
    with pytest.raises(DataError, match=says):
        list(read_questions(tmp_path / "a.json", True))


def test_the_first_answer_that_is_in_its_place_is_learnt(tmp_path: Path, model):
    entry = question(start=-1)
    entry["answers"].append({"text": "cat", "answer_start": 10})
    _, train, _ = Answer().read_data(squad(tmp_path, [entry]), None, "stop", Counter())
    (context,) = read_contexts(model.tokenizer, [train[0].fields["context"]])
    work = Answer(max_length=40).workload(model, train)
    first, last = work.targets[0] - work.windows[0].offset
    assert context.text[slice(*context.characters(first, last))] == "cat"


@pytest.mark.parametrize("values", [{"max_length": 3}, {"stride": -1}, {"max_answer": 0}, {"max_question": 0}])
def test_what_a_task_cannot_be(values):
    with pytest.raises(UsageError):
        Answer(**values)


@pytest.mark.parametrize(
    "given",
    [
        {"answers": {"text": ["鸡", "白切鸡"], "answer_start": [5, 3]}},  # as the datasets library has them
        {"answers": [{"text": "鸡", "answer_start": 5}, {"text": "白切鸡", "answer_start": 3}]},
        {"answers": ["鸡", "白切鸡"]},
        {"answer": ["鸡", "白切鸡"], "start": [5, 3]},
    ],
)
def test_answers_in_other_layouts(given: dict, tmp_path: Path):
    row = {"question": "吃啥？", "passage": "你想吃白切鸡", **given}
    file = tiny.write_jsonl(tmp_path / "a.jsonl", [row])
    (record,) = read_questions(file, True)
    assert record.fields["answers"] == [("鸡", 5), ("白切鸡", 3)]
    file = tiny.write_jsonl(
        tmp_path / "b.jsonl", [{**row, "answers": {"text": [], "answer_start": []}, "answer": None}]
    )
    assert next(read_questions(file, True)).fields["answers"] == []
