"""Classification: a label, several labels, or a number for a text or a pair (BERT fine-tuning, arXiv 1810.04805)."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any, ClassVar, overload

import torch
from torch import Tensor

from allmask.data import Asked, Batch, DataFile, Record
from allmask.errors import CheckpointError, UsageError
from allmask.model import Model
from allmask.nn.heads import Labels
from allmask.objectives import answer_loss
from allmask.options import ClassifyOptions
from allmask.tasks.common.evaluation import Evaluation, label_table, score_table
from allmask.tasks.common.heads import HeldOut, PooledPredictor, PooledTask, PooledWorkload
from allmask.tasks.common.labelling import Label, Survey, balanced, read_texts, targets_of
from allmask.tasks.common.marks import Prediction, mark, mistakes, predictions
from allmask.tasks.common.reading import Reading, Text, row_batch
from allmask.tasks.metrics.classification import MAIN
from allmask.tasks.metrics.confusion import draw_confusion
from allmask.training import Score, standard_error

log = logging.getLogger("allmask")


@dataclass(frozen=True)
class Classify(ClassifyOptions, PooledTask):
    """The options say how texts become token ids; the labels are saved with the model."""

    kinds: ClassVar[tuple[str, ...]] = ("single", "multi", "number")

    # ---- reading -------------------------------------------------------------------------------------------

    def read_data(
        self, data: Path | DataFile, held_out: Path | DataFile | None, on_bad_record: str, skipped: Counter[str]
    ) -> tuple[Classify, list[Record], list[Record]]:
        """Also return the task with the kind of labels in the data; held-out records must have the same labels."""
        survey = Survey.of(data, on_bad_record)
        labels = survey.labels(data, self.kind)
        pair = survey.pairs > survey.records / 2 if self.pair is None else self.pair
        if self.class_weights == "balanced" and labels.kind != "single":
            raise UsageError("class weights are for one label a text", "leave --class-weights out")
        train = list(read_texts(data, labels, pair, on_bad_record, skipped))
        others = list(read_texts(held_out, labels, pair, on_bad_record, skipped)) if held_out else []
        log.info("labels: %s", _in_words(labels, [record.fields["label"] for record in train]))
        return replace(self, pair=pair, kind=labels.kind), train, others

    def input_of(self, record: Record) -> Text:
        first, second = record.fields["text"], record.fields.get("text_b")
        return first if second is None else (first, second)

    def texts_of(self, records: Sequence[Record]) -> list[str]:
        return [part for record in records for part in (record.fields["text"], record.fields["text_b"]) if part]

    def input_text(self, record: Record) -> str:
        return "\n".join(self.texts_of([record]))

    def label_counts(self, records: Sequence[Record]) -> Counter[str]:
        given = [record.fields["label"] for record in records]
        return Counter(name for label in given for name in (label if isinstance(label, list) else [f"{label}"]))

    def labels_of(self, records: Sequence[Record]) -> Labels:
        survey = Survey()
        for record in records:
            label = record.fields["label"]
            survey.add("list" if isinstance(label, list) else "name" if isinstance(label, str) else "fraction", label)
        return survey.labels(Path("data"), self.kind)

    # ---- training ------------------------------------------------------------------------------------------

    def keeps(self, known: Labels, labels: Labels) -> bool:
        """In any order: targets follow that of the model."""
        return known.kind == labels.kind and sorted(known.names) == sorted(labels.names)

    def examples(self, model: Model, records: Sequence[Record], reading: Reading, **given: Any) -> ClassifyWorkload:
        assert model.labels is not None
        targets = targets_of(model.labels, [record.fields["label"] for record in records])
        weights = balanced(targets, len(model.labels)) if self.class_weights == "balanced" else None
        return ClassifyWorkload(self, reading, **given, targets=targets, weights=weights)

    def evaluate(self, held_out: HeldOut, model: Model) -> Score:
        labels, given = model.labels, [record.fields["label"] for record in held_out.records]
        assert labels is not None
        targets, answers = targets_of(labels, given), held_out.answers(model)
        loss = answer_loss(labels.kind, answers, targets).item() / targets.numel()
        scores, metric = mark(labels, answers, targets).scores, MAIN[labels.kind]
        worst = mistakes(zip(held_out.records, given, predictions(labels, answers), strict=True), held_out.shown)
        samples = [line for one in worst for line in (f"  text       {one.text()}", f"  label      {one.labels()}", "")]
        stderr = standard_error((answers.argmax(-1) == targets).tolist()) if labels.kind == "single" else None
        return Score(scores[metric], {"loss": loss, **scores}, samples, loss=loss, stderr=stderr, metric=metric)

    def finish(self, model: Model, held_out: Sequence[Record], out: Path, precision: str = "auto") -> Classify:
        """Draw the confusion matrix of the held-out texts, confusion.png; compare with the most frequent label."""
        if not held_out or model.labels is None or model.labels.kind != "single":
            return self
        answers = HeldOut(self, held_out, self.reading(model, held_out), precision).answers(model)
        given = [record.fields["label"] for record in held_out]
        marks = mark(model.labels, answers, targets_of(model.labels, given))
        draw_confusion(marks.confusion, model.labels.names, out / "confusion.png")
        ours, [(label, count)] = marks.scores["accuracy"], Counter(given).most_common(1)
        found = (
            f"accuracy on {len(held_out):,} held-out texts: {ours:.3f}; if all were {label}: {count / len(given):.3f}"
        )
        if ours > count / len(given):
            log.info("%s", found)
        else:
            log.warning("%s; the model is not better: more records or more epochs may help", found)
        return self

    def predictor(self, model: Model, precision: str = "auto") -> Classifier:
        return Classifier(model, self, precision)


def _in_words(labels: Labels, given: Sequence[Any]) -> str:
    if labels.kind == "number":
        return f"numbers from {min(given):g} to {max(given):g}"
    counts = Counter(given if labels.kind == "single" else [name for names in given for name in names])
    listed = ", ".join(f"{name} {counts[name]:,}" for name in labels.names[:12]) + (", …" if len(labels) > 12 else "")
    return listed if labels.kind == "single" else f"any of {listed}"


@dataclass
class ClassifyWorkload(PooledWorkload):
    targets: Tensor
    weights: Tensor | None = None  # of each label

    def __post_init__(self):
        self.lengths = self.reading.lengths

    def batch(self, numbers: Sequence[int], epoch: int) -> Batch:
        texts = torch.tensor(numbers)
        rows, text_of_row = self.reading.rows(numbers)

        def ask(where: Tensor, row: Tensor) -> Asked:
            several = len(row) > len(texts)  # pooled tokens per text
            targets = self.targets[texts if several else texts[text_of_row[row]]]
            weights = None if self.weights is None else self.weights[targets]
            texts_asked = text_of_row[row] if several else None
            return Asked(where, targets, weights, self.task.name, texts_asked, self.task.pool_windows)

        return row_batch(self.reading, rows, ask, self.auxiliary, epoch)


# ---- using a trained model -------------------------------------------------------------------------------------


@dataclass
class Classifier(PooledPredictor[Text, Prediction]):
    does: ClassVar[str] = "classifies"
    done: ClassVar[str] = "classified"
    window = 1024

    def __post_init__(self):
        super().__post_init__()
        if self.labels.kind == "number" and len(self.labels) > 1:
            raise CheckpointError(f"this model predicts {len(self.labels)} numbers for a text; one is supported")

    @overload
    def __call__(self, texts: Text) -> Prediction: ...
    @overload
    def __call__(self, texts: Sequence[Text]) -> list[Prediction]: ...

    def __call__(self, texts: Text | Sequence[Text]) -> Prediction | list[Prediction]:
        """`texts` is a text, a tuple of two texts, or a list of those."""
        if isinstance(texts, str | tuple) or not isinstance(texts, Iterable):
            return next(self.stream([_checked(texts)]))
        return list(self.stream(_checked(entry) for entry in texts))

    def results(self, inputs: Sequence[Text]) -> Iterator[Prediction]:
        return predictions(self.labels, self.answers(inputs))

    def records(self, path: Path | DataFile, targets: bool, **how: Any) -> Iterator[Record]:
        return read_texts(path, self.labels if targets else None, self.task.pair, **how)

    def expect_lines(self) -> None:
        if self.task.pair:
            raise UsageError("this model compares two texts; a line is one", "name a file with text and text_b")

    def evaluate(self, records: Iterable[Record], show: int = 0, quiet: bool = True, **options: Any) -> Evaluation:
        answers: list[Tensor] = []
        given: list[Label] = []
        source = iter(records)

        def predicted() -> Iterator[tuple[Record, Label, Prediction]]:
            while window := list(islice(source, self.window)):
                answers.append(self.answers([*map(self.task.input_of, window)]))
                labels = [record.fields["label"] for record in window]
                given.extend(labels)
                yield from zip(window, labels, predictions(self.labels, answers[-1]), strict=True)

        worst = mistakes(predicted(), show)
        marks = mark(self.labels, torch.cat(answers), targets_of(self.labels, given))
        confusion = marks.confusion.tolist()
        values = {"scores": marks.scores, "labels": marks.labels, "confusion": confusion}
        values = {name: value for name, value in values.items() if value}
        tables = [score_table(marks.scores), *([label_table(marks.labels, confusion)] if marks.labels else [])]
        values |= {"errors": [one.to_dict() for one in worst]} if show else {}
        lines = []
        for one in worst:
            texts = [one.record.fields[name] for name in ("text", "text_b") if one.record.fields[name]]
            lines.append([f"{one.record.where}: {one.labels()}", *(f"  {text}" for text in texts)])
        return Evaluation(len(given), values, tables, examples=lines, cut=self.cut)


def _checked(entry: Any) -> Text:
    if isinstance(entry, str):
        return entry
    if isinstance(entry, tuple | list) and len(entry) == 2 and all(isinstance(part, str) for part in entry):
        return entry[0], entry[1]
    raise UsageError(f"classify: {entry!r} is not a text", 'pass "…", a pair ("…", "…"), or a list of those')
