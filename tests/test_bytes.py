"""int8: products by whole numbers, layers by the torch ones, results that no neighbour in a row can change."""

from __future__ import annotations

import copy
import logging
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from allmask import config as configs
from allmask.errors import UsageError
from allmask.inference import bytes as int8
from allmask.inference import embed, embed_ids, freeze
from allmask.inference.bytes import ByteFeedForward, ByteLayer, ByteLinear, Int8Linear, PackedLinear
from allmask.masks import Mask
from allmask.model import Model, load
from allmask.transformer import Cache

SMALL = {"vocabulary": 60, "width": 64, "heads": 4, "inner": 112, "layers": 2, "max_positions": 24}
CONFIGS = {
    "bert": replace(configs.bert_base(), **SMALL),
    "gpt2": replace(configs.gpt2(), **SMALL),
    "relu": replace(configs.gpt2(), **SMALL, norm="rms", activation="relu"),
    "odd": replace(configs.bert_base(), **(SMALL | {"width": 36, "inner": 50})),  # nothing that C takes
}


@pytest.fixture(autouse=True)
def threads():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def need() -> None:
    if int8.library() is None:
        pytest.skip("no compiler, or a processor without AVX2")


def small(family: str = "bert", **changes) -> Model:
    rng = torch.Generator().manual_seed(0)
    model = Model(replace(CONFIGS[family], **changes), heads=["lm"]).eval()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3, generator=rng)
    return model


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def cosine(a: Tensor, b: Tensor) -> float:
    return torch.cosine_similarity(a.float(), b.float(), dim=-1).min().item()


# ---- products --------------------------------------------------------------------------------------------------


def by_whole_numbers(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
    """The definition in numpy's fp32, operation by operation; sums of bytes in whole numbers."""
    tops = np.abs(x).max(-1, keepdims=True)
    factors = np.divide(np.float32(127), tops, out=np.zeros_like(tops), where=tops > 0)
    scales = np.abs(weight).max(-1) / np.float32(127)
    whole_weight = np.rint(weight / np.maximum(scales, np.float32(1e-30))[:, None]).astype(np.int64)
    whole = np.rint(x * factors).astype(np.int64) @ whole_weight.T
    return whole.astype(np.float32) * (scales * (tops / np.float32(127)))


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 110), st.sampled_from([16, 48, 208]), st.integers(1, 150), st.integers(0, 2**31))
def test_a_linear_layer_by_whole_numbers_bit_for_bit(rows, inputs, outputs, seed):
    need()
    x, linear = drawn(rows, inputs, seed=seed) * 3, nn.Linear(inputs, outputs, bias=False)
    linear.weight = nn.Parameter(drawn(outputs, inputs, seed=seed + 1))
    x[rows // 2] = 0.0  # a row without a largest number
    expected = by_whole_numbers(x.numpy(), linear.weight.detach().numpy())
    assert np.array_equal(ByteLinear(linear)(x).numpy(), expected)
    assert np.array_equal(ByteLinear(linear, torch.bfloat16)(x).float(), torch.from_numpy(expected).bfloat16().float())
    half = x.bfloat16()
    assert torch.equal(ByteLinear(linear)(half), ByteLinear(linear)(half.float()))


def test_inputs_are_balanced_and_weights_stretched():
    need()
    x, linear, stretch = drawn(20, 48), nn.Linear(48, 70, bias=False), drawn(48, seed=1).abs() + 0.1
    weight = linear.weight.detach()
    expected = by_whole_numbers((x * (1.0 / stretch)).numpy(), (weight * stretch).numpy())
    assert np.array_equal(ByteLinear(linear, stretch=stretch)(x).numpy(), expected)
    torch.testing.assert_close(
        Int8Linear(weight, None, stretch=stretch)(x).numpy(), expected, atol=2e-2, rtol=0
    )  # a tie may be rounded to the other byte


def test_a_norm_with_one_large_feature_costs_no_other_feature_its_bytes():
    norm, linear = nn.LayerNorm(64), nn.Linear(64, 64, bias=False)
    with torch.no_grad():
        norm.weight[7] = 100.0
    x = norm(drawn(50, 64)).detach()
    exact = linear(x)
    stretch = int8.stretch_of(norm, linear.weight)
    plain, balanced = (Int8Linear(linear.weight, None, stretch=one)(x) for one in (None, stretch))
    assert (balanced - exact).abs().mean() < 0.5 * (plain - exact).abs().mean()
    assert int8.stretch_of(nn.Identity(), linear.weight) is None
    with torch.no_grad():
        norm.weight.zero_(), linear.weight.zero_()
    assert int8.stretch_of(norm, linear.weight).isfinite().all()


def test_a_bias_is_added_and_shapes_are_kept():
    need()
    linear, x = nn.Linear(32, 70), drawn(2, 3, 5, 32)
    found, bare = ByteLinear(linear)(x), nn.Linear(32, 70, bias=False)
    bare.weight = linear.weight
    torch.testing.assert_close(found, ByteLinear(bare)(x) + linear.bias, atol=1e-6, rtol=0)
    assert found.shape == (2, 3, 5, 70) and ByteLinear(linear)(x[:, :0]).shape == (2, 0, 5, 70)
    turned = x.transpose(0, 1)
    assert torch.equal(ByteLinear(linear)(turned), found.transpose(0, 1))


def test_torch_says_the_same():
    need()
    linear, x = nn.Linear(64, 70), drawn(2, 40, 64)
    torch.testing.assert_close(
        ByteLinear(linear)(x), Int8Linear(linear.weight, linear.bias)(x), atol=2e-2, rtol=0
    )  # a tie may be rounded to the other byte


@pytest.mark.parametrize("activation", ["none", "relu", "gelu", "gelu_tanh"])
def test_a_feed_forward_layer_is_two_linear_ones(activation):
    """Only its GELU differs from the exact one, by less than bytes can tell: a few of them round the other way."""
    need()
    expand, contract = nn.Linear(32, 80), nn.Linear(80, 32)
    x = drawn(100, 32) * 4
    packed = {"expand": expand, "contract": contract}
    packed = {name: PackedLinear.of(linear.weight, linear.bias) for name, linear in packed.items()}
    found = ByteFeedForward(**packed, activation=activation)(x)
    inner = ByteLinear(expand)(x)
    exact = {"none": inner, "relu": inner.relu(), "gelu": nn.functional.gelu(inner)}
    exact["gelu_tanh"] = nn.functional.gelu(inner, approximate="tanh")
    expected = ByteLinear(contract)(exact[activation])
    torch.testing.assert_close(found, expected, atol=5e-3 * expected.abs().max().item(), rtol=0)
    assert activation.startswith("gelu") or torch.equal(found, expected)


# ---- layers ----------------------------------------------------------------------------------------------------


def masks(tokens: int) -> dict[str, Mask]:
    valid = torch.arange(tokens) < torch.tensor([[tokens], [tokens // 2], [3]])
    return {
        "bidirectional": Mask.bidirectional(valid),
        "causal": Mask.causal(valid),
        "prefix": Mask.prefix(torch.arange(tokens).expand(3, tokens) >= 4, valid),
        "window": Mask.causal(valid, window=4),
    }


@pytest.mark.parametrize("kind", masks(8))
@pytest.mark.parametrize("family", CONFIGS)
def test_int8_is_near_the_model_under_every_mask(family, kind):
    model, ids = small(family), torch.randint(0, 60, (3, 20), generator=torch.Generator().manual_seed(1))
    mask, segments = masks(20)[kind], (torch.arange(20) > 9).long().expand(3, 20)
    frozen, exact = freeze(model, "int8"), model(ids, mask, segments=segments).hidden
    found = frozen(ids, mask, segments=segments).hidden
    assert found.dtype == torch.float32 and not found.requires_grad
    assert cosine(found[mask.valid], exact[mask.valid]) > 0.98
    assert (found[~mask.valid] == 0).all()


@pytest.mark.parametrize("family", ["bert", "gpt2", "relu"])
def test_layers_in_c_say_what_torch_says(family, monkeypatch):
    need()
    model, ids = small(family), torch.randint(0, 60, (4, 24), generator=torch.Generator().manual_seed(1))
    compiled = freeze(model, "int8")
    assert all(isinstance(layer, ByteLayer) for layer in compiled.body.layers)
    found = compiled(ids).hidden
    monkeypatch.setattr(int8, "library", lambda: None)
    in_torch = freeze(model, "int8")
    assert sum(isinstance(module, Int8Linear) for module in in_torch.modules()) == 2 * 6
    assert cosine(found, in_torch(ids).hidden) > 0.999


def test_without_c_torch_computes_and_it_is_said(monkeypatch, caplog):
    monkeypatch.setattr(int8, "library", lambda: None)
    with caplog.at_level(logging.WARNING, logger="allmask"):
        frozen = freeze(small(), "int8")
    assert "without a C compiler and AVX2 torch computes it" in caplog.text
    ids = torch.arange(1, 9)[None]
    assert cosine(frozen(ids).hidden, small()(ids).hidden) > 0.98


@pytest.mark.parametrize("family", ["bert", "gpt2"])
def test_a_cache_goes_on_where_a_text_ended(family):
    model, ids = freeze(small(family), "int8"), torch.arange(1, 9)[None]
    mask = Mask.causal(torch.ones(1, 8, dtype=torch.bool))
    full, first = model(ids, mask).hidden, model(ids[:, :5], mask[:, :5], cache=Cache())
    second = model(ids[:, 5:], mask[:, 5:], cache=first.cache)
    assert torch.equal(first.hidden, full[:, :5])
    assert cosine(second.hidden, full[:, 5:]) > 0.999
    seen = model.body.peek(ids[:, 5:6], mask[:, 5:6], first.cache)
    assert seen.shape == (1, 1, 64) and model.body.peek(ids[:, :1], mask[:, :1], Cache()).isfinite().all()


def test_long_texts():
    model = small(max_positions=2200)
    ids = torch.randint(0, 60, (1, 2100), generator=torch.Generator().manual_seed(1))
    for length in (513, 2100):  # the kernel of documents ends in between
        assert cosine(freeze(model, "int8")(ids[:, :length]).hidden, model(ids[:, :length]).hidden) > 0.98


def test_some_positions_only():
    frozen, ids = freeze(small(), "int8"), torch.arange(24).view(2, 12)
    mask = Mask.bidirectional(torch.ones(2, 12, dtype=torch.bool))
    where = torch.rand(2, 12, generator=torch.Generator().manual_seed(0)) < 0.3
    assert torch.equal(frozen.body.at(where, ids, mask), frozen(ids, mask).hidden[where])


# ---- nothing depends on the neighbours ---------------------------------------------------------------------------

TOKENS = st.lists(st.integers(0, 59), min_size=1, max_size=24)


@settings(max_examples=25, deadline=None)
@given(st.sampled_from(["bert", "gpt2"]), st.lists(TOKENS, min_size=1, max_size=9), st.integers(1, 60), st.randoms())
def test_a_text_has_the_same_bits_alone_in_a_batch_and_in_another_order(family, ids, budget, random):
    need()
    model = FROZEN[family] = FROZEN.get(family) or freeze(small(family), "int8")
    together = embed_ids(model, ids)
    alone = torch.cat([embed_ids(model, [text]) for text in ids])
    order = random.sample(range(len(ids)), len(ids))
    shuffled = embed_ids(model, [ids[number] for number in order], batch_tokens=budget)
    assert torch.equal(together, alone) and torch.equal(shuffled, together[order])
    torch.set_num_threads(2)
    assert torch.equal(embed_ids(model, ids * 8), together.repeat(8, 1))
    torch.set_num_threads(1)


FROZEN: dict[str, Model] = {}


def test_threads_share_rows_and_change_nothing():
    need()
    frozen, ids = freeze(small(max_positions=300), "int8"), torch.arange(600).view(2, 300) % 60
    found = []
    for number in (1, 2, 3):
        torch.set_num_threads(number)
        found.append(frozen(ids).hidden)
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])


# ---- frozen stays frozen -----------------------------------------------------------------------------------------


def test_the_model_is_untouched_and_a_copy_of_the_frozen_one_works():
    model, ids = small(), torch.arange(1, 9)[None]
    before, frozen = model(ids).hidden, freeze(model, "int8")
    assert torch.equal(model(ids).hidden, before)
    kept, again = frozen(ids).hidden, copy.deepcopy(frozen)
    del frozen
    assert torch.equal(again.train()(ids).hidden, kept)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    assert torch.equal(again(ids).hidden, kept)


def test_what_is_refused(tmp_path):
    frozen = freeze(small(), "int8")
    with pytest.raises(UsageError, match="frozen already"):
        freeze(frozen, "int8")
    with pytest.raises(UsageError, match="cannot be saved"):
        frozen.save(tmp_path / "out")


def test_sentence_vectors_of_minilm():
    need()
    minilm = load("minilm")
    docs = [
        embed.__doc__,
        freeze.__doc__,
        Mask.prefix.__doc__,
        logging.__doc__,
        str(np.__doc__)[:500],
        "你好",
        "a",
        "Mask.",
    ]
    found, exact = (embed(model, docs) for model in (freeze(minilm, "int8"), minilm))
    assert cosine(found, exact) >= 0.99
