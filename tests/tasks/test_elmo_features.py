"""Two language models learn from plain text; what they say is features for labels and tags, mixed as these need it."""

from __future__ import annotations

import math
import random
from pathlib import Path

import pytest
import torch

from allmask.data import Record, Texts
from allmask.errors import UsageError
from allmask.inference import embed
from allmask.model import load
from allmask.nn.heads import Labels
from allmask.objectives import losses_of
from allmask.pipelines import pipeline
from allmask.runs.driver import start
from allmask.runs.plan import Plan
from allmask.runs.pretraining import Pretraining
from allmask.tasks.classify import Classify
from allmask.tasks.common.heads import answer_all, frozen, hidden_all
from allmask.text import train_tokenizer
from allmask.training.log import read_metrics
from tests import tiny
from tests.runs.test_pretraining import write_text

COLOURS, ANIMALS = tiny.WORDS[:3], tiny.WORDS[3:6]
SMALL = {"preset": "elmo-tiny", "width": 32, "precision": "fp32", "eval_every": 30, "length": 24}


@pytest.fixture(scope="module")
def elmo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of pretraining."""
    folder = tmp_path_factory.mktemp("elmo")
    text = write_text(folder / "text.txt", documents=80)
    train_tokenizer(Texts([text]), "wordpiece", 200).save(folder / "tok")
    output = {"data": [str(text)], "tokenizer": str(folder / "tok"), "objective": "causal,reverse", "held_out": 0.1}
    start(Plan.from_dict({**output, **SMALL, "steps": 60, "batch_tokens": 512, "lr": 1e-2}), folder / "run", quiet=True)
    return folder / "run"


def labelled(count: int, seed: int) -> list[dict]:
    """Texts labelled by the kind of thing that they are about."""
    rng = random.Random(seed)
    rows = []
    for _ in range(count):
        label = rng.choice(["colour", "animal"])
        word = rng.choice(COLOURS if label == "colour" else ANIMALS)
        others = [rng.choice(tiny.WORDS[6:]) for _ in range(rng.randint(1, 4))]
        rows.append({"text": " ".join([*others, word, rng.choice(tiny.WORDS[6:])]), "label": label})
    return rows


def tagged(count: int, seed: int, context: bool) -> list[dict]:
    """Colours are marked; or, where it takes the `context`, what follows them."""
    rng = random.Random(seed)
    rows = [[rng.choice(tiny.WORDS) for _ in range(rng.randint(2, 7))] for _ in range(count)]
    marks = [["", *row][: len(row)] if context else row for row in rows]
    tags = [["B-it" if word in COLOURS else "O" for word in some] for some in marks]
    return [{"tokens": row, "tags": tag} for row, tag in zip(rows, tags, strict=True)]


def finetuned(elmo: Path, tmp_path: Path, task: str, rows: list[dict], held_out: list[dict], **options) -> Path:
    data = tiny.write_jsonl(tmp_path / "train.jsonl", rows)
    dev = tiny.write_jsonl(tmp_path / "dev.jsonl", held_out)
    output = {"model": str(elmo / "final"), "data": str(data), "eval": str(dev), "task": task, "freeze": True}
    start(Plan.from_dict({**output, "precision": "fp32", **options}), tmp_path / "run", quiet=True)
    return tmp_path / "run"


def test_both_language_models_learn(elmo):
    output = [line for line in read_metrics(elmo) if "eval_loss" in line][-1]
    model = load(elmo / "final")
    for name in ("eval_loss_causal", "eval_loss_reverse"):
        assert output[name] < 0.5 * math.log(model.config.vocab_size)
    assert output["eval_loss"] == pytest.approx((output["eval_loss_causal"] + output["eval_loss_reverse"]) / 2)
    assert model.config.own_mask == "bidirectional" and model.config.family == "elmo"


def test_it_writes_from_left_to_right(elmo):
    writer = pipeline("generate", elmo / "final", precision="fp32")
    assert writer("red blue green", max_new=3).split()[0] == "cat"  # words follow each other in a circle


@pytest.mark.parametrize("objective", ["mlm", "causal", "causal,mlm", "permutation"])
def test_other_objectives_are_refused(elmo, objective):
    plan = Plan.from_dict({"data": ["x"], "tokenizer": str(elmo / "final"), "objective": objective, **SMALL})
    assert isinstance(plan.job, Pretraining)
    with pytest.raises(UsageError, match="an elmo does not learn"):
        plan.job.fitted_shape(load(elmo / "final").config)


def test_features_are_cached_and_a_head_with_its_mix_learns(elmo, tmp_path):
    run = finetuned(elmo, tmp_path, "classify", labelled(160, 0), labelled(40, 1), epochs=12, lr=2e-2)
    after = load(run / "final")
    assert after.labels is not None
    before = load(elmo / "final").without("lm").with_labels(after.labels)
    for name, tensor in before.body.state_dict().items():
        assert torch.equal(tensor, after.body.state_dict()[name]), name
    assert not torch.equal(before.task_head.before.layers_bias, after.task_head.before.layers_bias)
    assert before.task_head.before.gain.item() == 1.0 != after.task_head.before.gain.item()
    classifier = pipeline("classify", run / "final", precision="fp32")
    found = classifier([row["text"] for row in labelled(40, 2)])
    right = [row["label"] for row in labelled(40, 2)]
    assert sum(one.label == label for one, label in zip(found, right, strict=True)) >= 36


def test_scores_of_a_text_are_the_mean_of_those_of_its_tokens(elmo):
    """By whole texts, by features, in a batch for training, and by `Output.answers`."""
    model = load(elmo / "final").without("lm").with_labels(Labels("single", ("a", "b", "c")))
    rng = torch.Generator().manual_seed(0)
    for parameter in model.task_head.parameters():
        torch.nn.init.normal_(parameter, generator=rng)
    task, texts = Classify().fitted(model), ["red cat", "北京欢迎你", "dog sleeps here there"]
    reading = task.rows(model, texts)
    expected = []
    for example in reading.examples:
        ids = torch.from_numpy(example.ids).long()[None]
        hidden = model(ids).hidden[0]
        expected.append(model.task_head(hidden).mean(0))
        torch.testing.assert_close(model(ids).answers[0], expected[-1], atol=1e-5, rtol=0)
    expected = torch.stack(expected)
    exact = frozen(model, "fp32")
    torch.testing.assert_close(answer_all(exact, reading.examples), expected, atol=1e-5, rtol=0)
    features = hidden_all(exact, reading.examples)
    assert features.shape == (3, model.config.features)
    torch.testing.assert_close(model.answers(features), expected, atol=1e-5, rtol=0)
    rows = [{"text": text, "text_b": None, "label": label} for text, label in zip(texts, "cab", strict=True)]
    work = task.workload(model, [Record(row, "here") for row in rows])
    true = torch.tensor([2, 0, 1])
    loss = torch.nn.functional.cross_entropy(expected, true, reduction="sum").item()
    for _ in range(2):
        found, count = losses_of(model, work.batch([0, 1, 2], 0))["classify"]
        assert count == 3 and found.item() == pytest.approx(loss, abs=1e-4)
        work.cache_features(model, "fp32")


@pytest.mark.parametrize("options", [{}, {"crf": True}, {"freeze": False}], ids=str)
def test_words_are_tagged(elmo, tmp_path, options):
    """With features that stay as they are, the mix finds the word; a body that learns finds what is before it."""
    context, rate = "freeze" in options, {"lr": 2e-2, "epochs": 10}
    run = finetuned(elmo, tmp_path, "tag", tagged(160, 0, context), tagged(40, 1, context), **rate, **options)
    tagger = pipeline("tag", run / "final", precision="fp32")
    rows = tagged(40, 2, context)
    found = tagger([row["tokens"] for row in rows])
    pairs = [pair for row, one in zip(rows, found, strict=True) for pair in zip(row["tags"], one.tags, strict=True)]
    assert sum(a == b for a, b in pairs) / len(pairs) > 0.95


def test_lm_weight_is_refused(elmo, tmp_path):
    with pytest.raises(UsageError, match="--lm-weight cannot be combined with an ELMo"):
        finetuned(elmo, tmp_path, "classify", labelled(8, 0), labelled(8, 1), freeze=False, lm_weight=0.5)


def test_vectors_of_texts_are_means_of_features(elmo):
    model = load(elmo / "final")
    vectors = embed(model, ["red cat", "北京"])
    ids = torch.tensor([model.tokenizer.encode("北京").ids])
    assert vectors.shape == (2, model.config.features)
    torch.testing.assert_close(vectors[1], model(ids).hidden[0].mean(0), atol=1e-5, rtol=0)
