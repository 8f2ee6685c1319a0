"""C4. Weights of size 1 make the learning rate a percentage.

Statement: With the scale in the forward pass instead of the weights (NTK parametrization), a network computes the
    same function at the start. Its weights have size 1, so that Adam with learning rate 0.01 changes each of them by
    about 1 % a step.
Source: Jacot et al. 2018; 苏剑林 on the parametrization of neural networks.
Criterion: Over five seeds, outputs agree to 1e-5. After one step of Adam with rate 0.01, the weights of each of four
    layers, 64 to 1,024 wide, have moved by 1 % of their size, to 0.05 %; those of plain layers, of size 1/√in, by √in
    %, to a twentieth.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn

from allmask.claims.claim import Numbers, Trial, Verdict, judged
from allmask.nn.init import NTKLinear, normal

Layer = nn.Linear | NTKLinear
WIDTHS, RATE = (64, 128, 512, 1024, 256), 0.01


def measure(trial: Trial, rescaled: bool = True) -> Numbers:
    """`rescaled`: otherwise both networks are plain."""
    found: Numbers = {"difference": [], "ntk": [], "plain": []}
    for seed in trial.seeds(5):
        rng = torch.Generator().manual_seed(seed)
        plain = [nn.Linear(inputs, outputs, bias=False) for inputs, outputs in pairwise(WIDTHS)]
        for layer in plain:
            normal(layer.weight.data, layer.in_features**-0.5, rng)
        ntk = [NTKLinear.from_linear(layer) if rescaled else copy.deepcopy(layer) for layer in plain]
        x = torch.randn(32, WIDTHS[0], generator=rng)
        found["difference"].append((forward(plain, x) - forward(ntk, x)).abs().max().item())
        found["plain"].append(moved(plain, x))
        found["ntk"].append(moved(ntk, x))
    return found


def forward(layers: Sequence[Layer], x: Tensor) -> Tensor:
    for layer in layers:
        x = layer(x).tanh()
    return x


def moved(layers: Sequence[Layer], x: Tensor) -> list[float]:
    """By how many percent of their size the weights of each layer change in one step."""
    before = [layer.weight.detach().clone() for layer in layers]
    optimizer = torch.optim.Adam([layer.weight for layer in layers], lr=RATE)
    forward(layers, x).pow(2).mean().backward()
    optimizer.step()
    pairs = zip(layers, before, strict=True)
    return [100 * ((layer.weight - old).norm() / old.norm()).item() for layer, old in pairs]


def judge(numbers: Numbers) -> Verdict:
    ntk = [value for run in numbers["ntk"] for value in run]
    plain = [value for run in numbers["plain"] for value in run]
    expected = [inputs**0.5 for inputs in WIDTHS[:-1]] * len(numbers["plain"])
    holds = max(numbers["difference"]) < 1e-5 and all(abs(value - 1) < 0.05 for value in ntk)
    holds = holds and all(abs(value / wanted - 1) < 0.05 for value, wanted in zip(plain, expected, strict=True))
    return judged(
        holds,
        f"outputs differ by {max(numbers['difference']):.0e}; a step moves them by {min(ntk):.2f} to {max(ntk):.2f} %, "
        f"plain ones by {min(plain):.0f} to {max(plain):.0f} %",
    )


def draw(axes, numbers: Numbers) -> None:
    labels = [f"{inputs} → {outputs}" for inputs, outputs in pairwise(WIDTHS)]
    axes.plot(labels, numbers["plain"][0], "o-", label="plain layers")
    axes.plot(labels, numbers["ntk"][0], "s-", label="weights of size 1")
    axes.set(ylabel="change in one step (%)", yscale="log")
    axes.legend(frameon=False)
