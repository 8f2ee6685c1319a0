"""What the game should come to, for two densities on a line (arXiv 1406.2661, section 4), by integrals over a grid.

For a fixed generator the best discriminator is p / (p + q), where p is the density of the data and q the generator's.
The value of the game with it is 2·JSD(p, q) − log 4: least, −log 4, where q = p, and then it says ½ of everything.
"""

from __future__ import annotations

import numpy as np

LOWEST_VALUE = -float(np.log(4.0))


def best_discriminator(p: np.ndarray, q: np.ndarray) -> np.ndarray:
    """p / (p + q); ½ where neither has anything, where it does not matter."""
    both = p + q
    return np.divide(p, both, out=np.full_like(both, 0.5), where=both > 0)


def best_log_odds(p: np.ndarray, q: np.ndarray) -> np.ndarray:
    """The same as log-odds, log p − log q, which lose nothing where it is all but sure."""
    with np.errstate(divide="ignore", invalid="ignore"):
        odds = np.log(p) - np.log(q)
    return np.where((p > 0) | (q > 0), odds, 0.0)


def value(log_odds: np.ndarray, p: np.ndarray, q: np.ndarray, x: np.ndarray) -> float:
    """E log D over the data + E log(1 − D) over the generator's: what one maximises and the other minimises."""
    right, wrong = -np.logaddexp(0.0, -log_odds), -np.logaddexp(0.0, log_odds)
    return float(np.trapezoid(_times(p, right) + _times(q, wrong), x))


def jensen_shannon(p: np.ndarray, q: np.ndarray, x: np.ndarray) -> float:
    """The divergence of the two, in nats: 0 where they are the same, log 2 where they share nothing."""
    middle = (p + q) / 2.0
    both = [_times(one, _log_ratio(one, middle)) for one in (p, q)]
    return float(np.trapezoid(both[0] + both[1], x) / 2.0)


def normal_density(x: np.ndarray, mean: float, deviation: float) -> np.ndarray:
    return np.exp(-0.5 * ((x - mean) / deviation) ** 2) / (deviation * np.sqrt(2.0 * np.pi))


def density_of(samples: np.ndarray, x: np.ndarray) -> np.ndarray:
    """The density of many samples at evenly spaced points: a histogram whose bins are those around the points."""
    half = (x[1] - x[0]) / 2.0
    edges = np.append(x - half, x[-1] + half)
    return np.histogram(samples, edges)[0] / (len(samples) * 2.0 * half)


def _log_ratio(one: np.ndarray, other: np.ndarray) -> np.ndarray:
    """0 where there is nothing of the first."""
    ratio = np.divide(one, other, out=np.ones_like(one), where=one > 0)
    return np.log(ratio)


def _times(weight: np.ndarray, number: np.ndarray) -> np.ndarray:
    """Their product, where nothing times anything, an infinity too, is nothing."""
    return np.multiply(weight, number, out=np.zeros_like(weight), where=weight > 0)
