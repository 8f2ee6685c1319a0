"""D2. Sigmoid and ReLU need wider weights: U[±√(96/(a + b))] and U[±√(12/(a + b))].

Statement: Xavier's uniform, ±√(6/(a + b)) between layers of a and b units, is for activations close to x around 0. A
    sigmoid has slope ¼ there, so its weights are 4 times as wide, ±√(96/(a + b)); ReLU loses half of the second
    moment, so its are √2 times as wide, ±√(12/(a + b)). Signals then survive many layers.
Source: Glorot and Bengio 2010; He et al. 2015; usual in libraries.
Criterion: Over five seeds, the drawn weights have variance 32/(a + b) and 4/(a + b), to 2 %. With these, after 30
    layers of 512, ReLU keeps its second moment within a factor of 2, and after 10 layers of sigmoids the differences
    between inputs have at least 1 % of the variance of the first layer. Weaker: sigmoids do so only if centred
    (σ - ½), as the derivation assumes; otherwise their mean ½ drives the units of the next layer out of the middle.
"""

from __future__ import annotations

from collections.abc import Callable
from statistics import geometric_mean

import torch
from torch import Tensor

from allmask.claims.claim import Numbers, Trial, Verdict, judged
from allmask.nn.init import xavier_uniform

WIDTH, DEEP, SHALLOW = 512, 30, 10
STACKS: dict[str, tuple[Callable[[Tensor], Tensor], float, int]] = {  # activation, gain, layers
    "ReLU": (torch.relu, 2**0.5, DEEP),
    "sigmoid": (torch.sigmoid, 4.0, SHALLOW),
    "sigmoid, centred": (lambda x: torch.sigmoid(x) - 0.5, 4.0, SHALLOW),
}


def measure(trial: Trial, wider: bool = True) -> Numbers:
    """`wider`: otherwise all have Xavier's own bound."""
    found: Numbers = {"variance": {}}
    for name, bound in (("ReLU", 12), ("sigmoid", 96)):
        gain = STACKS[name][1] if wider else 1.0
        weight = xavier_uniform(torch.empty(300, 500), torch.Generator().manual_seed(1), gain)
        found["variance"][name] = weight.var().item() / (bound / 3 / 800)
    for name, (activation, gain, layers) in STACKS.items():
        runs = [through(activation, gain if wider else 1.0, layers, seed) for seed in trial.seeds(5)]
        found[name] = [geometric_mean(values) for values in zip(*runs, strict=True)]
        found[f"{name}, Xavier"] = through(activation, 1.0, layers, 1)
    return found


def through(activation: Callable[[Tensor], Tensor], gain: float, layers: int, seed: int) -> list[float]:
    """The signal after each layer: the second moment for ReLU, the variance among inputs for sigmoids."""
    rng = torch.Generator().manual_seed(seed)
    x, found = torch.randn(64, WIDTH, generator=rng, dtype=torch.float64), []
    for _ in range(layers):
        x = activation(x @ xavier_uniform(torch.empty(WIDTH, WIDTH), rng, gain).double().T)
        found.append((x if activation is torch.relu else x - x.mean(0)).pow(2).mean().item())
    return found


def judge(numbers: Numbers) -> Verdict:
    kept = {name: numbers[name][-1] / numbers[name][0] for name in STACKS}
    right = all(abs(value - 1) < 0.02 for value in numbers["variance"].values()) and 0.5 < kept["ReLU"] < 2
    a_layer = kept["sigmoid"] ** (1 / (SHALLOW - 1))
    return judged(
        right and kept["sigmoid"] > 0.01,
        f"ReLU keeps {kept['ReLU']:.2f} after {DEEP} layers; differences between inputs × {a_layer:.2f} a layer with "
        f"sigmoids, {100 * kept['sigmoid, centred']:.0f} % left after {SHALLOW} if centred",
        weaker=right and kept["sigmoid, centred"] > 0.01,
    )


def draw(axes, numbers: Numbers) -> None:
    for number, name in enumerate(STACKS):
        for values, style in ((numbers[name], "-"), (numbers[f"{name}, Xavier"], ":")):
            relative = [value / values[0] for value in values]
            label = name if style == "-" else f"{name}, √(6/(a + b))"
            axes.plot(range(1, len(values) + 1), relative, style, color=f"C{number}", label=label)
    axes.set(xlabel="layer", ylabel="signal / first layer's", yscale="log", ylim=(1e-12, 3))
    axes.legend(frameon=False, fontsize=7)
