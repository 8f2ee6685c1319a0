"""Physical lines of a text file as a stream: numbered, of bounded size, checked before they are read as text."""

from __future__ import annotations

import codecs
import gzip
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from io import BufferedIOBase
from pathlib import Path
from typing import NamedTuple

from allmask.data.fields import Bad
from allmask.errors import DataError

_CHUNK = 1 << 20


class Line(NamedTuple):
    number: int  # from 1
    offset: int  # of its first byte in the file, after decompression
    raw: bytes
    whole: bool  # False: longer than the limit, and cut off here


@contextmanager
def open_bytes(path: Path) -> Iterator[BufferedIOBase]:
    """The file, decompressed if its name ends in .gz; what goes wrong while it is read is an error that names it."""
    try:
        with gzip.open(path, "rb") if path.suffix.lower() == ".gz" else path.open("rb") as stream:
            yield stream
    except (gzip.BadGzipFile, zlib.error, EOFError) as error:
        raise DataError(f"{path}: cannot be decompressed: {error}", "the file may be cut off: copy it again") from None
    except OSError as error:
        raise unreadable(path, error) from None


def unreadable(path: Path, error: OSError) -> DataError:
    return DataError(f"{path}: cannot be read: {error.strerror or error}", "check the path and its permissions")


def lines(path: Path, limit: int) -> Iterator[Line]:
    """All lines with their ends; of one longer than `limit` bytes only the beginning is ever in memory."""
    with open_bytes(path) as stream:
        number = offset = 0
        while raw := stream.readline(limit + 2):
            number, size = number + 1, len(raw)
            whole = len(raw.rstrip(b"\r\n")) <= limit
            if not whole and not raw.endswith(b"\n"):
                size += _skip_to_end(stream)
            bom = _bom(path, raw) if number == 1 else 0
            yield Line(number, offset + bom, raw[bom:], whole)
            offset += size


def decode(line: Line, limit: int) -> str:
    """The line as text, if it is text."""
    if not line.whole:
        raise Bad("line too long", f"the line is longer than {limit:,} bytes", "split it", line.number)
    if b"\0" in line.raw:
        at = line.raw.index(b"\0")
        what = f"NUL byte at byte {at + 1} of the line (offset {line.offset + at})"
        raise Bad("NUL byte", what, "the file may be damaged, or UTF-16: save it as UTF-8", line.number)
    try:
        return line.raw.decode("utf-8")
    except UnicodeDecodeError as error:
        at = error.start
        what = f"not UTF-8: 0x{line.raw[at]:02x} at byte {at + 1} of the line (offset {line.offset + at})"
        raise Bad("not UTF-8", what, _recode(line.raw), line.number) from None


def _recode(raw: bytes) -> str:
    """Chinese files are often in GB18030, in which hardly anything else is well-formed by chance."""
    try:
        raw.decode("gb18030")
    except UnicodeDecodeError:
        return "save the file as UTF-8"
    return "save the file as UTF-8 (if it is Chinese in GB18030: iconv -f GB18030 -t UTF-8)"


def _bom(path: Path, raw: bytes) -> int:
    """How many bytes of a UTF-8 byte-order mark stand in front; that of another encoding is an error."""
    if raw.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):  # UTF-32's begins like the first
        raise DataError(f"{path}: the file is UTF-16 or UTF-32", "save it as UTF-8")
    return len(codecs.BOM_UTF8) if raw.startswith(codecs.BOM_UTF8) else 0


def _skip_to_end(stream: BufferedIOBase) -> int:
    """Read on to the end of the line, a piece at a time, and count the bytes."""
    skipped = 0
    while chunk := stream.readline(_CHUNK):
        skipped += len(chunk)
        if chunk.endswith(b"\n"):
            break
    return skipped
