"""Tags of words and the entities they mark: B-, I-, E- and S- before a type, O outside.

Entities are read and scored as conlleval and seqeval do, also where tags are not well-formed: an inside tag that goes
on with nothing begins an entity of its own.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from allmask.tasks.metrics.classification import by_label, f1_of

OUTSIDE = "O"
_MARKED = re.compile(r"([BIES])-(.+)", re.DOTALL)
PREFIXES = {"bio": "BI", "iob1": "BI", "bioes": "BIES"}
SCHEMES = (*PREFIXES, "plain")


class Entity(NamedTuple):
    kind: str
    start: int  # its first word
    end: int  # the word after its last


def split_tag(tag: str) -> tuple[str, str]:
    """("B", "location") of B-location; a tag that marks nothing is outside."""
    found = _MARKED.fullmatch(tag)
    return (found[1], found[2]) if found else (OUTSIDE, "")


def entities(tags: Sequence[str]) -> list[Entity]:
    found: list[Entity] = []
    start, before, kind = 0, OUTSIDE, ""
    for place, tag in enumerate([*tags, OUTSIDE]):
        prefix, now = split_tag(tag)
        goes_on = prefix in "IE" and before in "BI" and now == kind
        if before != OUTSIDE and not goes_on:
            found.append(Entity(kind, start, place))
        if not goes_on:
            start = place
        before, kind = prefix, now
    return found


# ---- schemes -------------------------------------------------------------------------------------------------


@dataclass
class TagSurvey:
    """Counts of the tags of a file, from which the scheme is chosen."""

    tags: Counter[str] = field(default_factory=Counter)
    begun: Counter[str] = field(default_factory=Counter)  # by which prefix entities after no other of their type begin

    def add(self, tags: Sequence[str]) -> None:
        self.tags.update(tags)
        before = ""
        for tag in tags:
            prefix, kind = split_tag(tag)
            if prefix != OUTSIDE and kind != before:
                self.begun[prefix] += 1
            before = kind

    @property
    def scheme(self) -> str:
        """bioes, bio, iob1 (B- only between neighbours of a type), or plain where tags mark no entities."""
        prefixes = {split_tag(tag)[0] for tag in self.tags} - {OUTSIDE}
        if not prefixes:
            return "plain"
        if prefixes & {"E", "S"}:
            return "bioes"
        return "iob1" if self.begun["I"] > self.begun["B"] else "bio"

    def odd(self) -> str | None:
        """A tag without a prefix among tags with one, other than O; None if there is none."""
        if self.scheme == "plain":
            return None
        return next((tag for tag in sorted(self.tags) if tag != OUTSIDE and not _MARKED.fullmatch(tag)), None)

    def names(self) -> tuple[str, ...]:
        """All tags that a model should know: for each type every prefix, even if the data lacks some."""
        if self.scheme == "plain":
            return tuple(sorted(self.tags))
        kinds = sorted({split_tag(tag)[1] for tag in self.tags} - {""})
        return (OUTSIDE, *(f"{prefix}-{kind}" for kind in kinds for prefix in PREFIXES[self.scheme]))


@cache
def steps(names: tuple[str, ...], scheme: str) -> tuple[Tensor, Tensor]:
    """(L,) which tags may begin a text and (L, L) which may follow which, by the scheme."""
    marks = [split_tag(name) for name in names]
    if scheme not in ("bio", "bioes"):  # in IOB1 and among plain tags anything may follow anything
        return torch.ones(len(names), dtype=torch.bool), torch.ones(len(names), len(names), dtype=torch.bool)
    closes = scheme == "bioes"
    starts = [_may_follow((OUTSIDE, ""), mark, closes) for mark in marks]
    allowed = [[_may_follow(before, mark, closes) for mark in marks] for before in marks]
    return torch.tensor(starts), torch.tensor(allowed)


def _may_follow(before: tuple[str, str], mark: tuple[str, str], closes: bool) -> bool:
    """`closes`: an entity of several words must be ended by E-."""
    if mark[0] in "IE":
        return before[0] in "BI" and before[1] == mark[1]
    return not (closes and before[0] in "BI")


# ---- scores --------------------------------------------------------------------------------------------------


@dataclass
class EntityCount:
    """Sums over sentences, from which scores are made."""

    right: Counter[str] = field(default_factory=Counter)
    targets: Counter[str] = field(default_factory=Counter)
    predicted: Counter[str] = field(default_factory=Counter)
    words: int = 0
    same: int = 0  # words whose tag is the right one

    def add(self, targets: Sequence[str], predicted: Sequence[str]) -> int:
        """Take a sentence in and return how many entities are wrong or missing."""
        wanted, given = set(entities(targets)), set(entities(predicted))
        for counter, some in ((self.right, wanted & given), (self.targets, wanted), (self.predicted, given)):
            counter.update(entity.kind for entity in some)
        self.words += len(targets)
        self.same += sum(a == b for a, b in zip(targets, predicted, strict=True))
        return len(wanted ^ given)

    def scores(self) -> dict[str, float]:
        """Micro averages over all entities; the accuracy is that of the tags of single words."""
        right, targets, predicted = (float(counter.total()) for counter in (self.right, self.targets, self.predicted))
        return {
            "f1": 2.0 * right / max(targets + predicted, 1.0),
            "precision": right / max(predicted, 1.0),
            "recall": right / max(targets, 1.0),
            "accuracy": self.same / max(self.words, 1),
        }

    def by_type(self) -> dict[str, dict[str, float]]:
        kinds = sorted(self.targets | self.predicted)
        arrays = [np.array([counter[kind] for kind in kinds]) for counter in (self.right, self.targets, self.predicted)]
        return dict(zip(kinds, by_label(*arrays), strict=True)) if kinds else {}


@dataclass
class PlainCount:
    """The same for tags that mark no entities, such as parts of speech."""

    right: Counter[str] = field(default_factory=Counter)
    targets: Counter[str] = field(default_factory=Counter)
    predicted: Counter[str] = field(default_factory=Counter)

    def add(self, targets: Sequence[str], predicted: Sequence[str]) -> int:
        same = [a for a, b in zip(targets, predicted, strict=True) if a == b]
        self.right.update(same)
        self.targets.update(targets)
        self.predicted.update(predicted)
        return len(targets) - len(same)

    def scores(self) -> dict[str, float]:
        right, targets, predicted = self._arrays()
        return {
            "accuracy": float(right.sum() / max(targets.sum(), 1)),
            "macro_f1": float(f1_of(right, targets, predicted).mean()),
        }

    def by_type(self) -> dict[str, dict[str, float]]:
        return dict(zip(self._kinds(), by_label(*self._arrays()), strict=True))

    def _kinds(self) -> list[str]:
        return sorted(self.targets | self.predicted)

    def _arrays(self) -> list[np.ndarray]:
        return [np.array([c[kind] for kind in self._kinds()]) for c in (self.right, self.targets, self.predicted)]


Count = EntityCount | PlainCount


def counting(scheme: str) -> Count:
    return PlainCount() if scheme == "plain" else EntityCount()


def scheme_of(names: Iterable[str]) -> str:
    """The scheme that a model's tags look like."""
    survey = TagSurvey()
    survey.tags.update(names)
    scheme = survey.scheme
    return "bio" if scheme == "iob1" else scheme
