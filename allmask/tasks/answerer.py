"""A reader at work: a question and a context in; the piece of the context that answers it out, or nothing."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any, overload

import numpy as np
import torch

from allmask.errors import CheckpointError, UsageError
from allmask.model import Model
from allmask.tasks.classifier import frozen
from allmask.tasks.spans import Context, Span, View, best_spans
from allmask.tasks.tokens import expect_both_ways, token_answers

if TYPE_CHECKING:
    from allmask.tasks.answer import Answer

Asking = tuple[str, str]  # a question and its context
WINDOW = 256  # questions in memory


@dataclass(frozen=True)
class Reply:
    """Characters `start` to before `end` of the context; no text: it has no answer. `score` is the share among the
    best spans and, where the model knows such questions, no answer."""

    text: str
    start: int | None
    end: int | None
    score: float

    def to_dict(self) -> dict[str, Any]:
        return {"answer": self.text, "start": self.start, "end": self.end, "score": self.score}


@dataclass(frozen=True)
class Replies:
    """The best answers, best first, and how much better having none scores than the best."""

    best: list[Reply]
    null: float


@dataclass
class Answerer:
    """A model with a head for spans, laid out for speed, and how questions become ids for it."""

    model: Model
    task: Answer
    precision: str = "auto"  # fp32, bf16, int8; auto: bf16 where it is quick

    def __post_init__(self):
        if self.model.labels is None or self.model.labels.kind != "span":
            raise CheckpointError("this model has no head for answers", "teach it: allmask finetune --task answer")
        expect_both_ways(self.model, "answer")
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

    def stream(self, questions: Iterable[Asking], window: int = WINDOW) -> Iterator[Replies]:
        """The best answers to each, in their order, with no more than a window of them in memory."""
        source = iter(questions)
        while some := list(islice(source, window)):
            contexts, views = self.task.read(self.model, some)
            yield from reply_all(self.frozen, self.task, contexts, views)


def _checked(entry: Any) -> Asking:
    if isinstance(entry, tuple | list) and len(entry) == 2 and all(isinstance(part, str) and part for part in entry):
        return entry[0], entry[1]
    raise UsageError(f"answer: {entry!r} is no question with its context", 'pass ("question", "context")')


def reply_all(
    model: Model, task: Answer, contexts: Sequence[Context], views: Sequence[Sequence[View]]
) -> Iterator[Replies]:
    """What a model answers, question by question."""
    flat = [view for some in views for view in some]
    places = [np.arange(len(view.example)) for view in flat]
    answers = iter(token_answers(model, [view.example for view in flat], places))
    for context, some in zip(contexts, views, strict=True):
        spans, null = best_spans(some, [next(answers) for _ in some], task.max_answer or 30)
        yield replies(context, spans, null, task.threshold)


def replies(context: Context, spans: Sequence[Span], null: float, threshold: float | None) -> Replies:
    """Texts of spans; where no answer is more than `threshold` better than the best of them, it comes first."""
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
