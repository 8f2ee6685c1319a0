"""Labels in a file: their kind, their names, and their numbers for a loss.

A label that is text, a whole number, true or false is the name of a class; a list holds any number of names; a number
with a decimal point is a quantity.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from allmask.data import Bad, DataFile, Maybe, Record, number, read_records, text, usable
from allmask.data.fields import Cell, show
from allmask.errors import DataError
from allmask.files import closest
from allmask.nn.heads import Labels

Label = str | list[str] | float  # of a record, once the kind is known
SECOND = ("text_b", "pair")  # field names for the second text of a pair
_TEXTS = {"text": text, **{name: Maybe(text) for name in SECOND}}
_LISTED = 12  # most labels that a message lists


# ---- reading -------------------------------------------------------------------------------------------------


@dataclass
class Survey:
    """Counts of the labels in a file, from which their kind is chosen."""

    sorts: Counter[str] = field(default_factory=Counter)  # list, fraction, whole, name
    names: dict[str, Counter[str]] = field(default_factory=lambda: {"single": Counter(), "multi": Counter()})
    pairs: int = 0
    records: int = 0

    @classmethod
    def of(cls, path: Path | DataFile, on_bad_record: str) -> Survey:
        survey = cls()
        for record in read_records(path, {**_TEXTS, "label": _any_label}, on_bad_record):
            survey.add(*record.fields["label"])
            survey.pairs += _second(record.fields) is not None
        return survey

    def add(self, sort: str, value: Any) -> None:
        self.records += 1
        self.sorts[sort] += 1
        if sort == "list":
            self.names["multi"].update(value)
        elif sort in ("name", "whole"):
            self.names["single"][value] += 1

    @property
    def kind(self) -> str:
        """The kind of most labels; if any number has a decimal point, all numbers are quantities."""
        lists, fractions = self.sorts["list"], self.sorts["fraction"]
        if lists > self.records / 2:
            return "multi"
        numbers = fractions + self.sorts["whole"]
        return "number" if fractions and numbers > self.records / 2 else "single"

    def labels(self, path: Path | DataFile, kind: str | None = None) -> Labels:
        """Return the labels; whole numbers are sorted by size, other names alphabetically."""
        kind = kind or self.kind
        if kind == "number":
            return Labels("number", ("label",))
        names = list(self.names[kind])
        if not names:
            expected = {"single": "a name", "multi": "a list of names"}[kind]
            raise DataError(f'{path}: no "label" is {expected}', "check the file, and --kind if it was given")
        if kind == "single" and len(names) == 1:
            raise DataError(f"{path}: all labels are {show(names[0])}", "at least two different labels are needed")
        digits = all(name.removeprefix("-").isdecimal() and name.isascii() for name in names)
        return Labels(kind, tuple(sorted(names, key=(lambda name: (int(name), name)) if digits else None)))


def _any_label(value: Any) -> tuple[str, Any]:
    """Check a label of unknown kind; return its sort, as in `Survey.sorts`, and its value. A csv cell may have any."""
    parsed = _parsed(value)
    if isinstance(parsed, list):
        return "list", [_name(item) for item in parsed]
    if isinstance(parsed, float):
        return "fraction", number(parsed)
    return "whole" if isinstance(parsed, int) and not isinstance(parsed, bool) else "name", _name(value)


def _name(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int):
        return str(value)
    return text(value).strip()


def _parsed(value: Any) -> Any:
    """Parse a csv cell that is written as a number or a list; return any other value unchanged."""
    if not isinstance(value, Cell):
        return value
    try:
        found = json.loads(value)
    except (ValueError, RecursionError):
        return value
    finite = isinstance(found, int | float) and not isinstance(found, bool) and math.isfinite(found)
    return found if finite or isinstance(found, list) else value


def one_of(labels: Labels) -> Callable[[Any], Label]:
    """Return a checker for known labels; the checker returns a name, a list of names or a number."""
    known = {name: name for name in labels.names}
    if all(name == f"LABEL_{place}" for place, name in enumerate(labels.names)):  # default names: accept numbers
        known |= {str(place): name for place, name in enumerate(labels.names)}

    def check_name(value: Any) -> str:
        name = value if isinstance(value, float) else _name(value)
        if name in known:
            return known[name]
        listed = ", ".join(labels.names[:_LISTED]) + (", …" if len(labels) > _LISTED else "")
        close = closest(str(name), labels.names)
        hint = "fix the line" if close is None else f"did you mean {show(close)}? fix the line"
        raise Bad("unknown label", f"is {show(name)}; expected one of {listed}", hint)

    def check_names(value: Any) -> list[str]:
        items = _parsed(value)
        if not isinstance(items, list):
            raise Bad("wrong type", f"is {show(value)}; expected a list of names")
        return [check_name(item) for item in items]

    return {"single": check_name, "multi": check_names, "number": number}[labels.kind]


def read_texts(
    path: Path | DataFile, labels: Labels | None, pair: bool | None, on_bad_record: str = "stop",
    skipped: Counter[str] | None = None,
) -> Iterator[Record]:  # fmt: skip
    """Read records with `text`, `text_b` (None where there is no pair) and, if labels are given, a checked `label`.

    `pair`: the second text is required (True), ignored (False) or optional (None).
    """
    fields = {**_TEXTS, **({} if labels is None else {"label": one_of(labels)})}

    def check_pair(values: dict[str, Any]) -> None:
        second = None if pair is False else _second(values)
        if pair and second is None:
            raise Bad("missing field", 'no "text_b"')
        for name in SECOND:
            del values[name]
        values["text_b"] = second

    return usable(path, read_records(path, fields, on_bad_record, skipped), check_pair, on_bad_record, skipped)


def _second(fields: dict[str, Any]) -> str | None:
    return next((fields[name] for name in SECOND if fields[name] is not None), None)


# ---- numbers for a loss --------------------------------------------------------------------------------------


def targets_of(labels: Labels, given: Sequence[Label]) -> Tensor:
    """Return what the task head should predict: (n,) label numbers if each text has one, otherwise (n, labels)."""
    place = {name: number for number, name in enumerate(labels.names)}
    if labels.kind == "single":
        return torch.tensor([place[str(label)] for label in given], dtype=torch.long)
    if labels.kind == "number":
        return torch.tensor([[label] for label in given], dtype=torch.float32)
    targets = torch.zeros(len(given), len(labels))
    for row, names in enumerate(given):
        assert isinstance(names, list)
        targets[row, [place[name] for name in names]] = 1.0
    return targets


def balanced(targets: Tensor, labels: int) -> Tensor:
    """Return a weight for each label, (labels,), such that all labels have the same total weight."""
    counts = targets.bincount(minlength=labels)
    return len(targets) / (labels * counts.clamp(min=1))
