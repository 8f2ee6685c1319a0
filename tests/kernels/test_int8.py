"""int8 products: bit for bit by integer arithmetic in numpy, the GELU by torch's, smoothing by what it must save."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from allmask.inference.compiled_layers import TorchInt8Linear
from allmask.kernels import build, compiling, int8
from allmask.kernels.int8 import PackedLinear


@pytest.fixture(autouse=True)
def threads():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def need() -> None:
    if int8.library() is None:
        pytest.skip("no compiler, or a processor without AVX2")


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def packed(linear: nn.Linear, smoothing: Tensor | None = None) -> PackedLinear:
    return PackedLinear.of(linear.weight, linear.bias, smoothing=smoothing)


def by_whole_numbers(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
    """The definition in numpy's fp32, operation by operation; sums of bytes in whole numbers."""
    tops = np.abs(x).max(-1, keepdims=True)
    factors = np.divide(np.float32(127), tops, out=np.zeros_like(tops), where=tops > 0)
    largest = fours(weight) / np.float32(126) if int8.weight_format() == "limited" else np.abs(weight) / np.float32(127)
    scales = largest.max(-1)
    whole_weight = np.rint(weight / np.maximum(scales, np.float32(1e-30))[:, None]).astype(np.int64)
    whole = np.rint(x * factors).astype(np.int64) @ whole_weight.T
    return whole.astype(np.float32) * (scales * (tops / np.float32(127)))


def fours(weight: np.ndarray) -> np.ndarray:
    """The absolute sums of the positive and of the negative of the four weights that AVX2 adds up in 16 bits."""
    found = []
    for start in range(0, weight.shape[1], 8):
        for first in (0, 2):
            four = weight[:, [start + first, start + first + 1, start + first + 4, start + first + 5]]
            for part in (np.maximum(four, 0), np.maximum(-four, 0)):
                found.append(part[:, 0] + part[:, 1] + part[:, 2] + part[:, 3])
    return np.stack(found, 1)


@settings(max_examples=40, deadline=None)
@given(
    st.integers(1, 20), st.sampled_from([16, 48]), st.integers(0, 2**31), st.sampled_from(["normal", "large", "few"])
)
def test_limited_weights_cannot_overflow_16_bits(outputs, inputs, seed, kind):
    weight = drawn(outputs, inputs, seed=seed)
    if kind == "large":  # all of one size, which gives the largest sums
        weight = weight.sign()
    if kind == "few":
        weight *= drawn(outputs, inputs, seed=seed + 1).abs() > 2
    quantized, scale = int8.limited(weight)
    assert 255 * fours(quantized.numpy().astype(np.int64)).max() < 2**15
    assert quantized.dtype == torch.int8 and scale.shape == (outputs, 1)
    assert ((quantized * scale - weight).abs() <= 0.501 * scale).all()


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 150), st.sampled_from([16, 48, 208]), st.booleans(), st.integers(0, 2**31))
def test_weights_packed_in_c_have_the_bits_of_torch(outputs, inputs, smoothed, seed):
    need()
    weight = drawn(outputs, inputs, seed=seed)
    smoothing = drawn(inputs, seed=seed + 1).abs() + 0.1 if smoothed else None
    weight[outputs // 2] = 0.0  # an output without a largest weight
    weight[0] *= 1e-33  # its scale is too small to divide by
    found = int8._packed_in_c(weight, smoothing)
    expected = int8.pack(int8.smooth(weight, smoothing)[0], torch.uint8)
    assert found is not None and [x is None for x in found] == [x is None for x in expected]
    assert all(torch.equal(x, y) for x, y in zip(found, expected, strict=True) if x is not None and y is not None)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_weights_that_are_not_finite_are_left_to_torch(value):
    need()
    weight = drawn(70, 16, seed=0)
    weight[65, 3] = value
    assert int8._packed_in_c(weight, None) is None


def test_products_by_torch_are_exact_with_or_without_vnni(monkeypatch):
    ends = torch.tensor([-127, 127], dtype=torch.int8)
    rows, weight = (
        ends[torch.randint(2, (count, 2080), generator=torch.Generator().manual_seed(count))] for count in (3, 5)
    )
    rows[0], weight[0] = 127, 127  # the largest sum: more than fp32 holds exactly
    expected = rows.long() @ weight.long().T
    for exact in (int8._int_mm_is_exact(), False):
        monkeypatch.setattr(int8, "_int_mm_is_exact", lambda exact=exact: exact)
        found = int8.product(rows, weight)
        assert found.dtype == torch.int32 and torch.equal(found.long(), expected)


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 110), st.sampled_from([16, 48, 208]), st.integers(1, 150), st.integers(0, 2**31))
def test_a_linear_layer_by_whole_numbers_bit_for_bit(rows, inputs, outputs, seed):
    need()
    x, linear = drawn(rows, inputs, seed=seed) * 3, nn.Linear(inputs, outputs, bias=False)
    linear.weight = nn.Parameter(drawn(outputs, inputs, seed=seed + 1))
    x[rows // 2] = 0.0  # a row without a largest number
    expected = by_whole_numbers(x.numpy(), linear.weight.detach().numpy())
    assert np.array_equal(int8.linear(packed(linear), x).numpy(), expected)
    assert np.array_equal(
        int8.linear(packed(linear), x, torch.bfloat16).float(), torch.from_numpy(expected).bfloat16().float()
    )
    half = x.bfloat16()
    assert torch.equal(int8.linear(packed(linear), half), int8.linear(packed(linear), half.float()))


@pytest.fixture
def avx_vnni(monkeypatch):
    """The kernels of a processor with AVX-VNNI, whose instruction AVX-512 has in another encoding."""
    if not build.has(build.AVX512_VNNI):
        pytest.skip("this processor has no AVX-512 VNNI")
    monkeypatch.setattr(build, "has", lambda instructions: set(instructions) <= {*build.AVX_VNNI})
    monkeypatch.setattr(compiling, "FLAGS", (*compiling.FLAGS, '-DVNNI_PREFIX=""'))
    build.library.cache_clear()
    yield
    build.library.cache_clear()


def test_avx_vnni_by_whole_numbers_bit_for_bit(avx_vnni):
    need()
    assert int8.weight_format() == "unsigned"
    for rows, inputs, outputs in ((1, 48, 70), (2, 16, 64), (7, 208, 150)):
        x, weight = drawn(rows, inputs), drawn(outputs, inputs, seed=1)
        expected = by_whole_numbers(x.numpy(), weight.numpy())
        assert np.array_equal(int8.linear(PackedLinear.of(weight, None), x).numpy(), expected)


def test_smoothing_scales_inputs_and_weights():
    need()
    x, linear, smoothing = drawn(20, 48), nn.Linear(48, 70, bias=False), drawn(48, seed=1).abs() + 0.1
    weight = linear.weight.detach()
    expected = by_whole_numbers((x * (1.0 / smoothing)).numpy(), (weight * smoothing).numpy())
    assert np.array_equal(int8.linear(packed(linear, smoothing), x).numpy(), expected)
    torch.testing.assert_close(
        TorchInt8Linear(weight, None, smoothing=smoothing)(x).numpy(), expected, atol=2e-2, rtol=0
    )  # a tie may be rounded to the other byte


def test_a_norm_with_one_large_feature_costs_no_other_feature_its_bytes():
    norm, linear = nn.LayerNorm(64), nn.Linear(64, 64, bias=False)
    with torch.no_grad():
        norm.weight[7] = 100.0
    x = norm(drawn(50, 64)).detach()
    exact = linear(x)
    smoothing = int8.smoothing_scale(norm, linear.weight)
    plain, balanced = (TorchInt8Linear(linear.weight, None, smoothing=one)(x) for one in (None, smoothing))
    assert (balanced - exact).abs().mean() < 0.5 * (plain - exact).abs().mean()
    assert int8.smoothing_scale(nn.Identity(), linear.weight) is None
    with torch.no_grad():
        norm.weight.zero_(), linear.weight.zero_()
    assert int8.smoothing_scale(norm, linear.weight).isfinite().all()


def test_a_bias_is_added_and_shapes_are_kept():
    need()
    linear, x = nn.Linear(32, 70), drawn(2, 3, 5, 32)
    found, bare = int8.linear(packed(linear), x), nn.Linear(32, 70, bias=False)
    bare.weight = linear.weight
    torch.testing.assert_close(found, int8.linear(packed(bare), x) + linear.bias, atol=1e-6, rtol=0)
    assert found.shape == (2, 3, 5, 70) and int8.linear(packed(linear), x[:, :0]).shape == (2, 0, 5, 70)
    turned = x.transpose(0, 1)
    assert torch.equal(int8.linear(packed(linear), turned), found.transpose(0, 1))


def test_torch_says_the_same():
    need()
    linear, x = nn.Linear(64, 70), drawn(2, 40, 64)
    torch.testing.assert_close(
        int8.linear(packed(linear), x), TorchInt8Linear(linear.weight, linear.bias)(x), atol=2e-2, rtol=0
    )  # a tie may be rounded to the other byte


@pytest.mark.parametrize("activation", ["none", "relu", "gelu", "gelu_tanh"])
def test_a_feed_forward_layer_is_two_linear_ones(activation):
    """Only its GELU differs from the exact one, by less than bytes can tell: a few of them round the other way."""
    need()
    expand, contract = nn.Linear(32, 80), nn.Linear(80, 32)
    x = drawn(100, 32) * 4
    found = int8.feed_forward(packed(expand), packed(contract), activation, x)
    inner = int8.linear(packed(expand), x)
    exact = {"none": inner, "relu": inner.relu(), "gelu": nn.functional.gelu(inner)}
    exact["gelu_tanh"] = nn.functional.gelu(inner, approximate="tanh")
    expected = int8.linear(packed(contract), exact[activation])
    torch.testing.assert_close(found, expected, atol=5e-3 * expected.abs().max().item(), rtol=0)
    assert activation.startswith("gelu") or torch.equal(found, expected)


def test_the_scale_of_a_vocabulary_is_that_of_its_mean_sizes():
    """Of very many rows some are added at a time."""
    norm, weight = (
        nn.LayerNorm(32),
        torch.randn(5000, 32, generator=torch.Generator().manual_seed(0)) * torch.arange(32),
    )
    scale = int8.smoothing_scale(norm, weight)
    sizes = weight.double().abs().mean(0)
    expected = (3.0 / sizes.clamp(min=1e-3 * float(sizes.max()))).sqrt()
    torch.testing.assert_close(scale.double(), expected, rtol=1e-5, atol=0)
