"""Classification: a label, several, or a number for a text or a pair (BERT fine-tuning, arXiv 1810.04805)."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any, ClassVar, overload

import numpy as np
import torch
from torch import Tensor

from allmask.config import Config
from allmask.data import Asked, Batch, Record
from allmask.errors import CheckpointError, UsageError
from allmask.model import Model
from allmask.nn.heads import Labels
from allmask.objectives import answer_loss
from allmask.options import ClassifyOptions
from allmask.tasks.common.auxiliary import Auxiliary
from allmask.tasks.common.evaluation import Evaluation, label_table, score_table
from allmask.tasks.common.heads import (
    BATCH_TOKENS,
    answer_all,
    answers_to,
    cache_features,
    frozen,
    rate_for,
    with_head,
)
from allmask.tasks.common.labelling import Label, Survey, balanced, read_texts, targets_of
from allmask.tasks.common.marks import Mistake, Prediction, mark, mistakes, predictions
from allmask.tasks.common.reading import Reading, Text, asking, log_lengths, read
from allmask.tasks.common.writing import tokenizer_of
from allmask.tasks.metrics.classification import MAIN
from allmask.tasks.metrics.confusion import draw_confusion
from allmask.tasks.task import ModelFolder, Predictor, Task
from allmask.text import Tokenizer
from allmask.training import Score, standard_error

log = logging.getLogger("allmask")
BATCH = 32  # texts a step, about
KINDS = ("single", "multi", "number")  # see Labels


@dataclass(frozen=True)
class Classify(ClassifyOptions, Task):
    """The task as it is saved with a model: how texts become ids. The labels are the model's own."""

    def fitted(self, model: Model) -> Classify:
        """The same with texts no longer than the model's positions."""
        tokenizer_of(model)
        return replace(self, max_length=min(self.max_length, model.config.max_positions))

    # ---- reading -------------------------------------------------------------------------------------------

    def read_data(
        self, data: Path, held_out: Path | None, on_bad_record: str, skipped: Counter[str]
    ) -> tuple[Classify, list[Record], list[Record]]:
        """The task with the kind of labels that the data has, and the records; held-out ones have the same labels."""
        survey = Survey.of(data, on_bad_record)
        labels = survey.labels(data, self.kind)
        pair = survey.pairs > survey.records / 2 if self.pair is None else self.pair
        if self.class_weights == "balanced" and labels.kind != "single":
            raise UsageError("class weights are for one label a text", "leave --class-weights out")
        train = list(read_texts(data, labels, pair, on_bad_record, skipped))
        others = list(read_texts(held_out, labels, pair, on_bad_record, skipped)) if held_out else []
        log.info("labels: %s", _in_words(labels, train))
        return replace(self, pair=pair, kind=labels.kind), train, others

    def read(self, tokenizer: Tokenizer, config: Config, texts: Sequence[Text]) -> Reading:
        """The rows of each text or pair."""
        return read(tokenizer, config, texts, self.max_length, self.truncate)

    def reading(self, model: Model, records: Sequence[Record]) -> Reading:
        made = self.read(tokenizer_of(model), model.config, [text_of(record) for record in records])
        log_lengths(made, self.max_length)
        return made

    # ---- learning ------------------------------------------------------------------------------------------

    def suggested_settings(self, model: Model, records: Sequence[Record]) -> dict[str, Any]:
        """A learning rate for the model's width, and tokens for about 32 texts a step."""
        chosen = records[:: max(1, len(records) // 1000)]
        texts = [text_of(record) for record in chosen]
        reading = self.read(tokenizer_of(model), model.config, texts)
        return {"lr": rate_for(model), "batch_tokens": int(np.ceil(BATCH * np.mean(reading.lengths)))}

    def prepare(
        self, model: Model, records: Sequence[Record], seed: int = 0, prune: bool = False, language: bool = False
    ) -> Model:
        """A model with a head for the labels of the data, without heads that are not used."""
        texts = [part for record in records for part in (record.fields["text"], record.fields["text_b"]) if part]
        return with_head(model, self.labels_of(records), texts, seed, prune, language)

    def labels_of(self, records: Sequence[Record]) -> Labels:
        """The labels of records as `read_data` gives them."""
        survey = Survey()
        for record in records:
            label = record.fields["label"]
            survey.add("list" if isinstance(label, list) else "name" if isinstance(label, str) else "fraction", label)
        return survey.labels(Path("data"), self.kind)

    def workload(
        self, model: Model, records: Sequence[Record], held_out: Sequence[Record] = (),
        auxiliary: Auxiliary | None = None, precision: str = "auto",
    ) -> ClassifyWorkload:  # fmt: skip
        assert model.labels is not None
        targets = targets_of(model.labels, [record.fields["label"] for record in records])
        weights = balanced(targets, len(model.labels)) if self.class_weights == "balanced" else None
        evaluator = None
        if held_out:
            others = self.reading(model, held_out)
            evaluator = Evaluator(list(held_out), others, model.labels, precision, self.pool_windows)
        reading = self.reading(model, records)
        return ClassifyWorkload(reading, targets, evaluator, weights, auxiliary, self.pool_windows)

    def finish(self, model: Model, held_out: Sequence[Record], out: Path, precision: str = "auto") -> Classify:
        """Draw the confusion matrix of the held-out texts: confusion.png."""
        if not held_out or model.labels is None or model.labels.kind != "single":
            return self
        reading = self.read(tokenizer_of(model), model.config, [text_of(record) for record in held_out])
        answers = reading.pooled(answer_all(frozen(model, precision), reading.examples), self.pool_windows)
        targets = targets_of(model.labels, [record.fields["label"] for record in held_out])
        draw_confusion(mark(model.labels, answers, targets).confusion, model.labels.names, out / "confusion.png")
        return self

    # ---- using ---------------------------------------------------------------------------------------------

    @classmethod
    def default_for(cls, opened: ModelFolder) -> Classify | None:
        labels = opened.model.labels
        return cls() if labels is not None and labels.kind in KINDS else None

    def predictor(self, model: Model, precision: str = "auto") -> Classifier:
        return Classifier(model, self, precision)


@dataclass
class ClassifyWorkload:
    """What the training loop asks for: examples by number, and an evaluator."""

    reading: Reading
    targets: Tensor
    evaluator: Evaluator | None = None
    weights: Tensor | None = None  # of each label
    auxiliary: Auxiliary | None = None
    pool: str = "mean"  # of windows

    def __post_init__(self):
        self.lengths = self.reading.lengths

    def cache_features(self, model: Model, precision: str) -> None:
        cache_features(model, precision, self.reading, self.evaluator and self.evaluator.reading)

    def batch(self, numbers: Sequence[int], epoch: int) -> Batch:
        texts = torch.tensor(numbers)
        rows, of = self.reading.rows(numbers)

        def ask(where: Tensor, row: Tensor) -> Asked:
            parts = len(row) > len(texts)
            targets = self.targets[texts if parts else texts[of[row]]]
            weights = None if self.weights is None else self.weights[targets]
            return Asked(where, targets, weights, "classify", of[row] if parts else None, self.pool)

        return asking(self.reading, rows, ask, self.auxiliary, epoch)

    def evaluate(self, model: Model, step: int = 0) -> Score | None:
        return None if self.evaluator is None else self.evaluator(model)


@dataclass
class Evaluator:
    """All metrics on the held-out records, and a few of the errors to look at."""

    records: list[Record]
    reading: Reading
    labels: Labels
    precision: str = "auto"
    pool: str = "mean"  # of windows
    shown: int = 2

    def __call__(self, model: Model) -> Score:
        given = [record.fields["label"] for record in self.records]
        targets = targets_of(self.labels, given)
        answers = self.reading.pooled(answers_to(self.reading, model, self.precision), self.pool)
        loss = answer_loss(self.labels.kind, answers, targets).item() / targets.numel()
        scores = mark(self.labels, answers, targets).scores
        entries = zip(self.records, given, predictions(self.labels, answers), strict=True)
        worst = mistakes(entries, self.shown)
        main, lines = MAIN[self.labels.kind], [*_samples(worst)]
        stderr = standard_error((answers.argmax(-1) == targets).tolist()) if self.labels.kind == "single" else None
        return Score(scores[main], {"loss": loss, **scores}, lines, loss=loss, stderr=stderr, metric=main)


# ---- using a trained model -------------------------------------------------------------------------------------


@dataclass
class Classifier(Predictor):
    """A model with a task head, laid out for speed, and how texts become ids for it."""

    model: Model
    task: Classify
    precision: str = "auto"  # fp32, bf16; auto is the fastest here
    cut: int = field(default=0, init=False)

    does: ClassVar[str] = "classifies"
    done: ClassVar[str] = "classified"
    window = 1024

    def __post_init__(self):
        if self.model.labels is None:
            raise CheckpointError("this model has no task head, so it cannot classify", "teach it: allmask finetune")
        self.labels = self.model.labels
        if self.labels.kind == "number" and len(self.labels) > 1:
            raise CheckpointError(f"this model predicts {len(self.labels)} numbers for a text; one is supported")
        self.task = self.task.fitted(self.model)
        self.frozen = frozen(self.model, self.precision)

    @property
    def max_tokens(self) -> int:
        return self.task.max_length

    @overload
    def __call__(self, texts: Text) -> Prediction: ...
    @overload
    def __call__(self, texts: Sequence[Text]) -> list[Prediction]: ...

    def __call__(self, texts: Text | Sequence[Text]) -> Prediction | list[Prediction]:
        """A text, or a tuple of two; or a list of them."""
        if isinstance(texts, str | tuple) or not isinstance(texts, Iterable):
            return next(self.stream([_checked(texts)]))
        return list(self.stream(_checked(entry) for entry in texts))

    def stream(self, texts: Iterable[Text], window: int | None = None) -> Iterator[Prediction]:
        """A prediction for each, in their order, with no more than a window of them in memory."""
        source = iter(texts)
        while some := list(islice(source, window or self.window)):
            yield from predictions(self.labels, self.answers(some))

    def answers(self, texts: Sequence[Text], batch_tokens: int = BATCH_TOKENS) -> Tensor:
        """Scores (n, labels) of the task head, all texts at once."""
        reading = self.task.read(tokenizer_of(self.model), self.model.config, texts)
        self.cut += reading.cut
        return reading.pooled(answer_all(self.frozen, reading.examples, batch_tokens), self.task.pool_windows)

    def read(
        self, path: Path, on_bad_record: str = "stop", skipped: Counter[str] | None = None, keep: Sequence[str] = (),
        targets: bool = False, limit: int | None = None,
    ) -> Iterator[Record]:  # fmt: skip
        labels, others = (self.labels, keep) if targets else (None, ("id", "label", *keep))
        return islice(read_texts(path, labels, self.task.pair, on_bad_record, skipped, others), limit)

    def expect_lines(self) -> None:
        if self.task.pair:
            raise UsageError("this model compares two texts; a line is one", "name a file with text and text_b")

    def predict(self, records: Sequence[Record], **options: Any) -> Iterator[dict[str, Any]]:
        return (one.to_dict() for one in self.stream((text_of(record) for record in records), len(records)))

    def evaluate(self, records: Iterable[Record], show: int = 0, quiet: bool = True, **options: Any) -> Evaluation:
        answers: list[Tensor] = []
        given: list[Label] = []
        source = iter(records)

        def answered() -> Iterator[tuple[Record, Label, Prediction]]:
            while window := list(islice(source, self.window)):
                answers.append(self.answers([text_of(record) for record in window]))
                for record, found in zip(window, predictions(self.labels, answers[-1]), strict=True):
                    given.append(record.fields["label"])
                    yield record, given[-1], found

        worst = mistakes(answered(), show)
        marks = mark(self.labels, torch.cat(answers), targets_of(self.labels, given))
        confusion = marks.confusion.tolist()
        values = {"scores": marks.scores, "labels": marks.labels, "confusion": confusion}
        values = {name: value for name, value in values.items() if value}
        tables = [score_table(marks.scores), *([label_table(marks.labels, confusion)] if marks.labels else [])]
        lines = [[f"{one.record.where}: {one.labels()}", *_texts(one)] for one in worst]
        values |= {"errors": [one.to_dict() for one in worst]} if show else {}
        return Evaluation(len(given), values, tables, examples=lines, cut=self.cut)


def _checked(entry: Any) -> Text:
    if isinstance(entry, str):
        return entry
    if isinstance(entry, tuple | list) and len(entry) == 2 and all(isinstance(part, str) for part in entry):
        return entry[0], entry[1]
    raise UsageError(f"classify: {entry!r} is no text", 'pass "…", a pair ("…", "…"), or a list of those')


def _texts(mistake: Mistake) -> list[str]:
    fields = mistake.record.fields
    return [f"  {fields[name]}" for name in ("text", "text_b") if fields[name]]


def text_of(record: Record) -> Text:
    first, second = record.fields["text"], record.fields.get("text_b")
    return first if second is None else (first, second)


# ---- words ---------------------------------------------------------------------------------------------------


def _in_words(labels: Labels, records: Iterable[Record]) -> str:
    given = [record.fields["label"] for record in records]
    if labels.kind == "number":
        return f"numbers from {min(given):g} to {max(given):g}"
    names = given if labels.kind == "single" else [name for label in given for name in label]
    counts = Counter(names)
    listed = ", ".join(f"{name} {counts[name]:,}" for name in labels.names[:12]) + (", …" if len(labels) > 12 else "")
    return listed if labels.kind == "single" else f"any of {listed}"


def _samples(worst: Sequence[Mistake]) -> Iterable[str]:
    for one in worst:
        yield f"  text       {one.text()}"
        yield f"  label      {one.labels()}"
        yield ""
