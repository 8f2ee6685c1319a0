"""What may stand in a field of a record: small functions that return the value, or say what is wrong with it."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from allmask.errors import UsageError
from allmask.files import closest

Checker = Callable[[Any], Any]
_BLANK = "blank text"  # the reason; of a field it names the field instead


class Bad(Exception):
    """A record that cannot be used: the reason it is counted under, what is wrong in words, and what to do.

    `line` is given where that is not the line on which the record begins.
    """

    def __init__(self, reason: str, what: str, hint: str = "fix the line", line: int | None = None):
        super().__init__(what)
        self.reason, self.what, self.hint, self.line = reason, what, hint, line


class Cell(str):
    """Text from a format without types (csv): it may stand for a number or, written as JSON, for a list."""


def text(value: Any) -> str:
    """Text that is not blank."""
    if not isinstance(value, str):
        raise wrong_type(value, "text")
    if not value.strip():
        raise Bad(_BLANK, "is blank" if value else "is empty")
    if "\0" in value:
        raise Bad("NUL byte", f"has a NUL byte at character {value.index(chr(0)) + 1}")
    try:
        value.encode()
    except UnicodeEncodeError as error:  # JSON can spell half of a surrogate pair, which no tokenizer accepts
        half = f"\\u{ord(value[error.start]):04x}"
        raise Bad("broken character", f"has half a surrogate pair, {half}, at character {error.start + 1}") from None
    return str(value)


def number(value: Any) -> float:
    """A finite number."""
    if isinstance(value, bool) or not isinstance(value, int | float | Cell):
        raise wrong_type(value, "a number")
    try:
        found = float(value)
    except (ValueError, OverflowError):
        raise wrong_type(value, "a number") from None
    if not math.isfinite(found):
        raise Bad("wrong type", f"is {found}; expected a finite number")
    return found


def label(value: Any) -> str | int | float:
    """A class: its name, or a number."""
    if isinstance(value, str):
        return text(value)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise wrong_type(value, "text or a number")
    return value if isinstance(value, int) else number(value)


def list_of(check: Checker) -> Checker:
    """A list, not empty, in which every item passes."""

    def check_list(value: Any) -> list[Any]:
        items = _parse(value) if isinstance(value, Cell) else value
        if not isinstance(items, list):
            raise wrong_type(value, "a list")
        if not items:
            raise Bad("empty list", "is an empty list")
        return [_check_item(check, place, item) for place, item in enumerate(items, 1)]

    return check_list


@dataclass(frozen=True)
class Maybe:
    """A field that may be absent, null or blank: then it is None. `Maybe(text)`."""

    check: Checker

    def __call__(self, value: Any) -> Any:
        absent = value is None or (isinstance(value, str) and not value.strip())
        return None if absent else self.check(value)


_OF_TYPE: dict[object, Checker] = {str: text, float: number}


def as_checkers(fields: Mapping[str, Checker | type]) -> dict[str, Checker]:
    """`str` stands for `text` and `float` for `number`; anything else must be a checker already."""
    if not fields:
        raise UsageError("read_records: name at least one field")
    checkers = {name: _OF_TYPE.get(check, check) for name, check in fields.items()}
    for name, check in checkers.items():
        if isinstance(check, type) or not callable(check):
            raise UsageError(
                f'read_records: "{name}" is to be {check!r}; expected str, float or a checker such as text'
            )
    return checkers


def required(checkers: Mapping[str, Checker]) -> list[str]:
    return [name for name, check in checkers.items() if not isinstance(check, Maybe)]


def check_row(checkers: Mapping[str, Checker], row: Mapping[str, Any]) -> dict[str, Any]:
    """The asked fields of a row, each as its checker returns it."""
    for name in required(checkers):
        if name not in row:
            raise Bad("missing field", *missing(name, list(row), "the line"))
    return {name: _check_field(check, name, row.get(name)) for name, check in checkers.items()}


def missing(name: str, there: list[str], where: str) -> tuple[str, str]:
    """What to say and what to do when a field is not there, perhaps because its name is misspelt."""
    close = closest(name, there)
    listed = ", ".join(map(show, there[:6])) + (", …" if len(there) > 6 else "")
    what = f"no {show(name)}; found {listed}" if there else f"no {show(name)}; found no fields at all"
    return what, ("" if close is None else f"did you mean {show(name)} by {show(close)}? ") + f"fix {where}"


def show(value: Any) -> str:
    """A value as JSON writes it, shortened: control characters do not reach a terminal."""
    try:
        written = json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError, RecursionError):
        written = repr(value)
    return written if len(written) <= 40 else written[:39] + "…"


def _check_field(check: Checker, name: str, value: Any) -> Any:
    try:
        return check(value)
    except Bad as bad:
        reason = f"blank {show(name)}" if bad.reason == _BLANK else bad.reason
        raise Bad(reason, f"{show(name)} {bad.what}", bad.hint, bad.line) from None


def _check_item(check: Checker, place: int, item: Any) -> Any:
    try:
        return check(item)
    except Bad as bad:
        raise Bad(bad.reason, f"has an item {place} that {bad.what}", bad.hint, bad.line) from None


def wrong_type(value: Any, expected: str) -> Bad:
    return Bad("wrong type", f"is {_kind(value)}; expected {expected}")


def _kind(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return show(value)
    kinds = {str: "text", int: "a number", float: "a number", list: "a list", dict: "an object", bytes: "bytes"}
    kind = next((words for kind, words in kinds.items() if isinstance(value, kind)), type(value).__name__)
    return f"{show(value)} ({kind})"


def _parse(cell: str) -> Any:
    try:
        return json.loads(cell)
    except (ValueError, RecursionError):
        return None
