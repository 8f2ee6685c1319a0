"""Convert settings of a `config.json` to fields of a Config and back."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from allmask.errors import CheckpointError

Table = Mapping[str, str | tuple[str, Any]]  # their name of a setting: the Config field, or (field, default)

# Their name of an activation: ours. gelu_fast and gelu_new are the same formula.
ACTIVATIONS = {
    "gelu": "gelu",
    "gelu_python": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
}


def fields_from(settings: Mapping[str, Any], table: Table) -> dict[str, Any]:
    """Convert settings to fields of a Config. Those without a default must be present."""
    missing = [theirs for theirs, ours in table.items() if isinstance(ours, str) and settings.get(theirs) is None]
    if missing:
        raise CheckpointError(f"no {', '.join(missing)}", "these settings define the shape of the model; add them")
    pairs = {theirs: (ours, None) if isinstance(ours, str) else ours for theirs, ours in table.items()}
    return {ours: settings.get(theirs, default) for theirs, (ours, default) in pairs.items()}


def field_names(table: Table) -> dict[str, str]:
    """Map their names to ours, without the defaults."""
    return {theirs: ours if isinstance(ours, str) else ours[0] for theirs, ours in table.items()}


def refuse(settings: Mapping[str, Any], allowed: Mapping[str, tuple[Any, ...]]) -> None:
    """Raise an error for settings that would change the result in a way that is not implemented."""
    for name, values in {**allowed, "quantization_config": (None,)}.items():
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


@contextmanager
def errors_in(path: Path, names: Mapping[str, str] | None = None) -> Iterator[None]:
    """Put the file in front of an error. The hint gives its own names of the Config fields in the message."""
    try:
        yield
    except CheckpointError as error:
        message = error.message.removeprefix("config: ")
        theirs = [f"{ours} is written {word}" for word, ours in (names or {}).items() if ours in message.split()]
        hint = f"here {', '.join(theirs)}; correct it or fetch the file again" if theirs else error.hint
        raise CheckpointError(f"{path}: {message}", hint) from error
