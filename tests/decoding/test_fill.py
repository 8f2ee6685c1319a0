"""Filling in any order: the query stream against two-stream attention written out, and what it may depend on."""

from __future__ import annotations

from itertools import permutations, product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from allmask.decoding import Decoding, FillWriter, blanks, fill, generate, stream
from allmask.errors import UsageError
from allmask.mask import Mask
from allmask.nn.cache import Cache
from tests.decoding.references import RefillWriter, close, tiny, two_streams

QUERY = 1
FAMILIES = ["bert", "gpt2"]


def draw_ids(tokens, seed=0):
    return torch.randint(2, 40, (1, tokens), generator=torch.Generator().manual_seed(seed))


@settings(max_examples=30)
@given(st.sampled_from(FAMILIES), st.lists(st.integers(0, 6), min_size=1, max_size=7))
def test_step_and_query_stream_are_two_stream_attention(family, rank):
    """Any order at all, ties included: tokens of one rank read each other's content, predictions read lower ranks."""
    model, ids, mask = tiny(family), draw_ids(len(rank)), Mask.permutation(torch.tensor([rank]))
    _, cache = model.body.step(ids, mask, Cache())
    peeked = model.body.query_stream(torch.full_like(ids, QUERY), mask, cache)
    expected = two_streams(model, ids[0], torch.tensor(rank), QUERY)
    torch.testing.assert_close(peeked[0], expected, atol=1e-10, rtol=0)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_prediction_depends_only_on_tokens_of_lower_order(family):
    model, rank = tiny(family), torch.tensor([[3, 1, 5, 0, 2, 4]])
    mask = Mask.permutation(rank)
    content = torch.randn(1, 6, 16, dtype=torch.float64, requires_grad=True)
    query = torch.randn(1, 6, 16, dtype=torch.float64, requires_grad=True)
    model.body.embedding.tokens = torch.nn.Identity()  # hand it embeddings, whose gradients can be asked for
    segments = torch.zeros(1, 6, dtype=torch.long)
    _, cache = model.body.step(content, mask, Cache(), segments=segments)
    peeked = model.body.query_stream(query, mask, cache, segments=segments)
    direction = torch.randn(16, dtype=torch.float64)
    rows = [torch.autograd.grad(peeked[0, q] @ direction, (content, query), retain_graph=True) for q in range(6)]
    on_content = torch.stack([row[0][0].abs().amax(-1) > 1e-12 for row in rows])
    on_query = torch.stack([row[1][0].abs().amax(-1) > 1e-12 for row in rows])
    assert torch.equal(on_content, mask.visible(strict=True)[0])
    assert torch.equal(on_query, torch.eye(6, dtype=torch.bool))


def test_the_query_stream_leaves_the_cache_unchanged_and_may_read_nothing():
    model, ids = tiny("bert"), draw_ids(4)
    mask = Mask.causal(torch.ones(1, 4).bool())
    _, cache = model.body.step(ids[:, :2], mask[:, :2], Cache())
    before = [layer.keys.clone() for layer in cache.layers]
    model.body.query_stream(ids[:, 2:], mask[:, 2:], cache)
    assert all(torch.equal(layer.keys, keys) for layer, keys in zip(cache.layers, before, strict=True))
    first = model.body.query_stream(torch.full_like(ids[:, :1], QUERY), mask[:, :1], Cache())
    torch.testing.assert_close(first[0], two_streams(model, ids[0], mask.order[0], QUERY)[:1], atol=1e-10, rtol=0)


@settings(max_examples=30)
@given(st.sampled_from(FAMILIES), st.data())
def test_a_branched_cache_is_read_like_a_plain_one(family, data):
    """Texts of different length, rows of several, any order with ties, several predictions a row at once."""
    model = tiny(family)
    ranks = data.draw(st.lists(st.lists(st.integers(0, 5), min_size=1, max_size=6), min_size=1, max_size=3))
    rows = torch.tensor(data.draw(st.lists(st.integers(0, len(ranks) - 1), min_size=1, max_size=5)))
    longest = max(map(len, ranks))
    valid = torch.tensor([[place < len(rank) for place in range(longest)] for rank in ranks])
    mask = Mask.permutation(torch.tensor([rank + [0] * (longest - len(rank)) for rank in ranks]), valid)
    ids = draw_ids(longest * len(ranks)).view(len(ranks), longest)
    guesses = Mask.permutation(
        torch.tensor([data.draw(st.lists(st.integers(0, 6), min_size=3, max_size=3))] * len(rows))
    )
    query = torch.full_like(guesses.order, QUERY)
    flat, index = mask.flatten()
    _, packed = model.body.step(ids.flatten()[index][None], flat, Cache())
    _, plain = model.body.step(ids[rows], mask[rows], Cache())
    branched = packed.branch(mask, index).select(rows)
    expected = model.body.query_stream(query, guesses, plain)
    torch.testing.assert_close(model.body.query_stream(query, guesses, branched), expected, atol=1e-10, rtol=0)


ROWS = [[2, -1, 9, -3, -2, 3], [2, -2, -1], [-1, -2, -3, -4], [5, 6, 7, 8, -1]]
RULES = {
    "greedy": Decoding(),
    "beams": Decoding(beams=4, n_best=4),
    "samples": Decoding(sample=True, n_best=3, temperature=0.7),
    "an end": Decoding(end=(9, 10, 11, 12), beams=3, n_best=2),
}


@pytest.mark.parametrize("rules", RULES)
@pytest.mark.parametrize("family", FAMILIES)
def test_filling_with_a_cache_equals_no_cache(family, rules):
    model = tiny(family)
    found = generate(FillWriter(model, QUERY), ROWS, RULES[rules])
    expected = generate(RefillWriter(model, QUERY), ROWS, RULES[rules])
    for ours, theirs in zip(found, expected, strict=True):
        assert [one.tokens for one in ours] == [one.tokens for one in theirs]
        assert all(close(a.score, b.score) for a, b in zip(ours, theirs, strict=True))
    alone = [generate(FillWriter(model, QUERY), [row], RULES[rules])[0] for row in ROWS]
    assert [[one.tokens for one in ours] for ours in alone] == [[one.tokens for one in ours] for ours in found]


def test_wide_beams_find_the_likeliest_filling_of_all():
    """Every filling of two blanks, by the chain rule in the order they are filled."""
    model, slow = tiny("bert"), RefillWriter(tiny("bert"), QUERY)
    for order in permutations([1, 3]):
        row = [2, None, 7, None, 3]
        prompt = tuple(blanks(row, order))
        first = slow.logits(prompt, [()])[0].log_softmax(0)
        second = slow.logits(prompt, [(token,) for token in range(40)]).log_softmax(1)
        scored = {(a, b): (first[a] + second[a][b]).item() for a, b in product(range(40), repeat=2)}
        best = max(scored, key=scored.get)
        [(filled, hypothesis)] = fill(model, row, order, Decoding(beams=40, length_penalty=0.0), QUERY)
        assert [filled[place] for place in order] == list(hypothesis.tokens) == list(best)
        assert close(hypothesis.score, scored[best]) and hypothesis.finished
        assert [filled[0], filled[2], filled[4]] == [2, 7, 3]


def test_the_order_matters_and_left_to_right_is_the_default():
    model, row = tiny("gpt2", seed=3), [2, None, None, 4, None]
    texts = {order: fill(model, row, order, query=QUERY)[0] for order in permutations([1, 2, 4])}
    assert fill(model, row, query=QUERY)[0] == texts[1, 2, 4]
    assert len({hypothesis.log_probability for _, hypothesis in texts.values()}) > 1


def test_filling_can_be_streamed():
    model, prompt = tiny("bert"), [2, -2, 9, -1, 3]
    [[whole]] = generate(FillWriter(model, QUERY), [prompt], Decoding())
    assert tuple(stream(FillWriter(model, QUERY), prompt, Decoding())) == whole.tokens and len(whole.tokens) == 2


def test_blanks_are_numbered_in_the_order_they_are_filled():
    assert blanks([7, None, None], [2, 1]) == [7, -2, -1]
    assert blanks([None, 7, None]) == [-1, 7, -2]


@pytest.mark.parametrize(
    "do, words",
    [
        (lambda model: blanks([1, None], [0]), "the blanks are at"),
        (lambda model: blanks([1, None, None], [1, 1]), "the blanks are at"),
        (lambda model: blanks([1, 2]), "the blanks are at"),
        (lambda model: generate(FillWriter(model, QUERY), [[1, -2]], Decoding()), "numbered -1, -2"),
        (lambda model: generate(FillWriter(model, QUERY), [[1, 2]], Decoding()), "no room for more"),
        (lambda model: generate(FillWriter(model, QUERY), [[99, -1]], Decoding()), "token 99 is not in the vocabulary"),
        (lambda model: fill(model, [1] * 24 + [None], query=QUERY), "25 tokens, the model 24 positions"),
        (lambda model: fill(model, [1, None]), "no \\[MASK\\]"),
        (lambda model: fill(model, [1, None], settings=Decoding(banned=range(40)), query=QUERY), "allow no token"),
    ],
)
def test_wrong_arguments_raise_an_error(do, words):
    with pytest.raises(UsageError, match=words):
        do(tiny("bert"))
