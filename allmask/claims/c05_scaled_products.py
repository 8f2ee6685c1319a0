"""C5. Dot products of attention are divided by √d.

Statement: For vectors of unit variance, q·k has variance d. Unscaled, softmax over 64 keys gives almost all weight to
    one of them, and its gradient vanishes. Dividing by √d repairs both; so does T5, which starts with smaller
    queries.
Source: Vaswani et al. 2017, section 3.2.1; Raffel et al. 2020 (T5's initialization).
Criterion: Over five seeds, var(q·k)/d is within 10 % of 1 for d = 64 and 512. For d = 512 the largest of 64 weights
    is above 0.7 unscaled and below 0.3 with either repair, and the gradient of softmax is at least 3 times larger
    with it for the median query. (First the mean was asked for. It is nearly the same with and without, since the few
    queries for which two keys are almost equal have all of it; so the median, which is what most queries learn from.)
    Softmax of (a, a, 2a) is 0.5761168847658291, 0.999909208384341, 1 for a = 1, 10, 100, to 1e-15.
"""

from __future__ import annotations

from statistics import mean

import torch
from torch import Tensor

from allmask.claims.claim import Numbers, Trial, Verdict, judged
from allmask.nn.init import t5

WIDTHS, KEYS = (16, 64, 128, 256, 512), 64
EXACT = (0.57611688476582911, 0.99990920838434098, 1.0)  # 1 / (1 + 2 e^-a)


def measure(trial: Trial, scaled: bool = True) -> Numbers:
    found: Numbers = {name: {} for name in ("variance", "unscaled", "scaled", "t5", "gradients")}
    for d in WIDTHS:
        runs = [one_width(d, seed, scaled) for seed in trial.seeds(5)]
        for name, values in found.items():
            values[str(d)] = mean(run[name] for run in runs)
    peaks = [torch.tensor([a, a, 2 * a], dtype=torch.float64).softmax(0)[2].item() for a in (1, 10, 100)]
    return {**found, "softmax": peaks}


def one_width(d: int, seed: int, scaled: bool) -> Numbers:
    rng = torch.Generator().manual_seed(seed)
    queries, keys = (torch.randn(1000, d, generator=rng) for _ in range(2))
    products = (queries * keys).sum(-1)
    scores = queries[:200] @ keys[:KEYS].T
    repaired = scores / d**0.5 if scaled else scores
    inputs = torch.randn(200, d, generator=rng)
    small = inputs @ t5(torch.empty(d, d), rng, head_width=d).T @ keys[:KEYS].T
    return {
        "variance": products.var().item() / d,
        "unscaled": peak(scores),
        "scaled": peak(repaired),
        "t5": peak(small),
        "gradients": slope(repaired) / slope(scores),
    }


def peak(scores: Tensor) -> float:
    """The largest weight of a row, on average."""
    return scores.softmax(-1).amax(-1).mean().item()


def slope(scores: Tensor) -> float:
    """The norm of softmax's Jacobian, diag(p) - p pᵀ, for the median query."""
    p = scores.double().softmax(-1)
    jacobian = torch.diag_embed(p) - p[:, :, None] * p[:, None, :]
    return jacobian.flatten(1).norm(dim=1).median().item()


def judge(numbers: Numbers) -> Verdict:
    widest = {name: numbers[name]["512"] for name in ("unscaled", "scaled", "t5", "gradients")}
    holds = all(abs(numbers["variance"][d] - 1) < 0.1 for d in ("64", "512"))
    holds = holds and widest["unscaled"] > 0.7 and max(widest["scaled"], widest["t5"]) < 0.3
    holds = holds and widest["gradients"] >= 3
    holds = holds and all(abs(a - b) < 1e-15 for a, b in zip(numbers["softmax"], EXACT, strict=True))
    return judged(
        holds,
        f"at d = 512, var(q·k) = {512 * numbers['variance']['512']:.0f}; largest weight {widest['unscaled']:.2f}, "
        f"divided by √d {widest['scaled']:.2f}, gradient × {widest['gradients']:.1f}",
    )


def draw(axes, numbers: Numbers) -> None:
    for name, label in (("unscaled", "q·k"), ("scaled", "q·k / √d"), ("t5", "T5's small queries")):
        axes.plot(WIDTHS, list(numbers[name].values()), "o-", label=label)
    axes.set(xlabel="d", ylabel=f"largest of {KEYS} weights", ylim=(0, 1), xscale="log")
    axes.set_xticks(WIDTHS, [str(d) for d in WIDTHS])
    axes.minorticks_off()
    axes.legend(frameon=False)
