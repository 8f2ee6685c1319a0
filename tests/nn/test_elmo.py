"""Two language models, one from each end of a text: each by hand, and neither knows what the other does."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from allmask.errors import UsageError
from allmask.mask import Mask
from allmask.mask.audit import audit, our_subject
from allmask.nn.cache import Cache
from allmask.nn.recurrent import ScalarMix
from allmask.training.process_group import SingleProcess
from allmask.training.strategy import strategy_for
from tests.nn.test_recurrent import ELMO, cell_of, draw_ids, model_of, walk

WAYS = {"causal": Mask.causal, "reverse": Mask.reverse, "bidirectional": Mask.bidirectional}


@pytest.mark.parametrize("name", ["causal", "reverse"])
def test_each_language_model_is_a_loop(name):
    model, ids = model_of(ELMO), draw_ids(1, 6)
    hidden = model(ids, WAYS[name](torch.ones(1, 6, dtype=torch.bool))).hidden
    xs = list(model.body.embedding.tokens.weight[ids[0]] * ELMO.width**0.5)
    xs = xs if name == "causal" else xs[::-1]
    for number, layer in enumerate(model.body.layers):
        out = walk(cell_of(layer.right if name == "causal" else layer.left), xs)
        xs = [new + old for new, old in zip(out, xs, strict=True)] if number else out
    torch.testing.assert_close(hidden[0], torch.stack(xs if name == "causal" else xs[::-1]), atol=1e-10, rtol=0)


def test_features_are_those_of_both_language_models():
    model, ids, valid = model_of(ELMO), draw_ids(2, 6), torch.arange(6) < torch.tensor([[6], [4]])
    found = model(ids, Mask.bidirectional(valid)).hidden
    assert found.shape == (2, 6, ELMO.features) and ELMO.features == 2 * 4 * 8
    layers = found.unflatten(-1, (4, 2, 8))
    right, left = (model(ids, WAYS[name](valid)).hidden for name in ("causal", "reverse"))
    torch.testing.assert_close(layers[:, :, -1, 0], right, atol=1e-12, rtol=0)
    torch.testing.assert_close(layers[:, :, -1, 1], left, atol=1e-12, rtol=0)
    embedded = model.body.embedding.tokens(ids) * 8**0.5 * valid[..., None]
    torch.testing.assert_close(layers[:, :, 0], torch.stack([embedded] * 2, 2), atol=1e-12, rtol=0)
    shallow = model.keep_layers(1)(ids, Mask.bidirectional(valid)).hidden.unflatten(-1, (2, 2, 8))
    torch.testing.assert_close(layers[:, :, :2], shallow, atol=1e-12, rtol=0)


@pytest.mark.parametrize("name", WAYS)
def test_forward_states_know_nothing_of_the_future_nor_backward_ones_of_the_past(name):
    """By gradients (see audit), and by changing tokens one after another; of features each way for itself."""
    model, mask = model_of(ELMO), WAYS[name](torch.ones(1, 7, dtype=torch.bool))
    found = audit(our_subject(model), mask, torch.Generator().manual_seed(0))
    assert found.holds and torch.equal(found.depends, mask.visible()[0])
    ids = draw_ids(1, 7)
    before = model(ids, mask).hidden[0]
    past = torch.ones(7, 7, dtype=torch.bool).tril()
    for place in range(7):
        other = ids.clone()
        other[0, place] = other[0, place] % 49 + 1
        changed = model(other, mask).hidden[0] != before
        if name != "bidirectional":
            assert torch.equal(changed.any(-1), mask.visible()[0, :, place])
            continue
        ways = changed.unflatten(-1, (4, 2, 8))[:, 1:].any(-1).any(1)
        assert torch.equal(ways[:, 0], past[:, place]) and torch.equal(ways[:, 1], past.T[:, place])


@settings(max_examples=20, deadline=None)
@given(st.sampled_from(list(WAYS)), st.lists(st.integers(2, 7), min_size=1, max_size=4), st.integers(0, 2))
def test_elmo_packed_equals_padded_equals_one_by_one(name, lengths, extra):
    model, make = model_of(ELMO), WAYS[name]
    mask = make(torch.arange(max(lengths) + extra) < torch.tensor(lengths)[:, None])
    ids = draw_ids(*mask.shape)
    padded = model(ids, mask).hidden
    cut = [(slice(row, row + 1), slice(0, n)) for row, n in enumerate(lengths)]
    alone = [model(ids[where], mask[where]).hidden[0] for where in cut]
    for (row, tokens), states in zip(cut, alone, strict=True):
        torch.testing.assert_close(padded[row, tokens][0], states, atol=1e-10, rtol=0)
        assert padded[row, tokens.stop :].abs().sum() == 0
    document = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))[None]
    joined = replace(Mask.cat([mask[where] for where in cut]), group=document)
    row = torch.cat([ids[where] for where in cut], dim=1)
    torch.testing.assert_close(model(row, joined).hidden[0], torch.cat(alone), atol=1e-10, rtol=0)


@pytest.mark.parametrize("name, first", [("causal", 1), ("causal", 2), ("reverse", 2)])
@pytest.mark.parametrize("cuts", [(), (3, 4, 5), (4,)])
def test_elmo_cached_equals_full(name, first, cuts):
    """What is read from right to left goes on to the left; it takes two tokens to tell the direction."""
    model, ids = model_of(ELMO), draw_ids(2, 6)
    mask = WAYS[name](torch.ones(2, 6, dtype=torch.bool))
    full = model(ids, mask).hidden
    spans = list(pairwise([0, first, *cuts, 6]))
    spans = spans if name == "causal" else [(6 - stop, 6 - start) for start, stop in spans]
    cache, found = Cache(), torch.zeros_like(full)
    for start, stop in spans:
        out = model(ids[:, start:stop], mask[:, start:stop], cache=cache)
        cache, found[:, start:stop] = out.cache, out.hidden
    torch.testing.assert_close(found, full, atol=1e-10, rtol=0)
    one = cache.select(torch.tensor([1, 1, 0]))
    assert one.mask.shape == (3, 1) and torch.equal(one.states[0][0][0], cache.states[0][0][1])


def test_elmo_refuses_what_it_cannot_read():
    model, ids, valid = model_of(ELMO), draw_ids(1, 4), torch.ones(1, 4, dtype=torch.bool)
    for mask in (
        Mask.permutation(torch.tensor([[2, 0, 1, 3]])),
        Mask.prefix(torch.tensor([[False, False, True, True]])),
    ):
        with pytest.raises(UsageError, match="from left to right, from right to left, or both ways"):
            model(ids, mask)
    with pytest.raises(UsageError, match="read both ways"):
        model(ids, Mask.bidirectional(valid), cache=Cache())
    cache = model(ids[:, :2], Mask.causal(valid)[:, :2], cache=Cache()).cache
    later = replace(Mask.reverse(valid)[:, :2], order=torch.tensor([[9, 8]]))
    with pytest.raises(UsageError, match="other direction"):
        model(ids[:, :2], later, cache=cache)
    with pytest.raises(UsageError, match="one direction"):
        _ = model(ids, Mask.bidirectional(valid)).logits


def test_a_mix_is_a_weighted_mean_times_a_gain():
    mix = ScalarMix(3).double()
    features = torch.randn(5, 12, generator=torch.Generator().manual_seed(0)).double()
    torch.testing.assert_close(mix(features), features.view(5, 3, 4).mean(1), atol=1e-12, rtol=0)
    mix.layers_bias.data, mix.gain.data = torch.tensor([0.0, 1.0, -2.0]).double(), torch.tensor([1.5]).double()
    weights = [1.0, 2.718281828459045, 0.1353352832366127]
    expected = sum(w * part for w, part in zip(weights, features.view(5, 3, 4).unbind(1), strict=True))
    torch.testing.assert_close(mix(features), 1.5 * expected / sum(weights), atol=1e-12, rtol=0)


def test_a_recurrent_model_is_not_sharded():
    with pytest.raises(UsageError, match="cannot be sharded"):
        strategy_for(model_of(ELMO), replace(SingleProcess(), sharded=True))


def test_a_single_token_is_not_continued_leftwards():
    """It was read by the model that reads to the right, so its state says nothing to the other one."""
    model = model_of(ELMO)
    one, before = (Mask(*(torch.tensor([[value]]) for value in values)) for values in ((0, 0, 5), (1, 0, 4)))
    cache = model(torch.tensor([[3]]), one, cache=Cache()).cache
    with pytest.raises(UsageError, match="the other direction"):
        model(torch.tensor([[4]]), before, cache=cache)
