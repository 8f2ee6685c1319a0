"""Metrics of classifiers: accuracy, F1, Matthews, Pearson, Spearman. Arrays in, plain numbers out.

The definitions are scikit-learn's and scipy's; a ratio with denominator 0, undefined there, is 0 here.
"""

from __future__ import annotations

import numpy as np

MAIN = {"single": "accuracy", "multi": "macro_f1", "number": "pearson"}  # metric that chooses the best checkpoint


def confusion(targets: np.ndarray, predicted: np.ndarray, labels: int) -> np.ndarray:
    """Return the confusion matrix (labels, labels): true labels by row, predicted labels by column."""
    return np.bincount(targets * labels + predicted, minlength=labels**2).reshape(labels, labels)


def single_scores(matrix: np.ndarray) -> dict[str, float]:
    """Return the metrics for one label per text, from the confusion matrix. Micro F1 would equal the accuracy."""
    right, total = np.trace(matrix), matrix.sum()
    targets, predicted = matrix.sum(1), matrix.sum(0)
    seen = targets + predicted > 0  # as in scikit-learn, a label that is neither a target nor predicted does not count
    return {
        "accuracy": _ratio(right, total),
        "macro_f1": _mean(f1_of(np.diag(matrix), targets, predicted)[seen]),
        "matthews": _matthews(right, total, targets, predicted),
    }


def multi_scores(targets: np.ndarray, predicted: np.ndarray) -> dict[str, float]:
    """Return the metrics for several labels per text, (texts, labels) booleans; `exact`: all labels are right."""
    right, wanted, given = (targets & predicted).sum(0), targets.sum(0), predicted.sum(0)
    micro = f1_of(right.sum(keepdims=True), wanted.sum(keepdims=True), given.sum(keepdims=True))
    return {
        "micro_f1": float(micro[0]),
        "macro_f1": _mean(f1_of(right, wanted, given)),
        "exact": _mean((targets == predicted).all(1)),
    }


def number_scores(targets: np.ndarray, predicted: np.ndarray) -> dict[str, float]:
    return {
        "pearson": pearson(targets, predicted),
        "spearman": pearson(_ranks(targets), _ranks(predicted)),
        "mean_error": _mean(np.abs(targets - predicted)),
    }


def by_label(right: np.ndarray, targets: np.ndarray, predicted: np.ndarray) -> list[dict[str, float]]:
    """Return precision, recall and F1 by label; the arguments count true positives, targets and predictions."""
    counts = (right, targets, predicted, f1_of(right, targets, predicted))
    rows = zip(*(values.tolist() for values in counts), strict=True)
    return [{"precision": _ratio(r, p), "recall": _ratio(r, t), "f1": f1, "texts": t} for r, t, p, f1 in rows]


def f1_of(right: np.ndarray, targets: np.ndarray, predicted: np.ndarray) -> np.ndarray:
    return 2.0 * right / np.maximum(targets + predicted, 1)


def pearson(a: np.ndarray, b: np.ndarray) -> float:
    a, b = a - a.mean(), b - b.mean()
    return _ratio(float(a @ b), float(np.sqrt((a @ a) * (b @ b))))


def _ranks(values: np.ndarray) -> np.ndarray:
    """Return the rank of each value; equal values get their mean rank."""
    _, place, counts = np.unique(values, return_inverse=True, return_counts=True)
    last = counts.cumsum()
    return ((last - counts + last - 1) / 2.0)[place]


def _matthews(right: int, total: int, targets: np.ndarray, predicted: np.ndarray) -> float:
    """Return Matthews' correlation for any number of labels (Gorodkin, 2004)."""
    targets, predicted = targets.astype(np.float64), predicted.astype(np.float64)
    spread = (float(total) ** 2 - targets @ targets) * (float(total) ** 2 - predicted @ predicted)
    return _ratio(float(right * total - targets @ predicted), float(np.sqrt(spread)))


def _ratio(part: float, whole: float) -> float:
    return float(part) / float(whole) if whole else 0.0


def _mean(values: np.ndarray) -> float:
    return float(values.mean()) if len(values) else 0.0
