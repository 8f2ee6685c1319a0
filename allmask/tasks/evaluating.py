"""Models that are asked at tokens, marked: tags or answers for the records of a file, and the worst errors."""

from __future__ import annotations

import heapq
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

from allmask.data import Record
from allmask.tasks.answer import asked_of, tell_misplaced, texts_of
from allmask.tasks.answerer import Answerer
from allmask.tasks.entities import counting
from allmask.tasks.exact import AnswerCount
from allmask.tasks.questions import read_questions
from allmask.tasks.scores import is_chinese
from allmask.tasks.tag import named
from allmask.tasks.tagger import WINDOW, Tagged, Tagger, read_tagged


@dataclass
class Worst:
    """The largest errors, and no more than were asked for."""

    count: int
    kept: list[tuple[float, int, dict[str, Any]]] = field(default_factory=list)
    seen: int = 0

    def add(self, size: float, make: Callable[[], dict[str, Any]]) -> None:
        self.seen += 1
        if not self.count or size <= 0 or (len(self.kept) == self.count and size <= self.kept[0][0]):
            return
        entry = (size, -self.seen, make())  # the number keeps dicts from being compared
        heapq.heappush(self.kept, entry)
        if len(self.kept) > self.count:
            heapq.heappop(self.kept)

    def rows(self) -> list[dict[str, Any]]:
        return [row for _, _, row in sorted(self.kept, key=lambda entry: entry[:2], reverse=True)]


def evaluated(
    worker: Tagger | Answerer, file: Path, limit: int | None, show: int, on_bad_record: str, skipped: Counter[str]
) -> dict[str, Any]:
    """The records of a file, answered and scored; of the errors the largest `show`."""
    began, worst = time.monotonic(), Worst(show)
    if isinstance(worker, Tagger):
        told = _tags(worker, file, limit, on_bad_record, skipped, worst)
    else:
        told = _answers(worker, file, limit, on_bad_record, skipped, worst)
    result: dict[str, Any] = {"file": str(file), "records": worst.seen}
    result |= {"seconds": round(time.monotonic() - began, 2), **told}
    return result | ({"errors": worst.rows()} if show else {})


def _tags(
    tagger: Tagger, file: Path, limit: int | None, on_bad_record: str, skipped: Counter[str], worst: Worst
) -> dict[str, Any]:
    count = counting(tagger.scheme)
    records = islice(read_tagged(file, tagger.labels, on_bad_record, skipped), limit)
    while window := list(islice(records, WINDOW)):
        for record, found in zip(window, tagger.stream([one.fields["tokens"] for one in window]), strict=True):
            wrong = count.add(record.fields["tags"], found.tags)
            worst.add(wrong, lambda record=record, found=found: _tag_error(record, found))
    return {"scores": count.scores(), "types": count.by_type()}


def _tag_error(record: Record, found: Tagged) -> dict[str, Any]:
    words, tags = record.fields["tokens"], record.fields["tags"]
    told = {"where": record.where, "tokens": words, "tags": tags, "prediction": found.tags}
    return told | {"is": named(words, tags), "taken_for": named(words, found.tags)}


def _answers(
    answerer: Answerer, file: Path, limit: int | None, on_bad_record: str, skipped: Counter[str], worst: Worst
) -> dict[str, Any]:
    records = list(islice(read_questions(file, True, on_bad_record, skipped), limit))
    tell_misplaced(records)
    count = AnswerCount(is_chinese([text for record in records for text in texts_of(record)]))
    found = answerer.stream((asked_of(record) for record in records), WINDOW)
    for record, replies in zip(records, found, strict=True):
        reply = replies.best[0]
        _, f1 = count.add(reply.text, texts_of(record))
        worst.add((1.0 - f1) * reply.score, lambda record=record, reply=reply, f1=f1: {
            "where": record.where, "question": record.fields["question"], "gold": texts_of(record), "f1": f1,
            **reply.to_dict(),
        })  # fmt: skip
    return {"scores": count.scores(), "scored_as": "CMRC 2018" if count.chinese else "SQuAD"}
