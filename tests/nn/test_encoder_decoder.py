"""Two stacks keep the mask's promises: dependence, packing, padding, caching; gradients; sizes."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import allmask
from allmask import presets
from allmask.inference import freeze
from allmask.mask import Mask
from allmask.mask.audit import audit, our_subject
from allmask.mask.prover import prove
from allmask.model import Model
from allmask.nn.attention import Route
from allmask.nn.encoder_decoder import EncoderDecoder
from allmask.nn.transformer import Transformer
from tests.nn.encoder_decoders import (
    LENGTHS,
    assert_cached_equals_full,
    assert_gradients_equal_differences,
    assert_packed_equals_padded_equals_one_by_one,
    draw_ids,
    pairs,
)

SMALL = {
    "vocab_size": 50,
    "width": 16,
    "heads": 2,
    "ffn_width": 32,
    "layers": 2,
    "decoder_layers": 3,
    "max_positions": 32,
}
T5 = {"head_width": 6, "buckets": 8, "bucket_distance": 6}
CONFIGS = {
    "2017": replace(presets.transformer_base(), **SMALL),
    "learned positions, norms first": replace(
        presets.transformer_base(), **SMALL, position_kind="learned", norm_place="pre"
    ),
    "T5": replace(presets.t5_small(), **SMALL, **T5),
    "T5 1.1": replace(presets.t5_v1_1_small(), **SMALL, **T5),
}


def model_of(name="2017", dtype=torch.float64):
    torch.manual_seed(0)
    model = Model(CONFIGS[name], ["lm"]).to(dtype).eval()
    for parameter in model.parameters():  # large weights: dependence must show above rounding
        torch.nn.init.normal_(parameter, std=0.3)
    return model


def test_the_mask_by_hand():
    mask = pairs([3, 1], [2, 3], extra=1)
    assert mask.order.tolist() == [[0, 0, 0, 1, 2, 2], [0, 1, 2, 3, 3, 3]]
    assert mask.position[0, :5].tolist() == [0, 1, 2, 0, 1] and mask.position[1, :4].tolist() == [0, 0, 1, 2]
    assert mask.valid.tolist() == [[True] * 5 + [False], [True] * 4 + [False] * 2]
    assert torch.equal(mask.visible(), Mask(mask.order, mask.group).visible())
    alone = Mask.encoder_decoder(torch.tensor([[False, True, True]]))
    assert (alone.order.tolist(), alone.position.tolist()) == ([[0, 1, 2]], [[0, 0, 1]])


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("sizes", [(4, 3), (1, 4), (5, 1), (6, 0)])
def test_dependence_is_what_the_mask_says_and_the_prover_proves_it(name, sizes):
    mask = pairs([sizes[0]], [sizes[1]])
    found = audit(our_subject(model_of(name)), mask, torch.Generator().manual_seed(0))
    assert found.holds and torch.equal(found.depends, mask.visible()[0])
    scored = mask.order[0] > 0
    proof = prove(replace(mask, position=torch.arange(sum(sizes))[None]), scored=scored)
    assert proof.is_order and proof.shifted_leaks == ()


@settings(max_examples=25, deadline=None)
@given(st.sampled_from(list(CONFIGS)), LENGTHS, st.integers(0, 2))
def test_packed_equals_padded_equals_one_by_one(name, lengths, extra):
    assert_packed_equals_padded_equals_one_by_one(model_of(name), lengths, extra)


@settings(max_examples=12, deadline=None)
@given(st.sampled_from(list(CONFIGS)), LENGTHS, st.data())
def test_hidden_states_at_some_positions_are_those_of_all(name, lengths, data):
    model, (sources, targets) = model_of(name), zip(*lengths, strict=True)
    flat, index = pairs(sources, targets).flatten()
    ids = draw_ids(1, len(index))
    where = torch.rand(flat.shape, generator=torch.Generator().manual_seed(data.draw(st.integers(0, 99)))) < 0.5
    if data.draw(st.booleans()):
        where &= flat.order > 0
    expected = model(ids, flat).hidden[where]
    torch.testing.assert_close(model.body.forward_at(where, ids, flat), expected, atol=1e-10, rtol=0)


@settings(max_examples=20, deadline=None)
@given(st.sampled_from(list(CONFIGS)), LENGTHS, st.data())
def test_cached_equals_full(name, lengths, data):
    assert_cached_equals_full(model_of(name), lengths, data)


@pytest.mark.parametrize("name", CONFIGS)
def test_gradients_by_differences(name):
    assert_gradients_equal_differences(model_of(name))


def test_layers_computed_again_give_the_same_gradients():
    gradients = []
    for again in (False, True):
        torch.manual_seed(0)
        model = Model(replace(CONFIGS["T5"], dropout=0.0, attention_dropout=0.0, ffn_dropout=0.0), ["lm"]).train()
        model.body.recompute = again
        model(draw_ids(2, 6), pairs([3, 4], [3, 2])).logits.square().sum().backward()
        gradients.append([p.grad for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


def test_the_decoder_reads_each_source_once_for_all_rows_that_go_on_from_it():
    model, mask = model_of("T5"), pairs([5, 3], [1, 1])
    _, cache = model.body.read(draw_ids(2, 6), mask)
    keys = cache.memory.layers[0].text.keys
    chosen = cache.select(torch.tensor([0, 0, 1, 0, 1]))
    assert chosen.memory.layers[0].text.keys is keys and keys.shape[0] == 2
    assert chosen.mask.shape == (5, 1) and chosen.memory.mask.shape == (5, 5)


def test_one_embedding_for_source_target_and_output():
    model = Model(CONFIGS["2017"], ["lm"])
    named = [name for name, tensor in model.state_dict().items() if tensor.shape[0] == 50]
    assert named == ["body.embedding.tokens.weight"]
    assert model.body.embedding.scale == 4.0 == 16**0.5


def test_attention_weights_of_relative_positions_are_those_used():
    """A body of one layer whose values are its input tells by its output what was read."""
    torch.manual_seed(0)
    body = Transformer(replace(CONFIGS["T5"], decoder_layers=0, layers=1, head_width=8)).double().eval()
    mask, ids = Mask.bidirectional(torch.arange(6) < torch.tensor([[6], [4]])), draw_ids(2, 6)
    layer, found = body.layers[0], []
    layer.attention.output.register_forward_pre_hook(lambda module, given: found.append(given[0]))
    body.run(body.embed(ids, mask, None, None), Route.find(mask))
    values = layer.attention.keys_values(layer.attention_norm(body.embed(ids, mask, None, None))).values
    read = torch.einsum("bhqk,bkhd->bqhd", body.weights(ids, mask)[0], values).flatten(2)
    torch.testing.assert_close(read, found[0], atol=1e-12, rtol=0)


@pytest.mark.parametrize("make, millions", [(presets.transformer_base, 65), (presets.transformer_big, 213)])
def test_sizes_of_2017(make, millions):
    """The paper's, as near as its vocabulary of "about 37000" tells."""
    with torch.device("meta"):
        model = EncoderDecoder(make())
    assert sum(p.numel() for p in model.parameters()) / 1e6 == pytest.approx(millions, rel=0.03)


# ---- as users hold it --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CONFIGS)
def test_saved_equals_loaded(name, tmp_path):
    model = model_of(name, torch.float32)
    model.save(tmp_path / "m")
    back, mask = allmask.load(tmp_path / "m"), pairs([4, 2], [2, 3])
    ids = draw_ids(*mask.shape)
    assert back.config == model.config and back.heads == {"lm"}
    assert torch.equal(back(ids, mask).logits, model(ids, mask).logits)


@pytest.mark.parametrize("name", CONFIGS)
def test_fewer_tokens_keep_their_logits_and_the_places_of_their_roles(name):
    model, mask = model_of(name, torch.float32), pairs([3], [2])
    kept = [0, 1, 5, 9, 30]
    small = model.keep_tokens(kept)
    new = torch.tensor([[2, 3, 1, 0, 4]])
    old = torch.tensor(kept)[new]
    assert torch.equal(small(new, mask).logits, model(old, mask).logits[..., kept])
    assert (small.config.start_token, small.config.end_token) == (0, model.config.end_token)
    assert small.keep_tokens([1, 2]).config.start_token is None


def test_fewer_layers_in_both_stacks():
    model, mask = model_of("T5"), pairs([3], [2])
    kept = model.keep_layers(1)
    assert (kept.config.layers, kept.config.decoder_layers) == (1, 1)
    seen = []
    model.body.encoder.layers[0].register_forward_hook(lambda module, read, out: seen.append(out[0]))
    ids = draw_ids(1, 5)
    model(ids, mask)
    torch.testing.assert_close(kept.body.encoder.norm(seen[0]), kept(ids, mask).hidden[:, :3], atol=1e-12, rtol=0)


@pytest.mark.parametrize("name", ["2017", "T5"])
def test_frozen_for_inference(name):
    model, mask = model_of(name, torch.float32), pairs([6, 3], [3, 4])
    ids = draw_ids(*mask.shape)
    with torch.no_grad():
        expected, found = model(ids, mask).logits, freeze(model, "fp32")(ids, mask).logits
    assert (expected - found)[mask.valid].abs().max() <= 1e-4 * float(expected.abs().max())


def test_distances_do_not_mind_where_a_target_begins_to_count():
    model, ids = model_of("T5"), draw_ids(1, 5)
    is_target = torch.tensor([[False, False, False, True, True]])
    by_prefix, by_pair = (model(ids, make(is_target)).hidden for make in (Mask.prefix, Mask.encoder_decoder))
    torch.testing.assert_close(by_prefix, by_pair, atol=1e-12, rtol=0)


def test_without_a_target_it_is_an_encoder():
    model, ids = model_of("2017"), draw_ids(2, 5)
    assert torch.equal(model(ids).hidden, model(ids, pairs([5, 5], [0, 0])).hidden)
