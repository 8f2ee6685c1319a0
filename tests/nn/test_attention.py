"""Every lowering of a mask equals the dense reference, forward and backward; nothing forbidden is ever touched."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.attention import flex_attention

from allmask.mask import Mask
from allmask.model import Model
from allmask.nn import attention
from allmask.nn.attention import Attention, Route, attend, attention_weights, flex_attend
from allmask.presets import bert_tiny

HEADS, WIDTH = 3, 4


def reference(q, k, v, visible, bias=None):
    """Attention by the book, in float64, one query at a time, over the visible keys only."""
    q, k, v = (x.double() for x in (q, k, v))
    out = torch.zeros(*q.shape[:-1], v.shape[-1], dtype=torch.float64) + 0.0 * q.sum()  # always part of the graph
    for b, i in torch.cartesian_prod(torch.arange(q.shape[0]), torch.arange(q.shape[1])).tolist():
        seen = visible[b, i].nonzero()[:, 0]
        if len(seen) == 0:
            continue
        for h in range(q.shape[2]):
            scores = k[b, seen, h] @ q[b, i, h] / math.sqrt(q.shape[-1])
            if bias is not None:
                scores = scores + bias.double().expand(q.shape[0], q.shape[2], q.shape[1], k.shape[1])[b, h, i, seen]
            out[b, i, h] = scores.softmax(0) @ v[b, seen, h]
    return out


def draw_qkv(rows, queries, keys, seed=0):
    rng = torch.Generator().manual_seed(seed)
    shape = (HEADS, WIDTH)
    return [torch.randn(rows, n, *shape, generator=rng, requires_grad=True) for n in (queries, keys, keys)]


def valid(*lengths, total=None):
    total = total or max(lengths)
    return torch.arange(total) < torch.tensor(lengths)[:, None]


def documents(*lengths):
    return torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))[None]


def packed(order_of_each, lengths):
    order = torch.tensor([[when for n in lengths for when in order_of_each(n)]])
    return Mask(order, documents(*lengths))


ORDERS = {
    "full": lambda n: [0] * n,
    "causal": lambda n: list(range(n)),
    "prefix": lambda n: [0] * (n // 2 + 1) + list(range(1, n - n // 2)),
    "dense": lambda n: list(range(n))[::-1] if n > 1 else [0],
}

MASKS = {
    "bidirectional": (Mask.bidirectional(valid(5, 5)), ["full"]),
    "causal": (Mask.causal(valid(5, 5)), ["causal"]),
    "prefix": (Mask.prefix(torch.tensor([[0, 0, 0, 1, 1]]).bool().expand(2, -1)), ["prefix"]),
    "two different prefixes": (Mask.prefix(torch.tensor([[0, 0, 0, 1, 1], [0, 1, 1, 1, 1]]).bool()), ["dense"]),
    "reverse": (Mask.reverse(valid(5)), ["dense"]),
    "permutation": (Mask.permutation(torch.tensor([[4, 1, 3, 0, 2]])), ["dense"]),
    "padded": (Mask.causal(valid(3, 5)), ["dense"]),
    "window": (Mask.causal(valid(6, 6), window=2), ["dense"]),
    "packed full": (packed(ORDERS["full"], [3, 3, 2]), ["full", "full"]),
    "packed causal": (packed(ORDERS["causal"], [3, 3, 4]), ["causal", "causal"]),
    "packed prefix": (packed(ORDERS["prefix"], [4, 4, 6]), ["prefix", "prefix"]),
    "packed reversed": (packed(ORDERS["dense"], [3, 3]), ["dense", "dense"]),
    "packed window": (Mask.packed(Mask.causal(valid(7), window=2), documents(3, 4)), ["dense", "dense"]),
    "packed and padded": (
        Mask.packed(Mask.bidirectional(valid(5, total=7)), documents(2, 3, 2)),
        ["full", "full", "empty"],
    ),
    "interleaved documents": (Mask.packed(Mask.causal(valid(4)), torch.tensor([[0, 1, 0, 1]])), ["dense"]),
    "matrix": (Mask.from_matrix(torch.tensor([[1, 0, 1], [0, 0, 0], [1, 1, 0]]).bool()), ["dense"]),
}


@pytest.mark.parametrize("name", MASKS)
def test_each_lowering_is_chosen_and_equals_the_reference(name):
    mask, kinds = MASKS[name]
    assert [block.kind for block in Route.find(mask).blocks] == kinds
    check_equal(mask)


def check_equal(mask, keys=None, strict=False, bias=None):
    rows, queries = mask.shape
    q, k, v = draw_qkv(rows, queries, (keys or mask).shape[1])
    out = attend(q, k, v, Route.find(mask, keys, strict), bias=bias)
    expected = reference(q, k, v, mask.visible(keys, strict), bias)
    torch.testing.assert_close(out.double(), expected, atol=2e-6, rtol=0)
    cotangent = torch.randn(out.shape, generator=torch.Generator().manual_seed(1))
    how = {"allow_unused": True, "materialize_grads": True}  # keys that nobody may read are in no graph
    ours = torch.autograd.grad(out, (q, k, v), cotangent, **how)
    theirs = torch.autograd.grad(expected, (q, k, v), cotangent.double(), **how)
    for a, b in zip(ours, theirs, strict=True):
        assert a.isfinite().all()
        torch.testing.assert_close(a, b, atol=1e-5, rtol=0)


@st.composite
def random_masks(draw):
    rows, tokens = draw(st.integers(1, 3)), draw(st.integers(1, 7))
    grid = lambda low, high: torch.tensor(  # noqa: E731
        draw(st.lists(st.lists(st.integers(low, high), min_size=tokens, max_size=tokens), min_size=rows, max_size=rows))
    )
    return Mask(grid(0, 4), grid(-1, 2).sort(dim=1).values if draw(st.booleans()) else grid(-1, 1),
                window=draw(st.none() | st.integers(1, 4)))  # fmt: skip


@settings(max_examples=60, deadline=None)
@given(random_masks(), st.booleans())
def test_any_order_equals_the_reference(mask, strict):
    check_equal(mask, strict=strict)


@settings(max_examples=40, deadline=None)
@given(random_masks(), st.integers(1, 5))
def test_queries_after_a_cache_equal_the_reference(mask, cut):
    check_equal(mask[:, -cut:], keys=mask)


def test_one_new_query_needs_no_mask():
    mask = Mask.prefix(torch.tensor([[0, 0, 0, 1, 1]]).bool())
    assert [block.kind for block in Route.find(mask[:, -1:], mask).blocks] == ["full"]


def test_strips_change_nothing(monkeypatch):
    mask = Mask.prefix(torch.tensor([[0, 0, 0, 1, 1, 1], [0, 1, 1, 1, 1, 1]]).bool())
    for cells in (1, 13, 30):
        monkeypatch.setattr(attention, "DENSE_CELLS", cells)
        check_equal(mask)
        check_equal(mask[:1])  # a long prefix: whole causal rows instead of a matrix


@settings(max_examples=30, deadline=None)
@given(random_masks(), st.integers(1, 3), st.booleans())
def test_strips_of_a_window_read_what_it_shows(mask, strip, strict):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention, "STRIP", strip)
        check_equal(replace(mask, window=mask.window or 1), strict=strict)


def test_a_window_makes_no_matrix():
    """Neither time nor memory grows with the square of a row: cells of the matrices made, counted."""
    cells = []
    for tokens in (2000, 4000):
        route = Route.find(Mask.causal(valid(tokens), window=50))
        (block,) = route.blocks
        strips = [(start, min(start + 256, tokens)) for start in range(0, tokens, 256)]
        cells += [sum(route.visible(*ends, block, route.near(*ends, block)).numel() for ends in strips)]
    assert cells[0] < 2000 * (256 + 2 * 50) and cells[1] < 2.1 * cells[0]


def test_bias_is_added_to_the_scores():
    bias = torch.randn(1, HEADS, 5, 5, generator=torch.Generator().manual_seed(3))
    check_equal(Mask.causal(valid(5, 3)), bias=bias)
    check_equal(Mask.bidirectional(valid(5, 5)), bias=bias[:, :, :1])


def test_rows_that_see_nothing_are_zero_with_finite_gradients():
    mask = Mask.bidirectional(valid(0, 2, total=3))
    q, k, v = draw_qkv(2, 3, 3)
    out = attend(q, k, v, mask)
    assert out[0].abs().max() == 0 and out[1, 2].abs().max() == 0
    out.square().sum().backward()
    assert all(x.grad.isfinite().all() for x in (q, k, v))
    assert attention_weights(q, k, mask)[0].abs().max() == 0


def test_weights_are_exactly_zero_where_the_mask_forbids():
    mask = Mask.causal(valid(4, 2))
    q, k, v = draw_qkv(2, 4, 4)
    weights = attention_weights(q, k, mask)
    visible = mask.visible()[:, None].expand_as(weights)
    assert (weights[~visible] == 0).all() and (weights[visible] > 0).all()
    torch.testing.assert_close(torch.einsum("bhqk,bkhd->bqhd", weights, v), attend(q, k, v, mask), atol=1e-6, rtol=0)


@pytest.mark.parametrize("name", ["bidirectional", "causal", "packed prefix", "window"])
def test_dropout_drops_the_asked_share_and_keeps_the_mean(name):
    mask, _ = MASKS[name]
    rows, tokens = mask.shape
    torch.manual_seed(0)
    q, k = torch.zeros(rows, tokens, 400, 1), torch.zeros(rows, tokens, 400, 1)  # equal weights, 400 independent heads
    v = torch.ones(rows, tokens, 400, 1)
    visible = mask.visible()
    out = torch.stack([attend(q, k, v, mask, dropout=0.25)[..., 0] for _ in range(4)]).flatten(3)
    count = visible.sum(-1)[None, :, :, None].expand_as(out)
    kept = out * 0.75 * count  # how many of the visible keys survived
    alone = kept[count == 1]
    assert set(alone.round().unique().tolist()) <= {0.0, 1.0}
    share, n = (kept.sum() / count.sum()).item(), count.sum().item()
    assert abs(share - 0.75) < 5 * math.sqrt(0.75 * 0.25 / n)


@pytest.mark.parametrize("strict", [False, True])
def test_flex_attention_reads_the_same_mask(strict):
    for mask in (MASKS["packed prefix"][0], MASKS["window"][0], MASKS["permutation"][0], MASKS["padded"][0]):
        q, k, v = (x.detach() for x in draw_qkv(*mask.shape, mask.shape[1]))  # no backward on a CPU
        out = flex_attend(q, k, v, Route.find(mask, strict=strict))
        torch.testing.assert_close(out.double(), reference(q, k, v, mask.visible(strict=strict)), atol=2e-6, rtol=0)


def test_flex_attention_is_compiled_once_and_its_mask_built_once_a_forward(monkeypatch):
    """As on a GPU, but for the compiler: all layers of a model share the block mask of their route."""
    model = Model.fresh(bert_tiny(), [], torch.Generator().manual_seed(0)).eval()
    ids = torch.arange(24).view(2, 12)
    mask = Mask.causal(torch.arange(12) < torch.tensor([[12], [7]]), window=4)
    expected, made = model.body(ids, mask).detach(), []

    def counted(name, function):
        return lambda *args, **kwargs: made.append(name) or function(*args, **kwargs)

    def compile(function, real=torch.compile, **options):
        if options:  # torch's own call, to run it without a compiler
            return real(function, **options)
        made.append("compiler")
        return counted("layer", function)

    monkeypatch.setattr(flex_attention, "create_block_mask", counted("mask", flex_attention.create_block_mask))
    monkeypatch.setattr(torch, "compile", compile)
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    attention._flex_kernel.cache_clear()
    try:
        with torch.inference_mode():
            found = [model.body(ids, mask) for _ in range(2)]
    finally:
        attention._flex_kernel.cache_clear()
    assert len(model.body.layers) == 2
    assert made == ["compiler", "mask", "layer", "layer", "mask", "layer", "layer"]
    for hidden in found:
        torch.testing.assert_close(hidden, expected, atol=2e-6, rtol=1e-5)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_flex_attention_on_cuda():
    for mask in (MASKS["packed prefix"][0], MASKS["window"][0], MASKS["permutation"][0]):
        q, k, v = (x.detach().cuda() for x in draw_qkv(*mask.shape, mask.shape[1]))
        out = attend(q, k, v, mask.to("cuda")).cpu()
        torch.testing.assert_close(
            out.double(), reference(q.cpu(), k.cpu(), v.cpu(), mask.visible()), atol=1e-2, rtol=0
        )


def test_multi_head_attention_equals_torch():
    torch.manual_seed(0)
    theirs = torch.nn.MultiheadAttention(12, 3, batch_first=True)
    ours = Attention(12, 3)
    parts = zip(
        (ours.query, ours.key, ours.value), theirs.in_proj_weight.chunk(3), theirs.in_proj_bias.chunk(3), strict=True
    )
    for linear, weight, bias in parts:
        linear.load_state_dict({"weight": weight, "bias": bias})
    ours.output.load_state_dict(theirs.out_proj.state_dict())
    x, memory, mask = torch.randn(2, 4, 12), torch.randn(2, 6, 12), Mask.bidirectional(valid(6, 3))
    queries = Mask.bidirectional(valid(4, 4))
    out = ours(x, ours.keys_values(memory), Route.find(queries, mask))
    expected, _ = theirs(x, memory, memory, key_padding_mask=~mask.valid)
    torch.testing.assert_close(out, expected, atol=1e-6, rtol=0)
