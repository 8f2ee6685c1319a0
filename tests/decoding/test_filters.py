"""Filters against tables worked out by hand and against transformers' logits processors."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import (
    MinNewTokensLengthLogitsProcessor,
    NoRepeatNGramLogitsProcessor,
    SuppressTokensLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from allmask.decoding import filters

NO = -math.inf
TABLE = torch.tensor([[0.1, 0.4, 0.2, 0.3], [0.25, 0.25, 0.45, 0.05]]).log()


def probabilities(scores):
    return scores.softmax(1).round(decimals=4).tolist()


def kept(scores):
    return scores.isfinite().int().tolist()


def test_ban():
    assert kept(filters.ban(TABLE, (1, 3))) == [[1, 0, 1, 0], [1, 0, 1, 0]]
    assert filters.ban(TABLE, ()) is TABLE


def test_temperature():
    """Probabilities to the power of 1/t, rescaled: squares at t = 1/2; 1 16 4 9 of 30 in the first row."""
    cold = filters.temperature(TABLE, 0.5)
    assert probabilities(cold)[0] == pytest.approx([1 / 30, 16 / 30, 4 / 30, 9 / 30], abs=1e-4)
    assert filters.temperature(TABLE, 1.0) is TABLE


def test_top_k():
    assert kept(filters.top_k(TABLE, 2)) == [[0, 1, 0, 1], [1, 1, 1, 0]]  # 0.25 twice: a tie with the last stays
    assert probabilities(filters.top_k(TABLE, 2))[0] == pytest.approx([0, 4 / 7, 0, 3 / 7], abs=1e-4)
    assert filters.top_k(TABLE, 0) is TABLE and filters.top_k(TABLE, 9) is TABLE


@pytest.mark.parametrize(
    "p, expected",
    [
        (0.05, [[0, 1, 0, 0], [0, 0, 1, 0]]),
        (0.39, [[0, 1, 0, 0], [0, 0, 1, 0]]),
        (0.41, [[0, 1, 0, 1], [0, 0, 1, 0]]),
        (0.69, [[0, 1, 0, 1], [1, 0, 1, 0]]),
        (0.71, [[0, 1, 1, 1], [1, 1, 1, 0]]),
        (0.94, [[1, 1, 1, 1], [1, 1, 1, 0]]),
        (1.0, [[1, 1, 1, 1], [1, 1, 1, 1]]),
    ],
)
def test_top_p(p, expected):
    assert kept(filters.top_p(TABLE, p)) == expected


def test_top_p_of_equals_is_just_enough_of_them():
    assert kept(filters.top_p(torch.zeros(1, 4), 0.5)) == [[1, 1, 0, 0]]
    assert kept(filters.top_p(torch.zeros(1, 4), 0.51)) == [[1, 1, 1, 0]]


@pytest.mark.parametrize(
    "history, size, forbidden",
    [
        ([1, 2, 3, 1], 2, [2]),
        ([1, 2, 1, 3, 1], 2, [2, 3]),
        ([1, 2, 3, 1, 2], 3, [3]),
        ([1, 2, 3, 2, 1], 3, []),
        ([1, 1], 2, [1]),
        ([1, 2], 1, [1, 2]),
        ([], 2, []),
        ([1], 2, []),
        ([1, 2], 4, []),
    ],
)
def test_no_repeat(history, size, forbidden):
    scores = filters.no_repeat(torch.zeros(2, 5), [history, []], size)
    assert [token for token in range(5) if scores[0, token] == NO] == forbidden
    assert scores[1].isfinite().all()


SCORES = st.integers(0, 10**6).map(
    lambda seed: torch.randn(3, 8, generator=torch.Generator().manual_seed(seed)) * (1 + seed % 4)
)


@settings(max_examples=60)
@given(SCORES, st.integers(1, 9), st.floats(0.05, 0.99), st.floats(0.1, 5.0))
def test_sampling_filters_equal_transformers(scores, k, p, t):
    ids = torch.zeros(3, 1, dtype=torch.long)
    assert torch.equal(filters.top_k(scores, k), TopKLogitsWarper(k)(ids, scores))
    assert torch.equal(filters.top_p(scores, p), TopPLogitsWarper(p)(ids, scores))
    assert torch.equal(filters.temperature(scores, t), TemperatureLogitsWarper(t)(ids, scores))
    ours = filters.top_p(filters.top_k(filters.temperature(scores, t), k), p)
    theirs = TopPLogitsWarper(p)(ids, TopKLogitsWarper(k)(ids, TemperatureLogitsWarper(t)(ids, scores)))
    assert torch.equal(ours, theirs)


@settings(max_examples=60)
@given(SCORES, st.integers(1, 4), st.lists(st.lists(st.integers(0, 3), min_size=7, max_size=7), min_size=3, max_size=3))
def test_rules_equal_transformers(scores, size, rows):
    ids = torch.tensor(rows)
    assert torch.equal(filters.no_repeat(scores, rows, size), NoRepeatNGramLogitsProcessor(size)(ids, scores.clone()))
    assert torch.equal(filters.ban(scores, (2, 5)), SuppressTokensLogitsProcessor([2, 5])(ids, scores))
    too_short = MinNewTokensLengthLogitsProcessor(4, 4, [1])  # 3 new tokens of the 4 asked for
    assert torch.equal(filters.ban(scores, (1,)), too_short(ids, scores.clone()))


def test_filters_leave_their_input_alone():
    before = TABLE.clone()
    filters.ban(TABLE, (1,)), filters.top_k(TABLE, 1), filters.top_p(TABLE, 0.3), filters.temperature(TABLE, 2.0)
    filters.no_repeat(TABLE, [[1, 1], [1, 1]], 1)
    assert torch.equal(TABLE, before)
