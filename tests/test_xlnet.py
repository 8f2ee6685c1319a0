"""XLNet equals transformers': both streams, padding, memory, segments; and it keeps the mask's promises."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import XLNetConfig, XLNetLMHeadModel, XLNetModel

import allmask
from allmask.attention import Route
from allmask.audit import audit, our_subject
from allmask.checkpoints.xlnet import XLNET
from allmask.config import PRESETS
from allmask.distances import ByDistance, Distances, shift
from allmask.errors import CheckpointError
from allmask.masks import Mask
from allmask.model import Model
from allmask.transformer import Cache

SIZES = {"vocab_size": 60, "d_model": 32, "n_layer": 3, "n_head": 4, "d_inner": 48, "initializer_range": 0.2}
KINDS = {
    "plain": {},
    "relu, one way": {"ff_activation": "relu", "attn_type": "uni"},
    "clamped": {"clamp_len": 3},
    "untied": {"tie_word_embeddings": False},
    "one way, clamped": {"attn_type": "uni", "clamp_len": 2, "layer_norm_eps": 1e-5},
}
TINY = replace(PRESETS["xlnet-tiny"](), vocabulary=50, width=16, heads=2, inner=32, layers=3, max_positions=32)


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


def both_streams(model, ids, mask, segments=None, asked=None, cache=None):
    """What the content stream says, and what the query stream says at the places asked for (all)."""
    told = {} if segments is None else {"segments": segments}
    content, cache = model.body.step(ids, mask, Cache() if cache is None else cache, **told)
    asked = torch.arange(ids.shape[1]) if asked is None else asked
    told = {} if segments is None else {"segments": segments[:, asked]}
    return content, model.body.peek(torch.zeros_like(ids[:, asked]), mask[:, asked], cache, **told), cache


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


def after(mask, cache):
    """The mask of what comes next: all that is remembered is older, and places go on."""
    last = cache.mask
    return replace(mask, order=mask.order + last.order.max() + 1, place=mask.place + last.place.max() + 1)


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
        mask = mask if cache.mask is None else after(mask, cache)
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
        mask = replace(after(Mask.causal(valid[:, :4]), cache), window=6)
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
    shape = {"vocabulary": 60, "width": 32, "layers": 3, "heads": 4, "inner": 48, "init_std": 0.2}
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
def test_settings_that_cannot_be(change, words, tmp_path):
    converted(theirs_of(), tmp_path / "xlnet")
    file = tmp_path / "xlnet" / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    with pytest.raises(CheckpointError) as told:
        allmask.load(tmp_path / "xlnet")
    assert words in f"{told.value.message} {told.value.hint}"


# ---- promises ----------------------------------------------------------------------------------------------


def model_of(**changes):
    torch.manual_seed(0)
    model = Model(replace(TINY, **changes), ["lm"]).double().eval()
    for parameter in model.parameters():  # large weights: dependence must show above rounding
        torch.nn.init.normal_(parameter, std=0.4)
    return model


@settings(max_examples=8, deadline=None)
@given(st.permutations(range(6)))
def test_the_content_stream_depends_on_what_the_mask_shows(rank):
    mask = Mask.permutation(torch.tensor([rank]))
    found = audit(our_subject(model_of()), mask, torch.Generator().manual_seed(0))
    assert found.holds and torch.equal(found.depends, mask.visible()[0])


@settings(max_examples=8, deadline=None)
@given(st.permutations(range(6)))
def test_the_query_stream_depends_on_what_is_older_and_never_on_itself(rank):
    model, ids = model_of(), torch.arange(6)[None] + 3
    mask = Mask.permutation(torch.tensor([rank]))
    _, query, _ = both_streams(model, ids, mask)
    embedding = model.body.embedding.tokens.weight
    rows = []
    for place in range(6):
        (gradient,) = torch.autograd.grad(query[0, place, 0], embedding, retain_graph=True)
        rows.append((gradient[ids[0]] != 0).any(-1))
    assert torch.equal(torch.stack(rows), mask.visible(strict=True)[0])


def lengths_to_mask(lengths, kind, rng):
    longest = max(lengths)
    valid = torch.arange(longest) < torch.tensor(lengths)[:, None]
    rank = torch.stack([torch.randperm(longest, generator=rng) for _ in lengths])
    if kind == "permutation":
        return Mask.permutation(rank, valid)
    return Mask.prefix((torch.arange(longest) >= 2).expand_as(valid), valid) if kind == "prefix" else Mask.causal(valid)


@settings(max_examples=20, deadline=None)
@given(
    st.lists(st.integers(1, 7), min_size=1, max_size=4),
    st.sampled_from(["permutation", "prefix", "causal"]),
    st.integers(0, 99),
)
def test_packed_equals_padded_equals_one_by_one(lengths, kind, seed):
    rng = torch.Generator().manual_seed(seed)
    model, mask = model_of(clamp=4 * (seed % 2)), lengths_to_mask(lengths, kind, rng)
    ids = torch.randint(0, 50, mask.shape, generator=rng)
    segments = torch.randint(0, 3, mask.shape, generator=rng)
    padded = model(ids, mask, segments).hidden
    cut = [(slice(row, row + 1), slice(0, length)) for row, length in enumerate(lengths)]
    alone = [model(ids[where], mask[where], segments[where]).hidden[0] for where in cut]
    for (row, tokens), states in zip(cut, alone, strict=True):
        torch.testing.assert_close(padded[row, tokens][0], states, atol=1e-10, rtol=0)
    document = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))[None]
    joined = replace(Mask.cat([mask[where] for where in cut]), group=document)
    row, kinds = (torch.cat([x[where] for where in cut], dim=1) for x in (ids, segments))
    torch.testing.assert_close(model(row, joined, kinds).hidden[0], torch.cat(alone), atol=1e-10, rtol=0)


@settings(max_examples=15, deadline=None)
@given(st.permutations(range(8)), st.integers(1, 7), st.integers(0, 99), st.booleans())
def test_cached_equals_full_for_both_streams(rank, cut, seed, branched):
    """Tokens are read by their order, so places come in any order; the rest one by one or at once."""
    rng = torch.Generator().manual_seed(seed)
    model, by_order = model_of(), torch.tensor(rank).argsort()
    whole = Mask.permutation(torch.tensor([rank, rank]))
    ids, segments = (torch.randint(0, n, (2, 8), generator=rng) for n in (50, 3))
    content, query, _ = both_streams(model, ids, whole, segments)
    mask, ids, segments = whole[:, by_order], ids[:, by_order], segments[:, by_order]
    first = slice(0, cut)
    if branched:
        hidden, cache = model.body.read(ids[:, first], mask[:, first], segments[:, first])
        cache = cache.select(torch.tensor([0, 1]))
    else:
        hidden, cache = model.body.step(ids[:, first], mask[:, first], Cache(), segments=segments[:, first])
    torch.testing.assert_close(hidden, content[:, by_order][:, first], atol=1e-10, rtol=0)
    for place in range(cut, 8):
        one = slice(place, place + 1)
        asked = model.body.peek(ids[:, one], mask[:, one], cache, segments=segments[:, one])
        torch.testing.assert_close(asked, query[:, by_order][:, one], atol=1e-10, rtol=0)
        hidden, cache = model.body.step(ids[:, one], mask[:, one], cache, segments=segments[:, one])
        torch.testing.assert_close(hidden, content[:, by_order][:, one], atol=1e-10, rtol=0)


def test_hidden_states_at_some_positions_and_attention_weights():
    model, rng = model_of(), torch.Generator().manual_seed(0)
    ids, segments = (torch.randint(0, n, (1, 9), generator=rng) for n in (50, 3))
    mask = Mask.causal(torch.ones(1, 9, dtype=torch.bool))
    where = torch.rand(1, 9, generator=rng) < 0.5
    expected = model(ids, mask, segments).hidden[where]
    torch.testing.assert_close(model.body.at(where, ids, mask, segments), expected, atol=1e-10, rtol=0)
    for weights in model.body.weights(ids, mask, segments=segments):
        assert bool((weights[0].sum(-1) - 1).abs().max() < 1e-9) and bool((weights[0] > 0).eq(mask.visible()).all())


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 5), st.integers(1, 6), st.integers(-3, 3))
def test_the_shift_takes_each_distance_to_its_pair(queries, keys, offset):
    """Scores that are the distance itself, from the longest, which no pair has."""
    places, others = torch.arange(queries) + offset, torch.arange(keys)
    away = places[:, None] - others
    scores = torch.arange(int(away.max()) + 1, int(away.min()) - 1, -1).expand(queries, -1)
    assert torch.equal(shift(scores, keys), away)


@pytest.mark.parametrize("queries", [1, 60])
def test_waves_come_to_queries_or_queries_to_waves(queries):
    """By what is less work; the formula is the same, written out here for each pair."""
    torch.manual_seed(0)
    relate = ByDistance(16, 2, 8).double()
    for parameter in relate.parameters():
        torch.nn.init.normal_(parameter)
    q, keys = torch.randn(1, queries, 2, 8).double(), Mask.causal(torch.ones(1, 70, dtype=torch.bool))
    route = Route.find(replace(keys[:, -queries:], order=keys.order[:, -queries:] + 100), keys)
    with torch.no_grad():
        _, bias = relate(q, route, Distances(16)(route))
    i, j = queries // 2, 33
    away = float(route.queries.place[0, i] - j)
    angle = away * 10000.0 ** (-torch.arange(0, 16, 2).double() / 16)
    wave = torch.cat([angle.sin(), angle.cos()])
    for head in range(2):
        expected = (q[0, i, head] + relate.position_bias[head]) @ relate.position[head] @ wave * 8**-0.5
        assert float(bias[0, head, i, j]) == pytest.approx(float(expected.detach()), abs=1e-5)


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
    small = replace(PRESETS["xlnet-tiny"](), vocabulary=400, layers=1, heads=4, inner=256)
    found = Model.fresh(small, ["lm"], torch.Generator().manual_seed(0)).state_dict()
    named = {name.removeprefix("transformer."): x for name, x in theirs.items() if name != "lm_loss.weight"}
    expected = XLNET.to_ours(named, 1)
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert float(found[name].std()) == pytest.approx(float(tensor.std()), rel=0.25, abs=1e-6), name
