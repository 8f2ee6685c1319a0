"""Multiple choice: which of several texts fits a context or a question (SWAG in BERT, arXiv 1810.04805).

Each choice is read together with its context, as a pair; a vector against the pooled [CLS] gives it a score, and the
choices of a question share a softmax. A record has `context`, `question` or both, and `choices`, two texts or more. The
right choice is given by `label`, its index from 0, or by `answer`, its text.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from allmask.data import Asked, Bad, Batch, DataFile, Maybe, Record, list_of, number, read_records, text, usable
from allmask.data.fields import check_row
from allmask.data.fields import show as _show
from allmask.errors import UsageError
from allmask.model import Model
from allmask.nn.heads import Labels, grouped_log_softmax
from allmask.objectives import answer_loss
from allmask.options import ChooseOptions
from allmask.tasks.common.evaluation import Evaluation, Worst, score_table
from allmask.tasks.common.heads import HeldOut, PooledPredictor, PooledTask, PooledWorkload
from allmask.tasks.common.reading import Reading, Text, row_batch
from allmask.training import Score, standard_error

MOST_TOKENS = 8192  # of a batch, unless --batch-tokens is given
LABELS = Labels("choice", ("choice",))  # the head gives each choice one score
Question = dict[str, Any]  # the fields of a record


@dataclass(frozen=True)
class Choose(ChooseOptions, PooledTask):
    """The options say how a context and a choice become token ids."""

    kinds: ClassVar[tuple[str, ...]] = ("choice",)
    batch_size: ClassVar[int] = 16  # questions
    sampled: ClassVar[int] = 300

    # ---- reading -------------------------------------------------------------------------------------------

    def read_data(
        self, data: Path | DataFile, held_out: Path | DataFile | None, on_bad_record: str, skipped: Counter[str]
    ) -> tuple[Choose, list[Record], list[Record]]:
        train = list(read_questions(data, True, on_bad_record, skipped))
        return self, train, list(read_questions(held_out, True, on_bad_record, skipped)) if held_out else []

    def unit(self, record: Record) -> str:
        """Questions about one context stay together."""
        return record.fields["question"] if record.fields["context"] is None else record.fields["context"]

    def input_text(self, record: Record) -> str:
        return "\n".join(self.texts_of([record]))

    def label_counts(self, records: Sequence[Record]) -> Counter[str]:
        return Counter(f"choice {record.fields['label']}" for record in records)

    def input_of(self, record: Record) -> Question:
        return record.fields

    def texts(self, inputs: Sequence[Question]) -> list[Text]:
        """Return the choices of all questions, in sequence."""
        return [pair for fields in inputs for pair in texts_of(fields)]

    def texts_of(self, records: Sequence[Record]) -> list[str]:
        return list(dict.fromkeys(part for pair in self.texts([*map(self.input_of, records)]) for part in pair))

    def labels_of(self, records: Sequence[Record]) -> Labels:
        return LABELS

    # ---- training ------------------------------------------------------------------------------------------

    def lengths_of(self, model: Model, records: Sequence[Record]) -> Sequence[int]:
        return ChooseWorkload(self, self.reading(model, records), None, None, records).lengths

    def suggested_settings(self, model: Model, records: Sequence[Record]) -> dict[str, Any]:
        chosen = super().suggested_settings(model, records)
        return chosen | {"batch_tokens": min(chosen["batch_tokens"], MOST_TOKENS)}

    def examples(self, model: Model, records: Sequence[Record], reading: Reading, **given: Any) -> ChooseWorkload:
        return ChooseWorkload(self, reading, **given, records=records)

    def evaluate(self, held_out: HeldOut, model: Model) -> Score:
        questions = [record.fields for record in held_out.records]
        scores = held_out.answers(model)
        summed = answer_loss("choice", scores, targets_of(questions), questions=question_of_choice(questions))
        tally = Tally(held_out.shown)
        for record, choice in zip(held_out.records, choices_of(questions, scores[:, 0]), strict=True):
            tally.add(record, choice)
        loss = summed.item() / len(questions)
        stderr = standard_error([1.0] * tally.right + [0.0] * (len(questions) - tally.right))
        samples = []
        for error in tally.worst.rows():
            asked = " ".join(" ".join(error[name].split()) for name in ("context", "question") if name in error)
            asked = asked if len(asked) <= 100 else "…" + asked[-99:]
            samples += [f"  question   {asked}", f"  choice     {_compared(error)}", ""]
        metrics = {"loss": loss, **tally.scores}
        return Score(metrics["accuracy"], metrics, samples, loss=loss, stderr=stderr, metric="accuracy")

    def predictor(self, model: Model, precision: str = "auto") -> Chooser:
        return Chooser(model, self, precision)


@dataclass
class ChooseWorkload(PooledWorkload):
    """An example is a question with all of its choices."""

    records: Sequence[Record]

    def __post_init__(self):
        counts = [len(record.fields["choices"]) for record in self.records]
        self.starts = np.cumsum([0, *counts])  # the first choice of each question, and the number of choices
        self.lengths = np.add.reduceat(self.reading.lengths, self.starts[:-1]).tolist()

    def batch(self, numbers: Sequence[int], epoch: int) -> Batch:
        texts = np.concatenate([np.arange(self.starts[number], self.starts[number + 1]) for number in numbers])
        rows, text_of_row = self.reading.rows(texts.tolist())
        chosen = [self.records[number].fields for number in numbers]
        questions, targets = question_of_choice(chosen), targets_of(chosen)

        def ask(where: Tensor, row: Tensor) -> Asked:
            return Asked(where, targets, None, self.task.name, text_of_row[row], self.task.pool_windows, questions)

        return row_batch(self.reading, rows, ask, self.auxiliary, epoch)


def targets_of(questions: Sequence[Question]) -> Tensor:
    """Return (questions,) the index of each right choice among the choices of all questions."""
    starts = np.cumsum([0, *(len(fields["choices"]) for fields in questions)])[:-1]
    return torch.tensor([int(start) + fields["label"] for start, fields in zip(starts, questions, strict=True)])


def question_of_choice(questions: Sequence[Question]) -> Tensor:
    """Return (choices,) the index of the question that each choice belongs to."""
    counts = torch.tensor([len(fields["choices"]) for fields in questions])
    return torch.arange(len(counts)).repeat_interleave(counts)


def _compared(error: dict[str, Any]) -> str:
    right = error["choices"][error["label"]]
    return f"true {right}, predicted {error['choice']} ({error['probability']:.0%})"


@dataclass
class Tally:
    """Counts right answers and those expected from guessing, and collects the worst errors."""

    shown: int = 2
    right: int = 0
    chance: float = 0.0

    def __post_init__(self):
        self.worst = Worst(self.shown)

    def add(self, record: Record, choice: Choice) -> None:
        label = record.fields["label"]
        self.right += choice.number == label
        self.chance += 1 / len(choice.probabilities)

        def row() -> dict[str, Any]:
            fields = {name: record.fields[name] for name in ("context", "question", "choices", "label")}
            fields = {name: value for name, value in fields.items() if value is not None}
            return {"where": record.where, **fields, **choice.to_dict()}

        self.worst.add(0.0 if choice.number == label else 1.0 - choice.probabilities[label], row)

    @property
    def scores(self) -> dict[str, float]:
        """`chance` is the accuracy expected from guessing."""
        return {"accuracy": self.right / self.worst.seen, "chance": self.chance / self.worst.seen}


# ---- files -----------------------------------------------------------------------------------------------------


def read_questions(
    path: Path | DataFile, targets: bool, on_bad_record: str = "stop", skipped: Counter[str] | None = None
) -> Iterator[Record]:
    """Read records with `context`, `question` (one may be None), `choices` and, with `targets`, `label`, an index."""
    unchecked = Maybe(lambda value: value)
    fields = {"label": unchecked, "answer": unchecked} if targets else {}
    fields |= {"context": Maybe(text), "question": Maybe(text), "choices": list_of(text)}

    def check(values: Question) -> None:
        _check_question(values)
        if targets:
            values["label"] = _right(values)
            del values["answer"]

    return usable(path, read_records(path, fields, on_bad_record, skipped), check, on_bad_record, skipped)


def _check_question(fields: Question) -> None:
    if fields["context"] is None and fields["question"] is None:
        raise Bad("missing field", 'no "context" and no "question"')
    if len(fields["choices"]) < 2:
        raise Bad("one choice", f'"choices" has only {_show(fields["choices"][0])}; expected two at least')


def _right(fields: Question) -> int:
    """Return the index of the right choice."""
    label, answer, choices = fields["label"], fields["answer"], fields["choices"]
    if label is None and answer is None:
        raise Bad("missing field", 'no "label" and no "answer"', "say which of the choices is right")
    if answer is not None and answer not in choices:
        raise Bad("answer not among choices", f'"answer" is {_show(answer)}, which is none of the choices')
    if label is None:
        return choices.index(answer)
    index = check_row({"label": number}, fields)["label"]
    if index != int(index) or not 0 <= index < len(choices):
        last = len(choices) - 1
        raise Bad("label out of range", f'"label" is {_show(label)}; expected a whole number from 0 to {last}')
    if answer is not None and choices[int(index)] != answer:
        raise Bad("label and answer differ", f'"label" is {_show(label)}, but "answer" is another of the choices')
    return int(index)


def texts_of(fields: Question) -> list[Text]:
    """Return a pair for each choice: the context, and the question followed by the choice."""
    context, question = fields.get("context"), fields.get("question")
    first: str = fields["question"] if context is None else context
    before = f"{question} " if context is not None and question is not None else ""
    return [(first, before + choice) for choice in fields["choices"]]


# ---- using a trained model -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Choice:
    """The index of the chosen text, the text, and the probability of each choice."""

    number: int
    text: str
    probabilities: list[float]

    @property
    def probability(self) -> float:
        return self.probabilities[self.number]

    def to_dict(self) -> dict[str, Any]:
        shares = {"probability": self.probability, "probabilities": self.probabilities}
        return {"prediction": self.number, "choice": self.text, **shares}


def choices_of(questions: Sequence[Question], scores: Tensor) -> Iterator[Choice]:
    """Yield the best choice of each question; `scores` (choices,) has those of all questions in sequence."""
    if len(scores):  # in fp64: torch's fp32 functions round some values by where they are in a tensor
        scores = grouped_log_softmax(scores.double(), question_of_choice(questions)).exp().float()
    for fields, row in zip(questions, scores.split([len(fields["choices"]) for fields in questions]), strict=True):
        best = int(row.argmax())
        yield Choice(best, fields["choices"][best], row.tolist())


@dataclass
class Chooser(PooledPredictor[Question, Choice]):
    does: ClassVar[str] = "chooses"
    done: ClassVar[str] = "answered"

    def __call__(self, questions: Any, choices: Sequence[str] | None = None, question: str | None = None) -> Any:
        """`choose(context, choices)`, optionally with a question; or a list of dictionaries with these keys."""
        if choices is not None:
            questions = {"context": questions, "choices": choices, "question": question}
        if isinstance(questions, dict):
            return next(self.stream([_checked(questions)]))
        return list(self.stream(_checked(entry) for entry in questions))

    def results(self, inputs: Sequence[Question]) -> Iterator[Choice]:
        return choices_of(inputs, self.answers(inputs)[:, 0])

    def records(self, path: Path | DataFile, targets: bool, **how: Any) -> Iterator[Record]:
        return read_questions(path, targets, **how)

    def evaluate(self, records: Iterable[Record], show: int = 0, quiet: bool = True, **options: Any) -> Evaluation:
        tally = Tally(show)
        for record, choice in self.stream_records(records):
            tally.add(record, choice)
        errors = tally.worst.rows()
        values = {"scores": tally.scores, **({"errors": errors} if show else {})}
        lines = []
        for error in errors:
            asked = [" ".join(error[name].split()) for name in ("context", "question") if name in error]
            lines.append([f"{error['where']}: {_compared(error)}", *(f"  {part}" for part in asked)])
        return Evaluation(tally.worst.seen, values, [score_table(tally.scores)], examples=lines, cut=self.cut)


def _checked(entry: Any) -> Question:
    hint = 'pass {"context": "…", "choices": ["…", "…"]}, perhaps with a "question", or a list of those'
    if not isinstance(entry, dict):
        raise UsageError(f"choose: {entry!r} is not a question", hint)
    try:
        fields = {name: Maybe(text)(entry.get(name)) for name in ("context", "question")}
        fields["choices"] = list_of(text)(list(entry.get("choices") or ()))
        _check_question(fields)
        return fields
    except Bad as bad:
        raise UsageError(f"choose: {bad.what}", hint) from None
