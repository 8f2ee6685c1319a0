"""The task a model was trained for, saved beside its weights as allmask.json."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from allmask.errors import CheckpointError, UsageError
from allmask.tasks.answer import Answer
from allmask.tasks.choose import Choose
from allmask.tasks.classify import Classify
from allmask.tasks.continuation import Continuation
from allmask.tasks.tag import Tag
from allmask.tasks.title import Title
from allmask.tasks.translate import Translate

NAME = "allmask.json"
TASKS = {
    "title": Title, "translate": Translate, "continue": Continuation, "classify": Classify, "choose": Choose,
    "tag": Tag, "answer": Answer,
}  # fmt: skip
Task = Title | Translate | Continuation | Classify | Choose | Tag | Answer


def save_task(task: Task, folder: Path) -> None:
    text = json.dumps(task.to_dict(), indent=2, ensure_ascii=False) + "\n"
    (folder / NAME).write_text(text, encoding="utf-8")


def load_task(folder: Path) -> Task | None:
    """The task of a model folder, None if nothing there tells of one."""
    file = folder / NAME
    if not file.is_file():
        return None
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{file}: cannot be read: {error}", "copy the folder again") from None
    return _task(file, found)


def _task(file: Path, found: Any) -> Task:
    kind = found.get("task") if isinstance(found, dict) else None
    if kind not in TASKS:
        raise CheckpointError(
            f"{file}: the task is {kind!r}; known: {', '.join(TASKS)}", "was it made by a newer allmask?"
        )
    try:
        return TASKS[kind](**{name: value for name, value in found.items() if name != "task"})
    except (TypeError, UsageError) as error:
        raise CheckpointError(f"{file}: {error}", "was it made by another version of allmask?") from None
