"""Questions with several choices: out of a file, through a model, and marked.

A record has `context`, `question` or both, and `choices`, two texts or more. Which is right is said by `label`, its
number from 0 on, or by `answer`, its text.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from allmask.data import Bad, Maybe, Record, list_of, number, read_records, text
from allmask.data.fields import show
from allmask.errors import CheckpointError, DataError, UsageError
from allmask.heads import Labels, log_shares
from allmask.model import Model
from allmask.tasks.classifier import BATCH_TOKENS, answer_all, frozen
from allmask.tasks.reading import Text
from allmask.tasks.writing import tokenizer_of

if TYPE_CHECKING:
    from allmask.tasks.choose import Choose

LABELS = Labels("choice", ("choice",))  # a score is all that is told of a text
WINDOW = 256  # questions in memory
_MARKED = ("label", "answer")


# ---- reading -------------------------------------------------------------------------------------------------


def read_questions(
    path: Path, marked: bool, on_bad_record: str = "stop", skipped: Counter[str] | None = None,
    keep: Sequence[str] = (),
) -> Iterator[Record]:  # fmt: skip
    """Records with `context`, `question` (either may be None), `choices` and, if it is `marked`, `label`, a number.

    Where they are not, `label` and `answer` are taken along as they are, like the fields of `keep`.
    """
    as_it_is = Maybe(lambda value: value)
    fields = {name: as_it_is for name in (*keep, *_MARKED)}
    fields |= {"context": Maybe(text), "question": Maybe(text), "choices": list_of(text)}
    skipped = Counter() if skipped is None else skipped
    found = 0
    for record in read_records(path, fields, on_bad_record, skipped):
        try:
            values = _checked(record.fields, marked)
        except Bad as bad:
            if on_bad_record == "stop":
                raise DataError(f"{record.where}: {bad.what}", f"{bad.hint}, or pass --on-bad-record skip") from None
            skipped[bad.reason] += 1
            continue
        found += 1
        yield Record(values, record.where)
    if not found:
        raise DataError(f"{path}: no record can be used", "each must have a context or question, and choices")


def _checked(fields: dict[str, Any], marked: bool) -> dict[str, Any]:
    if fields["context"] is None and fields["question"] is None:
        raise Bad("missing field", 'no "context" and no "question"')
    if len(fields["choices"]) < 2:
        raise Bad("one choice", f'"choices" has only {show(fields["choices"][0])}; expected two at least')
    if not marked:
        return fields
    return {**{name: value for name, value in fields.items() if name != "answer"}, "label": _right(fields)}


def _right(fields: dict[str, Any]) -> int:
    """The number of the right choice."""
    label, answer, choices = fields["label"], fields["answer"], fields["choices"]
    if label is None and answer is None:
        raise Bad("missing field", 'no "label" and no "answer"', "say which of the choices is right")
    if answer is not None and answer not in choices:
        raise Bad("answer not among choices", f'"answer" is {show(answer)}, which is none of the choices')
    if label is None:
        return choices.index(answer)
    try:
        place = number(label)
    except Bad as bad:
        raise Bad(bad.reason, f'"label" {bad.what}', bad.hint) from None
    if place != int(place) or not 0 <= place < len(choices):
        last = len(choices) - 1
        raise Bad("label out of range", f'"label" is {show(label)}; expected a whole number from 0 to {last}')
    if answer is not None and choices[int(place)] != answer:
        raise Bad("label and answer differ", f'"label" is {show(label)}, but "answer" is another of the choices')
    return int(place)


def texts_of(fields: dict[str, Any]) -> list[Text]:
    """A pair a choice: the context before, the question and the choice after."""
    context, question = fields.get("context"), fields.get("question")
    first: str = fields["question"] if context is None else context
    before = f"{question} " if context is not None and question is not None else ""
    return [(first, before + choice) for choice in fields["choices"]]


# ---- at work -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Choice:
    """The number of a choice, its text, and the probability of each."""

    number: int
    text: str
    probabilities: list[float]

    @property
    def probability(self) -> float:
        return self.probabilities[self.number]

    def to_dict(self) -> dict[str, Any]:
        shares = {"probability": self.probability, "probabilities": self.probabilities}
        return {"prediction": self.number, "choice": self.text, **shares}


@dataclass
class Chooser:
    """A model with a head for choices, laid out for speed, and how questions become ids for it."""

    model: Model
    task: Choose
    precision: str = "auto"  # fp32, bf16, int8; auto: bf16 where it is quick
    cut: int = field(default=0, init=False)  # texts so far that were longer than the model reads

    def __post_init__(self):
        if self.model.labels is None or self.model.labels.kind != "choice":
            raise CheckpointError("this model has no head for choices", "teach it: allmask finetune --task choose")
        self.task = self.task.fitted(self.model)
        self.frozen = frozen(self.model, self.precision)

    def __call__(self, questions: Any, choices: Sequence[str] | None = None, question: str | None = None) -> Any:
        """`choose(context, choices)`, perhaps with a question; or a list of dicts with these names."""
        if choices is not None:
            questions = {"context": questions, "choices": choices, "question": question}
        if isinstance(questions, dict):
            return next(self.stream([_asked(questions)]))
        return list(self.stream(_asked(entry) for entry in questions))

    def stream(self, questions: Iterable[dict[str, Any]], window: int = WINDOW) -> Iterator[Choice]:
        """A choice for each, in their order, with no more than a window of them in memory."""
        source = iter(questions)
        while some := list(islice(source, window)):
            yield from choices_of(some, self.answers(some))

    def answers(self, questions: Sequence[dict[str, Any]], batch_tokens: int = BATCH_TOKENS) -> Tensor:
        """Scores (choices,) of all choices of all questions, one after another."""
        reading = self.task.read(tokenizer_of(self.model), self.model.config, questions)
        self.cut += reading.cut
        scores = answer_all(self.frozen, reading.examples, batch_tokens)
        return reading.pooled(scores, self.task.pool_windows)[:, 0]


def _asked(entry: Any) -> dict[str, Any]:
    hint = 'pass {"context": "…", "choices": ["…", "…"]}, perhaps with a "question", or a list of those'
    if not isinstance(entry, dict):
        raise UsageError(f"choose: {entry!r} is no question", hint)
    values = {"context": entry.get("context"), "question": entry.get("question"), "choices": entry.get("choices")}
    try:
        for name in ("context", "question"):
            values[name] = Maybe(text)(values[name])
        values["choices"] = list_of(text)(list(values["choices"] or ()))
        return _checked(values, marked=False)
    except Bad as bad:
        raise UsageError(f"choose: {bad.what}", hint) from None


def choices_of(questions: Sequence[dict[str, Any]], scores: Tensor) -> Iterator[Choice]:
    """What scores (choices,) say."""
    shares = log_shares(scores, numbered(questions)).exp() if len(scores) else scores
    for fields, row in zip(questions, shares.split([len(fields["choices"]) for fields in questions]), strict=True):
        best = int(row.argmax())
        yield Choice(best, fields["choices"][best], row.tolist())


def numbered(questions: Sequence[dict[str, Any]]) -> Tensor:
    """(choices,) the number of the question that each choice belongs to."""
    counts = torch.tensor([len(fields["choices"]) for fields in questions])
    return torch.arange(len(counts)).repeat_interleave(counts)


# ---- marked --------------------------------------------------------------------------------------------------


@dataclass
class Tally:
    """What is remembered of questions that were answered: how many were right, and the worst errors."""

    shown: int = 2
    seen: int = 0
    right: int = 0
    chance: float = 0.0
    worst: list[tuple[float, int, Record, Choice]] = field(default_factory=list)

    def add(self, record: Record, choice: Choice) -> None:
        self.seen += 1
        self.chance += 1 / len(choice.probabilities)
        if choice.number == record.fields["label"]:
            self.right += 1
            return
        size = 1.0 - choice.probabilities[record.fields["label"]]
        entry = (size, -self.seen, record, choice)  # the number keeps records from being compared
        if len(self.worst) < self.shown:
            heapq.heappush(self.worst, entry)
        elif self.shown:
            heapq.heappushpop(self.worst, entry)

    @property
    def scores(self) -> dict[str, float]:
        """`chance` is the accuracy of guessing."""
        return {"accuracy": self.right / self.seen, "chance": self.chance / self.seen}

    def errors(self) -> list[dict[str, Any]]:
        """Those that the model was most sure of first."""
        told = []
        for _, _, record, choice in sorted(self.worst, reverse=True, key=lambda entry: entry[:2]):
            fields = {name: record.fields[name] for name in ("context", "question", "choices", "label")}
            fields = {name: value for name, value in fields.items() if value is not None}
            told.append({"where": record.where, **fields, **choice.to_dict()})
        return told
