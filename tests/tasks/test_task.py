"""The task protocol: a task of another package is found, used and scored like the built-in ones."""

from __future__ import annotations

import ast
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest

import allmask
from allmask.data import Record, read_records, text
from allmask.errors import UsageError
from allmask.model import Model
from allmask.registry import TASKS, USES
from allmask.tasks.common.evaluation import Evaluation, Table, label_table, score_table
from allmask.tasks.task import ModelFolder, Predictor, Task, save_task
from tests import tiny


@dataclass(frozen=True)
class Count(Task):
    """How many tokens a text has."""

    name: ClassVar[str] = "count"
    extra: int = 0

    def predictor(self, model: Model, precision: str = "auto") -> Counting:
        return Counting(model, self)


@dataclass
class Counting(Predictor):
    model: Model
    task: Count
    does: ClassVar[str] = "counts"
    done: ClassVar[str] = "counted"

    def __call__(self, inputs: str) -> int:
        assert self.model.tokenizer is not None
        return len(self.model.tokenizer.encode(inputs, special=False).ids) + self.task.extra

    def read(self, path, on_bad_record="stop", skipped=None, keep=(), targets=False, limit=None) -> Iterator[Record]:
        fields = {"text": text, **({"count": float} if targets else {})}
        return read_records(path, fields, on_bad_record, skipped)

    def predict(self, records: Sequence[Record], **options: Any) -> Iterator[dict[str, Any]]:
        return ({"prediction": self(record.fields["text"])} for record in records)

    def evaluate(self, records: Iterable[Record], show: int = 0, quiet: bool = True, **options: Any) -> Evaluation:
        rows = list(records)
        right = [self(row.fields["text"]) == row.fields["count"] for row in rows]
        scores = {"exact": sum(right) / len(right)}
        return Evaluation(len(rows), {"scores": scores}, [score_table(scores)], notes=["tokens"])


@pytest.fixture
def counter(tmp_path: Path, monkeypatch) -> Path:
    monkeypatch.setattr(TASKS, "registered", {})
    TASKS.register("count", Count)
    folder = tiny.bert(tmp_path / "model")
    save_task(Count(extra=1), folder)
    return folder


def test_a_registered_task_is_used_like_the_others(cli, counter: Path, tmp_path: Path):
    assert allmask.pipeline("count", counter)("red cat") == 3
    file = tiny.write_jsonl(tmp_path / "in.jsonl", [{"text": "red cat", "count": 3}, {"text": "red", "count": 1}])
    ran = cli("predict", counter, file, "-o", "-", "-q")
    assert ran.code == 0 and [json.loads(line)["prediction"] for line in ran.out.splitlines()] == [3, 2]
    found = json.loads(cli("evaluate", counter, file, "--json").out)
    assert found["records"] == 2 and found["scores"] == {"exact": 0.5} and "cut" not in found
    assert cli("evaluate", counter, file).out == "| 2 records | exact |\n|---|---|\n| model | 0.500 |\n\ntokens\n"
    assert "--beams: this model counts" in cli("predict", counter, file, "-o", "-", "--beams", 2).err
    assert "this model counts; a line of stdin is a text" in cli("predict", counter, "-", "-o", "-").err


def test_defaults_of_the_protocol(counter: Path):
    opened = ModelFolder.open(counter)
    task = opened.task()
    assert task == Count(extra=1) and Count.default_for(opened) is None and task.prunes_from is None
    assert task.fitted(opened.model) is task and task.suggested_settings(opened.model, []) == {}
    assert opened.model is opened.model and task.load(opened) is opened.model
    with pytest.raises(UsageError, match="count: this task is not trained from records"):
        task.read_data(counter, None, "stop", None)


def test_every_task_and_use_can_be_imported():
    for name, kind in TASKS.items():
        assert kind.name == name and callable(kind.predictor) and callable(kind.default_for)
    assert all(callable(use) for use in USES.values()) and not set(TASKS) & set(USES)


def test_commands_and_runs_know_no_task_by_name():
    """They ask the registry: no comparison with the name of a task, no isinstance of a task or its predictor."""
    package = Path(allmask.__file__).parent
    names = {*TASKS, *USES}
    classes = {kind.__name__ for kind in TASKS.values()} | {"Task", "Predictor", "HeadTask", "WritingTask"}
    for file in [*(package / "cli").glob("*.py"), package / "pipelines.py", *(package / "runs").glob("*.py")]:
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            where = f"{file}:{getattr(node, 'lineno', 0)}"
            if isinstance(node, ast.Compare | ast.Match):
                texts = {part.value for part in ast.walk(node) if isinstance(part, ast.Constant)}
                assert not texts & names, where
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("isinstance", "issubclass"):
                mentioned = {getattr(part, "id", getattr(part, "attr", "")) for part in ast.walk(node.args[1])}
                assert not mentioned & classes, where


def test_one_file_a_task():
    folder = Path(allmask.__file__).parent / "tasks"
    files = {path.stem for path in folder.glob("*.py")}
    own = {
        entry.partition(":")[0]
        for entry in (TASKS.builtin | USES.builtin).values()
        if entry.startswith("allmask.tasks.")
    }
    modules = {module.removeprefix("allmask.tasks.") for module in own}
    assert modules <= files and len(files) <= 18 and not any("." in module for module in modules)
    for module in modules:  # a task imports no other one, but "generate" writes with either of two
        text = (folder / f"{module}.py").read_text(encoding="utf-8")
        others = {other for other in modules - {module} if f"from allmask.tasks.{other} import" in text}
        assert others <= ({"seq2seq"} if module == "continuation" else set()), module


# ---- what evaluate prints ------------------------------------------------------------------------------------------


def test_tables_in_markdown():
    rows = {name: {"texts": 1000, "precision": 0.5, "recall": 1.0, "f1": 2 / 3} for name in ("a", "b")}
    tables = [Table(["", "x", "y"], [["model", "1.0", ""]]), label_table(rows, [[900, 100], [0, 1000]])]
    made = Evaluation(1, {}, tables, ["a note"], [["an error", "  its text"]], cut=2)
    assert made.markdown() == (
        "| 1 record | x | y |\n|---|---|---|\n| model | 1.0 | |\n\n"
        "| true label | texts | precision | recall | F1 | predicted a | predicted b |\n|---|---|---|---|---|---|---|\n"
        "| a | 1,000 | 0.500 | 1.000 | 0.667 | 900 | 100 |\n| b | 1,000 | 0.500 | 1.000 | 0.667 | 0 | 1,000 |\n\n"
        "a note\n\n2 texts cut\n\nan error\n  its text"
    )


def test_a_table_of_many_labels_is_not_too_wide():
    rows = {str(name): {"texts": 1, "precision": 0.0, "recall": 0.0, "f1": 0.0} for name in range(13)}
    assert label_table(rows, [[0] * 13] * 13).header == ["true label", "texts", "precision", "recall", "F1"]
