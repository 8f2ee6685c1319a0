"""Options as flat names and values, as they are in config.yaml and on the command line: read, checked, compared."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, get_args, get_origin

from allmask.errors import UsageError
from allmask.files import closest

Types = Mapping[str, Any]  # the type of each name


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


def as_yaml(values: Mapping[str, Any]) -> str:
    import yaml

    return yaml.safe_dump(dict(values), sort_keys=False, allow_unicode=True)


def plain(value: Any) -> Any:
    """A value as YAML gives it back: tuples are lists."""
    return list(value) if isinstance(value, tuple) else value


def absolute(value: Any) -> Any:
    """The absolute path of what exists as a file or folder, or of several; a bundled or hub name stays as it is."""
    if isinstance(value, list | tuple):
        return [absolute(name) for name in value]
    return os.path.abspath(Path(value).expanduser()) if value and Path(value).expanduser().exists() else value


def differences(
    saved: Mapping[str, Any], given: Mapping[str, Any], types: Types, paths: Collection[str], fitted: Collection[str]
) -> list[str]:
    """List in words where given values contradict those of a run. Those in `fitted` may have been lowered there."""
    found = []
    for name, value in given.items():
        before, now = saved.get(name), typed(name, value, types, f"--{name.replace('_', '-')}")
        now = absolute(now) if name in paths else plain(now)
        if now != before and not (name in fitted and before is not None and now > before):
            found.append(f"{name} is {before}, not {now}")
    return found


def typed(name: Any, value: Any, types: Types, where: Path | str) -> Any:
    """Convert a value to the type of its option. YAML reads 3e-4 as text; an int may stand for a float."""
    if name not in types:
        close = closest(str(name), types)
        hint = f"did you mean {close}?" if close else f"known: {', '.join(types)}"
        raise UsageError(f"{where}: unknown setting {name}", hint)
    if get_origin(types[name]) is tuple:
        return _several(name, value, get_args(types[name]), where)
    kinds = get_args(types[name]) or (types[name],)
    if value is None and type(None) in kinds:
        return None
    converted = _convert(kinds[0], value)
    if converted is None:
        raise UsageError(f"{where}: {name} is {value!r}; expected {_WORDS[kinds[0]]}")
    return converted


_WORDS = {bool: "true or false", int: "a whole number", float: "a number", str: "text"}
_PLURALS = {float: "numbers", str: "names"}


def _convert(kind: type, value: Any) -> Any:
    """The value as one of this kind; None if it is not and cannot stand for one."""
    if isinstance(value, bool) != (kind is bool):
        return None
    if kind is float and isinstance(value, str | int):
        try:
            return float(value)
        except ValueError:
            return None
    return value if isinstance(value, kind) else None


def _several(name: str, value: Any, kinds: tuple[Any, ...], where: Path | str) -> tuple[Any, ...]:
    """A pair of numbers, or any number of values of one kind; a single value stands for a list of one."""
    pair = kinds[-1] is not Ellipsis
    listed = value if isinstance(value, list | tuple) else [] if pair else [value]
    items = [_convert(kinds[0], item) for item in listed]
    if None in items or (pair and len(items) != 2):
        expected = "two numbers, such as [0.9, 0.999]" if pair else f"a list of {_PLURALS[kinds[0]]}"
        raise UsageError(f"{where}: {name} is {value!r}; expected {expected}")
    return tuple(items)
