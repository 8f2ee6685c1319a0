"""An XLNet learns permutations from text, by two streams over packed rows; then it writes and fills gaps."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import XLNetLMHeadModel

from allmask.cli.generate import _picture
from allmask.data import Texts
from allmask.decoding import fill
from allmask.mask import Mask
from allmask.model import Model, load
from allmask.nn.cache import Cache
from allmask.objectives import Draw, Permutation, Vocabulary, losses_of
from allmask.options import PRETRAINING as DEFAULTS
from allmask.pipelines import pipeline
from allmask.presets import PRESETS
from allmask.runs.driver import start
from allmask.runs.plan import Plan
from allmask.runs.pretraining import Pretraining
from allmask.tasks.continuation import Continuation
from allmask.tasks.task import load_task
from allmask.text import train_tokenizer
from tests import tiny


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Texts that count in a circle."""
    folder = tmp_path_factory.mktemp("xlnet")
    circles = [" ".join((tiny.WORDS * 2)[n : n + 6]) for n in range(len(tiny.WORDS))]
    circles += [(tiny.CHARACTERS * 2)[n : n + 6] for n in range(len(tiny.CHARACTERS))]
    (folder / "text.txt").write_text("\n\n".join(circles), encoding="utf-8")
    (folder / "dev.txt").write_text("\n\n".join(reversed(circles)), encoding="utf-8")
    train_tokenizer(Texts([folder / "text.txt"]), "wordpiece", 200).save(folder / "tok")
    settings = replace(
        DEFAULTS, steps=220, eval_every=110, lr=5e-3, dropout=0.0, batch_tokens=192, precision="fp32", save_every=220
    )
    job = Pretraining(
        (str(folder / "text.txt"),), "permutation", (str(folder / "dev.txt"),), tokenizer=str(folder / "tok"),
        preset="xlnet-tiny", width=48, heads=4, length=16,
    )  # fmt: skip
    start(Plan(job, settings), folder / "run", quiet=True)
    return folder / "run"


def test_it_learns_and_is_saved_as_transformers_has_it(run: Path):
    evaluations = [line["eval_loss"] for line in tiny.read_jsonl(run / "metrics.jsonl") if "eval_loss" in line]
    assert evaluations[-1] < evaluations[0] and evaluations[-1] < 0.5
    assert json.loads((run / "final" / "config.json").read_text())["architectures"] == ["XLNetLMHeadModel"]
    _, info = XLNetLMHeadModel.from_pretrained(run / "final", output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    task = load_task(run / "final")
    assert task == Continuation.within(16, 7, framed=True, blanks=True) and task.positions == 16


def test_it_continues_a_text_from_left_to_right(run: Path):
    """All places of the new tokens are known, and [SEP] behind them, as in pretraining."""
    write = pipeline("generate", run, "fp32")
    model, tokenizer = write.model, write.model.tokenizer
    assert tokenizer is not None
    ids = [tokenizer.cls_id, *tokenizer.encode("red blue green", special=False).ids]
    banned = tuple(sorted(tokenizer.special_ids - {tokenizer.sep_id}))
    rules = replace(write.settings(max_new=3), banned=(*banned, tokenizer.sep_id))
    filled, _ = fill(model, [*ids, None, None, None, tokenizer.sep_id], settings=rules)[0]
    assert write("red blue green", max_new=3, banned=rules.banned) == tokenizer.decode(filled)[len("red blue green ") :]
    assert write("red blue green", max_new=3) == "cat dog bird"
    pieces = list(write.stream("北京欢", max_new=3))
    assert "".join(pieces) == write("北京欢", max_new=3)


def test_the_mask_it_wrote_under_is_that_of_its_blanks(run: Path):
    write = pipeline("generate", run, "fp32")
    ((_, best),) = next(iter(write.write(["red blue"], max_new=2)))
    drawn = _picture(write, "red blue", best.tokens, max_new=2).splitlines()
    cells = [[cell for cell in line if cell in "■·"] for line in drawn]
    order = torch.tensor([[0, 0, 0, 1, 2, 0]])  # [CLS] red blue · · [SEP]
    expected = Mask.permutation(order).visible()[0]
    assert [[cell == "■" for cell in row] for row in cells if row] == expected.tolist()


def test_it_fills_a_gap_by_its_second_stream(run: Path):
    filled = pipeline("fill", run)("red blue [MASK] cat dog bird")
    assert filled.text == "red blue green cat dog bird"
    model = load(run / "final")
    assert model.tokenizer is not None
    ids = torch.tensor([model.tokenizer.encode("red blue green cat dog bird").ids])
    rank = torch.zeros_like(ids)
    rank[0, 3] = 1
    with torch.no_grad():
        _, cache = model.body.step(ids, Mask.permutation(rank), Cache())
        scores = model.logits(model.body.query_stream(ids, Mask.permutation(rank), cache))[0, 3].softmax(-1)
    assert filled.gaps[0][0].probability == pytest.approx(float(scores.max()), abs=1e-5)


def test_the_loss_of_packed_rows_is_that_of_single_ones_in_bf16_nearly_too(run: Path):
    model = load(run / "final")
    assert model.tokenizer is not None
    rows = [
        model.tokenizer.encode(text, special=False).ids for text in ("red blue green cat", "北京欢迎你白切鸡", "dog")
    ]
    objective = Permutation(Vocabulary.of(model.tokenizer))
    with torch.no_grad():
        together = losses_of(model, objective.batch(rows, Draw(0, 0, [0, 1, 2])))["permutation"]
        alone = [losses_of(model, objective.batch(rows, Draw(0, 0, [row])))["permutation"] for row in range(3)]
    assert together[1] == sum(count for _, count in alone) == 4
    assert float(together[0]) == pytest.approx(sum(float(loss) for loss, _ in alone), abs=1e-4)
    with torch.autocast("cpu", torch.bfloat16):
        loss, _ = losses_of(model, objective.batch(rows, Draw(0, 0, [0, 1, 2])))["permutation"]
    loss.backward()
    assert loss.item() == pytest.approx(float(together[0]), rel=0.05, abs=0.05)
    question = model.body.embedding.question.grad
    assert question is not None and bool((question != 0).any())


def test_any_tokenizer_will_do_and_sizes_follow_the_width():
    shape = replace(PRESETS["xlnet-tiny"](), vocab_size=99, width=64, heads=1, ffn_width=256)
    model = Model.fresh(shape, ["lm"], torch.Generator().manual_seed(0))
    assert model.body.layers[0].attention.relate.position.shape == (1, 64, 64)
    ids = torch.arange(600)[None] % 99
    assert model.eval()(ids).hidden.shape == (1, 600, 64)  # longer than it was trained on: distances have no end
