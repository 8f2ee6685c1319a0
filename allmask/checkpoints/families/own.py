"""allmask's own layout, for models that no other library has: the fields of Config, and tensors under our names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, fields
from typing import Any

from allmask.checkpoints.config_json import fields_from
from allmask.checkpoints.labels import own_labels_from
from allmask.config import Config
from allmask.errors import CheckpointError
from allmask.files import listed
from allmask.nn.build import HEADS
from allmask.nn.heads import Labels

MODEL_TYPE = "allmask"
_NEEDED = ("family", "vocab_size", "width", "layers", "heads", "ffn_width", "max_positions")
_NOT_CONFIG = frozenset({"model_type", "heads_present", "labels", "dtype"})


def config_to(config: Config, heads: frozenset[str], labels: Labels | None = None) -> dict[str, Any]:
    named = {} if labels is None else {"labels": asdict(labels)}
    return {"model_type": MODEL_TYPE, "heads_present": sorted(heads), **named, **asdict(config)}


def config_from(settings: Mapping[str, Any]) -> tuple[Config, frozenset[str], Labels | None]:
    known = {field.name for field in fields(Config)}
    given = {name: value for name, value in settings.items() if name not in _NOT_CONFIG}
    unknown = sorted(given.keys() - known)
    if unknown:
        raise CheckpointError(f"unknown settings: {listed(unknown)}", "written by a newer allmask? upgrade this one")
    fields_from(given, {name: name for name in _NEEDED})  # refuses settings without one of these
    heads = settings.get("heads_present")
    if not isinstance(heads, list) or not all(isinstance(head, str) and head in HEADS for head in heads):
        raise CheckpointError(f"heads_present is {heads!r}; expected a list of {', '.join(HEADS)}")
    if ("task" in heads) != ("labels" in settings):
        raise CheckpointError("a task head needs labels, and labels need a task head", "fetch the file again")
    labels = own_labels_from(settings["labels"]) if "labels" in settings else None
    return Config(**given), frozenset(heads), labels
