"""Our own layout, for models no other library has: the fields of Config in `config.json`, tensors under our names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, fields
from typing import Any

from allmask.checkpoints.names import HEADS
from allmask.checkpoints.settings import required
from allmask.config import Config
from allmask.errors import CheckpointError

MODEL_TYPE = "allmask"
_NEEDED = ("family", "vocabulary", "width", "layers", "heads", "inner", "max_positions")
_AROUND = frozenset({"model_type", "heads_present", "dtype"})


def config_to(config: Config, heads: frozenset[str]) -> dict[str, Any]:
    return {"model_type": MODEL_TYPE, "heads_present": sorted(heads), **asdict(config)}


def config_from(settings: Mapping[str, Any]) -> tuple[Config, frozenset[str]]:
    known = {field.name for field in fields(Config)}
    given = {name: value for name, value in settings.items() if name not in _AROUND}
    unknown = sorted(given.keys() - known)
    if unknown:
        raise CheckpointError(f"unknown settings: {', '.join(unknown)}", "written by a newer allmask? upgrade this one")
    required(given, {name: name for name in _NEEDED})
    heads = settings.get("heads_present")
    if not isinstance(heads, list) or not all(isinstance(head, str) and head in HEADS for head in heads):
        raise CheckpointError(f"heads_present is {heads!r}; expected a list of {', '.join(HEADS)}")
    return Config(**given), frozenset(heads)
