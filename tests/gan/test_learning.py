"""Algorithm 1: whose turn it is, what a turn changes, against the same steps written out; and the losses' gradients."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from allmask.gan.learning import GanWorkload, Turn, discriminator_loss, generator_loss
from allmask.gan.networks import PRESETS, GanConfig, fresh, multiply_adds
from allmask.training import Settings, train

SHAPES = {"toy": (1,), "mlp": (1, 8, 8), "dcgan": (3, 8, 12)}


def gan(kind: str = "toy", seed: int = 0, **other):
    values = {**PRESETS[kind], "width": 8, "noise": 3, **other}
    return fresh(GanConfig(kind, SHAPES[kind], **values), torch.Generator().manual_seed(seed))


def data(kind: str = "toy", count: int = 40) -> torch.Tensor:
    return torch.rand(count, *SHAPES[kind], generator=torch.Generator().manual_seed(5)) * 2.0 - 1.0


# ---- the losses ----------------------------------------------------------------------------------------------


@given(st.lists(st.floats(-30.0, 30.0), min_size=1, max_size=5))
def test_losses_are_the_logarithms_of_the_paper(numbers: list[float]):
    odds = torch.tensor(numbers, dtype=torch.float64)
    told = [1.0 / (1.0 + math.exp(-number)) for number in numbers]
    refused = [1.0 / (1.0 + math.exp(number)) for number in numbers]
    assert generator_loss(odds, "saturating").item() == pytest.approx(sum(map(math.log, refused)), rel=1e-9)
    assert generator_loss(odds, "non-saturating").item() == pytest.approx(-sum(map(math.log, told)), rel=1e-9)
    both = -sum(map(math.log, told)) - sum(map(math.log, refused))
    assert discriminator_loss(odds, odds).item() == pytest.approx(both, rel=1e-9)


def test_a_sure_discriminator_starves_the_saturating_loss_only():
    pulls = {}
    for kind in ("saturating", "non-saturating"):
        odds = torch.tensor([-12.0], requires_grad=True)
        generator_loss(odds, kind).backward()
        pulls[kind] = odds.grad.item()
    assert -1e-5 < pulls["saturating"] < 0.0 and pulls["non-saturating"] == pytest.approx(-1.0, abs=1e-4)


def test_at_a_half_both_pull_alike():
    for kind in ("saturating", "non-saturating"):
        odds = torch.zeros(1, requires_grad=True)
        generator_loss(odds, kind).backward()
        assert odds.grad.item() == -0.5


# ---- turns ---------------------------------------------------------------------------------------------------


@given(st.integers(1, 7), st.integers(4, 50), st.integers(4, 20))
def test_after_each_k_batches_one_turn_is_the_generators_also_over_the_seam_of_epochs(k: int, count: int, size: int):
    work = GanWorkload(torch.zeros(count, 1), k=k, batch=size)
    epochs = [work.plan(work.lengths, size, 1, epoch) for epoch in range(2 * k)]
    turns = [bool(numbers) for epoch in epochs for numbers in epoch]
    whole = len(turns) // (k + 1)
    assert turns == ([True] * k + [False]) * whole and len(turns) == whole * (k + 1)
    for epoch in epochs:
        assert sorted(number for numbers in epoch for number in numbers) == list(range(count))


@pytest.mark.parametrize("kind", SHAPES)
@pytest.mark.parametrize("loss", ["saturating", "non-saturating"])
def test_a_turn_leaves_gradients_in_one_network_only(kind: str, loss: str):
    model, work = gan(kind), GanWorkload(data(kind), loss=loss, batch=6)
    for turn, learns, rests in (
        (work.batch([0, 1, 2, 3], 0), model.discriminator, model.generator),
        (work.batch([], 0), model.generator, model.discriminator),
    ):
        ((total, count),) = work.losses(model, turn).values()
        total.backward()
        assert count == turn.count == (6 if turn.real is None else 4)
        assert all(weight.grad is not None for weight in learns.parameters())
        assert all(weight.grad is None and weight.requires_grad for weight in rests.parameters())
        model.zero_grad(set_to_none=True)


def test_training_is_algorithm_1_written_out(tmp_path):
    """k = 2, six steps: the loop's weights are those of two optimizers of torch, each for its own network."""
    settings = Settings(
        steps=6, batch_tokens=10, lr=1e-2, schedule="constant", warmup=0, weight_decay=0.0, betas=(0.5, 0.9),
        clip=1e9, precision="fp32", seed=4, eval_every=6,
    )  # fmt: skip
    model, work = gan(), GanWorkload(data(), k=2, batch=10)
    train(model, work, settings, tmp_path / "run", quiet=True)

    other, step = gan(), 0
    ours, theirs = (
        torch.optim.Adam(network.parameters(), lr=1e-2, betas=(0.5, 0.9))
        for network in (other.discriminator, other.generator)
    )
    batches = [numbers for numbers in work.plan(work.lengths, 10, 4, 0) if numbers]

    def seeded():
        nonlocal step
        torch.manual_seed((4 << 32) + step)
        step += 1

    for turn in range(2):
        for numbers in batches[2 * turn : 2 * turn + 2]:
            seeded()
            real, made = data()[numbers], other.generator(torch.randn(10, 3)).detach()
            right, wrong = other.discriminator(real).sigmoid(), other.discriminator(made).sigmoid()
            ours.zero_grad()
            (-(right.log() + (1 - wrong).log()).mean()).backward()
            ours.step()
        seeded()
        theirs.zero_grad()
        (-other.discriminator(other.generator(torch.randn(10, 3))).sigmoid().log().mean()).backward()
        theirs.step()
    for (name, one), two in zip(model.state_dict().items(), other.state_dict().values(), strict=True):
        torch.testing.assert_close(one, two, atol=2e-6, rtol=1e-4, msg=name)


def test_with_steps_of_the_discriminator_alone_the_generator_stays(tmp_path):
    model, work = gan(), GanWorkload(data(), k=8, batch=10)
    before = [weight.clone() for weight in model.generator.parameters()]
    settings = Settings(steps=8, batch_tokens=10, lr=1e-2, clip=1e9, precision="fp32", eval_every=8)
    train(model, work, settings, tmp_path / "run", quiet=True)
    assert all(torch.equal(one, two) for one, two in zip(before, model.generator.parameters(), strict=True))


def test_a_loss_that_is_not_finite_leaves_norms_and_weights(tmp_path):
    model = gan("dcgan")
    examples = data("dcgan", 8)
    examples[:] = float("nan")
    kept = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    work = GanWorkload(examples, k=2, batch=4)
    settings = Settings(steps=2, batch_tokens=4, precision="fp32", eval_every=2)
    train(model, work, settings, tmp_path / "run", quiet=True)
    assert all(torch.equal(kept[name], tensor) for name, tensor in model.state_dict().items())


# ---- networks ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", SHAPES)
def test_what_is_made_has_the_shape_of_the_data(kind: str):
    model = gan(kind).eval()
    made = model.sample(5, torch.Generator().manual_seed(1))
    assert made.shape == (5, *SHAPES[kind]) and model.log_odds(made).shape == (5,)
    assert torch.equal(made, model.sample(5, torch.Generator().manual_seed(1)))
    assert kind == "toy" or made.abs().max() <= 1.0


def test_operations_are_counted_by_hand():
    model = gan("dcgan", noise=3, width=8)  # 3 × 8 × 12 pixels: maps of 2 × 3, then 4 × 6
    generator = 3 * 16 * 6 + 6 * 16 * 8 * 16 + 24 * 8 * 3 * 16
    discriminator = 24 * 3 * 8 * 16 + 6 * 8 * 16 * 16 + 16 * 6
    assert multiply_adds(model.generator, torch.zeros(1, 3)) == generator
    assert multiply_adds(model.discriminator, torch.zeros(1, 3, 8, 12)) == discriminator
    work = GanWorkload(data("dcgan"), batch=4)
    assert work.operations(model, Turn(None, 4)) == 8 * (3 * generator + 2 * discriminator)
    assert work.operations(model, Turn(data("dcgan", 5), 5)) == 10 * (generator + 6 * discriminator)
