"""Choosing: which of several texts goes with a context or a question (SWAG in BERT, arXiv 1810.04805).

Each choice is read with its context as a pair; a vector against the pooled [CLS] gives it a score, and the scores of a
question's choices share a softmax. A record has `context`, `question` or both, and `choices`, two texts or more. The
right one is named by `label`, its number from 0 on, or by `answer`, its text.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from allmask.config import Config
from allmask.data import Asked, Bad, Batch, Maybe, Record, list_of, number, read_records, text
from allmask.data.fields import show as _show
from allmask.errors import CheckpointError, DataError, UsageError
from allmask.model import Model
from allmask.nn.heads import Labels, grouped_log_softmax
from allmask.objectives import answer_loss
from allmask.options import ChooseOptions
from allmask.tasks.common.auxiliary import Auxiliary
from allmask.tasks.common.evaluation import Evaluation, Worst, score_table
from allmask.tasks.common.heads import (
    BATCH_TOKENS,
    answer_all,
    answers_to,
    cache_features,
    frozen,
    rate_for,
    with_head,
)
from allmask.tasks.common.reading import Reading, Text, asking, log_lengths, read
from allmask.tasks.common.writing import tokenizer_of
from allmask.tasks.task import ModelFolder, Predictor, Task
from allmask.text import Tokenizer
from allmask.training import Score, standard_error

BATCH, MOST_TOKENS = 16, 8192  # questions a step, about, as long as they are not too much for the memory
LABELS = Labels("choice", ("choice",))  # the head gives each choice one score
_TARGETS = ("label", "answer")


@dataclass(frozen=True)
class Choose(ChooseOptions, Task):
    """The task as it is saved with a model: how a context and a choice become ids."""

    def fitted(self, model: Model) -> Choose:
        """The same with texts no longer than the model's positions."""
        tokenizer_of(model)
        return replace(self, max_length=min(self.max_length, model.config.max_positions))

    # ---- reading -------------------------------------------------------------------------------------------

    def read_data(
        self, data: Path, held_out: Path | None, on_bad_record: str, skipped: Counter[str]
    ) -> tuple[Choose, list[Record], list[Record]]:
        train = list(read_questions(data, True, on_bad_record, skipped))
        return self, train, list(read_questions(held_out, True, on_bad_record, skipped)) if held_out else []

    def read(self, tokenizer: Tokenizer, config: Config, questions: Sequence[dict[str, Any]]) -> Reading:
        """The rows of all choices of all questions, one after another."""
        texts = [pair for fields in questions for pair in texts_of(fields)]
        return read(tokenizer, config, texts, self.max_length, self.truncate)

    def reading(self, model: Model, records: Sequence[Record]) -> Reading:
        made = self.read(tokenizer_of(model), model.config, [record.fields for record in records])
        log_lengths(made, self.max_length)
        return made

    # ---- learning ------------------------------------------------------------------------------------------

    def suggested_settings(self, model: Model, records: Sequence[Record]) -> dict[str, Any]:
        """A learning rate for the model's width, and tokens for about 16 questions a step."""
        chosen = [record.fields for record in records[:: max(1, len(records) // 300)]]
        tokens = sum(self.read(tokenizer_of(model), model.config, chosen).lengths) / len(chosen)
        return {"lr": rate_for(model), "batch_tokens": min(int(np.ceil(BATCH * tokens)), MOST_TOKENS)}

    def prepare(
        self, model: Model, records: Sequence[Record], seed: int = 0, prune: bool = False, language: bool = False
    ) -> Model:
        """A model with a head for choices, without heads that are not used."""
        texts = [text for record in records for pair in texts_of(record.fields) for text in pair]
        return with_head(model, LABELS, list(dict.fromkeys(texts)), seed, prune, language)

    def workload(
        self, model: Model, records: Sequence[Record], held_out: Sequence[Record] = (),
        auxiliary: Auxiliary | None = None, precision: str = "auto",
    ) -> ChooseWorkload:  # fmt: skip
        evaluator = (
            Evaluator(list(held_out), self.reading(model, held_out), precision, self.pool_windows) if held_out else None
        )
        reading = self.reading(model, records)
        return ChooseWorkload(list(records), reading, evaluator, auxiliary, self.pool_windows)

    # ---- using ---------------------------------------------------------------------------------------------

    @classmethod
    def default_for(cls, opened: ModelFolder) -> Choose | None:
        labels = opened.model.labels
        return cls() if labels is not None and labels.kind == "choice" else None

    def predictor(self, model: Model, precision: str = "auto") -> Chooser:
        return Chooser(model, self, precision)


@dataclass
class ChooseWorkload:
    """What the training loop asks for: questions by number with all of their choices, and an evaluator."""

    records: list[Record]
    reading: Reading
    evaluator: Evaluator | None = None
    auxiliary: Auxiliary | None = None
    pool: str = "mean"  # of windows

    def __post_init__(self):
        counts = [len(record.fields["choices"]) for record in self.records]
        self.starts = np.cumsum([0, *counts])  # of the choices of each question, and the end
        self.lengths = np.add.reduceat(self.reading.lengths, self.starts[:-1]).tolist()

    def cache_features(self, model: Model, precision: str) -> None:
        cache_features(model, precision, self.reading, self.evaluator and self.evaluator.reading)

    def batch(self, numbers: Sequence[int], epoch: int) -> Batch:
        texts = np.concatenate([np.arange(self.starts[number], self.starts[number + 1]) for number in numbers])
        rows, of = self.reading.rows(texts.tolist())
        chosen = [self.records[number].fields for number in numbers]
        questions, targets = numbered(chosen), targets_of(chosen)

        def ask(where: Tensor, row: Tensor) -> Asked:
            return Asked(where, targets, None, "choose", of[row], self.pool, questions)

        return asking(self.reading, rows, ask, self.auxiliary, epoch)

    def evaluate(self, model: Model, step: int = 0) -> Score | None:
        return None if self.evaluator is None else self.evaluator(model)


def targets_of(questions: Sequence[dict[str, Any]]) -> Tensor:
    """The number of each question's right choice among the choices of all questions, one after another."""
    starts = np.cumsum([0, *(len(fields["choices"]) for fields in questions)])[:-1]
    return torch.tensor([int(start) + fields["label"] for start, fields in zip(starts, questions, strict=True)])


@dataclass
class Evaluator:
    """The accuracy on the held-out questions, and a few of the errors to look at."""

    records: list[Record]
    reading: Reading
    precision: str = "auto"
    pool: str = "mean"  # of windows
    shown: int = 2

    def __call__(self, model: Model) -> Score:
        questions = [record.fields for record in self.records]
        scores = self.reading.pooled(answers_to(self.reading, model, self.precision), self.pool)
        summed = answer_loss("choice", scores, targets_of(questions), questions=numbered(questions))
        tally = Tally(self.shown)
        for record, choice in zip(self.records, choices_of(questions, scores[:, 0]), strict=True):
            tally.add(record, choice)
        loss = summed.item() / len(questions)
        stderr = standard_error([1.0] * tally.right + [0.0] * (len(questions) - tally.right))
        lines = [line for error in tally.worst.rows() for line in _sample(error)]
        metrics = {"loss": loss, **tally.scores}
        return Score(metrics["accuracy"], metrics, lines, loss=loss, stderr=stderr, metric="accuracy")


def _sample(error: dict[str, Any]) -> list[str]:
    asked = " ".join(" ".join(error[name].split()) for name in ("context", "question") if name in error)
    question = asked if len(asked) <= 100 else "…" + asked[-99:]
    return [f"  question   {question}", f"  choice     {_compared(error)}", ""]


def _compared(error: dict[str, Any]) -> str:
    right = error["choices"][error["label"]]
    return f"true {right}, predicted {error['choice']} ({error['probability']:.0%})"


@dataclass
class Tally:
    """Counts over answered questions: how many are right, how many would be by guessing, and the worst errors."""

    shown: int = 2
    right: int = 0
    chance: float = 0.0

    def __post_init__(self):
        self.worst = Worst(self.shown)

    def add(self, record: Record, choice: Choice) -> None:
        label = record.fields["label"]
        self.right += choice.number == label
        self.chance += 1 / len(choice.probabilities)
        wrong = 0.0 if choice.number == label else 1.0 - choice.probabilities[label]
        self.worst.add(wrong, lambda: _error(record, choice))

    @property
    def scores(self) -> dict[str, float]:
        """`chance` is the accuracy of guessing."""
        return {"accuracy": self.right / self.worst.seen, "chance": self.chance / self.worst.seen}


def _error(record: Record, choice: Choice) -> dict[str, Any]:
    fields = {name: record.fields[name] for name in ("context", "question", "choices", "label")}
    fields = {name: value for name, value in fields.items() if value is not None}
    return {"where": record.where, **fields, **choice.to_dict()}


# ---- reading ---------------------------------------------------------------------------------------------------


def read_questions(
    path: Path, targets: bool, on_bad_record: str = "stop", skipped: Counter[str] | None = None,
    keep: Sequence[str] = (),
) -> Iterator[Record]:  # fmt: skip
    """Records with `context`, `question` (either may be None), `choices` and, with `targets`, `label`, a number.

    Without, `label` and `answer` are taken along as they are, like the fields of `keep`.
    """
    as_it_is = Maybe(lambda value: value)
    fields = {name: as_it_is for name in (*keep, *_TARGETS)}
    fields |= {"context": Maybe(text), "question": Maybe(text), "choices": list_of(text)}
    skipped = Counter() if skipped is None else skipped
    found = 0
    for record in read_records(path, fields, on_bad_record, skipped):
        try:
            values = _checked(record.fields, targets)
        except Bad as bad:
            if on_bad_record == "stop":
                raise DataError(f"{record.where}: {bad.what}", f"{bad.hint}, or pass --on-bad-record skip") from None
            skipped[bad.reason] += 1
            continue
        found += 1
        yield Record(values, record.where)
    if not found:
        raise DataError(f"{path}: no record can be used", "each must have a context or question, and choices")


def _checked(fields: dict[str, Any], targets: bool) -> dict[str, Any]:
    if fields["context"] is None and fields["question"] is None:
        raise Bad("missing field", 'no "context" and no "question"')
    if len(fields["choices"]) < 2:
        raise Bad("one choice", f'"choices" has only {_show(fields["choices"][0])}; expected two at least')
    if not targets:
        return fields
    return {**{name: value for name, value in fields.items() if name != "answer"}, "label": _right(fields)}


def _right(fields: dict[str, Any]) -> int:
    """The number of the right choice."""
    label, answer, choices = fields["label"], fields["answer"], fields["choices"]
    if label is None and answer is None:
        raise Bad("missing field", 'no "label" and no "answer"', "say which of the choices is right")
    if answer is not None and answer not in choices:
        raise Bad("answer not among choices", f'"answer" is {_show(answer)}, which is none of the choices')
    if label is None:
        return choices.index(answer)
    try:
        place = number(label)
    except Bad as bad:
        raise Bad(bad.reason, f'"label" {bad.what}', bad.hint) from None
    if place != int(place) or not 0 <= place < len(choices):
        last = len(choices) - 1
        raise Bad("label out of range", f'"label" is {_show(label)}; expected a whole number from 0 to {last}')
    if answer is not None and choices[int(place)] != answer:
        raise Bad("label and answer differ", f'"label" is {_show(label)}, but "answer" is another of the choices')
    return int(place)


def texts_of(fields: dict[str, Any]) -> list[Text]:
    """A pair a choice: the context before, the question and the choice after."""
    context, question = fields.get("context"), fields.get("question")
    first: str = fields["question"] if context is None else context
    before = f"{question} " if context is not None and question is not None else ""
    return [(first, before + choice) for choice in fields["choices"]]


# ---- using a trained model -------------------------------------------------------------------------------------


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
class Chooser(Predictor):
    """A model with a head for choices, laid out for speed, and how questions become ids for it."""

    model: Model
    task: Choose
    precision: str = "auto"  # fp32, bf16, int8; auto: bf16 where it is quick
    cut: int = field(default=0, init=False)

    does: ClassVar[str] = "chooses"
    done: ClassVar[str] = "answered"

    def __post_init__(self):
        if self.model.labels is None or self.model.labels.kind != "choice":
            raise CheckpointError("this model has no head for choices", "teach it: allmask finetune --task choose")
        self.task = self.task.fitted(self.model)
        self.frozen = frozen(self.model, self.precision)

    @property
    def max_tokens(self) -> int:
        return self.task.max_length

    def __call__(self, questions: Any, choices: Sequence[str] | None = None, question: str | None = None) -> Any:
        """`choose(context, choices)`, perhaps with a question; or a list of dicts with these names."""
        if choices is not None:
            questions = {"context": questions, "choices": choices, "question": question}
        if isinstance(questions, dict):
            return next(self.stream([_asked(questions)]))
        return list(self.stream(_asked(entry) for entry in questions))

    def stream(self, questions: Iterable[dict[str, Any]], window: int | None = None) -> Iterator[Choice]:
        """A choice for each, in their order, with no more than a window of them in memory."""
        source = iter(questions)
        while some := list(islice(source, window or self.window)):
            yield from choices_of(some, self.answers(some))

    def answers(self, questions: Sequence[dict[str, Any]], batch_tokens: int = BATCH_TOKENS) -> Tensor:
        """Scores (choices,) of all choices of all questions, one after another."""
        reading = self.task.read(tokenizer_of(self.model), self.model.config, questions)
        self.cut += reading.cut
        scores = answer_all(self.frozen, reading.examples, batch_tokens)
        return reading.pooled(scores, self.task.pool_windows)[:, 0]

    def read(
        self, path: Path, on_bad_record: str = "stop", skipped: Counter[str] | None = None, keep: Sequence[str] = (),
        targets: bool = False, limit: int | None = None,
    ) -> Iterator[Record]:  # fmt: skip
        others = keep if targets else ("id", *keep)
        return islice(read_questions(path, targets, on_bad_record, skipped, others), limit)

    def predict(self, records: Sequence[Record], **options: Any) -> Iterator[dict[str, Any]]:
        return (one.to_dict() for one in self.stream((record.fields for record in records), len(records)))

    def evaluate(self, records: Iterable[Record], show: int = 0, quiet: bool = True, **options: Any) -> Evaluation:
        tally, source = Tally(show), iter(records)
        while window := list(islice(source, self.window)):
            for record, choice in zip(window, self.stream([record.fields for record in window]), strict=True):
                tally.add(record, choice)
        errors = tally.worst.rows()
        values = {"scores": tally.scores, **({"errors": errors} if show else {})}
        lines = [
            [
                f"{row['where']}: {_compared(row)}",
                *(f"  {' '.join(row[name].split())}" for name in ("context", "question") if name in row),
            ]
            for row in errors
        ]
        return Evaluation(tally.worst.seen, values, [score_table(tally.scores)], examples=lines, cut=self.cut)


def _asked(entry: Any) -> dict[str, Any]:
    hint = 'pass {"context": "…", "choices": ["…", "…"]}, perhaps with a "question", or a list of those'
    if not isinstance(entry, dict):
        raise UsageError(f"choose: {entry!r} is no question", hint)
    values = {"context": entry.get("context"), "question": entry.get("question"), "choices": entry.get("choices")}
    try:
        for name in ("context", "question"):
            values[name] = Maybe(text)(values[name])
        values["choices"] = list_of(text)(list(values["choices"] or ()))
        return _checked(values, targets=False)
    except Bad as bad:
        raise UsageError(f"choose: {bad.what}", hint) from None


def choices_of(questions: Sequence[dict[str, Any]], scores: Tensor) -> Iterator[Choice]:
    """The choices with the highest of the scores (choices,)."""
    shares = grouped_log_softmax(scores, numbered(questions)).exp() if len(scores) else scores
    for fields, row in zip(questions, shares.split([len(fields["choices"]) for fields in questions]), strict=True):
        best = int(row.argmax())
        yield Choice(best, fields["choices"][best], row.tolist())


def numbered(questions: Sequence[dict[str, Any]]) -> Tensor:
    """(choices,) the number of the question that each choice belongs to."""
    counts = torch.tensor([len(fields["choices"]) for fields in questions])
    return torch.arange(len(counts)).repeat_interleave(counts)
