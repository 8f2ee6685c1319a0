"""C30. A masked weight is exactly zero, not almost.

Statement: A mask must make weights exactly 0, with -inf or a boolean mask. A large negative number that is added to
    the scores leaks: where scores are large, or where a whole row is masked, hidden tokens are read.
Source: the masks of early BERT implementations add -10,000; 苏剑林 on masks that leak.
Criterion: If hidden tokens change, the output changes by exactly 0 with our mask, for scores of size 1 to 100,000 and
    for rows that see nothing; with -10,000 added, it changes by more than 0.01 in a row that sees nothing, and where
    the hidden scores are 20,000 higher.
"""

from __future__ import annotations

import torch
from torch import Tensor

from allmask.claims.claim import Numbers, Trial, Verdict, judged
from allmask.mask import Mask
from allmask.nn.attention import attend

SIZES = (1.0, 10.0, 100.0, 1000.0, 10_000.0, 100_000.0)
TOKENS, WIDTH = 12, 16


def measure(trial: Trial, exact: bool = True) -> Numbers:
    """`exact`: otherwise ours is the large negative number, too."""
    found: Numbers = {"ours": [], "added": []}
    for size in SIZES:
        found["ours"].append(max(change(size, seed, exact) for seed in trial.seeds(5)))
        found["added"].append(max(change(size, seed, False) for seed in trial.seeds(5)))
    found["empty row"] = {"ours": change(1.0, 1, exact, empty=True), "added": change(1.0, 1, False, empty=True)}
    return found


def change(size: float, seed: int, exact: bool, empty: bool = False) -> float:
    """How much the output of the tokens that may not read the last one changes when it does."""
    rng = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(1, TOKENS, 1, WIDTH, generator=rng) for _ in range(3))
    k[:, -1] = q[:, 0] / q[:, 0].pow(2).sum() * size * WIDTH**0.5  # the score of the first query is `size`
    valid = torch.ones(1, TOKENS, dtype=torch.bool)
    valid[:, slice(None) if empty else slice(-1, None)] = False
    changed = v.clone()
    changed[:, -1] += 1
    readers = slice(0, TOKENS) if empty else slice(0, TOKENS - 1)
    compute = through_mask if exact else through_number
    return (compute(q, k, v, valid) - compute(q, k, changed, valid))[:, readers].abs().max().item()


def through_mask(q: Tensor, k: Tensor, v: Tensor, valid: Tensor) -> Tensor:
    return attend(q, k, v, Mask.bidirectional(valid))


def through_number(q: Tensor, k: Tensor, v: Tensor, valid: Tensor) -> Tensor:
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k) / WIDTH**0.5 + (~valid)[:, None, None] * -10_000.0
    return torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1), v)


def judge(numbers: Numbers) -> Verdict:
    ours, added = max(*numbers["ours"], numbers["empty row"]["ours"]), numbers["empty row"]["added"]
    holds = ours == 0 and added > 0.01 and numbers["added"][-1] > 0.01
    return judged(
        holds,
        f"hidden tokens change the output by {ours:g}; with -10,000 added, by {added:.2f} in an empty row and by "
        f"{numbers['added'][-1]:.2f} if scores are large",
    )


def draw(axes, numbers: Numbers) -> None:
    axes.plot(SIZES, numbers["added"], "o-", label="-10,000 added")
    axes.plot(SIZES, numbers["ours"], "s-", label="Mask")
    axes.set(xlabel="score of the hidden token", ylabel="change of the output", xscale="log")
    axes.legend(frameon=False)
