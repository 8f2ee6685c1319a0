"""The loop learns from other things than packed texts: a work's own plan, losses and units; one process does it."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from allmask.errors import UsageError
from allmask.training import Score, Settings, StepSpec, train
from allmask.training.log import read_metrics
from allmask.training.strategy import strategy_for
from tests.training.points import Points


class Doubling:
    """y = 2x, from points that come in the order of their numbers."""

    def __init__(self):
        self.x = torch.arange(1.0, 9.0)[:, None]
        self.lengths = [1] * 8
        self.step_spec = StepSpec("points", self.plan, self.losses, lambda model, batch: 6 * batch.tokens)
        self.seen: list[tuple[int, list[int]]] = []
        self.judged: list[int] = []  # after which steps

    def plan(self, lengths, most: int, seed: int, epoch: int) -> list[list[int]]:
        return [list(range(begin, begin + most)) for begin in range(0, len(lengths), most)]

    def batch(self, numbers, epoch: int) -> Points:
        self.seen.append((epoch, numbers))
        return Points(self.x[numbers])

    def losses(self, model: nn.Module, batch: Points, smoothing: float):
        return {"square": ((model(batch.values) - 2.0 * batch.values).square().sum(), len(batch.values))}

    def evaluate(self, model: nn.Module, step: int) -> Score:
        self.judged.append(step)
        loss = (model(self.x) - 2.0 * self.x).square().mean().item()
        return Score(-loss, {"loss": loss})


def test_a_work_with_a_way_of_its_own(tmp_path):
    model, work = nn.Linear(1, 1, bias=False), Doubling()
    nn.init.zeros_(model.weight)
    settings = Settings(epochs=30, batch_tokens=4, lr=0.1, precision="fp32", weight_decay=0.0)
    result = train(model, work, settings, tmp_path / "run", quiet=True)
    assert result.steps == 60 and result.best is not None
    assert result.best.metrics["loss"] < 1.0 < 102.0 == (2.0 * work.x).square().mean()  # as it began
    assert work.judged == list(range(10, 61, 10))
    assert work.seen[:3] == [(0, [0, 1, 2, 3]), (0, [4, 5, 6, 7]), (1, [0, 1, 2, 3])]
    first = read_metrics(tmp_path / "run")[0]
    assert first["points"] == 4 and first["loss_square"] > 1.0 and "tokens" not in first


def test_only_models_of_texts_are_trained_by_several_processes():
    for group in (SimpleNamespace(size=2, sharded=False), SimpleNamespace(size=1, sharded=True)):
        with pytest.raises(UsageError, match="several processes"):
            strategy_for(nn.Linear(1, 1), group)  # type: ignore[arg-type]
