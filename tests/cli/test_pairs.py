"""Encoder–decoders from the command line: pretrained by mass and span, fine-tuned, written with."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import allmask
from allmask.decoding import Decoding, PairWriter, generate
from tests import tiny
from tests.objectives.texts import chinese_documents, english_documents

SHAPES = {
    ("span", "unigram"): ("--preset", "t5-small", "--layers", 1, "--width", 64, "--ffn-width", 96),
    ("mass", "unigram"): ("--preset", "t5-v1.1-small", "--layers", 1, "--width", 64, "--ffn-width", 96),
    ("span", "wordpiece"): ("--layers", 1, "--width", 64, "--ffn-width", 96),
    ("mass:0.5,span:0.5", "wordpiece"): (
        "--preset",
        "transformer-small",
        "--layers",
        1,
        "--width",
        64,
        "--ffn-width",
        96,
    ),
}
QUICK = ("--steps", 20, "--batch-tokens", 600, "--lr", 0.005, "--length", 32, "--precision", "fp32", "--eval-every", 10)


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "text.txt"
    documents = [*english_documents()[:30], *chinese_documents()]
    words = [row["source"] for row in tiny.english(40)]
    path.write_text("\n\n".join(["\n".join(document) for document in documents] + words), encoding="utf-8")
    return path


@pytest.mark.parametrize(("objective", "kind"), SHAPES)
def test_from_text_to_a_model_that_learns_by_it(cli, text, tmp_path, objective: str, kind: str):
    ran = cli("tokenizer", "train", text, "--kind", kind, "--size", 900, "--out", tmp_path / "tok")
    assert ran.code == 0, ran.err
    words = ("--objective", objective, "--data", text, "--tokenizer", tmp_path / "tok", "--out", tmp_path / "run")
    ran = cli("pretrain", *words, *SHAPES[objective, kind], *QUICK, "--held-out", 0.1, "--json")
    assert ran.code == 0, ran.err
    losses = [line["loss"] for line in tiny.read_jsonl(tmp_path / "run" / "metrics.jsonl") if "loss" in line]
    assert len(losses) == 20 and sum(losses[-5:]) < 0.95 * sum(losses[:5])
    model = allmask.load(tmp_path / "run" / "final")
    assert model.config.decoder_layers == model.config.layers == 1
    assert model.config.start_token == model.tokenizer.start_id and model.config.end_token == model.tokenizer.end_id
    told = json.loads((tmp_path / "run" / "final" / "config.json").read_text())["model_type"]
    assert told == ("t5" if "t5-small" in SHAPES[objective, kind] else told)


@pytest.fixture(scope="module")
def learnt(text, tmp_path_factory):
    """A T5 that was pretrained a little, and then fine-tuned to write the first two words of a source."""
    from allmask.data import Texts
    from allmask.runs.driver import start
    from allmask.runs.finetuning import FineTuning
    from allmask.runs.plan import Plan
    from allmask.runs.pretraining import Pretraining
    from allmask.tasks.seq2seq import Title
    from allmask.text import train_tokenizer
    from allmask.training import Settings

    place = tmp_path_factory.mktemp("learnt")
    train_tokenizer(Texts([text]), "unigram", 900).save(place / "tok")
    shape = {"preset": "t5-small", "layers": 1, "width": 64, "ffn_width": 96, "length": 32}
    quick = Settings(steps=4, batch_tokens=600, lr=3e-3, precision="fp32", dropout=0.0)
    job = Pretraining((str(text),), "span", tokenizer=str(place / "tok"), **shape)
    start(Plan(job, quick), place / "pre", quiet=True)
    tiny.write_jsonl(place / "train.jsonl", tiny.english(96))
    tiny.write_jsonl(place / "dev.jsonl", tiny.english(8, seed=1))
    settings = Settings(steps=100, lr=5e-3, batch_tokens=512, eval_every=50, precision="fp32", dropout=0.0)
    files = (str(place / name) for name in ("train.jsonl", "pre/final", "dev.jsonl"))
    start(Plan(FineTuning(*files, task=Title(max_target=8)), settings), place / "run", quiet=True)
    return place


def test_it_is_fine_tuned_and_writes(cli, learnt):
    [source] = tiny.english(1, seed=6)
    ran = cli("generate", learnt / "run", "--text", source["source"], "--beams", 3, "--precision", "fp32", "--json")
    assert ran.code == 0, ran.err
    written = json.loads(ran.out)["written"][0]["text"]
    model = allmask.load(learnt / "run" / "final")
    prompt = model.tokenizer.encode(source["source"]).ids
    banned = sorted(model.tokenizer.special_ids - {1})
    rules = Decoding(end=(1,), banned=banned, max_new=9, beams=3, no_repeat_ngram=3)
    [[best]] = generate(PairWriter(model), [prompt], rules)
    assert written == model.tokenizer.decode(best.tokens)
    assert set(written.split()) <= set(tiny.WORDS) and len(written.split()) <= 3  # short, and of such words


def test_it_is_judged_and_has_learnt_something(cli, learnt):
    ran = cli("evaluate", learnt / "run", learnt / "dev.jsonl", "--json", "--precision", "fp32")
    assert ran.code == 0, ran.err
    found = json.loads(ran.out)
    assert "rouge_l" in json.dumps(found)
    losses = [line["loss"] for line in tiny.read_jsonl(learnt / "run" / "metrics.jsonl") if "loss" in line]
    assert losses[-1] < 0.5 * losses[0]


@pytest.mark.parametrize("precision", ["fp32", "bf16", "auto"])
def test_other_precisions_write_as_well(learnt, precision):
    write = allmask.pipeline("title", learnt / "run", precision)
    texts = [row["source"] for row in tiny.english(6, seed=2)]
    assert write(texts) == [write(text) for text in texts]


def test_what_transformers_makes_of_the_folder(learnt):
    """A T5 pretrained and fine-tuned here loads there, and writes the same."""
    from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

    folder = learnt / "run" / "final"
    theirs, tokenizer = AutoModelForSeq2SeqLM.from_pretrained(folder).eval(), AutoTokenizer.from_pretrained(folder)
    model = allmask.load(folder)
    prompts = [tokenizer(row["source"])["input_ids"] for row in tiny.english(3, seed=3)]
    for prompt, [ours] in zip(
        prompts, generate(PairWriter(model), prompts, Decoding(end=(1,), max_new=8)), strict=True
    ):
        found = theirs.generate(torch.tensor([prompt]), do_sample=False, max_new_tokens=8)[0, 1:].tolist()
        assert list(ours.tokens) == [token for token in found if token not in (0, 1)]
