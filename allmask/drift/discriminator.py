"""Logistic regression with L2, for one labelling of the same rows or for many of them at once."""

from __future__ import annotations

import torch
from torch import Tensor

PENALTY = 1.0  # of weights on features whose rows have a mean square length of 1


def fit(x: Tensor, y: Tensor, penalty: float = PENALTY, steps: int = 50, tolerance: float = 1e-6) -> Tensor:
    """Weights (F, C) of rows x (N, F), centred, with labels y (N, C) of 0 and 1: x @ weights are log-odds of 1.

    There is no bias: it would learn how often each label occurs among these rows, which is chance. A sigmoid bends by
    a quarter at most, so Newton's step with a quarter everywhere never overshoots (Böhning and Lindsay 1988), and its
    matrix is the same in each step and for each labelling: factored once. One step is ridge regression.
    """
    factor = torch.linalg.cholesky(x.T @ x / 4 + penalty * torch.eye(x.shape[1], dtype=x.dtype))
    weights = torch.zeros(x.shape[1], y.shape[1], dtype=x.dtype)
    for _ in range(steps):
        uphill = x.T @ (y - (x @ weights).sigmoid()) - penalty * weights
        step = torch.cholesky_solve(uphill, factor)
        weights += step
        if step.abs().max() < tolerance:
            break
    return weights
