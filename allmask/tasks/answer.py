"""Answering: the piece of a context that answers a question, or none (SQuAD in BERT, arXiv 1810.04805).

    [CLS] question [SEP] context, or a window of it [SEP]

A start counts only in the window in which it stands farthest from the edge (BERT's rule of the most context). Where a
context may hold no answer, [CLS] is the span that says so.

Files are SQuAD 1.1 and 2.0 (and CMRC 2018, which looks alike), or have a record a line. A record has `id`, `question`,
`context`, and `answers`, pairs of a text and where it starts; none where the context has no answer. A line has
`answer`, text or a list, and perhaps `start`.
"""

from __future__ import annotations

import json
import logging
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any, ClassVar, overload

import numpy as np
import torch
from torch import Tensor

from allmask.config import Config
from allmask.data import Asked, Bad, Batch, Example, Maybe, Record, number, pack, read_records, text, usable
from allmask.data.fields import Cell
from allmask.data.fields import show as _show
from allmask.data.records import open_bytes
from allmask.errors import CheckpointError, DataError, UsageError
from allmask.model import Model
from allmask.nn.heads import SPAN
from allmask.options import AnswerOptions
from allmask.tasks.common.auxiliary import Auxiliary
from allmask.tasks.common.evaluation import Evaluation, Worst, score_table, shortened
from allmask.tasks.common.heads import asking_tokens, expect_both_ways, frozen, rate_for, token_answers, with_head
from allmask.tasks.common.reading import Frame, most_context, with_marks
from allmask.tasks.common.writing import tokenizer_of
from allmask.tasks.metrics.squad import AnswerCount, best_threshold, marks, units
from allmask.tasks.metrics.text import is_chinese
from allmask.tasks.task import ModelFolder, Predictor, Task
from allmask.text import Tokenizer
from allmask.text.truncate import windows
from allmask.training import Score, standard_error

log = logging.getLogger("allmask")
BATCH = 16  # windows a step, about
RATE = 2.0  # times a classifier's learning rate
MAX_ANSWER = 30
KEPT = 20  # spans of a window that are looked at
Asking = tuple[str, str]  # a question and its context
Answers = list[tuple[str, int]]  # text and start; -1: it is not known where
_SKIP = "or pass --on-bad-record skip"


@dataclass(frozen=True)
class Answer(AnswerOptions, Task):
    """The task as it is saved with a model: how questions and contexts become ids, and which spans may be answers."""

    def fitted(self, model: Model) -> Answer:
        """The same with rows no longer than the model's positions, half of them for the question at most."""
        tokenizer_of(model)
        expect_both_ways(model, "answer")
        size = min(self.max_length, model.config.max_positions)
        return replace(self, max_length=size, max_question=min(self.max_question, size // 2))

    # ---- reading -------------------------------------------------------------------------------------------

    def read_data(
        self, data: Path, held_out: Path | None, on_bad_record: str, skipped: Counter[str]
    ) -> tuple[Answer, list[Record], list[Record]]:
        """The task with the lengths of the data, and the questions; those to learn from have an answer at its place."""
        asked = read_questions(data, True, on_bad_record, skipped)
        train = list(usable(data, asked, learnable, on_bad_record, skipped))
        others = list(read_questions(held_out, True, on_bad_record, skipped)) if held_out else []
        none = sum(not record.fields["answers"] for record in train)
        log.info("questions: %s, %s of them without an answer", f"{len(train):,}", f"{none:,}")
        warn_misplaced(others)
        lengths = [len(units(record.fields["answers"][0][0])) for record in train if record.fields["answers"]]
        longest = max(MAX_ANSWER, int(np.percentile(lengths or [0], 99)))
        threshold = 0.0 if none and self.threshold is None else self.threshold
        return replace(self, max_answer=self.max_answer or longest, threshold=threshold), train, others

    def read(self, model: Model, asked: Sequence[Asking]) -> tuple[list[Context], list[list[View]]]:
        tokenizer = tokenizer_of(model)
        contexts = read_contexts(tokenizer, [context for _, context in asked])
        views = read_views(
            tokenizer, model.config, [question for question, _ in asked], contexts, self.max_length, self.max_question,
            self.stride,
        )  # fmt: skip
        return contexts, views

    # ---- learning ------------------------------------------------------------------------------------------

    def suggested_settings(self, model: Model, records: Sequence[Record]) -> dict[str, Any]:
        """A learning rate for the model's width, and tokens for about 16 windows a step."""
        chosen = records[:: max(1, len(records) // 300)]
        _, views = self.read(model, [asked_of(record) for record in chosen])
        lengths = [len(view.example) for some in views for view in some]
        return {"lr": RATE * rate_for(model), "batch_tokens": int(np.ceil(BATCH * np.mean(lengths)))}

    def prepare(
        self, model: Model, records: Sequence[Record], seed: int = 0, prune: bool = False, language: bool = False
    ) -> Model:
        """A model with a head for starts and ends, without heads that are not used."""
        texts = dict.fromkeys(part for record in records for part in asked_of(record))
        return with_head(model, SPAN, list(texts), seed, prune, language)

    def workload(
        self, model: Model, records: Sequence[Record], held_out: Sequence[Record] = (),
        auxiliary: Auxiliary | None = None, precision: str = "auto",
    ) -> AnswerWorkload:  # fmt: skip
        contexts, views = self.read(model, [asked_of(record) for record in records])
        targets = []
        for record, context, some in zip(records, contexts, views, strict=True):
            right = learnable(record.fields)
            span = None if right is None else context.span_of(right[1], right[1] + len(right[0]))
            targets += [view.place(span) for view in some]
        rows = [view for some in views for view in some]
        log.info("%s questions in %s windows", f"{len(records):,}", f"{len(rows):,}")
        evaluator = Evaluator(self, list(held_out), *self.read(model, [asked_of(one) for one in held_out]), precision)
        return AnswerWorkload(rows, np.array(targets), evaluator if held_out else None, auxiliary)

    def finish(self, model: Model, held_out: Sequence[Record], out: Path, precision: str = "auto") -> Answer:
        """Choose the threshold for "no answer" that scores best on the held-out questions, if some have no answer."""
        if self.threshold is None or all(record.fields["answers"] for record in held_out):
            return self
        evaluator = Evaluator(self, list(held_out), *self.read(model, [asked_of(one) for one in held_out]), precision)
        threshold = evaluator.threshold(evaluator.replies(model))
        log.info('predicts "no answer" if it beats the best span by %.3g', threshold)
        return replace(self, threshold=threshold)

    # ---- using ---------------------------------------------------------------------------------------------

    @classmethod
    def default_for(cls, opened: ModelFolder) -> Answer | None:
        labels = opened.model.labels
        return cls() if labels is not None and labels.kind == "span" else None

    def predictor(self, model: Model, precision: str = "auto") -> Answerer:
        return Answerer(model, self, precision)


def asked_of(record: Record) -> Asking:
    return record.fields["question"], record.fields["context"]


def warn_misplaced(records: Sequence[Record]) -> None:
    """Warn of answers that are not at their place; scoring goes by texts alone, so they do no harm."""
    wrong = 0
    for record in records:
        try:
            learnable(record.fields)
        except Bad:
            wrong += 1
    if wrong:
        log.warning("%s questions have no answer at its offset; they are scored by its text", f"{wrong:,}")


@dataclass
class AnswerWorkload:
    """What the training loop asks for: windows by number, and an evaluator."""

    views: list[View]
    targets: np.ndarray  # (windows, 2) where in its row the answer starts and ends
    evaluator: Evaluator | None = None
    auxiliary: Auxiliary | None = None

    def __post_init__(self):
        self.lengths = [len(view.example) for view in self.views]

    def batch(self, numbers: Sequence[int], epoch: int) -> Batch:
        examples = [self.views[number].example for number in numbers]
        batch = pack(examples)
        group, position = batch.mask.group[0], batch.mask.position[0]
        starts = torch.empty(len(numbers), dtype=torch.long)
        starts[group[position == 0]] = torch.arange(len(group))[position == 0]  # where in the row each text begins
        targets = torch.from_numpy(self.targets[list(numbers)]) + starts[:, None]
        asked = Asked(torch.ones_like(batch.ids, dtype=torch.bool), targets, name="answer", questions=group)
        return asking_tokens(batch, asked, examples, numbers, epoch, self.auxiliary)

    def evaluate(self, model: Model, step: int = 0) -> Score | None:
        return None if self.evaluator is None else self.evaluator(model)

    def cache_features(self, model: Model, precision: str) -> None:
        """Every token is asked: keeping the hidden states of all of them would take too much memory."""


@dataclass
class Evaluator:
    """Exact match and F1 on the held-out questions, and a few of the errors to look at."""

    task: Answer
    records: list[Record]
    contexts: list[Context]
    views: list[list[View]]
    precision: str = "auto"
    shown: int = 2

    def __call__(self, model: Model) -> Score:
        found = self.replies(model)
        threshold = self.threshold(found)
        said = [choose(one, threshold if self.task.threshold is not None else None) for one in found]
        count = AnswerCount(self.chinese)
        each = [count.add(answer, texts_of(record))[1] for answer, record in zip(said, self.records, strict=True)]
        worst = sorted(range(len(each)), key=lambda number: each[number])[: self.shown]
        samples = [line for number in worst if each[number] < 1.0 for line in self._sample(number, said[number])]
        metrics = count.scores()
        return Score(metrics["f1"], metrics, samples, stderr=standard_error(100 * f1 for f1 in each), metric="f1")

    @property
    def chinese(self) -> bool:
        return is_chinese([answer for record in self.records for answer in texts_of(record)])

    def replies(self, model: Model) -> list[Replies]:
        return list(reply_all(frozen(model, self.precision), self.task, self.contexts, self.views))

    def threshold(self, found: Sequence[Replies]) -> float:
        """The threshold that scores best here; the task's own where all questions have an answer."""
        targets = [texts_of(record) for record in self.records]
        if all(targets) or self.task.threshold is None:
            return self.task.threshold or 0.0
        chinese = self.chinese
        right = [marks(choose(one, None), target, chinese)[1] for one, target in zip(found, targets, strict=True)]
        return best_threshold([one.null for one in found], right, [bool(target) for target in targets])

    def _sample(self, number: int, said: str) -> list[str]:
        record = self.records[number]
        right = " / ".join(texts_of(record)) or "nothing"
        rows = {"question": record.fields["question"], "true": right, "predicted": said or "nothing"}
        return [*(f"  {name:9}  {shortened(value)}" for name, value in rows.items()), ""]


def texts_of(record: Record) -> list[str]:
    """The right answers."""
    return list(dict.fromkeys(answer for answer, _ in record.fields["answers"]))


def choose(found: Replies, threshold: float | None) -> str:
    """The best span, or "no answer" if that beats it by more than `threshold`."""
    if threshold is not None and found.null > threshold:
        return ""
    return next((reply.text for reply in found.best if reply.text), "")


# ---- windows of contexts, and the best spans in them -------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Context:
    """A text in tokens, and the characters of the text that each token covers."""

    text: str
    ids: list[int]
    starts: np.ndarray
    ends: np.ndarray

    def span_of(self, start: int, end: int) -> tuple[int, int] | None:
        """The first and the last token that cover characters `start` to before `end`; None if no token does."""
        first = int(np.searchsorted(self.ends, start, side="right"))
        last = int(np.searchsorted(self.starts, end, side="left")) - 1
        return (first, last) if first <= last else None

    def characters(self, first: int, last: int) -> tuple[int, int]:
        return int(self.starts[first]), with_marks(self.text, int(self.ends[last]))


@dataclass(frozen=True, eq=False)
class View:
    """A window of a context as a row: its token `offset` is token `start` of the context, and so on for `count`."""

    example: Example
    offset: int
    start: int
    count: int
    own: np.ndarray  # (count,) tokens that have the most context here
    null: int  # where [CLS] is

    def place(self, span: tuple[int, int] | None) -> tuple[int, int]:
        """Where in the row a span of the context is; at [CLS] if not all of it is here."""
        if span is None or span[0] < self.start or span[1] >= self.start + self.count:
            return self.null, self.null
        return span[0] - self.start + self.offset, span[1] - self.start + self.offset


@dataclass(frozen=True)
class Span:
    """Tokens `first` to `last` of a context, both included, and the model's score."""

    first: int
    last: int
    score: float


def read_contexts(tokenizer: Tokenizer, texts: Sequence[str]) -> list[Context]:
    """The contexts in the order given; a text that occurs several times is tokenized once."""
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
    """Windows for each question, of `size` tokens, the question's `most` among them; neighbours share `stride`."""
    frame = Frame.of(tokenizer, config)
    ids = [encoded.ids[:most] for encoded in tokenizer.encode_batch(list(questions), special=False)]
    return [_views(frame, question, context, size, stride) for question, context in zip(ids, contexts, strict=True)]


def _views(frame: Frame, question: list[int], context: Context, size: int, stride: int) -> list[View]:
    room = frame.room(size, texts=2) - len(question)
    if room < 2:
        raise UsageError(f"rows of {size} tokens have no room for a question of {len(question)}", "raise --max-length")
    spans = windows(len(context.ids), room, max(1, room - min(stride, room // 2)))
    chosen = most_context(np.arange(len(context.ids)), spans)
    offset, made = frame.start(question), []
    for window, (start, stop) in enumerate(spans):
        row, own = frame.row(question, context.ids[start:stop]), chosen[start:stop] == window
        made.append(View(row, offset, start, stop - start, own, frame.null % len(row)))
    return made


def best_spans(views: Sequence[View], answers: Sequence[Tensor], longest: int) -> tuple[list[Span], float]:
    """The best spans of a context, best first, and the score of "no answer".

    `answers` (T, 2) are scores of all tokens of each row as a start and as an end.
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
    sums = start[:, None] + ends.unfold(0, longest, 1)  # (count, longest): by start and by how many follow it
    best = sums.flatten().topk(min(KEPT, sums.numel()))
    rows = zip(best.values.tolist(), best.indices.tolist(), strict=True)
    return [
        (view.start + place // longest, view.start + place // longest + place % longest, value)
        for value, place in rows
        if value > -float("inf")
    ]


# ---- using a trained model ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Reply:
    """Characters `start` to before `end` of the context; an empty text is "no answer".

    `score` is the probability among the best spans and, where the model was trained with such questions, no answer.
    """

    text: str
    start: int | None
    end: int | None
    score: float

    def to_dict(self) -> dict[str, Any]:
        return {"answer": self.text, "start": self.start, "end": self.end, "score": self.score}


@dataclass(frozen=True)
class Replies:
    """The best answers, best first, and by how much "no answer" beats the best span."""

    best: list[Reply]
    null: float


@dataclass
class Answerer(Predictor):
    """A model with a head for spans, laid out for speed, and how questions become ids for it."""

    model: Model
    task: Answer
    precision: str = "auto"  # fp32, bf16, int8; auto: bf16 where it is quick

    does: ClassVar[str] = "answers questions"
    done: ClassVar[str] = "answered"
    options: ClassVar[frozenset[str]] = frozenset({"n_best"})
    hidden: ClassVar[frozenset[str]] = frozenset({"context"})  # a long text, the same for many questions

    def __post_init__(self):
        if self.model.labels is None or self.model.labels.kind != "span":
            raise CheckpointError("this model has no head for answers", "teach it: allmask finetune --task answer")
        self.task = self.task.fitted(self.model)
        self.frozen = frozen(self.model, self.precision)

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

    def stream(self, questions: Iterable[Asking], window: int | None = None) -> Iterator[Replies]:
        """The best answers to each, in their order, with no more than a window of them in memory."""
        source = iter(questions)
        while some := list(islice(source, window or self.window)):
            contexts, views = self.task.read(self.model, some)
            yield from reply_all(self.frozen, self.task, contexts, views)

    def read(
        self, path: Path, on_bad_record: str = "stop", skipped: Counter[str] | None = None, keep: Sequence[str] = (),
        targets: bool = False, limit: int | None = None,
    ) -> Iterator[Record]:  # fmt: skip
        return islice(read_questions(path, targets, on_bad_record, skipped, keep), limit)

    def predict(self, records: Sequence[Record], n_best: int = 1, **options: Any) -> Iterator[dict[str, Any]]:
        for found in self.stream((asked_of(record) for record in records), len(records)):
            best = [one.to_dict() for one in found.best[:n_best]]
            yield {"answers": best} if n_best > 1 else best[0]

    def evaluate(self, records: Iterable[Record], show: int = 0, quiet: bool = True, **options: Any) -> Evaluation:
        chosen = list(records)
        warn_misplaced(chosen)
        count = AnswerCount(is_chinese([answer for record in chosen for answer in texts_of(record)]))
        worst = Worst(show)
        for record, found in zip(chosen, self.stream(asked_of(record) for record in chosen), strict=True):
            reply = found.best[0]
            _, f1 = count.add(reply.text, texts_of(record))
            worst.add((1.0 - f1) * reply.score, lambda record=record, reply=reply, f1=f1: {
                "where": record.where, "question": record.fields["question"], "targets": texts_of(record), "f1": f1,
                **reply.to_dict(),
            })  # fmt: skip
        errors = worst.rows()
        values = {"scores": count.scores(), "scored_as": "CMRC 2018" if count.chinese else "SQuAD"}
        values |= {"errors": errors} if show else {}
        examples = [_lines(row) for row in errors]
        return Evaluation(len(chosen), values, [score_table(count.scores(), 1)], examples=examples)


def _lines(error: dict[str, Any]) -> list[str]:
    right = " / ".join(error["targets"]) or "nothing"
    said = f"{error['answer'] or 'nothing'} ({error['score']:.0%})"
    return [f"{error['where']}: {error['question']}", f"  true       {right}", f"  predicted  {said}"]


def _checked(entry: Any) -> Asking:
    if isinstance(entry, tuple | list) and len(entry) == 2 and all(isinstance(part, str) and part for part in entry):
        return entry[0], entry[1]
    raise UsageError(f"answer: {entry!r} is no question with its context", 'pass ("question", "context")')


def reply_all(
    model: Model, task: Answer, contexts: Sequence[Context], views: Sequence[Sequence[View]]
) -> Iterator[Replies]:
    """The best answers of a model to each question, whose contexts and windows were read."""
    flat = [view for some in views for view in some]
    places = [np.arange(len(view.example)) for view in flat]
    answers = iter(token_answers(model, [view.example for view in flat], places))
    for context, some in zip(contexts, views, strict=True):
        spans, null = best_spans(some, [next(answers) for _ in some], task.max_answer or 30)
        yield replies(context, spans, null, task.threshold)


def replies(context: Context, spans: Sequence[Span], null: float, threshold: float | None) -> Replies:
    """The texts of spans; "no answer" comes first if it beats the best span by more than `threshold`."""
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
    path: Path, targets: bool, on_bad_record: str = "stop", skipped: Counter[str] | None = None,
    keep: Sequence[str] = (),
) -> Iterator[Record]:  # fmt: skip
    """The questions of a file; with `targets`, each record must have its right answers, without, none has any."""
    skipped = Counter() if skipped is None else skipped
    whole = _squad(path)
    found = (
        _of_squad(path, whole, targets) if whole is not None else _of_lines(path, targets, on_bad_record, skipped, keep)
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
    """The answer to train on: the first that stands at its start; None where the context has no answer."""
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
    what = f"the answer {_show(said)} is not at {start} of its context" + (f", {_show(there)} is" if there else "")
    hint = f"it is at {at}: fix the start" if at >= 0 else "it is nowhere in it: fix the answer"
    return Bad("answer not at its offset", what, hint)


def _squad(path: Path) -> list[Any] | None:
    """The articles of a file in SQuAD's layout; None for a file in another."""
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
        raise DataError(f'{path}: "data" is {_show(found["data"])}; expected a list', "check how the file was made")
    return found["data"]


def _of_squad(path: Path, data: list[Any], targets: bool) -> Iterator[tuple[str, dict[str, Any] | Bad]]:
    for number_of, article in enumerate(data, 1):
        for paragraph_number, paragraph in enumerate(_listed(article, "paragraphs", f"{path}: article {number_of}"), 1):
            where = f"{path}: article {number_of}, paragraph {paragraph_number}"
            for place, entry in enumerate(_listed(paragraph, "qas", where), 1):
                name = entry.get("id") if isinstance(entry, dict) else None
                named = f"{where}, question {place}" if name is None else f"{path}: question {name}"
                try:
                    yield named, _question(paragraph, entry, targets)
                except Bad as bad:
                    yield named, bad


def _listed(entry: Any, name: str, where: str) -> list[Any]:
    found = entry.get(name) if isinstance(entry, dict) else None
    if not isinstance(found, list):
        raise DataError(f"{where}: no {_show(name)}", "expected the layout of SQuAD: data, paragraphs, qas")
    return found


def _question(paragraph: dict[str, Any], entry: Any, targets: bool) -> dict[str, Any]:
    if not isinstance(entry, dict):
        raise Bad("not an object", f"is {_show(entry)}; expected an object", "fix the question")
    made = {"id": entry.get("id"), "question": _text(entry, "question"), "context": _text(paragraph, "context")}
    if not targets:
        return made
    given = entry.get("answers")
    if not isinstance(given, list) or (not given and not entry.get("is_impossible", given == [])):
        raise Bad("missing field", 'no "answers"', "fix the question")
    impossible = bool(entry.get("is_impossible", False))
    return made | {"answers": [] if impossible else [_answer(one) for one in given]}


def _answer(entry: Any) -> tuple[str, int]:
    if not isinstance(entry, dict):
        raise Bad("not an object", f'"answers" has {_show(entry)}; expected an object', "fix the question")
    start = entry.get("answer_start")
    if isinstance(start, bool) or not isinstance(start, int):
        raise Bad("wrong type", f'"answer_start" is {_show(start)}; expected a whole number', "fix the question")
    return _text(entry, "text"), start


def _text(entry: dict[str, Any], name: str) -> str:
    if name not in entry:
        raise Bad("missing field", f"no {_show(name)}", "fix the question")
    try:
        return text(entry[name])
    except Bad as bad:
        raise Bad(bad.reason, f"{_show(name)} {bad.what}", "fix the question") from None


def _of_lines(
    path: Path, targets: bool, on_bad_record: str, skipped: Counter[str], keep: Sequence[str]
) -> Iterator[tuple[str, dict[str, Any] | Bad]]:
    as_it_is = Maybe(lambda value: value)
    fields = {name: as_it_is for name in ("id", *keep)} | {"question": text, "context": text}
    if targets:
        fields |= {"answer": as_it_is, "start": as_it_is}
    for record in read_records(path, fields, on_bad_record, skipped):
        try:
            yield record.where, _line(record.fields) if targets else record.fields
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
        raise Bad("wrong type", f'"start" is {_show(value)}; expected a whole number')
    return int(place)
