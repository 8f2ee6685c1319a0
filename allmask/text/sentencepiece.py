"""Read vocabularies of the sentencepiece library (`spiece.model`): pieces with scores, and settings.

The file is a protocol buffer. Unknown fields are skipped.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from pathlib import Path

from allmask.errors import CheckpointError
from allmask.protobuf import Message, fields
from allmask.text.limits import MAX_BYTES, MAX_PIECES

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)  # the kinds of pieces
UNIGRAM = 1
_DAMAGED = "the file may be cut off, or be something else: copy it again"


@dataclass(frozen=True)
class Pieces:
    """The content of a file."""

    pieces: list[tuple[str, float]]  # with log-probabilities
    kinds: list[int]
    charsmap: bytes  # compiled character replacements; may be empty
    prefix_space: bool  # a space is put before the text
    trims: bool  # spaces at both ends are removed, several spaces become one
    bytes: bool  # unknown characters are split into bytes

    def of_kind(self, kind: int) -> list[str]:
        return [piece for (piece, _), own in zip(self.pieces, self.kinds, strict=True) if own == kind]


def read_pieces(path: Path) -> Pieces:
    """Read a vocabulary; only unigram models are supported."""
    try:
        if path.stat().st_size > MAX_BYTES:
            raise CheckpointError(f"{path}: {path.stat().st_size:,} bytes; too large for a vocabulary")
        data = path.read_bytes()
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from error
    try:
        return _pieces(data, path)
    except CheckpointError:
        raise
    except (ValueError, struct.error) as error:
        raise CheckpointError(f"{path}: not a sentencepiece vocabulary: {error}", _DAMAGED) from error


def _pieces(data: bytes, path: Path) -> Pieces:
    found, trained, cleaned = [], Message(), Message()  # pieces, settings of training, settings of cleaning
    for number, value in fields(data):
        if number == 1:
            found.append(Message.of(value))
            if len(found) > MAX_PIECES:
                raise ValueError(f"more than {MAX_PIECES:,} pieces")
        elif number == 2:
            trained = Message.of(value)
        elif number == 3:
            cleaned = Message.of(value)
    if not found:
        raise ValueError("no pieces in it")
    if trained.whole(3, UNIGRAM) != UNIGRAM or trained.whole(24, 0):
        raise CheckpointError(
            f"{path}: not a unigram model of sentencepiece",
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
