"""The running mean of the weights: its formula, that it is judged and kept, and that it survives an interruption."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from allmask.errors import UsageError
from allmask.training import Score, Settings, train
from allmask.training import checkpoint as runs
from allmask.training.ema import Average
from allmask.training.loop import Trainer
from tests.training.test_loop import FAST, Copying, model, quiet_bar, runs_metrics, same, weights


def test_the_mean_is_the_sum_written_out():
    layer = torch.nn.Linear(3, 2)
    average, expected = Average(layer, 0.9), layer.weight.detach().clone()
    for step in range(100):
        with torch.no_grad():
            layer.weight.add_(torch.randn(2, 3))
        average.update(step)
        decay = min(0.9, (1 + step) / (10 + step))
        expected = decay * expected + (1 - decay) * layer.weight.detach()
    torch.testing.assert_close(average.tensors()["weight"], expected)
    now = layer.weight.detach().clone()
    with average.in_place():
        torch.testing.assert_close(layer.weight.detach(), expected)
    assert torch.equal(layer.weight, now)


def test_what_is_judged_and_kept_is_the_mean(tmp_path):
    seen = []

    class Judged(Copying):
        def evaluate(self, judged, step):
            seen.append(weights(judged))
            return Score(float(-len(seen)), {})  # the first is the best

    made = model()
    train(made, Judged(), replace(FAST, ema=0.9), tmp_path / "run", quiet=True)
    assert same(weights(made), seen[0])
    state = runs.load_state(tmp_path / "run" / "checkpoints" / "step-00000004")
    assert state.average is not None
    assert all(torch.equal(state.average[name], seen[0][name]) for name in state.average)
    assert not same(state.model, seen[0])


def test_without_a_judge_the_mean_of_the_last_step_is_kept(tmp_path):
    made = model()
    train(made, Copying(), replace(FAST, ema=0.9), tmp_path / "run", quiet=True)
    state = runs.load_state(tmp_path / "run" / "checkpoints" / "step-00000012")
    assert state.average is not None
    assert all(torch.equal(made.state_dict()[name], mean) for name, mean in state.average.items())


def test_resumed_equals_uninterrupted_bit_for_bit(tmp_path):
    settings = replace(FAST, ema=0.95, save_every=1)
    whole = model()
    train(whole, Copying(), settings, tmp_path / "whole", quiet=True)
    first = Trainer(model(), Copying(), settings, tmp_path / "cut", quiet=True)
    metrics, source = runs_metrics(first), first.batches_from(0)
    for _ in range(5):
        first._one_step(source, metrics, quiet_bar(first))
    source.close()
    again = model()
    train(again, Copying(), settings, tmp_path / "cut", resume=True, quiet=True)
    assert same(weights(again), weights(whole))


@pytest.mark.parametrize("decay", [0.0, 1.0, -1.0])
def test_a_decay_that_means_nothing_is_refused(decay):
    with pytest.raises(UsageError, match="ema"):
        Settings(ema=decay)
