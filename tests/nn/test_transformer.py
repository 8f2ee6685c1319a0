"""The body keeps the mask's promises: dependence, order, packing, padding, caching, counts."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from allmask import presets
from allmask.decoding import Decoding, MaskWriter, generate
from allmask.errors import UsageError
from allmask.mask import Mask
from allmask.model import Model
from allmask.nn.attention import Route
from allmask.nn.cache import Cache
from allmask.nn.layers import Sinusoidal
from allmask.nn.relative_attention import sinusoids
from allmask.nn.transformer import Transformer
from tests.relatives import relatives

SMALL = {"vocab_size": 50, "width": 16, "heads": 2, "ffn_width": 32, "layers": 3, "max_positions": 32}
CONFIGS = {
    "bert": replace(presets.bert_base(), **SMALL),
    "gpt2": replace(presets.gpt2(), **SMALL),
    "rms": replace(presets.gpt2(), **SMALL, norm="rms", activation="relu"),
    "sinusoidal": replace(presets.transformer_base(), **SMALL, decoder_layers=0),
    "relative": replace(presets.t5_small(), **SMALL, decoder_layers=0, head_width=4, buckets=8, bucket_distance=6),
    **relatives(SMALL, "roberta", "albert", "roformer", "nezha"),
}


def body(name="bert", seed=0, dtype=torch.float64):
    torch.manual_seed(seed)
    model = Transformer(CONFIGS[name]).to(dtype).eval()
    for parameter in model.parameters():  # large weights: dependence must show above rounding
        torch.nn.init.normal_(parameter, std=0.3)
    return model


def draw_ids(rows, tokens, seed=0):
    return torch.randint(1, 50, (rows, tokens), generator=torch.Generator().manual_seed(seed))


def lengths_to_valid(lengths, total=None):
    return torch.arange(total or max(lengths)) < torch.tensor(lengths)[:, None]


VALID = lengths_to_valid([6, 4])
TARGET = torch.tensor([[0, 0, 0, 1, 1, 1], [0, 0, 1, 1, 0, 0]]).bool()
RANK = torch.tensor([[3, 1, 5, 0, 2, 4], [2, 0, 3, 1, 4, 5]])
CONSTRUCTORS = {
    "bidirectional": Mask.bidirectional(VALID),
    "causal": Mask.causal(VALID),
    "reverse": Mask.reverse(VALID),
    "prefix": Mask.prefix(TARGET, VALID),
    "turns": Mask.turns(torch.tensor([[0, 1, 1, 0, 0, 1], [1, 0, 0, 1, 1, 1]]).bool(), VALID),
    "permutation": Mask.permutation(RANK, VALID),
    "packed": Mask.prefix(
        torch.tensor([[0, 1, 1, 0, 0, 1]] * 2).bool(), VALID, document=torch.tensor([[0, 0, 0, 1, 1, 1]] * 2)
    ),
    "windowed": Mask.causal(VALID, window=2),
    "matrix": Mask.from_matrix(torch.rand(2, 6, 6, generator=torch.Generator().manual_seed(1)) < 0.3),
}


def measured_dependence(model, mask, tokens=6):
    """(B, Q, K): True where the gradient of output q with respect to input k is not zero."""
    x = torch.randn(len(mask), tokens, model.config.width, dtype=torch.float64, requires_grad=True)
    model.embedding.tokens = torch.nn.Identity()  # hand it embeddings, whose gradients can be asked for
    out = model.run(x, Route.find(mask))
    direction = torch.randn(model.config.width, dtype=torch.float64)
    rows = [torch.autograd.grad((out[:, q] @ direction).sum(), x, retain_graph=True)[0] for q in range(tokens)]
    return torch.stack(rows, dim=1).abs().amax(-1) > 1e-12


def reach(visible, layers):
    """What can flow to each position through `layers` of reading and residual connections."""
    step = (visible | torch.eye(visible.shape[1], dtype=torch.bool)).float()
    return torch.linalg.matrix_power(step, layers) > 0


@pytest.mark.parametrize("family", CONFIGS)
@pytest.mark.parametrize("name", CONSTRUCTORS)
def test_dependence_after_three_layers_is_what_the_mask_says(name, family):
    mask = CONSTRUCTORS[name]
    dependence = measured_dependence(body(family), mask)
    assert torch.equal(dependence, reach(mask.visible(), 3))
    if name not in ("windowed", "matrix"):  # an order is transitive: depth adds nothing but the residual's own token
        assert torch.equal(dependence, mask.visible() | torch.eye(6, dtype=torch.bool))


@pytest.mark.parametrize("family", CONFIGS)
def test_a_permuted_mask_is_a_shuffled_input_under_the_causal_mask(family):
    model, ids, rank = body(family), draw_ids(1, 6), torch.tensor([[3, 1, 5, 0, 2, 4]])
    by_mask = model(ids, Mask.permutation(rank))
    shuffle = rank[0].argsort()
    by_input = model(ids[:, shuffle], Mask.causal(torch.ones(1, 6).bool()), positions=shuffle[None])
    torch.testing.assert_close(by_mask[:, shuffle], by_input, atol=1e-12, rtol=0)
    mask = Mask.permutation(rank)
    in_place = model.run(model.embed(ids, mask, None, None), Route.find(mask))
    torch.testing.assert_close(by_mask, in_place, atol=1e-12, rtol=0)  # the model's own sorting, against the plain mask


def make_mask(kind, lengths, total=None):
    valid = lengths_to_valid(lengths, total)
    if kind == "prefix":
        starts = torch.tensor([max(1, n // 2) for n in lengths])[:, None]
        return Mask.prefix((torch.arange(valid.shape[1]) >= starts) & valid, valid)
    if kind == "permutation":
        return Mask.permutation(torch.arange(valid.shape[1]).flip(0).expand_as(valid) * 7 % 11, valid)
    return getattr(Mask, kind)(valid)


KINDS = ["bidirectional", "causal", "reverse", "prefix", "permutation"]


@settings(max_examples=40, deadline=None)
@given(
    st.sampled_from(list(CONFIGS)),
    st.sampled_from(KINDS),
    st.lists(st.integers(1, 9), min_size=1, max_size=4),
    st.integers(0, 3),
)
def test_packed_equals_padded_equals_one_by_one(family, kind, lengths, extra):
    model = body(family)
    total = max(lengths) + extra
    ids, mask = draw_ids(len(lengths), total), make_mask(kind, lengths, total)
    segments = draw_ids(len(lengths), total, seed=1) % 2
    padded = model(ids, mask, segments=segments)
    alone = [
        model(ids[i : i + 1, :n], mask[i : i + 1, :n], segments=segments[i : i + 1, :n])[0]
        for i, n in enumerate(lengths)
    ]
    for i, n in enumerate(lengths):
        torch.testing.assert_close(padded[i, :n], alone[i], atol=1e-10, rtol=0)
        assert padded[i, n:].abs().sum() == 0
    document = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))[None]
    joined = Mask.packed(Mask.cat([mask[i : i + 1, :n] for i, n in enumerate(lengths)]), document)
    row = lambda x: torch.cat([x[i, :n] for i, n in enumerate(lengths)])[None]  # noqa: E731
    torch.testing.assert_close(model(row(ids), joined, segments=row(segments))[0], torch.cat(alone), atol=1e-10, rtol=0)


@settings(max_examples=30, deadline=None)
@given(st.sampled_from(list(CONFIGS)), st.data())
def test_cached_equals_full(family, data):
    model, lengths = body(family), data.draw(st.lists(st.integers(2, 8), min_size=1, max_size=3))
    kind, window = data.draw(st.sampled_from(["causal", "prefix"])), data.draw(st.sampled_from([None, 3]))
    mask = replace(make_mask(kind, lengths), window=window)
    ids = draw_ids(len(lengths), mask.shape[1])
    full = model(ids, mask)
    first = max(1, max(lengths) // 2) if kind == "prefix" else data.draw(st.integers(1, max(lengths)))
    cuts = sorted({0, first, *data.draw(st.lists(st.integers(first, max(lengths)), max_size=4)), max(lengths)})
    cache, parts = Cache(), []
    for start, stop in pairwise(cuts):
        hidden, cache = model.step(ids[:, start:stop], mask[:, start:stop], cache)
        parts.append(hidden)
    out = torch.cat(parts, dim=1)
    torch.testing.assert_close(out[mask.valid], full[mask.valid], atol=1e-10, rtol=0)


def test_any_order_generation_can_be_cached():
    model, ids, rank = body("gpt2"), draw_ids(1, 5), torch.tensor([[3, 1, 4, 0, 2]])
    mask, cache = Mask.permutation(rank), Cache()
    full = model(ids, mask)
    for place in rank[0].argsort().tolist():
        hidden, cache = model.step(ids[:, place : place + 1], mask[:, place : place + 1], cache)
        torch.testing.assert_close(hidden[:, 0], full[:, place], atol=1e-10, rtol=0)


def test_a_cache_refuses_tokens_that_earlier_ones_should_have_seen():
    model, ids, mask = body(), draw_ids(1, 4), Mask.bidirectional(torch.ones(1, 4).bool())
    _, cache = model.step(ids[:, :2], mask[:, :2], Cache())
    with pytest.raises(UsageError, match="no longer valid"):
        model.step(ids[:, 2:], mask[:, 2:], cache)


@pytest.mark.parametrize("family", CONFIGS)
@pytest.mark.parametrize("name", CONSTRUCTORS)
def test_hidden_states_at_some_positions_are_those_of_all(name, family):
    mask, model, ids = CONSTRUCTORS[name], body(family), draw_ids(2, 6)
    for rows in (slice(None), slice(0, 1)):
        where = torch.rand(mask[rows].shape, generator=torch.Generator().manual_seed(2)) < 0.4
        expected = model(ids[rows], mask[rows])[where]
        torch.testing.assert_close(model.forward_at(where, ids[rows], mask[rows]), expected, atol=1e-12, rtol=0)


def test_a_batch_of_nothing_but_padding_is_zeros():
    hidden = body()(draw_ids(2, 3), Mask.causal(torch.zeros(2, 3).bool()))
    assert hidden.shape == (2, 3, 16) and hidden.abs().sum() == 0


def test_attention_weights_of_every_layer():
    model, mask = body("gpt2"), Mask.causal(VALID)
    weights = model.weights(draw_ids(2, 6), mask)
    assert len(weights) == 3 and weights[0].shape == (2, 2, 6, 6)
    for layer in weights:
        assert torch.equal(layer.sum(1) > 0, mask.visible())
        sums = layer.sum(-1)[:, 0]
        torch.testing.assert_close(sums, mask.valid.double(), atol=1e-12, rtol=0)


def test_batch_and_instance_norm_are_built_and_break_the_promise():
    """They normalise over other tokens: outputs then depend on what the mask hides, which the mask cannot prevent."""
    for norm in ("batch", "instance"):
        torch.manual_seed(0)
        config = replace(CONFIGS["bert"], norm=norm, dropout=0.0, attention_dropout=0.0)
        model = Transformer(config).double().train()
        ids, mask = draw_ids(1, 6), Mask.causal(torch.ones(1, 6).bool())
        changed = ids.clone()
        changed[0, 5] = (ids[0, 5] + 1) % 50
        assert (model(ids, mask) - model(changed, mask))[0, 0].abs().max() > 1e-6


def test_sinusoids_by_the_formula():
    waves = sinusoids(20, 6)
    for position in (0, 1, 7, 19):
        for i in range(3):
            angle = torch.tensor(position / 10000 ** (2 * i / 6), dtype=torch.float64)
            assert abs(waves[position, 2 * i].item() - angle.sin().item()) < 1e-6
            assert abs(waves[position, 2 * i + 1].item() - angle.cos().item()) < 1e-6


def test_sinusoidal_positions_reach_beyond_the_table():
    """The first rows keep their bits; a text that goes on makes the table longer, a position far away does not."""
    made = Sinusoidal(16, 6)
    table, far = made.weight.clone(), sinusoids(100_001, 6)
    assert (
        torch.equal(made(torch.tensor([[0, 15], [3, 3]])), table[torch.tensor([[0, 15], [3, 3]])])
        and len(made.weight) == 16
    )
    distant = made(torch.tensor([2, 100_000, 50_000]))
    assert torch.equal(distant[0], table[2]) and len(made.weight) == 16
    torch.testing.assert_close(distant, far[[2, 100_000, 50_000]], atol=1e-6, rtol=0)
    for last in range(16, 200):
        torch.testing.assert_close(made(torch.tensor([[last]]))[0, 0], far[last], atol=1e-6, rtol=0)
    assert torch.equal(made.weight[:16], table) and 200 <= len(made.weight) <= 400
    with torch.inference_mode():
        made(torch.arange(len(made.weight) + 3))
    assert not made.weight.is_inference()
    assert made(torch.empty(0, dtype=torch.long)).shape == (0, 6)
    half = Sinusoidal(16, 6).bfloat16()
    assert half(torch.arange(40)).dtype == half(torch.tensor([10**6])).dtype == torch.bfloat16


def test_a_sinusoidal_model_reads_texts_longer_than_it_was_built_for():
    short, long = (
        Model.fresh(replace(CONFIGS["sinusoidal"], max_positions=n), ["lm"]).double().eval() for n in (4, 40)
    )
    long.load_state_dict(short.state_dict())
    ids = draw_ids(2, 33)
    torch.testing.assert_close(short(ids).logits, long(ids).logits, atol=1e-6, rtol=0)
    assert torch.equal(short(ids[:, :4]).logits, long(ids[:, :4]).logits)
    [[best]] = generate(MaskWriter(short, Mask.causal), [ids[0, :3].tolist()], Decoding(max_new=9))
    assert (
        best.tokens == generate(MaskWriter(long, Mask.causal), [ids[0, :3].tolist()], Decoding(max_new=9))[0][0].tokens
    )
    assert len(best.tokens) == 9
    with pytest.raises(UsageError, match="position 32 is beyond the 4"):
        Model.fresh(replace(CONFIGS["bert"], max_positions=4))(ids)


@pytest.mark.parametrize("family", [presets.bert_base(), presets.gpt2()], ids=["bert", "gpt2"])
def test_layers_computed_again_on_the_way_back_give_the_same_gradients(family):
    """Bit for bit, dropout and all, and less is remembered meanwhile."""
    small = replace(family, vocab_size=30, width=16, heads=2, ffn_width=64, layers=4, max_positions=32)
    ids, where = torch.arange(24).view(2, 12) % 30, torch.rand(2, 12) < 0.5
    gradients, remembered = [], []
    for recompute in (False, True):
        torch.manual_seed(0)
        model = Transformer(small).train()
        model.recompute = recompute
        kept = []
        torch.manual_seed(1)
        with torch.autograd.graph.saved_tensors_hooks(partial(_keep, kept), lambda x: x):
            loss = model.forward_at(where, ids, Mask.causal(torch.ones_like(ids, dtype=torch.bool))).square().sum()
        loss.backward()
        gradients.append([p.grad for p in model.parameters() if p.grad is not None])
        remembered.append(len(kept))
    assert all(torch.equal(one, other) for one, other in zip(*gradients, strict=True))
    assert remembered[1] < remembered[0] / 2


def _keep(kept: list, x: torch.Tensor) -> torch.Tensor:
    kept.append(x)
    return x
