"""C2. Random matrices are nearly orthogonal.

Statement: An n × n matrix whose entries have mean 0 and variance 1/n is nearly orthogonal, the better the larger n,
    whatever their distribution; so is an m × n matrix of variance 1/m if m ≥ n. For m < n it is impossible.
Source: folklore behind Xavier and He initialization; follows from the law of large numbers.
Criterion: Over five seeds and three distributions, the mean |WᵀW - I| off the diagonal is √(2/π) of 1/√n within 5 %
    for n = 64 … 1024, so it falls as 1/√n; for a 2048 × 256 matrix it is below 0.03; of a 256 × 512 matrix WᵀW has
    mean eigenvalue 1, but half of them are 0, so it cannot be the identity.
"""

from __future__ import annotations

import math
from statistics import mean

import torch
from torch import Tensor

from allmask.claims.claim import Numbers, Trial, Verdict, judged
from allmask.nn.init import normal, truncated_normal, uniform

SIZES = (64, 128, 256, 512, 1024)
KINDS = {"normal": normal, "uniform": uniform, "truncated": truncated_normal}


def measure(trial: Trial, fair: bool = True) -> Numbers:
    """`fair`: variance 1/n; otherwise 2/n, for which nothing of this is true."""
    seeds = trial.seeds(5)
    found: Numbers = {name: {} for name in KINDS}
    for name, draw_weights in KINDS.items():
        for n in SIZES:
            std = (1 if fair else 2) ** 0.5 * n**-0.5
            rngs = [torch.Generator().manual_seed(seed) for seed in seeds]
            found[name][str(n)] = mean(off_diagonal(draw_weights(torch.empty(n, n), std, rng)) for rng in rngs)
    rng = torch.Generator().manual_seed(1)
    found["tall"] = off_diagonal(normal(torch.empty(2048, 256), 2048**-0.5, rng))
    wide = normal(torch.empty(256, 512), 256**-0.5, rng)
    eigenvalues = torch.linalg.eigvalsh((wide.T @ wide).double())
    found["wide"] = {"mean": eigenvalues.mean().item(), "zero": (eigenvalues < 1e-5).double().mean().item()}
    return found


def off_diagonal(weight: Tensor) -> float:
    product = weight.T @ weight
    return (product - torch.diag(product.diag())).abs().sum().item() / (len(product) * (len(product) - 1))


def judge(numbers: Numbers) -> Verdict:
    expected = {str(n): math.sqrt(2 / math.pi / n) for n in SIZES}
    off = max(abs(numbers[name][n] / expected[n] - 1) for name in KINDS for n in expected)
    holds = off < 0.05 and numbers["tall"] < 0.03
    holds = holds and abs(numbers["wide"]["mean"] - 1) < 0.05 and abs(numbers["wide"]["zero"] - 0.5) < 0.01
    largest = numbers["normal"]["1024"]
    return judged(
        holds,
        f"|WᵀW| off the diagonal {numbers['normal']['64']:.3f} at n = 64, {largest:.3f} at 1024; 256 × 512: "
        f"{100 * numbers['wide']['zero']:.0f} % of the eigenvalues are 0",
    )


def draw(axes, numbers: Numbers) -> None:
    for name, marker in zip(KINDS, "o^s", strict=True):
        axes.plot(SIZES, [numbers[name][str(n)] for n in SIZES], marker, label=name, fillstyle="none")
    axes.plot(SIZES, [math.sqrt(2 / math.pi / n) for n in SIZES], "k-", lw=0.8, label="√(2 / πn)")
    axes.set(xlabel="n", ylabel="mean |WᵀW| off the diagonal", xscale="log", yscale="log")
    axes.set_xticks(SIZES, [str(n) for n in SIZES])
    axes.minorticks_off()
    axes.legend(frameon=False)
