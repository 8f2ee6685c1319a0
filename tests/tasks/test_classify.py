"""Classification: what a model is given to read, the loss it learns from, and what is made of its answers."""

from __future__ import annotations

import logging
import random
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st

from allmask.data import Example, Record, pack
from allmask.errors import CheckpointError, DataError, UsageError
from allmask.mask import Mask
from allmask.model import Model, load
from allmask.nn.heads import Labels
from allmask.objectives import losses_of
from allmask.tasks.classify import Classifier, Classify
from allmask.tasks.common.heads import HeldOut, answer_all
from allmask.tasks.common.labelling import Survey, balanced, read_texts, targets_of
from allmask.tasks.common.reading import cut_to
from allmask.tasks.metrics.confusion import draw_confusion
from tests import tiny

transformers.logging.set_verbosity_error()
transformers.utils.logging.disable_progress_bar()
LABELS = {
    "single": Labels("single", ("neg", "pos", "中")),
    "multi": Labels("multi", ("neg", "pos", "中")),
    "number": Labels("number", ("label",)),
}
PROBLEMS = {"single": "single_label_classification", "multi": "multi_label_classification", "number": "regression"}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Model]:
    folder = tmp_path_factory.mktemp("models")
    bert, gpt2 = load(tiny.bert(folder / "bert")), load(tiny.gpt2(folder / "gpt2"))
    causal = load(folder / "bert")
    causal.config = replace(causal.config, own_mask="causal")
    return {"bert": bert, "gpt2": gpt2, "causal bert": causal}


def answering(model: Model, kind: str) -> Model:
    """With a head whose answers differ: fresh ones are all near zero."""
    made = model.with_labels(LABELS[kind], torch.Generator().manual_seed(1))
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(2)) * 0.3)
    return made


def rows(kind: str, count: int = 20, pair: bool = False, seed: int = 0) -> list[Record]:
    rng = random.Random(seed)
    names = LABELS[kind].names
    made = []
    for number, row in enumerate(tiny.english(count, seed) + tiny.chinese(count, seed)):
        label = {
            "single": rng.choice(names),
            "multi": rng.sample(names, rng.randint(0, len(names))),
            "number": rng.uniform(-1, 5),
        }[kind]
        second = row["target"] if pair else None
        made.append(Record({"text": row["source"], "text_b": second, "label": label}, f"rows:{number}"))
    return made


def encoded(model: Model, texts: list) -> tuple[list[Example], int]:
    made = Classify().rows(model, texts)
    return made.examples, made.cut


# ---- what is read ----------------------------------------------------------------------------------------------


def test_examples_token_by_token(models):
    model = models["bert"]
    examples, cut = encoded(model, ["red cat", ("北京", "you")])
    assert model.tokenizer.tokens(examples[0].ids) == ["[CLS]", "red", "cat", "[SEP]"]
    tokens = model.tokenizer.tokens(examples[1].ids)
    assert tokens[:4] == ["[CLS]", "北", "京", "[SEP]"] and tokens[-1] == "[SEP]"
    assert examples[1].segments.tolist() == [0, 0, 0, 0] + [1] * (len(tokens) - 4)
    assert cut == 0 and all((example.labels == -1).all() and (example.order == 0).all() for example in examples)


def test_gpt2_has_no_special_tokens(models):
    model = models["gpt2"]
    examples, _ = encoded(model, ["red cat", ("red", "cat")])
    assert model.tokenizer.decode(examples[0].ids, skip_special=False) == "red cat"
    assert model.tokenizer.decode(examples[1].ids, skip_special=False) == "red<|endoftext|>cat"
    assert examples[0].order.tolist() == list(range(len(examples[0])))


def test_same_rows_as_transformers(models, tmp_path: Path):
    model = models["bert"]
    model.tokenizer.save(tmp_path)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    texts = [("red cat runs.", "北京"), ("blue", "dog sings here")]
    examples, _ = encoded(model, [*texts, "red dog"])
    for example, result in zip(examples, [*texts, ("red dog",)], strict=True):
        expected = theirs(*result)
        assert example.ids.tolist() == expected["input_ids"]
        assert example.segments.tolist() == expected["token_type_ids"]


@given(st.integers(1, 30), st.integers(1, 30), st.integers(5, 24), st.sampled_from(["head", "tail", "head+tail"]))
def test_the_longer_text_of_a_pair_is_truncated_first(first: int, second: int, limit: int, rule: str):
    kept = cut_to([[1] * first, [2] * second], limit - 3, rule)
    room, sizes = limit - 3, [len(part) for part in kept]
    assert sum(sizes) == min(room, first + second)
    if first + second > room:
        assert min(sizes) >= min(first, second, room // 2) and max(sizes) <= max(
            room - min(first, second), room // 2 + 1
        )


def test_long_texts_are_cut_and_counted(models, caplog):
    texts = [Record({"text": text, "text_b": None}, "") for text in ("red blue green cat dog", "red")]
    with caplog.at_level(logging.INFO, "allmask"):
        reading = Classify(max_length=5, truncate="tail").reading(models["bert"], texts)
        examples = Classify(max_length=5).logged(reading).examples
    assert models["bert"].tokenizer.tokens(examples[0].ids) == ["[CLS]", "green", "cat", "dog", "[SEP]"]
    assert caplog.messages == ["1 of 2 texts are cut to 5 tokens"]
    assert Classify().fitted(models["bert"]).max_length == 48


@pytest.mark.parametrize(
    "values", [{"max_length": 4}, {"truncate": "middle"}, {"kind": "best"}, {"class_weights": "heavy"}]
)
def test_what_a_task_cannot_be(values):
    with pytest.raises(UsageError):
        Classify(**values)


# ---- labels ----------------------------------------------------------------------------------------------------


def surveyed(path: Path, given: list, name: str = "data.jsonl") -> Labels:
    if name.endswith(".csv"):
        file = path / name
        file.write_text("text,label\n" + "".join(f'a,"{label}"\n' for label in given), encoding="utf-8")
    else:
        file = tiny.write_jsonl(path / name, [{"text": "a", "label": label} for label in given])
    return Survey.of(file, "stop").labels(file)


@pytest.mark.parametrize(
    ("given", "kind", "names"),
    [
        (["pos", "neg", "pos"], "single", ("neg", "pos")),
        ([10, 9, 9, -1], "single", ("-1", "9", "10")),
        ([True, False], "single", ("false", "true")),
        ([1, 2, "other"], "single", ("1", "2", "other")),
        (["正面", "负面"], "single", ("正面", "负面")),
        ([0.5, 1, 2], "number", ("label",)),
        ([["b"], [], ["a", "b"]], "multi", ("a", "b")),
    ],
)
def test_the_kind_of_labels_and_their_order(tmp_path: Path, given: list, kind: str, names: tuple):
    assert surveyed(tmp_path, given) == surveyed(tmp_path, given[::-1]) == Labels(kind, names)


@pytest.mark.parametrize(
    ("given", "kind", "names"),
    [
        (["pos", "neg"], "single", ("neg", "pos")),
        (["1", "0", "10"], "single", ("0", "1", "10")),
        (["1", "0", "n/a"], "single", ("0", "1", "n/a")),
        (["1.5", "2"], "number", ("label",)),
        (['[""a""]', '[""b"", ""a""]'], "multi", ("a", "b")),
    ],
)
def test_labels_out_of_a_csv_file(tmp_path: Path, given: list, kind: str, names: tuple):
    assert surveyed(tmp_path, given, "data.csv") == Labels(kind, names)


def test_targets_of():
    assert targets_of(LABELS["single"], ["中", "neg"]).tolist() == [2, 0]
    assert targets_of(LABELS["multi"], [["pos", "中"], []]).tolist() == [[0, 1, 1], [0, 0, 0]]
    assert targets_of(LABELS["number"], [1.5, -2.0]).tolist() == [[1.5], [-2.0]]


def test_balanced_as_scikit_learn():
    right = torch.tensor([0, 0, 0, 1, 2, 2])
    assert balanced(right, 3).tolist() == pytest.approx([6 / 9, 2.0, 1.0])


def read(tmp_path: Path, train: list[dict], dev: list[dict], on_bad_record: str = "stop", **values):
    files = [tiny.write_jsonl(tmp_path / name, rows) for name, rows in (("train.jsonl", train), ("dev.jsonl", dev))]
    skipped: Counter[str] = Counter()
    return *Classify(**values).read_data(*files, on_bad_record, skipped), skipped


GOOD = [{"text": "a", "label": "neg"}, {"text": "b", "label": "neutral"}, {"text": "c", "label": "pos"}]


@pytest.mark.parametrize(
    ("train", "dev", "says"),
    [
        (
            GOOD,
            [{"text": "a", "label": "neutrl"}],
            r'dev.jsonl:1: "label" is "neutrl"; expected one of neg, neutral, pos',
        ),
        (GOOD, [{"text": "a", "label": 7}], r'dev.jsonl:1: "label" is "7"; expected one of'),
        (GOOD, [{"text": "a", "label": ["pos"]}], r'dev.jsonl:1: "label" is \["pos"\]'),
        (GOOD, [{"text": "a", "label": 0.5}], r'dev.jsonl:1: "label" is 0.5; expected one of'),
        (GOOD, [{"text": "a"}], r'dev.jsonl:1: no "label"'),
        (GOOD, [{"text": " ", "label": "pos"}], r'dev.jsonl:1: "text" is blank'),
        ([*GOOD, {"text": "d", "label": ["x"]}], GOOD, r'train.jsonl:4: "label" is \["x"\]'),
        ([*GOOD, {"text": "d", "label": None}], GOOD, r'train.jsonl:4: "label" is null'),
        ([*GOOD, {"text": "d", "label": {"a": 1}}], GOOD, r'train.jsonl:4: "label" is'),
        ([{"text": "a", "label": "x"}] * 3, GOOD, r'train.jsonl: all labels are "x"'),
        ([{"text": "a", "label": []}] * 3, GOOD, r'train.jsonl: no "label" is a list of names'),
        ([{"text": "a", "label": v} for v in (0.5, 1.5, "x")], GOOD, r'train.jsonl:3: "label" is "x"'),
        ([{"text": "a", "label": float("nan")}, *GOOD], GOOD, r"train.jsonl:1"),
        ([{**row, "text_b": "z"} for row in GOOD] + GOOD[:1], GOOD, r'train.jsonl:4: no "text_b"'),
        ([{**row, "pair": "z"} for row in GOOD], GOOD, r'dev.jsonl:1: no "text_b"'),
    ],
)
def test_bad_records_are_named(tmp_path: Path, train: list, dev: list, says: str):
    with pytest.raises(DataError, match=says):
        read(tmp_path, train, dev)


def test_bad_records_are_skipped_and_counted(tmp_path: Path):
    train = [*({**row, "text_b": "z"} for row in GOOD), GOOD[0], {"text": "", "label": "pos"}]
    dev = [{"text": "a", "pair": "b", "label": "neutrl"}, {"text": "a", "pair": "b", "label": "pos"}]
    task, records, held_out, skipped = read(tmp_path, train, dev, "skip")
    assert task.pair and task.kind == "single" and len(records) == 3
    assert [record.fields for record in held_out] == [{"text": "a", "text_b": "b", "label": "pos"}]
    assert skipped == {"missing field": 1, 'blank "text"': 1, "unknown label": 1}


def test_the_kind_can_be_given(tmp_path: Path):
    data = [{"text": "a", "label": number} for number in (0, 3, 5)]
    task, records, _, _ = read(tmp_path, data, data, kind="number")
    assert [record.fields["label"] for record in records] == [0.0, 3.0, 5.0] and task.labels_of(
        records
    ).kind == "number"
    with pytest.raises(DataError, match="a list of names"):
        read(tmp_path, data, data, kind="multi")
    with pytest.raises(UsageError, match="class weights"):
        read(tmp_path, data, data, kind="number", class_weights="balanced")


# ---- the loss, against transformers ------------------------------------------------------------------------------


@pytest.mark.parametrize("pair", [False, True])
@pytest.mark.parametrize("kind", LABELS)
@pytest.mark.parametrize("family", ["bert", "gpt2"])
def test_forward_loss_and_gradient_are_those_of_transformers(
    models, tmp_path: Path, family: str, kind: str, pair: bool
):
    model = answering(models[family], kind)
    model.save(tmp_path / "model")
    theirs = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path / "model").eval()
    records = rows(kind, 6, pair)
    work = Classify().workload(model, records)
    batch = work.batch(list(range(len(records))), 0)
    loss, count = losses_of(model.eval(), batch)["classify"]
    (loss / count).backward()
    mine = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}

    longest = max(work.lengths)
    pad = 0 if family == "bert" else model.tokenizer.eos_id
    theirs.config.pad_token_id = pad
    ids, valid = torch.full((len(records), longest), pad), torch.zeros(len(records), longest, dtype=torch.long)
    segments = torch.zeros_like(ids)
    for row, example in enumerate(work.reading.examples):
        ids[row, : len(example)] = torch.from_numpy(example.ids)
        segments[row, : len(example)] = torch.from_numpy(example.segments)
        valid[row, : len(example)] = 1
    more = {"token_type_ids": segments} if family == "bert" else {}
    result = theirs(ids, attention_mask=valid, labels=work.targets, **more)
    result.loss.backward()
    torch.testing.assert_close(loss / count, result.loss, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(answer_all(model, work.reading.examples), result.logits, atol=1e-5, rtol=1e-5)
    head = theirs.classifier.weight.grad if family == "bert" else theirs.score.weight.grad
    torch.testing.assert_close(mine["task_head.output.weight"], head, atol=1e-5, rtol=1e-4)
    tokens = theirs.bert.embeddings.word_embeddings if family == "bert" else theirs.transformer.wte
    torch.testing.assert_close(mine["body.embedding.tokens.weight"], tokens.weight.grad, atol=1e-5, rtol=1e-4)


def test_class_weights_make_all_labels_count_the_same(models):
    model, records = answering(models["bert"], "single"), rows("single")
    work = Classify(class_weights="balanced").workload(model, records)
    batch = work.batch(list(range(len(records))), 0)
    loss, count = losses_of(model, batch)["classify"]
    assert batch.counts == {"classify": count} == {"classify": len(records)}
    each = torch.nn.functional.cross_entropy(answer_all(model, work.reading.examples), work.targets, reduction="none")
    expected = torch.stack([each[work.targets == label].mean() for label in range(3)]).mean()
    torch.testing.assert_close(loss / count, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("kind", LABELS)
@pytest.mark.parametrize("family", ["bert", "gpt2", "causal bert"])
def test_packed_is_one_by_one(models, family: str, kind: str):
    model, records = answering(models[family], kind), rows(kind, 5, pair=True)
    work = Classify().workload(model, records)
    numbers = [7, 2, 9, 0, 4]
    together = losses_of(model, work.batch(numbers, 0))["classify"]
    alone = [losses_of(model, work.batch([number], 0))["classify"] for number in numbers]
    assert together[0].item() == pytest.approx(sum(loss.item() for loss, _ in alone), rel=1e-5)
    assert together[1] == sum(count for _, count in alone)


def test_a_causal_body_answers_at_the_last_token(models):
    """Changing any token changes the answer, the first and the last among them."""
    for family in ("gpt2", "causal bert", "bert"):
        model = answering(models[family], "number")
        (example,), _ = encoded(model, ["red cat runs here there"])
        before = answer_all(model, [example])
        for place in range(len(example)):
            ids = example.ids.copy()
            ids[place] = ids[place] - 1 if ids[place] > 10 else ids[place] + 1
            assert (answer_all(model, [replace(example, ids=ids)]) - before).abs().item() > 1e-7, (family, place)


# ---- predictions -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", LABELS)
@pytest.mark.parametrize("family", ["bert", "gpt2"])
def test_predictions_do_not_depend_on_the_batch(models, family: str, kind: str):
    classifier = Classifier(answering(models[family], kind), Classify(), "fp32")
    texts = [row["source"] for row in tiny.english(20) + tiny.chinese(20)] + [("red cat", "北京"), "x"]
    expected = classifier.answers(texts)
    for order in (texts[::-1], sorted(texts, key=str)):
        back = [order.index(text) for text in texts]
        torch.testing.assert_close(classifier.answers(order)[back], expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(classifier.answers(texts, 16), expected, atol=1e-5, rtol=1e-5)
    alone = torch.cat([classifier.answers([text]) for text in texts])
    torch.testing.assert_close(alone, expected, atol=1e-5, rtol=1e-5)
    streamed, at_once = list(classifier.stream(iter(texts), window=7)), list(classifier.stream(texts))
    assert [one.label for one in streamed] == [one.label for one in at_once] or kind == "number"
    assert (
        [one.label for one in streamed] == pytest.approx([one.label for one in at_once]) if kind == "number" else True
    )


@pytest.mark.parametrize("family", ["bert", "gpt2"])
def test_padded_rows_answer_alike(models, family: str):
    model = answering(models[family], "single")
    examples, _ = encoded(model, ["red cat runs", "北京", "dog sings here there."])
    longest = max(map(len, examples))
    for left in (False, True):
        ids, valid = torch.zeros(3, longest, dtype=torch.long), torch.zeros(3, longest, dtype=torch.bool)
        for row, example in enumerate(examples):
            where = slice(longest - len(example), longest) if left else slice(0, len(example))
            ids[row, where], valid[row, where] = torch.from_numpy(example.ids).long(), True
        with torch.no_grad():
            result = model(ids, model.own_mask(valid)).answers
        torch.testing.assert_close(result, answer_all(model, examples), atol=1e-5, rtol=1e-5)


def test_one_several_pairs(models):
    classify = Classifier(answering(models["bert"], "single"), Classify(), "fp32")
    one = classify("red cat")
    assert one.label in LABELS["single"].names and one.probability == max(one.probabilities.values())
    assert sum(one.probabilities.values()) == pytest.approx(1.0)
    pair, *rest = classify([("red", "cat"), "red cat"])
    assert rest[0].label == one.label and rest[0].probability == pytest.approx(one.probability, abs=1e-5)
    assert classify(("red", "cat")).probability == pytest.approx(pair.probability, abs=1e-5)
    assert classify([]) == []
    several = Classifier(answering(models["bert"], "multi"), Classify(), "fp32")("red")
    assert several.label == [name for name, share in several.probabilities.items() if share > 0.5]
    number = Classifier(answering(models["bert"], "number"), Classify(), "fp32")("red")
    assert isinstance(number.label, float) and number.to_dict() == {"prediction": number.label}
    for bad in (7, ("a", "b", "c"), ["a", 3], [None]):
        with pytest.raises(UsageError, match="is not a text"):
            classify(bad)
    with pytest.raises(CheckpointError, match="predicts 2 numbers"):
        Classifier(models["bert"].with_labels(Labels("number", ("x", "y"))), Classify())
    with pytest.raises(CheckpointError, match='no head for "classify"'):
        Classifier(models["bert"], Classify())


def test_an_evaluator_shows_the_worst_errors(models):
    model, records = answering(models["bert"], "single"), rows("single", 10)
    task = Classify()
    evaluator = HeldOut(task, records, task.reading(model, records), "fp32")
    score = evaluator(model)
    answers = answer_all(model, evaluator.reading.examples)
    right = targets_of(LABELS["single"], [record.fields["label"] for record in records])
    assert score.value == score.metrics["accuracy"] == pytest.approx((answers.argmax(1) == right).float().mean().item())
    assert score.metrics["loss"] == pytest.approx(torch.nn.functional.cross_entropy(answers, right).item(), abs=1e-5)
    shares = answers.softmax(1).gather(1, right[:, None])[:, 0]
    wrong = [number for number in range(len(records)) if answers[number].argmax() != right[number]]
    worst = min(wrong, key=lambda number: shares[number])
    assert score.samples[0].endswith(records[worst].fields["text"])
    assert score.samples[1].startswith(f"  label      true {records[worst].fields['label']}, predicted ")


# ---- models ------------------------------------------------------------------------------------------------------


def test_a_missing_pooler_is_made_and_logged(models, caplog):
    with caplog.at_level(logging.INFO, "allmask"):
        made = Classify().prepare(models["bert"], rows("single"), seed=3)
    assert "the checkpoint has no pooler; a new one is made" in caplog.text
    assert made.heads == {"pooler", "task"} and made.labels == LABELS["single"]
    again = Classify().prepare(models["bert"], rows("single"), seed=3)
    assert all(torch.equal(a, b) for a, b in zip(made.parameters(), again.parameters(), strict=True))
    with caplog.at_level(logging.INFO, "allmask"):
        further = Classify().prepare(made, rows("single"), seed=4)
    assert "trained further" in caplog.text
    assert torch.equal(further.task_head.output.weight, made.task_head.output.weight)
    assert Classify().prepare(models["bert"], rows("single"), language=True).heads == {"pooler", "task", "lm"}


def test_a_head_for_the_same_labels_in_another_order_is_kept(models, caplog):
    """A folder of transformers has its own order of labels; targets follow it. A head for other labels is replaced."""
    turned = Labels("single", LABELS["single"].names[::-1])
    model = models["bert"].without("task").with_labels(turned, torch.Generator().manual_seed(5))
    records = rows("single")
    with caplog.at_level(logging.INFO, "allmask"):
        further = Classify().prepare(model, records)
        assert "trained further" in caplog.text and further.labels == turned
        assert torch.equal(further.task_head.output.weight, model.task_head.output.weight)
        workload = Classify().workload(further, records)
        given = [turned.names.index(record.fields["label"]) for record in records]
        assert workload.targets.tolist() == given
        other = models["bert"].without("task").with_labels(Labels("single", ("x", "y")), torch.Generator())
        assert Classify().prepare(other, records).labels == LABELS["single"]
    assert "a head for other labels (x, y); a new one is made" in caplog.text


def test_suggested_settings(models):
    records = rows("single")
    lengths = [len(example) for example in Classify().reading(models["bert"], records).examples]
    assert Classify().suggested_settings(models["bert"], records) == {
        "lr": 1e-4,
        "batch_tokens": int(np.ceil(32 * sum(lengths) / len(lengths))),
    }
    for width, rate in ((384, 1e-4), (768, 3e-5), (1024, 2e-5)):
        wide = load_like(models["bert"], width)
        assert Classify().suggested_settings(wide, records)["lr"] == rate


def load_like(model: Model, width: int) -> Model:
    with torch.device("meta"):
        return Model(replace(model.config, width=width, heads=1), (), model.tokenizer)


def test_an_asked_token_sees_all_of_its_text_and_no_other(models):
    model = models["gpt2"].with_labels(LABELS["single"])
    examples, _ = encoded(model, ["red cat", "北京欢迎你", "x"])
    mask = pack(examples).mask
    seen = Mask.visible(mask)[model.asked(mask)]
    groups = mask.group[0]
    for row, group in zip(seen, mask.group[model.asked(mask)], strict=True):
        assert torch.equal(row, groups == group)


@pytest.mark.parametrize("right", [True, False])
def test_the_accuracy_is_compared_with_the_most_frequent_label(models, tmp_path: Path, caplog, monkeypatch, right):
    model, records = answering(models["bert"], "single"), rows("single", 10)
    given = [record.fields["label"] for record in records]
    (label, count), index = Counter(given).most_common(1)[0], targets_of(model.labels, given)
    answers = torch.nn.functional.one_hot(index if right else index * 0, len(model.labels)).float()
    monkeypatch.setattr(HeldOut, "answers", lambda self, model: answers)
    with caplog.at_level(logging.INFO, "allmask"):
        Classify().finish(model, records, tmp_path)
    ours = 1.0 if right else given.count(model.labels.names[0]) / len(given)
    rule = f"if all were {label}: {count / len(given):.3f}"
    assert f"accuracy on {len(given)} held-out texts: {ours:.3f}; {rule}" in caplog.text
    assert ("the model is not better" in caplog.text) == (not right)


def test_confusion_matrix_plot(tmp_path: Path, caplog):
    draw_confusion(np.array([[5, 1], [0, 7]]), ["正面", "$neg_{x}$"], tmp_path / "a.png")
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    with caplog.at_level(logging.INFO, "allmask"):
        draw_confusion(np.zeros((50, 50), int), [str(n) for n in range(50)], tmp_path / "b.png")
    assert not (tmp_path / "b.png").exists() and "too many" in caplog.text


def test_the_axes_of_the_confusion_matrix_say_true_and_predicted(tmp_path: Path, monkeypatch):
    from matplotlib.figure import Figure

    drawn: list[Figure] = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, path: drawn.append(figure))
    draw_confusion(np.array([[5, 1], [0, 7]]), ["a", "b"], tmp_path / "a.png")
    (axes,) = drawn[0].axes
    assert (axes.get_ylabel(), axes.get_xlabel()) == ("true label", "predicted label")
    assert {(text.get_text(), text.get_position()) for text in axes.texts} >= {("1", (1, 0)), ("0", (0, 1))}


# ---- frozen bodies -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("numbers", [[4], [4, 7]])
@pytest.mark.parametrize("family", ["bert", "gpt2"])
def test_a_batch_of_cached_features(models, family: str, numbers: list[int]):
    """Also of one text: an index of one element must stay an array."""
    model = answering(models[family], "single")
    work = Classify().workload(model, rows("single", 5))
    expected = losses_of(model, work.batch(numbers, 0))["classify"]
    work.cache_features(model, "fp32")
    batch = work.batch(numbers, 0)
    assert batch.hidden is not None and len(batch.hidden) == batch.ids.numel() == len(numbers)
    loss, count = losses_of(model, batch)["classify"]
    assert loss.item() == pytest.approx(expected[0].item(), rel=1e-5) and count == expected[1] == len(numbers)


def test_freeze_with_a_batch_of_one_text(cli, tmp_path: Path):
    """33 texts of one length: a batch of the usual 32, and one of a single text."""
    texts = [" ".join(random.Random(number).choices(tiny.WORDS, k=4)) for number in range(33)]
    data = [{"text": text, "label": ("a", "b")[number % 2]} for number, text in enumerate(texts)]
    tiny.write_jsonl(tmp_path / "train.jsonl", data)
    model = tiny.bert(tmp_path / "bert")
    words = ("--data", tmp_path / "train.jsonl", "--out", tmp_path / "run", "--freeze", "--epochs", 1, "--quiet")
    ran = cli("finetune", model, "--task", "classify", *words)
    assert ran.code == 0, ran.err


def test_a_blank_label_is_counted_as_such(tmp_path: Path):
    tiny.write_jsonl(tmp_path / "a.jsonl", [{"text": "a", "label": " "}, {"text": "b", "label": "x"}])
    with pytest.raises(DataError, match='"label" is blank'):
        Survey.of(tmp_path / "a.jsonl", "stop")
    skipped: Counter[str] = Counter()
    list(read_texts(tmp_path / "a.jsonl", Labels("single", ("x", "y")), False, "skip", skipped))
    assert skipped == {'blank "label"': 1}
