"""ERNIE (Baidu; arXiv 1904.09223, 1907.12412, 2107.02137): a BERT; versions 2.0 and 3.0 have a table of tasks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from allmask.checkpoints.config_json import flag
from allmask.checkpoints.families.bert import BERT, NAMES, TABLE, relative_from, relative_to, task_layouts
from allmask.config import Config

TASK_TYPES = ("embeddings.task_type_embeddings.weight", "body.embedding.segments.tasks.weight")


def config_from(settings: Mapping[str, Any]) -> Config:
    """Without a task, transformers takes the first one; so do we."""
    tasks = settings.get("task_type_vocab_size", 3) if flag(settings, "use_task_id", False) else 0
    return relative_from(settings, "ernie", task_types=tasks)


def config_to(config: Config, heads: frozenset[str]) -> dict[str, Any]:
    tasks = {"use_task_id": config.task_types > 0, "task_type_vocab_size": config.task_types or 3}
    return relative_to(config, heads, "Ernie", "ErnieForCausalLM") | tasks


ERNIE = replace(
    BERT,
    name="ernie",
    table=(*TABLE, TASK_TYPES),
    config_from=config_from,
    config_to=config_to,
    settings=NAMES | {"task_type_vocab_size": "task_types"},
    prefix="ernie.",
    tasks=task_layouts("Ernie"),
)
