"""One model under every mask: shares of the objectives, vectors, and a run that can be resumed."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
import yaml

import weights
from allmask import Mask
from allmask.inference import embed
from allmask.model import load
from tests import tiny


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.bert(tmp_path_factory.mktemp("tiny") / "bert")


def test_any_stretch_of_a_run_has_the_mixture():
    shares = {"title": 0.5, "mlm": 0.3, "embed": 0.2}
    parts = {name: weights.Embeddings([([1, 2], [3])] * 5) for name in shares}
    work = weights.Every(parts, shares, 40, lambda model: None, 4096)
    plan = work.plan(work.lengths, 7, 1, 0)
    for steps in range(1, 41):
        for name, share in shares.items():
            assert abs(sum(drawn.objective == name for drawn in plan[:steps]) - share * steps) <= 1
    quoting = weights.Every(parts | {"quote": parts["mlm"]}, {**shares, "quote": 1.0}, 40, work.evaluator, 4096, 0.5)
    named = [drawn.objective for drawn in quoting.plan(work.lengths, 7, 1, 0)]
    assert named[:20].count("quote") == 10 and named[20:].count("quote") == 0
    assert named[20:].count("title") == pytest.approx(20 * 1.5 / 2, abs=1)
    titles = [drawn for drawn in plan if drawn.objective == "title"]
    assert [drawn.epoch for drawn in titles[:6]] == [0, 0, 0, 1, 1, 1]  # two pairs in a batch, then one
    assert sorted(number for drawn in titles[:3] for number in drawn.numbers) == [0, 1, 2, 3, 4]


def test_compared_vectors_are_those_of_embed(bert: Path):
    model = load(bert)
    texts = ["北京 欢迎 你", "the mask decides", "every role", "你 吃 啥"]
    ids = [model.tokenizer.encode(text).ids for text in texts]
    batch = weights.Embeddings([(ids[0], ids[1]), (ids[2], ids[3])]).batch([0, 1], 0)
    vectors = batch.vectors(model)
    expected = embed(model, [texts[number] for number in (0, 2, 1, 3)], normalize=True)
    assert torch.allclose(vectors, expected, atol=1e-5)
    cosines = (expected[:2] @ expected[2:].T / weights.TEMPERATURE).exp()
    own = cosines.diagonal()
    by_hand = -((own / cosines.sum(1)).log() + (own / cosines.sum(0)).log()).mean() / 2
    assert torch.allclose(batch.loss(model), by_hand, atol=1e-4)


@pytest.fixture
def teacher(bert: Path) -> weights.Teacher:
    return weights.Teacher(load(bert).requires_grad_(False).eval(), 2.0)


def test_a_model_that_reads_like_its_teacher_loses_nothing(bert: Path, teacher: weights.Teacher):
    texts = [teacher.model.tokenizer.encode(text).ids for text in ("the mask decides", "every role", "北京 欢迎 你")]
    part = weights.Sentences([*map(np.array, texts)], np.arange(10, 20), teacher, seed=1)
    batch = part.batch([0, 1, 2], 0)
    model = load(bert)
    assert batch.loss(model).item() == 0
    with torch.no_grad():
        model.body.layers[1].feed_forward_norm.bias.add_(0.1)
    found, wanted = batch.states(model), batch.states(teacher.model)
    by_hand = [((a - b) ** 2).sum() / (b**2).sum() for a, b in zip(found, wanted, strict=True)]
    assert min(by_hand) > 0 and batch.loss(model).item() == pytest.approx(2 * sum(by_hand).item() / len(by_hand))
    alone = [load(bert).body(torch.tensor([ids]), Mask.bidirectional(torch.ones(1, len(ids)) > 0))[0] for ids in texts]
    plain = weights.Kept(weights.pack([*map(weights._read_only, texts)]), teacher)
    assert torch.allclose(plain.states(teacher.model)[0], torch.cat(alone), atol=1e-5)
    assert torch.allclose(plain.states(teacher.model)[2], torch.stack([one[0] for one in alone]), atol=1e-5)


def test_every_layer_may_be_kept(bert: Path, teacher: weights.Teacher):
    ids = teacher.model.tokenizer.encode("the mask decides").ids
    row = weights.pack([weights._read_only(ids)])
    model = load(bert)
    with torch.no_grad():
        model.body.layers[0].feed_forward_norm.bias.add_(0.1)
    last, layers = (weights.Kept(row, teacher._replace(layers=layers)).states(model) for layers in (False, True))
    assert len(layers) == len(last) + len(model.body.layers) - 1 and not model.body.layers[0]._forward_hooks
    assert all(map(torch.equal, layers[1:], last))
    model.body.layers = model.body.layers[:1]
    assert torch.allclose(layers[0], weights.Kept(row, teacher).states(model)[0], atol=1e-5)


def test_tokens_are_replaced_but_not_the_frame(teacher: weights.Teacher):
    ids = np.array([1, *[5] * 200, 2])
    part = weights.Sentences([ids] * 50, np.array([7, 8]), teacher, seed=1)
    row = part.batch(range(50), 0).row.ids.view(50, -1)
    assert torch.equal(row[:, 0], torch.full((50,), 1)) and torch.equal(row[:, -1], torch.full((50,), 2))
    shares = (row[:, 1:-1] != 5).float().mean(1)
    assert 10 < (shares > 0).sum() < 40 and shares[shares > 0].mean() == pytest.approx(weights.REPLACED, abs=0.03)
    assert not torch.equal(row, part.batch(range(50), 1).row.ids.view(50, -1))


def test_a_start_between_two_models(bert: Path):
    model, other = load(bert).with_language_model(torch.Generator().manual_seed(0)), load(bert)
    with torch.no_grad():
        for weight in other.parameters():
            weight.add_(1.0)
    before = {name: weight.clone() for name, weight in model.named_parameters()}
    ids = torch.arange(5, 12)
    hidden = model.body(ids[None], weights.allmask.Mask.causal(torch.ones(1, 7, dtype=torch.bool)))[0]
    logits = model.logits(hidden).mean(0)
    rare = torch.arange(model.config.vocab_size) >= 9
    weights.blended(model, other, {"tokens": 0.5, "layers": 0.25}, rare, [ids.tolist()])
    assert torch.allclose(model.logits(hidden).mean(0), logits, atol=1e-4)  # the new tokens are as likely as before
    moved = {name: (weight - before[name]).mean().item() for name, weight in model.named_parameters()}
    tokens = (model.body.embedding.tokens.weight - before["body.embedding.tokens.weight"]).mean(1)
    assert torch.allclose(tokens[:9], torch.tensor(0.5)) and torch.allclose(tokens[9:], torch.tensor(1.0))
    assert moved["body.embedding.positions.weight"] == pytest.approx(0.25)
    assert moved["body.layers.0.attention.query.weight"] == pytest.approx(0.25)
    assert moved["body.layers.1.attention.query.weight"] == pytest.approx(0.25)
    assert all(value == 0 for name, value in moved.items() if name.startswith("lm_head.") and name != "lm_head.bias")


def test_a_result_between_two_models(bert: Path):
    model, other = load(bert), load(bert)
    with torch.no_grad():
        for weight in other.parameters():
            weight.add_(1.0)
    before = {name: weight.clone() for name, weight in model.named_parameters()}
    weights.mixed(model, other, 0.25)
    assert all(torch.allclose(weight - before[name], torch.tensor(0.25)) for name, weight in model.named_parameters())


def test_reciprocal_rank():
    texts, titles = torch.eye(3), torch.tensor([[1.0, 0, 0], [0, 0.5, 0], [0.9, 0.6, 0.1]])
    assert weights.mean_reciprocal_rank(texts, titles) == pytest.approx((1 + 1 / 2 + 1) / 3)


def test_a_run_goes_on_where_it_was_stopped(bert: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(weights, "QUOTED", 60)  # of 24 texts
    records = [*tiny.english(12), *tiny.chinese(12)]
    tiny.write_jsonl(tmp_path / "pairs.jsonl", records)
    tiny.write_jsonl(tmp_path / "dev.jsonl", records[:6])
    text = "\n\n".join(f"{record['source']}\n{record['target']}" for record in records)
    (tmp_path / "text.txt").write_text(text, encoding="utf-8")
    config = {
        "name": "both", "start": str(bert), "steps": 12, "batch_tokens": 64, "length": 16, "max_source": 9,
        "max_target": 5, "embed_source": 9, "held_out": 0.2, "text": ["text.txt"], "pairs": ["pairs.jsonl"],
        "dev_pairs": "dev.jsonl", "save_every": 4, "evaluations": 1,
        "shares": dict.fromkeys(("title", "quote", "mlm", "causal", "prefix", "embed", "keep"), 1),
        "teacher": str(bert), "blend": {"tokens": 0.5}, "freeze_tokens": True, "keep_layers": True,
        "keep_text": ["text.txt"],
    }  # fmt: skip
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(config))
    words = [str(tmp_path / "config.yaml"), "--data", str(tmp_path), "--precision", "fp32"]
    weights.main([*words, "--out", str(tmp_path / "whole")])
    weights.shutil.copytree(tmp_path / "whole", tmp_path / "stopped")
    newest = tmp_path / "stopped" / "training" / "checkpoints"
    for folder in newest.iterdir():  # as if it had been killed after step 8
        if folder.name > "step-00000008":
            weights.shutil.rmtree(folder)
    weights.shutil.rmtree(tmp_path / "stopped" / "final")
    weights.main([*words, "--out", str(tmp_path / "stopped")])
    whole, again = (load(tmp_path / name / "final").state_dict() for name in ("whole", "stopped"))
    assert all(torch.equal(whole[name], again[name]) for name in whole)
    second = [*words, "--out", str(tmp_path / "second"), "--set", f"start={tmp_path}/whole/final", "keep_start=1.0"]
    weights.main(second)  # trains, and then takes all of its start
    kept = load(tmp_path / "second" / "final").state_dict()
    assert all(torch.equal(whole[name], kept[name]) for name in whole)
    with pytest.raises(SystemExit, match="unknown: lrr"):
        weights.main([*words, "--out", str(tmp_path / "x"), "--set", "lrr=1"])
