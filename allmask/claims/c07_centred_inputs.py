"""C7. Centred and scaled inputs allow larger learning rates.

Statement: Centring inputs and dividing them by their deviation lowers the Lipschitz constant of the gradient. Larger
    learning rates then train, which is what batch norm is for.
Source: LeCun et al. 1998; Santurkar et al. 2018; 苏剑林 on batch norm.
Criterion: For a linear model with inputs of mean 3 and deviations from 0.5 to 2, over five seeds, centring lowers the
    largest eigenvalue of the Hessian by a factor of at least 2, and scaling again. For a network of three layers fed
    with raw inputs, the largest learning rate that still trains (a loss below half of the variance in all seeds) is
    at least three times larger with batch norm.
"""

from __future__ import annotations

from statistics import mean

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from allmask.claims.claim import Numbers, Trial, Verdict, judged

RATES, STEPS, FEATURES = (0.003, 0.01, 0.03, 0.1, 0.3, 1.0), 100, 32


def measure(trial: Trial, normalized: bool = True) -> Numbers:
    """`normalized`: otherwise nothing is centred or scaled."""
    found: Numbers = {"raw": [], "centred": [], "scaled": [], "plain": [], "batch norm": []}
    for seed in trial.seeds(5):
        x, y = data(seed)
        centred = x - x.mean(0) if normalized else x
        scaled = centred / x.std(0) if normalized else x
        for name, inputs in (("raw", x), ("centred", centred), ("scaled", scaled)):
            found[name].append(torch.linalg.eigvalsh(inputs.T @ inputs / len(inputs)).max().item())
        for name, norm in (("plain", False), ("batch norm", normalized)):
            found[name].append([trained(x, y, rate, norm, seed) for rate in RATES])
    return found


def data(seed: int) -> tuple[Tensor, Tensor]:
    rng = torch.Generator().manual_seed(seed)
    deviations = torch.linspace(0.5, 2, FEATURES)
    x = 3 + deviations * torch.randn(512, FEATURES, generator=rng)
    hidden = torch.tanh((x - 3) @ torch.randn(FEATURES, 8, generator=rng) / FEATURES**0.5)
    return x, hidden @ torch.randn(8, 1, generator=rng)


def trained(x: Tensor, y: Tensor, rate: float, norm: bool, seed: int) -> float:
    """The last loss as a share of the first; 10 if it diverges."""
    torch.manual_seed(seed)
    parts: list[nn.Module] = []
    for inputs, outputs in ((FEATURES, 64), (64, 64)):
        parts += [nn.Linear(inputs, outputs), nn.BatchNorm1d(outputs) if norm else nn.Identity(), nn.ReLU()]
    network = nn.Sequential(*parts, nn.Linear(64, 1))
    optimizer = torch.optim.SGD(network.parameters(), lr=rate)
    losses = []
    for _ in range(STEPS):
        loss = F.mse_loss(network(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    last = losses[-1] / y.var().item()
    return min(last, 10.0) if last == last else 10.0


def judge(numbers: Numbers) -> Verdict:
    raw, centred, scaled = (mean(numbers[name]) for name in ("raw", "centred", "scaled"))
    plain, norm = (largest_rate(numbers[name]) for name in ("plain", "batch norm"))
    return judged(
        raw > 2 * centred and centred > 2 * scaled and norm >= 3 * plain > 0,
        f"largest curvature {raw:.0f} raw, {centred:.1f} centred, {scaled:.2f} scaled; largest rate {plain:g}, "
        f"with batch norm {norm:g}",
    )


def largest_rate(runs: list[list[float]]) -> float:
    """The largest rate that trains in every run; 0 if none does."""
    return max((rate for number, rate in enumerate(RATES) if all(run[number] < 0.5 for run in runs)), default=0.0)


def draw(axes, numbers: Numbers) -> None:
    for name in ("plain", "batch norm"):
        axes.plot(RATES, [mean(run[rate] for run in numbers[name]) for rate in range(len(RATES))], "o-", label=name)
    axes.set(xlabel="learning rate", ylabel="loss / variance after training", xscale="log", yscale="log")
    axes.legend(frameon=False)
