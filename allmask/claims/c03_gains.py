"""C3. The right variance keeps signals alive through depth.

Statement: Xavier's variance keeps the size of signals through layers of tanh near 0. ReLU halves the second moment,
    so that 30 layers divide it by about a billion; variance 2/m restores it.
Source: Glorot and Bengio 2010; He et al. 2015.
Criterion: Over five seeds, the second moment after 30 layers of 512 is above 0.02 for tanh with Xavier, below 1e-7
    for ReLU with Xavier (½ a layer: 2^-30 = 9e-10), and between 0.5 and 2 times that of the first layer for ReLU with
    2/m. Weaker: for tanh it falls, but by less than 10 % a layer in the last ten.
"""

from __future__ import annotations

from statistics import geometric_mean

import torch

from allmask.claims.claim import Numbers, Trial, Verdict, judged
from allmask.nn.init import he, xavier_normal

LAYERS, WIDTH = 30, 512
STACKS = {
    "tanh, Xavier": (torch.tanh, xavier_normal),
    "ReLU, Xavier": (torch.relu, xavier_normal),
    "ReLU, He": (torch.relu, he),
}


def measure(trial: Trial, restored: bool = True) -> Numbers:
    """`restored`: He's variance where it is said; otherwise Xavier's everywhere."""
    found: Numbers = {}
    for name, (activation, draw_weights) in STACKS.items():
        start = draw_weights if restored else xavier_normal
        runs = [moments(activation, start, seed) for seed in trial.seeds(5)]
        found[name] = [geometric_mean(values) for values in zip(*runs, strict=True)]
    return found


def moments(activation, start, seed: int) -> list[float]:
    """E[x²] of the outputs of each layer."""
    rng = torch.Generator().manual_seed(seed)
    x = torch.randn(64, WIDTH, generator=rng)
    found = []
    for _ in range(LAYERS):
        x = activation(x @ start(torch.empty(WIDTH, WIDTH), rng).T)
        found.append(x.pow(2).mean().item())
    return found


def judge(numbers: Numbers) -> Verdict:
    tanh, xavier = numbers["tanh, Xavier"], numbers["ReLU, Xavier"][-1]
    restored = numbers["ReLU, He"][-1] / numbers["ReLU, He"][0]
    relu = xavier < 1e-7 and 0.5 < restored < 2
    a_layer = (tanh[-1] / tanh[-11]) ** 0.1
    return judged(
        relu and tanh[-1] > 0.02,
        f"second moment after {LAYERS} layers: tanh {tanh[-1]:.3f}, × {a_layer:.2f} a layer; ReLU {xavier:.0e}, "
        f"with 2/m {restored:.2f} of the first layer's",
        weaker=relu and a_layer > 0.9,
    )


def draw(axes, numbers: Numbers) -> None:
    for name, values in numbers.items():
        axes.plot(range(1, LAYERS + 1), values, label=name)
    axes.set(xlabel="layer", ylabel="second moment", yscale="log")
    axes.legend(frameon=False)
