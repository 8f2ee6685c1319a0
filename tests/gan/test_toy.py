"""The toy: theory against scipy's quadrature and the definitions (C25), frames, and a discriminator that is trained."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import integrate, stats

from allmask.gan import toy
from allmask.gan.networks import PRESETS, GanConfig, fresh
from allmask.gan.toy import (
    LOWEST_VALUE,
    best_discriminator,
    density_of,
    jensen_shannon,
    normal_density,
    value,
)
from allmask.gan.training import GanWorkload
from allmask.training import Settings, train

X = np.linspace(-14.0, 14.0, 8001)
MEANS, DEVIATIONS = st.floats(-3.0, 3.0), st.floats(0.4, 2.0)


def best_log_odds(p: np.ndarray, q: np.ndarray) -> np.ndarray:
    """The best discriminator as log-odds, log p − log q, which keep their precision near 0 and 1."""
    with np.errstate(divide="ignore", invalid="ignore"):
        odds = np.log(p) - np.log(q)
    return np.where((p > 0) | (q > 0), odds, 0.0)


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


def test_for_equal_densities_the_discriminator_is_a_half_and_the_value_is_minimal():
    p = normal_density(X, 0.7, 0.9)
    assert (best_discriminator(p, p) == 0.5).all()
    assert value(best_log_odds(p, p), p, p, X) == pytest.approx(-np.log(4.0), abs=1e-9) and -np.log(4.0) == LOWEST_VALUE
    assert jensen_shannon(p, p, X) == 0.0


def test_without_overlap_the_divergence_is_log_2():
    x = np.linspace(0.0, 4.0, 4001)
    p, q = ((x < 1.0).astype(float), ((x > 2.0) & (x <= 3.0)).astype(float))
    assert jensen_shannon(p, q, x) == pytest.approx(np.log(2.0), rel=1e-3)
    assert value(best_log_odds(p, q), p, q, x) == 0.0  # a perfect discriminator


@settings(max_examples=40, deadline=None)
@given(MEANS, DEVIATIONS, st.floats(-3.0, 3.0), st.floats(-2.0, 2.0), st.floats(0.1, 3.0))
def test_no_discriminator_does_better(mean: float, deviation: float, shift: float, tilt: float, wave: float):
    p, q = normal_density(X, 0.0, 1.0), normal_density(X, mean, deviation)
    odds = best_log_odds(p, q)
    best = value(odds, p, q, X)
    assert value(odds + shift + tilt * np.sin(wave * X), p, q, X) <= best + 1e-9
    assert best >= -np.log(4.0) - 1e-9


# ---- frames and training -------------------------------------------------------------------------------------


def test_the_discriminator_of_a_fixed_generator_becomes_p_over_p_plus_q(tmp_path: Path):
    """Steps of the discriminator alone: C25 without an integral in the training."""
    model = fresh(GanConfig("toy", (1,), 1, 32), torch.Generator().manual_seed(1))
    torch.nn.init.constant_(model.generator.get_parameter("straight.bias"), 2.0)  # N(2, 1): some doubt is left
    work = GanWorkload(toy.examples(torch.Generator().manual_seed(1)), k=500, batch=512)
    how = Settings(
        steps=500, batch_tokens=512, lr=1e-2, schedule="linear", warmup=0, weight_decay=0.0, clip=1e9, precision="fp32",
        eval_every=500,
    )  # fmt: skip
    train(model, work, how, tmp_path / "run", quiet=True)
    frame = toy.frame_of(model.eval())
    weight, best = (frame.data + frame.made) / 2.0, best_discriminator(frame.data, frame.made)
    off = np.trapezoid(weight * np.abs(frame.probability - best), frame.x)
    assert off < 0.03 < np.trapezoid(weight * np.abs(best - 0.5), frame.x)
    found = frame.metrics()
    assert (
        found["value"] == pytest.approx(found["best_value"], abs=0.03) and found["value"] <= found["best_value"] + 1e-3
    )


def test_a_strip_is_the_start_two_between_and_the_end():
    model = fresh(GanConfig("toy", (1,), **PRESETS["toy"]), torch.Generator().manual_seed(0))
    frame = toy.frame_of(model)
    chosen = toy.strip({step: frame for step in (0, 10, 20, 30, 40)}, last=30)
    assert [title.split()[0] for title, _ in chosen] == ["a", "b", "c", "d"]
    assert chosen[0][0] == "a  step 0" and chosen[-1][0] == "d  step 30"


def test_a_frame_is_a_pair_of_densities(tmp_path: Path):
    frame = toy.frame_of(fresh(GanConfig("toy", (1,), **PRESETS["toy"]), torch.Generator().manual_seed(0)))
    assert np.trapezoid(frame.data, frame.x) == pytest.approx(1.0, abs=1e-6)
    assert np.trapezoid(frame.made, frame.x) <= 1.0 + 1e-9
    frame.save(tmp_path / "frame.npz")
    again = toy.Frame.load(tmp_path / "frame.npz")
    assert all(np.array_equal(getattr(frame, name), getattr(again, name)) for name in ("x", "data", "made", "odds"))


def test_what_is_made_outside_the_picture_counts():
    """By hand: a generator far away shares nothing with the data, so the divergence is log 2 and the best value 0."""
    model = fresh(GanConfig("toy", (1,), **PRESETS["toy"]), torch.Generator().manual_seed(0))
    start = toy.frame_of(model).metrics()
    assert start["mean"] == pytest.approx(0.0, abs=1e-3)
    torch.nn.init.constant_(model.generator.get_parameter("straight.bias"), -20.0)
    found = toy.frame_of(model).metrics()
    assert found["divergence"] == pytest.approx(math.log(2.0), abs=1e-6) and found["divergence"] > start["divergence"]
    assert found["best_value"] == pytest.approx(0.0, abs=1e-6) and found["mean"] == pytest.approx(-20.0, abs=1e-2)
    assert found["value"] <= found["best_value"]
