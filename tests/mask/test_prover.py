"""The prover against brute force: a real Transformer, every small matrix, every order, every way of adding tokens."""

from __future__ import annotations

import json
from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from allmask.config import Config
from allmask.errors import UsageError
from allmask.mask import Mask
from allmask.mask.prover import (
    Witness,
    cache_blocks,
    find_witness,
    influence,
    next_tokens,
    prediction_rows,
    prove,
    prove_rows,
    query_stream,
    recover_order,
)
from allmask.nn.attention import Route
from allmask.nn.transformer import Transformer
from tests.strategies import masks, matrices

DEPTH = 3


def matrix(text: str) -> Tensor:
    """`10 11` is the matrix with rows 1 0 and 1 1."""
    return torch.tensor([[cell == "1" for cell in row] for row in text.split()])


def every_matrix(tokens: int) -> Tensor:
    """All boolean (T, T) matrices, (2^(T²), T, T)."""
    bits = torch.arange(2 ** (tokens * tokens))[:, None] >> torch.arange(tokens * tokens) & 1
    return bits.bool().view(-1, tokens, tokens)


@pytest.fixture(scope="module")
def body() -> Transformer:
    config = Config(
        vocab_size=2, width=8, heads=2, layers=DEPTH, ffn_width=8, max_positions=8, segments=0, position_kind="none"
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return Transformer(config).double().eval()


def every_depth(body: Transformer, x: Tensor, visible: Tensor) -> list[Tensor]:
    """The hidden states after 1, 2, … layers under a (B, T, T) matrix."""
    route, states = Route.find(Mask.from_matrix(visible)), []
    for layer in body.layers:
        x, _ = layer(x, route)
        states.append(x)
    return states


def perturbed_dependence(body: Transformer, visible: Tensor) -> list[Tensor]:
    """(B, T, T) after 1, 2, … layers: which rows change when the input of a column does."""
    rng = torch.Generator().manual_seed(1)
    x = torch.randn(1, visible.shape[-1], 8, generator=rng, dtype=torch.float64).expand(len(visible), -1, -1)
    base, columns = every_depth(body, x, visible), []
    for column in range(visible.shape[-1]):
        other = x.clone()
        other[:, column] = torch.randn(8, generator=rng, dtype=torch.float64)
        moved = every_depth(body, other, visible)
        columns.append([(a != b).any(-1) for a, b in zip(base, moved, strict=True)])
    return [torch.stack(depth, -1) for depth in zip(*columns, strict=True)]


def gradient_dependence(body: Transformer, visible: Tensor) -> list[Tensor]:
    """The same from gradients: which rows have one with respect to the input of a column."""
    tokens = visible.shape[-1]
    rng = torch.Generator().manual_seed(2)
    x = torch.randn(len(visible), tokens, 8, generator=rng, dtype=torch.float64).requires_grad_()
    probe = torch.randn(8, generator=rng, dtype=torch.float64)
    found = []
    for state in every_depth(body, x, visible):
        rows = [torch.autograd.grad((state[:, row] @ probe).sum(), x, retain_graph=True)[0] for row in range(tokens)]
        found.append(torch.stack([(row != 0).any(-1) for row in rows], -2))
    return found


@pytest.mark.parametrize("tokens", [1, 2, 3, 4])
def test_influence_is_measured_dependence_for_every_matrix(body, tokens):
    for visible in every_matrix(tokens).split(8192):
        with torch.no_grad():
            measured = perturbed_dependence(body, visible)
        for layers, depends in enumerate(measured, 1):
            assert torch.equal(influence(visible, layers), depends)


@pytest.mark.parametrize("tokens", [5, 6, 7, 8])
@pytest.mark.parametrize("density", [0.15, 0.4, 0.7])
def test_influence_is_the_reach_of_gradients_for_random_matrices(body, tokens, density):
    rng = torch.Generator().manual_seed(tokens)
    visible = torch.rand(40, tokens, tokens, generator=rng) < density
    for layers, depends in enumerate(gradient_dependence(body, visible), 1):
        assert torch.equal(influence(visible, layers), depends)


@given(matrices())
def test_any_depth_is_a_walk_of_any_length(visible):
    tokens, reach = len(visible), visible | torch.eye(len(visible), dtype=torch.bool)
    for middle, row, column in product(range(tokens), repeat=3):  # Warshall's algorithm
        reach[row, column] |= reach[row, middle] & reach[middle, column]
    assert torch.equal(influence(visible), reach)
    assert torch.equal(influence(visible, 100), reach)


@given(masks(max_rows=1))
def test_no_depth_sees_beyond_an_order(mask):
    promised = Mask(mask.order, mask.group).visible()[0] | torch.eye(mask.shape[1], dtype=torch.bool)
    assert bool((promised | ~prove(mask).influence).all())


# ---- order --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tokens", [1, 2, 3, 4])
def test_orders_are_found_exactly_where_brute_force_finds_them(tokens):
    orders = torch.tensor(list(product(range(tokens), repeat=tokens)))
    groups = torch.tensor(list(product(range(-1, tokens), repeat=tokens)))
    cast = Mask(orders.repeat_interleave(len(groups), 0), groups.repeat(len(orders), 1)).visible()
    weights = 2 ** torch.arange(tokens * tokens)
    is_order = torch.zeros(2 ** (tokens * tokens), dtype=torch.bool)
    is_order[(cast.flatten(1) * weights).sum(-1)] = True

    visible = every_matrix(tokens)
    found, order, group = recover_order(visible)
    assert torch.equal(found, is_order)
    assert torch.equal(Mask(order[found], group[found]).visible(), visible[found])


@pytest.mark.parametrize("tokens", [1, 2, 3])
def test_a_witness_exists_exactly_where_there_is_no_order(tokens):
    visible = every_matrix(tokens)
    for is_order, one in zip(recover_order(visible)[0].tolist(), visible, strict=True):
        witness = find_witness(one)
        assert is_order == (witness is None)
        assert witness is None or holds(witness, one.tolist())


@given(matrices())
def test_a_witness_tells_the_truth(visible):
    witness = find_witness(visible)
    assert (witness is None) == prove(visible).is_order
    assert witness is None or holds(witness, visible.tolist())


def holds(witness: Witness, reads: list[list[bool]]) -> bool:
    """Whether a witness tells the truth."""
    if witness.kind == "reflexive":
        (a,) = witness.positions
        return not reads[a][a] and (any(reads[a]) or any(row[a] for row in reads))
    a, b, c = witness.positions
    if witness.kind == "transitive":
        return reads[a][b] and reads[b][c] and not reads[a][c]
    tied = [(reads[a][c] and reads[b][c]), (reads[c][a] and reads[c][b])]
    return not reads[a][b] and not reads[b][a] and any(tied)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("100 110 011", "2 reads 1, 1 reads 0, but 2 does not read 0: after two layers it does"),
        ("110 100 001", "1 does not read itself"),
        ("100 110 101", "neither of 1 and 2 reads the other, yet 0 ties them to one document"),
    ],
)
def test_a_witness_in_words(text, words):
    assert str(prove(matrix(text)).witness) == words
    assert words in str(prove(matrix(text)))


@given(masks(max_rows=1, windows=False))
def test_the_order_of_a_mask_is_recovered_from_its_matrix(mask):
    proof = prove(mask.visible()[0])
    assert proof.is_order
    assert torch.equal(Mask(proof.order[None], proof.group[None]).visible(), mask.visible())
    assert torch.equal(proof.group < 0, mask.group[0] < 0)


def test_ranks_have_no_gaps_and_groups_are_numbered_as_they_appear():
    mask = Mask(torch.tensor([[7, 7, 9, 3, 5, 5, 0]]), torch.tensor([[4, 4, 4, 1, 1, 1, -1]]))
    proof = prove(mask.visible()[0])
    assert proof.order.tolist() == [0, 0, 1, 0, 1, 1, 0]
    assert proof.group.tolist() == [0, 0, 0, 1, 1, 1, -1]


@given(matrices())
def test_an_order_that_contains_the_matrix_always_exists(visible):
    proof = prove(visible)
    allowed = Mask(proof.order[None], proof.group[None]).visible()[0]
    assert bool((allowed | ~visible).all())


# ---- labels -------------------------------------------------------------------------------------------------


def valid(tokens: int) -> Tensor:
    return torch.ones(1, tokens, dtype=torch.bool)


def test_shifted_targets_of_each_constructor():
    shuffled = Mask.permutation(torch.tensor([[4, 1, 3, 0, 2]]))
    for mask in (Mask.causal(valid(5)), Mask.reverse(valid(5)), shuffled, Mask.causal(valid(5), window=2)):
        assert prove(mask).shifted_leaks == ()
    assert prove(Mask.bidirectional(valid(4))).shifted_leaks == ((0, 1), (1, 2), (2, 3))


def test_a_prefix_leaks_its_source_and_nothing_that_is_scored():
    mask = Mask.prefix(matrix("000111"))
    assert prove(mask).shifted_leaks == ((0, 1), (1, 2))
    assert prove(mask, scored=matrix("001110")).shifted_leaks == ()


def test_the_next_token_follows_order_then_position_within_a_document():
    order, group = torch.tensor([1, 0, 0, 5, 2, 0]), torch.tensor([0, 0, 0, 1, 1, -1])
    assert next_tokens(order, group) == [(1, 2), (2, 0), (4, 3)]


def test_a_leak_that_needs_depth():
    ring = matrix("101 110 011")  # 0 reads 2, 2 reads 1, 1 reads 0: nobody reads the next token directly
    assert prove(ring, layers=1).shifted_leaks == ()
    assert prove(ring, layers=2).shifted_leaks == ((0, 1), (1, 2))


def test_masked_targets_leak_where_the_input_is_not_hidden():
    mask = Mask.bidirectional(valid(4))
    assert prove(mask).masked_leaks == ((0, 0), (1, 1), (2, 2), (3, 3))
    assert prove(mask, scored=matrix("0110")[0], hidden=matrix("0100")[0]).masked_leaks == ((2, 2),)
    assert "hidden" in str(prove(mask, scored=matrix("0110"), hidden=matrix("0110")))
    assert prove(mask, scored=matrix("0110"), hidden=matrix("0110")).masked_leaks == ()


@given(masks(max_rows=1))
def test_a_query_stream_reads_strictly_and_never_sees_itself(mask):
    assert torch.equal(query_stream(mask.visible()[0], 1), mask.visible(strict=True)[0])
    assert prove(mask).two_stream_leaks == ()


@settings(max_examples=50)
@given(matrices(max_tokens=5))
def test_two_streams_leak_as_two_streams_run(visible):
    """Reference: token sets carried by a content and a query stream, layer by layer."""
    tokens = len(visible)
    content = [{i} for i in range(tokens)]
    query: list[set[int]] = [set() for _ in range(tokens)]
    strict = [[k for k in range(tokens) if visible[i, k] and not visible[k, i]] for i in range(tokens)]
    reads = [[k for k in range(tokens) if visible[i, k]] for i in range(tokens)]
    padding = [not visible[i].any() and not visible[:, i].any() for i in range(tokens)]
    for layers in (1, 2, 3, 4):
        query = [query[i].union(*(content[k] for k in strict[i])) for i in range(tokens)]
        content = [content[i].union(*(content[k] for k in reads[i])) for i in range(tokens)]
        expected = tuple((i, i) for i in range(tokens) if i in query[i] and not padding[i])
        assert prove(visible, layers=layers).two_stream_leaks == expected


def test_two_streams_leak_around_a_ring():
    ring = matrix("110 011 101")
    assert prove(ring, layers=2).two_stream_leaks == ()
    assert prove(ring, layers=3).two_stream_leaks == ((0, 0), (1, 1), (2, 2))


@given(st.permutations(range(6)), st.lists(st.integers(-1, 1), min_size=6, max_size=6))
def test_a_predicted_row_is_the_strict_sight_where_times_differ(rank, document):
    mask = Mask(torch.tensor([rank]), torch.tensor([document]))
    assert torch.equal(prediction_rows(mask), mask.visible(strict=True)[0])


def test_a_predicted_row_of_a_prefix_is_the_sight_of_the_position_before():
    rows = prediction_rows(Mask.prefix(matrix("0011")))
    assert torch.equal(rows, matrix("0000 1100 1100 1110"))


# ---- cache --------------------------------------------------------------------------------------------------


def ordered_partitions(positions: tuple[int, ...]):
    """All ways to add the positions, block after block."""
    if not positions:
        yield []
        return
    for chosen in range(1, 2 ** len(positions)):
        block = tuple(p for i, p in enumerate(positions) if chosen >> i & 1)
        rest = tuple(p for p in positions if p not in block)
        yield from ([block, *others] for others in ordered_partitions(rest))


def stays_the_same(visible: Tensor, present: tuple[int, ...]) -> Tensor:
    """(B,): whether the rows of the tokens present are those they have when all tokens are there."""
    inside = torch.zeros(visible.shape[-1], dtype=torch.bool)
    inside[list(present)] = True
    alone = influence(visible & inside[:, None] & inside)
    return (alone[:, inside] == influence(visible)[:, inside]).flatten(1).all(-1)


@pytest.mark.parametrize("tokens", [1, 2, 3, 4])
def test_cache_blocks_are_the_finest_valid_way_of_adding(tokens):
    visible = every_matrix(tokens)
    visible = visible[visible.diagonal(dim1=1, dim2=2).all(-1)]  # the residual connection makes the diagonal moot
    most = torch.zeros(len(visible), dtype=torch.long)
    ways = {}
    for blocks in ordered_partitions(tuple(range(tokens))):
        steps = [sum(blocks[: n + 1], ()) for n in range(len(blocks))]
        holds = torch.stack([stays_the_same(visible, present) for present in steps]).all(0)
        ways[tuple(blocks)] = holds.tolist()
        most = torch.where(holds, most.clamp(min=len(blocks)), most)
    left_to_right = ways[tuple((i,) for i in range(tokens))]
    for index, one in enumerate(visible):
        blocks = cache_blocks(one)
        assert ways[tuple(tuple(block) for block in blocks)][index]
        assert len(blocks) == most[index]
        if left_to_right[index]:
            assert blocks == [[i] for i in range(tokens)]


@given(matrices(max_tokens=6))
def test_the_diagonal_is_moot_for_a_cache(visible):
    present = [i for i in range(len(visible)) if visible[i].any() or visible[:, i].any()]
    full = cache_blocks(visible | torch.eye(len(visible), dtype=torch.bool))
    assert sorted(i for block in cache_blocks(visible) for i in block) == present
    assert cache_blocks(visible) == [block for block in full if set(block) <= set(present)]


@given(masks(max_rows=1, windows=False, documents=1))
def test_what_may_follow_is_what_a_cache_allows(mask):
    done: list[int] = []
    for block in prove(mask).cache_blocks:
        assert not done or mask[:, block].may_follow(mask[:, done])
        done += block


@pytest.mark.parametrize(
    ("mask", "blocks", "words"),
    [
        (Mask.causal(valid(3)), [[0], [1], [2]], "valid, token by token, left to right: 0, 1, 2"),
        (Mask.reverse(valid(3)), [[2], [1], [0]], "valid, token by token, right to left: 2, 1, 0"),
        (Mask.permutation(torch.tensor([[1, 2, 0]])), [[2], [0], [1]], "valid, token by token, in the order 2, 0, 1"),
        (
            Mask.prefix(matrix("000011")),
            [[0, 1, 2, 3], [4], [5]],
            "valid: prefill 4 tokens (0–3), then one by one: 4, 5",
        ),
        (Mask.bidirectional(valid(3)), [[0, 1, 2]], "no: 3 tokens in one block, computed together"),
        (
            Mask.packed(Mask.bidirectional(valid(5)), torch.tensor([[0, 0, 0, 1, 1]])),
            [[0, 1, 2], [3, 4]],
            "valid, block by block: 0–2, 3+4",
        ),
    ],
)
def test_cache_in_words(mask, blocks, words):
    proof = prove(mask)
    assert proof.cache_blocks == blocks
    assert proof.cacheable == (len(blocks) > 1)
    assert str(proof).endswith(f"cache            {words}")


# ---- the report ---------------------------------------------------------------------------------------------


def test_padding_and_blind_rows_are_told_apart():
    assert prove(Mask.causal(matrix("1100"))).empty_rows == (2, 3)
    assert "2 positions of padding" in str(prove(Mask.causal(matrix("1100"))))
    assert "1 read nothing, yet are read" in str(prove(matrix("11 00")))


def test_tokens_name_positions():
    text = prove(Mask.bidirectional(valid(2))).text(["你", "好"])
    assert "0:你 sees 1:好" in text


@given(matrices())
def test_a_proof_is_plain_data_and_short_lines(visible):
    proof = prove(visible, layers=2)
    data = json.loads(json.dumps(proof.to_dict()))
    assert data["influence"] == proof.influence.int().tolist()
    assert data["cache"]["blocks"] == proof.cache_blocks
    assert len(str(proof).splitlines()) == 7


def test_long_lists_are_cut():
    text = str(prove(Mask.bidirectional(valid(40))))
    assert "and 31 more" in text
    assert "0 0 0 … (40 tokens)" in text
    assert max(map(len, text.splitlines())) < 200


def test_rows_of_a_batch_are_proven_one_by_one():
    mask = Mask.causal(matrix("111 110"))
    proofs = prove_rows(mask, layers=1, scored=matrix("111 100"), hidden=matrix("110 100"))
    assert [proof.group.tolist() for proof in proofs] == [[0, 0, 0], [0, 0, -1]]
    assert [int(proof.scored.sum()) for proof in proofs] == [3, 1]
    assert [proof.masked_leaks for proof in proofs] == [((2, 2),), ()]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: prove(Mask.causal(valid(2).expand(2, 2))), "2 rows"),
        (lambda: prove(torch.ones(2, 2)), "expected booleans"),
        (lambda: prove(matrix("10 11 11")), r"expected \(T, T\)"),
        (lambda: prove(matrix("1"), layers=0), "at least 1"),
        (lambda: prove(matrix("10 11"), scored=matrix("1")), "scored must be 2 booleans"),
    ],
)
def test_invalid_calls_are_refused(call, message):
    with pytest.raises(UsageError, match=message):
        call()
