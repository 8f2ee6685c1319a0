"""A plan: all that a fine-tuning run is told, flat as it stands in config.yaml and on the command line."""

from __future__ import annotations

import os
from dataclasses import dataclass, field, fields
from difflib import get_close_matches
from pathlib import Path
from typing import Any, get_args, get_type_hints

from allmask.errors import UsageError
from allmask.tasks.title import Title
from allmask.training.settings import Settings, as_plain

TASKS = ("title",)


@dataclass(frozen=True)
class Plan:
    """Saved, `model` and files are named by absolute paths, so that a run can be resumed from anywhere."""

    model: str
    data: str
    task: Title = field(default_factory=Title)
    settings: Settings = field(default_factory=Settings)
    eval: str | None = None
    prune: bool = True
    on_bad_record: str = "stop"

    def __post_init__(self):
        if self.on_bad_record not in ("stop", "skip"):
            raise UsageError(f"on_bad_record is {self.on_bad_record!r}; expected stop or skip")

    def to_dict(self) -> dict[str, Any]:
        named = {name: getattr(self, name) for name in _OWN}
        paths = {name: _absolute(named[name]) for name in _PATHS}
        return {**named, **paths, **self.task.to_dict(), **as_plain(self.settings)}

    @classmethod
    def from_dict(cls, values: dict[str, Any], where: Path | str = "--config") -> Plan:
        """From flat values; those left out have their defaults, and a name that is none of ours is an error."""
        values = {name: _typed(name, value, where) for name, value in values.items()}
        if values.pop("task", "title") not in TASKS:
            raise UsageError(f"{where}: unknown task", f"known: {', '.join(TASKS)}")
        for name, how in (("model", "as the first argument"), ("data", "with --data")):
            if values.get(name) is None:
                raise UsageError(f"no {name} was named", f"name it {how}")
        task = Title(**_part(values, Title))
        return cls(task=task, settings=Settings(**_part(values, Settings)), **_part(values, cls, _OWN))


_PATHS = ("model", "data", "eval")
_OWN = ("model", "data", "eval", "prune", "on_bad_record")
_TYPES = {
    **{name: kind for name, kind in get_type_hints(Plan).items() if name in _OWN},
    **get_type_hints(Title),
    **get_type_hints(Settings),
    "task": str,
}


def _absolute(name: str | None) -> str | None:
    """What is a file or folder here, from the root; a bundled or hub name as it is."""
    return os.path.abspath(Path(name).expanduser()) if name and Path(name).expanduser().exists() else name


def _part(values: dict[str, Any], kind: type, names: tuple[str, ...] | None = None) -> dict[str, Any]:
    names = names or tuple(field.name for field in fields(kind))
    return {name: values[name] for name in names if name in values}


def differences(saved: Plan, given: dict[str, Any]) -> list[str]:
    """Where values given anew contradict those of a run, in words."""
    told = []
    for name, value in given.items():
        before, now = saved.to_dict()[name], _typed(name, value, f"--{name.replace('_', '-')}")
        now = _absolute(now) if name in _PATHS else list(now) if name == "betas" else now
        if now != before and not (name == "max_source" and now > before):  # it was fitted to the model's positions
            told.append(f"{name} is {before}, not {now}")
    return told


# ---- files ---------------------------------------------------------------------------------------------------


def read_yaml(path: Path) -> dict[str, Any]:
    import yaml

    try:
        found = yaml.safe_load(path.read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise UsageError(f"{path}: cannot be read: {error.strerror}", "check the path") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UsageError(
            f"{path}: not YAML: {' '.join(str(error).split())}", "write lines such as lr: 0.0003"
        ) from None
    if not isinstance(found, dict):
        raise UsageError(f"{path}: expected names and values", "write lines such as lr: 0.0003")
    return found


def _typed(name: Any, value: Any, where: Path | str) -> Any:
    """The value as its field has it. YAML reads 3e-4 as text; whole numbers will do for others."""
    if name not in _TYPES:
        close = get_close_matches(str(name), _TYPES, n=1)
        hint = f"did you mean {close[0]}?" if close else f"known: {', '.join(_TYPES)}"
        raise UsageError(f"{where}: unknown setting {name}", hint)
    kinds = get_args(_TYPES[name]) or (_TYPES[name],)
    if name == "betas":
        return _pair(value, where)
    if value is None and type(None) in kinds:
        return None
    kind = kinds[0]
    converted = _convert(kind, value)
    if converted is None:
        raise UsageError(f"{where}: {name} is {value!r}; expected {_WORDS[kind]}")
    return converted


_WORDS = {bool: "true or false", int: "a whole number", float: "a number", str: "text"}


def _convert(kind: type, value: Any) -> Any:
    """None where the value is not of this kind, and cannot stand for one."""
    if isinstance(value, bool) != (kind is bool):
        return None
    if kind is float and isinstance(value, str | int):
        try:
            return float(value)
        except ValueError:
            return None
    return value if isinstance(value, kind) else None


def _pair(value: Any, where: Path | str) -> tuple[float, float]:
    numbers = [_convert(float, item) for item in value] if isinstance(value, list | tuple) else []
    if len(numbers) != 2 or None in numbers:
        raise UsageError(f"{where}: betas is {value!r}; expected two numbers, such as [0.9, 0.999]")
    return numbers[0], numbers[1]
