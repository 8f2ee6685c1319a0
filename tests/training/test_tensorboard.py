"""TensorBoard: the curves hold the numbers of metrics.jsonl; without the package it is said before training."""

from __future__ import annotations

import sys
from dataclasses import replace

import pytest

from allmask.errors import UsageError
from allmask.training import train
from allmask.training.log import read_metrics
from tests.training.test_loop import FAST, Copying, model


def test_curves_hold_the_numbers_of_the_metrics(tmp_path):
    reader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator", reason="an extra")
    scores = [0.1, 0.2, 0.3]
    train(model(), Copying(scores=scores), replace(FAST, tensorboard=True), tmp_path / "run", quiet=True)
    found = reader.EventAccumulator(str(tmp_path / "run" / "tensorboard"))
    found.Reload()
    lines = read_metrics(tmp_path / "run")
    losses = [(line["step"], line["loss"]) for line in lines if "loss" in line]
    assert [(point.step, point.value) for point in found.Scalars("train/loss")] == [
        (step, pytest.approx(value)) for step, value in losses
    ]
    assert [point.value for point in found.Scalars("eval/quality")] == pytest.approx(scores)


def test_a_missing_package_is_said_before_training(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    work = Copying()
    with pytest.raises(UsageError, match="TensorBoard is not installed"):
        train(model(), work, replace(FAST, tensorboard=True), tmp_path / "run", quiet=True)
    assert not work.seen
