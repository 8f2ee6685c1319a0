"""A step of AdamW in C has the bits of torch's fused one, with and without clipping, and where rows were never read."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from allmask.kernels import adamw as kernel
from allmask.training.optimizer import ClippingAdamW, RowGradient, clip

pytestmark = pytest.mark.skipif(kernel.library() is None, reason="no C kernels here")
USUAL = {"lr": 1e-2, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.1, "fused": True}


def models(*shapes: tuple[int, ...]) -> tuple[nn.ParameterList, nn.ParameterList]:
    rng = torch.Generator().manual_seed(0)
    ours = nn.ParameterList([torch.randn(shape, generator=rng) for shape in shapes])
    return ours, copy.deepcopy(ours)


def give(grads: list[Tensor | None], *sides: nn.ParameterList) -> None:
    for side in sides:
        for weight, grad in zip(side, grads, strict=True):
            weight.grad = None if grad is None else grad.clone()


def alike(ours: nn.ParameterList, theirs: nn.ParameterList, *optimizers: torch.optim.Optimizer) -> bool:
    states = [optimizer.state_dict()["state"] for optimizer in optimizers]
    same = all(
        torch.equal(states[0][n][name], value) for n, slots in states[1].items() for name, value in slots.items()
    )
    return same and all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("limit", [0.5, 1e9])
@pytest.mark.parametrize("changes", [{}, {"weight_decay": 0.0}, {"betas": (0.5, 0.9)}, {"betas": (0.0, 0.999)}])
def test_steps_have_the_bits_of_torch(limit, changes):
    """Also of sizes that are no multiple of 16, of weights without a gradient, and of gradients of all sizes."""
    ours, theirs = models((40, 48), (16,), (3, 5), (7,), (1 << 16, 2))
    options, rng = {**USUAL, **changes}, torch.Generator().manual_seed(1)
    ours_steps, theirs_steps = ClippingAdamW(ours, **options), torch.optim.AdamW(theirs, **options)
    for step in range(5):
        sizes = torch.randn(len(ours), generator=rng).mul(6).exp()
        grads = [size * torch.randn(w.shape, generator=rng) for size, w in zip(sizes, ours, strict=True)]
        give([None if n == 1 and step < 2 else grad for n, grad in enumerate(grads)], ours, theirs)
        assert clip(ours, limit, ours_steps) == clip(theirs, limit)
        ours_steps.step()
        theirs_steps.step()
        assert alike(ours, theirs, ours_steps, theirs_steps)


def test_the_formula():
    """In double precision, from the paper."""
    [weight, grad, mean] = torch.randn(3, 4, 32, generator=torch.Generator().manual_seed(2))
    square, lr, first, second, eps, decay, step = mean.square(), 0.01, 0.9, 0.99, 1e-8, 0.1, 7.0
    w, g, m, v = (x.double() for x in (weight, 0.5 * grad, mean, square))
    m, v = first * m + (1 - first) * g, second * v + (1 - second) * g * g
    corrected = m / (1 - first**step) / ((v / (1 - second**step)).sqrt() + eps)
    expected = w - lr * decay * w - lr * corrected
    kernel.update([kernel.Moving(weight, grad, mean, square, step)], kernel.Rates(lr, (first, second), eps, decay, 0.5))
    torch.testing.assert_close(weight, expected.float(), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(mean, m.float(), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_a_table_that_is_read_row_by_row(threads, decay):
    """In the middle the state is loaded again, as when a run is resumed."""
    rng, before = torch.Generator().manual_seed(3), torch.get_num_threads()
    embedding = nn.Embedding(9000, 48)
    ours = nn.ParameterList([embedding.weight])
    theirs = copy.deepcopy(ours)
    options = {**USUAL, "weight_decay": decay}
    ours_steps, theirs_steps = ClippingAdamW(ours, **options), torch.optim.AdamW(theirs, **options)
    ours_steps.table = table = RowGradient(embedding)
    torch.set_num_threads(threads)
    try:
        for step in range(6):
            if step == 3:
                ours_steps.load_state_dict(copy.deepcopy(ours_steps.state_dict()))
            for _ in range(2):  # batches of a step
                ids = torch.randint(0, 9000, (50,), generator=rng)
                with table.collecting():
                    (embedding(ids) * torch.randn(50, 48, generator=rng)).sum().backward()
            give([embedding.weight.grad], theirs)
            assert clip(ours, 1.0, ours_steps) == clip(theirs, 1.0)
            ours_steps.step()
            theirs_steps.step()
            table.clear()
            assert alike(ours, theirs, ours_steps, theirs_steps)
    finally:
        torch.set_num_threads(before)
    read = ours_steps._read
    assert read is not None and 0 < int(read.sum()) <= 600


def test_only_clipping_of_this_step_counts():
    ours, theirs = models((4, 16))
    ours_steps, theirs_steps = ClippingAdamW(ours, **USUAL), torch.optim.AdamW(theirs, **USUAL)
    large, small = 100 * torch.ones(4, 16), 1e-3 * torch.ones(4, 16)
    give([large], ours)
    clip(ours, 1.0, ours_steps)  # a step that is skipped
    give([small], ours, theirs)
    assert clip(ours, 1.0, ours_steps) == clip(theirs, 1.0)
    ours_steps.step()
    theirs_steps.step()
    assert alike(ours, theirs, ours_steps, theirs_steps)
