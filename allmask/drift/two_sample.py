"""The two-sample test: balanced records, a discriminator, and a valid p-value from its held-out predictions.

binomial     Train on one half, predict the other. Given the discriminator, predictions for independent records of one
             distribution are coin tosses: a record of the first file is predicted correctly with probability a, one of
             the second with 1 - a, and by Hoeffding (1956) the tail of such a sum is bounded by that of fair coins.
permutation  Predict every record by a discriminator trained on the other folds. These predictions are not independent,
             so all of it is repeated with permuted labels; the true labelling counts as one of the permutations.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from allmask.drift.records import OnProgress

PENALTY = 1.0  # L2 penalty, for rows with a mean squared norm of 1
CHUNK = 1000  # labellings that are fitted at once


# ---- which records are compared ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Balanced:
    """The records that are compared, the same number from each file."""

    number: Tensor  # (n,) index in its file
    side: Tensor  # (n,) 0: first file, 1: second
    group: Tensor  # (n,) the same for two records with the same text, one from each file
    shared: Tensor  # (n,) whether the other file has the same text
    repeats: tuple[int, int] = (0, 0)  # records of each file that were dropped as repetitions

    @property
    def each(self) -> int:
        """Number of records from each file."""
        return len(self.side) // 2

    def halves(self, rng: torch.Generator) -> Tensor:
        """A random half as a mask (n,): half of each file's own records, and half of the groups of shared texts."""
        chosen = torch.zeros(len(self.side), dtype=torch.bool)
        for side in (0, 1):
            own = _shuffled(((self.side == side) & ~self.shared).nonzero().flatten(), rng)
            chosen[own[: len(own) // 2]] = True
        both = _shuffled(self.group[self.shared].unique(), rng)
        return chosen | torch.isin(self.group, both[: len(both) // 2])

    def folds(self, count: int, rng: torch.Generator) -> Tensor:
        """A random fold for each record, (n,). It does not depend on the labels, which the test permutes."""
        groups, index = self.group.unique(return_inverse=True)
        return (torch.randperm(len(groups), generator=rng) % count)[index]

    def permuted(self, times: int, rng: torch.Generator) -> Tensor:
        """Labels (n, 1 + times): the true ones, then permutations of those of records that are in one file only."""
        alone = (~self.shared).nonzero().flatten()
        labels = self.side.to(torch.int8)[:, None].repeat(1, 1 + times)
        for column in range(1, 1 + times):
            labels[alone, column] = labels[_shuffled(alone, rng), 0]
        return labels


def balance(
    first: Sequence[Hashable], second: Sequence[Hashable], drop_repeats: bool, rng: torch.Generator
) -> Balanced:
    """Draw the same number of records from each file, given by their keys.

    The larger file is sampled before repetitions are dropped. After dropping them, frequent texts would be
    underrepresented in the sample of the larger file only.
    """
    size = min(len(first), len(second))
    drawn = [torch.randperm(len(keys), generator=rng)[:size].sort().values.tolist() for keys in (first, second)]
    if not drop_repeats:
        number, side = torch.tensor(drawn[0] + drawn[1]), torch.arange(2).repeat_interleave(size)
        return Balanced(number, side, torch.arange(2 * size), torch.zeros(2 * size, dtype=torch.bool))
    firsts = [_first_of_each(keys, numbers) for keys, numbers in zip((first, second), drawn, strict=True)]
    both = [key for key in firsts[0] if key in firsts[1]]
    own = [[number for key, number in here.items() if key not in there] for here, there in (firsts, firsts[::-1])]
    least = min(map(len, own))
    own = [_shuffled(torch.tensor(numbers, dtype=torch.long), rng)[:least].sort().values.tolist() for numbers in own]
    columns = [[here[key] for key in both] + numbers for here, numbers in zip(firsts, own, strict=True)]
    each, count = len(columns[0]), len(both)
    group = torch.arange(2 * each)
    group[each : each + count] = torch.arange(count)
    return Balanced(
        torch.tensor(columns[0] + columns[1]), torch.arange(2).repeat_interleave(each), group,
        (torch.arange(each) < count).repeat(2), (size - len(firsts[0]), size - len(firsts[1])),
    )  # fmt: skip


def _first_of_each(keys: Sequence[Hashable], numbers: list[int]) -> dict[Hashable, int]:
    """The first record with each key."""
    found: dict[Hashable, int] = {}
    for number in numbers:
        found.setdefault(keys[number], number)
    return found


def _shuffled(numbers: Tensor, rng: torch.Generator) -> Tensor:
    return numbers[torch.randperm(len(numbers), generator=rng)]


# ---- discriminator and p-value -----------------------------------------------------------------------------------


def fit(x: Tensor, y: Tensor, penalty: float = PENALTY, steps: int = 50, tolerance: float = 1e-6) -> Tensor:
    """Fit logistic regressions with L2 penalty to rows x (N, F), centred, and C labellings y (N, C) of 0 and 1.

    Returns weights (F, C); x @ weights are log-odds of label 1. There is no bias, which would only learn the class
    balance of these rows. The second derivative of the logistic loss is at most ¼, so Newton's step with ¼ everywhere
    never overshoots (Böhning and Lindsay 1988); its matrix is the same in all steps and for all labellings, and is
    factored once. One step is ridge regression.
    """
    factor = torch.linalg.cholesky(x.T @ x / 4 + penalty * torch.eye(x.shape[1], dtype=x.dtype))
    weights = torch.zeros(x.shape[1], y.shape[1], dtype=x.dtype)
    for _ in range(steps):
        gradient = x.T @ (y - (x @ weights).sigmoid()) - penalty * weights
        step = torch.cholesky_solve(gradient, factor)
        weights += step
        if step.abs().max() < tolerance:
            break
    return weights


@dataclass(frozen=True)
class Decision:
    p: float
    right: int  # correct predictions, out of `trials`
    trials: int  # predictions for records that are in one file only
    accuracy: float  # of all predictions; for a text in both files it is ½
    predicted: Tensor  # (n,) indices of the records that were predicted
    log_odds: Tensor  # (n,) that each of these is from the second file
    weights: Tensor  # (F,)


def binomial_tail(right: int, trials: int) -> float:
    """The probability of at least `right` heads in `trials` tosses, computed exactly with integers."""
    term, total = math.comb(trials, right), 0
    for heads in range(right, trials + 1):
        total += term
        term = term * (trials - heads) // (heads + 1)
    return total / 2**trials


def min_records(alpha: float) -> int:
    """Records needed from each file so that perfect predictions for the held-out half reach alpha."""
    return 2 * max(1, math.ceil(-math.log2(alpha) / 2))


def binomial_test(x: Tensor, records: Balanced, is_train: Tensor) -> Decision:
    """Train on one half and test the accuracy on the other against a fair coin."""
    predicted = (~is_train).nonzero().flatten()
    weights = fit(x[is_train], records.side[is_train, None].to(x.dtype))
    log_odds = (x[predicted] @ weights)[:, 0]
    right = (log_odds > 0) == (records.side[predicted] == 1)
    counted = right[~records.shared[predicted]]
    p = binomial_tail(int(counted.sum()), len(counted))
    accuracy = right.double().mean().item()
    return Decision(p, int(counted.sum()), len(counted), accuracy, predicted, log_odds, weights[:, 0])


def permutation_test(
    x: Tensor, records: Balanced, rng: torch.Generator, permutations: int, folds: int,
    on_progress: OnProgress | None = None,
) -> Decision:  # fmt: skip
    """Compare the cross-validated accuracy with that under permuted labels."""
    fold = records.folds(folds, rng)
    labels = records.permuted(permutations, rng)  # (n, 1 + permutations), the true ones first
    right = torch.zeros(labels.shape[1], dtype=torch.long)
    log_odds = torch.zeros(len(x), dtype=x.dtype)
    alone = ~records.shared
    for number in range(folds):
        out = fold == number
        for start in range(0, labels.shape[1], CHUNK):
            chunk = slice(start, start + CHUNK)
            odds = x[out] @ fit(x[~out], labels[~out, chunk].to(x.dtype), steps=1)  # ridge: a thousand in one product
            right[chunk] += ((odds > 0) == (labels[out, chunk] == 1))[alone[out]].sum(0)
            if start == 0:
                log_odds[out] = odds[:, 0]
            if on_progress is not None:
                on_progress(number * labels.shape[1] + start + odds.shape[1], folds * labels.shape[1])
    p = (right >= right[0]).double().mean().item()  # includes the true labelling
    accuracy = ((log_odds > 0) == (records.side == 1)).double().mean().item()
    weights = fit(x, labels[:, :1].to(x.dtype))[:, 0]
    return Decision(p, int(right[0]), int(alone.sum()), accuracy, torch.arange(len(x)), log_odds, weights)
