"""The matrix products of training: values and gradients by torch in double precision, in fp32 and bf16."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from allmask.kernels import activation, matrix_product
from allmask.kernels.cross_entropy import linear_cross_entropy
from allmask.nn import fused

SHAPES = [(1, 32, 32), (5, 64, 96), (12, 96, 64), (100, 384, 160), (301, 608, 384), (770, 32, 1152), (1540, 64, 64)]
DEEP = [(50, 2048, 64), (75, 4160, 96), (31, 64, 6144)]  # rows whole pages apart, and more than is multiplied at a time


def need(dtype: torch.dtype) -> None:
    if matrix_product.library(dtype) is None:
        pytest.skip(f"no compiler, or a processor without products of {dtype}")


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.fixture(params=[1, 3])
def threads(request: pytest.FixtureRequest):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows, inputs, outputs", SHAPES + DEEP)
def test_values_and_gradients_are_those_of_double_precision(dtype, rows, inputs, outputs, threads):
    need(dtype)
    x, grad = drawn(rows, inputs).to(dtype).requires_grad_(), drawn(rows, outputs, seed=1).to(dtype)
    weight, bias = drawn(outputs, inputs, seed=2).requires_grad_(), drawn(outputs, seed=3).requires_grad_()
    y = matrix_product.linear(x, weight, bias)
    found = torch.autograd.grad(y, (x, weight, bias), grad)
    exact, rounded, by = x.detach().double(), weight.detach().to(dtype).double(), grad.double()
    relative = 1e-6 if dtype == torch.float32 else 2**-8  # of fp32 sums, and of results in bf16
    assert y.dtype == found[0].dtype == dtype and found[1].dtype == found[2].dtype == torch.float32
    torch.testing.assert_close(
        y.double(), exact @ rounded.t() + bias.detach().double(), rtol=relative, atol=1e-5 * math.sqrt(inputs)
    )
    torch.testing.assert_close(found[0].double(), by @ rounded, rtol=relative, atol=1e-5 * math.sqrt(outputs))
    torch.testing.assert_close(found[1].double(), by.t() @ exact, rtol=1e-6, atol=1e-5 * math.sqrt(rows))
    torch.testing.assert_close(found[2].double(), by.sum(0), rtol=1e-6, atol=1e-5 * math.sqrt(rows))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [1, 383, 384, 385, 769, 1537])
def test_a_sum_over_any_number_of_tokens(dtype, rows, threads):
    need(dtype)
    a, b = drawn(rows, 160).to(dtype), drawn(rows, 96, seed=1).to(dtype)
    out, sums = torch.full((160, 96), math.nan), torch.full((160,), math.nan)
    matrix_product.product(a, b, out, a_across=True, sums=sums)
    torch.testing.assert_close(out.double(), a.double().t() @ b.double(), rtol=1e-6, atol=1e-5 * math.sqrt(rows))
    torch.testing.assert_close(sums.double(), a.double().sum(0), rtol=1e-6, atol=1e-5 * math.sqrt(rows))


@pytest.mark.parametrize("depth", [96, 2048, 6144])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_does_not_depend_on_the_others_nor_on_threads(dtype, depth):
    need(dtype)
    x, weight, before = drawn(257, depth).to(dtype), drawn(64, depth, seed=1), torch.get_num_threads()
    whole = matrix_product.forward(x, weight)
    for start, stop in ((0, 1), (7, 20), (250, 257)):
        assert torch.equal(matrix_product.forward(x[start:stop], weight), whole[start:stop])
    try:
        torch.set_num_threads(3)
        assert torch.equal(matrix_product.forward(x, weight), whole)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_columns_of_a_larger_matrix(dtype):
    """Rows that are apart, as the gradients of queries, keys and values are."""
    need(dtype)
    whole, weight = drawn(70, 3 * 64).to(dtype), drawn(64, 32, seed=1)
    for part in whole.split(64, dim=1):
        assert torch.equal(
            matrix_product.input_grad(part, weight), matrix_product.input_grad(part.contiguous(), weight)
        )


ACTIVATIONS = {"gelu": F.gelu, "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"), "relu": F.relu}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ACTIVATIONS)
def test_an_activation_and_its_slope(dtype, kind, threads):
    need(dtype)
    x, weight, bias = drawn(301, 64).to(dtype), drawn(96, 64, seed=1), drawn(96, seed=2)
    found, slope = matrix_product.activated(x, weight, bias, kind)
    before = (x.double() @ weight.to(dtype).double().t() + bias.double()).requires_grad_()
    exact = ACTIVATIONS[kind](before)
    (right,) = torch.autograd.grad(exact.sum(), before)
    relative = 1e-6 if dtype == torch.float32 else 2**-8
    torch.testing.assert_close(found.double(), exact.detach(), rtol=relative, atol=2e-5)
    torch.testing.assert_close(slope.double(), right, rtol=relative, atol=2e-5)
    if dtype == torch.float32:  # by the same arithmetic as a pass of its own
        assert torch.equal(found, activation.activate(matrix_product.forward(x, weight), bias, kind))
    grad, other = drawn(301, 32, seed=3).to(dtype), drawn(32, 96, seed=4)
    product = (grad.double() @ other.to(dtype).double()) * slope.double()
    torch.testing.assert_close(
        matrix_product.input_grad(grad, other, slope).double(), product, rtol=relative, atol=1e-4
    )


@pytest.mark.parametrize("frozen", ["h", "expand.weight", "expand.bias", "contract.weight"])
def test_a_feed_forward_layer_of_which_a_part_is_frozen(frozen):
    need(torch.float32)
    torch.manual_seed(0)
    expand, contract, h = nn.Linear(64, 96), nn.Linear(96, 64), drawn(1, 80, 64)
    given = {"h": h, "expand.weight": expand.weight, "expand.bias": expand.bias, "contract.weight": contract.weight}
    learnt = [x.requires_grad_(name != frozen) for name, x in given.items() if name != frozen]
    given[frozen].requires_grad_(False)
    ours = fused.feed_forward(h, expand, nn.GELU(), contract, 0.0)
    usual = F.linear(F.gelu(expand(h)), contract.weight)
    below_the_view = ours.grad_fn and ours.grad_fn.next_functions[0][0]
    assert "FeedForward" in type(below_the_view).__name__
    for found, expected in zip(
        torch.autograd.grad(ours.square().sum(), learnt), torch.autograd.grad(usual.square().sum(), learnt), strict=True
    ):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_not_a_number_stays_in_its_row():
    need(torch.float32)
    x = drawn(100, 64)
    x[3, 5], x[70, 1] = math.nan, math.inf
    y = matrix_product.forward(x, drawn(32, 64, seed=1))
    bad = ~y.isfinite().all(1)
    assert bad.nonzero().flatten().tolist() == [3, 70] and y[3].isnan().all()


def test_what_suits():
    need(torch.float32)
    x, weight = drawn(128, 64), drawn(96, 64)
    assert matrix_product.suits(x, weight)
    assert not matrix_product.suits(x[:3], weight)  # too few rows
    assert not matrix_product.suits(drawn(128, 48), drawn(96, 48))
    assert not matrix_product.suits(x, weight.double())
    assert not matrix_product.suits(x.double(), weight)


@pytest.mark.parametrize("autocast", [False, True])
def test_a_projection_has_the_gradients_of_linear_layers(autocast, monkeypatch):
    """With ours and with torch's products; in bf16 up to its rounding."""
    need(torch.bfloat16 if autocast else torch.float32)
    torch.manual_seed(0)
    linears = [nn.Linear(64, size) for size in (64, 32, 96)]
    x, parameters = drawn(1, 130, 64), [p for linear in linears for p in linear.parameters()]

    def run() -> list[Tensor]:
        h = (x.bfloat16() if autocast else x.clone()).requires_grad_()
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            parts = fused.project(h, *linears)
        loss = sum((part.float() * drawn(*part.shape, seed=number)).sum() for number, part in enumerate(parts))
        return [*parts, *torch.autograd.grad(loss, [h, *parameters])]  # type: ignore[arg-type, list-item]

    assert matrix_product.suits(x, *(linear.weight for linear in linears))
    ours = run()
    monkeypatch.setattr(matrix_product, "suits", lambda *_: False)
    for found, expected in zip(ours, run(), strict=True):
        tolerance = 2e-2 * float(expected.detach().abs().max()) if autocast else 1e-4
        torch.testing.assert_close(found.float(), expected.float(), rtol=0, atol=tolerance)


@pytest.mark.parametrize("vocabulary", [96, 1024 + 64, 1024 + 50])
def test_cross_entropy_of_any_vocabulary(vocabulary):
    """Chunks whose size is a multiple of 32 are computed here, others by torch."""
    need(torch.float32)
    hidden, weight = drawn(80, 64).requires_grad_(), drawn(vocabulary, 64, seed=1).requires_grad_()
    bias, labels = drawn(vocabulary, seed=2).requires_grad_(), torch.arange(80) * 7 % vocabulary
    loss = linear_cross_entropy(hidden, weight, bias, labels)
    exact = [x.detach().double().requires_grad_() for x in (hidden, weight, bias)]
    right = F.cross_entropy(F.linear(*exact), labels, reduction="sum")
    torch.testing.assert_close(loss.double(), right, rtol=1e-5, atol=1e-3)
    pairs = zip(torch.autograd.grad(loss, (hidden, weight, bias)), torch.autograd.grad(right, exact), strict=True)
    for found, expected in pairs:
        torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=1e-4)
