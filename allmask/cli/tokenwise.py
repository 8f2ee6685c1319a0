"""What `predict` and `evaluate` do with models that are asked at tokens: tags for words, answers to questions."""

from __future__ import annotations

import heapq
import json
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from allmask.cli import ready_lines, tell_skipped
from allmask.cli.predict import Job, Put
from allmask.errors import UsageError

if TYPE_CHECKING:
    from allmask.data import Record
    from allmask.tasks.answerer import Answerer
    from allmask.tasks.tagger import Tagged, Tagger


# ---- predict -----------------------------------------------------------------------------------------------------


def tagging(tagger: Tagger, file: Path, on_bad_record: str, keep: list[str]) -> Job:
    from allmask.tasks.tagger import WINDOW, read_sentences, sentence_of

    def read(skipped: Counter[str]) -> Iterator[Record]:
        return read_sentences(file, on_bad_record, skipped, ("id", "tags", *keep))

    def tag(window: list[Record]) -> list[dict[str, Any]]:
        return [one.to_dict() for one in tagger.stream([sentence_of(record) for record in window], len(window))]

    return Job(read, lambda: tag, WINDOW, "tagged")


def tag_lines(tagger: Tagger, put: Put) -> None:
    """Each line of stdin is a text, and answered as soon as it is there; a blank one gives a blank one."""
    for lines in ready_lines():
        found = tagger.stream([line for line in lines if line.strip()])
        for line in lines:
            told = {"text": line, **next(found).to_dict()} if line.strip() else None
            put("" if told is None else json.dumps(told, ensure_ascii=False))


def answering(answerer: Answerer, file: Path, on_bad_record: str, keep: list[str], n_best: int) -> Job:
    from allmask.tasks.answer import asked_of
    from allmask.tasks.answerer import WINDOW
    from allmask.tasks.questions import read_questions

    if str(file) == "-":
        raise UsageError("this model answers questions about contexts; a line of stdin is one text", "name a file")

    def read(skipped: Counter[str]) -> Iterator[Record]:
        return read_questions(file, False, on_bad_record, skipped, keep)

    def answer(window: list[Record]) -> list[dict[str, Any]]:
        told = []
        for found in answerer.stream([asked_of(record) for record in window], len(window)):
            best = [one.to_dict() for one in found.best[:n_best]]
            told.append({"answers": best} if n_best > 1 else best[0])
        return told

    hidden = () if "context" in keep else ("context",)  # a long text, the same of many questions
    return Job(read, lambda: answer, WINDOW, "answered", hidden)


# ---- evaluate ----------------------------------------------------------------------------------------------------


@dataclass
class _Worst:
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
    worker: Tagger | Answerer, model: str, file: Path, limit: int | None, show: int, on_bad_record: str
) -> dict[str, Any]:
    from allmask.tasks.tagger import Tagger

    skipped: Counter[str] = Counter()
    began, worst = time.monotonic(), _Worst(show)
    if isinstance(worker, Tagger):
        told = _tags(worker, file, limit, on_bad_record, skipped, worst)
    else:
        told = _answers(worker, file, limit, on_bad_record, skipped, worst)
    tell_skipped(skipped)
    result: dict[str, Any] = {"model": model, "file": str(file), "records": worst.seen}
    result |= {"seconds": round(time.monotonic() - began, 2), **told}
    return result | ({"errors": worst.rows()} if show else {})


def _tags(
    tagger: Tagger, file: Path, limit: int | None, on_bad_record: str, skipped: Counter[str], worst: _Worst
) -> dict[str, Any]:
    from allmask.tasks.entities import counting
    from allmask.tasks.tagger import WINDOW, read_tagged

    count = counting(tagger.scheme)
    records = islice(read_tagged(file, tagger.labels, on_bad_record, skipped), limit)
    while window := list(islice(records, WINDOW)):
        for record, found in zip(window, tagger.stream([one.fields["tokens"] for one in window]), strict=True):
            wrong = count.add(record.fields["tags"], found.tags)
            worst.add(wrong, lambda record=record, found=found: _tag_error(record, found))
    return {"scores": count.scores(), "types": count.by_type()}


def _tag_error(record: Record, found: Tagged) -> dict[str, Any]:
    from allmask.tasks.tag import named

    words, tags = record.fields["tokens"], record.fields["tags"]
    told = {"where": record.where, "tokens": words, "tags": tags, "prediction": found.tags}
    return told | {"is": named(words, tags), "taken_for": named(words, found.tags)}


def _answers(
    answerer: Answerer, file: Path, limit: int | None, on_bad_record: str, skipped: Counter[str], worst: _Worst
) -> dict[str, Any]:
    from allmask.tasks.answer import asked_of, tell_misplaced, texts_of
    from allmask.tasks.answerer import WINDOW
    from allmask.tasks.exact import AnswerCount
    from allmask.tasks.questions import read_questions
    from allmask.tasks.scores import is_chinese

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


def in_words(result: dict[str, Any]) -> str:
    """Markdown tables: they read well in a terminal and go into a page as they are."""
    scores, many = result["scores"], f"{result['records']:,} records"
    digits = 1 if "scored_as" in result else 3
    lines = [f"| {many} | " + " | ".join(name.replace("_", " ") for name in scores) + " |"]
    lines += ["|---" * (1 + len(scores)) + "|"]
    lines += ["| model | " + " | ".join(f"{value:.{digits}f}" for value in scores.values()) + " |"]
    if "types" in result:
        lines += ["", "| type | there are | precision | recall | F1 |", "|---|---|---|---|---|"]
    for name, row in result.get("types", {}).items():
        lines += [f"| {name} | {row['texts']:,} | {row['precision']:.3f} | {row['recall']:.3f} | {row['f1']:.3f} |"]
    for row in result.get("errors", ()):
        lines += ["", *(_tag_lines(row) if "tokens" in row else _answer_lines(row))]
    return "\n".join(lines)


def _tag_lines(row: dict[str, Any]) -> list[str]:
    return [
        f"{row['where']}: {' '.join(row['tokens'])}",
        f"  is         {row['is']}",
        f"  taken for  {row['taken_for']}",
    ]


def _answer_lines(row: dict[str, Any]) -> list[str]:
    gold = " / ".join(row["gold"]) or "nothing"
    said = f"{row['answer'] or 'nothing'} ({row['score']:.0%})"
    return [f"{row['where']}: {row['question']}", f"  is         {gold}", f"  answered   {said}"]
