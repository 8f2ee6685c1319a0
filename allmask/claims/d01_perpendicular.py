"""D1. Random vectors of high dimension are nearly perpendicular.

Statement: Two random vectors of dimension n are almost perpendicular, the more so the larger n: their cosine has mean 0
    and deviation 1/√n, whatever the distribution of the entries, if its mean is 0.
Source: 苏剑林, a geometric view of initialization; the law of large numbers.
Criterion: Over five seeds and three distributions, the deviation of the cosine is 1/√n within 5 % for n = 3 to 3,000
    (at n = 3 only for the normal, which knows no direction). At n = 3,000, at least 99 % of the pairs are within 3° of
    a right angle, and among 1,000 vectors no cosine is above 0.12.
"""

from __future__ import annotations

from statistics import mean

import torch
import torch.nn.functional as F
from torch import Tensor

from allmask.claims.claim import Numbers, Trial, Verdict, judged
from allmask.nn.init import normal, truncated_normal, uniform

SIZES, VECTORS = (3, 30, 300, 3000), 1000
KINDS = {"normal": normal, "uniform": uniform, "truncated": truncated_normal}


def measure(trial: Trial, centred: bool = True) -> Numbers:
    """`centred`: otherwise all entries are positive, and no two vectors are perpendicular."""
    found: Numbers = {name: {str(n): [] for n in SIZES} for name in KINDS} | {"within 3°": [], "largest": []}
    for seed in trial.seeds(5):
        rng = torch.Generator().manual_seed(seed)
        for name, draw_entries in KINDS.items():
            for n in SIZES:
                vectors = draw_entries(torch.empty(VECTORS, n), 1.0, rng)
                cosines = pairs(vectors if centred else vectors.abs())
                found[name][str(n)].append(cosines.pow(2).mean().sqrt().item() * n**0.5)
        off = (cosines.clamp(-1, 1).acos().rad2deg() - 90).abs()
        found["within 3°"].append(100 * (off < 3).double().mean().item())
        found["largest"].append(cosines.abs().max().item())
    return found


def pairs(vectors: Tensor) -> Tensor:
    """The cosines of all pairs of rows."""
    directions = F.normalize(vectors.double(), dim=1)
    rows, columns = torch.triu_indices(len(vectors), len(vectors), 1)
    return (directions @ directions.T)[rows, columns]


def judge(numbers: Numbers) -> Verdict:
    cases = [(name, n) for name in KINDS for n in SIZES if n > 3 or name == "normal"]
    off = max(abs(mean(numbers[name][str(n)]) - 1) for name, n in cases)
    within, largest = min(numbers["within 3°"]), max(numbers["largest"])
    return judged(
        off < 0.05 and within >= 99 and largest < 0.12,
        f"deviation of the cosine 1/√n to {100 * off:.1f} %; at n = 3,000, {within:.1f} % of the pairs are within 3° "
        f"of 90°, the largest cosine is {largest:.3f}",
    )


def draw(axes, numbers: Numbers) -> None:
    for name, marker in zip(KINDS, "o^s", strict=True):
        values = [mean(numbers[name][str(n)]) / n**0.5 for n in SIZES]
        axes.plot(SIZES, values, marker, label=name, fillstyle="none")
    axes.plot(SIZES, [n**-0.5 for n in SIZES], "k-", lw=0.8, label="1/√n")
    axes.set(xlabel="dimension n", ylabel="deviation of the cosine", xscale="log", yscale="log")
    axes.legend(frameon=False)
