"""Completion by the shell of what the commands know by name: models, masks, tasks, objectives, presets.

Imported only when a shell asks (`_ALLMASK_COMPLETE`); nothing here imports torch.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable, Iterable
from typing import Any

from allmask.checkpoints.sources import BUNDLED
from allmask.presets import PRESETS
from allmask.registry import MASKS, OBJECTIVES, TASKS

VARIABLE = "_ALLMASK_COMPLETE"


def words_typed() -> list[str]:
    """The words of the command line that a shell wants to complete."""
    line = os.environ.get("COMP_WORDS") or os.environ.get("_TYPER_COMPLETE_ARGS", "")
    try:
        return shlex.split(line)[1:]
    except ValueError:  # a quotation mark that is still open
        return line.split()[1:]


def one_of(names: Iterable[str]) -> Callable[[str], list[str]]:
    return lambda begun: [name for name in names if name.startswith(begun)]


def objectives(begun: str) -> list[str]:
    """The last name of a list such as mlm:0.5,causal:0.5."""
    before, comma, last = begun.rpartition(",")
    return [before + comma + name for name in OBJECTIVES if name.startswith(last)]


NAMES: dict[str, Callable[[str], list[str]]] = {  # by the name of a parameter; the shell itself adds files and folders
    "model": one_of(BUNDLED),
    "mask": one_of(MASKS),
    "kind": one_of(MASKS),
    "each": one_of(MASKS),
    "task": one_of(TASKS),
    "objective": objectives,
    "preset": one_of(PRESETS),
}


def add_names(command: Any) -> None:
    """Let the parameters of a command, or of its subcommands, be completed by name; choices complete themselves."""
    for inner in getattr(command, "commands", {}).values():
        add_names(inner)
    for param in command.params:
        listed = param.metavar.split("|") if param.metavar and "|" in param.metavar else None  # linear|cosine
        names = one_of(listed) if listed else NAMES.get(param.name)
        if names is not None and param.type_descriptor.choices is None:
            param._custom_shell_complete = _completing(names)


def _completing(names: Callable[[str], list[str]]) -> Any:
    return lambda context, param, begun: names(begun)
