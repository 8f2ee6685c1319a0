"""The experiments with adversarial networks run, and what they measure is what it is called."""

from __future__ import annotations

import gan
import pytest
import torch

from allmask.gan.networks import PRESETS, GanConfig, fresh
from allmask.gan.training import LOSSES


def test_a_sure_discriminator_starves_one_loss(tmp_path):
    told = gan.starving(tmp_path, (1, 40))
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in told.splitlines()[4:]]
    assert [row[0] for row in rows] == ["1", "40"] and (tmp_path / "starving.png").is_file()
    calm, full = ([float(row[column]) for row in rows] for column in (3, 2))
    assert calm[1] / calm[0] < 0.5 * full[1] / full[0]


def test_the_gradient_norm_is_that_of_finite_differences():
    model = fresh(GanConfig("toy", (1,), **PRESETS["toy"]), torch.Generator().manual_seed(1)).double()
    noise = model.noise(4096, torch.Generator().manual_seed(2)).double()
    model.noise = lambda count, rng=None: noise  # type: ignore[method-assign]
    weights = list(model.generator.parameters())
    from allmask.gan.training import generator_loss

    for kind in LOSSES:
        squares = 0.0
        for weight in weights:
            for at in range(weight.numel()):
                ends = []
                for step in (1e-5, -1e-5):
                    with torch.no_grad():
                        weight.view(-1)[at] += step
                        odds = model.discriminator(model.generator(noise)).flatten()
                        ends.append((generator_loss(odds, kind) / 4096).item())
                        weight.view(-1)[at] -= step
                squares += ((ends[0] - ends[1]) / 2e-5) ** 2
        assert gan.gradient_norm(model, kind) == pytest.approx(squares**0.5, rel=1e-3)


def test_as_many_epochs_as_there_is_time_for(tmp_path, monkeypatch):
    monkeypatch.setattr(gan, "run", lambda asked, out: {"seconds": 2.0})
    assert [gan._epochs(tmp_path, {}, seconds) for seconds in (0.0, 21.0, 1e6)] == [1.0, 10.0, 200.0]
