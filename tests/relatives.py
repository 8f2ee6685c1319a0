"""Small bodies that differ from BERT in what its relatives differ in."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from allmask.config import Config
from allmask.presets import bert_base

_CHANGES: dict[str, dict[str, Any]] = {
    "roberta": {"position_offset": 2, "segments": 1, "pad_token": 1},
    "electra": {"embedding_width": 16},
    "ernie": {"task_types": 3},
    "albert": {"embedding_width": 16, "shared_layers": True},
    "roformer": {"position_kind": "rotary"},
    "nezha": {"position_kind": "clipped", "clamp": 3},
}


def relatives(sizes: dict[str, Any], *names: str) -> dict[str, Config]:
    """All of them, or those named."""
    return {name: replace(bert_base(), family=name, **sizes, **_CHANGES[name]) for name in names or _CHANGES}
