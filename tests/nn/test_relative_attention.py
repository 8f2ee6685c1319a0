"""Attention by distance keeps the mask's promises: dependence, packing, caching, memory; in any precision."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from allmask.decoding import Decoding, MaskWriter, generate
from allmask.decoding.fast.engines import writer_for
from allmask.errors import UsageError
from allmask.inference import freeze
from allmask.inference.segments import following, recent, surprisals
from allmask.mask import Mask
from allmask.mask.audit import audit, our_subject
from allmask.model import Model
from allmask.nn.attention import Route
from allmask.nn.cache import Cache
from allmask.nn.relative_attention import DistanceEncoder, RelativeScores, shift
from allmask.presets import PRESETS

TINY = replace(PRESETS["xlnet-tiny"](), vocab_size=50, width=16, heads=2, ffn_width=32, layers=3, max_positions=32)


def both_streams(model, ids, mask, segments=None, asked=None, cache=None):
    """What the content stream says, and what the query stream says at the places asked for (all)."""
    told = {} if segments is None else {"segments": segments}
    content, cache = model.body.step(ids, mask, Cache() if cache is None else cache, **told)
    asked = torch.arange(ids.shape[1]) if asked is None else asked
    told = {} if segments is None else {"segments": segments[:, asked]}
    return content, model.body.query_stream(torch.zeros_like(ids[:, asked]), mask[:, asked], cache, **told), cache


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
        asked = model.body.query_stream(ids[:, one], mask[:, one], cache, segments=segments[:, one])
        torch.testing.assert_close(asked, query[:, by_order][:, one], atol=1e-10, rtol=0)
        hidden, cache = model.body.step(ids[:, one], mask[:, one], cache, segments=segments[:, one])
        torch.testing.assert_close(hidden, content[:, by_order][:, one], atol=1e-10, rtol=0)


def test_hidden_states_at_some_positions_and_attention_weights():
    model, rng = model_of(), torch.Generator().manual_seed(0)
    ids, segments = (torch.randint(0, n, (1, 9), generator=rng) for n in (50, 3))
    mask = Mask.causal(torch.ones(1, 9, dtype=torch.bool))
    where = torch.rand(1, 9, generator=rng) < 0.5
    expected = model(ids, mask, segments).hidden[where]
    torch.testing.assert_close(model.body.forward_at(where, ids, mask, segments), expected, atol=1e-10, rtol=0)
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
    relate = RelativeScores(16, 2, 8).double()
    for parameter in relate.parameters():
        torch.nn.init.normal_(parameter)
    q, keys = torch.randn(1, queries, 2, 8).double(), Mask.causal(torch.ones(1, 70, dtype=torch.bool))
    route = Route.find(replace(keys[:, -queries:], order=keys.order[:, -queries:] + 100), keys)
    with torch.no_grad():
        _, bias = relate(q, route, DistanceEncoder(16)(route))
    i, j = queries // 2, 33
    away = float(route.queries.position[0, i] - j)
    angle = away * 10000.0 ** (-torch.arange(0, 16, 2).double() / 16)
    wave = torch.cat([angle.sin(), angle.cos()])
    for head in range(2):
        expected = (q[0, i, head] + relate.position_bias[head]) @ relate.position[head] @ wave * 8**-0.5
        assert float(bias[0, head, i, j]) == pytest.approx(float(expected.detach()), abs=1e-5)


# ---- memory ------------------------------------------------------------------------------------------------


@settings(max_examples=10, deadline=None)
@given(st.integers(1, 12), st.integers(0, 99))
def test_with_a_memory_of_everything_segments_do_not_matter(length, seed):
    model = model_of(clamp=3 * (seed % 2))
    ids = torch.randint(0, 50, (12,), generator=torch.Generator().manual_seed(seed))
    whole = surprisals(model, ids, length=12)
    torch.testing.assert_close(surprisals(model, ids, length, memory=12), whole, atol=1e-5, rtol=0)
    if length < 11:  # a segment of two tokens at least that comes after another
        without = surprisals(model, ids, length)
        torch.testing.assert_close(without[: length - 1], whole[: length - 1], atol=1e-5, rtol=0)
        assert (without - whole).abs().max() > 1e-4


def test_what_is_remembered_is_older_and_stands_before():
    valid = torch.ones(2, 3, dtype=torch.bool)
    first = Mask.permutation(torch.tensor([[2, 0, 1], [0, 1, 2]]))
    cache = Cache(first)
    mask = following(cache, Mask.bidirectional(valid))
    assert mask.order.tolist() == [[3] * 3] * 2 and mask.position.tolist() == [[3, 4, 5]] * 2
    assert mask.may_follow(first) and bool(mask.visible(first).all())
    assert following(Cache(), first) == first and recent(Cache(first), 2).mask == first[:, 1:]
    assert recent(cache, 0) == Cache()


def test_a_memory_that_a_model_has_no_places_for_is_refused():
    bert = Model(
        replace(PRESETS["bert-tiny"](), vocab_size=50, width=16, heads=2, ffn_width=32, max_positions=8), ["lm"]
    )
    ids = torch.arange(12)
    with pytest.raises(UsageError, match="no learned query vector"):
        surprisals(bert, ids, 4)
    with pytest.raises(UsageError, match="8 positions"):
        surprisals(bert, ids, 4, memory=4, query=1)
    assert surprisals(bert.eval(), ids, 4, query=1).shape == (11,)


# ---- frozen and fine-tuned ---------------------------------------------------------------------------------


@pytest.mark.parametrize("precision", ["fp32", "bf16", "int8"])
def test_frozen_copies_say_the_same_in_their_precision(precision):
    model = Model.fresh(replace(TINY, width=32, init_std=0.1), ["lm"], torch.Generator().manual_seed(0)).eval()
    ids, segments = (
        torch.randint(0, 50, (2, 9), generator=torch.Generator().manual_seed(1)),
        torch.tensor([[0] * 5 + [1] * 4] * 2),
    )
    mask = Mask.causal(torch.arange(9) < torch.tensor([[9], [6]]))
    with torch.no_grad():
        expected = model(ids, mask, segments).hidden
        found = freeze(model, precision)(ids, mask, segments).hidden.float()
    assert (found - expected).abs().max() < {"fp32": 1e-5, "bf16": 0.1, "int8": 0.1}[precision]


def test_fine_tuned_under_a_prefix_mask_it_writes_like_any_body():
    """The fast writer leaves it to the slow one, whose cache reads distances."""
    model = Model.fresh(replace(TINY, init_std=0.3), ["lm"], torch.Generator().manual_seed(0)).eval()
    prompts, rules = [[5, 9, 7], [4, 8, 8, 20, 31]], Decoding(max_new=6, beams=2)
    plain = generate(MaskWriter(model), prompts, rules)
    fast = generate(writer_for(model, "fp32"), prompts, rules)
    assert [[one.tokens for one in found] for found in plain] == [[one.tokens for one in found] for found in fast]
    row = torch.tensor([[*prompts[0], *plain[0][0].tokens]])
    is_target = (torch.arange(9) >= 3)[None]
    with torch.no_grad():
        scores = model(row, Mask.prefix(is_target), is_target.long()).logits[0, 2:8].log_softmax(-1)
    total = scores.gather(1, row[0, 3:, None]).sum()
    assert plain[0][0].log_probability == pytest.approx(float(total), abs=1e-4)
