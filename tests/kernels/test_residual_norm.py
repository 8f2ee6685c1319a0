"""The kernel at the end of a residual step: values and gradients by torch in double precision, and its dropout."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from allmask.kernels import residual_norm as kernel
from allmask.kernels.residual_norm import residual_norm, suits

EPS = 1e-6


def need() -> None:
    if kernel.library() is None:
        pytest.skip("no compiler, or a processor without AVX2")


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def leaves(rows: int, width: int, dtype: torch.dtype, seed: int) -> list[Tensor]:
    """x, step, bias, and the weight and shift of the norm."""
    x, step = drawn(rows, width, seed=seed), drawn(rows, width, seed=seed + 1).to(dtype)
    vectors = drawn(3, width, seed=seed + 2)
    return [tensor.requires_grad_() for tensor in (x, step, vectors[0], 1 + 0.2 * vectors[1], vectors[2])]


def run(tensors: list[Tensor], p: float = 0.0, low: bool = False) -> tuple[Tensor, Tensor]:
    x, step, bias, weight, shift = tensors
    return residual_norm(x, step, bias, weight, shift, EPS, p, low)


def exact(tensors: list[Tensor], kept: Tensor | float, grad: Tensor) -> list[Tensor]:
    """The result and all gradients, by torch in double precision; `kept` is 0 or 1 / (1 - p) for each element."""
    doubles = [tensor.detach().double().requires_grad_() for tensor in tensors]
    x, step, bias, weight, shift = doubles
    y = F.layer_norm(x + (step + bias) * kept, x.shape[-1:], weight, shift, EPS)
    return [y.detach(), *torch.autograd.grad(y, doubles, grad.double())]


def assert_near(found: list[Tensor], expected: list[Tensor], step: torch.dtype) -> None:
    """Within 1e-5 of the largest in fp32; what is bf16, within its rounding."""
    for number, (ours, right) in enumerate(zip(found, expected, strict=True)):
        limit = 2**-8 if number == 2 and step == torch.bfloat16 else 1e-5
        assert (ours.double() - right).abs().max() <= limit * right.abs().max().clamp(min=1e-3), number


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@settings(max_examples=40, deadline=None)
@given(rows=st.integers(1, 70), width=st.integers(1, 12), seed=st.integers(0, 2**31))
def test_values_and_gradients_are_those_of_double_precision(dtype, rows, width, seed):
    need()
    tensors = leaves(rows, 16 * width, dtype, seed)
    grad = drawn(rows, 16 * width, seed=seed + 3)
    y, same = run(tensors)
    assert same is y
    assert_near([y, *torch.autograd.grad(y, tensors, grad)], exact(tensors, 1.0, grad), dtype)


def test_the_bf16_copy_is_y_rounded_and_its_gradient_is_added():
    need()
    tensors, grad = leaves(37, 48, torch.bfloat16, 0), drawn(37, 48, seed=5)
    y, low = run(tensors, low=True)
    assert torch.equal(low, y.bfloat16())
    low_grad = drawn(37, 48, seed=6).bfloat16()
    for outputs, grads in (((y, low), (grad, low_grad)), ((low,), (low_grad,)), ((y,), (grad,))):
        found = torch.autograd.grad(outputs, tensors, grads, retain_graph=True)
        total = torch.stack([one.double() for one in grads]).sum(0)
        assert_near([y, *found], exact(tensors, 1.0, total), torch.bfloat16)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("p", [0.1, 0.5])
def test_dropout_is_the_same_in_both_passes(dtype, p):
    """Which elements are kept is seen in the gradient: that of `step` is zero where it was dropped."""
    need()
    tensors, grad = leaves(300, 64, dtype, 0), drawn(300, 64, seed=5)
    torch.manual_seed(3)
    y, _ = run(tensors, p)
    found = torch.autograd.grad(y, tensors, grad)
    kept = (found[1] != 0).double()
    noise = math.sqrt(p * (1 - p) / kept.numel())
    assert abs(1 - kept.mean().item() - p) < 5 * noise
    assert (kept.mean(0) - (1 - p)).abs().max() < 6 * math.sqrt(p * (1 - p) / 300)  # of each column
    assert_near([y, *found], exact(tensors, kept / (1 - p), grad), dtype)
    torch.manual_seed(3)
    assert torch.equal(y, run(tensors, p)[0])
    assert not torch.equal(y, run(tensors, p)[0])


def test_threads_and_other_rows_change_no_bits():
    need()
    tensors, grad = leaves(5000, 128, torch.float32, 0), drawn(5000, 128, seed=5)
    found = []
    for threads in (1, 3):
        torch.set_num_threads(threads)
        torch.manual_seed(0)
        y, _ = run(tensors, 0.1)
        found.append([y, *torch.autograd.grad(y, tensors, grad)])
    torch.set_num_threads(1)
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
    alone, _ = run([tensors[0][:1], tensors[1][:1], *tensors[2:]])
    assert torch.equal(alone, run(tensors)[0][:1])


def test_a_nan_stays_one():
    need()
    tensors = leaves(3, 32, torch.bfloat16, 0)
    with torch.no_grad():
        tensors[1][1, 5] = torch.nan
    y, low = run(tensors, low=True)
    for out in (y, low):
        assert out[1].isnan().all() and out[[0, 2]].isfinite().all()


def test_what_the_kernel_does_not_take():
    need()
    assert suits(torch.zeros(2, 32), 32)
    assert not suits(torch.zeros(2, 40), 40)
    assert not suits(torch.zeros(2, 32, dtype=torch.float64), 32)
    assert not suits(torch.zeros(0, 32), 32)
