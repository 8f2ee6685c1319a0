"""A small reader of protocol buffers, for sentencepiece vocabularies and TensorFlow checkpoints.

Nothing in a file is trusted: every length is checked, and malformed bytes are a ValueError.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator

_VARINT, _EIGHT, _BYTES, _FOUR = 0, 1, 2, 5  # wire types


class Cursor:
    """Reads integers and byte strings one after another."""

    def __init__(self, content: bytes):
        self.content, self.at = content, 0

    @property
    def at_end(self) -> bool:
        return self.at >= len(self.content)

    def take(self, size: int) -> bytes:
        if size > len(self.content) - self.at:
            raise ValueError(f"cut short inside a record, at byte {self.at}")
        self.at += size
        return self.content[self.at - size : self.at]

    def varint(self) -> int:
        """Read an integer of seven bits per byte; the last byte is below 128."""
        value = 0
        for shift in range(0, 70, 7):
            byte = self.take(1)[0]
            value |= (byte & 0x7F) << shift
            if byte < 0x80:
                return value & 0xFFFFFFFFFFFFFFFF
        raise ValueError(f"an integer without an end, at byte {self.at}")


def fields(content: bytes) -> Iterator[tuple[int, int | bytes]]:
    """Yield (number, value) of each field of a message: an integer, or the bytes of a text, message or fixed size."""
    cursor = Cursor(content)
    while not cursor.at_end:
        number, wire_type = divmod(cursor.varint(), 8)
        if wire_type == _VARINT:
            yield number, cursor.varint()
        elif wire_type == _BYTES:
            yield number, cursor.take(cursor.varint())
        elif wire_type in (_FOUR, _EIGHT):
            yield number, cursor.take(4 if wire_type == _FOUR else 8)
        else:
            raise ValueError(f"field {number} has the unknown wire type {wire_type}")


class Message(dict[int, "int | bytes"]):
    """The fields of a message by number; if a field occurs twice, the last one counts."""

    @classmethod
    def of(cls, content: int | bytes) -> Message:
        if isinstance(content, int):
            raise ValueError("a number where a message was expected")
        return cls(fields(content))

    def whole(self, number: int, default: int = 0) -> int:
        value = self.get(number, default)
        if not isinstance(value, int):
            raise ValueError(f"field {number} is not an integer")
        return value

    def raw(self, number: int) -> bytes:
        value = self.get(number, b"")
        if not isinstance(value, bytes):
            raise ValueError(f"field {number} is an integer")
        return value

    def text(self, number: int) -> str:
        return self.raw(number).decode("utf-8")

    def fixed(self, number: int) -> int:
        """Return an integer of four or eight bytes."""
        return int.from_bytes(self.raw(number), "little")

    def real(self, number: int) -> float:
        value = self.raw(number)
        return struct.unpack("<f", value)[0] if value else 0.0
