"""`allmask train` and `allmask average`: a translator from nothing, and what every other command makes of it."""

from __future__ import annotations

import json
import os
import random
import signal
from pathlib import Path

import pytest
import sacrebleu
import torch
import yaml
from safetensors.torch import load_file

import allmask
from allmask.model import load
from allmask.runs.driver import start
from allmask.runs.finetuning import FineTuning
from allmask.runs.fresh import Fresh
from allmask.runs.plan import Plan
from allmask.tasks.seq2seq import Translate
from allmask.text import train_tokenizer
from allmask.training import Settings
from allmask.training.progress import Progress
from tests import tiny

CHINESE = dict(zip(tiny.WORDS, "红蓝绿猫狗鸟跑睡唱这那", strict=True))
SHAPE = ("--layers", 1, "--width", 16, "--heads", 2, "--ffn-width", 32, "--vocab-size", 60, "--max-target", 12)
QUICK = (*SHAPE, "--steps", 6, "--batch-tokens", 300, "--precision", "fp32")


def pairs(count: int, seed: int) -> list[dict[str, str]]:
    """Sentences of two to five words, and these words in Chinese."""
    rng = random.Random(seed)
    made = [[rng.choice(tiny.WORDS) for _ in range(rng.randint(2, 5))] for _ in range(count)]
    return [{"source": " ".join(row), "target": "".join(CHINESE[word] for word in row)} for row in made]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pairs")
    tiny.write_jsonl(folder / "train.jsonl", pairs(400, 0))
    tiny.write_jsonl(folder / "dev.jsonl", pairs(12, 1))
    return folder


@pytest.fixture(scope="module")
def translator(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run that has learnt most words."""
    settings = Settings(
        steps=120, lr=5e-3, batch_tokens=400, eval_every=40, precision="fp32", schedule="inverse-root", warmup=20,
        weight_decay=0.0, betas=(0.9, 0.98), dropout=0.0, keep=3,
    )  # fmt: skip
    fresh = Fresh(layers=1, width=32, heads=2, ffn_width=64, vocab_size=70)
    data, held_out = (str(corpus / name) for name in ("train.jsonl", "dev.jsonl"))
    job = FineTuning(data, eval=held_out, task=Translate(max_target=12), fresh=fresh)
    run = tmp_path_factory.mktemp("runs") / "zh"
    start(Plan(job, settings), run, quiet=True)
    return run


def fingerprint(run: Path) -> tuple[bytes, str]:
    losses = [(line["step"], line.get("loss")) for line in tiny.read_jsonl(run / "metrics.jsonl")]
    return (run / "final" / "model.safetensors").read_bytes(), json.dumps(losses)


def stop_at(monkeypatch: pytest.MonkeyPatch, step: int, number: int) -> None:
    monkeypatch.setattr(
        Progress, "update", lambda bar, done, text="": os.kill(os.getpid(), number) if done == step else None
    )


# ---- training --------------------------------------------------------------------------------------------------


def test_a_run_leaves_all_it_promises(cli, corpus: Path, tmp_path: Path):
    run = tmp_path / "run"
    files = ("--data", corpus / "train.jsonl", "--eval", corpus / "dev.jsonl", "--out", run)
    ran = cli("train", "--task", "translate", *files, *QUICK, "--eval-every", 3, "--json")
    assert ran.code == 0, ran.err
    result = json.loads(ran.out)
    assert result["task"] == "translate" and result["steps"] == 6 and result["examples"] == 400
    assert set(result["metrics"]) == {"loss", "bleu", "chrf"}
    assert {path.name for path in run.iterdir()} == {
        "config.yaml", "checkpoints", "metrics.jsonl", "loss.png", "result.json", "final",
    }  # fmt: skip
    told = yaml.safe_load((run / "config.yaml").read_text())
    assert told["preset"] == "transformer-small" and told["model"] is None and told["label_smoothing"] == 0.1
    assert [line["step"] for line in tiny.read_jsonl(run / "metrics.jsonl") if "eval_bleu" in line] == [3, 6]
    task = json.loads((run / "final" / "allmask.json").read_text())
    assert task == {
        "task": "translate", "max_source": 254, "max_target": 12, "truncate": "head", "mask": "encoder-decoder",
        "best": "bleu", "quote": 0, "end_bias": None, "length_penalty": None, "no_repeat_ngram": None,
        "usual_score": None,
    }  # fmt: skip
    made = load(run / "final")
    assert made.tokenizer is not None and made.tokenizer.kind == "bpe"
    tensors = load_file(run / "final" / "model.safetensors")
    assert [name for name, tensor in tensors.items() if made.config.vocab_size in tensor.shape] == [
        "body.embedding.tokens.weight"  # one matrix for source, target and output
    ]
    assert "a new transformer-small: 60 tokens" in ran.err and "written " in ran.err


def test_the_rate_is_that_of_2017(cli, corpus: Path, tmp_path: Path):
    data = ("--data", corpus / "train.jsonl", "--held-out", 0)
    words = (*data, "--out", tmp_path / "run", *QUICK, "--warmup", 3, "--quiet")
    ran = cli("train", *words)
    assert ran.code == 0 and ran.err == "", ran.err
    rates = [line["lr"] for line in tiny.read_jsonl(tmp_path / "run" / "metrics.jsonl")]
    peak = 16**-0.5 * 4000**-0.5
    assert rates == pytest.approx([peak * min(step / 3, (3 / step) ** 0.5) for step in range(1, 7)])


@pytest.mark.parametrize(("step", "number", "code"), [(1, signal.SIGINT, 130), (5, signal.SIGTERM, 143)])
def test_resumed_equals_uninterrupted(
    cli, monkeypatch, corpus: Path, tmp_path: Path, step: int, number: int, code: int
):
    files = ("--data", corpus / "train.jsonl", "--eval", corpus / "dev.jsonl")
    words = ("train", *files, *QUICK, "--eval-every", 2, "--average", 2)
    assert cli(*words, "--out", tmp_path / "whole").code == 0
    with monkeypatch.context() as patched:
        stop_at(patched, step, number)
        assert cli(*words, "--out", tmp_path / "cut").code == code
    ran = cli(*((*words, "--resume") if step == 1 else ("train", "--resume")), "--out", tmp_path / "cut")
    assert ran.code == 0 and "the mean of 2 checkpoints" in ran.err, ran.err
    assert fingerprint(tmp_path / "cut") == fingerprint(tmp_path / "whole")


def test_without_eval_the_mean_is_taken(cli, corpus: Path, tmp_path: Path):
    data = ("--data", corpus / "train.jsonl", "--held-out", 0)
    words = (*data, "--out", tmp_path / "run", *QUICK, "--save-every", 2, "--average", 3)
    ran = cli("train", *words)
    assert ran.code == 0 and "mean of steps 2, 4, 6: train_loss" in ran.out, ran.err
    assert cli("average", tmp_path / "run", "--last", 3, "--out", tmp_path / "mean").code == 0
    made, other = (load_file(tmp_path / name / "model.safetensors") for name in ("run/final", "mean"))
    assert all(torch.equal(made[name], other[name]) for name in made)


def test_a_resumed_run_keeps_its_shape(cli, translator: Path):
    ran = cli("train", "--resume", "--out", translator, "--vocab-size", 99, "--preset", "transformer-small")
    assert ran.code == 2 and "vocab_size is 70, not 99" in ran.err and "preset" not in ran.err


def test_a_loss_that_is_not_finite(cli, corpus: Path, tmp_path: Path):
    words = ("--data", corpus / "train.jsonl", "--out", tmp_path / "run", *QUICK, "--steps", 40)
    ran = cli("train", *words, "--lr", 1e30, "--warmup", 0, "--schedule", "constant")
    assert ran.code == 6 and "error[diverged]" in ran.err
    assert not (tmp_path / "run" / "final").exists()


def test_titles_are_learnt_from_nothing_too(cli, data: Path, tmp_path: Path):
    files = ("--data", data / "train.jsonl", "--eval", data / "dev.jsonl", "--out", tmp_path / "run")
    ran = cli("train", "--task", "title", *files, *QUICK, "--preset", "bert-tiny")
    assert ran.code == 0 and "rouge_l" in ran.out, ran.err
    assert load(tmp_path / "run" / "final").config.family == "bert"


@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        (["--out", "{tmp}/run"], 2, "no data was named"),
        (["--data", "{data}"], 2, "no folder for the run"),
        (["--data", "nosuch.jsonl", "--out", "{tmp}/run"], 3, "nosuch.jsonl: no such file"),
        (["--data", "{data}", "--out", "{tmp}/run", "--preset", "transformer-smal"], 2, "did you mean transformer-sm"),
        (["--data", "{data}", "--out", "{tmp}/run", "--tokenizer", "nosuch"], 4, "nosuch"),
        (["--data", "{data}", "--out", "{tmp}/run", "--vocab-size", "9"], 2, "alone need"),
        (["--data", "{data}", "--out", "{tmp}/run", "--width", "30", "--heads", "4"], 2, "not a multiple of heads"),
        (["--data", "{data}", "--out", "{tmp}/run", "--average", "3", "--keep", "2"], 2, "raise --keep"),
        (["--data", "{data}", "--out", "{tmp}/run", "--best", "rouge"], 2, "--best"),
        (["--resume", "--out", "{tmp}/run"], 4, "no run to resume"),
    ],
)
def test_what_cannot_be(cli, corpus: Path, tmp_path: Path, words: list[str], code: int, says: str):
    ran = cli("train", *[word.format(data=corpus / "train.jsonl", tmp=tmp_path) for word in words])
    assert ran.code == code and says in ran.err, ran.err
    assert list(tmp_path.iterdir()) == []


def test_a_bad_record_stops(cli, tmp_path: Path):
    file = tmp_path / "bad.jsonl"
    file.write_text('{"source": "red", "target": "红"}\n{"source": "red", "traget": "红"}\n', encoding="utf-8")
    ran = cli("train", "--data", file, "--out", tmp_path / "run", *QUICK)
    assert ran.code == 3 and f'{file}:2: no "target"' in ran.err and not (tmp_path / "run").exists()
    ran = cli("train", "--data", file, "--out", tmp_path / "run", *QUICK, "--on-bad-record", "skip", "--vocab-size", 99)
    assert ran.code == 0, ran.err


# ---- what it is good for ---------------------------------------------------------------------------------------


def test_it_learns_and_is_evaluated_as_sacrebleu_does(cli, translator: Path, corpus: Path):
    ran = cli("evaluate", translator, corpus / "dev.jsonl", "--beams", 3, "--precision", "fp32", "--json")
    assert ran.code == 0, ran.err
    found = json.loads(ran.out)
    rows = tiny.read_jsonl(corpus / "dev.jsonl")
    written = allmask.pipeline("translate", translator, "fp32")([row["source"] for row in rows], beams=3)
    bleu = sacrebleu.corpus_bleu(written, [[row["target"] for row in rows]], tokenize="zh").score
    assert found["scores"]["model"]["bleu"] == pytest.approx(bleu) and bleu > 30
    assert "tok:zh" in found["signatures"]["bleu"] and set(found["scores"]) == {"model"}
    ran = cli("evaluate", translator, corpus / "dev.jsonl", "--limit", 3, "--precision", "fp32", "--show", 1)
    assert "| 3 records | BLEU | chrF | exact | length |" in ran.out and "\nBLEU: nrefs:1|case:mixed" in ran.out
    assert "best:" in ran.out and "worst:" in ran.out


def test_it_is_written_and_predicted_with(cli, translator: Path, corpus: Path, tmp_path: Path):
    rows = tiny.read_jsonl(corpus / "dev.jsonl")[:4]
    file = tiny.write_jsonl(tmp_path / "in.jsonl", [{"source": row["source"], "id": 1} for row in rows])
    how = ("--beams", 4, "--length-penalty", 0.6, "--precision", "fp32")
    ran = cli("predict", translator, file, "-o", tmp_path / "out.jsonl", *how)
    assert ran.code == 0, ran.err
    written = [row["prediction"] for row in tiny.read_jsonl(tmp_path / "out.jsonl")]
    for row, text in zip(rows, written, strict=True):
        ran = cli("generate", translator, "--text", row["source"], *how)
        assert (ran.code, ran.out) == (0, f"{text}\n")
    ran = cli("generate", translator, "--text", rows[0]["source"], "--show-mask", "--precision", "fp32")
    assert ran.code == 0 and "■" in ran.err


def test_sources_that_are_cut_are_counted(cli, translator: Path, tmp_path: Path):
    rows = [{"source": "red cat " * 300, "target": "红猫"}, {"source": "red cat", "target": "红猫"}]
    tiny.write_jsonl(tmp_path / "long.jsonl", rows)
    told = "1 text cut to 254 tokens"
    assert told in cli("predict", translator, tmp_path / "long.jsonl", "-o", tmp_path / "out.jsonl").err
    assert told in cli("generate", translator, "--text", rows[0]["source"]).err
    assert json.loads(cli("evaluate", translator, tmp_path / "long.jsonl", "--json").out)["cut"] == 1
    assert "1 text cut" in cli("evaluate", translator, tmp_path / "long.jsonl").out


def test_a_translator_is_no_writer_of_titles(translator: Path):
    with pytest.raises(allmask.errors.CheckpointError, match='was trained for "translate", not for "title"'):
        allmask.pipeline("title", translator)
    assert allmask.pipeline("generate", translator, "fp32")("") == ""


def test_a_t5_folder_learns_to_translate(cli, corpus: Path, tmp_path: Path):
    rows = pairs(400, 0)
    train_tokenizer([text for row in rows for text in row.values()], "unigram", 170).save(tmp_path / "tok")
    made = Fresh("t5-small", str(tmp_path / "tok"), layers=1, width=32, heads=2, ffn_width=32).model([], 1)
    made.save(tmp_path / "t5")
    files = ("--data", corpus / "train.jsonl", "--eval", corpus / "dev.jsonl", "--max-target", 12)
    how = ("--steps", 4, "--batch-tokens", 300, "--precision", "fp32", "--best", "loss", "--json")
    ran = cli("finetune", tmp_path / "t5", "--task", "translate", *files, *how, "--out", tmp_path / "run")
    assert ran.code == 0, ran.err
    told = json.loads(ran.out)
    assert told["score"] == -told["metrics"]["loss"]
    assert yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())["label_smoothing"] == 0.1
    assert json.loads((tmp_path / "run" / "final" / "config.json").read_text())["model_type"] == "t5"
    assert cli("generate", tmp_path / "run", "--text", "red cat", "--precision", "fp32").code == 0


# ---- means -----------------------------------------------------------------------------------------------------


def test_the_mean_is_a_model_like_any_other(cli, translator: Path, corpus: Path, tmp_path: Path):
    ran = cli("average", translator, "--last", 2, "--out", tmp_path / "mean", "--json")
    assert ran.code == 0, ran.err
    assert json.loads(ran.out)["steps"] == [80, 120]
    states = [load_file(translator / "checkpoints" / f"step-{step:08d}" / "model.safetensors") for step in (80, 120)]
    for name, tensor in load_file(tmp_path / "mean" / "model.safetensors").items():
        assert torch.allclose(tensor, (states[0][name] + states[1][name]) / 2, atol=1e-6)
    assert cli("verify", tmp_path / "mean").code == 0
    words = (tmp_path / "mean", corpus / "dev.jsonl", "--limit", 2, "--precision", "fp32", "--json")
    assert "signatures" in json.loads(cli("evaluate", *words).out)


@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        (["{run}", "--out", "{tmp}/mean", "--last", "9"], 2, "has 3 checkpoints, not 9"),
        (["{tmp}", "--out", "{tmp}/mean"], 4, "no run with checkpoints"),
        (["{run}", "--out", "{run}"], 5, "already there"),
        (["{run}"], 2, "--out"),
    ],
)
def test_means_that_cannot_be(cli, translator: Path, tmp_path: Path, words: list[str], code: int, says: str):
    ran = cli("average", *[word.format(run=translator, tmp=tmp_path) for word in words])
    assert ran.code == code and says in ran.err, ran.err
    assert list(tmp_path.iterdir()) == []
