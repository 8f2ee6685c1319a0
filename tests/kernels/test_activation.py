"""The kernel of activations: values and gradients by torch in double precision, and its dropout."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from allmask.kernels import activation as kernel
from allmask.kernels.activation import activate

EXACT = {"gelu": F.gelu, "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"), "relu": F.relu}


def need() -> None:
    if kernel.library() is None:
        pytest.skip("no compiler, or a processor without AVX2")


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("kind", EXACT)
@pytest.mark.parametrize("rows, width", [(1, 16), (33, 48), (70, 1024)])
def test_values_and_gradients_are_those_of_double_precision(kind, rows, width):
    need()
    x, bias, grad = 3 * drawn(rows, width), drawn(width, seed=1), drawn(rows, width, seed=2)
    x, bias = x.requires_grad_(), bias.requires_grad_()
    y = activate(x, bias, kind)
    found = torch.autograd.grad(y, (x, bias), grad)
    exact_x, exact_bias = ((x + bias).detach().double().requires_grad_(), torch.zeros(width).double().requires_grad_())
    right = EXACT[kind](exact_x + exact_bias)
    expected = torch.autograd.grad(right, (exact_x, exact_bias), grad.double())
    torch.testing.assert_close(y.double(), right, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(found[0].double(), expected[0], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(found[1].double(), expected[1], rtol=1e-5, atol=1e-5 * math.sqrt(rows))


@pytest.mark.parametrize("kind", EXACT)
def test_every_number_of_bf16(kind):
    """All bf16 numbers up to 10,000, a multiple of 16 of them: within the rounding of bf16."""
    need()
    every = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    x = every[every.isfinite() & (every.abs() < 1e4)]
    x = x[: len(x) // 16 * 16].view(-1, 16).requires_grad_()
    bias = torch.zeros(16, requires_grad=True)
    y = activate(x, bias, kind)
    (slope,) = torch.autograd.grad(y, x, torch.ones_like(x))
    exact = x.detach().double().requires_grad_()
    right = EXACT[kind](exact)
    (right_slope,) = torch.autograd.grad(right, exact, torch.ones_like(exact))
    torch.testing.assert_close(y.double(), right.detach(), rtol=2**-8, atol=1e-15)
    torch.testing.assert_close(slope.double(), right_slope, rtol=2**-7, atol=1e-6)  # the slope of GELU crosses zero


@pytest.mark.parametrize("kind", EXACT)
def test_far_values_and_nan(kind):
    need()
    x = torch.tensor([[0.0, -0.0, 1e-20, 80.0, -80.0, 1e4, -1e4, torch.nan] * 2]).requires_grad_()
    y = activate(x, torch.zeros(16), kind)
    (slope,) = torch.autograd.grad(y, x, torch.ones_like(x))
    right = EXACT[kind](x.detach().double())
    torch.testing.assert_close(y.double(), right, rtol=1e-6, atol=1e-30, equal_nan=True)
    assert slope[0, 3] == slope[0, 5] == 1 and slope[0, [4, 6]].abs().max() < 1e-20


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_dropout_is_the_same_in_both_passes(dtype):
    need()
    x, bias = (2 + drawn(400, 64).abs()).to(dtype).requires_grad_(), torch.zeros(64, requires_grad=True)
    torch.manual_seed(1)
    y = activate(x, bias, "relu", 0.2)
    (grad,) = torch.autograd.grad(y, x, torch.ones_like(y))
    kept = y != 0
    assert abs(kept.double().mean().item() - 0.8) < 5 * math.sqrt(0.16 / y.numel())
    near = {"rtol": 1e-6 if dtype == torch.float32 else 2**-8, "atol": 0.0}
    torch.testing.assert_close(y, torch.where(kept, x / 0.8, 0.0).to(dtype), **near)
    torch.testing.assert_close(grad, torch.where(kept, 1 / 0.8, 0.0).to(dtype), **near)
    torch.manual_seed(1)
    assert torch.equal(y, activate(x, bias, "relu", 0.2))


def test_threads_change_no_bits():
    need()
    x, bias, grad = drawn(3000, 256).requires_grad_(), drawn(256, seed=1).requires_grad_(), drawn(3000, 256, seed=2)
    found = []
    for threads in (1, 3):
        torch.set_num_threads(threads)
        torch.manual_seed(0)
        y = activate(x, bias, "gelu", 0.1)
        found.append([y, *torch.autograd.grad(y, (x, bias), grad)])
    torch.set_num_threads(1)
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
