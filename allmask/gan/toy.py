"""Numbers on a line: the picture of the game, with the densities of both and what the discriminator says.

The generator's density is that of evenly spread quantiles of its noise, so nothing in it is chance.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from allmask.gan import theory
from allmask.gan.networks import Gan
from allmask.training import Score

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MEAN, DEVIATION = 3.0, 0.7  # of the data
COUNT = 8192  # of the data
LOW, HIGH, POINTS = -2.0, 7.0, 181
LOG_2 = float(np.log(2.0))
_QUANTILES, _ARROWS = 1 << 15, 13
_SEEN = 2e-3  # the least density of which anything is drawn
_BLUE, _BLACK, _GREEN, _GREY = "#5B84D7", "#2B2B2B", "#5BA886", "#9A9A9A"


def examples(rng: torch.Generator) -> Tensor:
    """(N, 1) of the data's distribution."""
    return MEAN + DEVIATION * torch.randn(COUNT, 1, generator=rng)


@dataclass(frozen=True, eq=False)
class Frame:
    """All that is drawn of a moment, at points x."""

    x: np.ndarray
    data: np.ndarray  # density of the data
    made: np.ndarray  # density of the generator
    odds: np.ndarray  # what the discriminator says: the log-odds that x is real
    noise: np.ndarray  # a few numbers of it
    mapped: np.ndarray  # and what the generator makes of them
    mean: np.ndarray  # () of all that it makes
    beyond: np.ndarray  # the log-odds of each number, out of _QUANTILES, that it makes outside the picture

    @property
    def told(self) -> np.ndarray:
        """The same as a probability."""
        return 0.5 * (1.0 + np.tanh(self.odds / 2.0))

    @property
    def best(self) -> np.ndarray:
        """What the best discriminator would say."""
        return theory.best_discriminator(self.data, self.made)

    def metrics(self) -> dict[str, float]:
        """Integrals over the picture, and sums over what was made beyond it, where there is next to no data."""
        apart = (
            theory.jensen_shannon(self.data, self.made, self.x) + self._outside(np.full_like(self.beyond, LOG_2)) / 2
        )
        weight = (self.data + self.made) / 2.0
        unsure = float(np.trapezoid(weight * np.abs(self.told - 0.5), self.x))
        return {
            "divergence": apart,
            "value": theory.value(self.odds, self.data, self.made, self.x)
            - self._outside(np.logaddexp(0.0, self.beyond)),
            "best_value": 2.0 * apart + theory.LOWEST_VALUE,
            "from_half": unsure + self._outside(np.abs(np.tanh(self.beyond / 2.0)) / 2.0) / 2,  # 0 in the end
            "mean": float(self.mean),
        }

    def _outside(self, each: np.ndarray) -> float:
        return float(each.sum() / _QUANTILES)

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
    data = theory.normal_density(x, MEAN, DEVIATION)
    step = x[1] - x[0]
    outside = made[(made < LOW - step / 2) | (made > HIGH + step / 2)]
    beyond = model.log_odds(torch.from_numpy(outside).float()[:, None]).double().numpy().ravel()
    noise = spread.numpy().ravel()[few]
    return Frame(x, data, theory.density_of(made, x), odds, noise, made[few], made.mean(), beyond)


def judged(frame: Frame) -> Score:
    found = frame.metrics()
    return Score(-found["divergence"], found, metric="−divergence")


# ---- pictures ------------------------------------------------------------------------------------------------


def draw(frames: Sequence[tuple[str, Frame]], path: Path) -> None:
    """Frames beside each other, each with its title."""
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
    axes.plot(frame.x, frame.told, "--", color=_BLUE, label="discriminator")
    best = np.where(frame.data + frame.made > _SEEN, frame.best, np.nan)  # of next to nothing it is chance
    axes.plot(frame.x, best, "-", color=_BLUE, alpha=0.3, linewidth=1, label="the best discriminator")
    for noise, made in zip(_placed(frame), frame.mapped, strict=True):  # as noise below becomes numbers above
        axes.plot([noise, made], [-0.45, -0.12], color=_GREY, linewidth=0.6)
    for height in (-0.45, -0.12):
        axes.plot([LOW, HIGH], [height, height], color=_BLACK, linewidth=0.8)
    axes.set_ylim(-0.5, 1.25)
    axes.set_xlim(LOW, HIGH)
    axes.set_yticks([0.0, 0.5, 1.0])
    axes.axhline(0.5, color=_GREY, linewidth=0.4)


def _placed(frame: Frame) -> np.ndarray:
    """Noise has a scale of its own, which is stretched over the picture."""
    return (LOW + HIGH) / 2.0 + frame.noise * (HIGH - LOW) / 5.0


def strip(frames: dict[int, Frame], last: int) -> list[tuple[str, Frame]]:
    """Of frames by step, four: a the start, b what comes after it, c on the way, d the one that was kept."""
    steps = [step for step in sorted(frames) if step <= last]
    apart = {step: frames[step].metrics()["divergence"] for step in steps}
    second = steps[min(1, len(steps) - 1)]
    later = steps[2:-1] or [second]
    third = min(later, key=lambda step: abs(apart[step] - apart[second] / 3.0))
    chosen = zip("abcd", (steps[0], second, third, steps[-1]), strict=True)
    return [(f"{letter}  step {step}", frames[step]) for letter, step in chosen]
