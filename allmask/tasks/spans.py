"""Spans of a context: windows that a model reads with the question before, and the best span of what it says of them.

    [CLS] question [SEP] context, or a window of it [SEP]         (see `frames`)

A start counts only in the window in which it stands farthest from the edge (BERT's rule of the most context). Where a
context may hold no answer, [CLS] is the span that says so.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from allmask.config import Config
from allmask.data import Example
from allmask.errors import UsageError
from allmask.tasks.frames import Frame
from allmask.tasks.words import most_context, with_marks
from allmask.text import Tokenizer
from allmask.text.lengths import windows

KEPT = 20  # spans of a window that are looked at


@dataclass(frozen=True, eq=False)
class Context:
    """A text in tokens, and where in it (in characters) each comes from."""

    text: str
    ids: list[int]
    starts: np.ndarray
    ends: np.ndarray

    def span_of(self, start: int, end: int) -> tuple[int, int] | None:
        """The first and the last token of characters `start` to before `end`; None if no token is of them."""
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
    """Tokens of a context, the last among them, and the model's score."""

    first: int
    last: int
    score: float


def read_contexts(tokenizer: Tokenizer, texts: Sequence[str]) -> list[Context]:
    """In the order given; a text that is there several times is read once."""
    unique = list(dict.fromkeys(texts))
    made = {}
    for text, encoded in zip(unique, tokenizer.encode_batch(unique, special=False), strict=True):
        offsets = np.array(encoded.offsets, dtype=np.int64).reshape(-1, 2)
        made[text] = Context(text, encoded.ids, offsets[:, 0], offsets[:, 1])
    return [made[text] for text in texts]


def read_views(
    tokenizer: Tokenizer, config: Config, questions: Sequence[str], contexts: Sequence[Context], size: int, most: int,
    stride: int,
) -> list[list[View]]:  # fmt: skip
    """The rows of each question, of `size` tokens at most, `most` of them the question's; they share `stride`."""
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
    for number, (start, stop) in enumerate(spans):
        row, own = frame.row(question, context.ids[start:stop]), chosen[start:stop] == number
        made.append(View(row, offset, start, stop - start, own, frame.null % len(row)))
    return made


# ---- what a model says -----------------------------------------------------------------------------------------


def best_spans(views: Sequence[View], answers: Sequence[Tensor], longest: int) -> tuple[list[Span], float]:
    """The best spans of a context, best first, and the score of there being none.

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
