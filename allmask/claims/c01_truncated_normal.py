"""C1. A truncated normal is narrower than it says.

Statement: A normal distribution truncated at two standard deviations has 0.8796 of its standard deviation. A sampler
    that corrects for this has the deviation that was asked for.
Source: BERT and T5 draw their first weights so; torch.nn.init.trunc_normal_ does not correct.
Criterion: Over five seeds of a million numbers each, torch's sampler has 0.8796 of the deviation and ours 1.0, both
    to 0.002.
"""

from __future__ import annotations

import torch
from torch import nn

from allmask.claims.claim import Numbers, Trial, Verdict, judged
from allmask.nn.init import truncated_normal

STD, NARROWER, NEAR = 0.02, 0.8796, 0.002
EDGES = [edge / 20 for edge in range(-50, 51)]  # of the histogram, in standard deviations


def measure(trial: Trial, corrected: bool = True) -> Numbers:
    found: Numbers = {"torch": [], "ours": []}
    for seed in trial.seeds(5):
        rng = torch.Generator().manual_seed(seed)
        plain = nn.init.trunc_normal_(torch.empty(1000, 1000), 0.0, STD, -2 * STD, 2 * STD, generator=rng)
        ours = truncated_normal(torch.empty(1000, 1000), STD, rng) if corrected else plain
        found["torch"].append(plain.std().item() / STD)
        found["ours"].append(ours.std().item() / STD)
        last = {"histogram": plain, "histogram, corrected": ours}
    found |= {name: torch.histc(w / STD, len(EDGES) - 1, EDGES[0], EDGES[-1]).tolist() for name, w in last.items()}
    return found


def judge(numbers: Numbers) -> Verdict:
    holds = all(abs(value - NARROWER) < NEAR for value in numbers["torch"])
    holds = holds and all(abs(value - 1) < NEAR for value in numbers["ours"])
    return judged(
        holds, f"deviation {numbers['torch'][0]:.4f} of what was asked for, corrected {numbers['ours'][0]:.4f}"
    )


def draw(axes, numbers: Numbers) -> None:
    for name, label in (("histogram", "torch, cut at ±2σ"), ("histogram, corrected", "corrected")):
        axes.stairs(numbers[name], EDGES, label=label)
    axes.set(xlabel="weight / σ asked for", ylabel="count")
    axes.legend(frameon=False)
