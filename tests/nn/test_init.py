"""Statistics of fresh weights. Bounds are five standard errors of the statistic measured, seeds are fixed.

For n draws with standard deviation s and kurtosis k: the mean errs by s/√n, the variance by s²·√((k - 1)/n).
"""

from __future__ import annotations

import math
from dataclasses import replace
from statistics import NormalDist

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from allmask.errors import UsageError
from allmask.model import Model
from allmask.nn import init
from tests.relatives import relatives

DRAWS = 1_000_000
STD = 0.02
GAUSS = NormalDist()
ACTIVATIONS = [torch.relu, torch.tanh, torch.sigmoid, F.gelu, F.silu]


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def moment(sample: torch.Tensor, power: int) -> float:
    return float(sample.double().pow(power).mean())


def truncated_moment(power: int, cut: float = 2.0, points: int = 20_000) -> float:
    """E[z^power] of a normal cut at ±cut, by summing its density: independent of the closed form in the code."""
    step = 2 * cut / points
    places = [(i + 0.5) * step - cut for i in range(points)]
    shares = [GAUSS.pdf(z) for z in places]
    return sum(z**power * p for z, p in zip(places, shares, strict=True)) / sum(shares)


# kurtosis, largest value in units of std
KURTOSIS = {
    init.normal: (3.0, math.inf),
    init.uniform: (1.8, math.sqrt(3)),
    init.truncated_normal: (truncated_moment(4) / truncated_moment(2) ** 2, 2 / math.sqrt(truncated_moment(2))),
}


@pytest.mark.parametrize("fill", KURTOSIS, ids=lambda f: f.__name__)
def test_a_distribution_has_the_mean_variance_shape_and_range_it_should(fill):
    kurtosis, largest = KURTOSIS[fill]
    sample = fill(torch.empty(DRAWS), STD, seeded())
    assert abs(moment(sample, 1)) < 5 * STD / math.sqrt(DRAWS)
    assert abs(moment(sample, 2) / STD**2 - 1) < 5 * math.sqrt((kurtosis - 1) / DRAWS)
    # The fourth moment of a normal errs by √96/√n, the largest of the three.
    assert abs(moment(sample, 4) / STD**4 - kurtosis) < 5 * math.sqrt(96 / DRAWS)
    assert sample.abs().max() <= largest * STD * (1 + 1e-6)
    if largest < math.inf:  # and the whole range is used
        assert sample.abs().max() > largest * STD * 0.999


def test_cutting_at_two_shrinks_a_normal_to_0_8796():
    assert init.truncated_std(2.0) == pytest.approx(0.87962566, abs=1e-8)
    assert init.truncated_std(2.0) == pytest.approx(math.sqrt(truncated_moment(2)), abs=1e-8)
    naive = nn.init.trunc_normal_(torch.empty(DRAWS), std=STD, a=-2 * STD, b=2 * STD, generator=seeded())
    assert float(naive.std()) / STD == pytest.approx(0.8796, abs=5e-3)


@settings(max_examples=25, deadline=None)
@given(cut=st.floats(0.05, 8.0), std=st.floats(1e-4, 10.0), seed=st.integers(0, 2**31))
def test_a_truncated_normal_hits_the_asked_deviation_wherever_it_is_cut(cut, std, seed):
    sample = init.truncated_normal(torch.empty(20_000), std, seeded(seed), cut)
    # Kurtosis lies between the uniform's and the normal's; six errors, because this is drawn anew each time.
    assert abs(moment(sample, 2) / std**2 - 1) < 6 * math.sqrt(2 / 20_000)
    assert float(sample.abs().max()) <= std * cut / init.truncated_std(cut) * (1 + 1e-5)


def test_a_truncated_normal_follows_the_distribution_function():
    sample = init.truncated_normal(torch.empty(DRAWS), 1.0, seeded()).double() * init.truncated_std()
    inside = GAUSS.cdf(2) - GAUSS.cdf(-2)
    for z in (-1.5, -0.5, 0.0, 1.0, 1.9):
        share = (GAUSS.cdf(z) - GAUSS.cdf(-2)) / inside
        error = math.sqrt(share * (1 - share) / DRAWS)
        assert abs(float((sample <= z).double().mean()) - share) < 5 * error


@pytest.mark.parametrize("fill", [*KURTOSIS, init.orthogonal], ids=lambda f: f.__name__)
def test_randomness_comes_from_the_generator_alone(fill):
    state = torch.random.get_rng_state()
    one, same, other = (fill(torch.empty(16, 8), 0.5, rng=seeded(seed)) for seed in (3, 3, 4))
    assert torch.equal(one, same) and not torch.equal(one, other)
    assert torch.equal(state, torch.random.get_rng_state())


@pytest.mark.parametrize("fill", [*KURTOSIS, init.orthogonal], ids=lambda f: f.__name__)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_other_precisions_and_parameters_are_filled_in_place(fill, dtype):
    weight = nn.Parameter(torch.empty(256, 256, dtype=dtype))
    assert fill(weight, 1.0, rng=seeded()) is weight and weight.requires_grad and weight.is_leaf
    expected = 1 / 16 if fill is init.orthogonal else 1.0  # a rotation of 256 dimensions has entries of 1/√256
    assert float(weight.detach().double().std()) == pytest.approx(expected, rel=0.02)


def test_a_deviation_of_zero_and_an_empty_tensor_are_no_special_case():
    for fill in KURTOSIS:
        assert not fill(torch.ones(5), 0.0, seeded()).any()
        assert fill(torch.empty(0, 4), 1.0, seeded()).shape == (0, 4)


# ---- orthogonality (claims about n×n and m×n matrices) ----------------------------------------------------------


@pytest.mark.parametrize("shape", [(64, 64), (96, 32), (32, 96), (8, 2, 3)])
def test_orthogonal_matrices_are_rotations_to_rounding(shape):
    weight = init.orthogonal(torch.empty(shape, dtype=torch.float64), 2.0, seeded()).flatten(1)
    gram = weight.T @ weight if weight.shape[0] >= weight.shape[1] else weight @ weight.T
    torch.testing.assert_close(gram, 4.0 * torch.eye(len(gram), dtype=torch.float64), atol=1e-12, rtol=0)


@pytest.mark.parametrize("fill", KURTOSIS, ids=lambda f: f.__name__)
def test_any_random_matrix_of_the_right_variance_is_nearly_orthogonal(fill):
    """Off the diagonal of WᵀW stand numbers of variance 1/m; the error of one number falls as 1/√m."""
    for m, n in ((256, 256), (1024, 1024), (1024, 128)):
        weight = fill(torch.empty(m, n), 1 / math.sqrt(m), seeded())
        off = (weight.T @ weight).fill_diagonal_(0.0)
        measured = float(off.square().sum() / (n * (n - 1)))
        assert measured == pytest.approx(1 / m, rel=0.05)


def test_a_wide_matrix_cannot_keep_all_lengths():
    weight = init.scaled(torch.empty(32, 128), seeded(), by="out")
    assert torch.linalg.svdvals(weight).shape == (32,)  # 96 directions of the input are lost
    lost = torch.linalg.svd(weight).Vh[32:]
    assert float((weight @ lost.T).norm()) < 1e-4


# ---- scales ---------------------------------------------------------------------------------------------------


def test_scales_match_torch_and_the_formulas():
    out, inputs = 700, 300
    relu = {"nonlinearity": "relu"}
    cases = [
        (init.xavier_normal, nn.init.xavier_normal_, 2 / (out + inputs)),
        (init.xavier_uniform, nn.init.xavier_uniform_, 2 / (out + inputs)),
        (init.he, lambda w, generator: nn.init.kaiming_normal_(w, generator=generator, **relu), 2 / inputs),
        (init.t5, None, 1 / inputs),
        (lambda w, rng: init.t5(w, rng, head_width=64), None, 1 / inputs / 64),
        (lambda w, rng: init.he(w, rng, by="out"), None, 2 / out),
    ]
    for ours, theirs, variance in cases:
        weight = ours(torch.empty(out, inputs), seeded())
        assert moment(weight, 2) == pytest.approx(variance, rel=5 * math.sqrt(2 / weight.numel()))
        if theirs is not None:
            torch.testing.assert_close(weight, theirs(torch.empty(out, inputs), generator=seeded()))


def test_a_kernel_counts_every_tap():
    kernel = torch.empty(16, 8, 3, 3)
    assert (init.fan(kernel, "in"), init.fan(kernel, "out"), init.fan(kernel, "mean")) == (72, 144, 108)


def test_t5_matches_the_reference_model():
    transformers = pytest.importorskip("transformers")
    config = transformers.T5Config(
        vocab_size=32, d_model=128, d_kv=32, d_ff=256, num_layers=1, num_heads=4, feed_forward_proj="relu"
    )
    torch.manual_seed(0)
    layer = transformers.T5Model(config).encoder.block[0].layer
    attention, inner = layer[0].SelfAttention, layer[1].DenseReluDense
    rest = [attention.k, attention.v, attention.o, inner.wi, inner.wo]
    for linear, head_width in [(attention.q, 32), *((linear, None) for linear in rest)]:
        weight = linear.weight.detach()
        ours = init.t5(torch.empty_like(weight), seeded(), head_width)
        # Each of the two deviations errs by 1/√(2n), so their ratio by 1/√n.
        assert float(ours.std() / weight.std()) == pytest.approx(1.0, abs=5 / math.sqrt(weight.numel()))


def test_t5_scores_start_at_variance_one_without_a_division():
    width, heads, depth, tokens = 256, 8, 32, 256
    x = init.normal(torch.empty(tokens, width), 1.0, seeded(1))
    query = x @ init.t5(torch.empty(width, width), seeded(2), depth).T
    key = x @ init.t5(torch.empty(width, width), seeded(3)).T
    scores = torch.einsum("qhd,khd->hqk", query.view(tokens, heads, depth), key.view(tokens, heads, depth))
    assert moment(scores, 2) == pytest.approx(1.0, abs=0.05)
    plain = init.t5(torch.empty(width, width), seeded(2)).T
    unscaled = torch.einsum("qhd,khd->hqk", (x @ plain).view(tokens, heads, depth), key.view(tokens, heads, depth))
    assert moment(unscaled, 2) == pytest.approx(depth, rel=0.05)


# ---- activations and depth ------------------------------------------------------------------------------------


def test_gains_match_integrals_known_in_closed_form():
    assert init.activation_gain(torch.relu) == pytest.approx(math.sqrt(2), abs=1e-9)
    assert init.activation_gain(lambda z: z) == pytest.approx(1.0, abs=1e-9)
    assert init.activation_gain(torch.exp) == pytest.approx(math.exp(-1), abs=1e-9)  # E[e^2z] = e²
    assert init.activation_gain(torch.sin) == pytest.approx(((1 - math.exp(-2)) / 2) ** -0.5, abs=1e-9)
    assert init.activation_gain(torch.sign) == pytest.approx(1.0, abs=1e-9)
    # E[gelu²] = 1/3 + 1/(2π√3)
    assert init.activation_gain(F.gelu) == pytest.approx((1 / 3 + 1 / (2 * math.pi * math.sqrt(3))) ** -0.5, abs=1e-9)
    leaky = init.activation_gain(lambda z: F.leaky_relu(z, 0.2))
    assert leaky == pytest.approx(nn.init.calculate_gain("leaky_relu", 0.2), abs=1e-9)


@pytest.mark.parametrize("activation", ACTIVATIONS, ids=lambda f: f.__name__)
def test_a_standardized_activation_has_mean_zero_and_variance_one(activation):
    z = init.normal(torch.empty(DRAWS), 1.0, seeded())
    value = init.standardized(activation)(z)
    kurtosis = moment(value - value.mean(), 4)
    assert abs(moment(value, 1)) < 5 / math.sqrt(DRAWS)
    assert abs(moment(value, 2) - 1) < 5 * math.sqrt((kurtosis - 1) / DRAWS)


def deep(fill, activation, depth: int, width: int = 512) -> list[float]:
    """The mean square of the pre-activations, from unit ones on, layer after layer of a fresh stack."""
    x, rng, sizes = init.normal(torch.empty(64, width), 1.0, seeded(1)), seeded(2), []
    for _ in range(depth):
        x = activation(x) @ fill(torch.empty(width, width), rng).T
        sizes.append(moment(x, 2))
    return sizes


def test_relu_halves_the_second_moment_and_he_restores_it():
    depth, width = 30, 512
    halved, kept = deep(init.xavier_normal, torch.relu, depth), deep(init.he, torch.relu, depth)
    # Each layer multiplies by a sum over `width` draws that errs by √(5/width); the logs of `depth` such add up.
    error = math.sqrt(5 / width * depth)
    assert abs(math.log(kept[-1])) < 3 * error
    assert abs(math.log(halved[-1]) + depth * math.log(2)) < 3 * error


@pytest.mark.parametrize("activation", [*ACTIVATIONS, torch.exp], ids=lambda f: f.__name__)
def test_the_corrected_scale_gives_unit_pre_activations_again(activation):
    kurtosis = moment(activation(init.normal(torch.empty(DRAWS), 1.0, seeded())) * init.activation_gain(activation), 4)
    size = deep(lambda w, rng: init.for_activation(w, activation, rng), activation, 1, width=1024)[-1]
    # Rows share one matrix: 1024 outputs each err by √2, 64 × 1024 activations each by √(kurtosis - 1).
    assert abs(size - 1) < 5 * (math.sqrt(2 / 1024) + math.sqrt((kurtosis - 1) / 64 / 1024))


def test_tanh_returns_to_unit_pre_activations_from_any_size():
    """A large signal is flattened, a small one passes with the gain of 1.59: the fixed point attracts."""
    x, rng = init.normal(torch.empty(64, 512), 5.0, seeded(1)), seeded(2)
    for _ in range(30):
        x = torch.tanh(x) @ init.for_activation(torch.empty(512, 512), torch.tanh, rng).T
    assert moment(x, 2) == pytest.approx(1.0, abs=5 * math.sqrt(2 / 512))


def test_xavier_barely_shrinks_a_small_signal_through_tanh():
    x, rng = init.normal(torch.empty(64, 512), 0.1, seeded(1)), seeded(2)
    for _ in range(10):
        x = torch.tanh(x @ init.xavier_normal(torch.empty(512, 512), rng).T)
    # tanh(x)² ≈ x² - 2x⁴/3: at 0.01 a layer takes two per cent, and random matrices err by √(2/512) each.
    assert 0.7 < moment(x, 2) / 0.01 < 1.1


def test_orthogonal_keeps_every_length_through_a_deep_linear_stack():
    x, rng = init.normal(torch.empty(8, 64, dtype=torch.float64), 1.0, seeded()), seeded(1)
    length = x.norm(dim=1)
    for _ in range(100):
        x = x @ init.orthogonal(torch.empty(64, 64, dtype=torch.float64), rng=rng).T
    torch.testing.assert_close(x.norm(dim=1), length, rtol=1e-12, atol=0)


# ---- NTK parametrisation --------------------------------------------------------------------------------------


def test_ntk_computes_at_the_start_what_a_plain_layer_computes():
    ntk = init.NTKLinear(300, 200, seeded(5), gain=math.sqrt(2))
    plain = nn.Linear(300, 200)
    init.he(plain.weight, seeded(5))
    nn.init.zeros_(plain.bias)
    x = init.normal(torch.empty(7, 300), 1.0, seeded(6))
    torch.testing.assert_close(ntk(x), plain(x), rtol=1e-5, atol=1e-5)
    assert float(ntk.weight.detach().std()) == pytest.approx(1.0, abs=5 / math.sqrt(2 * 60_000))


@pytest.mark.parametrize("bias", [True, False])
def test_ntk_to_and_from_a_plain_layer_is_the_same_function(bias):
    plain = nn.Linear(12, 5, bias=bias).double()
    ntk = init.NTKLinear.from_linear(plain)
    x = init.normal(torch.empty(3, 12, dtype=torch.float64), 1.0, seeded())
    torch.testing.assert_close(ntk(x), plain(x))
    torch.testing.assert_close(ntk.to_linear().state_dict(), plain.state_dict())
    ntk(x).sum().backward()
    torch.testing.assert_close(ntk.weight.grad, x.sum(0).expand(5, 12) * 12**-0.5)


def test_adam_at_one_per_cent_moves_an_ntk_layer_by_one_per_cent():
    layer = init.NTKLinear(64, 32, seeded())
    before = layer.weight.detach().clone()
    optimizer = torch.optim.Adam(layer.parameters(), lr=0.01)
    layer(init.normal(torch.empty(16, 64), 1.0, seeded(1))).square().sum().backward()
    optimizer.step()
    moved = (layer.weight.detach() - before).norm() / before.norm()
    assert float(moved) == pytest.approx(0.01, rel=0.05)


# ---- a whole model --------------------------------------------------------------------------------------------


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(500, 64, padding_idx=0)
        self.block = nn.ModuleDict({"up": nn.Linear(64, 256), "down": nn.Linear(256, 64)})
        self.norm, self.rms = nn.LayerNorm(64), nn.RMSNorm(64)
        self.logits = nn.Linear(64, 500)
        self.logits.weight = self.embed.weight


def noisy(module: nn.Module) -> nn.Module:
    for parameter in module.parameters():
        nn.init.uniform_(parameter, 5.0, 6.0)
    return module


def test_a_bert_starts_with_truncated_normals_zero_biases_and_unit_norms():
    model = init.initialize(noisy(Tied()), 0.02, seeded())
    for name, parameter in model.named_parameters():
        if parameter.ndim == 1:
            assert (parameter == (0.0 if name.endswith("bias") else 1.0)).all(), name
            continue
        rows = (parameter[1:] if name == "embed.weight" else parameter).detach()
        assert float(rows.std()) == pytest.approx(0.02, rel=5 / math.sqrt(2 * rows.numel())), name
        assert float(rows.abs().max()) <= 0.02 * 2.274, name
    assert not model.embed.weight[0].any()
    assert model.logits.weight is model.embed.weight


def test_a_gpt2_starts_with_normals_and_smaller_residual_projections():
    scale = (2 * 12) ** -0.5
    model = init.initialize(noisy(Tied()), 0.02, seeded(), "normal", scale, ("down",))
    deviation = {name: float(p.detach().std()) for name, p in model.named_parameters() if p.ndim == 2}
    assert deviation["block.up.weight"] == pytest.approx(0.02, rel=0.03)
    assert deviation["block.down.weight"] == pytest.approx(0.02 * scale, rel=0.03)
    assert float(model.block["up"].weight.detach().abs().max()) > 0.02 * 3  # not cut


def test_a_tied_matrix_is_drawn_once_and_the_result_repeats():
    one, two = (init.initialize(noisy(Tied()), rng=seeded(9)).state_dict() for _ in range(2))
    torch.testing.assert_close(one, two, rtol=0, atol=0)
    untied = Tied()
    untied.logits.weight = nn.Parameter(torch.empty(500, 64))
    init.initialize(untied, rng=seeded(9))
    assert torch.equal(untied.embed.weight, one["embed.weight"])


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: init.fan(torch.empty(3)), "no fan"),
        (lambda: init.fan(torch.empty(3, 3), "both"), "in, out, mean"),
        (lambda: init.scaled(torch.empty(3, 3), kind="cauchy"), "normal, uniform, truncated_normal"),
        (lambda: init.truncated_std(0.0), "positive"),
        (lambda: init.activation_gain(torch.zeros_like), "second moment .* is 0.0"),
        (lambda: init.standardized(torch.ones_like), "cannot be standardized"),
    ],
)
def test_invalid_arguments_are_refused(call, words):
    with pytest.raises(UsageError, match=words):
        call()


def test_the_encoder_decoder_of_2017_starts_with_xavier_and_unit_embeddings():
    model = init.initialize_xavier(noisy(Tied()), seeded())
    deviation = {name: float(p.detach().std()) for name, p in model.named_parameters() if p.ndim == 2}
    assert deviation["embed.weight"] == pytest.approx(64**-0.5, rel=5 / math.sqrt(2 * 32_000))
    for name in ("block.up.weight", "block.down.weight"):
        assert deviation[name] == pytest.approx(math.sqrt(2 / 320), rel=5 * math.sqrt(0.2 / 16_384))
    assert model.norm.weight.eq(1).all() and model.logits.bias.eq(0).all() and not model.embed.weight[0].any()


# ---- the report of signal and gradient ---------------------------------------------------------------------------


class Times(nn.Module):
    """A layer that multiplies; like ours, it returns what it made and what it read."""

    def __init__(self, factor: float):
        super().__init__()
        self.weight = nn.Parameter(torch.full((2, 2), factor))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, None]:
        return x * self.weight[0, 0], None


class Stack(nn.Module):
    def __init__(self, *factors: float):
        super().__init__()
        self.layers = nn.ModuleList(Times(factor) for factor in factors)
        self.dropout = nn.Dropout(0.9)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x, _ = layer(x)
        return self.dropout(x)


def test_the_report_is_what_one_works_out_by_hand():
    model, x = Stack(2.0, 3.0, 0.5), torch.full((4, 8), 10.0)
    rows = init.signal_report(model, lambda: model(x), seeded(1))
    assert [row.name for row in rows] == ["input", "layers.0", "layers.1", "layers.2"]
    assert [row.signal for row in rows] == pytest.approx([10, 20, 60, 30])
    cotangent = init.rms([init.normal(torch.empty(4, 8), 1.0, seeded(1))])
    assert [row.gradient for row in rows] == pytest.approx([3 * cotangent, 1.5 * cotangent, 0.5 * cotangent, cotangent])
    assert [row.weights for row in rows] == [None, 2.0, 3.0, 0.5]


@pytest.mark.parametrize("frozen", [False, True])
def test_the_report_leaves_no_trace(frozen):
    model, x = Stack(2.0, 3.0).requires_grad_(not frozen), torch.ones(2, 2)
    model.dropout.train()
    model.layers.eval()
    with torch.no_grad():  # the caller's mode does not matter
        assert init.signal_report(model, lambda: model(x))[-1].signal == pytest.approx(6)
    assert model.training and model.dropout.training and not model.layers[0].training
    assert all(p.grad is None for p in model.parameters())
    with pytest.raises(ZeroDivisionError):
        init.signal_report(model, lambda: 1 / 0)
    assert not any(layer._forward_hooks or layer._forward_pre_hooks for layer in model.layers)
    assert model.training and not model.layers[0].training


def test_the_report_looks_into_both_stacks_of_another_librarys_model():
    model = nn.Transformer(16, 2, 2, 3, 32, batch_first=True)
    x = init.normal(torch.empty(2, 5, 16), 1.0, seeded())
    rows = init.signal_report(model, lambda: model(x, x), seeded())
    assert [row.name for row in rows if "input" in row.name] == ["encoder.input", "decoder.input"]
    assert len(rows) == 7 and all(row.gradient > 0 for row in rows)
    after_norm = [row.signal for row in rows if "layers" in row.name]
    assert after_norm == pytest.approx([1.0] * 5, rel=1e-3)  # post-norm: every layer's output has size 1


def test_a_model_without_layers_is_said():
    with pytest.raises(UsageError, match="Linear has no stack"):
        init.signal_report(nn.Linear(2, 2), lambda: torch.zeros(1))


def residual_stack(norm_place: str, depth: int, start) -> tuple[Stack, torch.Tensor]:
    """Feed-forward steps only, x + W₂ relu(W₁ x), with the norm before or after."""
    from allmask.nn.layers import Attention, FeedForward, Layer

    class Feed(nn.Module):
        def __init__(self):
            super().__init__()
            norms = (nn.Identity(), nn.LayerNorm(256))
            feed_forward = FeedForward(256, 1024, nn.ReLU())
            self.step = Layer(Attention(256, 4), feed_forward, norms, norm_place, 0.0)

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, None]:
            return self.step.feed(x), None

    stack = Stack()
    stack.layers = nn.ModuleList(Feed() for _ in range(depth))
    return start(stack), init.normal(torch.empty(64, 256), 1.0, seeded(1))


def unit_steps(scale: float = 1.0):
    """Matrices by which each residual step adds a signal of size `scale` to one of size 1."""

    def start(stack: nn.Module) -> nn.Module:
        init.initialize(stack)
        rng = seeded(2)
        for layer in stack.layers:
            init.scaled(layer.step.feed_forward.expand.weight, rng)
            init.he(layer.step.feed_forward.contract.weight, rng).data.mul_(scale)
        return stack

    return start


def test_pre_norm_grows_as_the_root_of_depth_and_post_norm_keeps_signal_and_gradient():
    """A step adds a unit signal, and sends a unit gradient back beside the direct one: variance 1 + 1, both ways.

    The norm after it halves both again. The norm before it divides by the size so far instead, so that the signal's
    variance is 1 + l after l layers, and the gradient's (1 + L)/(1 + l), a product in which all but the ends cancel.
    """
    depth = 12
    stack, x = residual_stack("post", depth, unit_steps())
    post = init.signal_report(stack, lambda: stack(x), seeded())
    assert [row.signal for row in post] == pytest.approx([1.0] * (depth + 1), rel=0.02)
    assert [row.gradient for row in post] == pytest.approx([1.0] * (depth + 1), rel=0.15)
    stack, x = residual_stack("pre", depth, unit_steps())
    pre = init.signal_report(stack, lambda: stack(x), seeded())
    assert [row.signal**2 for row in pre] == pytest.approx([1 + i for i in range(depth + 1)], rel=0.1)
    assert [row.gradient**2 for row in pre] == pytest.approx([(1 + depth) / (1 + i) for i in range(depth + 1)], rel=0.1)


def test_the_residual_scale_makes_all_layers_add_what_one_would():
    depth = 24
    stack, x = residual_stack("pre", depth, unit_steps(depth**-0.5))
    rows = init.signal_report(stack, lambda: stack(x), seeded())
    assert rows[-1].signal ** 2 == pytest.approx(2.0, rel=0.1)
    assert rows[0].gradient ** 2 == pytest.approx(2.0, rel=0.1)


def test_layers_that_are_one_module_are_reported_one_by_one():
    """As those of a model in which each has a copy of the weights."""
    sizes = {"vocab_size": 20, "width": 16, "heads": 2, "ffn_width": 32, "layers": 3, "max_positions": 8}
    config = relatives(sizes, "albert")["albert"]
    shared = Model.fresh(config, rng=torch.Generator().manual_seed(0)).eval()
    plain = Model(replace(config, shared_layers=False)).eval()
    own = {name.replace("layers.0.", f"layers.{n}."): x for name, x in shared.state_dict().items() for n in range(3)}
    plain.load_state_dict(own)
    ids = torch.arange(8)[None]
    first, second = (
        init.signal_report(model, lambda model=model: model(ids).hidden, torch.Generator().manual_seed(1))
        for model in (shared, plain)
    )
    assert [(a.name, a.signal, a.gradient) for a in first] == [(b.name, b.signal, b.gradient) for b in second]
    assert len(first) == 4
