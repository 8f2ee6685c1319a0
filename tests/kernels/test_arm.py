"""What is written in C, once more as ARM processors have it: cross-compiled and emulated, with NEON.

Tests of other files are run on processors with and without the products of bytes; as these say, against torch, numpy
and whole numbers. Hypothesis' examples are replaced by a few, since the emulator is slow.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from allmask.decoding.fast.engines import CHOICES, _compiled_is_right
from allmask.kernels import compiling, int8
from allmask.kernels.activation import KINDS
from allmask.kernels.int8 import PackedLinear
from allmask.kernels.packed_attention import Block
from tests.decoding.test_engines import test_search_at_once_equals_step_by_step as at_once_agrees
from tests.decoding.test_engines import test_the_compiled_step_computes_what_torch_computes as steps_agree
from tests.kernels import arm
from tests.kernels.test_activation import test_dropout_is_the_same_in_both_passes as activation_dropout_agrees
from tests.kernels.test_activation import test_values_and_gradients_are_those_of_double_precision as activations_agree
from tests.kernels.test_int8 import test_a_feed_forward_layer_is_two_linear_ones as feed_forward_agrees
from tests.kernels.test_int8 import test_a_linear_layer_by_whole_numbers_bit_for_bit as linear_layers_agree
from tests.kernels.test_packed_attention import (
    test_chosen_queries_read_what_they_read_among_all as chosen_agree,
)
from tests.kernels.test_packed_attention import test_documents_read_all_of_their_partners as partners_agree
from tests.kernels.test_packed_attention import (
    test_dropout_equals_autograd_through_the_explicit_mask as dropout_agrees,
)
from tests.kernels.test_packed_attention import (
    test_values_and_gradients_equal_attention_written_out as attention_agrees,
)
from tests.kernels.test_residual_norm import test_dropout_is_the_same_in_both_passes as residual_dropout_agrees
from tests.kernels.test_residual_norm import test_values_and_gradients_are_those_of_double_precision as residuals_agree
from tests.kernels.test_rms_norm import test_values_and_gradients_are_those_of_double_precision as norms_agree
from tests.kernels.test_top_tokens import test_the_best_by_sorting as best_tokens_agree
from tests.kernels.test_top_tokens import test_totals_are_those_of_double_precision as totals_agree

pytestmark = pytest.mark.skipif(arm.missing() is not None, reason=str(arm.missing()))
INT8 = {"cortex-a72": compiling.NEON, "neoverse-n1": compiling.NEON_DOT, "max": compiling.NEON_I8MM}


@pytest.fixture
def folder(kept_kernels):
    kept = kept_kernels / "arm"
    kept.mkdir(exist_ok=True)
    return kept


@pytest.fixture(params=arm.CPUS)
def cpu(request, folder):
    with arm.emulated(request.param, folder) as chosen:
        yield request.param
    if int8.SOURCE in chosen:
        assert chosen[int8.SOURCE] == INT8[request.param]


@pytest.fixture
def oldest(folder):
    with arm.emulated("cortex-a72", folder):
        yield


# ---- int8 ------------------------------------------------------------------------------------------------------


def test_integers_are_those_of_this_processor(folder):
    """Sums of the same bytes, scaled by 1: numpy's, this processor's and ARM's are equal, bit for bit."""
    rng, cases = np.random.default_rng(0), []
    for rows, inputs, outputs in [*((rows, 208, 70) for rows in (1, 2, 3, 4, 5, 7, 13)), (50, 1024, 64)]:
        x = rng.integers(-127, 128, (rows, inputs))
        x[:, 0], x[-1] = 127, 127  # so the scale of a row is 1; the largest sum
        drawn = torch.from_numpy(rng.normal(size=(outputs, inputs))).float()
        for kind, weight in (("full", int8.quantize(drawn)[0]), ("limited", int8.limited(drawn)[0])):
            weight[0] = 127 if kind == "full" else weight[0]
            expected = (x @ weight.numpy().astype(np.int64).T).astype(np.float32)
            assert np.abs(expected).max() < 2**24  # fp32 holds them
            cases.append((kind, weight, x, expected))
    for kind, weight, x, expected in cases if int8.library() is not None else ():
        if kind == "limited" or int8.weight_format() != "limited":
            assert np.array_equal(products(weight, x), expected)
    for cpu in arm.CPUS:
        with arm.emulated(cpu, folder):
            assert int8.weight_format() == "signed"
            assert all(np.array_equal(products(weight, x), expected) for _, weight, x, expected in cases), cpu


def products(weight: torch.Tensor, x: np.ndarray) -> np.ndarray:
    rows = torch.nn.functional.pad(weight, (0, 0, 0, -len(weight) % int8.OUTPUTS))
    packed = int8.pack_int8(rows, int8.weight_format())
    layer = PackedLinear(*packed, torch.ones(len(rows)), None, None, weight.shape[1], len(weight))
    return int8.linear(layer, torch.from_numpy(x).float()).numpy()


def test_linear_layers_bit_for_bit(cpu):
    for rows, inputs, outputs in ((1, 48, 70), (2, 16, 64), (7, 208, 150), (51, 48, 1)):
        linear_layers_agree.hypothesis.inner_test(rows, inputs, outputs, 0)


@pytest.mark.parametrize("activation", ["relu", "gelu", "gelu_tanh"])
def test_feed_forward_layers(oldest, activation):
    feed_forward_agrees(activation)


# ---- decoding --------------------------------------------------------------------------------------------------


def test_the_self_check_passes(cpu, caplog):
    """A model with one stack and one with two: what is checked before the step is used.

    In each precision on the oldest processor; what newer ones have for it are products of bytes.
    """
    precisions = CHOICES[1:] if cpu == "cortex-a72" else ("int8",)
    assert all(_compiled_is_right(precision, pair) for precision in precisions for pair in (False, True))
    assert not caplog.records


@pytest.mark.parametrize("family", ["bert", "gpt2", "rms"])
def test_steps(oldest, family):
    steps_agree(family, "int8")


@pytest.mark.parametrize("rules", ["plain", "beams"])
def test_search_in_one_call(oldest, rules, monkeypatch):
    at_once_agrees("bert", rules, monkeypatch)


def test_top_tokens(oldest):
    for tokens in (1, 17, 200):
        totals_agree("C", tokens)
        for count in (1, 5, 64):
            best_tokens_agree.hypothesis.inner_test(tokens, count, tokens, coarse=count == 5)


# ---- training --------------------------------------------------------------------------------------------------

BLOCKS = (
    Block(0, 40, "full", 0, 2), Block(40, 73, "causal"), Block(73, 79, "empty"), Block(79, 148, "prefix", 35),
    Block(148, 149, "full"),
)  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_attention_and_its_gradients(folder, dtype):
    with arm.emulated("max" if dtype == torch.bfloat16 else "cortex-a72", folder) as chosen:
        for width, layout in ((16, "plain"), (48, "one product"), (64, "heads first")):
            attention_agrees.hypothesis.inner_test(dtype, BLOCKS, 2, width, layout, width)
        dropout_agrees.hypothesis.inner_test(dtype, (Block(0, 40, "causal"), Block(40, 53, "full")), 2, 0.5, 0)
        chosen_agree.hypothesis.inner_test(dtype, 0.3, BLOCKS, 0.4, 0)
        partners_agree.hypothesis.inner_test(dtype, [(30, 41), (50, 7), (1, 33)], 2, 32, 0)
        assert list(chosen.values())[-1] == (compiling.NEON_BF16 if dtype == torch.bfloat16 else compiling.NEON)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_residual_steps_and_activations(oldest, dtype):
    for rows, width in ((1, 1), (35, 3), (70, 8)):
        residuals_agree.hypothesis.inner_test(dtype, rows, width, width)
    residual_dropout_agrees(dtype, 0.1)
    activation_dropout_agrees(dtype)
    for kind in KINDS:
        activations_agree(kind, 33, 48)


def test_norms(oldest):
    for shape, width in (((), 1), ((2, 3), 40), ((70,), 129), ((9, 5), 100)):
        norms_agree.hypothesis.inner_test(shape, width, 1.0, width)
