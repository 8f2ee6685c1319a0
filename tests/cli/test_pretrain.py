"""`allmask pretrain`: from text to a model that fills and writes, and what it says to bad input."""

from __future__ import annotations

import gzip
import json
import subprocess
import time
from pathlib import Path

import pytest
import yaml

from allmask.data import Texts
from allmask.text import train_tokenizer
from tests import tiny

SMALL = ("--preset", "bert-tiny", "--width", 16, "--heads", 2, "--length", 24, "--held-out", 0.1)
QUICK = (*SMALL, "--steps", 6, "--batch-tokens", 256, "--lr", 0.01, "--precision", "fp32")


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Counting in a circle, in English and Chinese."""
    circles = [" ".join((tiny.WORDS * 2)[n : n + 6]) for n in range(len(tiny.WORDS))]
    circles += [(tiny.CHARACTERS * 2)[n : n + 6] for n in range(len(tiny.CHARACTERS))]
    path = tmp_path_factory.mktemp("text") / "文集.txt"
    path.write_text("\n\n".join(circles * 3), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def tokenizer(text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    train_tokenizer(Texts([text]), "wordpiece", 200).save(folder)
    return folder


def weights(run: Path) -> bytes:
    return (run / "final" / "model.safetensors").read_bytes()


def test_one_body_fills_and_writes(cli, text: Path, tokenizer: Path, tmp_path: Path):
    """The circle is learnt in both ways, and only the mask differs."""
    run = tmp_path / "run"
    dev = tmp_path / "dev.txt"  # the same circles from the last to the first
    dev.write_text("\n\n".join(reversed(text.read_text(encoding="utf-8").split("\n\n"))), encoding="utf-8")
    words = ("--objective", "mlm:0.5,causal:0.5", "--data", text, "--eval", dev, "--tokenizer", tokenizer)
    shape = ("--preset", "bert-tiny", "--width", 64, "--length", 16, "--dropout", 0, "--whole-words")
    quick = ("--precision", "fp32", "--steps", 240, "--batch-tokens", 512, "--lr", 3e-3, "--eval-every", 120)
    ran = cli("pretrain", *words, *shape, *quick, "--out", run)
    assert ran.code == 0, ran.err
    for told in ("allmask fill", "allmask generate", "loss_mlm", "perplexity_causal"):
        assert told in ran.out, told
    for told in ("text: 66 documents", "rows: 66 to learn from, 66 held out", "tokens/s", "step 240/240 loss"):
        assert told in ran.err, told
    assert " mlm " in ran.err and " causal " in ran.err
    ran = cli("fill", run, "京欢[MASK]你白", "--top", 1, "--json")
    assert json.loads(ran.out)["text"] == "京欢迎你白"
    ran = cli("generate", run / "final", "--text", "cat dog bird", "--max-new", 2, "--precision", "fp32")
    assert ran.out.strip() == "runs sleeps"
    assert cli("verify", run).code == 0


def test_config_and_json(cli, text: Path, tokenizer: Path, tmp_path: Path):
    (tmp_path / "run.yaml").write_text(f"data: {text}\ntokenizer: {tokenizer}\nobjective: causal\nlr: 1e-3\n")
    ran = cli("pretrain", "--config", tmp_path / "run.yaml", *QUICK, "--out", tmp_path / "a", "--json", "--quiet")
    assert ran.code == 0 and ran.err == "", ran.err
    result = json.loads(ran.out)
    assert result["final"] == str(tmp_path / "a" / "final") and result["objective"] == "causal:1"
    saved = yaml.safe_load((tmp_path / "a" / "config.yaml").read_text())
    assert (saved["lr"], saved["schedule"], saved["data"]) == (0.01, "cosine", [str(text)])
    ran = cli("pretrain", "--config", tmp_path / "a" / "config.yaml", "--out", tmp_path / "b", "--quiet")
    assert ran.code == 0 and weights(tmp_path / "a") == weights(tmp_path / "b")


def test_several_files_as_a_shell_names_them(cli, text: Path, tokenizer: Path, tmp_path: Path):
    lines = text.read_text(encoding="utf-8").split("\n\n")
    (tmp_path / "a.txt").write_text("\n\n".join(lines[:20]), encoding="utf-8")
    with gzip.open(tmp_path / "b.jsonl.gz", "wt", encoding="utf-8") as file:
        file.writelines(json.dumps({"text": line}) + "\n" for line in lines[20:])
    for name, files in (("one", [text]), ("two", [tmp_path / "a.txt", tmp_path / "b.jsonl.gz"])):
        ran = cli("pretrain", "--tokenizer", tokenizer, *QUICK, "--out", tmp_path / name, "--data", *files)
        assert ran.code == 0, ran.err
    assert weights(tmp_path / "one") == weights(tmp_path / "two")


def test_the_tokenizer_of_a_bundled_model(cli, text: Path, tmp_path: Path):
    ran = cli("pretrain", "--data", text, "--tokenizer", "allmask-zh", *SMALL, "--steps", 1, "--out", tmp_path / "run")
    assert ran.code == 0, ran.err
    ran = cli("tokenizer", "show", tmp_path / "run", "--text", "北京", "--no-special", "--json")
    assert ran.out == cli("tokenizer", "show", "allmask-zh", "--text", "北京", "--no-special", "--json").out
    assert yaml.safe_load((tmp_path / "run" / "config.yaml").read_text(encoding="utf-8"))["tokenizer"] == "allmask-zh"


def test_resume(cli, text: Path, tokenizer: Path, tmp_path: Path):
    words = ("pretrain", "--objective", "mlm,nsp", "--data", text, "--tokenizer", tokenizer, *QUICK)
    assert cli(*words, "--out", tmp_path / "run").code == 0
    ran = cli("pretrain", "--resume", "--out", tmp_path / "run", "--length", 24, "--json")
    assert ran.code == 0 and "this run is finished" in ran.err and json.loads(ran.out)["steps"] == 6
    ran = cli("pretrain", "--resume", "--out", tmp_path / "run", "--objective", "mlm")
    assert ran.code == 2 and "objective is mlm,nsp, not mlm" in ran.err
    ran = cli(*words, "--out", tmp_path / "run")
    assert ran.code == 5 and "to continue this run: --resume" in ran.err
    ran = cli("pretrain", "--resume", "--out", tmp_path / "nowhere")
    assert ran.code == 4 and "no run to resume" in ran.err


def test_killed_at_once_and_resumed(cli, python: str, text: Path, tokenizer: Path, tmp_path: Path):
    """A real kill -9 in the middle of a real run loses the steps since the last checkpoint, and they come back."""
    words = ["--objective", "mlm,causal", "--data", text, "--tokenizer", tokenizer, *QUICK, "--save-every", 10]
    words += ["--steps", 60, "--quiet"]
    assert cli("pretrain", *words, "--out", tmp_path / "whole").code == 0
    command = [python, "-m", "allmask", "pretrain", *map(str, words), "--out", tmp_path / "cut"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE)
    deadline = time.monotonic() + 300
    while time.monotonic() < deadline and not list((tmp_path / "cut" / "checkpoints").glob("step-*")):
        time.sleep(0.01)
    process.kill()
    process.communicate(timeout=60)  # until nobody is left who could write
    assert not (tmp_path / "cut" / "final").exists()
    ran = cli("pretrain", "--resume", "--out", tmp_path / "cut", "--quiet")
    assert ran.code == 0, ran.err
    assert weights(tmp_path / "whole") == weights(tmp_path / "cut")


def test_a_run_of_another_kind(cli, titles: Path):
    ran = cli("pretrain", "--resume", "--out", titles)
    assert ran.code == 4 and "this is not a run of allmask pretrain" in ran.err and "allmask finetune" in ran.err


@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        (["--data", "{text}", "--out", "{tmp}/run"], 2, "allmask tokenizer train"),
        (["--data", "{text}", "--tokenizer", "{tok}"], 2, "--out"),
        (["--tokenizer", "{tok}", "--out", "{tmp}/run"], 2, "no data was named"),
        (["--data", "nosuch.txt", "--tokenizer", "{tok}", "--out", "{tmp}/run"], 3, "nosuch.txt: no such file"),
        (["--data", "{text}", "--tokenizer", "nosuch", "--out", "{tmp}/run"], 4, "nosuch"),
        (["--data", "{text}", "--from", "nosuch", "--out", "{tmp}/run"], 4, "nosuch: no such folder"),
        (["--data", "{text}", "--from", "{bert}", "--layers", "2", "--out", "{tmp}/run"], 2, "no layers can be given"),
        (["--data", "{text}", "--from", "{bert}", "--length", "99", "--out", "{tmp}/run"], 2, "48 positions"),
        (["--data", "{text}", "--from", "{gpt2}", "--length", "24", "--out", "{tmp}/run"], 2, "has no [MASK]"),
        (
            ["--objective", "span", "--data", "{text}", "--from", "{bert}", "--length", "24", "--out", "{tmp}/run"],
            2,
            "span:1 is for an encoder–decoder",
        ),
    ],
)
def test_bad_words(
    cli, bert, gpt2, text: Path, tokenizer: Path, tmp_path: Path, words: list[str], code: int, says: str
):
    places = {"text": text, "tok": tokenizer, "tmp": tmp_path, "bert": bert, "gpt2": gpt2}
    ran = cli("pretrain", *[word.format(**places) for word in words])
    assert ran.code == code and says in ran.err, ran.err
    assert not (tmp_path / "run").exists()


def test_a_bad_record_is_named_and_can_then_be_skipped(cli, text: Path, tokenizer: Path, tmp_path: Path):
    rows = [json.dumps({"text": line}) for line in text.read_text(encoding="utf-8").split("\n\n")]
    (tmp_path / "bad.jsonl").write_text("\n".join([*rows[:3], '{"txt": 1}', *rows[3:]]), encoding="utf-8")
    words = ("pretrain", "--data", tmp_path / "bad.jsonl", "--tokenizer", tokenizer, *QUICK, "--out", tmp_path / "run")
    ran = cli(*words)
    assert ran.code == 3 and "bad.jsonl:4:" in ran.err and "--on-bad-record skip" in ran.err
    ran = cli(*words, "--on-bad-record", "skip", "--json")
    assert ran.code == 0 and sum(json.loads(ran.out)["skipped"].values()) == 1, ran.err
