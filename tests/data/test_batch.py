"""Packed examples are the padded batch without its padding, and a model reads them as it reads them one by one."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from allmask import presets
from allmask.data import NO_LABEL, Asked, Batch, Example, pack, packs, rows_by_length
from allmask.errors import UsageError
from allmask.mask import Mask
from allmask.nn.attention import Route
from allmask.nn.transformer import Transformer

NAMES = ("ids", "order", "segments", "labels")


def title(source: list[int], target: list[int]) -> Example:
    """Source and target under the prefix mask: the last of the source predicts the first of the target, and so on."""
    order = [0] * len(source) + list(range(1, len(target) + 1))
    segments = [0] * len(source) + [1] * len(target)
    labels = [NO_LABEL] * (len(source) - 1) + target + [NO_LABEL]
    return Example(source + target, order, segments, labels)


@st.composite
def examples(draw, orders=None) -> Example:
    length = draw(st.integers(1, 9))
    row = lambda low, high: st.lists(st.integers(low, high), min_size=length, max_size=length)  # noqa: E731
    is_target = draw(st.integers(0, length))
    prefix = [max(0, place - is_target + 1) for place in range(length)]
    order = prefix if orders == "prefix" else draw(row(-2, length))
    return Example(draw(row(1, 49)), order, draw(row(0, 1)), draw(row(-1, 49)))


def padded(batch: list[Example]) -> dict[str, torch.Tensor]:
    """The four rows as (B, T) tensors, and which of their cells are tokens."""
    width = max(map(len, batch))
    rows = {name: torch.zeros(len(batch), width, dtype=torch.long) for name in NAMES}
    rows["valid"] = torch.zeros(len(batch), width, dtype=torch.bool)
    for number, example in enumerate(batch):
        for name in NAMES:
            rows[name][number, : len(example)] = torch.tensor(getattr(example, name).tolist())
        rows["valid"][number, : len(example)] = True
    return rows


@settings(max_examples=100)
@given(st.lists(examples(), min_size=1, max_size=6))
def test_a_packed_row_is_the_flattened_padded_batch(batch: list[Example]):
    rows = padded(batch)
    flat, index = Mask(rows["order"], torch.where(rows["valid"], 0, -1)).flatten()
    packed = pack(batch)
    assert packed.mask == flat
    for name in ("ids", "segments", "labels"):
        assert torch.equal(getattr(packed, name)[0], rows[name].flatten()[index])
        assert getattr(packed, name).dtype == torch.long


def test_a_row_worked_out_by_hand():
    batch = pack([title([5, 6, 7], [8, 9]), title([1, 2], [3])])
    assert batch.ids.tolist() == [[1, 2, 3, 5, 6, 7, 8, 9]]
    assert batch.mask.order.tolist() == [[0, 0, 1, 0, 0, 0, 1, 2]]
    assert batch.mask.group.tolist() == [[1, 1, 1, 0, 0, 0, 0, 0]]  # the number in the list that was given
    assert batch.mask.position.tolist() == [[0, 1, 2, 0, 1, 2, 3, 4]]
    assert batch.segments.tolist() == [[0, 0, 1, 0, 0, 0, 1, 1]]
    assert batch.labels.tolist() == [[-1, 3, -1, -1, -1, 8, 9, -1]]
    assert (batch.tokens, batch.targets) == (8, 3)


def test_tokens_are_sorted_by_order_and_keep_their_positions():
    batch = pack([Example([10, 11, 12], [2, 0, 1], [0, 0, 1], [-1, 5, 6])])
    assert batch.ids.tolist() == [[11, 12, 10]]
    assert batch.mask.position.tolist() == [[1, 2, 0]]
    assert batch.labels.tolist() == [[5, 6, -1]]
    assert Route.find(batch.mask).is_regular


def test_equal_examples_are_one_call_of_a_kernel():
    batch = pack([title([1, 2, 3], [4, 5]), title([1], [2]), title([6, 7, 8], [9, 9]), title([5, 4, 3], [2, 1])])
    assert [block.documents for block in Route.find(batch.mask).blocks] == [1, 3]
    assert Route.find(batch.mask).is_regular


def body(name: str) -> Transformer:
    sizes = {
        "vocab_size": 50,
        "width": 16,
        "heads": 2,
        "ffn_width": 32,
        "layers": 3,
        "max_positions": 16,
        "segments": 2,
    }
    torch.manual_seed(0)
    model = Transformer(replace(getattr(presets, name)(), **sizes)).double().eval()
    for parameter in model.parameters():  # large weights: a leak would show
        torch.nn.init.normal_(parameter, std=0.3)
    return model


def hidden_alone(model: Transformer, example: Example) -> torch.Tensor:
    """Through a boolean matrix, which shares no path with packing."""
    order = torch.tensor(example.order.tolist())
    ids, segments = (torch.tensor(getattr(example, name).tolist())[None] for name in ("ids", "segments"))
    return model(ids, Mask.from_matrix(order[None, :] <= order[:, None]), segments=segments)[0]


@pytest.mark.parametrize("orders", ["prefix", "any"])
@pytest.mark.parametrize("name", ["bert_base", "gpt2"])
def test_packed_examples_give_the_hidden_states_of_single_ones(name: str, orders: str):
    model = body(name)

    @settings(max_examples=25)
    @given(st.lists(examples(orders), min_size=1, max_size=5))
    def check(batch: list[Example]):
        packed = pack(batch)
        hidden = model(packed.ids, packed.mask, segments=packed.segments)[0]
        for number, example in enumerate(batch):
            mine = packed.mask.group[0] == number
            alone = hidden_alone(model, example)[packed.mask.position[0, mine]]
            torch.testing.assert_close(hidden[mine], alone, rtol=0, atol=1e-10)

    with torch.no_grad():
        check()


def test_an_example_takes_any_sequences():
    made = Example(range(3), torch.tensor([0, 0, 1]), np.zeros(3, dtype=np.int64), [-1, -1, -1])
    assert all(getattr(made, name).dtype == np.int32 for name in NAMES)
    assert len(made) == 3


@pytest.mark.parametrize(
    "rows", [([1], [0], [0], [0, 1]), ([], [], [], []), ([[1]], [[0]], [[0]], [[0]]), (1, 0, 0, 0)]
)
def test_an_example_needs_rows_of_one_length(rows):
    with pytest.raises(UsageError, match="example: "):
        Example(*rows)


def test_no_examples_make_no_batch():
    with pytest.raises(UsageError, match="no examples"):
        pack([])


def test_a_batch_moves_to_a_device_whole():
    moved = pack([title([1, 2], [3])]).to("meta")
    assert isinstance(moved, Batch)
    devices = {tensor.device.type for tensor in (moved.ids, moved.segments, moved.labels, moved.mask.order)}
    assert devices == {"meta"}


def test_task_targets_and_a_second_batch_move_to_a_device_too():
    plain = pack([title([1, 2], [3]), title([4], [5])])
    asked = Asked(plain.mask.position == 0, torch.tensor([1, 0]), torch.tensor([0.5, 2.0]))
    moved = replace(plain, asked=asked, also=plain).to("meta")
    assert moved.asked is not None and moved.also is not None and moved.asked.weights is not None
    tensors = (moved.asked.where, moved.asked.gold, moved.asked.weights, moved.also.ids, moved.also.mask.group)
    assert {tensor.device.type for tensor in tensors} == {"meta"}


def test_counts_by_name():
    plain = pack([title([1, 2], [3]), title([4], [5])])
    silent = replace(plain, labels=torch.full_like(plain.labels, NO_LABEL))
    one, many = torch.tensor([1, 0]), torch.zeros(2, 3)
    where = plain.mask.position == 0
    assert plain.counts == {"lm": 2} and silent.counts == {"lm": 0}
    assert replace(silent, asked=Asked(where, one)).counts == {"task": 2}
    assert replace(plain, asked=Asked(where, many, name="multi")).counts == {"multi": 6, "lm": 2}
    weighed = Asked(where, one, torch.tensor([0.5, 2.0]))
    assert replace(silent, asked=weighed, also=replace(plain, name="mlm")).counts == {"task": 2, "mlm": 2}
    assert replace(plain, also=plain).tokens == 2 * plain.tokens


@settings(max_examples=40)
@given(st.lists(examples(), min_size=1, max_size=12), st.integers(1, 30))
def test_packs_hold_all_examples_within_the_token_budget(some: list[Example], tokens: int):
    made = packs(some, tokens)
    assert sorted(id for batch in made for id in batch.ids[0].tolist()) == sorted(id for one in some for id in one.ids)
    for batch in made:
        assert batch.ids.shape[1] <= tokens or int(batch.mask.group.max()) == 0


@given(st.lists(st.integers(0, 20)), st.integers(1, 30), st.booleans())
def test_rows_by_length(lengths: list[int], budget: int, padded: bool):
    rows = list(rows_by_length(lengths, budget, padded))
    flat = [number for row in rows for number in row]
    assert sorted(flat) == [number for number, length in enumerate(lengths) if length]
    assert [lengths[number] for number in flat] == sorted(lengths[number] for number in flat)

    def cost(numbers: list[int]) -> int:
        sizes = [lengths[number] for number in numbers]
        return len(sizes) * max(sizes) if padded else sum(sizes)

    assert all(len(row) == 1 or cost(row) <= budget for row in rows)
    assert all(cost([*row, after[0]]) > budget for row, after in pairwise(rows))  # none has room
