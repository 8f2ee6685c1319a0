"""A base for tasks whose head gives scores to a text or a pair of texts. docs/extend.md builds one on it.

A subclass names the fields of its records and the labels of its head, and writes three short methods: what the head
should predict (`target`), what its scores mean (`prediction`), and how good the predictions are (`score`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from allmask.data import Bad, Checker, DataFile, Record, read_records
from allmask.data.fields import as_checkers, check_row
from allmask.data.fields import show as as_json
from allmask.errors import UsageError
from allmask.model import Model
from allmask.nn.heads import Labels
from allmask.objectives import answer_loss
from allmask.options import ClassifyOptions, Options, another_default
from allmask.tasks.classify import Classify, ClassifyWorkload
from allmask.tasks.common.evaluation import Evaluation, score_table
from allmask.tasks.common.heads import HeldOut, PooledPredictor, PooledTask
from allmask.tasks.common.reading import Reading, Text
from allmask.tasks.task import ModelFolder
from allmask.training import Score


@dataclass(frozen=True)
class TextTask(Options, PooledTask):
    """Fields of a record have checkers, see allmask/data/fields.py. The kind of `labels` decides the loss."""

    inputs: ClassVar[Mapping[str, Checker | type]]  # the fields that the model reads: one text, or two
    targets: ClassVar[Mapping[str, Checker | type]]  # the fields that `target` and `score` use
    labels: ClassVar[Labels]  # of the head
    kinds: ClassVar[tuple[str, ...]] = Classify.kinds
    suggests: ClassVar[dict[str, str]] = ClassifyOptions.suggests
    open_settings: ClassVar[frozenset[str]] = ClassifyOptions.open_settings

    max_length: int = another_default(ClassifyOptions, "max_length", 512)
    truncate: str = another_default(ClassifyOptions, "truncate", "head")
    pool_windows: str = another_default(ClassifyOptions, "pool_windows", "mean")

    def target(self, fields: dict[str, Any]) -> int | list[float]:
        """Return the index of a record's label; if the labels are "multi" or "number", a number for each label."""
        raise NotImplementedError

    def prediction(self, scores: Tensor) -> dict[str, Any]:
        """Return the fields to write for a text, such as {"prediction": 4}, from the scores (labels,) of the head."""
        raise NotImplementedError

    def score(self, predictions: Sequence[dict[str, Any]], records: Sequence[Record]) -> dict[str, float]:
        """Return metrics by name. The first one chooses the best weights: the higher, the better."""
        raise NotImplementedError

    # ---- training ------------------------------------------------------------------------------------------

    def read(
        self, path: Path | DataFile, on_bad_record: str = "stop", skipped: Counter[str] | None = None,
        targets: bool = True,
    ) -> Iterator[Record]:  # fmt: skip
        """Read the records of a file, with or without `targets`."""
        fields = {**self.inputs, **(self.targets if targets else {})}
        return read_records(path, fields, on_bad_record, skipped)

    def read_data(
        self, data: Path | DataFile, held_out: Path | DataFile | None, on_bad_record: str, skipped: Counter[str]
    ) -> tuple[Self, list[Record], list[Record]]:
        train = list(self.read(data, on_bad_record, skipped))
        return self, train, list(self.read(held_out, on_bad_record, skipped)) if held_out else []

    def labels_of(self, records: Sequence[Record]) -> Labels:
        return self.labels

    def input_text(self, record: Record) -> str:
        return "\n".join(self.texts_of([record]))

    def label_counts(self, records: Sequence[Record]) -> Counter[str]:
        targets = [self.target(record.fields) for record in records]
        return Counter(self.labels.names[target] for target in targets if isinstance(target, int))

    def texts_of(self, records: Sequence[Record]) -> list[str]:
        return [record.fields[name] for record in records for name in self.inputs]

    def input_of(self, record: Record) -> Record:
        return record

    def texts(self, inputs: Sequence[Record]) -> list[Text]:
        texts: Any = [tuple(record.fields[name] for name in self.inputs) for record in inputs]
        return [text if len(text) == 2 else text[0] for text in texts]

    def examples(self, model: Model, records: Sequence[Record], reading: Reading, **given: Any) -> ClassifyWorkload:
        return ClassifyWorkload(self, reading, **given, targets=self.targets_of(records))

    def targets_of(self, records: Sequence[Record]) -> Tensor:
        return torch.tensor([self.target(record.fields) for record in records])

    def evaluate(self, held_out: HeldOut, model: Model) -> Score:
        scores, targets = held_out.answers(model), self.targets_of(held_out.records)
        loss = answer_loss(self.labels.kind, scores, targets).item() / targets.numel()
        metrics = self.score([self.prediction(row) for row in scores], held_out.records)
        first = next(iter(metrics))
        return Score(metrics[first], {"loss": loss, **metrics}, loss=loss, metric=first)

    # ---- using a trained model -----------------------------------------------------------------------------

    @classmethod
    def default_for(cls, opened: ModelFolder) -> Self | None:
        return None  # the kind of a head does not show that it was trained for this task

    def predictor(self, model: Model, precision: str = "auto") -> TextPredictor:
        return TextPredictor(model, self, precision)


@dataclass
class TextPredictor(PooledPredictor[Record, dict[str, Any]]):
    does: ClassVar[str] = "predicts"
    done: ClassVar[str] = "predicted"

    def __call__(self, inputs: Any) -> Any:
        """Predict for a text, or for a dictionary of input fields; for a list of those, return a list."""
        if isinstance(inputs, list):
            return list(self.stream(map(self._record, inputs)))
        return next(self.results([self._record(inputs)]))

    def _record(self, entry: Any) -> Record:
        fields = entry if isinstance(entry, dict) else {next(iter(self.task.inputs)): entry}
        try:
            return Record(check_row(as_checkers(self.task.inputs), fields), "input")
        except Bad as bad:
            raise UsageError(f"{self.task.name}: {bad.what}", f"it reads {', '.join(self.task.inputs)}") from None

    def records(self, path: Path | DataFile, targets: bool, **how: Any) -> Iterator[Record]:
        return self.task.read(path, targets=targets, **how)

    def expect_lines(self) -> None:
        if list(self.task.inputs) != ["text"]:
            super().expect_lines()

    def results(self, inputs: Sequence[Record]) -> Iterator[dict[str, Any]]:
        return map(self.task.prediction, self.answers(inputs))

    def predict(self, records: Sequence[Record], **options: Any) -> Iterator[dict[str, Any]]:
        return self.results(records)

    def evaluate(self, records: Iterable[Record], show: int = 0, quiet: bool = True, **options: Any) -> Evaluation:
        """Score all predictions; the examples are the first ones that differ from all targets of their record."""
        rows, found = zip(*self.stream_records(records), strict=True)
        scores = self.task.score(found, rows)
        errors = (
            {"where": row.where, **row.fields, **one}
            for row, one in zip(rows, found, strict=True)
            if one.get("prediction") not in [row.fields[name] for name in self.task.targets]
        )
        shown = list(islice(errors, show))
        values = {"scores": scores, **({"errors": shown} if show else {})}
        examples = [
            [f"{error.pop('where')}:", *(f"  {name} {as_json(value)}" for name, value in error.items())]
            for error in map(dict, shown)
        ]
        return Evaluation(len(rows), values, [score_table(scores)], examples=examples, cut=self.cut)
