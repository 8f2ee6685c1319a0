"""D10. Dot products are faster than additive attention, but their variance grows with the width.

Statement: Additive attention, v · tanh(Wq + Uk), and dot products, q · k, have similar theoretical costs; in practice
    dot products are much faster, as they are one product of matrices. For wide vectors the variance of unscaled dot
    products grows with d, that of additive scores does not; hence the division by √d.
Source: Vaswani et al. 2017, section 3.2.1; Bahdanau et al. 2015.
Criterion: For vectors of unit variance, over five seeds, the variance of the scores grows from d = 16 to 512 by a
    factor of 24 to 40 for dot products (32 by the formula), by less than 2 for additive attention and for q · k / √d.
    The median processor time of 128 queries over 128 keys, 256 wide, in interleaved rounds, is at least 5 times larger
    for additive attention.
"""

from __future__ import annotations

import time
from statistics import mean, median

import torch
from torch import Tensor

from allmask.claims.claim import Numbers, Trial, Verdict, judged
from allmask.mask import Mask
from allmask.nn.attention import Route, attend
from allmask.nn.init import initialize_xavier
from allmask.nn.recurrent import AdditiveAttention

WIDTHS, TOKENS, WIDE = (16, 32, 64, 128, 256, 512), 128, 256


def measure(trial: Trial, product: bool = True) -> Numbers:
    """`product`: otherwise both are additive."""
    found: Numbers = {name: {str(d): [] for d in WIDTHS} for name in ("q · k", "q · k / √d", "additive")}
    for seed in trial.seeds(5):
        for d in WIDTHS:
            rng = torch.Generator().manual_seed(seed)
            q, k = (torch.randn(64, d, generator=rng) for _ in range(2))
            added = additive_scores(initialize_xavier(AdditiveAttention(d, d), rng), q, k)
            plain = q @ k.T if product else added
            for name, scores in (("q · k", plain), ("q · k / √d", plain / d**0.5), ("additive", added)):
                found[name][str(d)].append(scores.var().item())
    means = {name: {d: mean(values) for d, values in by_width.items()} for name, by_width in found.items()}
    return {**means, "milliseconds": times(trial, product)}


@torch.no_grad()
def additive_scores(attention: AdditiveAttention, q: Tensor, k: Tensor) -> Tensor:
    """The scores (Q, K) that `AdditiveAttention` gives to the keys before softmax."""
    return attention.score(torch.tanh(attention.query(q)[:, None] + attention.key(k)))[..., 0]


@torch.inference_mode()
def times(trial: Trial, product: bool) -> dict[str, float]:
    x = torch.randn(1, TOKENS, WIDE, generator=torch.Generator().manual_seed(1))
    additive, lengths = AdditiveAttention(WIDE, WIDE), torch.tensor([TOKENS])
    route = Route.find(Mask.bidirectional(torch.ones(1, TOKENS, dtype=torch.bool)))
    query, key = (torch.nn.Linear(WIDE, WIDE) for _ in range(2))

    def by_product() -> None:
        attend(query(x)[:, :, None], key(x)[:, :, None], x[:, :, None], route)

    def by_network() -> None:
        additive(x, additive.keys_values(x, lengths))

    jobs = {"dot product": by_product if product else by_network, "additive": by_network}
    seconds: dict[str, list[float]] = {name: [] for name in jobs}
    for _ in range(40 if trial.full else 3 if trial.brief else 11):
        for name, job in jobs.items():
            started = time.process_time()
            job()
            seconds[name].append(time.process_time() - started)
    return {name: 1000 * median(values) for name, values in seconds.items()}


def judge(numbers: Numbers) -> Verdict:
    growth = {name: numbers[name]["512"] / numbers[name]["16"] for name in ("q · k", "q · k / √d", "additive")}
    slower = numbers["milliseconds"]["additive"] / numbers["milliseconds"]["dot product"]
    holds = 24 <= growth["q · k"] <= 40 and growth["q · k / √d"] < 2 and growth["additive"] < 2 and slower >= 5
    return judged(
        holds,
        f"variance from d = 16 to 512 × {growth['q · k']:.0f} for q · k, × {growth['q · k / √d']:.1f} divided by √d, "
        f"× {growth['additive']:.1f} additive, which takes {slower:.0f} times as long",
    )


def draw(axes, numbers: Numbers) -> None:
    for name in ("q · k", "q · k / √d", "additive"):
        axes.plot(WIDTHS, list(numbers[name].values()), "o-", label=name)
    axes.set(xlabel="d", ylabel="variance of the scores", xscale="log", yscale="log")
    axes.set_xticks(WIDTHS, [str(d) for d in WIDTHS])
    axes.minorticks_off()
    axes.legend(frameon=False)
