"""C30. A masked weight is exactly zero, not almost.

Statement: A mask must make weights exactly 0, with -inf or a boolean mask. A large negative number that is added to
    the scores leaks: where scores are large, or where a whole row is masked, hidden tokens are read.
Source: the masks of early BERT implementations add -10,000; 苏剑林 on masks that leak.
Criterion: If hidden tokens change, the output changes by exactly 0 with our mask, for scores of size 1 to 100,000 and
    for rows that see nothing; with -10,000 added, it changes by more than 0.01 in a row that sees nothing, and where
    the hidden scores are 20,000 higher. With -inf added it changes by exactly 0, too, but a row that sees nothing is
    not a number.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from math import inf, isnan

import torch
from torch import Tensor

from allmask.claims.claim import Numbers, Trial, Verdict, judged
from allmask.mask import Mask
from allmask.nn.attention import attend

SIZES = (1.0, 10.0, 100.0, 1000.0, 10_000.0, 100_000.0)
TOKENS, WIDTH, LARGE = 12, 16, -10_000.0


def measure(trial: Trial, exact: bool = True) -> Numbers:
    """`exact`: otherwise ours is the large negative number, too."""
    ways = {"ours": through_mask if exact else partial(through_number, number=LARGE)}
    ways |= {"added": partial(through_number, number=LARGE), "-inf": partial(through_number, number=-inf)}
    found: Numbers = {"empty row": {}}
    for name, compute in ways.items():
        found[name] = [max(change(size, seed, compute) for seed in trial.seeds(5)) for size in SIZES]
        empty = change(1.0, 1, compute, empty=True)
        found["empty row"][name] = None if isnan(empty) else empty
    return found


def change(size: float, seed: int, compute: Callable[..., Tensor], empty: bool = False) -> float:
    """How much the output of the tokens that may not read the last one changes when it does."""
    rng = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(1, TOKENS, 1, WIDTH, generator=rng) for _ in range(3))
    k[:, -1] = q[:, 0] / q[:, 0].pow(2).sum() * size * WIDTH**0.5  # the score of the first query is `size`
    valid = torch.ones(1, TOKENS, dtype=torch.bool)
    valid[:, slice(None) if empty else slice(-1, None)] = False
    changed = v.clone()
    changed[:, -1] += 1
    readers = slice(0, TOKENS) if empty else slice(0, TOKENS - 1)
    return (compute(q, k, v, valid) - compute(q, k, changed, valid))[:, readers].abs().max().item()


def through_mask(q: Tensor, k: Tensor, v: Tensor, valid: Tensor) -> Tensor:
    return attend(q, k, v, Mask.bidirectional(valid))


def through_number(q: Tensor, k: Tensor, v: Tensor, valid: Tensor, number: float) -> Tensor:
    added = torch.zeros(valid.shape).masked_fill(~valid, number)
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k) / WIDTH**0.5 + added[:, None, None]
    return torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1), v)


def judge(numbers: Numbers) -> Verdict:
    ours, added = max(*numbers["ours"], numbers["empty row"]["ours"]), numbers["empty row"]["added"]
    holds = ours == 0 and added > 0.01 and numbers["added"][-1] > 0.01
    holds = holds and max(numbers["-inf"]) == 0 and numbers["empty row"]["-inf"] is None
    return judged(
        holds,
        f"hidden tokens change the output by {ours:g}; with -10,000 added, by {added:.2f} in an empty row and by "
        f"{numbers['added'][-1]:.2f} if scores are large; with -inf, by 0, but an empty row is not a number",
    )


def draw(axes, numbers: Numbers) -> None:
    axes.plot(SIZES, numbers["added"], "o-", label="-10,000 added")
    axes.plot(SIZES, numbers["-inf"], "^-", label="-inf added")
    axes.plot(SIZES, numbers["ours"], "s-", label="Mask", fillstyle="none")
    axes.set(xlabel="score of the hidden token", ylabel="change of the output", xscale="log")
    axes.legend(frameon=False)
