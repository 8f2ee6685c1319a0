"""The toy GAN in one dimension: densities of data and generator, the discriminator's output, and the theory.

Theory (arXiv 1406.2661, section 4), with p the density of the data and q that of the generator: for a fixed generator
the best discriminator is p / (p + q), and the value of the game is then 2·JSD(p, q) − log 4. Its minimum, −log 4, is at
q = p, where the discriminator is ½ everywhere. Integrals are taken over a grid.

The generator's density is computed from evenly spaced quantiles of the noise, so it has no sampling error.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from allmask.gan.networks import Gan

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MEAN, DEVIATION, COUNT = 3.0, 0.7, 8192  # of the data
LOW, HIGH, POINTS = -2.0, 7.0, 181  # the grid
LOG_2 = float(np.log(2.0))
LOWEST_VALUE = -float(np.log(4.0))
_QUANTILES, _ARROWS = 1 << 15, 13
_VISIBLE = 2e-3  # the lowest density at which the best discriminator is drawn
_BLUE, _BLACK, _GREEN, _GREY = "#5B84D7", "#2B2B2B", "#5BA886", "#9A9A9A"


def examples(rng: torch.Generator) -> Tensor:
    """Draw the training data, (N, 1)."""
    return MEAN + DEVIATION * torch.randn(COUNT, 1, generator=rng)


@dataclass(frozen=True, eq=False)
class Frame:
    """The state of the game at one step, on a grid of points x."""

    x: np.ndarray
    data: np.ndarray  # density of the data
    made: np.ndarray  # density of the generator
    odds: np.ndarray  # the discriminator's log-odds that x is real
    noise: np.ndarray  # a few values of the noise
    mapped: np.ndarray  # the generator's output for these
    mean: np.ndarray  # () of the generator's output
    beyond: np.ndarray  # log-odds of the quantiles that the generator maps outside the grid

    @property
    def probability(self) -> np.ndarray:
        """The discriminator's probability that x is real."""
        return 0.5 * (1.0 + np.tanh(self.odds / 2.0))

    def metrics(self) -> dict[str, float]:
        """Integrals over the grid, plus sums over quantiles outside it, where the density of the data is about 0."""

        def outside(values: np.ndarray) -> float:
            return float(values.sum() / _QUANTILES)

        divergence = jensen_shannon(self.data, self.made, self.x) + outside(np.full_like(self.beyond, LOG_2)) / 2
        weight = (self.data + self.made) / 2.0
        from_half = float(np.trapezoid(weight * np.abs(self.probability - 0.5), self.x))
        return {
            "divergence": divergence,
            "value": value(self.odds, self.data, self.made, self.x) - outside(np.logaddexp(0.0, self.beyond)),
            "best_value": 2.0 * divergence + LOWEST_VALUE,
            "from_half": from_half + outside(np.abs(np.tanh(self.beyond / 2.0)) / 2.0) / 2,  # 0 at the optimum
            "mean": float(self.mean),
        }

    def save(self, path: Path) -> None:
        np.savez(path, **asdict(self))

    @classmethod
    def load(cls, path: Path) -> Frame:
        with np.load(path, allow_pickle=False) as stored:
            return cls(**{name: stored[name] for name in stored.files})


@torch.no_grad()
def frame_of(model: Gan) -> Frame:
    x = np.linspace(LOW, HIGH, POINTS)
    spread = torch.special.ndtri((torch.arange(_QUANTILES, dtype=torch.float64) + 0.5) / _QUANTILES).float()[:, None]
    made = model.generator(spread).double().numpy().ravel()
    odds = model.log_odds(torch.from_numpy(x).float()[:, None]).double().numpy()
    few = np.linspace(0, _QUANTILES - 1, _ARROWS + 2).round().astype(int)[1:-1]
    data = normal_density(x, MEAN, DEVIATION)
    step = x[1] - x[0]
    outside = made[(made < LOW - step / 2) | (made > HIGH + step / 2)]
    beyond = model.log_odds(torch.from_numpy(outside).float()[:, None]).double().numpy().ravel()
    noise = spread.numpy().ravel()[few]
    return Frame(x, data, density_of(made, x), odds, noise, made[few], made.mean(), beyond)


# ---- theory --------------------------------------------------------------------------------------------------


def best_discriminator(p: np.ndarray, q: np.ndarray) -> np.ndarray:
    """p / (p + q); ½ where both are 0 and it does not matter."""
    both = p + q
    return np.divide(p, both, out=np.full_like(both, 0.5), where=both > 0)


def value(log_odds: np.ndarray, p: np.ndarray, q: np.ndarray, x: np.ndarray) -> float:
    """The value of the game, E_p log D + E_q log(1 − D)."""
    right, wrong = -np.logaddexp(0.0, -log_odds), -np.logaddexp(0.0, log_odds)
    return float(np.trapezoid(_product(p, right) + _product(q, wrong), x))


def jensen_shannon(p: np.ndarray, q: np.ndarray, x: np.ndarray) -> float:
    """Jensen–Shannon divergence in nats: 0 for equal densities, log 2 for densities without overlap."""
    middle = (p + q) / 2.0
    ratios = [np.divide(one, middle, out=np.ones_like(one), where=one > 0) for one in (p, q)]
    both = [_product(one, np.log(ratio)) for one, ratio in zip((p, q), ratios, strict=True)]
    return float(np.trapezoid(both[0] + both[1], x) / 2.0)


def normal_density(x: np.ndarray, mean: float, deviation: float) -> np.ndarray:
    return np.exp(-0.5 * ((x - mean) / deviation) ** 2) / (deviation * np.sqrt(2.0 * np.pi))


def density_of(samples: np.ndarray, x: np.ndarray) -> np.ndarray:
    """The density of samples at evenly spaced points: a histogram with a bin around each point."""
    half = (x[1] - x[0]) / 2.0
    edges = np.append(x - half, x[-1] + half)
    return np.histogram(samples, edges)[0] / (len(samples) * 2.0 * half)


def _product(weight: np.ndarray, values: np.ndarray) -> np.ndarray:
    """weight * values, and 0 where the weight is 0, even if the value is infinite."""
    return np.multiply(weight, values, out=np.zeros_like(weight), where=weight > 0)


# ---- pictures ------------------------------------------------------------------------------------------------


def draw(frames: Sequence[tuple[str, Frame]], path: Path) -> None:
    """Draw frames side by side, each with its title."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(3.4 * len(frames), 3.2), dpi=110, layout="constrained")
    rows = figure.subplots(1, len(frames), sharey=True, squeeze=False)[0]
    for axes, (title, frame) in zip(rows, frames, strict=True):
        _draw_one(axes, frame)
        axes.set_title(title, fontsize=9)
    rows[0].legend(loc="upper left", fontsize=6, frameon=False)
    figure.savefig(path)


def _draw_one(axes: Axes, frame: Frame) -> None:
    axes.plot(frame.x, frame.data, ":", color=_BLACK, label="data")
    axes.plot(frame.x, frame.made, "-", color=_GREEN, label="generator")
    axes.plot(frame.x, frame.probability, "--", color=_BLUE, label="discriminator")
    best = best_discriminator(frame.data, frame.made)
    best = np.where(frame.data + frame.made > _VISIBLE, best, np.nan)  # where both are rare, it is noise
    axes.plot(frame.x, best, "-", color=_BLUE, alpha=0.3, linewidth=1, label="optimal discriminator")
    scaled = (LOW + HIGH) / 2.0 + frame.noise * (HIGH - LOW) / 5.0  # the noise, stretched over the grid
    for noise, made in zip(scaled, frame.mapped, strict=True):  # the generator's map, from noise to its output
        axes.plot([noise, made], [-0.45, -0.12], color=_GREY, linewidth=0.6)
    for height in (-0.45, -0.12):
        axes.plot([LOW, HIGH], [height, height], color=_BLACK, linewidth=0.8)
    axes.set_ylim(-0.5, 1.25)
    axes.set_xlim(LOW, HIGH)
    axes.set_yticks([0.0, 0.5, 1.0])
    axes.axhline(0.5, color=_GREY, linewidth=0.4)


def strip(frames: dict[int, Frame], last: int) -> list[tuple[str, Frame]]:
    """Choose four frames up to step `last`: the first, the second, one on the way, and the last."""
    steps = [step for step in sorted(frames) if step <= last]
    divergence = {step: frames[step].metrics()["divergence"] for step in steps}
    second = steps[min(1, len(steps) - 1)]
    later = steps[2:-1] or [second]
    third = min(later, key=lambda step: abs(divergence[step] - divergence[second] / 3.0))
    chosen = zip("abcd", (steps[0], second, third, steps[-1]), strict=True)
    return [(f"{letter}  step {step}", frames[step]) for letter, step in chosen]
