"""Protocol buffers, as far as vocabularies of sentencepiece and checkpoints of TensorFlow use them, read by hand.

Nothing in a file is trusted: every length is checked, and bytes that make no sense are a ValueError.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator

_VARINT, _EIGHT, _BYTES, _FOUR = 0, 1, 2, 5  # how a field is written


class Cursor:
    """Reads numbers and stretches of bytes one after another."""

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
        """A whole number, seven bits a byte; the last byte is below 128."""
        value = 0
        for shift in range(0, 70, 7):
            byte = self.take(1)[0]
            value |= (byte & 0x7F) << shift
            if byte < 0x80:
                return value & 0xFFFFFFFFFFFFFFFF
        raise ValueError(f"a number without an end, at byte {self.at}")


def fields(content: bytes) -> Iterator[tuple[int, int | bytes]]:
    """(number, value) of each field of a message: whole numbers, or the bytes of texts, messages and fixed sizes."""
    cursor = Cursor(content)
    while not cursor.at_end:
        number, how = divmod(cursor.varint(), 8)
        if how == _VARINT:
            yield number, cursor.varint()
        elif how == _BYTES:
            yield number, cursor.take(cursor.varint())
        elif how in (_FOUR, _EIGHT):
            yield number, cursor.take(4 if how == _FOUR else 8)
        else:
            raise ValueError(f"field {number} is of unknown kind {how}")


class Message(dict[int, "int | bytes"]):
    """The fields of a message by number; of one that is there twice the last counts."""

    @classmethod
    def of(cls, content: int | bytes) -> Message:
        if isinstance(content, int):
            raise ValueError("a number where a message was expected")
        return cls(fields(content))

    def whole(self, number: int, default: int = 0) -> int:
        value = self.get(number, default)
        if not isinstance(value, int):
            raise ValueError(f"field {number} is no whole number")
        return value

    def raw(self, number: int) -> bytes:
        value = self.get(number, b"")
        if not isinstance(value, bytes):
            raise ValueError(f"field {number} is a number")
        return value

    def text(self, number: int) -> str:
        return self.raw(number).decode("utf-8")

    def fixed(self, number: int) -> int:
        """A whole number of four or eight bytes."""
        return int.from_bytes(self.raw(number), "little")

    def real(self, number: int) -> float:
        value = self.raw(number)
        return struct.unpack("<f", value)[0] if value else 0.0
