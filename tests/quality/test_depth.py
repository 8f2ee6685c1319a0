"""The experiment of quality/depth.py, in small: the networks take turns, and all come as far."""

from __future__ import annotations

from pathlib import Path

import depth
import pytest

from allmask.training import Settings
from allmask.vision.training import ImageTraining
from tests.vision.reference import parameters


def test_networks_take_turns(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(depth, "SAMPLE", 20)
    settings = Settings(steps=1000, batch_tokens=8, eval_every=2, keep=1, precision="fp32", schedule="constant")
    data = ImageTraining().images()
    experiment = depth.Experiment(ImageTraining().settled(data.train), settings, data, tmp_path, (8,))
    assert experiment.names == ["plain8", "residual8"]
    plain, residual = map(experiment.config, experiment.names)
    assert plain.shortcut == "none" and parameters(plain) == parameters(residual)
    experiment.turn("plain8", quiet=True)  # as if interrupted before the other one had its turn
    assert experiment.rounds == 0
    experiment.run(minutes=0, quiet=True)
    assert [list(experiment.errors(name)) for name in experiment.names] == [[2], [2]]
    experiment.run(minutes=0, quiet=True)
    found = depth.results(experiment)
    assert found["steps"] == 4 and [list(curve) for curve in found["curves"].values()] == [[2, 4], [2, 4]]
    for curve in found["curves"].values():
        for errors in curve.values():
            assert 0 <= errors["train_error"] <= 1 and 0 <= errors["test_error"] <= 1
            assert (errors["train_error"] * 20) % 1 == pytest.approx(0, abs=1e-9)
    shown = depth.table(found, (8,))
    assert shown.count("\n") == 2 and "| 8 layers |" in shown and "4 steps" in shown
    depth.plot(found, (8,), tmp_path / "depth.png")
    assert (tmp_path / "depth.png").stat().st_size > 5000
