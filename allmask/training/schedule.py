"""Learning rate schedules, as factors of the peak: pure functions of the step (from 0) and the number of steps."""

from __future__ import annotations

import math


def linear(step: int, steps: int, warmup: int) -> float:
    """Linear warm-up, then linear decay to 0, which is reached just after the last step."""
    if step < warmup:
        return (step + 1) / warmup
    return max(0.0, (steps - step) / max(1, steps - warmup))


def cosine(step: int, steps: int, warmup: int) -> float:
    """Linear warm-up, then half a cosine down to 0."""
    if step < warmup:
        return (step + 1) / warmup
    return 0.5 * (1.0 + math.cos(math.pi * min(1.0, (step - warmup) / max(1, steps - warmup))))


def constant(step: int, steps: int, warmup: int) -> float:
    """Linear warm-up, then the peak."""
    return min(1.0, (step + 1) / warmup) if warmup else 1.0


def steps(step: int, steps: int, warmup: int) -> float:
    """Linear warm-up, then the peak until half of the steps, a tenth until three quarters, then a hundredth: after
    32,000 and 48,000 of 64,000 steps in arXiv 1512.03385."""
    if step < warmup:
        return (step + 1) / warmup
    return 1.0 if 2 * step < steps else 0.1 if 4 * step < 3 * steps else 0.01


def inverse_root(step: int, steps: int, warmup: int) -> float:
    """Linear warm-up, then decay with 1/sqrt(step): the schedule of the 2017 Transformer, relative to its peak."""
    now, warmup = step + 1, max(1, warmup)
    return min(now / warmup, math.sqrt(warmup / now))


SCHEDULES = {"linear": linear, "cosine": cosine, "constant": constant, "steps": steps, "inverse-root": inverse_root}


def noam(step: int, width: int, warmup: int = 4000) -> float:
    """The rate of arXiv 1706.03762 itself, width^-0.5 · min(step^-0.5, step · warmup^-1.5), step counted from 1."""
    return width**-0.5 * min((step + 1) ** -0.5, (step + 1) * warmup**-1.5)
