"""The game by integrals, against scipy's quadrature of densities in closed form and the definition itself (C25)."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import integrate, stats

from allmask.gan.theory import (
    LOWEST_VALUE,
    best_discriminator,
    best_log_odds,
    density_of,
    jensen_shannon,
    normal_density,
    value,
)

X = np.linspace(-14.0, 14.0, 8001)
MEANS, DEVIATIONS = st.floats(-3.0, 3.0), st.floats(0.4, 2.0)


def integral(function) -> float:
    return integrate.quad(function, -14.0, 14.0, limit=400, points=[-3.0, 0.0, 3.0])[0]


def entropies(mean: float, deviation: float) -> tuple[float, float]:
    """JSD of N(0, 1) and another, and E log D* + E log(1 − D*), by quadrature, each from its own definition."""
    p, q = stats.norm(0.0, 1.0), stats.norm(mean, deviation)

    def kl(one, x):
        middle = np.logaddexp(p.logpdf(x), q.logpdf(x)) - np.log(2.0)
        return one.pdf(x) * (one.logpdf(x) - middle)

    def game(x):
        odds = p.logpdf(x) - q.logpdf(x)
        return -p.pdf(x) * np.logaddexp(0.0, -odds) - q.pdf(x) * np.logaddexp(0.0, odds)

    return (integral(lambda x: kl(p, x)) + integral(lambda x: kl(q, x))) / 2.0, integral(game)


def test_densities_are_scipys():
    np.testing.assert_allclose(normal_density(X, 0.3, 0.8), stats.norm(0.3, 0.8).pdf(X), rtol=1e-12)
    grid = np.linspace(-4.0, 4.0, 41)
    found = density_of(stats.norm.ppf((np.arange(1 << 16) + 0.5) / (1 << 16)), grid)
    half = (grid[1] - grid[0]) / 2.0
    wanted = (stats.norm.cdf(grid + half) - stats.norm.cdf(grid - half)) / (2.0 * half)
    np.testing.assert_allclose(found, wanted, atol=2e-4)


@pytest.mark.parametrize(("mean", "deviation"), [(0.0, 1.0), (0.5, 1.0), (1.0, 0.5), (3.0, 1.5), (-2.0, 0.4)])
def test_the_value_of_the_game_is_twice_the_divergence_less_log_4(mean: float, deviation: float):
    p, q = normal_density(X, 0.0, 1.0), normal_density(X, mean, deviation)
    apart, game = entropies(mean, deviation)
    assert jensen_shannon(p, q, X) == pytest.approx(apart, abs=1e-7)
    assert value(best_log_odds(p, q), p, q, X) == pytest.approx(game, abs=1e-7)
    np.testing.assert_allclose(best_discriminator(p, q), 1.0 / (1.0 + q / np.maximum(p, 1e-300)), atol=1e-12)
    assert game == pytest.approx(2.0 * apart - np.log(4.0), abs=1e-7)


def test_at_equality_it_says_a_half_everywhere_and_the_value_is_the_least():
    p = normal_density(X, 0.7, 0.9)
    told = best_discriminator(p, p)
    assert (told == 0.5).all()
    assert value(best_log_odds(p, p), p, p, X) == pytest.approx(-np.log(4.0), abs=1e-9) and -np.log(4.0) == LOWEST_VALUE
    assert jensen_shannon(p, p, X) == 0.0


def test_what_shares_nothing_is_apart_by_log_2():
    x = np.linspace(0.0, 4.0, 4001)
    p, q = ((x < 1.0).astype(float), ((x > 2.0) & (x <= 3.0)).astype(float))
    assert jensen_shannon(p, q, x) == pytest.approx(np.log(2.0), rel=1e-3)
    assert value(best_log_odds(p, q), p, q, x) == 0.0  # told apart without a doubt


@settings(max_examples=40, deadline=None)
@given(MEANS, DEVIATIONS, st.floats(-3.0, 3.0), st.floats(-2.0, 2.0), st.floats(0.1, 3.0))
def test_no_discriminator_does_better(mean: float, deviation: float, shift: float, tilt: float, wave: float):
    p, q = normal_density(X, 0.0, 1.0), normal_density(X, mean, deviation)
    odds = best_log_odds(p, q)
    best = value(odds, p, q, X)
    assert value(odds + shift + tilt * np.sin(wave * X), p, q, X) <= best + 1e-9
    assert best >= -np.log(4.0) - 1e-9
