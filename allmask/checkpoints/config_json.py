"""Convert settings of a `config.json` to fields of a Config and back."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from allmask.errors import CheckpointError

# Their name of an activation: ours. gelu_fast and gelu_new are the same formula.
ACTIVATIONS = {
    "gelu": "gelu",
    "gelu_python": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
}


def required(settings: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    """Fields of a Config from settings that must be present; `names` maps their names to ours."""
    missing = [theirs for theirs in names if settings.get(theirs) is None]
    if missing:
        raise CheckpointError(f"no {', '.join(missing)}", "these settings define the shape of the model; add them")
    return {ours: settings[theirs] for theirs, ours in names.items()}


def optional(settings: Mapping[str, Any], names: Mapping[str, tuple[str, Any]]) -> dict[str, Any]:
    """Fields of a Config from settings that may be absent; `names` maps their names to our name and its default."""
    return {ours: settings.get(theirs, default) for theirs, (ours, default) in names.items()}


def all_names(sizes: Mapping[str, str], others: Mapping[str, tuple[str, Any]]) -> dict[str, str]:
    """Their names and ours, of required and optional settings."""
    return {**sizes, **{theirs: ours for theirs, (ours, _) in others.items()}}


def refuse(settings: Mapping[str, Any], allowed: Mapping[str, tuple[Any, ...]]) -> None:
    """Raise an error for settings that would change the result in a way that is not implemented."""
    for name, values in allowed.items():
        if name in settings and settings[name] not in values:
            known = " or ".join(json.dumps(value) for value in values)
            raise CheckpointError(f"{name} is {settings[name]!r}; only {known} is supported")


def activation(settings: Mapping[str, Any], name: str, default: str) -> str:
    theirs = settings.get(name, default)
    if not isinstance(theirs, str) or theirs not in ACTIVATIONS:
        raise CheckpointError(f"{name} is {theirs!r}; supported: {', '.join(ACTIVATIONS)}")
    return ACTIVATIONS[theirs]


def activation_name(ours: str) -> str:
    """Their name of an activation."""
    return "gelu_new" if ours == "gelu_tanh" else ours


def flag(settings: Mapping[str, Any], name: str, default: bool) -> bool:
    value = settings.get(name, default)
    if not isinstance(value, bool):
        raise CheckpointError(f"{name} is {value!r}; expected true or false")
    return value


def placed(error: CheckpointError, path: Path, names: Mapping[str, str]) -> CheckpointError:
    """The same error with the file in front; the hint gives the file's name for the Config field in the message."""
    message = error.message.removeprefix("config: ")
    theirs = [f"{ours} is written {word}" for word, ours in names.items() if ours in message.split()]
    hint = f"here {', '.join(theirs)}; correct it or fetch the file again" if theirs else error.hint
    return CheckpointError(f"{path}: {message}", hint)
