"""Choosing: what is read of a question, the loss and the logits of transformers, and what is made of the scores."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path

import pytest
import torch
import transformers

from allmask.data import Record
from allmask.errors import DataError, UsageError
from allmask.model import Model, load
from allmask.nn.heads import Labels, grouped_log_softmax, pool_answers
from allmask.objectives import answer_loss, losses_of
from allmask.tasks.choose import LABELS, Choose, Chooser, Tally, read_questions, texts_of
from allmask.tasks.common.heads import HeldOut
from tests import tiny

transformers.logging.set_verbosity_error()
transformers.utils.logging.disable_progress_bar()


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Model]:
    """With heads whose answers differ."""
    folder = tmp_path_factory.mktemp("models")
    made = {"bert": load(tiny.bert(folder / "bert")), "gpt2": load(tiny.gpt2(folder / "gpt2"))}
    for name, model in made.items():
        made[name] = model.with_labels(LABELS, torch.Generator().manual_seed(1))
        with torch.no_grad():
            for parameter in made[name].parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(2)) * 0.3)
    return made


def asked(count: int, choices: int | None = None, seed: int = 0, question: bool = False) -> list[Record]:
    """Questions in English and Chinese with two to four choices, or as many as are asked for."""
    rng = random.Random(seed)
    made = []
    for number, row in enumerate(tiny.english(count // 2, seed) + tiny.chinese(count - count // 2, seed)):
        words = tiny.WORDS if number < count // 2 else list(tiny.CHARACTERS)
        listed = [" ".join(rng.choices(words, k=rng.randint(1, 4))) for _ in range(choices or rng.randint(2, 4))]
        fields = {"context": row["source"], "question": "想吃啥" if question else None, "choices": listed}
        made.append(Record({**fields, "label": rng.randrange(len(listed))}, f"rows:{number}"))
    return made


# ---- what is read ----------------------------------------------------------------------------------------------


def test_texts_of_a_question():
    choices = ["cat", "白切鸡"]
    assert texts_of({"context": "c", "question": None, "choices": choices}) == [("c", "cat"), ("c", "白切鸡")]
    assert texts_of({"context": None, "question": "q?", "choices": choices}) == [("q?", "cat"), ("q?", "白切鸡")]
    both = {"context": "c", "question": "q?", "choices": choices}
    assert texts_of(both) == [("c", "q? cat"), ("c", "q? 白切鸡")]


def test_the_end_of_a_long_context_is_kept(models):
    model = models["bert"]
    fields = {"context": "red " * 60 + "北京", "choices": ["cat", "dog"], "label": 0}
    reading = Choose().fitted(model).rows(model, [fields])
    tokens = model.tokenizer.tokens(reading.examples[0].ids)
    assert len(tokens) == 48 and tokens[-5:] == ["北", "京", "[SEP]", "cat", "[SEP]"] and reading.cut == 2


GOOD = {"context": "c", "choices": ["a", "b", "c"], "label": 1}


@pytest.mark.parametrize(
    ("changes", "reason", "says"),
    [
        ({"choices": None}, "wrong type", '"choices" is null; expected a list'),
        ({"choices": ...}, "missing field", 'no "choices"'),
        ({"choices": ["a"]}, "one choice", '"choices" has only "a"; expected two at least'),
        ({"choices": []}, "empty list", '"choices" is an empty list'),
        ({"choices": "abc"}, "wrong type", "expected a list"),
        ({"choices": ["a", " "]}, 'blank "choices"', '"choices" has an item 2 that is blank'),
        ({"label": 3}, "label out of range", '"label" is 3; expected a whole number from 0 to 2'),
        ({"label": -1}, "label out of range", '"label" is -1; expected'),
        ({"label": 0.5}, "label out of range", '"label" is 0.5; expected a whole number'),
        ({"label": "b"}, "wrong type", '"label" is "b" (text); expected a number'),
        ({"label": True}, "wrong type", '"label" is true; expected a number'),
        ({"label": None}, "missing field", 'no "label" and no "answer"'),
        ({"label": None, "answer": "d"}, "answer not among choices", '"answer" is "d", which is none of the choices'),
        ({"answer": "a"}, "label and answer differ", '"label" is 1, but "answer" is another of the choices'),
        ({"context": None}, "missing field", 'no "context" and no "question"'),
    ],
)
def test_bad_records(tmp_path: Path, changes: dict, reason: str, says: str):
    bad = {name: value for name, value in (GOOD | changes).items() if value is not ...}
    file = tiny.write_jsonl(tmp_path / "in.jsonl", [GOOD, bad])
    with pytest.raises(DataError) as caught:
        list(read_questions(file, True))
    assert caught.value.message.startswith(f"{file}:2: ") and says in caught.value.message
    assert "--on-bad-record skip" in str(caught.value.hint)
    skipped: Counter[str] = Counter()
    assert len(list(read_questions(file, True, "skip", skipped))) == 1 and skipped == {reason: 1}


def test_nothing_usable(tmp_path: Path):
    file = tiny.write_jsonl(tmp_path / "in.jsonl", [{**GOOD, "label": 7}])
    with pytest.raises(DataError, match="no record can be used"):
        list(read_questions(file, True, "skip"))


def test_good_records(tmp_path: Path):
    rows = [GOOD, {"question": "q", "choices": ["x", "y"], "answer": "y"}, {**GOOD, "label": 2.0, "answer": "c"}]
    found = list(read_questions(tiny.write_jsonl(tmp_path / "in.jsonl", rows), True))
    assert [record.fields["label"] for record in found] == [1, 1, 2]
    (tmp_path / "in.csv").write_text('context,choices,label\nc,"[""a"", ""b""]",1\n', encoding="utf-8")
    (record,) = read_questions(tmp_path / "in.csv", True)
    assert record.fields["choices"] == ["a", "b"] and record.fields["label"] == 1
    unmarked = list(read_questions(tiny.write_jsonl(tmp_path / "in.jsonl", [GOOD | {"label": 9}]), False))
    assert "label" not in unmarked[0].fields


# ---- scores ----------------------------------------------------------------------------------------------------


def test_shares_and_loss_by_hand():
    scores = torch.tensor([1.0, 2.0, 0.0, 5.0, 5.0], requires_grad=True)
    questions = torch.tensor([0, 0, 0, 1, 1])
    expected = torch.cat([scores[:3].log_softmax(0), scores[3:].log_softmax(0)])
    torch.testing.assert_close(grouped_log_softmax(scores, questions), expected)
    target = torch.tensor([1, 4])
    losses = [
        torch.nn.functional.cross_entropy(row, label, label_smoothing=0.1)
        for row, label in ((scores[:3], torch.tensor(1)), (scores[3:], torch.tensor(1)))
    ]
    loss = answer_loss("choice", scores[:, None], target, smoothing=0.1, questions=questions)
    torch.testing.assert_close(loss, sum(losses))
    (mine,) = torch.autograd.grad(loss, scores, retain_graph=True)
    (theirs,) = torch.autograd.grad(sum(losses), scores)
    torch.testing.assert_close(mine, theirs)
    assert grouped_log_softmax(torch.tensor([1e4, -1e4]), torch.tensor([0, 0])).tolist() == [0.0, -2e4]


def test_pooled_answers_by_hand():
    answers, texts = torch.tensor([[1.0, -1.0], [3.0, -5.0], [2.0, 0.5]]), torch.tensor([0, 0, 1])
    assert pool_answers(answers, texts, "mean").tolist() == [[2.0, -3.0], [2.0, 0.5]]
    assert pool_answers(answers, texts, "max").tolist() == [[3.0, -1.0], [2.0, 0.5]]


def test_forward_loss_and_gradient_are_those_of_transformers(models, tmp_path: Path):
    model = models["bert"]
    model.save(tmp_path / "model")
    auto = transformers.AutoModelForMultipleChoice
    theirs, report = auto.from_pretrained(tmp_path / "model", output_loading_info=True)
    assert not any(report[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    records = asked(8, choices=3)
    work = Choose().workload(model, records)
    loss, count = losses_of(model.eval(), work.batch(list(range(8)), 0))["choose"]
    assert count == 8
    (loss / count).backward()
    mine = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "model")
    pairs = [pair for record in records for pair in texts_of(record.fields)]
    inputs = tokenizer([a for a, _ in pairs], [b for _, b in pairs], padding=True, return_tensors="pt")
    shaped = {name: value.view(8, 3, -1) for name, value in inputs.items()}
    result = theirs.eval()(**shaped, labels=torch.tensor([record.fields["label"] for record in records]))
    result.loss.backward()
    torch.testing.assert_close(loss / count, result.loss, atol=1e-5, rtol=1e-5)
    scores = Chooser(model, Choose(), "fp32").answers([record.fields for record in records])
    torch.testing.assert_close(scores.view(8, 3), result.logits, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(mine["task_head.output.weight"], theirs.classifier.weight.grad, atol=1e-5, rtol=1e-4)
    tokens = theirs.bert.embeddings.word_embeddings.weight.grad
    torch.testing.assert_close(mine["body.embedding.tokens.weight"], tokens, atol=1e-5, rtol=1e-4)


def test_a_folder_of_transformers_is_read(models, tmp_path: Path):
    models["bert"].save(tmp_path / "model")
    theirs = transformers.AutoModelForMultipleChoice.from_pretrained(tmp_path / "model")
    theirs.save_pretrained(tmp_path / "theirs")
    model = load(tmp_path / "theirs")
    assert model.labels == Labels("choice", ("choice",))
    for name, tensor in models["bert"].state_dict().items():
        assert torch.equal(model.state_dict()[name], tensor)


def test_gpt2_is_kept_in_our_own_layout(models, tmp_path: Path):
    models["gpt2"].save(tmp_path / "model")
    again = load(tmp_path / "model")
    assert again.labels == LABELS
    questions = [record.fields for record in asked(4)]
    first, second = (Chooser(model, Choose(), "fp32").answers(questions) for model in (models["gpt2"], again))
    assert torch.equal(first, second)


@pytest.mark.parametrize("rule", ["head+tail", "windows"])
@pytest.mark.parametrize("family", ["bert", "gpt2"])
def test_packed_is_one_by_one(models, family: str, rule: str):
    model, records = models[family], asked(8, question=True)
    work = Choose(max_length=16, truncate=rule).workload(model, records)
    numbers = [5, 0, 7, 2]
    together = losses_of(model, work.batch(numbers, 0))["choose"]
    alone = [losses_of(model, work.batch([number], 0))["choose"] for number in numbers]
    assert together[0].item() == pytest.approx(sum(loss.item() for loss, _ in alone), rel=1e-5)
    assert together[1] == 4 and all(count == 1 for _, count in alone)
    assert work.lengths[5] == work.batch([5], 0).tokens


@pytest.mark.parametrize("rule", ["head+tail", "windows"])
def test_choices_do_not_depend_on_the_batch(models, rule: str):
    chooser = Chooser(models["bert"], Choose(max_length=16, truncate=rule), "fp32")
    questions = [record.fields for record in asked(12)]
    together = list(chooser.stream(questions))
    assert [len(one.probabilities) for one in together] == [len(fields["choices"]) for fields in questions]
    for fields, one in zip(questions, together, strict=True):
        alone = chooser(fields)
        assert alone.number == one.number and alone.text == fields["choices"][one.number]
        assert alone.probabilities == pytest.approx(one.probabilities, abs=1e-5)
        assert sum(one.probabilities) == pytest.approx(1.0) and one.probability == max(one.probabilities)
    expected = chooser.answers(questions)
    torch.testing.assert_close(chooser.answers(questions, 16), expected, atol=1e-5, rtol=1e-5)
    assert [one.number for one in chooser.stream(iter(questions), window=5)] == [one.number for one in together]


def test_ways_to_ask(models):
    choose = Chooser(models["bert"], Choose(), "fp32")
    one = choose("red cat", ["runs", "sings"])
    assert one.text in ("runs", "sings") and set(one.to_dict()) == {
        "prediction", "choice", "probability", "probabilities",
    }  # fmt: skip
    assert choose([{"context": "red cat", "choices": ["runs", "sings"]}]) == [one]
    assert choose("red cat", ["runs", "sings"], question="why?").probabilities != one.probabilities
    assert choose([]) == []
    for bad in ("red", [3], {"context": "red"}, {"choices": ["a", "b"]}, {"context": "red", "choices": ["a"]}):
        with pytest.raises(UsageError, match="choose: "):
            choose(bad)


def test_an_evaluator_and_its_errors(models):
    records = asked(12)
    task = Choose()
    score = HeldOut(task, records, task.reading(models["bert"], records), "fp32")(models["bert"])
    found = list(Chooser(models["bert"], task, "fp32").stream([record.fields for record in records]))
    right = [one.number == record.fields["label"] for one, record in zip(found, records, strict=True)]
    assert score.value == score.metrics["accuracy"] == pytest.approx(sum(right) / 12)
    chance = sum(1 / len(record.fields["choices"]) for record in records) / 12
    assert score.metrics["chance"] == pytest.approx(chance)
    tally = Tally(3)
    for record, choice in zip(records, found, strict=True):
        tally.add(record, choice)
    shares = [error["probabilities"][error["label"]] for error in tally.worst.rows()]
    wrong = sorted(
        one.probabilities[record.fields["label"]]
        for one, record, good in zip(found, records, right, strict=True)
        if not good
    )
    assert shares == pytest.approx(wrong[:3])


def test_suggested_settings(models):
    records = asked(20)
    lengths = Choose().workload(models["bert"], records).lengths
    assert Choose().suggested_settings(models["bert"], records) == {
        "lr": 1e-4,
        "batch_tokens": -(-16 * sum(lengths) // 20),
    }
