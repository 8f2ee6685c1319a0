"""Dropout drops the asked share, keeps the mean, and passes gradients through what survived."""

from __future__ import annotations

import math

import pytest
import torch

from allmask.nn.dropout import Dropout, drop, dropout_mask


@pytest.mark.parametrize("p", [0.1, 0.25, 0.5, 0.9])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_share_and_mean(p, dtype):
    torch.manual_seed(0)
    n = 400_003  # not a multiple of four
    kept = dropout_mask(torch.empty(n, dtype=dtype), p).float()
    assert set(kept.unique().tolist()) == {0.0, 1.0}
    assert abs(kept.mean().item() - (1 - p)) < 5 * math.sqrt(p * (1 - p) / n)
    dropped = drop(torch.full((n,), 2.0), p)
    assert dropped.mean().item() == pytest.approx(2.0, abs=5 * 2 * math.sqrt(p / (1 - p) / n))


def test_neighbours_are_independent():
    """Four decisions come from one draw: none of them may tell of another."""
    torch.manual_seed(0)
    kept = dropout_mask(torch.empty(1_000_000), 0.5) - 0.5
    for lag in (1, 2, 3, 4, 8):
        correlation = (kept[lag:] * kept[:-lag]).mean().item() * 4
        assert abs(correlation) < 5 / math.sqrt(1e6)


def test_gradient_is_the_mask():
    torch.manual_seed(1)
    x = torch.ones(3, 7, requires_grad=True)
    out = drop(x, 0.3)
    out.sum().backward()
    assert torch.equal(x.grad, out.detach())


def test_same_seed_same_mask_and_nothing_in_evaluation():
    layer, x = Dropout(0.4), torch.randn(5, 9)
    torch.manual_seed(3)
    first = layer(x)
    torch.manual_seed(3)
    assert torch.equal(layer(x), first) and not torch.equal(layer(x), first)
    assert layer.eval()(x) is x and Dropout(0.0)(x) is x
