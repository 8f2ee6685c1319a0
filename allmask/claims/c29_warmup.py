"""C29. The Transformer's sizes, and the peak of its learning rate.

Statement: The original Transformer has 65M parameters in its base size and 213M in its big one (a shared vocabulary
    of 37,000 tokens). Its learning rate rises linearly for 4,000 steps, then falls with the inverse square root of
    the step.
Source: Vaswani et al. 2017, section 5.3 and table 3.
Criterion: Counts are within 4 % of 65M and 213M. The rate is largest at step 4,000, where it is (width · 4,000)^-½;
    it is half of that at steps 2,000 and 16,000.
"""

from __future__ import annotations

from dataclasses import replace

from allmask.claims.claim import Numbers, Trial, Verdict, judged
from allmask.nn.build import empty_parameters
from allmask.presets import PRESETS
from allmask.training.schedule import noam

VOCABULARY, STEPS, WIDTH = 37_000, 20_000, 512


def measure(trial: Trial, warmup: bool = True) -> Numbers:
    """`warmup`: otherwise the rate falls from the first step on."""
    found: Numbers = {}
    for size in ("base", "big"):
        config = replace(PRESETS[f"transformer-{size}"](), vocab_size=VOCABULARY)
        found[size] = sum(weight.numel() for weight in empty_parameters(config, ("lm",)).values())
    found["rates"] = [noam(step, WIDTH, 4000 if warmup else 1) for step in range(STEPS)]
    return found


def judge(numbers: Numbers) -> Verdict:
    rates = numbers["rates"]
    peak = max(range(STEPS), key=rates.__getitem__) + 1
    holds = abs(numbers["base"] / 65e6 - 1) < 0.04 and abs(numbers["big"] / 213e6 - 1) < 0.04 and peak == 4000
    holds = holds and abs(rates[3999] * (WIDTH * 4000) ** 0.5 - 1) < 1e-9
    holds = holds and all(abs(rates[step - 1] / rates[3999] - 0.5) < 1e-9 for step in (2000, 16_000))
    return judged(
        holds,
        f"base {numbers['base'] / 1e6:.1f}M, big {numbers['big'] / 1e6:.1f}M; the rate is largest at step {peak:,}",
    )


def draw(axes, numbers: Numbers) -> None:
    axes.plot(range(1, STEPS + 1), numbers["rates"])
    axes.axvline(4000, color="grey", lw=0.8, linestyle="--")
    axes.set(xlabel="step", ylabel="learning rate")
