"""`allmask finetune`: what it learns and leaves, how it goes on, and what it says to bad input before writing."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from unittest.mock import Mock

import pytest
import yaml

from allmask.model import load
from allmask.registry import TASKS
from allmask.runs import finetuning
from allmask.runs.options import read_yaml
from allmask.training import checkpoint as runs
from allmask.training.progress import Progress
from tests import tiny

QUICK = ("--steps", 6, "--batch-tokens", 128, "--lr", 0.01, "--max-target", 8)


def fingerprint(run: Path) -> tuple[bytes, str]:
    """What must not depend on interruptions: the weights, and the losses on the way."""
    losses = [(line["step"], line.get("loss")) for line in tiny.read_jsonl(run / "metrics.jsonl")]
    return (run / "final" / "model.safetensors").read_bytes(), json.dumps(losses)


def stop_at(monkeypatch: pytest.MonkeyPatch, step: int, number: int) -> None:
    """Send this process a signal when the run reports that step."""
    monkeypatch.setattr(
        Progress, "update", lambda bar, done, text="": os.kill(os.getpid(), number) if done == step else None
    )


# ---- what is left ---------------------------------------------------------------------------------------------


def test_a_run_leaves_all_it_promises(cli, bert: Path, data: Path, tmp_path: Path):
    run = tmp_path / "runs" / "a"
    ran = cli(
        "finetune", bert, "--task", "title", "--data", data / "train.jsonl", "--eval", data / "dev.jsonl", "--out", run,
        *QUICK, "--eval-every", 3, "--json",
    )  # fmt: skip
    assert ran.code == 0, ran.err
    result = json.loads(ran.out)
    assert result["final"] == str(run / "final") and result["steps"] == 6 and result["examples"] == 64
    assert set(result["metrics"]) == {"loss", "rouge_1", "rouge_2", "rouge_l"}
    assert {path.name for path in run.iterdir()} == {
        "config.yaml", "checkpoints", "metrics.jsonl", "loss.png", "result.json", "final",
    }  # fmt: skip
    assert (run / "loss.png").read_bytes().startswith(b"\x89PNG")
    lines = tiny.read_jsonl(run / "metrics.jsonl")
    assert [line["step"] for line in lines if "loss" in line] == [1, 2, 3, 4, 5, 6]
    assert [line["step"] for line in lines if "eval_rouge_l" in line] == [3, 6]
    task = json.loads((run / "final" / "allmask.json").read_text())
    assert task == {
        "task": "title", "max_source": 37, "max_target": 8, "truncate": "head", "mask": "prefix", "quote": 0,
        "end_bias": None, "length_penalty": None, "no_repeat_ngram": None, "usual_score": None,
    }  # fmt: skip
    assert load(run / "final").lm_head is not None
    for words in ("no language model head; one is made", "reference ", "written ", "step 6/6"):
        assert words in ran.err, words


def test_it_learns(titles: Path):
    losses = [line["loss"] for line in tiny.read_jsonl(titles / "metrics.jsonl") if "loss" in line]
    assert sum(losses[-5:]) < 0.7 * sum(losses[:5])


def test_the_vocabulary_is_cut_to_what_the_data_uses(cli, bert: Path, data: Path, tmp_path: Path, monkeypatch):
    words = ("finetune", bert, "--data", data / "train.jsonl", *QUICK, "--steps", 1)
    ran = cli(*words, "--out", tmp_path / "small", "--prune")
    before, after = load(bert).config.vocab_size, load(tmp_path / "small" / "final").config.vocab_size
    assert f"vocabulary: {before} → {after} tokens, −0.0M parameters" in ran.err and after < before
    ran = cli(*words, "--out", tmp_path / "whole")  # few records: new texts have tokens that these lack
    assert "vocabulary:" not in ran.err and load(tmp_path / "whole" / "final").config.vocab_size == before
    assert yaml.safe_load((tmp_path / "whole" / "config.yaml").read_text())["prune"] is False
    monkeypatch.setattr(TASKS["title"], "prunes_from", 3)
    assert "vocabulary:" in cli(*words, "--out", tmp_path / "many").err
    assert yaml.safe_load((tmp_path / "many" / "config.yaml").read_text())["prune"] is True
    assert "vocabulary:" not in cli(*words, "--out", tmp_path / "said", "--no-prune").err


def test_what_is_trained_on_is_not_evaluated_on(cli, bert: Path, data: Path, tmp_path: Path):
    (tmp_path / "copy.jsonl").write_bytes((data / "train.jsonl").read_bytes())
    for same in (data / "train.jsonl", tmp_path / "copy.jsonl"):
        ran = cli("finetune", bert, "--data", data / "train.jsonl", "--eval", same, "--out", tmp_path / "run", *QUICK)
        assert ran.code == 2 and f"--eval {same}: " in ran.err and "also trained on" in ran.err, ran.err
        assert not (tmp_path / "run").exists()


def test_without_eval_the_last_step_is_kept(cli, bert: Path, data: Path, tmp_path: Path):
    ran = cli("finetune", bert, "--data", data / "train.jsonl", "--out", tmp_path / "run", *QUICK)
    assert ran.code == 0 and "weights of the last step" in ran.err
    assert "6 steps" in ran.out and "step 6: train_loss" in ran.out and "allmask generate" in ran.out


def test_long_sources_are_counted(cli, bert: Path, data: Path, tmp_path: Path):
    ran = cli("finetune", bert, "--data", data / "train.jsonl", "--out", tmp_path / "run", *QUICK, "--max-source", 6)
    longer = sum(len(row["source"].split()) + 1 > 6 for row in tiny.english(64))  # the full stop is a token, too
    assert f"{longer} of 64 sources are cut to 6 tokens" in ran.err


def test_quiet_says_nothing(cli, bert: Path, data: Path, tmp_path: Path):
    ran = cli("finetune", bert, "--data", data / "train.jsonl", "--out", tmp_path / "run", *QUICK, "--quiet")
    assert ran.code == 0 and ran.err == ""


# ---- formats, languages ----------------------------------------------------------------------------------------


def write_csv(path: Path, rows: list[dict[str, str]]) -> Path:
    lines = ["source,target", *(f'"{row["source"]}",{row["target"]}' for row in rows)]
    path.write_text("\n".join(lines), encoding="utf-8")
    return path


def write_parquet(path: Path, rows: list[dict[str, str]]) -> Path:
    import pyarrow
    from pyarrow import parquet

    parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    return path


def test_the_same_records_in_any_format_give_the_same_model(cli, bert: Path, tmp_path: Path):
    writers: dict[str, Callable] = {"jsonl": tiny.write_jsonl, "csv": write_csv, "parquet": write_parquet}
    weights = set()
    for kind, write in writers.items():
        file = write(tmp_path / f"标题.{kind}", tiny.chinese(24))
        ran = cli("finetune", bert, "--data", file, "--out", tmp_path / kind, *QUICK)
        assert ran.code == 0, ran.err
        weights.add((tmp_path / kind / "final" / "model.safetensors").read_bytes())
    assert len(weights) == 1


def test_a_byte_order_mark_does_no_harm(cli, bert: Path, tmp_path: Path):
    file = tiny.write_jsonl(tmp_path / "bom.jsonl", tiny.chinese(8))
    file.write_bytes(b"\xef\xbb\xbf" + file.read_bytes())
    assert cli("finetune", bert, "--data", file, "--out", tmp_path / "run", *QUICK).code == 0


# ---- settings --------------------------------------------------------------------------------------------------


def test_flag_over_file_over_default(cli, bert: Path, data: Path, tmp_path: Path):
    (tmp_path / "run.yaml").write_text(
        f"data: {data / 'train.jsonl'}\nlr: 3e-3\nsteps: 50\nmask: naive\nmax_target: 8\n"
    )
    ran = cli("finetune", bert, "--config", tmp_path / "run.yaml", "--steps", 2, "--out", tmp_path / "run")
    assert ran.code == 0, ran.err
    saved = yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())
    assert (saved["lr"], saved["steps"], saved["mask"], saved["clip"]) == (0.003, 2, "naive", 1.0)
    assert (saved["model"], saved["data"], saved["task"]) == (str(bert), str(data / "train.jsonl"), "title")


def test_a_saved_config_makes_the_same_run_again(cli, bert: Path, data: Path, tmp_path: Path):
    cli("finetune", bert, "--data", data / "train.jsonl", "--out", tmp_path / "a", *QUICK, "--seed", 7)
    ran = cli("finetune", "--config", tmp_path / "a" / "config.yaml", "--out", tmp_path / "b")
    assert ran.code == 0, ran.err
    assert fingerprint(tmp_path / "a") == fingerprint(tmp_path / "b")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("lr: fast", "lr is 'fast'; expected a number"),
        ("steps: 2.5", "steps is 2.5; expected a whole number"),
        ("learning_rate: 1", "unknown setting learning_rate"),
        ("stepps: 1", "did you mean steps?"),
        ("prune: 3", "prune is 3; expected true or false"),
        ("betas: [1]", "expected two numbers"),
        ("lr: [", "not YAML"),
        (f"lr: {'[' * 3000}", "not YAML"),
        (f"lr: {'9' * 6000}", "not YAML"),
        ("just words", "expected names and values"),
        ("lr: -1", "lr is -1.0; it must be positive"),
        ("task: poetry", "unknown task poetry"),
    ],
)
def test_a_bad_config(cli, bert: Path, data: Path, tmp_path: Path, text: str, says: str):
    (tmp_path / "run.yaml").write_text(text)
    words = ("--config", tmp_path / "run.yaml", "--data", data / "train.jsonl", "--out", tmp_path / "run")
    ran = cli("finetune", bert, *words)
    assert ran.code == 2 and says in ran.err, ran.err
    assert not (tmp_path / "run").exists()


# ---- stopping and going on -------------------------------------------------------------------------------------


@pytest.mark.parametrize(("step", "number", "code"), [(1, signal.SIGINT, 130), (4, signal.SIGTERM, 143)])
def test_resumed_equals_uninterrupted(cli, monkeypatch, bert: Path, data: Path, tmp_path: Path, step, number, code):
    words = ("finetune", bert, "--data", data / "train.jsonl", "--eval", data / "dev.jsonl", *QUICK, "--eval-every", 2)
    assert cli(*words, "--out", tmp_path / "whole").code == 0
    with monkeypatch.context() as patched:
        stop_at(patched, step, number)
        ran = cli(*words, "--out", tmp_path / "cut")
    assert ran.code == code and "continue with the same command and --resume" in ran.err
    assert not (tmp_path / "cut" / "final").exists()
    assert cli(*words, "--out", tmp_path / "cut", "--resume").code == 0
    assert fingerprint(tmp_path / "cut") == fingerprint(tmp_path / "whole")


def test_a_run_that_died_before_its_first_checkpoint_resumes(cli, monkeypatch, bert: Path, data: Path, tmp_path: Path):
    words = ("finetune", bert, "--data", data / "train.jsonl", *QUICK)
    assert cli(*words, "--out", tmp_path / "whole").code == 0
    with monkeypatch.context() as patched:
        patched.setattr("allmask.runs.driver.train", lambda *_, **__: sys.exit(9))
        assert cli(*words, "--out", tmp_path / "cut").code == 9
    assert cli("finetune", "--resume", "--out", tmp_path / "cut").code == 0
    assert fingerprint(tmp_path / "cut") == fingerprint(tmp_path / "whole")


def test_a_disk_that_is_full_at_the_end(cli, monkeypatch, bert: Path, data: Path, tmp_path: Path):
    """The last checkpoint is there, so nothing is lost but the writing of the model."""
    words = ("finetune", bert, "--data", data / "train.jsonl", *QUICK)
    assert cli(*words, "--out", tmp_path / "whole").code == 0
    with monkeypatch.context() as patched:
        full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        fill = Mock(side_effect=full)
        patched.setattr("allmask.runs.plan.plot_run", lambda run: patched.setattr(runs, "sign", fill))
        ran = cli(*words, "--out", tmp_path / "cut")
    assert ran.code == 5 and "No space left on device" in ran.err, ran.err
    assert not (tmp_path / "cut" / "final").exists() and not (tmp_path / "cut" / ".final.partial").exists()
    assert cli(*words, "--out", tmp_path / "cut", "--resume").code == 0
    assert fingerprint(tmp_path / "cut") == fingerprint(tmp_path / "whole")


def test_a_finished_run_stays_as_it_is(cli, titles: Path):
    before = {path: path.stat().st_mtime_ns for path in titles.rglob("*")}
    ran = cli("finetune", "--resume", "--out", titles, "--json")
    assert ran.code == 0 and "this run is finished" in ran.err
    assert json.loads(ran.out)["steps"] == 80
    assert {path: path.stat().st_mtime_ns for path in titles.rglob("*")} == before


def test_a_resumed_run_keeps_its_settings(cli, titles: Path):
    ran = cli("finetune", "--resume", "--out", titles, "--lr", 0.5, "--steps", 80, "--mask", "naive")
    assert ran.code == 2
    assert "lr is 0.01, not 0.5" in ran.err and "mask is prefix, not naive" in ran.err and "steps" not in ran.err


def test_the_same_file_by_another_name_is_no_other_setting(cli, monkeypatch, titles: Path, bert: Path, data: Path):
    monkeypatch.chdir(data)
    ran = cli(
        "finetune", bert, "--data", f"../{data.name}/train.jsonl", "--eval", "dev.jsonl", "--resume", "--out", titles
    )
    assert ran.code == 0, ran.err


def test_a_resumed_run_keeps_its_data(cli, monkeypatch, bert: Path, tmp_path: Path):
    file = tiny.write_jsonl(tmp_path / "train.jsonl", tiny.english(32))
    with monkeypatch.context() as patched:
        stop_at(patched, 2, signal.SIGINT)
        assert cli("finetune", bert, "--data", file, "--out", tmp_path / "run", *QUICK).code == 130
    tiny.write_jsonl(file, tiny.english(32, seed=5))
    ran = cli("finetune", "--resume", "--out", tmp_path / "run")
    assert ran.code == 3 and f"{file}: changed since" in ran.err


def test_nothing_to_resume(cli, tmp_path: Path):
    ran = cli("finetune", "--resume", "--out", tmp_path / "nowhere")
    assert ran.code == 4 and "no run to resume" in ran.err


def test_ctrl_c(python: str, bert: Path, data: Path, tmp_path: Path):
    """A real one, sent to a real process in the middle of its work."""
    words = ["finetune", bert, "--data", data / "train.jsonl", "--out", tmp_path / "run", *QUICK, "--steps", 100_000]
    process = subprocess.Popen(
        [python, "-m", "allmask", *map(str, words)], stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    metrics = tmp_path / "run" / "metrics.jsonl"
    deadline = time.monotonic() + 300
    while time.monotonic() < deadline and not (metrics.is_file() and len(metrics.read_text().splitlines()) > 2):
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=300)
    assert process.returncode == 130 and out == "" and "Traceback" not in err
    assert "error[interrupted]: stopped after step" in err and "--resume" in err
    assert len(list((tmp_path / "run" / "checkpoints").iterdir())) == 1


def test_a_loss_that_is_not_finite(cli, bert: Path, data: Path, tmp_path: Path):
    words = ("--data", data / "train.jsonl", "--out", tmp_path / "run", *QUICK, "--steps", 40, "--precision", "fp32")
    ran = cli("finetune", bert, *words, "--lr", 1e30, "--warmup", 0)
    assert ran.code == 6 and "error[diverged]" in ran.err
    assert not (tmp_path / "run" / "final").exists()


# ---- bad input: said with its place before anything is written -------------------------------------------------

GOOD = b'{"source": "red cat", "target": "red"}\n'
BAD = {
    "missing field": (b'{"source": "a", "traget": "b"}\n', ':2: no "target"'),
    "blank target": (b'{"source": "a", "target": "  "}\n', ':2: "target" is blank'),
    "blank source": (b'{"source": "", "target": "b"}\n', ':2: "source" is empty'),
    "bad UTF-8": (b'{"source": "\xff", "target": "b"}\n', ":2: not UTF-8"),
    "wrong type": (b'{"source": "a", "target": 3}\n', ':2: "target" is 3 (a number); expected text'),
    "10 MB": (b'{"source": "' + b"a" * 10_000_001 + b'", "target": "b"}\n', ":2: the line is longer than 10,000,000"),
    "not JSON": (b"red cat\n", ":2: not valid JSON"),
}


@pytest.mark.parametrize("name", BAD)
@pytest.mark.parametrize("option", ["--data", "--eval"])
def test_a_bad_record_stops(cli, bert: Path, data: Path, tmp_path: Path, name: str, option: str):
    line, says = BAD[name]
    (tmp_path / "bad.jsonl").write_bytes(GOOD + line + GOOD)
    files = {"--data": data / "train.jsonl", option: tmp_path / "bad.jsonl"}
    ran = cli("finetune", bert, *[word for pair in files.items() for word in pair], "--out", tmp_path / "run", *QUICK)
    assert ran.code == 3 and f"error[data]: {tmp_path / 'bad.jsonl'}{says}" in ran.err, ran.err
    assert "--on-bad-record skip" in ran.err
    assert not (tmp_path / "run").exists()


def test_bad_records_can_be_skipped(cli, bert: Path, tmp_path: Path):
    (tmp_path / "bad.jsonl").write_bytes(GOOD + b"".join(line for line, _ in BAD.values()) + GOOD)
    words = ("--data", tmp_path / "bad.jsonl", "--out", tmp_path / "run", *QUICK, "--on-bad-record", "skip", "--json")
    ran = cli("finetune", bert, *words)
    assert ran.code == 0, ran.err
    result = json.loads(ran.out)
    assert result["examples"] == 2 and sum(result["skipped"].values()) == len(BAD)
    assert "skipped records: " in ran.err and '1 × blank "target"' in ran.err and '1 × blank "source"' in ran.err


@pytest.mark.parametrize(("content", "says"), [(b"", "the file is empty"), (b"\n\n", "there are no records")])
def test_an_empty_file(cli, bert: Path, tmp_path: Path, content: bytes, says: str):
    (tmp_path / "train.jsonl").write_bytes(content)
    ran = cli("finetune", bert, "--data", tmp_path / "train.jsonl", "--out", tmp_path / "run")
    assert ran.code == 3 and says in ran.err and not (tmp_path / "run").exists()


def test_without_a_model_one_is_chosen_by_the_texts(cli, bert: Path, data: Path, tmp_path: Path, monkeypatch):
    seen: list[str] = []
    monkeypatch.setattr(finetuning, "default_model", lambda texts: seen.extend(texts) or str(bert))
    ran = cli("finetune", "--data", data / "train.jsonl", "--max-target", 8, "--steps", 1, "--out", tmp_path / "run")
    assert ran.code == 0 and f"model: {bert}, by the script of the texts" in ran.err
    assert seen[:2] == list(tiny.english(1)[0].values()) and len(seen) == 2 * 64
    assert "chosen for 64 records: batch_tokens 1024 (4096, or fewer if pairs are few), label_smoothing 0.1" in ran.err
    assert ", layer_decay 0.85 (so that it does not forget how to read), lr" in ran.err
    assert read_yaml(tmp_path / "run" / "config.yaml")["model"] == str(bert)


@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        (["{bert}", "--out", "{tmp}/run"], 2, "no data was named"),
        (["{bert}", "--data", "{data}"], 2, "--out"),
        (["--task", "translate", "--data", "{data}", "--out", "{tmp}/run"], 2, "allmask train --task translate"),
        (["{bert}", "--data", "nosuch.jsonl", "--out", "{tmp}/run"], 3, "nosuch.jsonl: no such file"),
        (["nosuch", "--data", "{data}", "--out", "{tmp}/run"], 4, "nosuch: no such folder"),
        (["{bert}", "--data", "{data}", "--out", "{tmp}/run", "--max-target", "48"], 2, "leaves no room"),
        (["{gpt2}", "--data", "{data}", "--out", "{tmp}/run", "--max-target", "8"], 2, "titles need a BERT-like model"),
        (["{bert}", "--data", "{data}", "--out", "{tmp}/run", "--schedule", "steep"], 2, "--schedule"),
    ],
)
def test_what_cannot_be(
    cli, bert: Path, gpt2: Path, data: Path, tmp_path: Path, words: list[str], code: int, says: str
):
    names = {"bert": bert, "gpt2": gpt2, "data": data / "train.jsonl", "tmp": tmp_path}
    ran = cli("finetune", *[word.format(**names) for word in words])
    assert ran.code == code and says in ran.err, ran.err
    assert list(tmp_path.iterdir()) == []


def test_an_occupied_place(cli, bert: Path, data: Path, titles: Path, tmp_path: Path):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "notes.txt").write_text("mine")
    for out, hint in [(tmp_path / "full", "another --out"), (titles, "--resume")]:
        ran = cli("finetune", bert, "--data", data / "train.jsonl", "--out", out)
        assert ran.code == 5 and f"{out}: already there" in ran.err and hint in ran.err
    assert [path.name for path in (tmp_path / "full").iterdir()] == ["notes.txt"]


def test_a_place_where_nothing_can_be_written(cli, bert: Path, data: Path, tmp_path: Path):
    (tmp_path / "file").write_text("in the way")
    ran = cli("finetune", bert, "--data", data / "train.jsonl", "--out", tmp_path / "file" / "run")
    assert ran.code == 5 and "cannot write in" in ran.err
    if os.getuid() == 0:
        return  # root may write anywhere
    (tmp_path / "locked").mkdir(mode=0o500)
    ran = cli("finetune", bert, "--data", data / "train.jsonl", "--out", tmp_path / "locked" / "run")
    assert ran.code == 5 and "cannot write in" in ran.err
