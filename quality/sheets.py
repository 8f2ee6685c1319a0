"""Sheets: the token rows of a task's records, their targets, and how predictions are scored.

allmask and its peer read the same rows and are scored by the same function. Logits are given for each row: (labels,)
for a whole row, or (positions, labels) for the positions that are predicted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from allmask.data import Example, Record
from allmask.model import Model
from allmask.tasks.answer import Answer, View, best_spans, choose, replies, texts_of
from allmask.tasks.choose import Choose
from allmask.tasks.classify import Classify
from allmask.tasks.common.heads import answer_all, frozen, token_answers
from allmask.tasks.common.marks import mark
from allmask.tasks.metrics.entities import counting
from allmask.tasks.metrics.squad import AnswerCount
from allmask.tasks.tag import Tag, Window, best_tags
from allmask.text.script import is_chinese

Logits = Sequence[Tensor]  # one tensor per row


@dataclass
class Labelled:
    """Texts and pairs, a row each."""

    task: Classify
    model: Model  # for its tokenizer and labels; the weights are not used
    records: Sequence[Record]
    metric: ClassVar[str] = "accuracy"
    positions: ClassVar[None] = None

    def __post_init__(self):
        work = self.task.workload(self.model, self.records)
        self.rows: list[Example] = work.reading.examples
        self.lengths, self.targets = work.lengths, work.targets

    def rows_of(self, unit: int) -> Sequence[int]:
        return [unit]

    def score(self, logits: Logits) -> dict[str, float]:
        assert self.model.labels is not None
        return in_percent(mark(self.model.labels, torch.stack(list(logits)), self.targets).scores)


@dataclass
class Tagged:
    """Sentences; the tag of a word is predicted at its first token. Long sentences are several rows."""

    task: Tag
    model: Model
    records: Sequence[Record]
    metric: ClassVar[str] = "F1"

    def __post_init__(self):
        assert self.model.labels is not None
        self.names = self.model.labels.names
        work = self.task.workload(self.model, self.records)
        windows: list[Window] = work.windows
        self.rows, self.positions = [window.example for window in windows], [window.places for window in windows]
        self.lengths, self.targets = work.lengths, work.targets
        self.read = self.task.reading(self.model, self.records)  # the windows of each sentence

    def rows_of(self, unit: int) -> Sequence[int]:
        return [unit]

    def score(self, logits: Logits, valid_only: bool = False) -> dict[str, float]:
        """F1 of the best tag of each word or, with `valid_only`, of the best tag sequence that the scheme allows."""
        scheme, rest = self.task.scheme or "bio", iter(logits)
        rows = [torch.zeros(len(record.fields["tags"]), len(self.names)) for record in self.records]
        for row, windows in zip(rows, self.read, strict=True):
            for window in windows:
                row[torch.from_numpy(window.words)] = next(rest).float()
        chosen = best_tags(self.model, rows, scheme) if valid_only else [row.argmax(-1).tolist() for row in rows]
        count = counting(scheme)
        for record, tags in zip(self.records, chosen, strict=True):
            count.add(record.fields["tags"], [self.names[tag] for tag in tags])
        scores = in_percent(count.scores())
        return {"F1": scores.pop("f1"), **scores}


@dataclass
class Asked:
    """Questions with a context; a long context is several rows, each a training example of its own."""

    task: Answer
    model: Model
    records: Sequence[Record]
    metric: ClassVar[str] = "F1"

    def __post_init__(self):
        work = self.task.workload(self.model, self.records)
        views: list[View] = work.windows
        self.rows, self.lengths, self.targets = [view.example for view in views], work.lengths, work.targets
        self.positions = [np.arange(len(row)) for row in self.rows]
        self.read = self.task.reading(self.model, self.records)

    def rows_of(self, unit: int) -> Sequence[int]:
        return [unit]

    def score(self, logits: Logits) -> dict[str, float]:
        answers = [texts_of(record) for record in self.records]
        count, rest = AnswerCount(is_chinese([text for texts in answers for text in texts])), iter(logits)
        for context, views, texts in zip(*self.read, answers, strict=True):
            spans, null = best_spans(views, [next(rest) for _ in views], self.task.max_answer or 30)
            count.add(choose(replies(context, spans, null, self.task.threshold), self.task.threshold), texts)
        scores = count.scores()
        return {"F1": scores["f1"], "exact": scores["exact"]}


@dataclass
class Offered:
    """Questions with choices, a row per choice; the choices of a question are in the same batch."""

    task: Choose
    model: Model
    records: Sequence[Record]
    metric: ClassVar[str] = "accuracy"
    positions: ClassVar[None] = None

    def __post_init__(self):
        work = self.task.workload(self.model, self.records)
        self.rows: list[Example] = work.reading.examples
        self.lengths, self.starts = work.lengths, work.starts
        self.targets = [record.fields["label"] for record in self.records]

    def rows_of(self, unit: int) -> Sequence[int]:
        return range(self.starts[unit], self.starts[unit + 1])

    def score(self, logits: Logits) -> dict[str, float]:
        scores = torch.stack(list(logits))[:, 0]
        chosen = [int(scores[self.starts[unit] : self.starts[unit + 1]].argmax()) for unit in range(len(self.targets))]
        return in_percent({"accuracy": float(np.mean([a == b for a, b in zip(chosen, self.targets, strict=True)]))})


Sheet = Labelled | Tagged | Asked | Offered
SHEETS: dict[type, Any] = {Classify: Labelled, Tag: Tagged, Answer: Asked, Choose: Offered}


def sheet_of(task: Any, model: Model, records: Sequence[Record]) -> Sheet:
    return SHEETS[type(task)](task, model, records)


def logits_of(model: Model, sheet: Sheet, precision: str = "auto") -> Logits:
    """The logits of an allmask model for each row."""
    made = frozen(model, precision)
    if sheet.positions is None:
        return list(answer_all(made, sheet.rows))
    return token_answers(made, sheet.rows, sheet.positions)


def score_of(model: Model, sheet: Sheet) -> dict[str, float]:
    """The scores of an allmask model that is used as `allmask predict` uses it."""
    logits = logits_of(model, sheet)
    return sheet.score(logits, valid_only=True) if isinstance(sheet, Tagged) else sheet.score(logits)


def in_percent(scores: dict[str, float]) -> dict[str, float]:
    return {name: 100.0 * value for name, value in scores.items()}
