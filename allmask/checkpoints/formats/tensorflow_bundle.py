"""TensorFlow's checkpoint format (a "tensor bundle"), read without TensorFlow.

`x.index` is a sorted table in LevelDB's layout: blocks of prefix-compressed keys, each block with a checksum, a
footer that says where they are. The value of the empty key is a header; every other value tells one tensor's type,
shape and place in `x.data-00000-of-00001`, with a checksum of its bytes. Both are protocol buffers.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from allmask.checkpoints.formats.crc32c import crc32c
from allmask.errors import CheckpointError
from allmask.protobuf import Cursor, Message, fields

_MAGIC = 0xDB4775248B80FB57
_FOOTER = 48
_MAX_INDEX = 256 * 1024 * 1024
_TYPES = {  # number in TensorFlow's types.proto: torch's type
    1: torch.float32, 2: torch.float64, 3: torch.int32, 4: torch.uint8, 9: torch.int64, 10: torch.bool,
    14: torch.bfloat16, 19: torch.float16,
}  # fmt: skip
Entry = tuple[tuple[int, ...], str, Callable[[], Tensor]]  # shape, type, load


@dataclass(frozen=True)
class _Place:
    """Where the bytes of one tensor lie, and what they should sum to."""

    name: str
    file: Path
    offset: int
    size: int
    checksum: int


def open_bundle(index: Path) -> dict[str, Entry]:
    """Every tensor of a checkpoint by name: its shape, its type, and a function that reads it."""
    try:
        table = dict(_read_table(index))
        shards = _read_header(index, table.pop(b"", b""))
        return {key.decode("utf-8"): _entry(index, shards, key.decode("utf-8"), value) for key, value in table.items()}
    except CheckpointError:
        raise
    except ValueError as error:  # bytes that are no protocol buffer
        raise _damaged(index, f"cannot be read: {error}") from error


def _damaged(path: Path, what: str) -> CheckpointError:
    return CheckpointError(f"{path}: {what}", "the file is damaged or incomplete; fetch it again")


# ---- the table ---------------------------------------------------------------------------------------------------


def _read_table(path: Path) -> Iterator[tuple[bytes, bytes]]:
    if path.stat().st_size > _MAX_INDEX:
        raise _damaged(path, f"{path.stat().st_size:,} bytes; an index is never that large")
    content = path.read_bytes()
    if len(content) < _FOOTER or struct.unpack("<Q", content[-8:])[0] != _MAGIC:
        raise _damaged(path, "not the index of a TensorFlow checkpoint, or cut short")
    footer = Cursor(content[-_FOOTER:-8])
    _handle(footer)  # of the block of statistics, which is empty
    previous = None
    for _, handle in _block(path, content, *_handle(footer)):
        for key, value in _block(path, content, *_handle(Cursor(handle))):
            if previous is not None and key <= previous:
                raise _damaged(path, "keys are out of order")  # also ends a table whose blocks repeat
            previous = key
            yield key, value


def _handle(cursor: Cursor) -> tuple[int, int]:
    """Where a block begins, and how long it is."""
    return cursor.varint(), cursor.varint()


def _block(path: Path, content: bytes, offset: int, size: int) -> Iterator[tuple[bytes, bytes]]:
    """The keys and values of one block; each key says how much of the one before it repeats."""
    end = offset + size
    if end + 5 > len(content):
        raise _damaged(path, "a block lies beyond the end of the file")
    if content[end] != 0:
        raise CheckpointError(f"{path}: a compressed index, which TensorFlow does not write for checkpoints")
    if _masked(crc32c(content[offset : end + 1])) != struct.unpack("<I", content[end + 1 : end + 5])[0]:
        raise _damaged(path, "the checksum of a block is wrong")
    restarts = struct.unpack("<I", content[end - 4 : end])[0] if size >= 4 else 0
    cursor = Cursor(content[offset : max(offset, end - 4 - 4 * restarts)])
    key = b""
    while not cursor.at_end:
        shared, rest, length = cursor.varint(), cursor.varint(), cursor.varint()
        if shared > len(key):
            raise _damaged(path, "a key repeats more than there is")
        key = key[:shared] + cursor.take(rest)
        yield key, cursor.take(length)


def _masked(checksum: int) -> int:
    """The form in which LevelDB stores checksums, so that they may lie inside what is summed."""
    return (((checksum >> 15) | (checksum << 17)) + 0xA282EAD8) & 0xFFFFFFFF


# ---- the two messages ----------------------------------------------------------------------------------------------


def _read_header(path: Path, content: bytes) -> int:
    """The number of data files."""
    header = Message.of(content)
    shards = header.whole(1)
    if not 0 < shards < 100_000:
        raise _damaged(path, "no header with the number of data files")
    if header.whole(2):
        raise CheckpointError(f"{path}: written on a big-endian machine, which is not supported")
    return shards


def _entry(index: Path, shards: int, name: str, content: bytes) -> Entry:
    try:
        return _checked_entry(index, shards, name, Message.of(content))
    except CheckpointError:
        raise
    except ValueError as error:
        raise _damaged(index, f"the entry of {name} is malformed: {error}") from error


def _checked_entry(index: Path, shards: int, name: str, entry: Message) -> Entry:
    if 7 in entry:
        raise CheckpointError(f"{index}: {name} is stored in slices", "save it from TensorFlow without a partitioner")
    number, shard, offset, size = (entry.whole(field) for field in (1, 3, 4, 5))
    shape = _shape(index, name, entry.raw(2))
    dtype = _TYPES.get(number)
    if shard >= shards:
        raise _damaged(index, f"{name} lies in data file {shard} of {shards}")
    file = index.with_name(f"{index.stem}.data-{shard:05d}-of-{shards:05d}")
    place = _Place(name, file, offset, size, entry.fixed(6))
    if dtype is None:  # text and the like: no tensor of a model; said only if somebody asks for it
        return shape, f"type {number}", lambda: _unreadable(place)
    if math.prod(shape) * dtype.itemsize != size:
        raise _damaged(index, f"{name} has shape {list(shape)} in {size} bytes")
    return shape, str(dtype).removeprefix("torch."), lambda: _load(place, shape, dtype)


def _shape(index: Path, name: str, content: bytes) -> tuple[int, ...]:
    """A TensorShapeProto: field 2 is a dimension, whose field 1 is its size (absent: 0)."""
    sizes = tuple(Message.of(value).whole(1) for number, value in fields(content) if number == 2)
    if not all(size < 2**40 for size in sizes):
        raise _damaged(index, f"{name} has the shape {list(sizes)}")
    return sizes


def _unreadable(place: _Place) -> Tensor:
    raise CheckpointError(f"{place.file}: {place.name} does not hold numbers")


def _load(place: _Place, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """The bytes of a tensor, checked; no more memory is taken than the file has bytes."""
    end = place.offset + place.size
    try:
        if end > place.file.stat().st_size:
            raise _damaged(place.file, f"cut short: {place.name} should lie at bytes {place.offset:,} to {end:,}")
        content = bytearray(place.size)
        with place.file.open("rb") as file:
            file.seek(place.offset)
            file.readinto(content)
    except OSError as error:
        raise _damaged(place.file, f"cannot be read: {error.strerror}") from error
    if _masked(crc32c(content)) != place.checksum:
        raise _damaged(place.file, f"the checksum of {place.name} is wrong")
    return torch.frombuffer(content, dtype=dtype).reshape(shape) if content else torch.empty(shape, dtype=dtype)
