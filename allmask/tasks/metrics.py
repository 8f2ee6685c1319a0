"""How good answers are: accuracy, F1, Matthews, Pearson, Spearman. Arrays in, plain numbers out.

The definitions are scikit-learn's and scipy's; where one of those is undefined (nothing to divide by) it is 0 here.
"""

from __future__ import annotations

import numpy as np

MAIN = {
    "single": "accuracy",
    "multi": "macro_f1",
    "number": "pearson",
}  # of each kind, what chooses the best checkpoint


def confusion(gold: np.ndarray, found: np.ndarray, labels: int) -> np.ndarray:
    """(labels, labels): how many of each label, by row, were taken for each, by column."""
    return np.bincount(gold * labels + found, minlength=labels**2).reshape(labels, labels)


def single_scores(matrix: np.ndarray) -> dict[str, float]:
    """Of one label a text, from the confusion matrix. Micro F1 would be the accuracy."""
    right, total = np.trace(matrix), matrix.sum()
    gold, found = matrix.sum(1), matrix.sum(0)
    seen = gold + found > 0  # as scikit-learn, a label that is neither asked for nor given counts for nothing
    return {
        "accuracy": _ratio(right, total),
        "macro_f1": _mean(f1_of(np.diag(matrix), gold, found)[seen]),
        "matthews": _matthews(right, total, gold, found),
    }


def multi_scores(gold: np.ndarray, found: np.ndarray) -> dict[str, float]:
    """Of any labels a text: (texts, labels) booleans both. `exact` is the share of texts with all labels right."""
    right, asked, given = (gold & found).sum(0), gold.sum(0), found.sum(0)
    micro = f1_of(right.sum(keepdims=True), asked.sum(keepdims=True), given.sum(keepdims=True))
    return {
        "micro_f1": float(micro[0]),
        "macro_f1": _mean(f1_of(right, asked, given)),
        "exact": _mean((gold == found).all(1)),
    }


def number_scores(gold: np.ndarray, found: np.ndarray) -> dict[str, float]:
    """Of a number a text."""
    return {
        "pearson": pearson(gold, found),
        "spearman": pearson(_ranks(gold), _ranks(found)),
        "mean_error": _mean(np.abs(gold - found)),
    }


def by_label(right: np.ndarray, gold: np.ndarray, found: np.ndarray) -> list[dict[str, float]]:
    """Precision, recall and F1 of each label, from how often it was right, asked for and given."""
    rows = zip(right.tolist(), gold.tolist(), found.tolist(), f1_of(right, gold, found).tolist(), strict=True)
    return [{"precision": _ratio(r, f), "recall": _ratio(r, g), "f1": f1, "texts": g} for r, g, f, f1 in rows]


def f1_of(right: np.ndarray, gold: np.ndarray, found: np.ndarray) -> np.ndarray:
    return 2.0 * right / np.maximum(gold + found, 1)


def pearson(a: np.ndarray, b: np.ndarray) -> float:
    a, b = a - a.mean(), b - b.mean()
    return _ratio(float(a @ b), float(np.sqrt((a @ a) * (b @ b))))


def _ranks(values: np.ndarray) -> np.ndarray:
    """The rank of each; equal values share the mean of theirs."""
    _, place, counts = np.unique(values, return_inverse=True, return_counts=True)
    last = counts.cumsum()
    return ((last - counts + last - 1) / 2.0)[place]


def _matthews(right: int, total: int, gold: np.ndarray, found: np.ndarray) -> float:
    """The correlation of asked and given labels, for any number of labels (Gorodkin, 2004)."""
    gold, found = gold.astype(np.float64), found.astype(np.float64)
    spread = (float(total) ** 2 - gold @ gold) * (float(total) ** 2 - found @ found)
    return _ratio(float(right * total - gold @ found), float(np.sqrt(spread)))


def _ratio(part: float, whole: float) -> float:
    return float(part) / float(whole) if whole else 0.0


def _mean(values: np.ndarray) -> float:
    return float(values.mean()) if len(values) else 0.0
