"""C25. The best discriminator is p/(p + q); a good one starves its generator.

Statement: For a fixed generator the best discriminator is p/(p + q). If q = p it is ½ everywhere, and the value of
    the game is -log 4. A discriminator that is too good leaves the saturating loss without a gradient; the other loss
    keeps one.
Source: Goodfellow et al. 2014, sections 3 and 4.
Criterion: A discriminator trained on two fixed normals is within 0.05 of p/(p + q) where there is data, and the value
    within 0.02 of the theory; at p = q it is within 0.05 of ½ and the value within 0.01 of -log 4. If it is sure to 1
    in 1,000, the saturating loss has less than 1 % of the other's gradient.
At length: make quality GAN=digits
"""

from __future__ import annotations

import math

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from allmask.claims.claim import Numbers, Trial, Verdict, judged
from allmask.gan.toy import best_discriminator, jensen_shannon, normal_density
from allmask.gan.training import discriminator_loss, generator_loss

GRID = np.linspace(-2, 7, 181)
REAL = (3.0, 0.7)


def measure(trial: Trial, trained: bool = True) -> Numbers:
    """`trained`: otherwise the discriminator is left as it began."""
    found: Numbers = {}
    for name, other in (("apart", (1.5, 1.0)), ("equal", REAL)):
        p, q = (normal_density(GRID, *law) for law in (REAL, other))
        odds, value = fitted(other, trial.steps(1500) if trained else 0)
        best, data = best_discriminator(p, q), np.maximum(p, q) > 0.05
        found[name] = {
            "found": (1 / (1 + np.exp(-odds))).tolist(),
            "best": best.tolist(),
            "off": float(np.abs(1 / (1 + np.exp(-odds)) - best)[data].max()),
            "value": value,
            "theory": 2 * jensen_shannon(p, q, GRID) - math.log(4),
        }
    for kind in ("saturating", "non-saturating"):
        sure = torch.full((1,), math.log(0.001 / 0.999), requires_grad=True)
        generator_loss(sure, kind).backward()
        found[kind] = abs(sure.grad.item()) if sure.grad is not None else 0.0
    return found


def fitted(other: tuple[float, float], steps: int) -> tuple[np.ndarray, float]:
    """The log-odds on the grid, and the value of the game on fresh samples."""
    rng = torch.Generator().manual_seed(1)
    torch.manual_seed(1)
    network = nn.Sequential(nn.Linear(1, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 1))
    optimizer = torch.optim.Adam(network.parameters(), lr=3e-3)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.02, max(1, steps))

    def samples(law: tuple[float, float], count: int) -> torch.Tensor:
        return law[0] + law[1] * torch.randn(count, 1, generator=rng)

    for _ in range(steps):
        loss = discriminator_loss(network(samples(REAL, 512)), network(samples(other, 512)))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    with torch.no_grad():
        odds = network(torch.tensor(GRID, dtype=torch.float32)[:, None])[:, 0].double().numpy()
        real, made = network(samples(REAL, 200_000)), network(samples(other, 200_000))
        value = -(F.softplus(-real).mean() + F.softplus(made).mean()).item()
    return odds, value


def judge(numbers: Numbers) -> Verdict:
    apart, equal = numbers["apart"], numbers["equal"]
    share = numbers["saturating"] / numbers["non-saturating"]
    holds = apart["off"] < 0.05 and abs(apart["value"] - apart["theory"]) < 0.02
    holds = holds and equal["off"] < 0.05 and abs(equal["value"] + math.log(4)) < 0.01 and share < 0.01
    return judged(
        holds,
        f"off by at most {apart['off']:.3f}, at p = q by {equal['off']:.3f}; value {equal['value']:.4f} (-1.3863); "
        f"gradient of the saturating loss {100 * share:.1f} % of the other's",
    )


def draw(axes, numbers: Numbers) -> None:
    axes.plot(GRID, numbers["apart"]["best"], "k--", lw=0.8, label="p / (p + q)")
    axes.plot(GRID, numbers["apart"]["found"], label="trained")
    axes.plot(GRID, numbers["equal"]["found"], label="trained, p = q")
    axes.set(xlabel="x", ylabel="probability of being real", ylim=(0, 1))
    axes.legend(frameon=False)
