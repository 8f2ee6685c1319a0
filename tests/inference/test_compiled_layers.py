"""int8 layers: near the model, the same in C and torch, and independent of neighbours in a batch."""

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

from allmask import presets
from allmask.decoding import Decoding, PairWriter, generate
from allmask.errors import UsageError
from allmask.inference import embed, embed_ids, freeze
from allmask.inference.compiled_layers import CompiledLayer, TorchInt8Linear, smoothing_scales
from allmask.kernels import int8, packed_attention
from allmask.mask import Mask
from allmask.model import Model, load
from allmask.nn.attention import Attention, Route
from allmask.nn.cache import Cache
from tests.kernels.test_int8 import need, threads  # noqa: F401
from tests.relatives import relatives

SMALL = {"vocab_size": 60, "width": 64, "heads": 4, "ffn_width": 112, "layers": 2, "max_positions": 24}
CONFIGS = {
    "bert": replace(presets.bert_base(), **SMALL),
    "gpt2": replace(presets.gpt2(), **SMALL),
    "relu": replace(presets.gpt2(), **SMALL, norm="rms", activation="relu"),
    "odd": replace(presets.bert_base(), **(SMALL | {"width": 36, "ffn_width": 50})),  # nothing that C takes
    **relatives(SMALL),
}
PAIRS = {
    "2017": replace(presets.transformer_base(), **SMALL, decoder_layers=2),
    "pre-norm": replace(presets.transformer_base(), **SMALL, decoder_layers=2, norm_place="pre"),
    "T5": replace(presets.t5_v1_1_small(), **SMALL, decoder_layers=2, head_width=16),
}


def small(family: str = "bert", **changes) -> Model:
    rng = torch.Generator().manual_seed(0)
    model = Model(replace((CONFIGS | PAIRS)[family], **changes), heads=["lm"]).eval()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3, generator=rng)
    return model


def cosine(a: Tensor, b: Tensor) -> float:
    return torch.cosine_similarity(a.float(), b.float(), dim=-1).min().item()


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
def test_layers_in_c_equal_those_in_torch(family, monkeypatch):
    need()
    model, ids = small(family), torch.randint(0, 60, (4, 24), generator=torch.Generator().manual_seed(1))
    compiled = freeze(model, "int8")
    assert all(isinstance(layer, CompiledLayer) for layer in compiled.body.layers)
    found = compiled(ids).hidden
    monkeypatch.setattr(int8, "library", lambda: None)
    in_torch = freeze(model, "int8")
    assert sum(isinstance(module, TorchInt8Linear) for module in in_torch.modules()) == 2 * 6
    assert cosine(found, in_torch(ids).hidden) > 0.999


@pytest.mark.parametrize("kind", ["bidirectional", "causal", "prefix"])
@pytest.mark.parametrize("family", ["bert", "gpt2", "relu", "albert", "2017", "pre-norm"])
def test_all_layers_at_once_equal_layer_by_layer(family, kind):
    need()
    tokens = min(690, packed_attention.MAX_LENGTH)
    model, mask = freeze(small(family, max_positions=700), "int8"), masks(tokens)[kind]
    stack = getattr(model.body, "encoder", model.body)
    assert stack.whole is not None
    x, (flat, index) = (
        torch.randn(1, int(mask.valid.sum()), 64, generator=torch.Generator().manual_seed(1)),
        mask.flatten(),
    )
    route, texts, found = Route.find(flat), index // tokens, {}
    for number in (1, 3):
        torch.set_num_threads(number)
        found[number] = stack.run(x, route)
    torch.set_num_threads(1)
    last, keys, values = stack.whole.read(x, route, texts)
    stack.whole, expected, reads = None, x, []
    for layer in stack.layers:
        expected, read = layer(expected, route)
        reads.append(read)
    for number in range(3):
        own = (texts == number).nonzero()[:, 0]
        assert torch.equal(last[number], expected[0, own[-1]])
        for layer, read in enumerate(reads):
            expected_keys, expected_values = (x[0, own].bfloat16().transpose(0, 1) for x in read)  # (H, T, D)
            assert torch.equal(keys[layer, number, :, :, : len(own)].transpose(1, 2), expected_keys)
            assert torch.equal(values[layer, number, :, : len(own)], expected_values)
            assert not keys[layer, number, :, :, len(own) :].any() and not values[layer, number, :, len(own) :].any()
    expected = stack.norm(expected)
    assert torch.equal(found[1], expected) and torch.equal(found[3], expected)


def test_a_frozen_model_can_be_copied():
    frozen, ids = freeze(small(), "int8"), torch.arange(1, 9)[None]
    expected = frozen(ids).hidden
    again = copy.deepcopy(frozen)
    del frozen
    assert torch.equal(again(ids).hidden, expected)


def test_without_c_torch_computes_and_a_warning_is_logged(monkeypatch, caplog):
    monkeypatch.setattr(int8, "library", lambda: None)
    with caplog.at_level(logging.WARNING, logger="allmask"):
        frozen = freeze(small(), "int8")
    assert "int8 is computed by torch, slower than bf16 or fp32" in caplog.text
    ids = torch.arange(1, 9)[None]
    assert cosine(frozen(ids).hidden, small()(ids).hidden) > 0.98


@pytest.mark.parametrize("family", ["bert", "gpt2"])
def test_a_cache_continues_a_text(family):
    model, ids = freeze(small(family), "int8"), torch.arange(1, 9)[None]
    mask = Mask.causal(torch.ones(1, 8, dtype=torch.bool))
    full, first = model(ids, mask).hidden, model(ids[:, :5], mask[:, :5], cache=Cache())
    second = model(ids[:, 5:], mask[:, 5:], cache=first.cache)
    assert torch.equal(first.hidden, full[:, :5])
    assert cosine(second.hidden, full[:, 5:]) > 0.999
    seen = model.body.query_stream(ids[:, 5:6], mask[:, 5:6], first.cache)
    assert seen.shape == (1, 1, 64) and model.body.query_stream(ids[:, :1], mask[:, :1], Cache()).isfinite().all()


def test_long_texts():
    model = small(max_positions=2200)
    ids = torch.randint(0, 60, (1, 2100), generator=torch.Generator().manual_seed(1))
    for length in (513, 2100):  # the kernel of documents ends in between
        assert cosine(freeze(model, "int8")(ids[:, :length]).hidden, model(ids[:, :length]).hidden) > 0.98


def test_some_positions_only():
    frozen, ids = freeze(small(), "int8"), torch.arange(24).view(2, 12)
    mask = Mask.bidirectional(torch.ones(2, 12, dtype=torch.bool))
    where = torch.rand(2, 12, generator=torch.Generator().manual_seed(0)) < 0.3
    assert torch.equal(frozen.body.forward_at(where, ids, mask), frozen(ids, mask).hidden[where])


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


@pytest.mark.parametrize("lengths", [[24] * 12, [1, 2, *range(8, 24)], [700, 5, 3], [300, 290, 310, 305, 1], [40, 60]])
@pytest.mark.parametrize("family", ["bert", "gpt2"])
def test_threads_that_take_whole_texts_change_nothing(family, lengths):
    """Few long texts share each part of a layer between threads, many texts are shared out as a whole."""
    need()
    rng = torch.Generator().manual_seed(1)
    whole = freeze(small(family, max_positions=700), "int8").body.whole
    x, lengths = torch.randn(sum(lengths), 64, generator=rng), np.array(lengths)
    starts = lengths.cumsum() - lengths
    documents = np.stack([starts, lengths, 0 * lengths if family == "gpt2" else lengths, starts, lengths], axis=1)
    texts, found = torch.arange(len(lengths)).flip(0), []
    for number in (1, 2, 3, 5):
        torch.set_num_threads(number)
        hidden = whole.run_texts(x, lengths, family == "gpt2")
        found.append([hidden, *int8.encode(whole.structures, whole.heads, whole.dtype, x, documents, texts)])
    for again in found[1:]:
        assert all(map(torch.equal, again, found[0]))


@pytest.mark.parametrize("precision", ["int8", "fp32", "bf16"])
@pytest.mark.parametrize("family", ["bert", "gpt2", "roberta", "albert", "odd"])
def test_texts_without_a_mask_have_the_bits_of_a_packed_mask(family, precision, monkeypatch):
    frozen = freeze(small(family, max_positions=700), precision)
    rng = torch.Generator().manual_seed(2)
    ids = [torch.randint(0, 60, (length,), generator=rng).tolist() for length in (3, 690, 1, 24, 24, 17)]
    found = embed_ids(frozen, ids)
    monkeypatch.setattr(type(frozen.body), "forward_texts", lambda *arguments: None)
    assert torch.equal(embed_ids(frozen, ids), found)


def test_what_a_model_cannot_read_is_refused():
    frozen = freeze(small(), "int8")
    for ids, message in (([5] * 25, "position 24 is beyond"), ([60], "token id 60"), ([-1, 5], "token id -1")):
        with pytest.raises(UsageError, match=message):
            embed_ids(frozen, [[1, 2], ids])


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
        "...",  # marks alone have the largest errors
        *("-" * count for count in (30, 43, 45, 55)),
        *(mark * 2 for mark in ".!:*"),
    ]
    found, exact = (embed(model, docs) for model in (freeze(minilm, "int8"), minilm))
    assert cosine(found, exact) >= 0.99


# ---- encoder–decoders --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", PAIRS)
def test_encoder_decoders_are_near_the_model(name):
    model, ids = small(name), torch.randint(0, 60, (3, 20), generator=torch.Generator().manual_seed(1))
    valid = torch.arange(20) < torch.tensor([[20], [15], [12]])
    mask = Mask.encoder_decoder((torch.arange(20) >= 11) & valid, valid)
    found, exact = freeze(model, "int8")(ids, mask).hidden, model(ids, mask).hidden
    assert torch.cosine_similarity(found[valid], exact[valid], dim=-1).min() > 0.97
    assert (found[~valid] == 0).all()


@pytest.mark.parametrize("name", PAIRS)
def test_a_quantized_encoder_decoder_writes(name):
    writer = PairWriter(freeze(small(name), "int8"), start=[2])
    [[best]] = generate(writer, [[5, 6, 7]], Decoding(max_new=5, beams=2))
    assert len(best.tokens) == 5


@pytest.mark.parametrize("name", PAIRS)
def test_each_linear_layer_is_smoothed_against_the_norm_it_reads(name):
    """Hooks record which norm made the tensor that a linear layer reads."""
    model, given, read = small(name), {}, {}
    scales = smoothing_scales(model.body, model.config.norm_place)

    def after(norm, inputs, output):
        given[id(output)] = norm, output  # kept alive, so that no other tensor gets its id

    def before(linear, inputs):
        norm, _ = given.get(id(inputs[0]), (None, None))
        read[linear] = norm

    for module in model.body.modules():
        if isinstance(module, nn.LayerNorm | nn.RMSNorm):
            module.register_forward_hook(after)
        if isinstance(module, nn.Linear):
            module.register_forward_pre_hook(before)
    model(torch.arange(1, 13)[None], Mask.encoder_decoder(torch.arange(12)[None] >= 7))
    shared = {
        linear: module.value
        for module in model.body.modules()
        if isinstance(module, Attention) and read[module.query] is read[module.value]
        for linear in (module.query, module.key)
    }
    assert len(shared) >= 8
    for linear, norm in read.items():
        expected = None if norm is None else int8.smoothing_scale(norm, shared.get(linear, linear).weight)
        found = scales.get(linear)
        assert (found is None) == (expected is None)
        assert expected is None or torch.equal(found, expected)
    assert sum(norm is not None for norm in read.values()) >= 16
