"""A data file as bytes and lines: how it is named, compressed and encoded.

for line in lines(DataFile(Path("mails.csv"), encoding="cp1252"), MAX_LINE):
    decode(line, MAX_LINE)

Below `open_bytes` everything is UTF-8: a file in another encoding is converted while it is read.
"""

from __future__ import annotations

import codecs
import gzip
import io
import logging
import re
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from allmask.data.fields import Bad
from allmask.errors import DataError, UsageError
from allmask.files import special_file

log = logging.getLogger("allmask")
MAX_LINE = 10_000_000  # bytes; a longer line means that the file lost its line ends
_CHUNK = 1 << 20  # bytes read at a time from a line that is too long
_SMALL, _TIMES = 32 << 20, 100  # of compressed data: bytes that need no explanation; how often the file, for more
_BOMS = {  # UTF-32's first: it begins like one of UTF-16
    codecs.BOM_UTF32_LE: "utf-32", codecs.BOM_UTF32_BE: "utf-32",
    codecs.BOM_UTF16_LE: "utf-16", codecs.BOM_UTF16_BE: "utf-16",
}  # fmt: skip
_WIDE = re.compile("utf-?_?(16|32)")
_NON_ASCII = re.compile(rb"[\x80-\xff]+")
_MIXED = re.compile(rb"[A-Za-z][\x80-\xff]|[\x80-\xff][A-Za-z]")


@dataclass(frozen=True)
class DataFile:
    """A file and how to read it. Wherever records are read, it can take the place of a path.

    With `items`, nothing is read: these are the rows, objects or texts that a program has already, and `path` is what
    messages call them.
    """

    path: Path
    columns: Mapping[str, str] = field(default_factory=dict)  # field of a record -> column of the file (--columns)
    encoding: str | None = None  # None: UTF-8, or what a byte-order mark says
    label_names: tuple[str, ...] = ()  # of labels that are given as numbers, from 0
    usual: Mapping[str, str] = field(default_factory=dict)  # like `columns`, where the file has such a column
    usual_encoding: str | None = None  # of a file whose encoding is not named, if it is not UTF-8
    whole: bool = False  # records also have their row, with all columns of the file
    said: set[str] = field(default_factory=set, compare=False)  # messages; each is logged once
    problems: dict[str, DataError] | None = field(default=None, compare=False)  # of skipped records, by location
    items: Sequence[Any] | None = field(default=None, compare=False)

    def __str__(self) -> str:
        return str(self.path)

    def __fspath__(self) -> str:
        return str(self.path)

    def say(self, message: str) -> None:
        if message not in self.said and self.items is None:
            self.said.add(message)
            log.info("%s", message)


def data_file(path: str | Path | DataFile) -> DataFile:
    return path if isinstance(path, DataFile) else DataFile(Path(path))


def kind(path: str | Path | DataFile) -> str:
    """Return the ending of a file name in lower case, without .gz."""
    path = Path(path)
    return (Path(path.stem) if path.suffix.lower() == ".gz" else path).suffix.lower()


def check_file(path: Path) -> None:
    """Refuse a folder, a pipe or a device, and a file that is absent, empty or cannot be opened."""
    try:
        if path.is_dir():
            raise DataError(f"{path}: is a folder", "name a file in it")
        what = special_file(path)
        if what is not None:  # files are read more than once, so a stream will not do
            raise DataError(f"{path}: {what}, not a file", "write what it yields to a file, and name that")
        size = path.stat().st_size
        with path.open("rb"):
            pass
    except FileNotFoundError:
        raise DataError(f"{path}: no such file", "check the path") from None
    except OSError as error:
        raise unreadable(path, error) from None
    if size == 0:
        raise DataError(f"{path}: the file is empty", "check how it was made")


def unreadable(path: str | Path | DataFile, error: OSError) -> DataError:
    return DataError(f"{path}: cannot be read: {error.strerror or error}", "check the path and its permissions")


# ---- encodings -----------------------------------------------------------------------------------------------------


def check_encoding(name: str) -> str:
    """Refuse what is not the name of an encoding of text."""
    try:
        "".encode(name)
    except (LookupError, ValueError):
        usual = "utf-8, gb18030 (Chinese), cp1252 (Western European), shift_jis (Japanese), utf-16"
        raise UsageError(f"--encoding: {name!r} is unknown", f"usual ones: {usual}") from None
    return name


def is_utf8(encoding: str) -> bool:
    return codecs.lookup(encoding).name in ("utf-8", "utf-8-sig", "ascii")


def _encoding_of(file: DataFile) -> str:
    """Return the encoding to convert from: the one that was named, or that of the byte-order mark.

    Without both, the first line that is not ASCII decides between UTF-8 and `usual_encoding`.
    """
    if file.encoding is not None:
        return check_encoding(file.encoding)
    with _opened(file) as stream:
        start = stream.read(4)
        marked = next((name for mark, name in _BOMS.items() if start.startswith(mark)), None)
        if marked is not None or file.usual_encoding is None or is_utf8(file.usual_encoding):
            return marked or "utf-8"
        line = start + stream.readline(_CHUNK)
        while line and line.isascii() and b"\0" not in line:  # NUL: UTF-16 without a mark
            line = stream.readline(_CHUNK)
    with suppress(UnicodeDecodeError):
        text = codecs.getincrementaldecoder("utf-8")().decode(line, final=len(line) < _CHUNK)
        if "\0" not in text:
            return "utf-8"
    file.say(f"encoding: {file.usual_encoding}, as in training")
    return file.usual_encoding


class _AsUtf8(io.RawIOBase):
    """A stream in another encoding, read as UTF-8. Bytes that are not text stay as they are: not UTF-8 either."""

    def __init__(self, source: io.BufferedIOBase, file: DataFile, encoding: str):
        self.source, self.file, self.encoding = source, file, encoding
        errors = "strict" if _WIDE.match(encoding.lower()) else "surrogateescape"
        self.decoder = codecs.getincrementaldecoder(encoding)(errors)
        self.rest, self.ended = b"", False

    def readable(self) -> bool:
        return True

    def readinto(self, buffer) -> int:  # type: ignore[no-untyped-def]
        while not self.rest and not self.ended:
            data = self.source.read(_CHUNK)
            self.ended = not data
            try:
                self.rest = self.decoder.decode(data, final=self.ended).encode("utf-8", "surrogateescape")
            except UnicodeError as error:
                what = f"not {self.encoding}: {getattr(error, 'reason', error)}"
                raise DataError(f"{self.file}: {what}", "name its encoding with --encoding") from None
        count = min(len(buffer), len(self.rest))
        buffer[:count], self.rest = self.rest[:count], self.rest[count:]
        return count


# ---- compressed data -----------------------------------------------------------------------------------------------


def unpacked_limit(*paths: Path, small: int = _SMALL, times: int = _TIMES) -> int:
    """Return the most bytes that compressed files may unpack to. Texts shrink to a third or a tenth, seldom to less."""
    sizes = (path.stat().st_size for path in paths if path.is_file())  # a missing one is refused when it is opened
    return max(small, times * sum(sizes))


def unpacks_to_much(path: str | Path | DataFile, limit: int) -> DataError:
    hint = "no usual data does that; if you trust it, unpack it, or save it as .jsonl"
    return DataError(f"{path}: a small file that unpacks to more than {limit:,} bytes", hint)


class _Unpacked(io.RawIOBase):
    """A decompressed stream that ends with an error after `limit` bytes."""

    def __init__(self, source: gzip.GzipFile, path: Path, limit: int):
        self.source, self.path, self.limit, self.seen = source, path, limit, 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer) -> int:  # type: ignore[no-untyped-def]
        count = self.source.readinto(buffer)
        self.seen += count
        if self.seen > self.limit:
            raise unpacks_to_much(self.path, self.limit)
        return count


@contextmanager
def _opened(file: str | Path | DataFile) -> Iterator[io.BufferedIOBase]:
    path = Path(file)
    try:
        if path.suffix.lower() != ".gz":
            with path.open("rb") as stream:
                yield stream
            return
        with gzip.open(path, "rb") as unpacked:
            yield io.BufferedReader(_Unpacked(unpacked, path, unpacked_limit(path)), _CHUNK)
    except (gzip.BadGzipFile, zlib.error, EOFError) as error:
        raise DataError(f"{file}: cannot be decompressed: {error}", "the file may be cut off: copy it again") from None
    except OSError as error:
        raise unreadable(file, error) from None


@contextmanager
def open_bytes(file: str | Path | DataFile, encoding: str | None = None) -> Iterator[io.BufferedIOBase]:
    """Open a file as UTF-8, decompressed if its name ends in .gz. Errors while reading become DataErrors that name it.

    `encoding` is that of the bytes if it has been found out already.
    """
    file = data_file(file)
    encoding = encoding or _encoding_of(file)
    with _opened(file) as stream:
        yield stream if is_utf8(encoding) else io.BufferedReader(_AsUtf8(stream, file, encoding), _CHUNK)


# ---- lines ---------------------------------------------------------------------------------------------------------


class Line(NamedTuple):
    number: int  # from 1
    offset: int  # of its first byte in the file, after decompression
    raw: bytes
    whole: bool  # False: longer than the limit, and cut off here
    encoding: str = "utf-8"  # of the file; `raw` is UTF-8


def lines(file: str | Path | DataFile, limit: int) -> Iterator[Line]:
    """Yield all lines with their line ends. Of a line longer than `limit` bytes only the beginning is in memory."""
    file = data_file(file)
    encoding = _encoding_of(file)
    with open_bytes(file, encoding) as stream:
        number = offset = 0
        while raw := stream.readline(limit + 2):
            number, size, bom = number + 1, len(raw), 0
            whole = len(raw.rstrip(b"\r\n")) <= limit
            if not whole and not raw.endswith(b"\n"):
                while chunk := stream.readline(_CHUNK):  # skip the rest of the line
                    size += len(chunk)
                    if chunk.endswith(b"\n"):
                        break
            if number == 1:
                bom = len(codecs.BOM_UTF8) if raw.startswith(codecs.BOM_UTF8) else 0
            yield Line(number, offset + bom, raw[bom:], whole, encoding)
            offset += size


def decode(line: Line, limit: int) -> str:
    """Return a line as text; raise Bad if it is too long, has a NUL byte or is not in its encoding."""
    if not line.whole:
        raise Bad("line too long", f"the line is longer than {limit:,} bytes", "split it", line.number)
    if b"\0" in line.raw:
        at = line.raw.index(b"\0")
        what = f"NUL byte at byte {at + 1} of the line (offset {line.offset + at})"
        raise Bad("NUL byte", what, "the file may be damaged, or UTF-16: pass --encoding utf-16", line.number)
    try:
        return line.raw.decode("utf-8")
    except UnicodeDecodeError as error:
        at = error.start
    byte = f"0x{line.raw[at]:02x}"
    if not is_utf8(line.encoding):  # count the bytes before it as they are in the file
        before = len(line.raw[:at].decode("utf-8", "replace").encode(line.encoding, "replace"))
        what = f"not {line.encoding}: {byte} at byte {before + 1} of the line"
        raise Bad(f"not {line.encoding}", what, "name another --encoding", line.number)
    what = f"not UTF-8: {byte} at byte {at + 1} of the line (offset {line.offset + at})"
    raise Bad("not UTF-8", what, f"{_guess(line.raw)}, or save it as UTF-8", line.number)


def _guess(raw: bytes) -> str:
    """Suggest an encoding: Western European words have ASCII letters beside the others, Chinese ones have none."""
    chinese = max(map(len, _NON_ASCII.findall(raw))) >= 4 or not _MIXED.search(raw)
    try:
        raw.decode("gb18030" if chinese else "cp1252")
    except UnicodeDecodeError:
        return "name its encoding with --encoding"
    language, name = ("Chinese", "gb18030") if chinese else ("Western European", "cp1252")
    return f"if it is {language}, pass --encoding {name}"
