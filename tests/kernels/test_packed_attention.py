"""The compiled attention of packed rows: equal to attention written out, in value and gradient, with dropout too."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from allmask.kernels import packed_attention as documents
from allmask.kernels.packed_attention import (
    MAX_LENGTH,
    Block,
    attend_documents,
    attend_partners,
    chosen,
    layout,
    partners,
    suits,
    suits_partners,
)
from allmask.mask import Mask
from allmask.nn.attention import Pairs, Route, attend

DTYPES = [torch.float32, torch.bfloat16]


@pytest.fixture(autouse=True)
def threads():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def need(dtype: torch.dtype) -> None:
    if documents.library(dtype) is None:
        pytest.skip(f"no compiler, or a processor without the instructions for {dtype}")


def visible_of(blocks: tuple[Block, ...]) -> Tensor:
    """Who may read whom, (T, T), cell by cell."""
    seen = torch.zeros(blocks[-1].stop, blocks[-1].stop, dtype=torch.bool)
    for block in blocks:
        for start in range(block.start, block.stop, max(1, block.length)):
            for i in range(block.length):
                for j in range(block.length):
                    known = {"full": True, "causal": j <= i, "empty": False}
                    both = j < block.source if i < block.source else j <= i
                    seen[start + i, start + j] = known.get(block.kind, both)
    return seen


class WrittenOut:
    """Attention in float64 with the whole matrix, and how far bf16 may be from it.

    bf16 has 8 bits, so rounding moves a number by at most 2^-8 of itself. Weights and their gradients are rounded
    before the last sum of products and the sum after it: together at most 2^-7 of the sum of the products' sizes.
    """

    def __init__(self, q: Tensor, k: Tensor, v: Tensor, visible: Tensor, cotangent: Tensor, keep: Tensor | None = None):
        q, k, v, d = (x[0].detach().double().transpose(0, 1) for x in (q, k, v, cotangent))  # (H, T, D)
        leaves = [x.requires_grad_() for x in (q, k, v)]
        scale = q.shape[-1] ** -0.5
        scores = (q @ k.transpose(1, 2) * scale).masked_fill(~visible, -math.inf)
        weights = scores.softmax(-1).masked_fill(~visible, 0.0)
        scores.retain_grad()
        self.weights = weights if keep is None else weights * keep
        out = self.weights @ v
        out.backward(d)
        slopes = torch.zeros_like(scores) if scores.grad is None else scores.grad.nan_to_num().abs() * scale
        sizes = [slopes @ k.abs(), slopes.transpose(1, 2) @ q.abs(), self.weights.transpose(1, 2) @ d.abs()]
        self.found = [x.detach().transpose(0, 1)[None] for x in (out, *(leaf.grad.nan_to_num() for leaf in leaves))]
        self.sizes = [x.detach().transpose(0, 1)[None] for x in (self.weights @ v.abs(), *sizes)]

    def check(self, out: Tensor, grads: tuple[Tensor, ...]) -> None:
        for ours, exact, size in zip((out, *grads), self.found, self.sizes, strict=True):
            allowed = size * 2**-7 + 1e-5 if ours.dtype == torch.bfloat16 else torch.full_like(exact, 1e-5)
            assert ((ours.double() - exact).abs() <= allowed).all()


@st.composite
def packed_rows(draw, longest: int = 70) -> tuple[Block, ...]:
    blocks, at = [], 0
    for _ in range(draw(st.integers(1, 4))):
        kind, length = draw(st.sampled_from(["full", "causal", "prefix", "empty"])), draw(st.integers(1, longest))
        source = draw(st.integers(1, length)) if kind == "prefix" else 0
        number = draw(st.integers(1, 3)) if length < 30 else 1
        blocks.append(Block(at, at + length * number, kind, source, number))
        at += length * number
    return tuple(blocks)


def draw_qkv(tokens: int, heads: int, width: int, dtype: torch.dtype, layout: str = "plain") -> list[Tensor]:
    """Leaves as (1, T, H, D) views of one tensor, in the layouts that a model may hand over."""
    if layout == "plain":
        return [torch.randn(1, tokens, heads, width).to(dtype).requires_grad_() for _ in range(3)]
    if layout == "one product":  # q, k and v side by side in each row
        rows = torch.randn(1, tokens, 3 * heads * width).to(dtype)
        return [x.unflatten(-1, (heads, width)).requires_grad_() for x in rows.chunk(3, dim=-1)]
    return [torch.randn(1, heads, tokens, width).to(dtype).transpose(1, 2).requires_grad_() for _ in range(3)]


@pytest.mark.parametrize("dtype", DTYPES)
@settings(max_examples=60, deadline=None)
@given(
    packed_rows(), st.integers(1, 3), st.sampled_from([16, 32, 48, 64]),
    st.sampled_from(["plain", "one product", "heads first"]), st.integers(0, 2**31),
)  # fmt: skip
def test_values_and_gradients_equal_attention_written_out(dtype, blocks, heads, width, layout, seed):
    need(dtype)
    torch.manual_seed(seed)
    q, k, v = draw_qkv(blocks[-1].stop, heads, width, dtype, layout)
    assert suits(q, k, v, blocks)
    out = attend_documents(q, k, v, blocks)
    cotangent = torch.randn(out.shape).to(dtype)
    grads = torch.autograd.grad(out, (q, k, v), cotangent)
    WrittenOut(q, k, v, visible_of(blocks), cotangent).check(out, grads)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("p", [0.0, 0.3])
@settings(max_examples=40, deadline=None)
@given(packed_rows(), st.floats(0.0, 1.0), st.integers(0, 2**31))
def test_chosen_queries_read_what_they_read_among_all(dtype, p, blocks, share, seed):
    """Their results are those of all queries, and gradients as if the others had none."""
    need(dtype)
    torch.manual_seed(seed)
    q, k, v = draw_qkv(blocks[-1].stop, 2, 16, dtype)
    where = torch.rand(blocks[-1].stop) < share
    some = q.detach()[:, where].requires_grad_()
    documents, places = chosen(layout(blocks, 1, len(where)), where.numpy())
    out = attend_partners(some, k, v, documents, places=places)
    cotangent = torch.zeros(q.shape, dtype=dtype)
    cotangent[:, where] = torch.randn(some.shape).to(dtype)
    grads = torch.autograd.grad(out, (some, k, v), cotangent[:, where])
    whole = torch.zeros(2, *q.shape, dtype=dtype)
    whole[0, :, where], whole[1, :, where] = out.detach(), grads[0]
    full = attend_documents(q, k, v, blocks).detach()
    assert torch.equal(out, full[:, where])
    full[:, where] = out.detach()
    WrittenOut(q, k, v, visible_of(blocks), cotangent).check(full, (whole[1], *grads[1:]))
    if p and where.any():  # what is dropped differs from query to query, and is the same in both passes
        values = torch.ones_like(v).requires_grad_()
        dropped = attend_partners(some, k, values, documents, p, places=places)
        (grad,) = torch.autograd.grad(dropped, values, torch.ones_like(dropped))
        torch.testing.assert_close(grad.double().sum(), dropped.double().sum(), rtol=0.02, atol=1e-3)


def test_large_scores_do_not_overflow_and_a_scale_can_be_given():
    need(torch.float32)
    torch.manual_seed(0)
    q, k, v = draw_qkv(40, 2, 16, torch.float32)
    blocks = (Block(0, 40, "causal"),)
    scaled = attend_documents(q, k, v, blocks, scale=100.0)
    expected = torch.nn.functional.scaled_dot_product_attention(
        *(x.double().transpose(1, 2) for x in (q, k, v)), is_causal=True, scale=100.0
    )
    torch.testing.assert_close(scaled.double(), expected.transpose(1, 2), atol=1e-3, rtol=0)  # scores of some hundreds
    assert all(x.isfinite().all() for x in torch.autograd.grad(scaled.sum(), (q, k, v)))


def test_nan_is_not_hidden_and_stays_in_its_document():
    need(torch.float32)
    torch.manual_seed(0)
    blocks = (Block(0, 20, "prefix", 10), Block(20, 37, "full"))
    for dtype in DTYPES:
        need(dtype)
        for which in range(3):
            qkv = [x.detach() for x in draw_qkv(37, 1, 16, dtype)]
            qkv[which][0, 25, 0, 3] = math.nan
            out = attend_documents(*qkv, blocks)
            assert out[0, :20].isfinite().all() and out[0, 20:].isnan().any()


@pytest.mark.parametrize("dtype", DTYPES)
def test_nothing_flows_from_where_a_query_does_not_look(dtype):
    need(dtype)
    torch.manual_seed(1)
    blocks = (Block(0, 45, "prefix", 21), Block(45, 60, "causal"), Block(60, 66, "empty"))
    q, k, v = draw_qkv(66, 2, 32, dtype)
    out = attend_documents(q, k, v, blocks)
    assert (out[0, 60:] == 0).all()
    visible = visible_of(blocks)
    for query in (0, 20, 21, 44, 45, 52, 59):
        grads = torch.autograd.grad(out[0, query].sum(), (q, k, v), retain_graph=True)
        for grad in grads[1:]:
            assert (grad[0, ~visible[query]] == 0).all()
        assert (grads[2][0, visible[query]] != 0).any(-1).all()
        assert (grads[0][0, torch.arange(66) != query] == 0).all()


# ---- dropout -------------------------------------------------------------------------------------------------


def drawn_mask(blocks: tuple[Block, ...], heads: int, p: float) -> Tensor:
    """(H, T, T) of what a call keeps: with equal weights and the unit vectors as values, results are the mask.

    Documents are up to 64 tokens long; key j of one has the unit vector j.
    """
    tokens = blocks[-1].stop
    inside = torch.cat([torch.arange(block.length).repeat(block.documents) for block in blocks])
    start = torch.arange(tokens) - inside
    same = torch.zeros(1, tokens, heads, 64)
    values = torch.eye(64)[inside][None, :, None].expand(1, tokens, heads, 64)
    out = attend_documents(same, same, values, blocks, dropout=p)[0].transpose(0, 1)  # (H, T, 64)
    kept = torch.zeros(heads, tokens, tokens)
    for i in range(tokens):
        width = min(64, tokens - int(start[i]))
        kept[:, i, start[i] : start[i] + width] = (out[:, i, :width] > 0).float()
    return kept


@pytest.mark.parametrize("dtype", DTYPES)
@settings(max_examples=15, deadline=None)
@given(packed_rows(longest=64), st.integers(1, 3), st.sampled_from([0.1, 0.5, 0.9]), st.integers(0, 2**31))
def test_dropout_equals_autograd_through_the_explicit_mask(dtype, blocks, heads, p, seed):
    need(torch.float32)
    need(dtype)
    torch.manual_seed(seed)
    keep = drawn_mask(blocks, heads, p)
    q, k, v = draw_qkv(blocks[-1].stop, heads, 32, dtype)
    v = (v.detach() * (1.0 - p)).requires_grad_()  # what is kept grows by as much
    torch.manual_seed(seed)
    out = attend_documents(q, k, v, blocks, dropout=p)
    cotangent = torch.randn(out.shape).to(dtype) * 0.1
    grads = torch.autograd.grad(out, (q, k, v), cotangent)
    WrittenOut(q, k, v, visible_of(blocks), cotangent, keep.double() / (1.0 - p)).check(out, grads)


@pytest.mark.parametrize("p", [0.1, 0.5])
def test_the_asked_share_is_dropped_independently(p):
    need(torch.float32)
    torch.manual_seed(0)
    blocks = (Block(0, 20 * 64, "full", 0, 20),)
    squares = []
    for _ in range(2):  # two calls: the seed changes
        mask = drawn_mask(blocks, 6, p)
        squares.append(torch.stack([mask[:, at : at + 64, at : at + 64] for at in range(0, 1280, 64)]))
    draws = torch.stack(squares) - (1.0 - p)  # (calls, documents, heads, queries, keys)
    deviation = math.sqrt(p * (1 - p))
    assert abs(draws.mean().item()) < 5 * deviation / math.sqrt(draws.numel())
    for axis in range(5):
        for lag in (1, 2, 16):
            if lag < draws.shape[axis]:
                pair = draws.narrow(axis, 0, draws.shape[axis] - lag) * draws.narrow(axis, lag, draws.shape[axis] - lag)
                assert abs(pair.mean().item()) < 5 * deviation**2 / math.sqrt(pair.numel())
    rows = draws.sum(-1).flatten()  # binomial: neither too even nor too uneven
    assert abs(rows.var().item() / (64 * deviation**2) - 1.0) < 5 * math.sqrt(3 / len(rows))


def test_dropout_keeps_the_mean():
    need(torch.float32)
    torch.manual_seed(2)
    q, k, v = (x.detach() for x in draw_qkv(16, 2, 16, torch.float32))
    blocks = (Block(0, 16, "prefix", 9),)
    many = torch.stack([attend_documents(q, k, v, blocks, 0.25) for _ in range(2000)])
    off = (many.mean(0) - attend_documents(q, k, v, blocks)) / (many.std(0) / math.sqrt(2000))
    assert off.abs().max() < 5.5


@pytest.mark.parametrize("dtype", DTYPES)
def test_same_seed_same_result_on_any_number_of_threads(dtype):
    need(dtype)
    torch.manual_seed(0)
    blocks = (Block(0, 63, "prefix", 40), Block(63, 123, "causal", 0, 3), Block(123, 180, "full"))
    q, k, v = draw_qkv(180, 5, 32, dtype)
    cotangent = torch.randn(1, 180, 5, 32).to(dtype)

    def run(threads: int, seed: int) -> list[Tensor]:
        torch.set_num_threads(threads)
        torch.manual_seed(seed)
        out = attend_documents(q, k, v, blocks, dropout=0.2)
        return [out, *torch.autograd.grad(out, (q, k, v), cotangent)]

    first = run(1, 7)
    for threads in (1, 2, 3):
        assert all(torch.equal(a, b) for a, b in zip(first, run(threads, 7), strict=True))
    assert not any(torch.equal(a, b) for a, b in zip(first, run(1, 8), strict=True))


def test_one_number_is_drawn_and_only_for_dropout():
    need(torch.float32)
    q, k, v = draw_qkv(5, 1, 16, torch.float32)
    torch.manual_seed(0)
    attend_documents(q, k, v, (Block(0, 5, "full"),))
    untouched = torch.get_rng_state()
    torch.manual_seed(0)
    assert torch.equal(torch.get_rng_state(), untouched)
    attend_documents(q, k, v, (Block(0, 5, "full"),), dropout=0.5)
    after = torch.get_rng_state()
    torch.manual_seed(0)
    torch.empty((), dtype=torch.int64).random_()
    assert torch.equal(torch.get_rng_state(), after)


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpointed_layer_drops_the_same_again(reentrant):
    need(torch.float32)
    mask = Mask.causal(torch.ones(1, 30, dtype=torch.bool))
    torch.manual_seed(0)
    q, k, v = draw_qkv(30, 2, 16, torch.float32)

    def gradients(run) -> tuple[Tensor, ...]:
        torch.manual_seed(3)
        return torch.autograd.grad(run().square().sum(), (q, k, v))

    def in_parts() -> Tensor:
        return checkpoint(lambda *x: attend(*x, mask, dropout=0.3), q, k, v, use_reentrant=reentrant)

    if reentrant:  # it knows only backward()
        torch.manual_seed(3)
        in_parts().square().sum().backward()
        again = tuple(x.grad for x in (q, k, v))
    else:
        again = gradients(in_parts)
    plain = gradients(lambda: attend(q, k, v, mask, dropout=0.3))
    assert all(torch.equal(a, b) for a, b in zip(plain, again, strict=True))


# ---- over a partner ------------------------------------------------------------------------------------------


def two_rows(lengths: list[tuple[int, int]]) -> tuple[Mask, Mask]:
    """Of a decoder and of its encoder: pairs of queries and keys."""
    order, group = ([], []), ([], [])
    for number, pair in enumerate(lengths):
        for side, length in enumerate(pair):
            order[side].extend([0] * length if side else range(1, length + 1))
            group[side].extend([number] * length)
    queries, keys = (Mask(torch.tensor([order[side]]), torch.tensor([group[side]])) for side in (0, 1))
    return queries, keys


def draw_sides(queries: Mask, keys: Mask, heads: int, width: int, dtype: torch.dtype) -> list[Tensor]:
    tokens = (queries.shape[1], keys.shape[1], keys.shape[1])
    return [torch.randn(1, count, heads, width).to(dtype).requires_grad_() for count in tokens]


@pytest.mark.parametrize("dtype", DTYPES)
@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 70), st.integers(1, 70)), min_size=1, max_size=4), st.integers(1, 3),
    st.sampled_from([16, 32, 48, 64]), st.integers(0, 2**31),
)  # fmt: skip
def test_documents_read_all_of_their_partners(dtype, lengths, heads, width, seed):
    need(dtype)
    torch.manual_seed(seed)
    queries, keys = two_rows(lengths)
    q, k, v = draw_sides(queries, keys, heads, width, dtype)
    pairs = Pairs.find(queries, keys)
    assert pairs is not None
    out = attend_partners(q, k, v, pairs.documents)
    cotangent = torch.randn(out.shape).to(dtype)
    grads = torch.autograd.grad(out, (q, k, v), cotangent)
    WrittenOut(q, k, v, queries.visible(keys)[0], cotangent).check(out, grads)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("p", [0.0, 0.3])
def test_partners_are_read_by_the_kernel_and_without_it(dtype, p, monkeypatch):
    need(dtype)
    torch.manual_seed(0)
    queries, keys = two_rows([(30, 41), (50, 7), (1, 33), (33, 1)])
    route = Route.find(queries, keys)
    q, k, v = draw_sides(queries, keys, 2, 32, dtype)
    assert route.pairs is not None and suits_partners(q, k, v, route.pairs.documents, p)
    torch.manual_seed(1)
    found = attend(q, k, v, route, dropout=p)
    torch.manual_seed(1)
    assert torch.equal(found, attend_partners(q, k, v, route.pairs.documents, p))
    monkeypatch.setattr(documents, "library", lambda dtype: None)
    assert not suits_partners(q, k, v, route.pairs.documents, p)
    other = attend(q, k, v, route, dropout=p)
    if p == 0.0:
        torch.testing.assert_close(other, found, atol=1e-5 if dtype == torch.float32 else 2e-2, rtol=0)


def test_dropout_over_a_partner_equals_autograd_through_the_explicit_mask():
    need(torch.float32)
    queries, keys = two_rows([(20, 41), (50, 7)])
    route = Route.find(queries, keys)
    same, inside = torch.zeros(1, 70, 2, 64), torch.cat([torch.arange(41), torch.arange(7)])
    values = torch.eye(64)[inside][None, :, None].expand(1, 48, 2, 64)
    torch.manual_seed(5)
    out = attend(same, torch.zeros(1, 48, 2, 64), values, route, dropout=0.4)[0].transpose(0, 1)  # (H, 70, 64)
    keep = torch.zeros(2, 70, 48)
    keep[:, :20, :41], keep[:, 20:, 41:] = (out[:, :20, :41] > 0).float(), (out[:, 20:, :7] > 0).float()
    assert 0.55 < (keep.sum() / (2 * (20 * 41 + 50 * 7))).item() < 0.65
    q, k, v = draw_sides(queries, keys, 2, 32, torch.float32)
    torch.manual_seed(5)
    found = attend(q, k, v, route, dropout=0.4)
    cotangent = torch.randn(found.shape)
    grads = torch.autograd.grad(found, (q, k, v), cotangent)
    WrittenOut(q, k, v, queries.visible(keys)[0], cotangent, keep.double() / 0.6).check(found, grads)


def test_long_partners_are_left_to_torch():
    need(torch.float32)
    sizes = {"starts": [0], "lengths": [3], "key_starts": [0], "key_lengths": [MAX_LENGTH + 1]}
    far = partners(**{name: np.array(numbers) for name, numbers in sizes.items()})
    near = partners(**{name: np.array(numbers) for name, numbers in {**sizes, "key_lengths": [MAX_LENGTH]}.items()})
    q, k = torch.zeros(1, 3, 1, 16), torch.zeros(1, MAX_LENGTH + 1, 1, 16)
    assert not suits_partners(q, k, k, far) and suits_partners(q, k, k, near)


# ---- within attend -------------------------------------------------------------------------------------------


def packed_mask(lengths: list[int], sources: list[int]) -> Mask:
    order = [max(0, i - source + 1) for n, source in zip(lengths, sources, strict=True) for i in range(n)]
    group = [number for number, n in enumerate(lengths) for _ in range(n)]
    return Mask(torch.tensor([order]), torch.tensor([group]))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("p", [0.0, 0.1])
def test_attend_takes_the_kernel_and_works_without_it(dtype, p, monkeypatch):
    need(dtype)
    torch.manual_seed(0)
    mask = packed_mask([30, 30, 41, 7], [20, 20, 41, 1])
    route = Route.find(mask)
    assert [block.kind for block in route.blocks] == ["prefix", "full", "causal"] and route.blocks[0].documents == 2
    q, k, v = draw_qkv(108, 2, 32, dtype)
    torch.manual_seed(1)
    found = attend(q, k, v, mask, dropout=p)
    torch.manual_seed(1)
    assert torch.equal(found, attend_documents(q, k, v, route.blocks, p))
    monkeypatch.setattr(documents, "library", lambda dtype: None)
    other = attend(q, k, v, mask, dropout=p)
    other.float().sum().backward()
    assert all(x.grad.isfinite().all() for x in (q, k, v))
    if p == 0.0:
        torch.testing.assert_close(other, found, atol=1e-5 if dtype == torch.float32 else 2e-2, rtol=0)


def test_rows_of_one_pattern_are_documents_too():
    need(torch.float32)
    torch.manual_seed(0)
    mask = Mask.causal(torch.ones(3, 20, dtype=torch.bool))
    q, k, v = (torch.randn(3, 20, 2, 16, requires_grad=True) for _ in range(3))
    blocks = Route.find(mask).blocks
    assert suits(q, k, v, blocks)
    whole = attend(q, k, v, mask)
    cotangent = torch.randn(whole.shape)
    grads = torch.autograd.grad(whole, (q, k, v), cotangent)
    for row in range(3):
        alone = [x[row : row + 1] for x in (q, k, v)]
        mine = tuple(grad[row : row + 1] for grad in grads)
        part = cotangent[row : row + 1]
        WrittenOut(*alone, mask.visible()[row], part).check(whole[row : row + 1], mine)


def test_unsupported_arguments_are_left_to_torch():
    need(torch.float32)
    q, k, v = draw_qkv(12, 2, 16, torch.float32)
    full = (Block(0, 12, "full"),)
    assert suits(q, k, v, full) and suits(q, k.detach(), v.detach(), full)
    assert suits(*(x.detach() for x in (q, k, v)), full) and not suits(q, k, v, full, dropout=1.0)
    assert not suits(q, k, v, (Block(0, 8, "full"), Block(8, 12, "dense")))
    assert not suits(q[:, -1:], k, v, full)  # after a cache
    assert not suits(*(x.double() for x in (q, k, v)), full) and not suits(q, k, v.bfloat16(), full)
    assert not suits(*(x[..., :8] for x in (q, k, v)), full)
    assert not suits(*(x.to("meta") for x in (q, k, v)), full)
    assert documents.layout((Block(0, MAX_LENGTH, "full"),), 1, MAX_LENGTH) is not None
    assert documents.layout((Block(0, MAX_LENGTH + 1, "full"),), 1, MAX_LENGTH + 1) is None
    assert len(documents.layout((Block(0, MAX_LENGTH + 1, "empty"),), 1, MAX_LENGTH + 1)) == 0


def test_transforms_of_torch_see_through():
    """The kernel is opaque to them, so they get torch's own operators."""
    need(torch.float32)
    torch.manual_seed(0)
    route = Route.find(Mask.causal(torch.ones(1, 6, dtype=torch.bool)))
    q, k, v = draw_qkv(6, 1, 16, torch.float32)
    found = torch.func.grad(lambda x: attend(x, k, v, route).square().sum())(q)
    (expected,) = torch.autograd.grad(attend(q, k, v, route).square().sum(), q)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)


def test_memory_grows_with_the_tokens_only():
    """What is kept for the backward pass, beside the inputs: two numbers for a token and head."""
    need(torch.float32)
    q, k, v = draw_qkv(300, 2, 16, torch.float32)
    kept: list[int] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x.numel()) or x, lambda x: x):
        attend_documents(q, k, v, (Block(0, 300, "causal"),))
    assert sorted(kept) == [2 * 2 * 300, *[300 * 2 * 16] * 3]


def test_documents_are_laid_out_one_after_another():
    blocks = (Block(0, 6, "prefix", 2, 2), Block(6, 8, "empty"), Block(8, 9, "full"), Block(9, 12, "causal"))
    found = documents.layout(blocks, 2, 12)
    assert found.tolist()[:4] == [[0, 3, 2, 0, 3], [3, 3, 2, 3, 3], [8, 1, 1, 8, 1], [9, 3, 0, 9, 3]]
    assert (found[4:] - found[:4]).tolist() == [[12, 0, 0, 12, 0]] * 4
