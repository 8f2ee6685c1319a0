"""Questions about contexts out of files: SQuAD 1.1 and 2.0 (and CMRC 2018, which looks alike), or a record a line.

A record has `id`, `question`, `context`, and `answers`, pairs of a text and where it starts; none where the context
has no answer. One a line has `answer`, text or a list, and perhaps `start`.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from allmask.data import Bad, Maybe, Record, number, read_records, text
from allmask.data.fields import Cell, show
from allmask.data.lines import open_bytes
from allmask.errors import DataError

Answers = list[tuple[str, int]]  # text and start; -1: it is not known where
_SKIP = "or pass --on-bad-record skip"


def read_questions(
    path: Path, answered: bool, on_bad_record: str = "stop", skipped: Counter[str] | None = None,
    keep: Sequence[str] = (),
) -> Iterator[Record]:  # fmt: skip
    """The questions of a file. `answered`: right answers are asked for; otherwise there are none in the records."""
    skipped = Counter() if skipped is None else skipped
    whole = _squad(path)
    found = (
        _of_squad(path, whole, answered)
        if whole is not None
        else _of_lines(path, answered, on_bad_record, skipped, keep)
    )
    some, reasons = False, Counter[str]()
    for where, made in found:
        if isinstance(made, Bad):
            if on_bad_record == "stop":
                raise DataError(f"{where}: {made.what}", f"{made.hint}, {_SKIP}")
            reasons[made.reason] += 1
            continue
        some = True
        yield Record(made, where)
    skipped.update(reasons)
    if not some:
        counts = ", ".join(f"{count} × {reason}" for reason, count in reasons.items())
        hint = f"skipped {counts}" if counts else "check how the file was made"
        raise DataError(f"{path}: there is no question in it that can be used", hint)


def learnable(fields: dict[str, Any]) -> tuple[str, int] | None:
    """The answer to learn: the first that stands where it is said to; None where the context has no answer."""
    answers: Answers = fields["answers"]
    if not answers:
        return None
    for said, start in answers:
        if start >= 0 and fields["context"][start : start + len(said)] == said:
            return said, start
    raise misplaced(fields["context"], *answers[0])


def misplaced(context: str, said: str, start: int) -> Bad:
    there = context[start : start + len(said)] if start >= 0 else ""
    at = context.find(said)
    what = f"the answer {show(said)} is not at {start} of its context" + (f", {show(there)} is" if there else "")
    hint = f"it is at {at}: fix the start" if at >= 0 else "it is nowhere in it: fix the answer"
    return Bad("answer not at its offset", what, hint)


# ---- SQuAD -----------------------------------------------------------------------------------------------------


def _squad(path: Path) -> list[Any] | None:
    """What a file in SQuAD's layout holds; None if it is another."""
    if Path(path.name.removesuffix(".gz")).suffix.lower() != ".json" or not path.is_file():
        return None
    with open_bytes(path) as stream:
        try:
            found = json.loads(stream.read().decode("utf-8-sig"))
        except (ValueError, RecursionError):
            return None  # perhaps a record a line; if not, that reader says where
    if not isinstance(found, dict) or "data" not in found:
        return None
    if not isinstance(found["data"], list):
        raise DataError(f'{path}: "data" is {show(found["data"])}; expected a list', "check how the file was made")
    return found["data"]


def _of_squad(path: Path, data: list[Any], answered: bool) -> Iterator[tuple[str, dict[str, Any] | Bad]]:
    for number_of, article in enumerate(data, 1):
        for paragraph_number, paragraph in enumerate(_listed(article, "paragraphs", f"{path}: article {number_of}"), 1):
            where = f"{path}: article {number_of}, paragraph {paragraph_number}"
            for place, entry in enumerate(_listed(paragraph, "qas", where), 1):
                name = entry.get("id") if isinstance(entry, dict) else None
                told = f"{where}, question {place}" if name is None else f"{path}: question {name}"
                try:
                    yield told, _question(paragraph, entry, answered)
                except Bad as bad:
                    yield told, bad


def _listed(entry: Any, name: str, where: str) -> list[Any]:
    found = entry.get(name) if isinstance(entry, dict) else None
    if not isinstance(found, list):
        raise DataError(f"{where}: no {show(name)}", "expected the layout of SQuAD: data, paragraphs, qas")
    return found


def _question(paragraph: dict[str, Any], entry: Any, answered: bool) -> dict[str, Any]:
    if not isinstance(entry, dict):
        raise Bad("not an object", f"is {show(entry)}; expected an object", "fix the question")
    made = {"id": entry.get("id"), "question": _text(entry, "question"), "context": _text(paragraph, "context")}
    if not answered:
        return made
    given = entry.get("answers")
    if not isinstance(given, list) or (not given and not entry.get("is_impossible", given == [])):
        raise Bad("missing field", 'no "answers"', "fix the question")
    impossible = bool(entry.get("is_impossible", False))
    return made | {"answers": [] if impossible else [_answer(one) for one in given]}


def _answer(entry: Any) -> tuple[str, int]:
    if not isinstance(entry, dict):
        raise Bad("not an object", f'"answers" has {show(entry)}; expected an object', "fix the question")
    start = entry.get("answer_start")
    if isinstance(start, bool) or not isinstance(start, int):
        raise Bad("wrong type", f'"answer_start" is {show(start)}; expected a whole number', "fix the question")
    return _text(entry, "text"), start


def _text(entry: dict[str, Any], name: str) -> str:
    if name not in entry:
        raise Bad("missing field", f"no {show(name)}", "fix the question")
    try:
        return text(entry[name])
    except Bad as bad:
        raise Bad(bad.reason, f"{show(name)} {bad.what}", "fix the question") from None


# ---- a record a line -------------------------------------------------------------------------------------------


def _of_lines(
    path: Path, answered: bool, on_bad_record: str, skipped: Counter[str], keep: Sequence[str]
) -> Iterator[tuple[str, dict[str, Any] | Bad]]:
    as_it_is = Maybe(lambda value: value)
    fields = {name: as_it_is for name in ("id", *keep)} | {"question": text, "context": text}
    if answered:
        fields |= {"answer": as_it_is, "start": as_it_is}
    for record in read_records(path, fields, on_bad_record, skipped):
        try:
            yield record.where, _line(record.fields) if answered else record.fields
        except Bad as bad:
            yield record.where, bad


def _line(fields: dict[str, Any]) -> dict[str, Any]:
    given, starts = _several(fields["answer"]), _several(fields["start"])
    said = [text(one) for one in given]
    places = [_whole(one) for one in starts] or [fields["context"].find(one) for one in said]
    if len(places) != len(said):
        raise Bad("wrong number of starts", f"{len(said)} answers but {len(places)} starts")
    kept = {name: value for name, value in fields.items() if name not in ("answer", "start")}
    return kept | {"answers": list(zip(said, places, strict=True))}


def _several(value: Any) -> list[Any]:
    if isinstance(value, Cell) and value.lstrip().startswith("["):
        try:
            value = json.loads(value)
        except ValueError:
            return [value]
    return value if isinstance(value, list) else [] if value is None else [value]


def _whole(value: Any) -> int:
    try:
        place = number(value)
    except Bad as bad:
        raise Bad(bad.reason, f'"start" {bad.what}') from None
    if place != int(place):
        raise Bad("wrong type", f'"start" is {show(value)}; expected a whole number')
    return int(place)
