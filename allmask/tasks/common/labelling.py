"""Labels in a file: of what kind they are, which there are, and each as a number for a loss.

A label that is text, a whole number, true or false is the name of a class; a list holds any number of names; a number
with a decimal point is a quantity.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from allmask.data import Bad, Maybe, Record, number, read_records, text
from allmask.data.fields import Cell, show
from allmask.errors import DataError
from allmask.files import closest
from allmask.nn.heads import Labels

Label = str | list[str] | float  # as records have it once the kind is known
PAIR = ("text_b", "pair")  # what the second text of a pair may be called
_TEXTS = {"text": text, **{name: Maybe(text) for name in PAIR}}
_MANY = 12  # labels are listed in a message up to so many


# ---- reading -------------------------------------------------------------------------------------------------


@dataclass
class Survey:
    """Counts of the labels of a file, from which their kind is chosen."""

    sorts: Counter[str] = field(default_factory=Counter)
    names: dict[str, Counter[str]] = field(default_factory=lambda: {"single": Counter(), "multi": Counter()})
    pairs: int = 0
    records: int = 0

    @classmethod
    def of(cls, path: Path, on_bad_record: str) -> Survey:
        made = cls()
        for record in read_records(path, {**_TEXTS, "label": _any_label}, on_bad_record):
            made.add(*record.fields["label"])
            made.pairs += _second(record.fields) is not None
        return made

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

    def labels(self, path: Path, kind: str | None = None) -> Labels:
        kind = kind or self.kind
        if kind == "number":
            return Labels("number", ("label",))
        names = self.names[kind]
        if not names:
            raise DataError(f'{path}: no "label" is {_EXPECTED[kind]}', "check the file, and --kind if it was given")
        if kind == "single" and len(names) == 1:
            raise DataError(
                f"{path}: all labels are {show(next(iter(names)))}", "at least two different labels are needed"
            )
        return Labels(kind, _sorted(names))


_EXPECTED = {"single": "a name", "multi": "a list of names"}


def _any_label(value: Any) -> tuple[str, Any]:
    """The sort of a label, and its name or names. A cell of a csv file may hold any sort."""
    parsed = _parsed(value) if isinstance(value, Cell) else value
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
    if isinstance(value, str) and not value.strip():
        raise Bad("blank label", "is blank" if value else "is empty")
    return text(value).strip()


def _parsed(cell: Cell) -> Any:
    """A number or a list if it is written as one, otherwise the text itself."""
    try:
        found = json.loads(cell)
    except (ValueError, RecursionError):
        return cell
    whole = isinstance(found, int | float) and not isinstance(found, bool) and math.isfinite(found)
    return found if whole or isinstance(found, list) else cell


def _sorted(names: Iterable[str]) -> tuple[str, ...]:
    """Whole numbers by size, anything else by the alphabet: the same whatever the order of the file."""
    names = list(names)
    digits = all(name.removeprefix("-").isdecimal() and name.isascii() for name in names)
    return tuple(sorted(names, key=(lambda name: (int(name), name)) if digits else None))


def one_of(labels: Labels) -> Callable[[Any], Label]:
    """A checker of labels that are known: it returns names, or a number."""
    known = {name: name for name in labels.names}
    if all(name == f"LABEL_{place}" for place, name in enumerate(labels.names)):  # nobody named them: numbers will do
        known |= {str(place): name for place, name in enumerate(labels.names)}

    def check_name(value: Any) -> str:
        if isinstance(value, float):
            raise _unknown(value, labels)
        name = _name(value)
        if name not in known:
            raise _unknown(name, labels)
        return known[name]

    def check_names(value: Any) -> list[str]:
        items = _parsed(value) if isinstance(value, Cell) else value
        if not isinstance(items, list):
            raise Bad("wrong type", f"is {show(value)}; expected a list of names")
        return [check_name(item) for item in items]

    return {"single": check_name, "multi": check_names, "number": number}[labels.kind]


def _unknown(value: Any, labels: Labels) -> Bad:
    listed = ", ".join(labels.names[:_MANY]) + (", …" if len(labels) > _MANY else "")
    close = closest(str(value), labels.names)
    hint = "fix the line" if close is None else f"did you mean {show(close)}? fix the line"
    return Bad("unknown label", f"is {show(value)}; expected one of {listed}", hint)


def read_texts(
    path: Path, labels: Labels | None, pair: bool | None, on_bad_record: str = "stop",
    skipped: Counter[str] | None = None, keep: Sequence[str] = (),
) -> Iterator[Record]:  # fmt: skip
    """Records with `text`, `text_b` (None where there is no pair), and, if labels are given, a checked `label`.

    `pair`: the second text is required (True), ignored (False) or optional (None). `keep` names other fields to take
    along.
    """
    others = {name: Maybe(lambda value: value) for name in keep}
    fields = {**others, **_TEXTS, **({} if labels is None else {"label": one_of(labels)})}
    skipped = Counter() if skipped is None else skipped
    found = 0
    for record in read_records(path, fields, on_bad_record, skipped):
        second = _second(record.fields) if pair is not False else None
        if pair and second is None:
            if on_bad_record == "stop":
                raise DataError(f'{record.where}: no "text_b"', "fix the line, or pass --on-bad-record skip")
            skipped["missing field"] += 1
            continue
        found += 1
        values = {name: value for name, value in record.fields.items() if name not in PAIR}
        yield Record({**values, "text_b": second}, record.where)
    if not found:
        raise DataError(f'{path}: no record has a "text_b"', "this model compares two texts")


def _second(fields: dict[str, Any]) -> str | None:
    return next((fields[name] for name in PAIR if fields[name] is not None), None)


# ---- numbers for a loss --------------------------------------------------------------------------------------


def targets_of(labels: Labels, given: Sequence[Label]) -> Tensor:
    """What the task head should predict: (n,) numbers of labels if one is right, otherwise (n, labels)."""
    place = {name: number for number, name in enumerate(labels.names)}
    if labels.kind == "single":
        return torch.tensor([place[str(label)] for label in given], dtype=torch.long)
    if labels.kind == "number":
        return torch.tensor([[label] for label in given], dtype=torch.float32)
    right = torch.zeros(len(given), len(labels))
    for row, names in enumerate(given):
        assert isinstance(names, list)
        right[row, [place[name] for name in names]] = 1.0
    return right


def balanced(targets: Tensor, labels: int) -> Tensor:
    """(labels,) the weight of a text of each label, such that all labels together weigh the same."""
    counts = targets.bincount(minlength=labels)
    return len(targets) / (labels * counts.clamp(min=1))
