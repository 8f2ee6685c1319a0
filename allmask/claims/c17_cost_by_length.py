"""C17. Attention costs n²d, recurrence nd², step after step.

Statement: A layer of attention over n tokens of width d costs n²d and is one step; a recurrent layer costs nd² and is
    n steps, one after the other. So attention is faster for short texts and slower for long ones.
Source: Vaswani et al. 2017, table 1.
Criterion: For the scores and sums of attention alone, the time grows with the square of the length: from 512 to 2,048
    tokens by a factor of 8 to 32 (16 by the formula). That of an LSTM layer, 128 wide, grows by 2.5 to 6.5 (4 by the
    formula), and its time for 64 tokens is above that of the whole layer of attention. Where the curves cross is
    reported and drawn.
"""

from __future__ import annotations

import time
from itertools import pairwise
from math import log
from statistics import median

import torch
from torch import nn

from allmask.claims.claim import Numbers, Trial, Verdict, judged
from allmask.mask import Mask
from allmask.nn.attention import Attention, Route, attend

WIDTH, LENGTHS = 128, (32, 64, 128, 256, 512, 1024, 2048)


def measure(trial: Trial, everything: bool = True) -> Numbers:
    """`everything`: each token reads all; otherwise only the nearest 32, and the cost is linear."""
    layer, recurrent = Attention(WIDTH, 4).eval(), nn.LSTM(WIDTH, WIDTH, batch_first=True).eval()
    seconds: Numbers = {name: {str(n): [] for n in LENGTHS} for name in ("attention alone", "attention", "LSTM")}
    rng = torch.Generator().manual_seed(1)
    with torch.inference_mode():
        for _ in range(21 if trial.full else 2 if trial.brief else 5):
            for n in LENGTHS:
                x = torch.randn(1, n, WIDTH, generator=rng)
                length = n if everything else 32
                route = Route.find(Mask.bidirectional(torch.ones(n // length, length, dtype=torch.bool)))
                short = x.view(n // length, length, WIDTH)
                heads = short.unflatten(-1, (4, -1))
                jobs = {
                    "attention alone": lambda heads=heads, route=route: attend(heads, heads, heads, route),
                    "attention": lambda x=short, route=route: layer(x, layer.keys_values(x), route),
                    "LSTM": lambda x=x: recurrent(x),
                }
                for name, job in jobs.items():
                    started = time.process_time()
                    job()
                    seconds[name][str(n)].append(time.process_time() - started)
    return {name: {n: 1000 * median(found) for n, found in values.items()} for name, values in seconds.items()}


def judge(numbers: Numbers) -> Verdict:
    growth = {name: values["2048"] / values["512"] for name, values in numbers.items()}
    crossing = crossed(numbers)
    holds = 8 <= growth["attention alone"] <= 32 and 2.5 <= growth["LSTM"] <= 6.5
    holds = holds and numbers["LSTM"]["64"] > numbers["attention"]["64"]
    said = f"the LSTM is faster from {crossing:.0f} tokens on" if crossing else "attention is faster at every length"
    return judged(
        holds,
        f"from 512 to 2,048 tokens attention × {growth['attention alone']:.1f}, LSTM × {growth['LSTM']:.1f}; {said}",
    )


def crossed(numbers: Numbers) -> float | None:
    """The length at which the layer of attention begins to take longer, on straight lines between the logarithms."""
    ratios = [log(numbers["attention"][str(n)] / numbers["LSTM"][str(n)]) for n in LENGTHS]
    for (n, before), (m, after) in pairwise(zip(LENGTHS, ratios, strict=True)):
        if before <= 0 < after:
            return n * (m / n) ** (before / (before - after))
    return None


def draw(axes, numbers: Numbers) -> None:
    crossing = crossed(numbers)
    if crossing:
        axes.axvline(crossing, color="grey", lw=0.8, linestyle="--", label=f"they cross at {crossing:.0f}")
    for name, values in numbers.items():
        axes.plot(LENGTHS, list(values.values()), "o-", label=name)
    axes.set(xlabel="tokens", ylabel="milliseconds", xscale="log", yscale="log")
    axes.set_xticks(LENGTHS, [str(n) for n in LENGTHS])
    axes.minorticks_off()
    axes.legend(frameon=False)
