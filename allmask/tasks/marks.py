"""A classifier's answers marked: all metrics of a kind, the confusion matrix, the errors worth reading."""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from torch import Tensor

from allmask.data import Record
from allmask.heads import Labels
from allmask.tasks.classifier import Prediction
from allmask.tasks.labelling import Label
from allmask.tasks.metrics import by_label, confusion, multi_scores, number_scores, single_scores


@dataclass(frozen=True)
class Marks:
    scores: dict[str, float]
    labels: dict[str, dict[str, float]] = field(default_factory=dict)  # precision, recall, F1 of each
    confusion: np.ndarray = field(default_factory=lambda: np.zeros((0, 0), dtype=np.int64))  # of single labels


def mark(labels: Labels, answers: Tensor, gold: Tensor) -> Marks:
    """Of the task head's scores (n, labels) and what it should have said."""
    if labels.kind == "number":
        return Marks(number_scores(gold[:, 0].double().numpy(), answers[:, 0].double().numpy()))
    if labels.kind == "single":
        matrix = confusion(gold.numpy(), answers.argmax(-1).numpy(), len(labels))
        each = by_label(np.diag(matrix), matrix.sum(1), matrix.sum(0))
        return Marks(single_scores(matrix), dict(zip(labels.names, each, strict=True)), matrix)
    right, found = gold.bool().numpy(), (answers > 0).numpy()
    each = by_label((right & found).sum(0), right.sum(0), found.sum(0))
    return Marks(multi_scores(right, found), dict(zip(labels.names, each, strict=True)))


@dataclass(frozen=True)
class Mistake:
    record: Record
    gold: Label
    prediction: Prediction

    @property
    def size(self) -> float:
        """How wrong: how far a number is off, or how sure the classifier was of what is not so."""
        gold, said, shares = self.gold, self.prediction.label, self.prediction.probabilities
        if isinstance(gold, str):
            return 1.0 - shares[gold] if said != gold else 0.0
        if isinstance(gold, list):
            wrong = [1.0 - share if name in gold else share for name, share in shares.items()]
            return max(wrong) if max(wrong) >= 0.5 else 0.0
        assert isinstance(said, float)
        return abs(gold - said)

    def said(self, label: Label) -> str:
        if isinstance(label, list):
            return ", ".join(label) or "nothing"
        return label if isinstance(label, str) else f"{label:.3g}"

    def sure(self) -> str:
        share = self.prediction.probability
        return "" if share is None else f" ({share:.0%})"

    def shortened(self, limit: int = 100) -> str:
        parts = (self.record.fields["text"], self.record.fields["text_b"])
        joined = " | ".join(" ".join(part.split()) for part in parts if part)
        return joined if len(joined) <= limit else joined[: limit - 1] + "…"

    def to_dict(self) -> dict[str, Any]:
        texts = {name: self.record.fields[name] for name in ("text", "text_b") if self.record.fields[name]}
        return {"where": self.record.where, **texts, "label": self.gold, **self.prediction.to_dict()}


def mistakes(entries: Iterable[tuple[Record, Label, Prediction]], count: int) -> list[Mistake]:
    """The largest, largest first; no more than these are remembered."""
    made = (Mistake(*entry) for entry in entries)
    return heapq.nlargest(count, (one for one in made if one.size > 0.0), key=lambda one: one.size)
