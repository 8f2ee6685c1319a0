"""`allmask demo`: a whole run with --fast, a text of the user's, and what is said when it cannot be done."""

from __future__ import annotations

import contextlib
import importlib.metadata
import io
import json
import logging
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from allmask.checkpoints import default_model
from allmask.cli import demo as command
from allmask.cli.main import main
from allmask.demo import learning
from allmask.demo import run as demo
from allmask.tasks.task import load_task
from tests import tiny

ENGLISH = """# Notes

The program reads the files of a folder and prints the names of all that have changed since yesterday.

It was written in a week and has been used by three people ever since, none of whom has read its code.

A folder that cannot be read is skipped, and its name is printed at the end, together with the reason.
"""
CHINESE = "北京欢迎你，我们想吃白切鸡。\n\n他们在长城上看日出，然后回家喝茶。\n"


class Fast(NamedTuple):
    result: dict[str, Any]
    story: str
    out: Path


@pytest.fixture(scope="module", autouse=True)
def writer(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A tiny model instead of the shipped weights, which tests/demo/test_masks.py looks at."""
    folder = str(tiny.writer(tmp_path_factory.mktemp("models") / "writer"))
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(demo, "default_model", lambda _: folder)
        yield folder


@pytest.fixture(scope="module")
def fast(writer: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fast]:
    """One run for all tests."""
    out = tmp_path_factory.mktemp("demo") / "run"
    logger = logging.getLogger("allmask")
    before = logger.handlers, logger.level, logger.propagate
    stdout, stderr = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(stdout), contextlib.redirect_stderr(stderr):
        code = main(["demo", "--fast", "--out", str(out), "--json"])
    logger.handlers, logger.level, logger.propagate = before
    assert code == 0, stderr.getvalue()
    yield Fast(json.loads(stdout.getvalue()), stderr.getvalue(), out)


def test_the_result(fast: Fast):
    assert fast.result == json.loads((fast.out / "result.json").read_text())
    assert fast.result["steps"] == demo.FAST.steps
    assert list(fast.result["scores"]) == [learning.LEAD, learning.BEFORE, learning.MODEL]
    assert 5 < fast.result["scores"][learning.LEAD]["rouge_l"] < 40
    masks = fast.result["masks"]
    assert [view["name"] for view in masks] == ["fill", "continue", "title", "compare"]
    assert all(view["leaks"] == view["blind"] == 0 < view["visible"] for view in masks)


def test_the_story(fast: Fast):
    places = [fast.story.index(f"\n{number}. ") for number in range(1, 4)]
    assert places == sorted(places)
    assert fast.story.count("proven on these") == 4 and "NOT PROVEN" not in fast.story
    assert [len(re.findall(rf"^  {name}  ", fast.story, re.M)) for name in ("people", "before", "after")] == [3] * 3
    assert learning.verdict(fast.result["scores"]) in fast.story
    assert "expect nonsense" in fast.story and fast.result["ended_because"] in fast.story
    lines = (
        line for line in fast.story.splitlines() if str(fast.out.parent.parent) not in line
    )  # long temporary paths
    assert max(map(len, lines)) <= 120


def test_the_files_of_a_demo(fast: Fast):
    names = {"data", "demo.png", "final", "metrics.jsonl", "result.json", "texts.txt"}
    assert {path.name for path in fast.out.iterdir()} == names
    assert [path.name for path in fast.out.parent.iterdir()] == ["run"]
    lines = [json.loads(line) for line in (fast.out / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if "eval_loss" in line] == [0, demo.FAST.steps]


def test_the_data_can_be_read_again_and_shares_nothing(fast: Fast):
    read = {name: demo.TASK.read(fast.out / "data" / f"{name}.jsonl") for name in ("train", "dev", "test")}
    assert {name: len(records) for name, records in read.items()} == fast.result["pairs"]
    for field in ("source", "target"):
        texts = [record.fields[field].lower() for records in read.values() for record in records]
        assert len(set(texts)) == len(texts)


def test_the_saved_model_has_the_scores_that_were_printed(cli, fast: Fast):
    assert load_task(fast.out / "final") == demo.TASK
    (words,) = (words for words in command.commands_for_demo(fast.result["final"], fast.out) if "evaluate" in words)
    ran = cli(*words[len(command.program()) :], "--json", "--beams", demo.FAST.beams)
    found = json.loads(ran.out)["scores"]["model"]
    for name in learning.LABELS:
        assert found[name] == pytest.approx(fast.result["scores"][learning.MODEL][name], abs=1e-6)


# ---- a text of one's own ---------------------------------------------------------------------------------------------


def test_a_text_of_ones_own(cli, fast: Fast, writer: str, tmp_path: Path):
    path = tmp_path / "notes.md"
    path.write_text(ENGLISH)
    ran = cli("demo", "--text", path, "--out", fast.out, "--json")
    assert ran.code == 0, ran.err
    result = json.loads(ran.out)
    assert result["model"] == writer and result["text"] in " ".join(ENGLISH.split())
    assert [view["leaks"] for view in result["masks"]] == [0] * 4
    assert len(result["masks"][3]["result"]) == 2  # all other paragraphs
    assert [len(made) for made in (result["paragraphs"], *result["titles"].values())] == [3] * 3
    assert list(result["titles"]) == [writer, demo.LEARNT]
    for words in command.commands_for_text(result):
        words = words[len(command.program()) :]
        ran = cli(*words)
        assert ran.code == 0 and ran.out.strip(), (words, ran.err)


def test_a_chinese_text(cli, tmp_path: Path):
    path = tmp_path / "a.txt"
    path.write_text(CHINESE, encoding="utf-8")
    ran = cli("demo", "--text", path, "--out", tmp_path / "none")
    assert ran.code == 0 and ran.out.count("proven on these") == 4
    assert "has learnt to write titles of abstracts and of software. For other texts" in ran.out


# ---- what can go wrong -----------------------------------------------------------------------------------------------


def test_without_the_package_of_the_model(cli, monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    def missing(name: str):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(demo, "default_model", default_model)
    monkeypatch.setattr(importlib.metadata, "files", missing)
    monkeypatch.chdir(tmp_path)
    ran = cli("demo", "--fast")
    assert ran.code == 4 and "pip install ./weights/allmask-en" in ran.err
    assert list(tmp_path.iterdir()) == []


def test_a_folder_of_someone_else(cli, tmp_path: Path):
    (tmp_path / "thesis.tex").write_text("years of work")
    ran = cli("demo", "--fast", "--out", tmp_path)
    assert ran.code == 5 and "not a finished demo" in ran.err and "--out" in ran.err


def test_interrupted(cli, monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    def stop(*_: object):
        raise KeyboardInterrupt

    monkeypatch.setattr(demo.Demo, "run", stop)
    ran = cli("demo", "--out", tmp_path / "run")
    assert ran.code == 130 and "starts again from the beginning" in ran.err


# ---- what to go on with ----------------------------------------------------------------------------------------------


def test_the_next_commands_are_printed(cli, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("allmask.demo.run.run_demo", lambda *_, **__: {"final": "over there/final"})
    ran = cli("demo", "--out", "over there")
    printed = [shlex.split(line) for line in ran.out.splitlines()[2:]]
    assert ran.code == 0 and printed == command.commands_for_demo("over there/final", Path("over there"))
    assert printed[1][:3] == ["allmask", "generate", "over there/final"]


def test_the_commands_to_go_on_with_run_as_they_are_printed(cli, fast: Fast):
    for words in command.commands_for_demo(fast.result["final"], fast.out):
        ran = cli(*words[len(command.program()) :])
        assert ran.code == 0, (words, ran.err)
