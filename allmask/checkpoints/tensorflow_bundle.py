"""TensorFlow's checkpoint format (a "tensor bundle"), read without TensorFlow.

`x.index` is a sorted table in LevelDB's layout: blocks of prefix-compressed keys, each block with a checksum, a
footer that says where they are. The value of the empty key is a header; every other value tells one tensor's type,
shape and place in `x.data-00000-of-00001`, with a checksum of its bytes. Both protobufs are parsed here by hand.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from allmask.checkpoints.crc32c import crc32c
from allmask.errors import CheckpointError

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
    table = dict(_read_table(index))
    shards = _read_header(index, table.pop(b"", b""))
    return {key.decode("utf-8"): _entry(index, shards, key.decode("utf-8"), value) for key, value in table.items()}


def _damaged(path: Path, what: str) -> CheckpointError:
    return CheckpointError(f"{path}: {what}", "the file is damaged or incomplete; fetch it again")


# ---- the table ---------------------------------------------------------------------------------------------------


def _read_table(path: Path) -> Iterator[tuple[bytes, bytes]]:
    if path.stat().st_size > _MAX_INDEX:
        raise _damaged(path, f"{path.stat().st_size:,} bytes; an index is never that large")
    content = path.read_bytes()
    if len(content) < _FOOTER or struct.unpack("<Q", content[-8:])[0] != _MAGIC:
        raise _damaged(path, "not the index of a TensorFlow checkpoint, or cut short")
    footer = _Cursor(content[-_FOOTER:-8], path)
    footer.handle()  # of the block of statistics, which is empty
    previous = None
    for _, handle in _block(path, content, *footer.handle()):
        for key, value in _block(path, content, *_Cursor(handle, path).handle()):
            if previous is not None and key <= previous:
                raise _damaged(path, "keys are out of order")  # also ends a table whose blocks repeat
            previous = key
            yield key, value


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
    cursor = _Cursor(content[offset : max(offset, end - 4 - 4 * restarts)], path)
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


class _Cursor:
    """Walks over bytes, and says so when they end too early."""

    def __init__(self, content: bytes, path: Path):
        self.content, self.path, self.at = content, path, 0

    @property
    def at_end(self) -> bool:
        return self.at >= len(self.content)

    def take(self, size: int) -> bytes:
        if size > len(self.content) - self.at:
            raise _damaged(self.path, "cut short inside a record")
        self.at += size
        return self.content[self.at - size : self.at]

    def varint(self) -> int:
        value = 0
        for shift in range(0, 70, 7):
            byte = self.take(1)[0]
            value |= (byte & 0x7F) << shift
            if byte < 0x80:
                return value & 0xFFFFFFFFFFFFFFFF
        raise _damaged(self.path, "a number without an end")

    def handle(self) -> tuple[int, int]:
        return self.varint(), self.varint()


# ---- the two messages ----------------------------------------------------------------------------------------------


def _fields(content: bytes, path: Path) -> Iterator[tuple[int, int | bytes]]:
    """The fields of a protobuf message: number and raw value."""
    cursor = _Cursor(content, path)
    while not cursor.at_end:
        number, kind = divmod(cursor.varint(), 8)
        if kind == 0:
            yield number, cursor.varint()
        elif kind == 2:
            yield number, cursor.take(cursor.varint())
        elif kind in (1, 5):
            yield number, int.from_bytes(cursor.take(8 if kind == 1 else 4), "little")
        else:
            raise _damaged(path, f"a field of unknown kind {kind}")


def _read_header(path: Path, content: bytes) -> int:
    """The number of data files."""
    fields = dict(_fields(content, path))
    shards = fields.get(1, 0)
    if not isinstance(shards, int) or not 0 < shards < 100_000:
        raise _damaged(path, "no header with the number of data files")
    if fields.get(2, 0) != 0:
        raise CheckpointError(f"{path}: written on a big-endian machine, which is not supported")
    return shards


def _entry(index: Path, shards: int, name: str, content: bytes) -> Entry:
    fields = dict(_fields(content, index))
    if 7 in fields:
        raise CheckpointError(f"{index}: {name} is stored in slices", "save it from TensorFlow without a partitioner")
    number, shard, offset, size, checksum = (_whole(index, name, fields.get(n, 0)) for n in (1, 3, 4, 5, 6))
    shape = _shape(index, name, fields.get(2, b""))
    dtype = _TYPES.get(number)
    if shard >= shards:
        raise _damaged(index, f"{name} lies in data file {shard} of {shards}")
    place = _Place(name, index.with_name(f"{index.stem}.data-{shard:05d}-of-{shards:05d}"), offset, size, checksum)
    if dtype is None:  # text and the like: no tensor of a model; said only if somebody asks for it
        return shape, f"type {number}", lambda: _unreadable(place)
    if math.prod(shape) * dtype.itemsize != size:
        raise _damaged(index, f"{name} has shape {list(shape)} in {size} bytes")
    return shape, str(dtype).removeprefix("torch."), lambda: _load(place, shape, dtype)


def _whole(index: Path, name: str, value: int | bytes) -> int:
    if not isinstance(value, int):
        raise _damaged(index, f"the entry of {name} is malformed")
    return value


def _shape(index: Path, name: str, content: int | bytes) -> tuple[int, ...]:
    """A TensorShapeProto: field 2 is a dimension, whose field 1 is its size (absent: 0)."""
    if not isinstance(content, bytes):
        raise _damaged(index, f"the shape of {name} is malformed")
    sizes = [
        dict(_fields(value, index)).get(1, 0)
        for n, value in _fields(content, index)
        if n == 2 and isinstance(value, bytes)
    ]
    if not all(isinstance(size, int) and size < 2**40 for size in sizes):
        raise _damaged(index, f"{name} has the shape {sizes}")
    return tuple(_whole(index, name, size) for size in sizes)


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
