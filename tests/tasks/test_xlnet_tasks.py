"""An XLNet learns the tasks of a BERT: <cls> stands behind its texts, and speaks for them."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import transformers
from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from tokenizers.processors import TemplateProcessing

from allmask.data import Record
from allmask.model import Model, load
from allmask.pipelines import pipeline
from allmask.presets import xlnet_tiny
from allmask.runs.driver import start
from allmask.runs.plan import Plan
from allmask.tasks.answer import Answer
from allmask.tasks.common.reading import Frame
from allmask.tasks.tag import Tag
from allmask.text import Tokenizer
from tests import tiny

MARKS = ["<unk>", "<sep>", "<cls>", "<pad>"]
COLOURS = ("red", "blue", "green")
ASKED = "which colour"


@pytest.fixture(scope="module")
def xlnet(tmp_path_factory: pytest.TempPathFactory) -> Path:
    words = dict.fromkeys([*MARKS, *ASKED.split(), *tiny.WORDS, *tiny.CHARACTERS])
    backend = Backend(WordLevel({word: number for number, word in enumerate(words)}, "<unk>"))
    backend.pre_tokenizer = Whitespace()
    backend.add_special_tokens([AddedToken(mark, special=True) for mark in MARKS])
    backend.post_processor = TemplateProcessing(
        single="$A <sep> <cls>:2", pair="$A <sep> $B:1 <sep>:1 <cls>:2", special_tokens=[("<sep>", 1), ("<cls>", 2)]
    )
    tokenizer = Tokenizer(backend, {"unk": "<unk>", "sep": "<sep>", "cls": "<cls>", "pad": "<pad>"})
    shape = replace(xlnet_tiny(), vocab_size=len(words), width=32, heads=2, ffn_width=64, init_std=0.1)
    model = Model.fresh(shape, ("lm",), torch.Generator().manual_seed(0))
    model.tokenizer = tokenizer
    folder = tmp_path_factory.mktemp("xlnet")
    model.save(folder)
    return folder


def sentences(count: int, seed: int) -> list[list[str]]:
    """Words with one colour among them."""
    rng = random.Random(seed)
    others = [word for word in tiny.WORDS if word not in COLOURS]
    rows = [[rng.choice(others) for _ in range(rng.randint(1, 5))] for _ in range(count)]
    for row in rows:
        row.insert(rng.randint(0, len(row)), rng.choice(COLOURS))
    return rows


def record(task: str, words: list[str]) -> dict:
    (colour,) = (word for word in words if word in COLOURS)
    text = " ".join(words)
    if task == "classify":
        return {"text": text, "label": colour}
    if task == "tag":
        return {"tokens": words, "tags": ["B-colour" if word == colour else "O" for word in words]}
    if task == "choose":
        return {"context": text, "question": ASKED, "choices": list(COLOURS), "label": COLOURS.index(colour)}
    return {"question": ASKED, "context": text, "answer": colour, "start": text.index(colour)}


@pytest.mark.parametrize("task", ["classify", "tag", "answer", "choose"])
def test_it_learns_what_a_bert_learns(xlnet: Path, tmp_path: Path, task: str):
    train, dev = ([record(task, words) for words in sentences(count, seed)] for count, seed in ((160, 0), (40, 1)))
    files = [tiny.write_jsonl(tmp_path / name, rows) for name, rows in (("train.jsonl", train), ("dev.jsonl", dev))]
    asked = {"model": str(xlnet), "task": task, "data": str(files[0]), "eval": str(files[1])}
    how = {"epochs": 8.0, "lr": 5e-3, "batch_tokens": 256, "dropout": 0.0, "precision": "fp32"}
    output = start(Plan.from_dict(asked | how), tmp_path / "run", quiet=True)
    assert output["score"] > (90.0 if task == "answer" else 0.9)  # F1 in percent, or a share
    if task == "answer":
        found = pipeline("answer", tmp_path / "run")(ASKED, "cat sings green there")
        assert (found.text, found.start, found.end) == ("green", 10, 15)


def test_same_predictions_as_transformers(xlnet: Path, tmp_path: Path):
    rows = [record("classify", words) for words in sentences(60, 2)]
    data = tiny.write_jsonl(tmp_path / "train.jsonl", rows)
    plan = Plan.from_dict({"model": str(xlnet), "task": "classify", "data": str(data), "steps": 5, "precision": "fp32"})
    start(plan, tmp_path / "run", quiet=True)
    theirs = transformers.XLNetForSequenceClassification.from_pretrained(tmp_path / "run" / "final").eval()
    classify = pipeline("classify", tmp_path / "run", precision="fp32")
    tokenizer = load(xlnet).tokenizer
    assert tokenizer is not None
    for row in rows[:8]:
        encoded = tokenizer.encode(row["text"])
        with torch.no_grad():
            predicted = theirs(torch.tensor([encoded.ids]), token_type_ids=torch.tensor([encoded.segments])).logits[0]
        output = classify(row["text"]).probabilities
        expected = dict(zip(theirs.config.id2label.values(), predicted.softmax(-1).tolist(), strict=True))
        assert output == pytest.approx(expected, abs=1e-5)


def test_rows_are_framed_as_its_tokenizer_frames_them(xlnet: Path):
    model = load(xlnet)
    assert model.tokenizer is not None
    ((window,),) = Tag().reading(model, [Record({"tokens": ["red", "cat"]}, "here")])
    encoded = model.tokenizer.encode("red cat")
    assert (window.example.ids.tolist(), window.example.segments.tolist()) == (encoded.ids, encoded.segments)
    assert window.places.tolist() == [0, 1]
    _, ((view,),) = Answer().rows(model, [(ASKED, "red cat")])
    encoded = model.tokenizer.encode(ASKED, "red cat")
    assert (view.example.ids.tolist(), view.example.segments.tolist()) == (encoded.ids, encoded.segments)
    assert (view.offset, view.null) == (3, len(encoded.ids) - 1) and view.place(None) == (view.null, view.null)
    assert Frame.of(model.tokenizer, model.config).room(10, texts=2) == 7
