"""Sums and best tokens of rows of logits: in C, in torch, and by sorting in Python."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from allmask.kernels import top_tokens as shortlist

SIZES = [1, 2, 15, 16, 17, 63, 64, 65, 300, 1000]


@pytest.fixture(params=["C", "torch"])
def way(request, monkeypatch):
    if request.param == "torch":
        monkeypatch.setattr(shortlist, "library", lambda: None)
    elif shortlist.library() is None:
        pytest.skip("no compiler, or a processor without AVX2")


def drawn(rows: int, tokens: int, seed: int) -> torch.Tensor:
    return torch.randn(rows, tokens, generator=torch.Generator().manual_seed(seed)) * 5


@pytest.mark.parametrize("tokens", SIZES)
def test_totals_are_those_of_double_precision(way, tokens):
    for seed, shift in enumerate((0.0, 1000.0, -1000.0)):
        logits = drawn(3, tokens, seed) + shift
        logits[1, : tokens // 2] = -torch.inf
        exact = logits.double().logsumexp(1).float()
        torch.testing.assert_close(shortlist.log_totals(logits), exact, atol=1e-5, rtol=1e-6)


@pytest.mark.parametrize("tokens", SIZES)
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_nan_logit_is_found_anywhere(way, tokens, bad):
    for place in {0, tokens // 2, tokens - 1}:
        logits = drawn(3, tokens, 0)
        logits[1, place] = bad
        assert shortlist.log_totals(logits).isnan().tolist() == [False, True, False]


def test_a_row_of_minus_infinity_is_nan(way):
    assert shortlist.log_totals(torch.full((1, 40), -torch.inf)).isnan().all()


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(SIZES), st.integers(1, 70), st.integers(0, 2**31), st.booleans())
def test_the_best_by_sorting(tokens, count, seed, coarse):
    """Also where many are equal: those that stand first come first."""
    scores = drawn(4, tokens, seed)
    scores = scores.round() if coarse else scores
    scores[2, ::2] = -torch.inf
    if shortlist.library() is None or min(count, tokens) > shortlist.MAX_COUNT:
        return
    values, found = shortlist.best(scores, count)
    for row in range(4):
        order = sorted((-score, token) for token, score in enumerate(scores[row].tolist()))[:count]
        assert values[row].tolist() == [-score for score, _ in order]
        possible = [token for score, token in order if score < math.inf]
        assert found[row, : len(possible)].tolist() == possible
        assert (found[row] < tokens).all()


@pytest.mark.parametrize("count", [1, 3, 64, 65, 200])
def test_both_ways_agree(way, count):
    scores = drawn(5, 120, 7)
    values, tokens = shortlist.best(scores, count)
    expected = scores.sort(descending=True, stable=True)
    assert torch.equal(values, expected.values[:, :count]) and torch.equal(tokens, expected.indices[:, :count])
    turned = scores.T.contiguous().T
    assert torch.equal(shortlist.best(turned, count)[1], tokens)
    assert torch.equal(shortlist.best(scores.double(), count)[1], tokens)
