"""Metrics of generated images: the Fréchet distance against scipy's matrix root and by hand, mode collapse."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import linalg

from allmask.errors import DataError
from allmask.gan import metrics
from allmask.gan.metrics import Evaluator, Moments, frechet
from allmask.vision.checkpoints import Loaded
from allmask.vision.images import Preparation
from allmask.vision.resnet import ResNetConfig, fresh


def rows(count: int, width: int, seed: int, rank: int | None = None) -> torch.Tensor:
    rng = torch.Generator().manual_seed(seed)
    mixed = torch.randn(rank or width, width, generator=rng, dtype=torch.float64)
    return torch.randn(count, rank or width, generator=rng, dtype=torch.float64) @ mixed + mixed[0]


@settings(max_examples=25, deadline=None)
@given(st.integers(1, 12), st.integers(0, 10**6))
def test_frechet_is_the_formula_with_scipys_root(width: int, seed: int):
    first, second = rows(40, width, seed), rows(30, width, seed + 1)
    mean = [one.numpy().mean(0) for one in (first, second)]
    spread = [np.atleast_2d(np.cov(one.numpy(), rowvar=False)) for one in (first, second)]
    root = linalg.sqrtm(spread[0] @ spread[1])
    wanted = np.sum((mean[0] - mean[1]) ** 2) + np.trace(spread[0] + spread[1] - 2.0 * np.real(root))
    one, other = (Moments(m.mean(0), torch.from_numpy(s)) for m, s in zip((first, second), spread, strict=True))
    assert frechet(one, other) == pytest.approx(wanted, rel=1e-6, abs=1e-6)
    assert frechet(one, other) == pytest.approx(frechet(other, one), rel=1e-6, abs=1e-6)


def test_frechet_by_hand():
    one, other = (
        Moments(torch.tensor([m]).double(), torch.tensor([[s]]).double()) for m, s in ((1.0, 4.0), (3.0, 9.0))
    )
    assert frechet(one, other) == pytest.approx((1 - 3) ** 2 + (2 - 3) ** 2)


def test_what_is_the_same_has_no_distance_also_with_features_that_never_change():
    found = Moments.of(rows(50, 6, 3, rank=2))
    assert frechet(found, found) == pytest.approx(0.0, abs=1e-6)


def test_real_images_are_looked_at_from_all_over_the_data(judge: Evaluator, monkeypatch: pytest.MonkeyPatch):
    """Folders are read class by class: the first thousands of them are of the first classes."""
    monkeypatch.setattr(metrics, "MAX_IMAGES", 40)
    ordered = quarters(torch.arange(80) // 20)
    found = Evaluator.of(Loaded(judge.network, None, judge.preparation), ordered, "here")
    assert found.shares.tolist() == pytest.approx([0.25] * 4, abs=0.03)
    assert found(ordered)["frechet"] < 0.05 < found(ordered[:20])["frechet"]


@pytest.fixture
def judge() -> Evaluator:
    """It takes images for the class of their brightest quarter; classes are 0 to 3, evenly filled."""
    model = fresh(
        ResNetConfig((1,), (4,), stem="small", channels=1, classes=4), torch.Generator().manual_seed(0)
    ).eval()
    model.features = lambda x: torch.nn.functional.adaptive_avg_pool2d(x, 2).flatten(1)  # type: ignore[method-assign]
    model.head.weight.data, model.head.bias.data = torch.eye(4), torch.zeros(4)
    pixels = quarters(torch.arange(80) % 4)
    return Evaluator.of(Loaded(model, None, Preparation.of(pixels)), pixels, "here")


def quarters(which: torch.Tensor) -> torch.Tensor:
    rng = torch.Generator().manual_seed(1)
    pixels = torch.randint(0, 60, (len(which), 1, 4, 4), generator=rng, dtype=torch.uint8)
    for image, number in zip(pixels, which.tolist(), strict=True):
        top, left = 2 * (number // 2), 2 * (number % 2)
        image[0, top : top + 2, left : left + 2] += 150
    return pixels


def test_variety_and_its_loss_are_seen(judge: Evaluator):
    even = judge(quarters(torch.arange(40) % 4))
    two = judge(quarters(torch.arange(40) % 2))
    one = judge(quarters(torch.zeros(40, dtype=torch.long)))
    assert [found["classes"] for found in (even, two, one)] == pytest.approx([4.0, 2.0, 1.0])
    assert [found["covered"] for found in (even, two, one)] == [1.0, 0.5, 0.25]
    assert even["frechet"] < two["frechet"] < one["frechet"]


def test_a_class_with_a_few_images_only_is_lost(judge: Evaluator):
    most = torch.zeros(100, dtype=torch.long)
    most[:2], most[2:6], most[6:10] = 1, 2, 3
    assert judge(quarters(most))["covered"] == 0.75  # 2 of 100 are less than a tenth of a quarter


def test_images_of_another_size_are_refused(judge: Evaluator):
    with pytest.raises(DataError, match="here: images of 1 × 6 × 6"):
        Evaluator.of(Loaded(judge.network, None, judge.preparation), torch.zeros(5, 1, 6, 6, dtype=torch.uint8), "here")
    with pytest.raises(DataError, match="no input normalization"):
        Evaluator.of(Loaded(judge.network), torch.zeros(5, 1, 4, 4, dtype=torch.uint8), "here")
