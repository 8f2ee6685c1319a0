"""From a discriminator's right and wrong guesses about unseen records to a p-value that holds.

binomial     One half teaches, the other is guessed. Given the teacher, guesses about independent records of one
             distribution are a coin's: a first file's record is right with probability a, a second file's with 1 - a,
             and by Hoeffding (1956) such a sum exceeds its mean no more easily than fair coins do.
permutation  Every record is guessed by a discriminator of the other folds. Such guesses are not independent, so the
             whole procedure is repeated with labels exchanged at random: the true labelling is one of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from allmask.drift.discriminator import fit
from allmask.drift.sampling import Units

TOGETHER = 1000  # labellings that are fitted at once
OnProgress = Callable[[int, int], None]  # done, of


@dataclass(frozen=True)
class Decision:
    p: float
    right: int  # of `trials` guesses that count
    trials: int
    accuracy: float  # of all guesses; a text that both files have is a coin's toss
    guessed: Tensor  # (n,) units that were guessed
    log_odds: Tensor  # (n,) that each of these is of the second file
    weights: Tensor  # (F,)


def binomial_tail(right: int, trials: int) -> float:
    """The probability of so many heads, or more, in so many tosses: exact, by whole numbers."""
    term, total = math.comb(trials, right), 0
    for heads in range(right, trials + 1):
        total += term
        term = term * (trials - heads) // (heads + 1)
    return total / 2**trials


def needed(alpha: float) -> int:
    """Records of each file without which not even perfect guesses reach alpha: half of them teach."""
    return 2 * max(1, math.ceil(-math.log2(alpha) / 2))


def by_halves(x: Tensor, units: Units, teaches: Tensor) -> Decision:
    """The exact binomial test on one half, after learning from the other."""
    guessed = (~teaches).nonzero().flatten()
    weights = fit(x[teaches], units.side[teaches, None].to(x.dtype))
    log_odds = (x[guessed] @ weights)[:, 0]
    right = (log_odds > 0) == (units.side[guessed] == 1)
    counts = right[~units.shared[guessed]]
    p = binomial_tail(int(counts.sum()), len(counts))
    accuracy = right.double().mean().item()
    return Decision(p, int(counts.sum()), len(counts), accuracy, guessed, log_odds, weights[:, 0])


def by_relabelling(
    x: Tensor, units: Units, rng: torch.Generator, permutations: int, folds: int, told: OnProgress | None = None
) -> Decision:
    """The permutation test of the accuracy over all folds."""
    fold = units.folds(folds, rng)
    labels = units.relabelled(permutations, rng)  # (n, 1 + permutations), the true ones first
    right = torch.zeros(labels.shape[1], dtype=torch.long)
    log_odds = torch.zeros(len(x), dtype=x.dtype)
    alone = ~units.shared
    for number in range(folds):
        out = fold == number
        for begin in range(0, labels.shape[1], TOGETHER):
            some = slice(begin, begin + TOGETHER)
            odds = x[out] @ fit(x[~out], labels[~out, some].to(x.dtype), steps=1)  # ridge: a thousand in one product
            right[some] += ((odds > 0) == (labels[out, some] == 1))[alone[out]].sum(0)
            if begin == 0:
                log_odds[out] = odds[:, 0]
            if told is not None:
                told(number * labels.shape[1] + begin + odds.shape[1], folds * labels.shape[1])
    p = (right >= right[0]).double().mean().item()  # itself among them
    accuracy = ((log_odds > 0) == (units.side == 1)).double().mean().item()
    weights = fit(x, labels[:, :1].to(x.dtype))[:, 0]
    return Decision(p, int(right[0]), int(alone.sum()), accuracy, torch.arange(len(x)), log_odds, weights)
