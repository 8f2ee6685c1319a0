"""CRC-32C against the values of RFC 3720 and against the definition, bit by bit."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from allmask.checkpoints.formats import crc32c as module
from allmask.checkpoints.formats.crc32c import crc32c


def by_definition(data: bytes) -> int:
    register = 0xFFFFFFFF
    for byte in data:
        register ^= byte
        for _ in range(8):
            register = (register >> 1) ^ (0x82F63B78 if register & 1 else 0)
    return register ^ 0xFFFFFFFF


@pytest.mark.parametrize(
    ("data", "value"),
    [
        (b"", 0),
        (b"123456789", 0xE3069283),
        (bytes(32), 0x8A9136AA),
        (b"\xff" * 32, 0x62A8AB43),
        (bytes(range(32)), 0x46DD794E),
    ],
)
def test_values_of_the_standard(data, value):
    assert crc32c(data) == value


@given(st.binary(max_size=200))
def test_short_bytes(data):
    assert crc32c(data) == by_definition(data)


@pytest.mark.parametrize("extra", [-1, 0, 1, 5, 777])
def test_many_lanes(extra):
    size = 4 * module._LANES + extra
    data = random.Random(extra).randbytes(size)
    assert crc32c(data) == by_definition(data)
    assert crc32c(bytearray(data)) == crc32c(memoryview(data)) == crc32c(data)
