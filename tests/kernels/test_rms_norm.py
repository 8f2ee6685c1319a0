"""The kernel of RMS norm: values and gradients by torch in double precision; torch where the kernel does not suit."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from allmask.kernels import rms_norm as kernel
from allmask.kernels.rms_norm import ELEMENTS, rms_norm
from allmask.nn.layers import NORMS, RMSNorm


def need() -> None:
    if kernel.library() is None:
        pytest.skip("no compiler, or a processor without AVX2")


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def run(x: Tensor, weight: Tensor, grad: Tensor, eps: float | None = 1e-6) -> list[Tensor]:
    """The result and the gradients of x and the weight."""
    x, weight = x.clone().requires_grad_(), weight.clone().requires_grad_()
    out = rms_norm(x, weight, eps)
    return [out.detach(), *torch.autograd.grad(out, (x, weight), grad)]


def exact(x: Tensor, weight: Tensor, grad: Tensor, eps: float | None = 1e-6) -> list[Tensor]:
    """By torch, in double precision."""
    x, weight = (tensor.double().requires_grad_() for tensor in (x, weight))
    out = F.rms_norm(x, x.shape[-1:], weight, torch.finfo(torch.float32).eps if eps is None else eps)
    return [out.detach(), *torch.autograd.grad(out, (x, weight), grad.double())]


def assert_exact(x: Tensor, weight: Tensor, grad: Tensor, eps: float | None = 1e-6) -> None:
    """Within 1e-6 of the exact values; gradients, being sums, within that share of the size of their terms."""
    (out, x_grad, weight_grad), (y, by_x, by_weight) = run(x, weight, grad, eps), exact(x, weight, grad, eps)
    torch.testing.assert_close(out.double(), y, rtol=1e-6, atol=1e-30)
    added = torch.finfo(torch.float32).eps if eps is None else eps
    scale = (x.double().square().mean(-1, keepdim=True) + added).rsqrt()
    terms = (scale * (grad * weight).double()).abs().amax(-1, keepdim=True)
    assert ((x_grad.double() - by_x).abs() <= 1e-6 * terms).all()
    terms = (grad.double() * x.double() * scale).abs().reshape(-1, len(weight)).sum(0)
    assert ((weight_grad.double() - by_weight).abs() <= 1e-6 * terms).all()


WIDTHS = st.one_of(st.integers(1, 40), st.sampled_from([63, 64, 65, 100, 127, 128, 129, 257, 512, 1001]))


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 9), max_size=3), WIDTHS, st.sampled_from([1e-3, 1.0, 1e4]), st.integers(0, 2**31))
def test_values_and_gradients_are_those_of_double_precision(shape, width, size, seed):
    need()
    x, weight = drawn(*shape, width, seed=seed) * size, 1.0 + 0.2 * drawn(width, seed=seed + 1).clamp(-3, 3)
    grad = drawn(*shape, width, seed=seed + 2)
    assert_exact(x, weight, grad)


@pytest.mark.parametrize("shape", [(5000, 48), (333, 1000), (70, 4096)])
def test_many_rows_and_wide_ones(shape):
    need()
    x, weight, grad = drawn(*shape), torch.ones(shape[1]), drawn(*shape, seed=1)
    assert_exact(x, weight, grad)


@pytest.mark.parametrize("eps", [None, 1e-6, 0.5])
def test_epsilon_is_that_of_torch(eps):
    need()
    x, weight, grad = 1e-4 * drawn(3, 20), torch.ones(20), drawn(3, 20, seed=1)
    assert_exact(x, weight, grad, eps)


def test_no_row_depends_on_the_others():
    """To the bit: a row alone, and among many."""
    need()
    x, weight, grad = drawn(2, 50, 77), drawn(77, seed=1), drawn(2, 50, 77, seed=2)
    out, x_grad, _ = run(x, weight, grad)
    for row in ((0, 0), (0, 31), (0, 32), (1, 49)):
        alone = run(x[row][None], weight, grad[row][None])
        assert torch.equal(alone[0][0], out[row]) and torch.equal(alone[1][0], x_grad[row])


def test_threads_change_nothing():
    need()
    before, found = torch.get_num_threads(), []
    x, weight, grad = drawn(1000, ELEMENTS // 250), drawn(ELEMENTS // 250, seed=1), drawn(1000, ELEMENTS // 250, seed=2)
    try:
        for number in (1, 2, 3):
            torch.set_num_threads(number)
            found.append(run(x, weight, grad))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(a, b) for others in found[1:] for a, b in zip(found[0], others, strict=True))


def test_nan_stays_in_its_row():
    need()
    x = drawn(4, 33)
    x[1, 7], x[2, 0] = torch.nan, torch.inf
    out = rms_norm(x, torch.ones(33), 1e-6)
    assert out.isnan().any(-1).tolist() == [False, True, True, False]


def test_only_the_required_gradients_are_computed():
    need()
    x, weight, grad = drawn(40, 24), drawn(24, seed=1), drawn(40, 24, seed=2)
    _, x_grad, weight_grad = run(x, weight, grad)
    for name, (a, b) in {
        "x": (x.clone().requires_grad_(), weight),
        "weight": (x, weight.clone().requires_grad_()),
    }.items():
        (found,) = torch.autograd.grad(rms_norm(a, b, 1e-6), a if name == "x" else b, grad)
        assert torch.equal(found, x_grad if name == "x" else weight_grad)
    assert not rms_norm(x, weight, 1e-6).requires_grad
    with torch.no_grad():
        assert not rms_norm(x.clone().requires_grad_(), weight, 1e-6).requires_grad


def test_a_gradient_that_is_not_contiguous():
    need()
    x, weight = drawn(6, 24).requires_grad_(), torch.ones(24)
    expected = run(x.detach(), weight, torch.ones(6, 24))[1]
    assert torch.equal(torch.autograd.grad(rms_norm(x, weight, 1e-6).sum(), x)[0], expected)


@pytest.mark.parametrize("learnt", [True, False])
def test_gradients_of_gradients(learnt):
    def penalty(norm, x: Tensor, weight: Tensor) -> list[Tensor]:
        x, weight = x.clone().requires_grad_(), weight.clone().requires_grad_(learnt)
        (slope,) = torch.autograd.grad(norm(x, weight).square().sum(), x, create_graph=True)
        return list(torch.autograd.grad(slope.square().sum(), [x, weight] if learnt else [x]))

    x, weight = drawn(5, 18), drawn(18, seed=1)
    found = penalty(lambda x, weight: rms_norm(x, weight, 1e-6), x, weight)
    expected = penalty(lambda x, weight: F.rms_norm(x, (18,), weight, 1e-6), x, weight)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


# ---- where torch computes ----------------------------------------------------------------------------------------


@pytest.fixture
def no_kernel(monkeypatch):
    def called(*_):
        raise AssertionError("the kernel was called")

    monkeypatch.setattr(kernel, "_functions", called)


CASES = {
    "double": (drawn(5, 16).double(), torch.ones(16).double()),
    "bf16": (drawn(5, 16).bfloat16(), torch.ones(16).bfloat16()),
    "transposed": (drawn(16, 5).T, torch.ones(16)),
    "strided": (drawn(5, 32)[:, ::2], torch.ones(16)),
    "a strided weight": (drawn(5, 16), drawn(32)[::2]),
    "no rows": (drawn(0, 16), torch.ones(16)),
    "no weight": (drawn(5, 16), None),
}


@pytest.mark.parametrize("case", CASES)
def test_torch_takes_what_the_kernel_does_not(case, no_kernel):
    x, weight = CASES[case]
    assert torch.equal(rms_norm(x, weight, 1e-6), F.rms_norm(x, (16,), weight, 1e-6))
    x = x.detach().requires_grad_()
    (rms_norm(x, weight, 1e-6).sum() + x.sum()).backward()
    assert x.grad.shape == x.shape


def test_without_a_compiler(monkeypatch, no_kernel):
    monkeypatch.setattr(kernel, "library", lambda: None)
    x, weight = drawn(5, 16), drawn(16, seed=1)
    assert torch.equal(rms_norm(x, weight, 1e-6), F.rms_norm(x, (16,), weight, 1e-6))


def test_programs_that_torch_transforms(no_kernel):
    x, weight = drawn(5, 16), drawn(16, seed=1)
    expected = F.rms_norm(x, (16,), weight, 1e-6)
    torch.testing.assert_close(torch.func.vmap(lambda row: rms_norm(row, weight, 1e-6))(x), expected)
    slope = torch.func.grad(lambda x: rms_norm(x, weight, 1e-6).sum())(x)
    torch.testing.assert_close(slope, torch.func.grad(lambda x: F.rms_norm(x, (16,), weight, 1e-6).sum())(x))


def test_autocast_leaves_types_as_torch_does():
    x, weight = drawn(5, 16), torch.ones(16)
    with torch.autocast("cpu", torch.bfloat16):
        assert rms_norm(x, weight).dtype == torch.float32
        assert rms_norm(x.bfloat16(), weight.bfloat16()).dtype == torch.bfloat16


def test_the_module_is_torchs():
    norm = NORMS["rms"](24, eps=1e-6)
    assert isinstance(norm, nn.RMSNorm) and isinstance(norm, RMSNorm) and list(norm.state_dict()) == ["weight"]
    plain, x = nn.RMSNorm(24, eps=1e-6), drawn(2, 3, 24)
    plain.load_state_dict(norm.state_dict())
    torch.testing.assert_close(norm(x), plain(x), rtol=1e-6, atol=1e-6)
