"""Vocabularies of the sentencepiece library (`spiece.model`): pieces with scores, and how text is cleaned before.

The file is a protocol buffer. Of that format only what such files use is read here, and nothing in a file is trusted:
every length is checked, and what is not understood is skipped.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from allmask.errors import CheckpointError

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)  # the kinds of pieces
UNIGRAM = 1
_VARINT, _EIGHT, _BYTES, _FOUR = 0, 1, 2, 5  # how a field is written
_LARGEST = 256 * 1024 * 1024
_DAMAGED = "the file may be cut off, or be something else: copy it again"


@dataclass(frozen=True)
class Pieces:
    """What a file says."""

    pieces: list[tuple[str, float]]  # with log-probabilities
    kinds: list[int]
    charsmap: bytes  # how characters are replaced, as the library compiled it; empty: not at all
    prefix_space: bool  # a text begins with a space
    trims: bool  # spaces at both ends go, of several between words one stays
    bytes: bool  # unknown characters are written as bytes

    def of_kind(self, kind: int) -> list[str]:
        return [piece for (piece, _), own in zip(self.pieces, self.kinds, strict=True) if own == kind]


def read_pieces(path: Path) -> Pieces:
    """The vocabulary in a file; anything but a unigram one is refused."""
    try:
        if path.stat().st_size > _LARGEST:
            raise CheckpointError(f"{path}: {path.stat().st_size:,} bytes; a vocabulary of that size is a mistake")
        data = path.read_bytes()
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from error
    try:
        return _pieces(data, path)
    except CheckpointError:
        raise
    except (ValueError, IndexError, struct.error) as error:
        raise CheckpointError(f"{path}: not a sentencepiece vocabulary: {error}", _DAMAGED) from error


def _pieces(data: bytes, path: Path) -> Pieces:
    found, trained, cleaned = [], _Message(), _Message()
    for number, value in _fields(data):
        if number == 1:
            found.append(_Message.of(value))
        elif number in (2, 3):
            message = _Message.of(value)
            trained, cleaned = (message, cleaned) if number == 2 else (trained, message)
    if not found:
        raise ValueError("no pieces in it")
    if trained.whole(3, UNIGRAM) != UNIGRAM or trained.whole(24, 0):
        raise CheckpointError(
            f"{path}: a sentencepiece model of another kind than unigram",
            "save it as tokenizer.json first (transformers: AutoTokenizer.from_pretrained(…).save_pretrained(…))",
        )
    return Pieces(
        pieces=[(message.text(1), message.real(2)) for message in found],
        kinds=[message.whole(3, NORMAL) for message in found],
        charsmap=cleaned.raw(2),
        prefix_space=bool(cleaned.whole(3, 1)),
        trims=bool(cleaned.whole(4, 1)),
        bytes=bool(trained.whole(35, 0)),
    )


# ---- protocol buffers ----------------------------------------------------------------------------------------------


class _Message(dict[int, "int | bytes"]):
    """The fields of a message by number; of one that is there twice the last counts."""

    @classmethod
    def of(cls, data: int | bytes) -> _Message:
        if isinstance(data, int):
            raise ValueError("a number where a message was expected")
        return cls(_fields(data))

    def whole(self, number: int, default: int) -> int:
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

    def real(self, number: int) -> float:
        value = self.raw(number)
        return struct.unpack("<f", value)[0] if value else 0.0


def _fields(data: bytes) -> Iterator[tuple[int, int | bytes]]:
    """(number, value) of each field: whole numbers, or the bytes of texts, messages and floats."""
    at = 0
    while at < len(data):
        tag, at = _varint(data, at)
        number, how = tag >> 3, tag & 7
        if how == _VARINT:
            value, at = _varint(data, at)
            yield number, value
            continue
        if how == _BYTES:
            size, at = _varint(data, at)
        else:
            size = {_EIGHT: 8, _FOUR: 4}.get(how, -1)
        if size < 0 or at + size > len(data):
            raise ValueError(f"field {number} at byte {at} does not end")
        yield number, data[at : at + size]
        at += size


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """A whole number, seven bits a byte, and where it ends."""
    value = 0
    for place in range(10):
        byte = data[at + place]
        value |= (byte & 0x7F) << 7 * place
        if byte < 0x80:
            return value, at + place + 1
    raise ValueError(f"the number at byte {at} does not end")
