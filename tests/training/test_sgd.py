"""SGD with momentum in the loop: torch's own, used by hand, and the formula; resumed bit for bit."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from allmask.errors import UsageError
from allmask.training import Settings, StepSpec, train
from allmask.training import checkpoint as runs
from allmask.training.log import read_metrics
from allmask.training.optimizer import optimizer_for
from allmask.training.schedule import steps as by_steps
from tests.training.points import Points

PAPER = Settings(
    optimizer="sgd", lr=0.1, momentum=0.9, weight_decay=0.02, schedule="steps", warmup=0, clip=1e9, steps=8,
    batch_tokens=5, precision="fp32", eval_every=4, save_every=2, keep=9,
)  # fmt: skip


class Curve:
    """Heights of a curve at twenty places, in batches of five."""

    def __init__(self):
        self.x = torch.linspace(-1.0, 1.0, 20)[:, None]
        self.y = (3.0 * self.x).sin()
        self.lengths = [1] * 20
        self.step_spec = StepSpec("points", self.plan, self.losses, lambda model, batch: 1)

    def plan(self, lengths, most: int, seed: int, epoch: int) -> list[list[int]]:
        order = torch.randperm(20, generator=torch.Generator().manual_seed(seed + epoch)).tolist()
        return [order[begin : begin + most] for begin in range(0, 20, most)]

    def batch(self, numbers, epoch: int) -> Points:
        return Points(torch.tensor(numbers))

    def losses(self, model: nn.Module, batch: Points, smoothing: float):
        return {"square": ((model(self.x[batch.values]) - self.y[batch.values]).square().sum(), batch.tokens)}

    def evaluate(self, model: nn.Module, step: int) -> None:
        return None


def network() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(1, 8), nn.Tanh(), nn.LayerNorm(8), nn.Linear(8, 1))


def by_hand(optimizer: torch.optim.Optimizer, model: nn.Module, settings: Settings) -> None:
    """The same steps without the loop."""
    work = Curve()
    assert settings.steps is not None
    for step in range(settings.steps):
        numbers = work.plan(None, 5, settings.seed, step // 4)[step % 4]
        for group in optimizer.param_groups:
            group["lr"] = settings.lr * (1.0 if step < 4 else 0.1 if step < 6 else 0.01)
        optimizer.zero_grad()
        (model(work.x[numbers]) - work.y[numbers]).square().mean().backward()
        optimizer.step()


def same(one: nn.Module, other: nn.Module) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))


@pytest.mark.parametrize("momentum", [0.9, 0.0])
def test_the_loop_makes_the_steps_of_torch(tmp_path: Path, momentum: float):
    settings = replace(PAPER, momentum=momentum)
    model, other = network(), network()
    result = train(model, Curve(), settings, tmp_path / "run", quiet=True)
    assert result.steps == 8
    weights = [weight for weight in other.parameters() if weight.ndim == 2]
    spared = [weight for weight in other.parameters() if weight.ndim < 2]  # biases and norms are not decayed
    groups = [{"params": weights, "weight_decay": 0.02}, {"params": spared, "weight_decay": 0.0}]
    by_hand(torch.optim.SGD(groups, lr=0.1, momentum=momentum), other, settings)
    for one, two in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(one, two, rtol=1e-6, atol=1e-7)
    assert not same(model, network())
    rates = [line["lr"] for line in read_metrics(tmp_path / "run")]
    assert rates == pytest.approx([0.1] * 4 + [0.01] * 2 + [0.001] * 2)


def test_two_steps_by_the_formula():
    weight = nn.Linear(1, 1, bias=False)
    nn.init.constant_(weight.weight, 2.0)
    optimizer = optimizer_for(weight, replace(PAPER, weight_decay=0.5))
    for gradient, expected in ((3.0, 2.0 - 0.1 * 4.0), (1.0, 1.6 - 0.1 * (0.9 * 4.0 + 1.8))):
        weight.weight.grad = torch.full((1, 1), gradient)
        optimizer.step()
        assert weight.weight.item() == pytest.approx(expected)


@pytest.mark.parametrize("kept", [2, 4, 6])
def test_resumed_is_uninterrupted(tmp_path: Path, kept: int):
    whole, cut = network(), network()
    train(whole, Curve(), PAPER, tmp_path / "whole", quiet=True)
    train(cut, Curve(), PAPER, tmp_path / "cut", quiet=True)
    for folder in (tmp_path / "cut" / "checkpoints").iterdir():
        if int(folder.name.split("-")[1]) > kept:
            for file in folder.iterdir():
                file.unlink()
            folder.rmdir()
    again = network()
    train(again, Curve(), PAPER, tmp_path / "cut", resume=True, quiet=True)
    assert same(again, whole)
    stored = runs.load_state(tmp_path / "cut" / "checkpoints" / f"step-{kept:08d}").optimizer
    assert len(stored) == 6 and all(name.endswith(".momentum_buffer") for name in stored)


def test_rates_by_layer(tmp_path: Path):
    """Each group makes its step with its share of the rate, as with AdamW."""
    model = nn.ModuleDict({"body": nn.ModuleDict({"layers": nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])})})
    before = [weight.clone() for weight in model.parameters()]
    optimizer = optimizer_for(model, replace(PAPER, weight_decay=0.0, layer_decay=0.5))
    for weight in model.parameters():
        weight.grad = torch.ones_like(weight)
    optimizer.step()
    moved = [(old - new).mean().item() for old, new in zip(before, model.parameters(), strict=True)]
    assert moved == pytest.approx([0.025, 0.025, 0.05, 0.05])


def test_a_tenth_after_half_of_the_steps():
    assert [by_steps(step, 64_000, 0) for step in (0, 31_999, 32_000, 47_999, 48_000, 63_999)] == [
        1.0, 1.0, 0.1, 0.1, 0.01, 0.01,
    ]  # fmt: skip
    assert [by_steps(step, 8, 2) for step in range(8)] == [0.5, 1.0, 1.0, 1.0, 0.1, 0.1, 0.01, 0.01]


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"optimizer": "lion"}, "expected adamw or sgd"),
        ({"momentum": 1.0}, "momentum is 1.0"),
        ({"momentum": -0.1}, "momentum is -0.1"),
    ],
)
def test_nonsense_is_refused(given, words):
    with pytest.raises(UsageError, match=words):
        Settings(**given)
