"""TensorFlow's checkpoint format (a "tensor bundle"), read without TensorFlow.

`x.index` is a sorted table in LevelDB's layout: blocks of prefix-compressed keys, each with a checksum, and a footer
with their offsets. The value of the empty key is a header. Every other value is the type, shape and offset of one
tensor in `x.data-00000-of-00001`, with a checksum of its bytes. Values are protocol buffers.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor

from allmask.checkpoints.formats import Store, Stored
from allmask.checkpoints.formats.crc32c import crc32c
from allmask.errors import CheckpointError
from allmask.protobuf import Cursor, Message, fields

_MAGIC = 0xDB4775248B80FB57
_FOOTER = 48
_MAX_INDEX = 16 << 20
_MAX_KEYS, _MAX_KEY = 100_000, 1_000  # tensors, and bytes of a name, most of which an entry may share with the last
_TYPES = {  # number in TensorFlow's types.proto: torch's type
    1: torch.float32, 2: torch.float64, 3: torch.int32, 4: torch.uint8, 9: torch.int64, 10: torch.bool,
    14: torch.bfloat16, 19: torch.float16,
}  # fmt: skip


def open_bundle(index: Path) -> Store:
    """All tensors of a checkpoint by name, given the path of its index."""
    with _parsing(index, "cannot be read"):
        table = {key.decode("utf-8"): value for key, value in _read_table(index)}
        header = Message.of(table.pop("", b""))
        shards = header.whole(1)  # the number of data files
        if not 0 < shards < 100_000:
            raise _damaged(index, "no header with the number of data files")
        if header.whole(2):
            raise CheckpointError(f"{index}: written on a big-endian machine, which is not supported")
    store: Store = {}
    for name, value in table.items():
        with _parsing(index, f"the entry of {name} is malformed"):
            store[name] = _entry(index, shards, name, Message.of(value))
    return store


@contextmanager
def _parsing(path: Path, problem: str) -> Iterator[None]:
    """Turn the ValueError of a malformed protocol buffer into an error that names the file."""
    try:
        yield
    except CheckpointError:
        raise
    except ValueError as error:
        raise _damaged(path, f"{problem}: {error}") from error


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
    _handle(footer)  # skip the block of statistics, which is empty
    previous, count = None, 0
    for _, handle in _block(path, content, *_handle(footer)):
        for key, value in _block(path, content, *_handle(Cursor(handle))):
            if previous is not None and key <= previous:
                raise _damaged(path, "keys are out of order")  # also ends a table whose blocks repeat
            previous, count = key, count + 1
            if count > _MAX_KEYS:
                raise _damaged(path, f"more than {_MAX_KEYS:,} tensors")
            yield key, value


def _handle(cursor: Cursor) -> tuple[int, int]:
    """Read the offset and the size of a block."""
    return cursor.varint(), cursor.varint()


def _block(path: Path, content: bytes, offset: int, size: int) -> Iterator[tuple[bytes, bytes]]:
    """Yield the keys and values of one block. A key is stored without the prefix it shares with the key before."""
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
            raise _damaged(path, "a key shares more bytes than the key before it has")
        if shared + rest > _MAX_KEY:
            raise _damaged(path, f"a name of {shared + rest:,} bytes")
        key = key[:shared] + cursor.take(rest)
        yield key, cursor.take(length)


def _masked(checksum: int) -> int:
    """A checksum as LevelDB stores it; it is masked because the data may itself contain checksums."""
    return (((checksum >> 15) | (checksum << 17)) + 0xA282EAD8) & 0xFFFFFFFF


# ---- tensors -----------------------------------------------------------------------------------------------------


def _entry(index: Path, shards: int, name: str, entry: Message) -> Stored:
    if 7 in entry:
        raise CheckpointError(f"{index}: {name} is stored in slices", "save it from TensorFlow without a partitioner")
    number, shard, offset, size = (entry.whole(field) for field in (1, 3, 4, 5))
    # A TensorShapeProto: field 2 is a dimension, whose field 1 is its size (absent: 0)
    shape = tuple(Message.of(value).whole(1) for field, value in fields(entry.raw(2)) if field == 2)
    if not all(length < 2**40 for length in shape):
        raise _damaged(index, f"{name} has the shape {list(shape)}")
    if shard >= shards:
        raise _damaged(index, f"{name} lies in data file {shard} of {shards}")
    file = index.with_name(f"{index.stem}.data-{shard:05d}-of-{shards:05d}")
    checksum, dtype = entry.fixed(6), _TYPES.get(number)
    if dtype is None:  # a string, for example: an error only if it is loaded

        def refuse() -> Tensor:
            raise CheckpointError(f"{file}: {name} does not hold numbers")

        return Stored(shape, f"type {number}", refuse)
    if math.prod(shape) * dtype.itemsize != size:
        raise _damaged(index, f"{name} has shape {list(shape)} in {size} bytes")

    def load() -> Tensor:
        content = _read_bytes(file, name, offset, size, checksum)
        return torch.frombuffer(content, dtype=dtype).reshape(shape) if content else torch.empty(shape, dtype=dtype)

    return Stored(shape, str(dtype).removeprefix("torch."), load)


def _read_bytes(file: Path, name: str, offset: int, size: int, checksum: int) -> bytearray:
    """Read the bytes of a tensor and verify them. Nothing is allocated for bytes that the file does not have."""
    end = offset + size
    try:
        if end > file.stat().st_size:
            raise _damaged(file, f"cut short: {name} should lie at bytes {offset:,} to {end:,}")
        content = bytearray(size)
        with file.open("rb") as opened:
            opened.seek(offset)
            opened.readinto(content)
    except OSError as error:
        raise _damaged(file, f"cannot be read: {error.strerror}") from error
    if _masked(crc32c(content)) != checksum:
        raise _damaged(file, f"the checksum of {name} is wrong")
    return content
