"""The mask as a value: every constructor against its picture, and the laws that all of them obey."""

from __future__ import annotations

from dataclasses import FrozenInstanceError, replace

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import Tensor

from allmask.errors import UsageError
from allmask.mask import Mask
from allmask.mask.prover import prove
from tests.strategies import booleans, masks, matrices


def flags(text: str) -> Tensor:
    """`110 100` is a (2, 3) boolean tensor."""
    return torch.tensor([[cell == "1" for cell in row] for row in text.split()])


def picture(docstring: str | None) -> Tensor:
    """The (T, T) matrix drawn in a docstring."""
    rows = [[cell == "■" for cell in line.split()[1:]] for line in (docstring or "").splitlines() if "■" in line]
    return torch.tensor(rows)


def reads(mask: Mask, query: int, key: int, row: int = 0, strict: bool = False) -> bool:
    """The definition, one pair at a time."""
    order, group, place = (t[row].tolist() for t in (mask.order, mask.group, mask.position))
    known = order[key] < order[query] if strict else order[key] <= order[query]
    near = mask.window is None or abs(place[query] - place[key]) < mask.window
    return known and near and group[query] == group[key] and group[query] != -1


# ---- constructors -------------------------------------------------------------------------------------------

DRAWN = {
    "bidirectional": (Mask.bidirectional(flags("111")), "111 111 111"),
    "causal": (Mask.causal(flags("111")), "100 110 111"),
    "reverse": (Mask.reverse(flags("111")), "111 011 001"),
    "prefix": (Mask.prefix(flags("0011")), "1100 1100 1110 1111"),
    "turns": (Mask.turns(flags("0011001")), "1100000 1100000 1110000 1111000 1111110 1111110 1111111"),
    "permutation": (Mask.permutation(torch.tensor([[1, 2, 0]])), "101 111 001"),
    "packed": (Mask.packed(Mask.bidirectional(flags("1111")), torch.tensor([[0, 0, 1, 1]])), "1100 1100 0011 0011"),
}


@pytest.mark.parametrize("name", DRAWN)
def test_a_constructor_makes_the_matrix_written_by_hand_and_drawn_in_its_docstring(name):
    mask, expected = DRAWN[name]
    assert torch.equal(mask.visible()[0], flags(expected))
    assert torch.equal(mask.visible()[0], picture(getattr(Mask, name).__doc__))


@pytest.mark.parametrize(
    ("mask", "expected"),
    [
        (Mask.bidirectional(flags("11111"), window=2), "11000 11100 01110 00111 00011"),
        (Mask.causal(flags("11111"), window=2), "10000 11000 01100 00110 00011"),
        (Mask.causal(flags("111"), window=1), "100 010 001"),
        (Mask.reverse(flags("1111"), window=3), "1110 0111 0011 0001"),
        (Mask.prefix(flags("0011"), window=3), "1100 1100 1110 0111"),
        (Mask.turns(flags("010"), window=2), "100 110 011"),
        (Mask.permutation(torch.tensor([[1, 2, 0]]), window=2), "100 111 001"),
    ],
)
def test_a_window_keeps_the_keys_nearby(mask, expected):
    assert torch.equal(mask.visible()[0], flags(expected))


@pytest.mark.parametrize(
    ("mask", "expected"),
    [
        (Mask.bidirectional(flags("110")), "110 110 000"),
        (Mask.bidirectional(flags("011")), "000 011 011"),
        (Mask.causal(flags("1101")), "1000 1100 0000 1101"),
        (Mask.reverse(flags("110")), "110 010 000"),
        (Mask.prefix(flags("0010"), flags("1110")), "1100 1100 1110 0000"),
        (Mask.prefix(flags("0110"), flags("1010")), "1000 0000 1010 0000"),
        (Mask.turns(flags("0100"), flags("1101")), "1000 1100 0000 1101"),
        (Mask.turns(flags("0100"), flags("1011")), "1011 0000 1011 1011"),
        (Mask.permutation(torch.tensor([[1, 0, 2]]), flags("110")), "110 010 000"),
    ],
)
def test_padding_neither_reads_nor_is_read(mask, expected):
    assert torch.equal(mask.visible()[0], flags(expected))


def test_packing_keeps_padding_and_the_order_within_documents():
    mask = Mask.prefix(flags("010010"), flags("111110"), document=torch.tensor([[0, 0, 1, 1, 1, 7]]))
    assert torch.equal(mask.visible()[0], flags("100000 110000 001100 001100 001110 000000"))


def test_packing_a_matrix_keeps_its_cells():
    mask = Mask.packed(Mask.from_matrix(flags("1000 1100 0010 0001")), torch.tensor([[0, 0, 1, 1]]))
    assert torch.equal(mask.visible()[0], flags("1000 1100 0010 0001"))


def test_position_counts_the_tokens_of_a_document():
    mask = Mask.packed(Mask.causal(flags("011111")), torch.tensor([[0, 0, 0, 1, 1, 0]]))
    assert mask.position[0, 1:].tolist() == [0, 1, 0, 1, 2]


@given(masks())
def test_position_is_the_number_of_earlier_tokens_of_the_document(mask):
    for group, place in zip(mask.group.tolist(), mask.position.tolist(), strict=True):
        assert place == [group[:token].count(group[token]) for token in range(len(group))]


def test_strict_is_the_query_stream():
    mask = Mask.permutation(torch.tensor([[1, 2, 0]]))
    assert torch.equal(mask.visible(strict=True)[0], flags("001 101 000"))
    assert not Mask.bidirectional(flags("11")).visible(strict=True).any()


def test_cross_attention_of_a_decoder_to_padded_sources():
    encoder = Mask.bidirectional(flags("111 110"))
    decoder = Mask.causal(flags("11 11"))
    assert torch.equal(decoder.visible(encoder), torch.stack([flags("111 111"), flags("110 110")]))


def test_prefix_is_an_encoder_and_a_decoder_in_one_row():
    encoder, decoder = (
        Mask.bidirectional(flags("111")),
        Mask(torch.tensor([[1, 2]]), torch.zeros(1, 2, dtype=torch.long)),
    )
    assert torch.equal(Mask.cat([encoder, decoder]).visible(), Mask.prefix(flags("00011")).visible())


@st.composite
def rows_of_turns(draw) -> tuple[Tensor, Tensor]:
    """is_target and valid, of any number of turns, with padding anywhere."""
    rows, tokens = draw(st.integers(1, 3)), draw(st.integers(1, 9))
    return draw(booleans(rows, tokens)), draw(booleans(rows, tokens))


@given(rows_of_turns())
def test_turns_are_their_definition(given):
    """A token reads all that stands before it, a source token also the rest of its segment, and nothing else."""
    is_target, valid = given
    visible = Mask.turns(is_target, valid).visible()
    for row in range(len(is_target)):
        real = valid[row].nonzero()[:, 0].tolist()
        targets_before = {token: sum(bool(is_target[row, other]) for other in real if other < token) for token in real}
        for query in range(is_target.shape[1]):
            for key in range(is_target.shape[1]):
                expected = False
                if query in real and key in real:
                    sources = not is_target[row, query] and not is_target[row, key]
                    expected = key <= query or (sources and targets_before[key] == targets_before[query])
                assert bool(visible[row, query, key]) == expected


@given(st.integers(1, 9).flatmap(lambda tokens: booleans(1, tokens)))
def test_turns_are_an_order_and_each_may_be_appended_to_what_came_before(is_target):
    mask, tokens = Mask.turns(is_target), is_target.shape[1]
    scored = torch.cat([is_target[:, 1:], torch.zeros(1, 1, dtype=torch.bool)], 1)
    proof = prove(mask, scored=scored)
    assert proof.is_order and not proof.shifted_leaks  # no position sees the target token that it predicts
    for token in range(1, tokens):
        inside_a_source = not bool(is_target[0, token - 1 : token + 1].any())
        assert mask[:, token:].may_follow(mask[:, :token]) == (not inside_a_source)
    sizes = [len(block) for block in proof.cache_blocks]
    assert sizes == [1 if run[0] else len(run) for run in runs_of(is_target[0].tolist())]


def runs_of(flags: list[bool]) -> list[list[bool]]:
    """Each source segment as one run, each target token as one of its own."""
    runs: list[list[bool]] = []
    for flag in flags:
        if runs and not flag and not runs[-1][0]:
            runs[-1].append(flag)
        else:
            runs.append([flag])
    return runs


@given(rows_of_turns())
def test_a_prefix_is_one_turn_and_refuses_a_second(given):
    is_target, valid = given
    turns = [row[real].int().diff().tolist() for row, real in zip(is_target, valid, strict=True)]
    if any(-1 in steps for steps in turns):
        with pytest.raises(UsageError, match=r"Mask\.turns"):
            Mask.prefix(is_target, valid)
    else:
        assert torch.equal(Mask.prefix(is_target, valid).visible(), Mask.turns(is_target, valid).visible())
        assert Mask.encoder_decoder(is_target, valid).order.equal(Mask.prefix(is_target, valid).order)


def test_an_answer_does_not_read_the_next_question():
    """What a prefix used to let through: the last token of an answer read the question after it."""
    is_target = flags("0010010")
    for make in (Mask.prefix, Mask.encoder_decoder):
        with pytest.raises(UsageError, match="in row 0, token 2 is of the target, token 3 of the source"):
            make(is_target)
    with pytest.raises(UsageError, match="pass valid"):
        Mask.prefix(flags("00110"))  # padding that is not marked
    assert not Mask.turns(is_target).visible()[0, 2, 3:].any()


def test_turns_can_be_packed():
    document = torch.tensor([[0, 0, 0, 1, 1]])
    mask = Mask.packed(Mask.turns(flags("01001")), document)
    assert torch.equal(mask.visible()[0], flags("10000 11000 11100 00010 00011"))


@given(masks())
def test_visible_is_its_definition(mask):
    tokens = range(mask.shape[1])
    for strict in (False, True):
        expected = [[[reads(mask, q, k, row, strict) for k in tokens] for q in tokens] for row in range(len(mask))]
        assert mask.visible(strict=strict).tolist() == expected


@given(masks(windows=False))
def test_sight_is_transitive_and_reflexive_so_no_depth_leaks(mask):
    visible = mask.visible()
    twice = (visible.float() @ visible.float()) > 0
    assert torch.equal(twice, visible)
    assert torch.equal(visible.diagonal(dim1=1, dim2=2), mask.valid)


@given(matrices())
def test_any_matrix_comes_back(visible):
    assert torch.equal(Mask.from_matrix(visible).visible()[0], visible)
    assert torch.equal(Mask.from_matrix(torch.stack([visible, ~visible])).visible(), torch.stack([visible, ~visible]))


# ---- a value ------------------------------------------------------------------------------------------------


@given(masks())
def test_equal_masks_are_equal_and_hash_alike(mask):
    twin = Mask(mask.order.clone(), mask.group.clone(), window=mask.window)
    assert mask == twin and hash(mask) == hash(twin)
    assert mask != replace(mask, order=mask.order + 1)
    assert mask != replace(mask, window=99)
    assert mask != mask[:, :-1]
    assert mask != "a mask"


def test_a_matrix_is_part_of_the_value():
    one, other = Mask.from_matrix(flags("10 11")), Mask.from_matrix(flags("11 11"))
    assert one == Mask.from_matrix(flags("10 11"))
    assert one != other
    assert one != replace(one, matrix=None)


def test_a_mask_cannot_be_changed():
    with pytest.raises(FrozenInstanceError):
        Mask.causal(flags("11")).window = 3  # type: ignore[misc]


@pytest.mark.parametrize(
    ("mask", "text"),
    [
        (Mask.prefix(flags("0011")), "Mask(0 0 1 2)"),
        (Mask.causal(flags("110"), window=2), "Mask(0 1 ·, window=2)"),
        (Mask.prefix(flags("00101"), document=torch.tensor([[0, 0, 0, 1, 1]])), "Mask(0 0 1 | 1 2)"),
        (Mask.turns(flags("0011001")), "Mask(0 0 1 2 3 3 4)"),
        (Mask.causal(flags("11 10")), "Mask(0 1; 0 ·)"),
        (Mask.causal(torch.ones(8, 100, dtype=torch.bool)), "Mask(8×100)"),
        (Mask.from_matrix(flags("10 11")), "Mask(0 0, matrix)"),
    ],
)
def test_repr_shows_the_order(mask, text):
    assert repr(mask) == text


def test_shape_length_device_and_moving():
    mask = Mask.causal(flags("111 110"))
    assert (mask.shape, len(mask), mask.device) == ((2, 3), 2, torch.device("cpu"))
    assert torch.equal(mask.valid, flags("111 110"))
    moved = replace(mask, matrix=flags("111 111 111").expand(2, 3, 3)).to("meta")
    assert {t.device.type for t in (moved.order, moved.group, moved.position, moved.matrix)} == {"meta"}


@given(masks(), st.data())
def test_a_slice_sees_what_it_saw(mask, data):
    """Rows and tokens can be cut in any way; the sight among what is left is what it was."""
    rows, tokens = (data.draw(st.lists(st.integers(0, size - 1), min_size=1, unique=True)) for size in mask.shape)
    assert torch.equal(mask[rows, tokens].visible(), mask.visible()[rows][:, tokens][:, :, tokens])
    matrix = Mask.from_matrix(~mask.visible().roll(1, -1))
    assert torch.equal(matrix[rows, tokens].visible(), matrix.visible()[rows][:, tokens][:, :, tokens])


def test_indexing_keeps_both_dimensions():
    mask = Mask.causal(flags("111 110 100"))
    assert mask[0].shape == mask[-1].shape == (1, 3)
    assert mask[-1] == mask[2:]
    assert mask[:, -1].shape == mask[:, 2].shape == (3, 1)
    assert mask[1:, :2].shape == (2, 2)
    assert mask[torch.tensor([True, False, True])] == mask[[0, 2]]


@given(masks(), st.data())
def test_cutting_and_joining_gives_the_mask_back(mask, data):
    row, token = (data.draw(st.integers(0, size)) for size in mask.shape)
    assert mask[:, :token].append(mask[:, token:]) == mask
    assert Mask.cat([mask[:row], mask[row:]], dim=0) == mask
    matrix = Mask.from_matrix(mask.visible())
    assert matrix[:, :token].append(matrix[:, token:]) == matrix
    assert Mask.cat([matrix[:row], matrix[row:]], dim=0) == matrix


@given(masks(), st.data())
def test_a_query_with_a_longer_row_of_keys_is_a_part_of_the_whole(mask, data):
    """As in decoding: the new tokens are queries, all so far are keys."""
    start = data.draw(st.integers(0, mask.shape[1] - 1))
    assert torch.equal(mask[:, start:].visible(mask), mask.visible()[:, start:])


# ---- following and flattening -------------------------------------------------------------------------------


@given(masks(), st.data())
def test_tokens_may_follow_exactly_if_no_earlier_row_sees_them(mask, data):
    token = data.draw(st.integers(0, mask.shape[1]))
    seen = bool(mask.visible()[:, :token, token:].any())
    assert mask[:, token:].may_follow(mask[:, :token]) == (not seen)


def test_which_constructors_allow_appending():
    causal, prefix = Mask.causal(flags("1111")), Mask.prefix(flags("0011"))
    assert all(causal[:, n:].may_follow(causal[:, :n]) for n in range(1, 4))
    assert not prefix[:, 1:].may_follow(prefix[:, :1])
    assert prefix[:, 2:].may_follow(prefix[:, :2])
    assert not Mask.reverse(flags("11"))[:, 1:].may_follow(Mask.reverse(flags("11"))[:, :1])


@given(masks())
def test_flattening_keeps_sight_and_sorts(mask):
    assume(bool(mask.valid.any()))
    flat, index = mask.flatten()
    tokens = mask.order.numel()
    across = torch.zeros(tokens, tokens, dtype=torch.bool)  # rows of a batch do not see each other
    for row, visible in enumerate(mask.visible()):
        start = row * mask.shape[1]
        across[start : start + mask.shape[1], start : start + mask.shape[1]] = visible
    assert torch.equal(flat.visible()[0], across[index][:, index])
    assert sorted(index.tolist()) == mask.valid.flatten().nonzero()[:, 0].tolist()

    document, order = flat.group[0].tolist(), flat.order[0].tolist()
    runs = [d for d, before in zip(document, [None, *document], strict=False) if d != before]
    assert len(runs) == len(set(runs))  # documents are contiguous
    sizes = [document.count(d) for d in runs]
    assert sizes == sorted(sizes)
    for d in runs:
        times = [o for o, member in zip(order, document, strict=True) if member == d]
        assert times == sorted(times)


def test_flattening_turns_any_order_into_a_causal_one():
    flat, index = Mask.permutation(torch.tensor([[4, 1, 3, 0, 2]])).flatten()
    assert index.tolist() == [3, 1, 4, 2, 0]
    assert torch.equal(flat.visible(), Mask.causal(flags("11111")).visible())
    assert flat.position.tolist() == [[3, 1, 4, 2, 0]]


def test_flattening_nothing_but_padding():
    flat, index = Mask.causal(flags("00 00")).flatten()
    assert (flat.shape, len(index)) == ((1, 0), 0)


# ---- mistakes -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: Mask.causal(torch.ones(1, 2)), "valid is torch.float32; expected booleans"),
        (lambda: Mask.bidirectional(torch.ones(1, 2, dtype=torch.long)), "expected booleans"),
        (lambda: Mask.prefix(torch.ones(1, 2)), "is_target is torch.float32"),
        (lambda: Mask.permutation(torch.ones(1, 2)), "rank must hold whole numbers"),
        (lambda: Mask.permutation([[1, 0]]), "rank is list; expected a tensor"),
        (lambda: Mask.causal(5), r"valid is int; expected a tensor\n  .*torch.ones\(1, tokens, dtype=torch.bool\)"),
        (lambda: Mask.reverse(None), "valid is NoneType; expected a tensor"),
        (lambda: Mask.bidirectional([[True]]), "valid is list; expected a tensor"),
        (lambda: Mask.bidirectional(np.ones((1, 2), dtype=bool)), "valid is numpy.ndarray; expected a tensor"),
        (lambda: Mask.causal(torch.ones(5, dtype=torch.bool)), r"valid is \(5,\); expected \(B, T\)"),
        (lambda: Mask.turns([[True]]), "is_target is list"),
        (lambda: Mask.turns(flags("01"), flags("011")), r"valid is \(1, 3\); expected \(1, 2\)"),
        (lambda: Mask.prefix(flags("01"), [True, True]), "valid is list"),
        (lambda: Mask.from_matrix([[True]]), "visible is list"),
        (lambda: Mask(torch.zeros(1, 2), torch.zeros(1, 2).long()), "order must hold whole numbers"),
        (lambda: Mask(torch.zeros(1, 2).long(), torch.zeros(1, 2)), "group must hold whole numbers"),
        (lambda: Mask(torch.zeros(1, 2).bool(), torch.zeros(1, 2).long()), "order must hold whole numbers"),
        (lambda: Mask(*torch.zeros(3, 1, 2).long().unbind()[:2], torch.zeros(1, 2)), "position must hold whole"),
        (lambda: Mask(*torch.zeros(2, 1, 2).long(), torch.zeros(1, 3).long()), r"position is \(1, 3\), order \(1, 2\)"),
        (lambda: Mask([[0, 1]], [[0, 0]]), "order is list; expected a tensor"),
        (lambda: Mask.packed(flags("11"), torch.zeros(1, 2).long()), "expected a Mask\n.*Mask.bidirectional"),
        (lambda: Mask.packed(Mask.causal(flags("11")), [[0, 1]]), "document is list"),
        (lambda: Mask.packed(Mask.causal(flags("11")), torch.zeros(1, 2)), "document is torch.float32"),
        (lambda: Mask.causal(flags("11")).visible(flags("11")), "expected a Mask"),
        (lambda: Mask.causal(flags("11"), window=0), "window is 0"),
        (lambda: Mask.packed(Mask.causal(flags("11")), torch.zeros(1, 3)), r"document is \(1, 3\)"),
        (lambda: Mask.from_matrix(flags("10 11 11")), r"must be \(T, T\)"),
        (lambda: Mask.from_matrix(torch.ones(2, 2)), "expected booleans"),
        (lambda: Mask(torch.zeros(2, 2).long(), torch.zeros(2, 3).long()), r"must both be \(B, T\)"),
        (lambda: Mask(torch.zeros(2), torch.zeros(2)), r"order is \(2,\); it must be \(B, T\)\n.*order\[None\]"),
        (lambda: Mask.from_matrix(flags("10 11")).flatten(), "no order to sort by"),
        (lambda: Mask.causal(flags("11")).append(Mask.causal(flags("1"), window=2)), "cannot be joined"),
        (lambda: Mask.causal(flags("11")).append(Mask.from_matrix(flags("1"))), "cannot be joined"),
        (lambda: Mask.from_matrix(flags("10 11")).append(Mask.from_matrix(flags("11 11"))), "cannot be joined"),
        (lambda: Mask.from_matrix(flags("10 11")).append(Mask.from_matrix(flags("1"))), "cannot be joined"),
    ],
)
def test_mistakes_raise_clear_errors(call, message):
    with pytest.raises(UsageError, match=message):
        call()


# ---- documents ------------------------------------------------------------------------------------------------


@given(masks())
def test_values_per_document_equal_a_loop_over_tokens(mask: Mask):
    least, most, first = mask.per_document(mask.order, "amin"), mask.per_document(mask.order, "amax"), mask.first_known
    for row in range(len(mask)):
        for token, group in enumerate(mask.group[row].tolist()):
            mine = mask.order[row][mask.group[row] == group]
            same = (mask.document == mask.document[row, token]).nonzero().tolist()
            if group == -1:
                assert mask.document[row, token] == -1 and not first[row, token]
                continue
            assert (least[row, token], most[row, token]) == (mine.min(), mine.max())
            assert bool(first[row, token]) == (mask.order[row, token] == mine.min())
            assert same == [[row, other] for other in (mask.group[row] == group).nonzero()[:, 0].tolist()]


def test_other_tokens_of_each_row():
    mask = Mask.packed(Mask.causal(flags("1111 1110")), torch.tensor([[0, 0, 1, 1], [0, 0, 0, 0]]))
    assert mask.gather(torch.tensor([[3, 0], [2, 3]])) == Mask(
        torch.tensor([[3, 0], [2, 3]]), torch.tensor([[1, 0], [0, -1]]), torch.tensor([[1, 0], [2, 0]])
    )
