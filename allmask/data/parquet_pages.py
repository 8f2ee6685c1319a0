"""The pages of a parquet file as they are, whatever its footer says of them.

Libraries allocate what the headers of pages announce, and unpack what a page holds. A footer with small sizes is no
promise: here the headers are read, and the counts inside of pages whose encoding begins with one.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, BinaryIO

_DATA, _DICTIONARY, _DATA_V2 = 0, 2, 3  # types of pages
_RUNS, _DELTA_LENGTHS, _DELTA_TEXTS = 3, 6, 7  # encodings: runs; texts after their lengths; what they do not share
_TRUE, _FALSE, _BYTE, _I16, _I32, _I64, _DOUBLE, _BINARY, _LIST, _SET, _MAP, _STRUCT = range(1, 13)  # types of Thrift
_HEADERS = (4 << 10, 256 << 10, 16 << 20)  # bytes that are read for a header, at first and if they do not suffice
_PADDING = 100  # bytes after a column that old writers did not count
_CODECS = {"ZSTD": "zstd", "SNAPPY": "snappy", "GZIP": "gzip", "BROTLI": "brotli", "LZ4": "lz4_raw"}


class BadPage(ValueError):
    """A page that cannot be what it says."""


@dataclass
class Chunk:
    """The pages of a column in a group of rows."""

    unpacked: int = 0  # bytes of all its pages
    dictionary: int = 0  # bytes of its dictionary: texts that each row may repeat
    shared: int = 0  # bytes that its texts share with those before them, in lists
    shares: bool = False  # texts share beginnings
    delta: bool = False  # texts after their lengths, or what they do not share
    values: int = 0


@dataclass
class _Page:
    header: dict[int, Any]
    start: int  # of its content
    kind: int = field(init=False)
    unpacked: int = field(init=False)
    packed: int = field(init=False)
    own: dict[int, Any] = field(init=False)  # the part of the header that pages of its kind have

    def __post_init__(self) -> None:
        self.kind, self.unpacked, self.packed = (_number(self.header, key) for key in (1, 2, 3))
        self.own = self.header.get({_DATA: 5, _DICTIONARY: 7, _DATA_V2: 8}.get(self.kind, 0), {})
        if self.kind in (_DATA, _DICTIONARY, _DATA_V2) and not isinstance(self.own, dict):
            raise BadPage("a page without a header of its kind")


def measure(stream: BinaryIO, size: int, column: Any, schema: Any, most: int) -> Chunk:
    """Read the headers of a column's pages, in a file of `size` bytes; return what they take when they are unpacked.

    `column` is the column's metadata and `schema` its place in the schema, both as pyarrow has them. What is more than
    `most` bytes is not examined further.
    """
    chunk = Chunk()
    for page in _pages(stream, size, column):
        chunk.unpacked += page.unpacked
        if chunk.unpacked > most:
            break
        if page.kind == _DICTIONARY:
            if _number(page.own, 1) > page.unpacked:  # each takes a byte or more
                raise BadPage(f"a dictionary of {_number(page.own, 1):,} values in {page.unpacked:,} bytes")
            chunk.dictionary = max(chunk.dictionary, page.unpacked)
        elif page.kind in (_DATA, _DATA_V2):
            chunk.values += _number(page.own, 1)
            encoding = _number(page.own, 2 if page.kind == _DATA else 4)
            if encoding in (_DELTA_LENGTHS, _DELTA_TEXTS):
                chunk.delta, content, end = True, _content(stream, page, column, schema), 0
                if encoding == _DELTA_TEXTS:
                    chunk.shares = True
                    lengths, end = _delta(content, 0, _number(page.own, 1), schema.max_repetition_level > 0)
                    chunk.shared += sum(lengths)
                _delta(content, end, _number(page.own, 1))
    if chunk.values > column.num_values:
        raise BadPage(f"pages with {chunk.values:,} values; the footer says {column.num_values:,}")
    return chunk


def _pages(stream: BinaryIO, size: int, column: Any) -> Iterator[_Page]:
    """The pages that are read for the values of a column."""
    at, dictionary = column.data_page_offset, column.dictionary_page_offset
    if dictionary is not None and 0 < dictionary < at:
        at = dictionary
    end, values = min(size, at + column.total_compressed_size + _PADDING), 0
    while values < column.num_values and at < end:
        page = _page_at(stream, at)
        at = page.start + page.packed
        if at > size:
            raise BadPage(f"a page of {page.packed:,} bytes ends after the file")
        if page.kind in (_DATA, _DATA_V2):
            values += _number(page.own, 1)
        yield page


def _page_at(stream: BinaryIO, at: int) -> _Page:
    for length in _HEADERS:
        stream.seek(at)
        data = stream.read(length)
        try:
            header, used = _struct(data, 0)
        except (IndexError, struct.error):
            if len(data) < length:
                break
        else:
            return _Page(header, at + used)
    raise BadPage("the header of a page has no end")


def _number(fields: dict[int, Any], key: int) -> int:
    value = fields.get(key)
    if not isinstance(value, int) or value < 0:
        raise BadPage(f"a number is missing in the header of a page, or is {value}")
    return value


# ---- Thrift's compact protocol -------------------------------------------------------------------------------------


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[at]
        at, value, shift = at + 1, value | (byte & 0x7F) << shift, shift + 7
        if byte < 0x80:
            return value, at
        if shift > 63:
            raise BadPage("a number without an end")


def _zigzag(value: int) -> int:
    return value >> 1 ^ -(value & 1)


def _struct(data: bytes, at: int, depth: int = 0) -> tuple[dict[int, Any], int]:
    """Return the numbers and structs among the fields, and where the struct ends."""
    fields: dict[int, Any] = {}
    number = 0
    while data[at]:
        kind, step = data[at] & 15, data[at] >> 4
        at += 1
        if not step:
            number, at = _varint(data, at)
            number = _zigzag(number)
        number += step
        if number in fields:
            raise BadPage("a header that says a thing twice")
        fields[number], at = _field(data, at, kind, depth)
    return fields, at + 1


def _field(data: bytes, at: int, kind: int, depth: int) -> tuple[Any, int]:
    """Return a value if it is a number of 32 bits, a truth or a struct; others are only skipped."""
    if depth > 8:
        raise BadPage("a header with structs in structs")
    if kind in (_TRUE, _FALSE):
        return kind == _TRUE, at
    if kind in (_I16, _I32, _I64):
        value, at = _varint(data, at)
        return _zigzag(value) if kind == _I32 else None, at
    if kind == _STRUCT:
        return _struct(data, at, depth + 1)
    if kind == _BINARY:
        length, at = _varint(data, at)
        data[at + length - 1]  # is it there?
        return None, at + length
    if kind in (_BYTE, _DOUBLE):
        return None, at + (1 if kind == _BYTE else 8)
    if kind in (_LIST, _SET):
        count, inner = data[at] >> 4, data[at] & 15
        at += 1
        if count == 15:
            count, at = _varint(data, at)
        for _ in range(count):
            data[at]  # is it there?
            _, at = (None, at + 1) if inner in (_TRUE, _FALSE) else _field(data, at, inner, depth + 1)
        return None, at
    raise BadPage("a header of an unknown kind")


# ---- encodings that begin with how many values follow --------------------------------------------------------------


def _content(stream: BinaryIO, page: _Page, column: Any, schema: Any) -> bytes:
    """Return the values of a page, unpacked, without the levels before them."""
    import pyarrow as arrow

    stream.seek(page.start)
    data, levels = stream.read(page.packed), 0
    if page.kind == _DATA_V2:  # whose levels are not packed
        levels = _number(page.own, 5) + _number(page.own, 6)
        data = data[levels:]
    codec = column.compression
    is_packed = page.kind == _DATA or page.own.get(7, True) is True
    if codec != "UNCOMPRESSED" and is_packed and data:
        if codec not in _CODECS or page.unpacked < levels:
            raise BadPage(f"texts that share their beginnings, packed as {codec}")
        try:
            data = arrow.decompress(data, page.unpacked - levels, codec=_CODECS[codec], asbytes=True)
        except (arrow.ArrowException, OSError):
            if codec != "LZ4" or page.unpacked >= 1 << 28:  # from which on the older form could pass for the newer one
                raise
            data = arrow.decompress(data[8:], page.unpacked - levels, codec="lz4_raw", asbytes=True)  # after two sizes
    if page.kind == _DATA_V2:
        return data
    at = 0
    for level, key in ((schema.max_repetition_level, 4), (schema.max_definition_level, 3)):
        if level:
            if _number(page.own, key) != _RUNS:  # an old encoding, which does not say how long it is
                raise BadPage("texts that share their beginnings, after levels of an old kind")
            at += 4 + int.from_bytes(data[at : at + 4], "little")
    return data[at:]


def _delta(data: bytes, at: int, values: int, decoded: bool = False) -> tuple[list[int], int]:
    """Examine delta-packed integers; return where they end, and if `decoded` is set, the integers."""
    try:
        block, at = _varint(data, at)
        parts, at = _varint(data, at)
        count, at = _varint(data, at)
        first, at = _varint(data, at)
        if count > values:
            raise BadPage(f"{count:,} lengths of {values:,} texts")
        if not 0 < parts <= block or block % (8 * parts):
            raise BadPage("lengths of texts in blocks of no size")
        found, left = [_zigzag(first)], count - 1
        while left > 0:
            least, at = _varint(data, at)
            widths, at = data[at : at + parts], at + parts
            for width in widths:
                if left <= 0:
                    break
                here = min(left, block // parts)
                packed, at = data[at : at + block // parts * width // 8], at + block // parts * width // 8
                if decoded:
                    bits, mask = int.from_bytes(packed, "little"), (1 << width) - 1
                    steps = ((bits >> (width * index) & mask) + _zigzag(least) for index in range(here))
                    found += list(accumulate(steps, initial=found[-1]))[1:]
                left -= here
            if len(widths) < parts or at > len(data):
                raise BadPage("lengths of texts that are cut off")
    except IndexError:
        raise BadPage("lengths of texts that are cut off") from None
    return (found[:count] if decoded else []), at
