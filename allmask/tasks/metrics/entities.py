"""Tags of words and the entities that they mark: B-, I-, E- or S- before a type, O outside.

Entities are read and scored as conlleval and seqeval do, also where tags are not well-formed: an inside tag that
continues nothing begins an entity.
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
    start: int  # of its first word
    end: int  # after its last word


def split_tag(tag: str) -> tuple[str, str]:
    """Split B-location into ("B", "location"); a tag without a prefix is outside, ("O", "")."""
    found = _MARKED.fullmatch(tag)
    return (found[1], found[2]) if found else (OUTSIDE, "")


def entities(tags: Sequence[str]) -> list[Entity]:
    found: list[Entity] = []
    start, before, kind = 0, OUTSIDE, ""
    for place, tag in enumerate([*tags, OUTSIDE]):
        prefix, now = split_tag(tag)
        continues = prefix in "IE" and before in "BI" and now == kind
        if before != OUTSIDE and not continues:
            found.append(Entity(kind, start, place))
        if not continues:
            start = place
        before, kind = prefix, now
    return found


# ---- schemes -------------------------------------------------------------------------------------------------


@dataclass
class TagSurvey:
    """Counts of the tags in a file, from which the scheme is inferred."""

    tags: Counter[str] = field(default_factory=Counter)
    first: Counter[str] = field(default_factory=Counter)  # prefixes of tags that follow no tag of the same type

    def add(self, tags: Sequence[str]) -> None:
        self.tags.update(tags)
        before = ""
        for tag in tags:
            prefix, kind = split_tag(tag)
            if prefix != OUTSIDE and kind != before:
                self.first[prefix] += 1
            before = kind

    @property
    def scheme(self) -> str:
        """bioes, bio, iob1 (B- only between adjacent entities of a type), or plain (tags mark no entities)."""
        prefixes = {split_tag(tag)[0] for tag in self.tags} - {OUTSIDE}
        if not prefixes:
            return "plain"
        if prefixes & {"E", "S"}:
            return "bioes"
        return "iob1" if self.first["I"] > self.first["B"] else "bio"

    def names(self) -> tuple[str, ...]:
        """Return all tags for a model: each type with every prefix of the scheme, even if the data lacks some."""
        if self.scheme == "plain":
            return tuple(sorted(self.tags))
        kinds = sorted({split_tag(tag)[1] for tag in self.tags} - {""})
        return (OUTSIDE, *(f"{prefix}-{kind}" for kind in kinds for prefix in PREFIXES[self.scheme]))


@cache
def steps(names: tuple[str, ...], scheme: str) -> tuple[Tensor, Tensor]:
    """Return which tags may begin a text, (L,), and which tag (column) may follow which (row), (L, L)."""
    marks = [split_tag(name) for name in names]
    if scheme not in ("bio", "bioes"):  # iob1 and plain allow any sequence
        return torch.ones(len(names), dtype=torch.bool), torch.ones(len(names), len(names), dtype=torch.bool)

    def may_follow(before: tuple[str, str], mark: tuple[str, str]) -> bool:
        if mark[0] in "IE":
            return before[0] in "BI" and before[1] == mark[1]
        return not (scheme == "bioes" and before[0] in "BI")  # E- must end an entity of several words

    starts = [may_follow((OUTSIDE, ""), mark) for mark in marks]
    return torch.tensor(starts), torch.tensor([[may_follow(before, mark) for mark in marks] for before in marks])


# ---- scores --------------------------------------------------------------------------------------------------


@dataclass
class EntityCount:
    """Sums over sentences, from which scores are computed. The counters are by type."""

    right: Counter[str] = field(default_factory=Counter)
    targets: Counter[str] = field(default_factory=Counter)
    predicted: Counter[str] = field(default_factory=Counter)
    words: int = 0
    same: int = 0  # words with the right tag

    def add(self, targets: Sequence[str], predicted: Sequence[str]) -> int:
        """Count a sentence; return the number of entities that are wrong or missing."""
        wanted, found = set(entities(targets)), set(entities(predicted))
        for counter, some in ((self.right, wanted & found), (self.targets, wanted), (self.predicted, found)):
            counter.update(entity.kind for entity in some)
        self.words += len(targets)
        self.same += sum(a == b for a, b in zip(targets, predicted, strict=True))
        return len(wanted ^ found)

    def scores(self) -> dict[str, float]:
        """Return micro averages over all entities, and the accuracy of the tags of single words."""
        right, targets, predicted = (float(counter.total()) for counter in (self.right, self.targets, self.predicted))
        return {
            "f1": 2.0 * right / max(targets + predicted, 1.0),
            "precision": right / max(predicted, 1.0),
            "recall": right / max(targets, 1.0),
            "accuracy": self.same / max(self.words, 1),
        }

    def by_type(self) -> dict[str, dict[str, float]]:
        """Return precision, recall, F1 and the number of targets by type."""
        kinds, arrays = self._arrays()
        return dict(zip(kinds, by_label(*arrays), strict=True)) if kinds else {}

    def _arrays(self) -> tuple[list[str], list[np.ndarray]]:
        kinds = sorted(self.targets | self.predicted)
        counters = (self.right, self.targets, self.predicted)
        return kinds, [np.array([counter[kind] for kind in kinds]) for counter in counters]


class PlainCount(EntityCount):
    """The same for tags that mark no entities, such as parts of speech."""

    def add(self, targets: Sequence[str], predicted: Sequence[str]) -> int:
        """Count a sentence; return the number of wrong tags."""
        same = [a for a, b in zip(targets, predicted, strict=True) if a == b]
        for counter, tags in ((self.right, same), (self.targets, targets), (self.predicted, predicted)):
            counter.update(tags)
        return len(targets) - len(same)

    def scores(self) -> dict[str, float]:
        right, targets, predicted = self._arrays()[1]
        accuracy = float(right.sum() / max(targets.sum(), 1))
        return {"accuracy": accuracy, "macro_f1": float(f1_of(right, targets, predicted).mean())}


def counting(scheme: str) -> EntityCount:
    return PlainCount() if scheme == "plain" else EntityCount()


def scheme_of(names: Iterable[str]) -> str:
    """Infer the scheme from a model's tags."""
    survey = TagSurvey()
    survey.tags.update(names)
    scheme = survey.scheme
    return "bio" if scheme == "iob1" else scheme
