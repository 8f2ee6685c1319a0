"""Checkers for the fields of a record: small functions that return the value, or raise `Bad` with what is wrong."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from allmask.errors import UsageError
from allmask.files import closest

Checker = Callable[[Any], Any]
_BLANK = "blank text"  # the reason for a value; for a field the reason names the field


class Bad(Exception):
    """A record that cannot be used.

    `reason` is what skipped records are counted by, `what` is the message, `hint` is what to do. `line` is the line
    with the error, if it is not the first line of the record.
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
    """Return a checker for lists that are not empty and whose items all pass `check`."""

    def check_list(value: Any) -> list[Any]:
        items = value
        if isinstance(value, Cell):
            try:
                items = json.loads(value)
            except (ValueError, RecursionError):
                items = None
        if not isinstance(items, list):
            raise wrong_type(value, "a list")
        if not items:
            raise Bad("empty list", "is an empty list")
        checked = []
        for item in items:
            try:
                checked.append(check(item))
            except Bad as bad:
                what = f"has an item {len(checked) + 1} that {bad.what}"
                raise Bad(bad.reason, what, bad.hint, bad.line) from None
        return checked

    return check_list


@dataclass(frozen=True)
class Maybe:
    """A checker that returns None for a field that is absent, null or blank: `Maybe(text)`."""

    check: Checker

    def __call__(self, value: Any) -> Any:
        absent = value is None or (isinstance(value, str) and not value.strip())
        return None if absent else self.check(value)


_OF_TYPE: dict[object, Checker] = {str: text, float: number}


def as_checkers(fields: Mapping[str, Checker | type]) -> dict[str, Checker]:
    """Replace `str` by `text` and `float` by `number`; anything else must be a checker already."""
    if not fields:
        raise UsageError("read_records: name at least one field")
    checkers = {name: _OF_TYPE.get(check, check) for name, check in fields.items()}
    for name, check in checkers.items():
        if isinstance(check, type) or not callable(check):
            expected = "expected str, float or a checker such as text"
            raise UsageError(f'read_records: the checker of "{name}" is {check!r}; {expected}')
    return checkers


def required(checkers: Mapping[str, Checker]) -> list[str]:
    return [name for name, check in checkers.items() if not isinstance(check, Maybe)]


def check_row(checkers: Mapping[str, Checker], row: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a row that have a checker, each as its checker returns it."""
    for name in required(checkers):
        if name not in row:
            raise Bad("missing field", *missing(name, list(row), "the line"))
    checked = {}
    for name, check in checkers.items():
        try:
            checked[name] = check(row.get(name))
        except Bad as bad:
            reason = f"blank {show(name)}" if bad.reason == _BLANK else bad.reason
            raise Bad(reason, f"{show(name)} {bad.what}", bad.hint, bad.line) from None
    return checked


def missing(name: str, found: list[str], where: str) -> tuple[str, str]:
    """Return the message and the hint for a missing field, whose name may be misspelt among the `found` ones."""
    close = closest(name, found)
    listed = ", ".join(map(show, found[:6])) + (", …" if len(found) > 6 else "")
    what = f"no {show(name)}; found {listed or 'no fields at all'}"
    return what, ("" if close is None else f"did you mean {show(name)} by {show(close)}? ") + f"fix {where}"


def show(value: Any) -> str:
    """Return a value as JSON, shortened, without control characters that would reach a terminal."""
    try:
        written = json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError, RecursionError):
        written = repr(value)
    return written if len(written) <= 40 else written[:39] + "…"


_KINDS = {str: "text", int: "a number", float: "a number", list: "a list", dict: "an object", bytes: "bytes"}


def wrong_type(value: Any, expected: str) -> Bad:
    kind = next((words for kind, words in _KINDS.items() if isinstance(value, kind)), type(value).__name__)
    found = show(value) if value is None or isinstance(value, bool) else f"{show(value)} ({kind})"
    return Bad("wrong type", f"is {found}; expected {expected}")
