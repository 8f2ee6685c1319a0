"""Predictions of a classifier of texts or images, and their metrics, confusion matrix and worst errors."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from torch import Tensor

from allmask.data import Record
from allmask.nn.heads import Labels
from allmask.tasks.common.evaluation import Worst
from allmask.tasks.common.labelling import Label
from allmask.tasks.metrics.classification import by_label, confusion, multi_scores, number_scores, single_scores
from allmask.terminal import shortened


@dataclass(frozen=True)
class Prediction:
    """`label` is a name, a list of names, or a number; a number has no probabilities."""

    label: str | list[str] | float
    probabilities: dict[str, float]

    @property
    def probability(self) -> float | None:
        """The probability of the label, if it is a single name."""
        return self.probabilities[self.label] if isinstance(self.label, str) else None

    def to_dict(self) -> dict[str, Any]:
        if isinstance(self.label, float):
            return {"prediction": self.label}
        share = {} if self.probability is None else {"probability": self.probability}
        return {"prediction": self.label, **share, "probabilities": self.probabilities}


def predictions(labels: Labels, answers: Tensor) -> Iterator[Prediction]:
    """Yield the prediction for each row of scores (n, labels)."""
    if labels.kind == "number":
        yield from (Prediction(float(row[0]), {}) for row in answers.tolist())
        return
    # in fp64: torch's sigmoid in fp32 rounds some values by where they are in a tensor
    shares = answers.softmax(-1) if labels.kind == "single" else answers.double().sigmoid().float()
    for row in shares.tolist():
        by_name = dict(zip(labels.names, row, strict=True))
        best = max(by_name, key=by_name.__getitem__)
        chosen = best if labels.kind == "single" else [name for name, share in by_name.items() if share > 0.5]
        yield Prediction(chosen, by_name)


@dataclass(frozen=True)
class Marks:
    scores: dict[str, float]
    labels: dict[str, dict[str, float]] = field(default_factory=dict)  # precision, recall, F1 by label
    confusion: np.ndarray = field(default_factory=lambda: np.zeros((0, 0), dtype=np.int64))  # for single labels


def mark(labels: Labels, answers: Tensor, targets: Tensor) -> Marks:
    """Compute all metrics of the task head's scores (n, labels)."""
    if labels.kind == "number":
        return Marks(number_scores(targets[:, 0].double().numpy(), answers[:, 0].double().numpy()))
    if labels.kind == "single":
        matrix = confusion(targets.numpy(), answers.argmax(-1).numpy(), len(labels))
        each = by_label(np.diag(matrix), matrix.sum(1), matrix.sum(0))
        return Marks(single_scores(matrix), dict(zip(labels.names, each, strict=True)), matrix)
    right, found = targets.bool().numpy(), (answers > 0).numpy()
    each = by_label((right & found).sum(0), right.sum(0), found.sum(0))
    return Marks(multi_scores(right, found), dict(zip(labels.names, each, strict=True)))


@dataclass(frozen=True)
class Mistake:
    record: Record
    target: Label
    prediction: Prediction

    @property
    def size(self) -> float:
        """The error of a number, or the probability given to wrong labels; 0 if the prediction is right."""
        target, label, shares = self.target, self.prediction.label, self.prediction.probabilities
        if isinstance(target, str):
            return 1.0 - shares[target] if label != target else 0.0
        if isinstance(target, list):
            wrong = [1.0 - share if name in target else share for name, share in shares.items()]
            return max(wrong) if max(wrong) >= 0.5 else 0.0
        assert isinstance(label, float)
        return abs(target - label)

    def labels(self) -> str:
        """`true positive, predicted negative (87%)`."""
        share = self.prediction.probability
        percent = "" if share is None else f" ({share:.0%})"
        return f"true {_in_words(self.target)}, predicted {_in_words(self.prediction.label)}{percent}"

    def text(self) -> str:
        parts = (self.record.fields["text"], self.record.fields["text_b"])
        return shortened(" | ".join(" ".join(part.split()) for part in parts if part))

    def to_dict(self) -> dict[str, Any]:
        texts = {name: self.record.fields[name] for name in ("text", "text_b") if self.record.fields[name]}
        return {"where": self.record.where, **texts, "label": self.target, **self.prediction.to_dict()}


def mistakes(entries: Iterable[tuple[Record, Label, Prediction]], count: int) -> list[Mistake]:
    """Return the `count` largest mistakes, largest first; all entries are consumed."""
    worst = Worst(count)
    for entry in entries:
        one = Mistake(*entry)
        worst.add(one.size, lambda one=one: one)
    return worst.rows()


def _in_words(label: Label) -> str:
    if isinstance(label, list):
        return ", ".join(label) or "nothing"
    return label if isinstance(label, str) else f"{label:.3g}"
