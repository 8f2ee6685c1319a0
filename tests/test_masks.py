"""The mask as a value: every constructor against its picture, and the laws that all of them obey."""

from __future__ import annotations

from dataclasses import FrozenInstanceError, replace

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import Tensor

from allmask.errors import UsageError
from allmask.masks import Mask
from tests.strategies import masks, matrices


def flags(text: str) -> Tensor:
    """`110 100` is a (2, 3) boolean tensor."""
    return torch.tensor([[cell == "1" for cell in row] for row in text.split()])


def picture(docstring: str | None) -> Tensor:
    """The (T, T) matrix drawn in a docstring."""
    rows = [[cell == "■" for cell in line.split()[1:]] for line in (docstring or "").splitlines() if "■" in line]
    return torch.tensor(rows)


def reads(mask: Mask, query: int, key: int, row: int = 0, strict: bool = False) -> bool:
    """The definition, one pair at a time."""
    order, group, place = (t[row].tolist() for t in (mask.order, mask.group, mask.place))
    known = order[key] < order[query] if strict else order[key] <= order[query]
    near = mask.window is None or abs(place[query] - place[key]) < mask.window
    return known and near and group[query] == group[key] and group[query] != -1


# ---- constructors -------------------------------------------------------------------------------------------

DRAWN = {
    "bidirectional": (Mask.bidirectional(flags("111")), "111 111 111"),
    "causal": (Mask.causal(flags("111")), "100 110 111"),
    "reverse": (Mask.reverse(flags("111")), "111 011 001"),
    "prefix": (Mask.prefix(flags("0011")), "1100 1100 1110 1111"),
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
        (Mask.permutation(torch.tensor([[1, 0, 2]]), flags("110")), "110 010 000"),
    ],
)
def test_padding_neither_reads_nor_is_read(mask, expected):
    assert torch.equal(mask.visible()[0], flags(expected))


def test_packing_keeps_padding_and_the_order_within_documents():
    mask = Mask.packed(Mask.prefix(flags("010010"), flags("111110")), torch.tensor([[0, 0, 1, 1, 1, 7]]))
    assert torch.equal(mask.visible()[0], flags("100000 110000 001100 001100 001110 000000"))


def test_packing_a_matrix_keeps_its_cells():
    mask = Mask.packed(Mask.from_matrix(flags("1000 1100 0010 0001")), torch.tensor([[0, 0, 1, 1]]))
    assert torch.equal(mask.visible()[0], flags("1000 1100 0010 0001"))


def test_place_counts_the_tokens_of_a_document():
    mask = Mask.packed(Mask.causal(flags("011111")), torch.tensor([[0, 0, 0, 1, 1, 0]]))
    assert mask.place[0, 1:].tolist() == [0, 1, 0, 1, 2]


@given(masks())
def test_place_is_how_many_of_the_document_stand_before(mask):
    for group, place in zip(mask.group.tolist(), mask.place.tolist(), strict=True):
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
        (Mask.packed(Mask.prefix(flags("00101")), torch.tensor([[0, 0, 0, 1, 1]])), "Mask(0 0 1 | 1 2)"),
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
    assert {t.device.type for t in (moved.order, moved.group, moved.place, moved.matrix)} == {"meta"}


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


def test_what_may_follow_in_the_cast():
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
    assert flat.place.tolist() == [[3, 1, 4, 2, 0]]


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
        (lambda: Mask.causal(flags("11"), window=0), "window is 0"),
        (lambda: Mask.packed(Mask.causal(flags("11")), torch.zeros(1, 3)), r"document is \(1, 3\)"),
        (lambda: Mask.from_matrix(flags("10 11 11")), r"must be \(T, T\)"),
        (lambda: Mask.from_matrix(torch.ones(2, 2)), "expected booleans"),
        (lambda: Mask(torch.zeros(2, 2), torch.zeros(2, 3)), r"must both be \(B, T\)"),
        (lambda: Mask(torch.zeros(2), torch.zeros(2)), r"must both be \(B, T\)"),
        (lambda: Mask.from_matrix(flags("10 11")).flatten(), "no order to sort by"),
        (lambda: Mask.causal(flags("11")).append(Mask.causal(flags("1"), window=2)), "cannot be joined"),
        (lambda: Mask.causal(flags("11")).append(Mask.from_matrix(flags("1"))), "cannot be joined"),
        (lambda: Mask.from_matrix(flags("10 11")).append(Mask.from_matrix(flags("11 11"))), "cannot be joined"),
        (lambda: Mask.from_matrix(flags("10 11")).append(Mask.from_matrix(flags("1"))), "cannot be joined"),
    ],
)
def test_a_mistake_is_said_at_once(call, message):
    with pytest.raises(UsageError, match=message):
        call()


# ---- documents ------------------------------------------------------------------------------------------------


@given(masks())
def test_what_is_said_of_documents_is_what_their_tokens_say(mask: Mask):
    least, most, first = mask.among(mask.order, "amin"), mask.among(mask.order, "amax"), mask.first_known
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
