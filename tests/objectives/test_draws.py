"""Randomness by sample: a pure function, the same in any batch, and random enough."""

from __future__ import annotations

import zlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from allmask.errors import UsageError
from allmask.objectives import Draw

ALL_BITS = (1 << 64) - 1
GOLDEN = 0x9E3779B97F4A7C15


def mix(z: int) -> int:
    """SplitMix64's finaliser in Python's own whole numbers."""
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & ALL_BITS
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & ALL_BITS
    return z ^ (z >> 31)


def expected(seed: int, epoch: int, number: int, name: str, place: int) -> float:
    key = 0
    for part in (seed, epoch, number):
        key = mix((key + GOLDEN * (part + 1)) & ALL_BITS)
    stream = mix(key ^ zlib.crc32(name.encode()))
    return (mix((stream + GOLDEN * (place + 1)) & ALL_BITS) >> 11) / 2**53


numbers = st.integers(0, 2**63 - 1)


@given(numbers, numbers, st.lists(st.tuples(numbers, st.integers(0, 4)), min_size=1, max_size=5))
def test_a_number_depends_on_its_sample_alone(seed, epoch, samples):
    draw = Draw(seed, epoch, [number for number, _ in samples])
    lengths = np.array([length for _, length in samples])
    alone = [expected(seed, epoch, number, "fate", place) for number, length in samples for place in range(length)]
    assert draw.tokens("fate", lengths).tolist() == alone
    assert draw.rows("cut").tolist() == [expected(seed, epoch, number, "cut", 0) for number, _ in samples]


def test_the_stream_is_splitmix64():
    state, first = 1234567, [6457827717110365317, 3203168211198807973, 9817491932198370423]  # of its reference code
    assert [mix((state + GOLDEN * n) & ALL_BITS) for n in (1, 2, 3)] == first


def test_a_batch_has_one_number_whatever_its_order():
    assert Draw(1, 2, [3, 4, 5]).batch("way") == Draw(1, 2, [5, 3, 4]).batch("way")
    others = [Draw(1, 2, [3, 4, 6]), Draw(1, 3, [3, 4, 5]), Draw(2, 2, [3, 4, 5])]
    assert len({Draw(1, 2, [3, 4, 5]).batch("way"), *(draw.batch("way") for draw in others)}) == 4
    assert Draw(1, 2, [3, 4, 5]).batch("way") != Draw(1, 2, [3, 4, 5]).batch("objective")


@pytest.mark.parametrize("kind", ["tokens", "rows", "batch", "neighbours"])
def test_they_are_uniform_and_independent(kind: str):
    if kind == "tokens":
        drawn = Draw(0, 0, range(200)).tokens("fate", np.full(200, 100))
    elif kind == "rows":
        drawn = Draw(0, 0, range(20_000)).rows("cut")
    elif kind == "batch":
        drawn = np.array([Draw(0, 0, [2 * n, 2 * n + 1]).batch("way") for n in range(4_000)])
    else:  # the same place of one sample and the next, of one epoch and the next
        epochs = np.array([Draw(0, epoch, range(100)).tokens("fate", np.full(100, 100)) for epoch in (0, 1)])
        drawn = np.concatenate([(epochs[0] - epochs[1]) % 1, (epochs[0][100:] - epochs[0][:-100]) % 1])
    counts = np.histogram(drawn, bins=20, range=(0, 1))[0]
    expected_count = len(drawn) / 20
    assert ((counts - expected_count) ** 2 / expected_count).sum() < 50  # χ² of 19 degrees exceeds it once in 10,000


@pytest.mark.parametrize("wrong", [(-1, 0, [1]), (0, -1, [1]), (0, 0, [3, -1]), (0, 0, []), (1 << 63, 0, [1])])
def test_invalid_draws_are_refused(wrong):
    with pytest.raises(UsageError):
        Draw(*wrong)
