"""CRC-32C (Castagnoli), the checksum in TensorFlow's files, in numpy, fast enough for gigabytes.

The checksum is linear. So the bytes are cut into lanes of equal length, all lanes are processed at once, and then
neighbouring lanes are combined: the state of the left one is advanced by as many zero bytes as the right one has.
"""

from __future__ import annotations

from functools import cache

import numpy as np
from numpy.typing import NDArray

_POLYNOMIAL = 0x82F63B78
_LANES = 16_384
_Words = NDArray[np.uint32]


@cache
def _table(bits: int) -> _Words:
    """The new register for each value of its lowest 8 or 16 bits."""
    table = np.arange(1 << bits, dtype=np.uint32)
    for _ in range(bits):
        table = np.where(table & 1, (table >> 1) ^ np.uint32(_POLYNOMIAL), table >> 1)
    return table


def crc32c(data: bytes | bytearray | memoryview) -> int:
    """Return the checksum in the standard form: b"123456789" gives 0xE3069283."""
    content = np.frombuffer(data, dtype=np.uint8)
    length = len(content) // _LANES & ~1  # even: lanes are processed two bytes at a time
    state = 0xFFFFFFFF
    if length:
        lanes = content[: length * _LANES].reshape(_LANES, length)
        state = _shift(np.array([state], np.uint32), length * _LANES)[0] ^ _fold(_walk(lanes), length)
    table, state = _table(8).tolist(), int(state)
    for byte in content[length * _LANES :].tobytes():
        state = table[(state ^ byte) & 0xFF] ^ (state >> 8)
    return state ^ 0xFFFFFFFF


def _walk(lanes: NDArray[np.uint8]) -> _Words:
    """Return the final state of each lane, starting from 0."""
    table, state = _table(16), np.zeros(len(lanes), np.uint32)
    for column in np.ascontiguousarray(lanes.view("<u2").T):
        state = table[(state ^ column) & 0xFFFF] ^ (state >> np.uint32(16))
    return state


def _fold(states: _Words, length: int) -> np.uint32:
    """Combine the states of neighbouring lanes until one is left; each pass doubles the length of a lane."""
    while len(states) > 1:
        states = _shift(states[0::2], length) ^ states[1::2]
        length *= 2
    return states[0]


def _shift(states: _Words, zeros: int) -> _Words:
    """Advance states by that many zero bytes: the matrix of one zero byte, raised to a power by squaring."""
    bits = np.uint32(1) << np.arange(32, dtype=np.uint32)
    power = _table(8)[bits & 0xFF] ^ (bits >> np.uint32(8))  # column i is the state after bit i and one zero byte
    while zeros:
        states = _times(power, states) if zeros & 1 else states
        power = _times(power, power)
        zeros >>= 1
    return states


def _times(matrix: _Words, states: _Words) -> _Words:
    """Multiply each state by a 32 × 32 matrix of bits, whose columns are words."""
    result = np.zeros_like(states)
    for bit in range(32):
        result ^= np.where((states >> np.uint32(bit)) & 1, matrix[bit], np.uint32(0))
    return result
