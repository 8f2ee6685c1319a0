"""XLNet equals transformers': both streams, padding, memory, segments, gradients; folders, sizes, filled blanks."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import XLNetConfig, XLNetLMHeadModel, XLNetModel

import allmask
from allmask.checkpoints.families.xlnet import XLNET
from allmask.decoding import fill
from allmask.errors import CheckpointError, UsageError
from allmask.inference.segments import following, perplexity, surprisals
from allmask.mask import Mask
from allmask.model import Model
from allmask.nn.cache import Cache
from allmask.presets import PRESETS
from tests.nn.test_relative_attention import TINY, both_streams

SIZES = {"vocab_size": 60, "d_model": 32, "n_layer": 3, "n_head": 4, "d_inner": 48, "initializer_range": 0.2}
KINDS = {
    "plain": {},
    "relu, one way": {"ff_activation": "relu", "attn_type": "uni"},
    "clamped": {"clamp_len": 3},
    "untied": {"tie_word_embeddings": False},
    "one way, clamped": {"attn_type": "uni", "clamp_len": 2, "layer_norm_eps": 1e-5},
}


def theirs_of(changes=None, kind=XLNetLMHeadModel):
    torch.manual_seed(0)
    model = kind(XLNetConfig(**{**SIZES, "mem_len": None, **(changes or {})}))
    for parameter in model.parameters():
        if parameter.ndim == 1:
            parameter.data += torch.randn_like(parameter) * 0.2
    return model.eval()


def converted(theirs, folder):
    theirs.save_pretrained(folder)
    return allmask.load(folder)


def draw_ids(rows, tokens, seed=1):
    return torch.randint(0, 60, (rows, tokens), generator=torch.Generator().manual_seed(seed))


def batch():
    """Texts of 9, 6 and 8 tokens, padded on the left; the last token of each is <cls>, those before it of two parts."""
    valid = torch.arange(9) >= torch.tensor([[0], [3], [1]])
    segments = torch.tensor([[0] * 5 + [1] * 3 + [2], [3] * 3 + [0] * 2 + [1] * 3 + [2], [3] + [0] * 7 + [2]])
    return draw_ids(3, 9), valid, segments


def padded_logits(theirs, ids, valid, segments):
    """Theirs, one way, refuses padded batches, so its texts are read one by one."""
    if theirs.config.attn_type == "bi":
        return theirs(ids, attention_mask=valid.long(), token_type_ids=segments).logits
    logits = torch.zeros(*ids.shape, 60)
    for row, real in enumerate(valid):
        logits[row, real] = theirs(ids[row : row + 1, real], token_type_ids=segments[row : row + 1, real]).logits
    return logits


@pytest.mark.parametrize("kind", KINDS)
def test_logits_of_batches_padded_on_the_left(kind, tmp_path):
    theirs = theirs_of(KINDS[kind])
    ours = converted(theirs, tmp_path / "xlnet")
    ids, valid, segments = batch()
    with torch.no_grad():
        found = ours(ids, ours.own_mask(valid), segments).logits
        assert (found - padded_logits(theirs, ids, valid, segments))[valid].abs().max() <= 1e-5
        assert (ours(ids).logits - theirs(ids).logits).abs().max() <= 1e-5
    assert (ours.config.own_mask == "causal") == ("one way" in kind) and ours.config.tied == (kind != "untied")


def test_hidden_states_of_the_body_alone(tmp_path):
    theirs = theirs_of({}, XLNetModel)
    ours = converted(theirs, tmp_path / "xlnet")
    ids, valid, segments = batch()
    with torch.no_grad():
        expected = theirs(ids, attention_mask=valid.long(), token_type_ids=segments).last_hidden_state
        found = ours(ids, Mask.bidirectional(valid), segments).hidden
    assert ours.heads == frozenset() and (found - expected)[valid].abs().max() <= 1e-5


def perm_mask_of(mask):
    """1 where reading is forbidden. Theirs always lets the content stream read itself, and the query stream never."""
    return (~mask.visible(strict=True)).float()


@settings(max_examples=10, deadline=None)
@given(st.permutations(range(9)), st.booleans())
def test_permutations_with_two_streams(folders, rank, in_parts):
    """`perm_mask` is the order, `target_mapping` the places asked for."""
    theirs, ours = folders
    ids, _, segments = batch()
    asked = torch.tensor([7, 2, 5])
    mask = Mask.permutation(torch.tensor([rank, rank[::-1], rank]))
    mapping = torch.nn.functional.one_hot(asked, 9).float().expand(3, -1, -1)
    told = {"perm_mask": perm_mask_of(mask), **({"token_type_ids": segments} if in_parts else {})}
    with torch.no_grad():
        expected = theirs(ids, target_mapping=mapping, **told).logits
        content, query, _ = both_streams(ours, ids, mask, segments if in_parts else None, asked)
        seen = mask.visible(strict=True).any(-1)[:, asked]  # of nothing at all, theirs reads everything
        assert (ours.logits(query) - expected)[seen].abs().max() <= 1e-5
        assert (ours.logits(content) - theirs(ids, **told).logits).abs().max() <= 1e-5


def test_permutations_of_padded_texts(folders):
    theirs, ours = folders
    ids, valid, segments = batch()
    rank = torch.stack([torch.randperm(9, generator=torch.Generator().manual_seed(row)) for row in range(3)])
    mask = Mask.permutation(rank, valid)
    told = {"perm_mask": perm_mask_of(Mask.permutation(rank)), "attention_mask": valid.long()}
    with torch.no_grad():
        mapping = torch.eye(9).expand(3, -1, -1)
        expected = theirs(ids, token_type_ids=segments, target_mapping=mapping, **told).logits
        _, query, _ = both_streams(ours, ids, mask, segments)
    seen = mask.visible(strict=True).any(-1)
    assert seen.sum() == 20 and (ours.logits(query) - expected)[seen].abs().max() <= 1e-5


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    theirs = theirs_of()
    return theirs, converted(theirs, tmp_path_factory.mktemp("xlnet"))


def test_gradients(folders):
    """Of every parameter, through both streams."""
    theirs, ours = folders
    ids, _, segments = batch()
    mask = Mask.permutation(torch.randperm(9, generator=torch.Generator().manual_seed(3)).expand(3, -1))
    seen = mask.visible(strict=True).any(-1)
    mapping = torch.eye(9).expand(3, -1, -1)
    expected = theirs(ids, token_type_ids=segments, perm_mask=perm_mask_of(mask), target_mapping=mapping).logits
    cotangent = torch.randn(expected.shape, generator=torch.Generator().manual_seed(2)) * seen[..., None]
    theirs.zero_grad(), ours.zero_grad()
    (expected * cotangent).sum().backward()
    (ours.logits(both_streams(ours, ids, mask, segments)[1]) * cotangent).sum().backward()
    named = {name.removeprefix("transformer."): p.grad for name, p in theirs.named_parameters()}
    named = XLNET.to_ours({name: grad for name, grad in named.items() if name in XLNET.pairs(3)}, 3)
    for name, parameter in ours.named_parameters():
        reference = named[name]
        assert reference.abs().max() > 1e-4, name
        assert (parameter.grad - reference).abs().max() <= 1e-5 * max(1.0, float(reference.abs().max())), name


# ---- memory ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["plain", "one way, clamped"])
def test_memory_of_earlier_segments(kind, tmp_path):
    """Their `mems` are a cache whose tokens are all older; the second and third segments read what came before."""
    theirs = theirs_of(KINDS[kind])
    ours = converted(theirs, tmp_path / "xlnet")
    rank = torch.randperm(6, generator=torch.Generator().manual_seed(0)).expand(2, -1)
    mems, cache = None, Cache()
    for number in range(3):
        ids = draw_ids(2, 6, seed=number)
        valid = torch.ones_like(ids, dtype=torch.bool)
        mask = Mask.permutation(rank) if kind == "plain" else Mask.causal(valid)
        told = {"perm_mask": perm_mask_of(mask)} if kind == "plain" else {}
        mask = following(cache, mask)
        with torch.no_grad():
            mapped = theirs(ids, mems=mems, target_mapping=torch.eye(6).expand(2, -1, -1), **told, use_mems=True)
            expected = theirs(ids, mems=mems, **told, use_mems=True)
            content, query, cache = both_streams(ours, ids, mask, cache=cache)
        seen = mask.visible(cache.mask, strict=True).any(-1)
        assert (ours.logits(content) - expected.logits).abs().max() <= 1e-5
        if kind == "plain":  # theirs, one way, lets the query stream read its own token
            assert (ours.logits(query) - mapped.logits)[seen].abs().max() <= 1e-5
        mems = expected.mems
        assert mems[0].shape[0] == cache.mask.shape[1]


def test_the_same_length_of_memory_for_all_is_a_window(tmp_path):
    """`same_length`: each token reads as many as there are remembered, and itself."""
    theirs = theirs_of({"attn_type": "uni"})
    ours = converted(theirs, tmp_path / "xlnet")
    first, second = draw_ids(2, 5, seed=5), draw_ids(2, 4, seed=6)
    valid = torch.ones_like(first, dtype=torch.bool)
    with torch.no_grad():
        mems = theirs(first, use_mems=True).mems
        _, cache = ours.body.step(first, Mask.causal(valid), Cache())
        theirs.transformer.same_length = True
        mask = replace(following(cache, Mask.causal(valid[:, :4])), window=6)
        cache = replace(cache, mask=replace(cache.mask, window=6))
        assert (ours(second, mask, cache=cache).logits - theirs(second, mems=mems).logits).abs().max() <= 1e-5


def test_texts_read_backwards_are_places_that_count_down(folders):
    """`bi_data`: the second half of a batch has its distances turned round."""
    theirs, ours = folders
    ids = draw_ids(4, 7)
    places = torch.arange(7).expand(4, -1) * torch.tensor([1, 1, -1, -1])[:, None]
    theirs.transformer.bi_data = True
    try:
        with torch.no_grad():
            assert (ours(ids, positions=places).logits - theirs(ids).logits).abs().max() <= 1e-5
    finally:
        theirs.transformer.bi_data = False


# ---- folders -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind, layout", [(kind, XLNetLMHeadModel) for kind in KINDS] + [("plain", XLNetModel)])
def test_what_is_saved_loads_in_transformers_with_the_same_outputs(kind, layout, tmp_path):
    theirs, (ids, _, segments) = theirs_of(KINDS[kind], layout), batch()
    first = converted(theirs, tmp_path / "in")
    first.save(tmp_path / "out")
    back, info = layout.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"]
    with torch.no_grad():
        told = {"token_type_ids": segments}
        assert torch.equal(back.eval()(ids, **told)[0], theirs(ids, **told)[0])
    assert json.loads((tmp_path / "out" / "config.json").read_text())["model_type"] == "xlnet"
    assert allmask.load(tmp_path / "out").config == first.config


def test_names_there_and_back():
    with torch.device("meta"):
        ours = Model(TINY, ["lm"]).state_dict()
    theirs = XLNET.to_theirs(dict(ours), TINY.layers)
    back = XLNET.to_ours(theirs, TINY.layers)
    assert {name: x.shape for name, x in back.items()} == {name: x.shape for name, x in ours.items()}
    drawn = {name: torch.randn(x.shape) for name, x in ours.items()}
    again = XLNET.to_ours(XLNET.to_theirs(drawn, TINY.layers), TINY.layers)
    assert all(torch.equal(again[name], x) for name, x in drawn.items())


def test_settings_of_the_published_models(tmp_path):
    """As xlnet-base-cased has them, with what only other programs read."""
    converted(theirs_of(), tmp_path / "xlnet")
    file = tmp_path / "xlnet" / "config.json"
    published = {
        "architectures": ["XLNetLMHeadModel"], "attn_type": "bi", "bi_data": False, "clamp_len": -1, "d_head": 8,
        "dropout": 0.1, "end_n_top": 5, "ff_activation": "gelu", "layer_norm_eps": 1e-12, "mem_len": None,
        "pad_token_id": 5, "reuse_len": None, "same_length": False, "start_n_top": 5, "summary_activation": "tanh",
        "summary_last_dropout": 0.1, "summary_type": "last", "summary_use_proj": True, "untie_r": True,
        "task_specific_params": {"text-generation": {"do_sample": True, "max_length": 250}},
    }  # fmt: skip
    sizes = {name: SIZES[name] for name in ("vocab_size", "d_model", "n_layer", "n_head", "d_inner")}
    file.write_text(json.dumps({"model_type": "xlnet", "initializer_range": 0.2, **sizes, **published}))
    shape = {"vocab_size": 60, "width": 32, "layers": 3, "heads": 4, "ffn_width": 48, "init_std": 0.2}
    assert allmask.load(tmp_path / "xlnet").config == replace(PRESETS["xlnet-base"](), **shape)


@pytest.mark.parametrize(
    "change, words",
    [
        ({"attn_type": "both"}, "attn_type"),
        ({"bi_data": True}, "bi_data"),
        ({"attn_type": "uni", "same_length": True}, "same_length"),
        ({"clamp_len": "far"}, "clamp_len"),
        ({"n_head": None}, "n_head"),
        ({"untie_r": False}, "untie_r"),
    ],
)
def test_unsupported_settings_are_refused(change, words, tmp_path):
    converted(theirs_of(), tmp_path / "xlnet")
    file = tmp_path / "xlnet" / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    with pytest.raises(CheckpointError) as told:
        allmask.load(tmp_path / "xlnet")
    assert words in f"{told.value.message} {told.value.hint}"


# ---- sizes and beginnings ----------------------------------------------------------------------------------


@pytest.mark.parametrize("preset, heads, count", [
    ("xlnet-base", [], 116_718_336), ("xlnet-base", ["lm"], 116_750_336), ("xlnet-large", ["lm"], 360_300_800),
])  # fmt: skip
def test_exact_parameter_counts(preset, heads, count):
    with torch.device("meta"):
        model = Model(PRESETS[preset](), heads)
    assert sum(parameter.numel() for parameter in model.parameters()) == count


def test_fresh_weights_have_the_sizes_of_transformers():
    torch.manual_seed(0)
    sizes = {"vocab_size": 400, "d_model": 128, "n_layer": 1, "n_head": 4, "d_inner": 256}
    theirs = XLNetLMHeadModel(XLNetConfig(**sizes)).state_dict()
    small = replace(PRESETS["xlnet-tiny"](), vocab_size=400, layers=1, heads=4, ffn_width=256)
    found = Model.fresh(small, ["lm"], torch.Generator().manual_seed(0)).state_dict()
    named = {name.removeprefix("transformer."): x for name, x in theirs.items() if name != "lm_loss.weight"}
    expected = XLNET.to_ours(named, 1)
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert float(found[name].std()) == pytest.approx(float(tensor.std()), rel=0.25, abs=1e-6), name


# ---- long texts --------------------------------------------------------------------------------------------


def test_long_texts_in_segments_surprise_as_transformers_says(folders):
    """With a memory of 5 tokens, in segments of 4; theirs keeps hidden states, from which it makes the same keys."""
    theirs, ours = folders
    ids, mems, expected = draw_ids(1, 15)[0], None, []
    for row in ids[None].split(4, dim=1):
        tokens = row.shape[1]
        told = {"perm_mask": torch.ones(tokens, tokens).triu()[None], "target_mapping": torch.eye(tokens)[None]}
        with torch.no_grad():
            out = theirs(row, mems=mems, use_mems=True, **told)
        mems = [mem[-5:] for mem in out.mems]
        expected.append(-out.logits.log_softmax(-1).gather(-1, row[..., None])[0, :, 0])
    found = surprisals(ours, ids, length=4, memory=5)
    torch.testing.assert_close(found, torch.cat(expected)[1:], atol=1e-5, rtol=0)
    sizes = {"vocab_size": 9, "width": 8, "heads": 2, "ffn_width": 8, "layers": 1, "max_positions": 8}
    short = Model.fresh(replace(PRESETS["bert-base"](), **sizes), ["lm"])
    with pytest.raises(UsageError, match="segments of 9 tokens: this model has 8 positions"):
        surprisals(short, torch.arange(20) % 7, length=9, query=1)
    assert perplexity(ours, ids, 4, 5) == pytest.approx(float(found.double().mean().exp()), rel=1e-5)


# ---- writing -----------------------------------------------------------------------------------------------


def test_blanks_are_filled_in_any_order_as_the_two_streams_say(folders):
    """Greedily, each the likeliest by transformers' `perm_mask` and `target_mapping` of what is known by then."""
    theirs, ours = folders
    row, order = [7, None, 9, None, None, 4, 3], [4, 1, 3]
    [(filled, hypothesis)] = fill(ours, row, order)
    known, total = list(row), 0.0
    for number, place in enumerate(order):
        ids = torch.tensor([[0 if token is None else token for token in known]])
        when = torch.tensor([[order.index(p) + 1 if p in order else 0 for p in range(7)]])
        seen = Mask.permutation(when).visible() & ~(torch.eye(7, dtype=torch.bool) & (when > 0)[..., None])
        target = torch.nn.functional.one_hot(torch.tensor([[place]]), 7).float()
        with torch.no_grad():
            scores = theirs(ids, perm_mask=(~seen).float(), target_mapping=target).logits[0, 0].log_softmax(-1)
        known[place] = int(scores.argmax())
        total += float(scores.max())
        assert hypothesis.tokens[number] == known[place]
    assert filled == known and hypothesis.log_probability == pytest.approx(total, abs=1e-4)
