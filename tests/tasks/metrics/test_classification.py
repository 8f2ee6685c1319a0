"""Metrics against scikit-learn and scipy, and against values worked by hand."""

from __future__ import annotations

import math
import warnings

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from allmask.tasks.metrics.classification import by_label, confusion, multi_scores, number_scores, single_scores

PAIRS = st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3)), min_size=1, max_size=30)
ROWS = st.lists(st.tuples(*[st.booleans()] * 6), min_size=1, max_size=20)
NUMBERS = st.lists(st.tuples(*[st.sampled_from([-2.0, 0.0, 0.5, 1.0, 3.25])] * 2), min_size=2, max_size=20)


def test_single_labels_by_hand():
    """a a a b b c, taken for a a b b c c."""
    matrix = confusion(np.array([0, 0, 0, 1, 1, 2]), np.array([0, 0, 1, 1, 2, 2]), 3)
    assert matrix.tolist() == [[2, 1, 0], [0, 1, 1], [0, 0, 1]]
    scores = single_scores(matrix)
    assert scores["accuracy"] == pytest.approx(4 / 6)
    assert scores["macro_f1"] == pytest.approx((4 / 5 + 2 / 4 + 2 / 3) / 3)
    # (4·6 − (3·2 + 2·2 + 1·2)) / √((36 − 14)(36 − 12))
    assert scores["matthews"] == pytest.approx(12 / math.sqrt(22 * 24))
    a, b, c = by_label(np.diag(matrix), matrix.sum(1), matrix.sum(0))
    assert (a["precision"], a["recall"], b["precision"], c["texts"]) == (1.0, pytest.approx(2 / 3), 0.5, 1)


def test_several_labels_by_hand():
    true = np.array([[1, 0], [1, 1], [0, 0]], dtype=bool)
    found = np.array([[1, 0], [0, 1], [0, 1]], dtype=bool)
    assert multi_scores(true, found) == {
        "micro_f1": pytest.approx(2 * 2 / (3 + 3)),
        "macro_f1": pytest.approx((2 / 3 + 2 / 3) / 2),
        "exact": pytest.approx(1 / 3),
    }


def test_numbers_by_hand():
    scores = number_scores(np.array([1.0, 2.0, 3.0]), np.array([1.0, 4.0, 9.0]))
    assert scores["spearman"] == 1.0 and scores["mean_error"] == pytest.approx(8 / 3)
    assert scores["pearson"] == pytest.approx(8 / math.sqrt(2 * (98 - 196 / 3)))
    tied = number_scores(np.array([1.0, 2.0, 2.0, 3.0]), np.array([1.0, 2.0, 3.0, 4.0]))
    assert tied["spearman"] == pytest.approx(4.5 / math.sqrt(4.5 * 5))


def test_nothing_to_divide_by_is_zero():
    assert number_scores(np.ones(3), np.arange(3.0))["pearson"] == 0.0
    assert single_scores(confusion(np.zeros(3, int), np.zeros(3, int), 2)) == {
        "accuracy": 1.0,
        "macro_f1": 1.0,
        "matthews": 0.0,
    }
    nothing = np.zeros((2, 2), dtype=bool)
    assert multi_scores(nothing, nothing) == {"micro_f1": 0.0, "macro_f1": 0.0, "exact": 1.0}


@given(PAIRS)
def test_single_labels_as_scikit_learn(pairs):
    metrics = pytest.importorskip("sklearn.metrics")
    true, found = np.array(pairs).T
    scores = single_scores(confusion(true, found, 4))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert scores["accuracy"] == pytest.approx(metrics.accuracy_score(true, found))
        assert scores["macro_f1"] == pytest.approx(metrics.f1_score(true, found, average="macro", zero_division=0))
        assert scores["matthews"] == pytest.approx(metrics.matthews_corrcoef(true, found), abs=1e-12)


@given(ROWS)
def test_several_labels_as_scikit_learn(rows):
    metrics = pytest.importorskip("sklearn.metrics")
    table = np.array(rows)
    true, found = table[:, :3], table[:, 3:]
    scores = multi_scores(true, found)
    for average in ("micro", "macro"):
        expected = metrics.f1_score(true, found, average=average, zero_division=0)
        assert scores[f"{average}_f1"] == pytest.approx(expected)
    assert scores["exact"] == pytest.approx(metrics.accuracy_score(true, found))


@given(NUMBERS)
def test_numbers_as_scipy(pairs):
    stats = pytest.importorskip("scipy.stats")
    true, found = np.array(pairs).T
    scores = number_scores(true, found)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name, theirs in (("pearson", stats.pearsonr), ("spearman", stats.spearmanr)):
            expected = theirs(true, found).statistic
            assert scores[name] == pytest.approx(0.0 if math.isnan(expected) else expected, abs=1e-9)
