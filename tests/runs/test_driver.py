"""One driver for all jobs, which treats all of them alike. What a run prints and leaves grows with its length."""

from __future__ import annotations

import ast
import logging
import re
from pathlib import Path

import pytest

import allmask
from allmask.options import FinetuneOptions, GanOptions, ImageOptions, PretrainOptions
from allmask.registry import JOBS, TASKS
from allmask.runs.driver import start
from allmask.runs.plan import Job, Plan
from allmask.training import checkpoint
from tests import tiny

RUNS = Path(allmask.__file__).parent / "runs"


def test_there_is_one_plan_and_every_job_is_one_of_options():
    options = {"finetune": FinetuneOptions, "pretrain": PretrainOptions, "image": ImageOptions, "gan": GanOptions}
    assert options.keys() == JOBS.keys()
    for name, kind in options.items():
        assert issubclass(JOBS[name], Job) and issubclass(JOBS[name], kind)
    classes = [node.name for file in RUNS.glob("*.py") for node in ast.walk(ast.parse(file.read_text("utf-8")))
               if isinstance(node, ast.ClassDef)]  # fmt: skip
    assert [name for name in classes if name.endswith("Plan")] == ["Plan"]


@pytest.mark.parametrize("file", sorted(RUNS.glob("*.py")), ids=lambda file: file.stem)
def test_no_task_is_known_by_its_name_or_type(file: Path):
    kinds = {TASKS[name].__name__ for name in TASKS.builtin} | {JOBS[name].__name__ for name in JOBS.builtin}
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Compare):
            constants = {part.value for part in ast.walk(node) if isinstance(part, ast.Constant)}
            assert not constants & {*TASKS.builtin, "gan"}, f"line {node.lineno}"
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "isinstance":
            named = {part.id for part in ast.walk(node.args[1]) if isinstance(part, ast.Name)}
            assert not named & kinds, f"line {node.lineno}"


@pytest.mark.parametrize(("steps", "evaluations", "checkpoints"), [(13, 1, 1), (30, 3, 2)])
def test_a_short_run_prints_and_leaves_little(
    tmp_path: Path, capsys, caplog, steps: int, evaluations: int, checkpoints: int
):
    """Once 30 steps had ten evaluations and a hundred lines, and 13 steps of a model of 91 MB left 956 MB."""
    files = {"data": tiny.english(40), "eval": tiny.english(6, seed=1)}
    values = {name: str(tiny.write_jsonl(tmp_path / f"{name}.jsonl", rows)) for name, rows in files.items()}
    values |= {"task": "title", "model": str(tiny.bert(tmp_path / "bert")), "max_target": 8}
    out = tmp_path / "run"
    with caplog.at_level(logging.INFO, "allmask"):
        result = start(Plan.from_dict({**values, "steps": steps, "batch_tokens": 64}), out)
    lines = tiny.read_jsonl(out / "metrics.jsonl")
    assert sum("eval_loss" in line for line in lines) == evaluations
    assert len(capsys.readouterr().err.splitlines()) + len(caplog.messages) <= 24
    kept = [message for message in caplog.messages if message.startswith("kept:")]
    assert len(kept) == 1 and re.match(rf"kept: step {result['best_step']} of {steps}, because .", kept[0])
    assert kept[0].endswith(result["kept_because"])
    assert not (out / "start").exists()
    assert len(checkpoint.checkpoints(out)) == checkpoints and not list(out.rglob("optimizer.safetensors"))
    weights = (out / "final" / "model.safetensors").stat().st_size
    written = sum(file.stat().st_size for file in out.rglob("*.safetensors"))
    assert written <= (1 + checkpoints) * weights * 1.1
