"""Sheets: the rows of ids of some records of a task, what is asked of them, and what answers are worth.

Both sides, allmask and whoever it is compared with, read the same rows and are marked by the same function. Answers are
told row by row: scores (labels,) of a row as a whole, or (places, labels) of the tokens that are asked.
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
from allmask.tasks.answer import Answer, Context, View, asked_of, best_spans, choose, replies, texts_of
from allmask.tasks.choose import Choose
from allmask.tasks.classify import Classify
from allmask.tasks.common.heads import answer_all, frozen, token_answers
from allmask.tasks.common.marks import mark
from allmask.tasks.metrics.entities import counting
from allmask.tasks.metrics.squad import AnswerCount
from allmask.tasks.metrics.text import is_chinese
from allmask.tasks.tag import Tag, Window, best_tags

Said = Sequence[Tensor]  # of each row


@dataclass
class Labelled:
    """Texts and pairs, a row each."""

    task: Classify
    model: Model  # knows tokens and labels; its weights do not matter
    records: Sequence[Record]
    metric: ClassVar[str] = "accuracy"
    places: ClassVar[None] = None

    def __post_init__(self):
        work = self.task.workload(self.model, self.records)
        self.rows: list[Example] = work.reading.examples
        self.lengths, self.gold = work.lengths, work.targets

    def rows_of(self, unit: int) -> Sequence[int]:
        return [unit]

    def score(self, said: Said) -> dict[str, float]:
        assert self.model.labels is not None
        return in_percent(mark(self.model.labels, torch.stack(list(said)), self.gold).scores)


@dataclass
class Tagged:
    """Sentences, of which each word is asked at its first piece; long ones are several rows."""

    task: Tag
    model: Model
    records: Sequence[Record]
    metric: ClassVar[str] = "F1"

    def __post_init__(self):
        assert self.model.labels is not None
        self.names = self.model.labels.names
        work = self.task.workload(self.model, self.records)
        windows: list[Window] = work.windows
        self.rows, self.places = [window.example for window in windows], [window.places for window in windows]
        self.lengths, self.gold = work.lengths, work.targets
        self.read = self.task.read(self.model, self.records)  # the windows of each sentence

    def rows_of(self, unit: int) -> Sequence[int]:
        return [unit]

    def score(self, said: Said, together: bool = False) -> dict[str, float]:
        """Of each word the best tag, or those that are best together of what the scheme allows."""
        scheme, rest = self.task.scheme or "bio", iter(said)
        rows = [torch.zeros(len(record.fields["tags"]), len(self.names)) for record in self.records]
        for row, windows in zip(rows, self.read, strict=True):
            for window in windows:
                row[torch.from_numpy(window.words)] = next(rest).float()
        chosen = best_tags(self.model, rows, scheme) if together else [row.argmax(-1).tolist() for row in rows]
        count = counting(scheme)
        for record, tags in zip(self.records, chosen, strict=True):
            count.add(record.fields["tags"], [self.names[tag] for tag in tags])
        told = in_percent(count.scores())
        return {"F1": told.pop("f1"), **told}


@dataclass
class Asked:
    """Questions with a context; long contexts are several rows, each of them learnt by itself."""

    task: Answer
    model: Model
    records: Sequence[Record]
    metric: ClassVar[str] = "F1"

    def __post_init__(self):
        work = self.task.workload(self.model, self.records)
        views: list[View] = work.views
        self.rows, self.lengths, self.gold = [view.example for view in views], work.lengths, work.targets
        self.places = [np.arange(len(row)) for row in self.rows]
        self.read = self.task.read(self.model, [asked_of(record) for record in self.records])

    def rows_of(self, unit: int) -> Sequence[int]:
        return [unit]

    def score(self, said: Said) -> dict[str, float]:
        golds = [texts_of(record) for record in self.records]
        count, rest = AnswerCount(is_chinese([text for texts in golds for text in texts])), iter(said)
        for context, views, gold in zip(*self.read, golds, strict=True):
            count.add(self._answer(context, views, [next(rest) for _ in views]), gold)
        told = count.scores()
        return {"F1": told["f1"], "exact": told["exact"]}

    def _answer(self, context: Context, views: Sequence[View], said: Said) -> str:
        spans, null = best_spans(views, said, self.task.max_answer or 30)
        return choose(replies(context, spans, null, self.task.threshold), self.task.threshold)


@dataclass
class Offered:
    """Questions with choices, a row a choice; those of a question are learnt together."""

    task: Choose
    model: Model
    records: Sequence[Record]
    metric: ClassVar[str] = "accuracy"
    places: ClassVar[None] = None

    def __post_init__(self):
        work = self.task.workload(self.model, self.records)
        self.rows: list[Example] = work.reading.examples
        self.lengths, self.starts = work.lengths, work.starts
        self.gold = [record.fields["label"] for record in self.records]

    def rows_of(self, unit: int) -> Sequence[int]:
        return range(self.starts[unit], self.starts[unit + 1])

    def score(self, said: Said) -> dict[str, float]:
        scores = torch.stack(list(said))[:, 0]
        chosen = [int(scores[self.starts[unit] : self.starts[unit + 1]].argmax()) for unit in range(len(self.gold))]
        return in_percent({"accuracy": float(np.mean([a == b for a, b in zip(chosen, self.gold, strict=True)]))})


Sheet = Labelled | Tagged | Asked | Offered
SHEETS: dict[type, Any] = {Classify: Labelled, Tag: Tagged, Answer: Asked, Choose: Offered}


def sheet_of(task: Any, model: Model, records: Sequence[Record]) -> Sheet:
    return SHEETS[type(task)](task, model, records)


def said_by(model: Model, sheet: Sheet, precision: str = "auto") -> Said:
    """What a model of ours says of each row."""
    made = frozen(model, precision)
    if sheet.places is None:
        return list(answer_all(made, sheet.rows))
    return token_answers(made, sheet.rows, sheet.places)


def judged(model: Model, sheet: Sheet) -> dict[str, float]:
    """What a model of ours is worth, used as `allmask predict` uses it."""
    said = said_by(model, sheet)
    return sheet.score(said, together=True) if isinstance(sheet, Tagged) else sheet.score(said)


def in_percent(scores: dict[str, float]) -> dict[str, float]:
    return {name: 100.0 * value for name, value in scores.items()}
