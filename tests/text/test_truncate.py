"""Cutting long text: the exact numbers, and what must hold for all numbers."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from allmask.errors import UsageError
from allmask.text import truncate_tokens, windows
from allmask.text.truncate import RULES

lengths = st.integers(0, 3000)
limits = st.integers(1, 1200)


@pytest.mark.parametrize(
    ("length", "rule", "expected"),
    [
        (510, "head+tail", [*range(510)]),
        (511, "head", [*range(510)]),
        (511, "tail", [*range(1, 511)]),
        (511, "head+tail", [*range(128), *range(511 - 382, 511)]),
        (800, "head+tail", [*range(128), *range(800 - 382, 800)]),
        (801, "head+tail", [*range(256), *range(801 - 254, 801)]),
        (5000, "head+tail", [*range(256), *range(5000 - 254, 5000)]),
    ],
)
def test_the_numbers_at_510(length: int, rule: str, expected: list[int]):
    assert truncate_tokens(range(length), rule=rule) == expected


def test_other_limits_keep_the_proportions():
    assert truncate_tokens(range(100), limit=64, rule="head+tail") == [
        *range(16),
        *range(52, 100),
    ]  # 64·128/510 = 16.06
    assert truncate_tokens(range(101), limit=64, rule="head+tail") == [
        *range(32),
        *range(69, 101),
    ]  # 64·800/510 = 100.4
    assert truncate_tokens(range(9), limit=1, rule="head+tail") == [8]


@given(length=lengths, limit=limits, rule=st.sampled_from(RULES))
def test_truncation_keeps_order_and_limit_and_loses_nothing_needlessly(length: int, limit: int, rule: str):
    kept = truncate_tokens(range(length), limit, rule)
    assert len(kept) == min(length, limit)
    assert kept == sorted(set(kept))
    assert set(kept) <= set(range(length))
    if length <= limit:
        assert kept == [*range(length)]
    if length and rule != "tail" and limit >= 4:
        assert kept[0] == 0
    if length and rule != "head":
        assert kept[-1] == length - 1
    jumps = sum(b - a > 1 for a, b in pairwise(kept))
    assert jumps <= (rule == "head+tail")


@given(length=lengths, size=st.integers(1, 600), data=st.data())
def test_windows_cover_everything_with_the_requested_overlap(length: int, size: int, data: st.DataObject):
    stride = data.draw(st.integers(1, size))
    found = windows(length, size, stride)
    assert {place for start, end in found for place in range(start, end)} == set(range(length))
    assert all(end - start == min(size, length) for start, end in found)
    steps = [b[0] - a[0] for a, b in pairwise(found)]
    assert all(step == stride for step in steps[:-1])
    assert all(1 <= step <= stride for step in steps[-1:])
    assert found == windows(range(length), size, stride)
    if length <= size:
        assert found == [(0, length)]


def test_windows_by_hand():
    assert windows(10, 4, 2) == [(0, 4), (2, 6), (4, 8), (6, 10)]
    assert windows(11, 4, 3) == [(0, 4), (3, 7), (6, 10), (7, 11)]
    assert windows(["a", "b"], 4, 4) == [(0, 2)]
    assert windows(0, 4, 2) == [(0, 0)]


@pytest.mark.parametrize(
    "call",
    [
        lambda: truncate_tokens([1], rule="middle"),
        lambda: truncate_tokens([1], limit=0),
        lambda: windows(5, 0, 1),
        lambda: windows(5, 3, 0),
        lambda: windows(5, 3, 4),
    ],
)
def test_senseless_arguments_are_refused(call):
    with pytest.raises(UsageError):
        call()
