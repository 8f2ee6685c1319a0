"""C6. RMS norm is faster than layer norm, and as good.

Statement: A norm that does not subtract the mean needs less work, and trains as well.
Source: Zhang and Sennrich 2019; T5 (Raffel et al. 2020); 苏剑林 on normalization.
Criterion: Forward and backward of 512 tokens, 512 wide, take less time with RMS norm than with layer norm (medians of
    processor time in interleaved rounds). Small language models that are trained with each differ in held-out loss by
    less than 0.05 nats in the mean of five seeds. (First three.)
At length: python benchmarks/norms.py
"""

from __future__ import annotations

import time
from statistics import mean, median

import torch
from torch import nn

from allmask.claims.claim import Numbers, Trial, Verdict, judged
from allmask.claims.learning import STEPS, language_model
from allmask.nn.layers import NORMS

TOKENS, WIDTH = 512, 512


def measure(trial: Trial, fused: bool = True) -> Numbers:
    """`fused`: otherwise torch's own RMS norm, which is several operations on a CPU."""
    layers = {"layer": NORMS["layer"](WIDTH), "rms": NORMS["rms"](WIDTH) if fused else nn.RMSNorm(WIDTH)}
    losses = {}
    for name in layers:
        trial.say(f"language models with {name} norm")
        losses[name] = [language_model(seed, trial.steps(STEPS), norm=name).loss for seed in trial.seeds(5)]
    return {"microseconds": times(layers, 20 if trial.brief else 200), "loss": losses}


def times(layers: dict[str, nn.Module], rounds: int) -> dict[str, float]:
    rng = torch.Generator().manual_seed(1)
    x, back = (torch.randn(TOKENS, WIDTH, generator=rng) for _ in range(2))
    x.requires_grad_()
    taken: dict[str, list[float]] = {name: [] for name in layers}
    for _ in range(rounds):
        for name, layer in layers.items():
            started = time.process_time()
            layer(x).backward(back)
            taken[name].append(time.process_time() - started)
    return {name: 1e6 * median(found) for name, found in taken.items()}


def judge(numbers: Numbers) -> Verdict:
    layer, rms = (numbers["microseconds"][name] for name in ("layer", "rms"))
    difference = mean(numbers["loss"]["rms"]) - mean(numbers["loss"]["layer"])
    return judged(
        rms < layer and abs(difference) < 0.05,
        f"{rms:.0f} µs against {layer:.0f} µs ({layer / rms:.2f}×); loss {difference:+.3f}",
    )


def draw(axes, numbers: Numbers) -> None:
    axes.bar(list(numbers["microseconds"]), list(numbers["microseconds"].values()))
    axes.set(xlabel="norm", ylabel="microseconds, forward and backward")
