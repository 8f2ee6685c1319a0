"""Question answering: the span of a context that answers a question, or none (SQuAD in BERT, arXiv 1810.04805).

    [CLS] question [SEP] context, or a window of it [SEP]

A span is considered only in the window in which its start is farthest from an edge (BERT's "max context"). If the
context may have no answer, the span [CLS] means "no answer".

A record has `id`, `question`, `context` and `answers`, pairs of a text and its start; the list is empty if the context
has no answer. Files are SQuAD 1.1 or 2.0 (CMRC 2018 has the same layout), or have a record per line, with `answer`, a
text or a list, and optionally `start`.
"""

from __future__ import annotations

import json
import logging
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, ClassVar, overload

import numpy as np
import torch
from torch import Tensor

from allmask.config import Config
from allmask.data import Asked, Bad, Batch, DataFile, Example, Maybe, Record, number, read_records, text, usable
from allmask.data.fields import Cell, check_row
from allmask.data.fields import show as _show
from allmask.data.source import kind, open_bytes
from allmask.errors import DataError, UsageError
from allmask.model import Model, Outline
from allmask.nn.heads import SPAN, Labels
from allmask.options import AnswerOptions
from allmask.tasks.common.evaluation import Evaluation, Worst, sample_lines, score_table
from allmask.tasks.common.heads import HeadPredictor, HeadTask, HeldOut, TokenWorkload, frozen, token_answers
from allmask.tasks.common.reading import Frame, most_context, with_marks
from allmask.tasks.common.writing import tokenizer_of
from allmask.tasks.metrics.squad import AnswerCount, best_threshold, marks, units
from allmask.tasks.task import Lengths
from allmask.text import Tokenizer
from allmask.text.script import is_chinese
from allmask.text.truncate import windows
from allmask.training import Score, standard_error

log = logging.getLogger("allmask")
MAX_ANSWER = 30
KEPT = 20  # candidate spans per window and per question
Asking = tuple[str, str]  # a question and its context
Answers = list[tuple[str, int]]  # text and start; -1: the start is not known


@dataclass(frozen=True)
class Answer(AnswerOptions, HeadTask):
    """The options say how questions and contexts become token ids, and which spans may be answers."""

    kinds: ClassVar[tuple[str, ...]] = ("span",)
    both_ways: ClassVar[bool] = True
    batch_size: ClassVar[int] = 16  # windows
    rate: ClassVar[float] = 2.0
    sampled: ClassVar[int] = 300

    def fitted(self, model: Model | Outline) -> Answer:
        """Also limit the question to half of a row."""
        task = super().fitted(model)
        return replace(task, max_question=min(task.max_question, task.max_length // 2))

    # ---- reading -------------------------------------------------------------------------------------------

    def read_data(
        self, data: Path | DataFile, held_out: Path | DataFile | None, on_bad_record: str, skipped: Counter[str]
    ) -> tuple[Answer, list[Record], list[Record]]:
        """Also return the task with the longest answer of the data; training answers must be at their start."""
        questions = read_questions(data, True, on_bad_record, skipped)
        train = list(usable(data, questions, learnable, on_bad_record, skipped))
        others = list(read_questions(held_out, True, on_bad_record, skipped)) if held_out else []
        none = sum(not record.fields["answers"] for record in train)
        log.info("questions: %s, %s of them without an answer", f"{len(train):,}", f"{none:,}")
        warn_misplaced(others)
        lengths = [len(units(record.fields["answers"][0][0])) for record in train if record.fields["answers"]]
        longest = max(MAX_ANSWER, int(np.percentile(lengths or [0], 99)))
        threshold = 0.0 if none and self.threshold is None else self.threshold
        return replace(self, max_answer=self.max_answer or longest, threshold=threshold), train, others

    def rows(self, model: Model, inputs: Sequence[Asking]) -> tuple[list[Context], list[list[View]]]:
        """Return the context of each question, and its windows."""
        tokenizer = tokenizer_of(model)
        contexts = read_contexts(tokenizer, [context for _, context in inputs])
        questions = [question for question, _ in inputs]
        size, most = self.max_length, self.max_question
        return contexts, read_views(tokenizer, model.config, questions, contexts, size, most, self.stride)

    def input_text(self, record: Record) -> str:
        return "\n".join(self.input_of(record))

    def label_counts(self, records: Sequence[Record]) -> Counter[str]:
        return Counter("an answer" if record.fields["answers"] else "no answer" for record in records)

    def lengths(self, model: Model | Outline, records: Sequence[Record]) -> list[Lengths]:
        questions, contexts = (
            [len(one) for one in tokenizer_of(model).encode_batch(list(texts), special=False)]
            for texts in zip(*map(self.input_of, records), strict=True)
        )
        frame = Frame.of(tokenizer_of(model), model.config)
        rows = [
            min(q, self.max_question) + c + 2 * self.max_length - frame.room(2 * self.max_length, 2)
            for q, c in zip(questions, contexts, strict=True)
        ]
        return [
            Lengths("question", questions, self.max_question),
            Lengths("question and context", rows, self.max_length, windows=True),
        ]

    def input_of(self, record: Record) -> Asking:
        return record.fields["question"], record.fields["context"]

    def texts_of(self, records: Sequence[Record]) -> list[str]:
        return list(dict.fromkeys(part for record in records for part in self.input_of(record)))

    def labels_of(self, records: Sequence[Record]) -> Labels:
        return SPAN

    # ---- training ------------------------------------------------------------------------------------------

    def lengths_of(self, model: Model, records: Sequence[Record]) -> Sequence[int]:
        _, questions = self.reading(model, records)
        return [len(view.example) for views in questions for view in views]

    def examples(self, model: Model, records: Sequence[Record], reading: Any, **given: Any) -> AnswerWorkload:
        rows, targets = [], []
        for record, context, views in zip(records, *reading, strict=True):
            answer = learnable(record.fields)
            span = None if answer is None else context.span_of(answer[1], answer[1] + len(answer[0]))
            rows += views
            targets += [view.place(span) for view in views]
        log.info("%s questions in %s windows", f"{len(records):,}", f"{len(rows):,}")
        return AnswerWorkload(rows, np.array(targets), **given)

    def evaluate(self, held_out: HeldOut, model: Model) -> Score:
        found, targets = self._replies(held_out, model), [*map(texts_of, held_out.records)]
        threshold = None if self.threshold is None else self._best_threshold(held_out.records, found)
        count, worst, each = AnswerCount(is_chinese([*chain(*targets)])), Worst(held_out.shown), []
        for record, true, replies in zip(held_out.records, targets, found, strict=True):
            answer = choose(replies, threshold)
            each.append(count.add(answer, true)[1])
            worst.add(1.0 - each[-1], lambda record=record, true=true, answer=answer: sample_lines(
                question=record.fields["question"], true=" / ".join(true) or "nothing", predicted=answer or "nothing"
            ))  # fmt: skip
        samples, metrics = [line for lines in worst.rows() for line in lines], count.scores()
        return Score(metrics["f1"], metrics, samples, stderr=standard_error(100 * f1 for f1 in each), metric="f1")

    def _replies(self, held_out: HeldOut, model: Model) -> list[Replies]:
        return list(reply_all(frozen(model, held_out.precision), self, *held_out.reading))

    def _best_threshold(self, records: Sequence[Record], found: Sequence[Replies]) -> float:
        """Return the threshold with the best score; the task's own if all questions have an answer."""
        targets = [*map(texts_of, records)]
        if all(targets) or self.threshold is None:
            return self.threshold or 0.0
        chinese = is_chinese([*chain(*targets)])
        right = [marks(choose(one, None), true, chinese)[1] for one, true in zip(found, targets, strict=True)]
        return best_threshold([one.null for one in found], right, [bool(true) for true in targets])

    def unit(self, record: Record) -> str:
        """Questions about one context stay together."""
        return record.fields["context"]

    def finish(self, model: Model, held_out: Sequence[Record], out: Path, precision: str = "auto") -> Answer:
        """Choose the best threshold for "no answer" on the held-out questions, if some have no answer."""
        if self.threshold is None or all(record.fields["answers"] for record in held_out):
            return self
        others = HeldOut(self, held_out, self.reading(model, held_out), precision)
        threshold = self._best_threshold(held_out, self._replies(others, model))
        log.info('predicts "no answer" if it beats the best span by %.3g', threshold)
        return replace(self, threshold=threshold)

    def predictor(self, model: Model, precision: str = "auto") -> Answerer:
        return Answerer(model, self, precision)


def texts_of(record: Record) -> list[str]:
    """Return the right answers."""
    return list(dict.fromkeys(answer for answer, _ in record.fields["answers"]))


def warn_misplaced(records: Sequence[Record]) -> None:
    """Warn about answers that are not at their start. They are still used, as scores compare only texts."""
    wrong = 0
    for record in records:
        try:
            learnable(record.fields)
        except Bad:
            wrong += 1
    if wrong:
        log.warning("%s questions have no answer at its offset; they are scored by the text alone", f"{wrong:,}")


class AnswerWorkload(TokenWorkload):
    """The targets, (windows, 2), are the indices in the row of the first and the last token of the answer."""

    def ask(self, batch: Batch, numbers: Sequence[int]) -> Asked:
        group, position = batch.mask.group[0], batch.mask.position[0]
        starts = torch.empty(len(numbers), dtype=torch.long)
        starts[group[position == 0]] = torch.arange(len(group))[position == 0]  # index in the batch of each window
        targets = torch.from_numpy(self.targets[list(numbers)]) + starts[:, None]
        return Asked(torch.ones_like(batch.ids, dtype=torch.bool), targets, name="answer", questions=group)


def choose(found: Replies, threshold: float | None) -> str:
    """Return the best span, or "" if "no answer" beats it by more than `threshold`."""
    if threshold is not None and found.null > threshold:
        return ""
    return next((reply.text for reply in found.best if reply.text), "")


# ---- windows of contexts, and the best spans in them -------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Context:
    """A tokenized text; token i covers the characters starts[i] to ends[i] (exclusive)."""

    text: str
    ids: list[int]
    starts: np.ndarray
    ends: np.ndarray

    def span_of(self, start: int, end: int) -> tuple[int, int] | None:
        """Return the first and the last token of characters `start` to `end` (exclusive); None if there is none."""
        first = int(np.searchsorted(self.ends, start, side="right"))
        last = int(np.searchsorted(self.starts, end, side="left")) - 1
        return (first, last) if first <= last else None

    def characters(self, first: int, last: int) -> tuple[int, int]:
        return int(self.starts[first]), with_marks(self.text, int(self.ends[last]))


@dataclass(frozen=True, eq=False)
class View:
    """A window of a context as a row: tokens `offset` to `offset + count` are tokens `start` and on of the context."""

    example: Example
    offset: int
    start: int
    count: int
    own: np.ndarray  # (count,) True for tokens that have the most context in this window
    null: int  # the index of [CLS]

    def place(self, span: tuple[int, int] | None) -> tuple[int, int]:
        """Return the indices in the row of a span of the context; those of [CLS] if it is not completely inside."""
        if span is None or span[0] < self.start or span[1] >= self.start + self.count:
            return self.null, self.null
        return span[0] - self.start + self.offset, span[1] - self.start + self.offset


@dataclass(frozen=True)
class Span:
    """Tokens `first` to `last` (inclusive) of a context, and the model's score."""

    first: int
    last: int
    score: float


def read_contexts(tokenizer: Tokenizer, texts: Sequence[str]) -> list[Context]:
    """Tokenize contexts; a text that occurs several times is tokenized once."""
    unique = list(dict.fromkeys(texts))
    made = {}
    for entry, encoded in zip(unique, tokenizer.encode_batch(unique, special=False), strict=True):
        offsets = np.array(encoded.offsets, dtype=np.int64).reshape(-1, 2)
        made[entry] = Context(entry, encoded.ids, offsets[:, 0], offsets[:, 1])
    return [made[entry] for entry in texts]


def read_views(
    tokenizer: Tokenizer, config: Config, questions: Sequence[str], contexts: Sequence[Context], size: int, most: int,
    stride: int,
) -> list[list[View]]:  # fmt: skip
    """Return the windows of each question, rows of at most `size` tokens; neighbours share `stride` tokens.

    A question is truncated to `most` tokens.
    """
    frame = Frame.of(tokenizer, config)
    made = []
    for encoded, context in zip(tokenizer.encode_batch(list(questions), special=False), contexts, strict=True):
        question, ids = encoded.ids[:most], context.ids
        room, offset = frame.room(size, texts=2) - len(question), frame.start(question)
        if room < 2:
            raise UsageError(f"no room for a question of {len(question)} tokens in {size}", "raise --max-length")
        spans = windows(len(ids), room, max(1, room - min(stride, room // 2)))
        chosen = most_context(np.arange(len(ids)), spans)
        rows = [frame.row(question, ids[start:stop]) for start, stop in spans]
        made.append([
            View(row, offset, start, stop - start, chosen[start:stop] == number, frame.null % len(row))
            for number, (row, (start, stop)) in enumerate(zip(rows, spans, strict=True))
        ])  # fmt: skip
    return made


def best_spans(views: Sequence[View], answers: Sequence[Tensor], longest: int) -> tuple[list[Span], float]:
    """Return the best spans of a context, best first, and the score of "no answer".

    `answers` (T, 2) are the scores of each row's tokens as a start and as an end.
    """
    found: dict[tuple[int, int], float] = {}
    null = float("inf")
    for view, scores in zip(views, answers, strict=True):
        null = min(null, float(scores[view.null].sum()))
        for first, last, score in _in_view(view, scores, longest):
            found[first, last] = max(score, found.get((first, last), -float("inf")))
    ordered = sorted(found.items(), key=lambda entry: (-entry[1], entry[0]))
    return [Span(first, last, score) for (first, last), score in ordered[:KEPT]], null


def _in_view(view: View, scores: Tensor, longest: int) -> list[tuple[int, int, float]]:
    inside = scores[view.offset : view.offset + view.count]  # the context alone
    if not len(inside):
        return []
    start = inside[:, 0].masked_fill(~torch.from_numpy(view.own), -float("inf"))
    longest = min(longest, len(inside))
    ends = torch.nn.functional.pad(inside[:, 1], (0, longest - 1), value=-float("inf"))
    sums = start[:, None] + ends.unfold(0, longest, 1)  # (count, longest): start, and length - 1
    best = sums.flatten().topk(min(KEPT, sums.numel()))
    found = []
    for value, index in zip(best.values.tolist(), best.indices.tolist(), strict=True):
        if value > -float("inf"):
            first = view.start + index // longest
            found.append((first, first + index % longest, value))
    return found


# ---- using a trained model ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Reply:
    """Characters `start` to `end` (exclusive) of the context; an empty text means "no answer".

    `score` is the probability among the best spans and, if the model was trained with such questions, "no answer".
    """

    text: str
    start: int | None
    end: int | None
    score: float

    def to_dict(self) -> dict[str, Any]:
        return {"answer": self.text, "start": self.start, "end": self.end, "score": self.score}


@dataclass(frozen=True)
class Replies:
    """The best answers, best first, and the margin by which "no answer" beats the best span."""

    best: list[Reply]
    null: float


@dataclass
class Answerer(HeadPredictor[Asking, Replies]):
    does: ClassVar[str] = "answers questions"
    done: ClassVar[str] = "answered"
    options: ClassVar[frozenset[str]] = frozenset({"n_best"})
    hidden: ClassVar[frozenset[str]] = frozenset({"context"})  # a long text, the same for many questions

    @overload
    def __call__(self, questions: str, context: str) -> Reply: ...
    @overload
    def __call__(self, questions: Sequence[Asking], context: None = None) -> list[Reply]: ...

    def __call__(self, questions: str | Sequence[Asking], context: str | None = None) -> Reply | list[Reply]:
        """`answer(question, context)`, or a list of such pairs."""
        if isinstance(questions, str):
            return next(self.stream([_checked((questions, context))])).best[0]
        return [found.best[0] for found in self.stream(_checked(entry) for entry in questions)]

    def n_best(self, question: str, context: str, count: int) -> list[Reply]:
        return next(self.stream([_checked((question, context))])).best[:count]

    def results(self, inputs: Sequence[Asking]) -> Iterator[Replies]:
        return reply_all(self.frozen, self.task, *self.task.rows(self.model, inputs))

    def records(self, path: Path | DataFile, targets: bool, **how: Any) -> Iterator[Record]:
        return read_questions(path, targets, **how)

    def predict(self, records: Sequence[Record], n_best: int = 1, **options: Any) -> Iterator[dict[str, Any]]:
        for found in self.results([*map(self.task.input_of, records)]):
            best = [one.to_dict() for one in found.best[:n_best]]
            yield {"answers": best} if n_best > 1 else best[0]

    def evaluate(self, records: Iterable[Record], show: int = 0, quiet: bool = True, **options: Any) -> Evaluation:
        chosen = list(records)
        warn_misplaced(chosen)
        count = AnswerCount(is_chinese([*chain(*map(texts_of, chosen))]))
        worst = Worst(show)
        for record, found in self.stream_records(chosen):
            reply = found.best[0]
            _, f1 = count.add(reply.text, texts_of(record))
            worst.add((1.0 - f1) * reply.score, lambda record=record, reply=reply, f1=f1: {
                "where": record.where, "question": record.fields["question"], "targets": texts_of(record), "f1": f1,
                **reply.to_dict(),
            })  # fmt: skip
        errors = worst.rows()
        values = {"scores": count.scores(), "scored_as": "CMRC 2018" if count.chinese else "SQuAD"}
        values |= {"errors": errors} if show else {}
        lines = []
        for row in errors:
            true = f"  true       {' / '.join(row['targets']) or 'nothing'}"
            predicted = f"  predicted  {row['answer'] or 'nothing'} ({row['score']:.0%})"
            lines.append([f"{row['where']}: {row['question']}", true, predicted])
        return Evaluation(len(chosen), values, [score_table(count.scores(), 1)], examples=lines)


def _checked(entry: Any) -> Asking:
    if isinstance(entry, tuple | list) and len(entry) == 2 and all(isinstance(part, str) and part for part in entry):
        return entry[0], entry[1]
    raise UsageError(f"answer: {entry!r} is not a question with its context", 'pass ("question", "context")')


def reply_all(
    model: Model, task: Answer, contexts: Sequence[Context], views: Sequence[Sequence[View]]
) -> Iterator[Replies]:
    """Yield the best answers to each question, given its context and its windows."""
    examples = [view.example for question in views for view in question]
    answers = iter(token_answers(model, examples, [np.arange(len(example)) for example in examples]))
    for context, question in zip(contexts, views, strict=True):
        spans, null = best_spans(question, [next(answers) for _ in question], task.max_answer or MAX_ANSWER)
        yield replies(context, spans, null, task.threshold)


def replies(context: Context, spans: Sequence[Span], null: float, threshold: float | None) -> Replies:
    """Return the texts of spans; "no answer" comes first if it beats the best span by more than `threshold`."""
    scores = [span.score for span in spans] + ([] if threshold is None and spans else [null])
    shares = torch.tensor(scores).softmax(0).tolist()
    best = []
    for span, share in zip(spans, shares, strict=False):
        start, end = context.characters(span.first, span.last)
        best.append(Reply(context.text[start:end], start, end, share))
    margin = null - spans[0].score if spans else float("inf")
    nothing = [Reply("", None, None, shares[-1])] if len(scores) > len(spans) else []
    if not nothing or not spans:
        return Replies(best or nothing, margin)
    if threshold is not None and margin > threshold:
        return Replies([*nothing, *best], margin)
    return Replies([best[0], *sorted([*best[1:], *nothing], key=lambda one: -one.score)], margin)


# ---- files -------------------------------------------------------------------------------------------------------


def read_questions(
    path: Path | DataFile, targets: bool, on_bad_record: str = "stop", skipped: Counter[str] | None = None
) -> Iterator[Record]:
    """Read questions. With `targets` each must have `answers`; without, the answers are left out."""
    articles = _squad(path)
    if articles is not None:
        return usable(
            path, _squad_questions(path, articles), partial(_check_squad, targets=targets), on_bad_record, skipped
        )
    unchecked = Maybe(lambda value: value)
    fields = {"question": text, "context": text}
    if not targets:
        return read_records(path, fields, on_bad_record, skipped)
    fields |= {"answer": unchecked, "start": unchecked, "answers": unchecked}
    return usable(path, read_records(path, fields, on_bad_record, skipped), _check_line, on_bad_record, skipped)


def learnable(fields: dict[str, Any]) -> tuple[str, int] | None:
    """Return the answer to train on, the first one that the context has at its start; None if there is no answer."""
    answers: Answers = fields["answers"]
    if not answers:
        return None
    context = fields["context"]
    for answer, start in answers:
        if start >= 0 and context[start : start + len(answer)] == answer:
            return answer, start
    answer, start = answers[0]
    found = context[start : start + len(answer)] if start >= 0 else ""
    at = context.find(answer)
    what = f"the answer {_show(answer)} is not at {start} of its context" + (f", {_show(found)} is" if found else "")
    hint = f"it is at {at}: fix the start" if at >= 0 else "it is nowhere in the context: fix the answer"
    raise Bad("answer not at its offset", what, hint)


def _check_line(fields: dict[str, Any]) -> None:
    """Replace `answer` and `start`, or `answers` as the datasets library has them, by `answers`."""
    given = fields.pop("answers")
    if isinstance(given, list) and all(isinstance(one, dict) for one in given):
        given = {name: [one.get(name) for one in given] for name in ("text", "answer_start")}
    if isinstance(given, dict):
        fields["answer"], fields["start"] = given.get("text"), given.get("answer_start")
    elif fields["answer"] is None:
        fields["answer"] = given
    answers = [check_row({"answer": text}, {"answer": one})["answer"] for one in _several(fields.pop("answer"))]
    starts = [check_row({"start": _whole}, {"start": one})["start"] for one in _several(fields.pop("start"))]
    starts = starts or [fields["context"].find(answer) for answer in answers]
    if len(starts) != len(answers):
        raise Bad("wrong number of starts", f"{len(answers)} answers but {len(starts)} starts")
    fields["answers"] = list(zip(answers, starts, strict=True))


def _several(value: Any) -> list[Any]:
    if isinstance(value, Cell) and value.lstrip().startswith("["):
        try:
            value = json.loads(value)
        except ValueError:
            return [value]
    return value if isinstance(value, list) else [] if value is None else [value]


def _whole(value: Any) -> int:
    start = number(value)
    if start != int(start):
        raise Bad("wrong type", f"is {_show(value)}; expected a whole number")
    return int(start)


def _squad(path: Path | DataFile) -> list[Any] | None:
    """Return the articles of a file in SQuAD's layout; None for any other file."""
    if kind(path) != ".json" or not Path(path).is_file():
        return None
    with open_bytes(path) as stream:
        try:
            found = json.loads(stream.read().decode("utf-8-sig"))
        except (ValueError, RecursionError):
            return None  # perhaps a record per line; if not, that reader reports the error
    if not isinstance(found, dict) or "data" not in found:
        return None
    if not isinstance(found["data"], list):
        raise DataError(f'{path}: "data" is {_show(found["data"])}; expected a list', "check how the file was made")
    return found["data"]


def _squad_questions(path: Path | DataFile, articles: list[Any]) -> Iterator[Record]:
    """Yield the questions of the articles, each with its paragraph, unchecked."""

    def listed(entry: Any, name: str, where: str) -> list[Any]:
        found = entry.get(name) if isinstance(entry, dict) else None
        if not isinstance(found, list):
            raise DataError(f"{where}: no {_show(name)}", "expected the layout of SQuAD: data, paragraphs, qas")
        return found

    for article_number, article in enumerate(articles, 1):
        place = f"{path}: article {article_number}"
        for paragraph_number, paragraph in enumerate(listed(article, "paragraphs", place), 1):
            where = f"{place}, paragraph {paragraph_number}"
            for question_number, entry in enumerate(listed(paragraph, "qas", where), 1):
                name = entry.get("id") if isinstance(entry, dict) else None
                named = f"{where}, question {question_number}" if name is None else f"{path}: question {name}"
                yield Record({"paragraph": paragraph, "entry": entry}, named)


def _check_squad(fields: dict[str, Any], targets: bool) -> None:
    """Replace the fields of `_squad_questions` by `id`, `question`, `context` and, with `targets`, `answers`."""
    paragraph, entry = fields.pop("paragraph"), fields.pop("entry")
    try:
        _expect_object(entry, "is")
        found = {name: owner[name] for name, owner in (("question", entry), ("context", paragraph)) if name in owner}
        fields |= {"id": entry.get("id"), **check_row({"question": text, "context": text}, found)}
        if targets:
            fields["answers"] = _squad_answers(entry)
    except Bad as bad:
        raise Bad(bad.reason, bad.what, "fix the question") from None


def _squad_answers(entry: dict[str, Any]) -> Answers:
    answers = entry.get("answers")
    if not isinstance(answers, list) or (not answers and not entry.get("is_impossible", answers == [])):
        raise Bad("missing field", 'no "answers"')
    found = []
    for answer in [] if entry.get("is_impossible") else answers:
        _expect_object(answer, '"answers" has')
        row = check_row({"answer_start": _whole, "text": text}, answer)
        found.append((row["text"], row["answer_start"]))
    return found


def _expect_object(value: Any, what: str) -> None:
    if not isinstance(value, dict):
        raise Bad("not an object", f"{what} {_show(value)}; expected an object")
