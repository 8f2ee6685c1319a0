"""`allmask fill`: the likeliest tokens for each gap, against a plain softmax and transformers, and what is refused."""

from __future__ import annotations

import io
import json
import os
from pathlib import Path

import pytest
import torch

import allmask
from allmask.errors import CheckpointError, UsageError
from allmask.model import load
from allmask.pipelines import pipeline
from tests import tiny


@pytest.fixture(scope="module")
def filler(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.bert(tmp_path_factory.mktemp("models") / "filler", ["lm"])


def from_stdin(monkeypatch: pytest.MonkeyPatch, text: bytes) -> None:
    """`text` as the bytes of file number 0, which is where lines are read from."""
    read, write = os.pipe()
    os.write(write, text)
    os.close(write)
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(os.fdopen(read, "rb")))


@pytest.mark.parametrize("stdin", [False, True])
def test_without_a_model_the_script_decides(cli, monkeypatch, stdin: bool):
    words = ("--top", 1, "--json")
    if stdin:
        from_stdin(monkeypatch, "北京欢[MASK]你\n".encode())
    ran = cli("fill", *words) if stdin else cli("fill", "北京欢[MASK]你", *words)
    assert "model: allmask-zh, by the script of the text" in ran.err
    assert ran.out == cli("fill", "allmask-zh", "北京欢[MASK]你", *words).out != ""


def test_answers_are_a_plain_softmax(filler: Path):
    model = load(filler)
    assert model.tokenizer is not None
    ids = torch.tensor([model.tokenizer.encode("red [MASK] runs").ids])
    with torch.no_grad():
        shares = model(ids).logits[0, 2].softmax(-1)
    shares[list(model.tokenizer.special_ids)] = 0
    best = shares.topk(3)
    (answers,) = pipeline("fill", filler)("red [MASK] runs", top=3).gaps
    assert [answer.token for answer in answers] == model.tokenizer.tokens(best.indices)
    assert [answer.probability for answer in answers] == pytest.approx(best.values.tolist(), rel=1e-5)


def test_the_same_as_transformers(filler: Path):
    transformers = pytest.importorskip("transformers")
    theirs = transformers.pipeline(
        "fill-mask",
        model=transformers.BertForMaskedLM.from_pretrained(filler),
        tokenizer=transformers.AutoTokenizer.from_pretrained(filler),
    )
    size = load(filler).config.vocab_size
    expected = [row for row in theirs("北京欢[MASK]你", top_k=size) if not row["token_str"].startswith("[")][:5]
    (answers,) = pipeline("fill", filler)("北京欢[MASK]你").gaps
    assert [answer.token for answer in answers] == [row["token_str"] for row in expected]
    assert [answer.probability for answer in answers] == pytest.approx([row["score"] for row in expected], rel=1e-4)


def test_many_texts_as_one_by_one(filler: Path):
    fill = allmask.pipeline("fill", filler)
    texts = ["red [MASK]", "北京[MASK]迎你，[MASK]切鸡", "[MASK] cat runs here."] * 15
    together = fill(texts, top=2)
    assert [len(filled.gaps) for filled in together] == [1, 2, 1] * 15
    for text, filled in zip(texts[:3], together, strict=False):
        alone = fill(text, top=2)
        assert (filled.source, filled.text) == (text, alone.text)
        for a, b in zip(filled.gaps, alone.gaps, strict=True):
            assert [x.probability for x in a] == pytest.approx([x.probability for x in b], rel=1e-4)


def test_printed(cli, filler: Path):
    ran = cli("fill", filler, "red [MASK] [MASK]", "--top", 2)
    first, *lines = ran.out.splitlines()
    assert ran.code == 0 and first.startswith("red") and "[MASK]" not in first
    assert [line.strip() for line in lines if "[MASK]" in line] == ["[MASK] 1", "[MASK] 2"] and len(lines) == 6
    assert cli("fill", filler, "--text", "red [MASK] [MASK]", "--top", 2).out == ran.out
    ran = cli("fill", filler, "白切[MASK]", "--json", "--top", 3)
    told = json.loads(ran.out)
    assert told["source"] == "白切[MASK]" and len(told["gaps"][0]) == 3
    assert told["text"] == "白切" + told["gaps"][0][0]["token"].removeprefix("##")


def test_lines_of_stdin(cli, monkeypatch, filler: Path):
    from_stdin(monkeypatch, "red [MASK]\n\n北京[MASK]".encode())
    ran = cli("fill", filler, "--json")
    first, blank, last = ran.out.splitlines()
    assert blank == "" and json.loads(first)["source"] == "red [MASK]" and json.loads(last)["source"] == "北京[MASK]"
    from_stdin(monkeypatch, b"red [MASK]\nred cat\n")
    ran = cli("fill", filler)
    assert ran.code == 3 and "stdin:2: there is no [MASK]" in ran.err


def test_refusals(cli, filler: Path, bert: Path, gpt2: Path, tmp_path: Path):
    ran = cli("fill", bert, "a [MASK]")
    assert ran.code == 4 and "no language model head" in ran.err
    assert "allmask-en and allmask-zh can" in ran.err  # two ways that lead on: another model, or this one, taught
    assert "allmask pretrain --objective mlm --from MODEL" in ran.err and "--tokenizer" not in ran.err
    ran = cli("fill", gpt2, "a [MASK]")
    assert ran.code == 4 and "no [MASK]" in ran.err
    ran = cli("fill", filler, "red cat")
    assert ran.code == 2 and "there is no [MASK] in 'red cat'" in ran.err
    ran = cli("fill", filler, "red [MASK]", "--text", "blue [MASK]")
    assert ran.code == 2 and "two texts were given" in ran.err
    ran = cli("fill", filler, "[MASK] " + "red " * 60)
    assert ran.code == 2 and "this model reads 48" in ran.err
    with pytest.raises(UsageError, match="top is 0"):
        pipeline("fill", filler)("a [MASK]", top=0)
    with pytest.raises(CheckpointError, match="no such folder"):
        pipeline("fill", tmp_path / "nowhere")
