"""The files that records come in: physical lines, and one reader a format.

A reader yields where a row stands and the row, or the `Bad` that says why it is none. What concerns the whole file (a
column that is not there, a broken header) is a DataError: no record can be used.
"""

from __future__ import annotations

import codecs
import csv
import gzip
import json
import re
import zlib
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from io import BufferedIOBase
from pathlib import Path
from typing import Any, NamedTuple

from allmask.data.fields import Bad, Cell, Checker, missing, required, show
from allmask.errors import DataError

_CHUNK = 1 << 20  # bytes read at a time of a line that is too long
_PARQUET_ROWS = 256  # decoded at a time
_BETWEEN = re.compile(r"[ \t]+")  # between columns; not other spaces: a full-width one is a token of Chinese text
_DOCUMENT = "-DOCSTART-"


class Row(NamedTuple):
    where: str  # ":214", behind the name of the file
    fields: dict[str, Any] | Bad


# ---- physical lines ------------------------------------------------------------------------------------------------


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


# ---- JSON lines and plain text -------------------------------------------------------------------------------------


def json_rows(path: Path, checkers: Mapping[str, Checker], limit: int) -> Iterator[Row]:
    """JSON lines. Blank lines are no records."""
    for line in lines(path, limit):
        if line.raw.strip():
            yield _row(line, lambda line=line: _parse_object(decode(line, limit).rstrip()))


def text_rows(path: Path, checkers: Mapping[str, Checker], limit: int) -> Iterator[Row]:
    """Plain text: a line that is not blank is the one field that is asked for."""
    name = _only_field(path, checkers)
    for line in lines(path, limit):
        if line.raw.strip():
            yield _row(line, lambda line=line: {name: decode(line, limit).rstrip("\r\n")})


def _row(line: Line, parse) -> Row:
    try:
        return Row(f":{line.number}", parse())
    except Bad as bad:
        return Row(f":{line.number}", bad)


def _only_field(path: Path, checkers: Mapping[str, Checker]) -> str:
    names = required(checkers) or list(checkers)
    if len(names) > 1:
        raise DataError(
            f"{path}: a text file has one field, but {', '.join(map(show, names))} are needed",
            'write one JSON object a line to a .jsonl file: {"' + '": "…", "'.join(names) + '": "…"}',
        )
    return names[0]


def _parse_object(line: str) -> dict[str, Any]:
    try:
        found = json.loads(line, object_pairs_hook=_unique)
    except json.JSONDecodeError as error:
        raise Bad(
            "malformed JSON", f"not valid JSON: {_say(error)} at column {error.colno}", _json_hint(line)
        ) from None
    except (ValueError, RecursionError):  # thousands of digits, or of brackets
        raise Bad("malformed JSON", "not valid JSON: a number too long or nested too deeply") from None
    if not isinstance(found, dict):
        raise Bad("not an object", f"expected a JSON object, found {show(found)}", _json_hint(line))
    return found


def _say(error: json.JSONDecodeError) -> str:
    return error.msg[:1].lower() + error.msg[1:].removesuffix(" at")


def _json_hint(line: str) -> str:
    """Whole documents of JSON are often given as lines of it."""
    program = ".[]" if line.lstrip().startswith("[") else "." if line.strip() == "{" else None
    return f"write one object a line (jq -c {program} in.json > out.jsonl)" if program else "fix the line"


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) < len(pairs):
        raise Bad("duplicate key", f"{show(_twice([name for name, _ in pairs]))} occurs twice in one object")
    return made


def _twice(names: Sequence[str]) -> str | None:
    """The first name that was there before."""
    seen: set[str] = set()
    return next((name for name in names if name in seen or seen.add(name)), None)


# ---- csv ---------------------------------------------------------------------------------------------------


class _Feed:
    """Hands physical lines to the csv parser and remembers those of the record it is at, so that it can go back."""

    def __init__(self, path: Path, limit: int):
        self.source, self.limit = lines(path, limit), limit
        self.again: deque[Line] = deque()
        self.taken: list[Line] = []
        self.bad: Bad | None = None  # a line of this record is no text

    def begin(self) -> Line | None:
        """The first line of the next record."""
        self.taken, self.bad = [], None
        line = self.again.popleft() if self.again else next(self.source, None)
        if line is not None:
            self.again.appendleft(line)
        return line

    def __iter__(self) -> Iterator[str]:
        size = 0
        while line := self.again.popleft() if self.again else next(self.source, None):
            self.taken.append(line)
            size += len(line.raw)
            if len(self.taken) > 1 and size > self.limit:
                raise Bad("unclosed quote", f"a quoted cell goes on for more than {self.limit:,} bytes", _CLOSE)
            yield self._decode(line)

    def _decode(self, line: Line) -> str:
        """A line that is no text still shows where its record ends, unless it was cut off."""
        try:
            return decode(line, self.limit)
        except Bad as bad:
            if not line.whole:
                raise
            self.bad = self.bad or bad
            return line.raw.decode("utf-8", "replace")

    def back(self) -> None:
        """After a record that cannot be read: its first line is lost, the next may be a record."""
        self.again.extendleft(reversed(self.taken[1:]))


_CLOSE = 'close the quote (a quote inside a quoted cell is written twice: "")'


def csv_rows(path: Path, checkers: Mapping[str, Checker], limit: int) -> Iterator[Row]:
    """Comma-separated values under a header; a quoted cell may hold commas, quotes and line breaks."""
    csv.field_size_limit(max(csv.field_size_limit(), limit))  # of the whole process; its 128 kB would refuse long texts
    rows = _cells(path, limit)
    header = _header(path, next(rows, None), required(checkers))
    for number, cells in rows:
        if isinstance(cells, Bad):
            yield Row(f":{cells.line or number}", cells)
        elif len(cells) != len(header):
            yield Row(f":{number}", _bad_columns(len(cells), header))
        else:
            yield Row(f":{number}", dict(zip(header, map(Cell, cells), strict=True)))


def csv_header(path: Path, limit: int) -> list[str]:
    """The names of the columns alone."""
    return _header(path, next(_cells(path, limit), None), [])


def _cells(path: Path, limit: int) -> Iterator[tuple[int, list[str] | Bad]]:
    """The cells of each record and the line it begins on. Blank lines are no records."""
    feed = _Feed(path, limit)
    while first := feed.begin():
        try:
            cells = next(csv.reader(feed, strict=True))
        except Bad as bad:
            feed.back()
            yield first.number, bad
        except csv.Error as error:
            feed.back()
            yield first.number, _bad_csv(error)
        else:
            if feed.bad or len(cells) > 1 or first.raw.strip():
                yield first.number, feed.bad or cells


def _bad_columns(found: int, header: list[str]) -> Bad:
    listed = ", ".join(header[:6]) + (", …" if len(header) > 6 else "")
    what = f"{found} column{'s' * (found > 1)}; the header has {len(header)} ({listed})"
    return Bad("wrong number of columns", what, "put cells with a comma in quotes")


def _bad_csv(error: csv.Error) -> Bad:
    if "unexpected end of data" in str(error):
        return Bad("unclosed quote", "a quoted cell begins here and never ends", _CLOSE)
    return Bad("malformed csv", f"not valid csv: {error}", _CLOSE)


def _header(path: Path, first: tuple[int, list[str] | Bad] | None, names: list[str]) -> list[str]:
    if first is None:
        raise DataError(f"{path}: nothing but blank lines", f"the first line names the columns: {','.join(names)}")
    number, cells = first
    if isinstance(cells, Bad):
        raise DataError(f"{path}:{cells.line or number}: the header cannot be read: {cells.what}", cells.hint)
    header = [cell.strip() for cell in cells]
    _check_columns(path, header, names, f":{number}")
    return header


def _check_columns(path: Path, columns: list[str], names: list[str], where: str = "") -> None:
    twice = _twice(columns)
    if twice is not None:
        raise DataError(f"{path}{where}: two columns are called {show(twice)}", "rename one of the two")
    for name in names:
        if name not in columns:
            what, hint = missing(name, columns, "the names of the columns")
            if len(columns) == 1 and any(mark in columns[0] for mark in ";\t|"):
                hint = "separate columns with commas"
            raise DataError(f"{path}{where}: no column {what.removeprefix('no ')}", hint)


# ---- parquet -----------------------------------------------------------------------------------------------


def parquet_rows(path: Path, checkers: Mapping[str, Checker], limit: int) -> Iterator[Row]:
    """The asked columns of a parquet file, a few hundred rows at a time."""
    import pyarrow as arrow
    from pyarrow import parquet

    try:
        with parquet.ParquetFile(path, pre_buffer=False) as file:
            columns = file.schema_arrow.names
            _check_columns(path, columns, required(checkers))
            chosen, number = [name for name in columns if name in checkers], 0
            for batch in file.iter_batches(_PARQUET_ROWS, columns=chosen, use_threads=False):
                for row in _parquet_batch(batch, limit):
                    number += 1
                    yield Row(f": row {number}", row)
    except (arrow.ArrowException, OSError) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise unreadable(path, error) from None
        reason = str(error).split("\n")[0]
        raise DataError(f"{path}: not a readable parquet file: {reason}", "it may be cut off: copy it again") from None


def _parquet_batch(batch: Any, limit: int) -> Iterator[dict[str, Any] | Bad]:
    columns = dict(zip(batch.schema.names, batch.columns, strict=True))
    for number in range(batch.num_rows):
        try:
            yield {name: _parquet_cell(column[number], name, limit) for name, column in columns.items()}
        except Bad as bad:
            yield bad


def _parquet_cell(cell: Any, name: str, limit: int) -> Any:
    try:
        value = cell.as_py()
    except UnicodeDecodeError as error:
        what = f"{show(name)} is not UTF-8: 0x{error.object[error.start]:02x} at byte {error.start + 1}"
        raise Bad("not UTF-8", what, "write the column again as UTF-8") from None
    if isinstance(value, str | bytes) and len(value) > limit:
        raise Bad("line too long", f"{show(name)} is longer than {limit:,} characters", "split it")
    return value


# ---- tagged text in columns, as the CoNLL tasks have it: a token a line, its tag at the end, a blank line between ---


def column_rows(path: Path, checkers: Mapping[str, Checker], limit: int) -> Iterator[Row]:
    """A sentence a row, `tokens` and `tags`, under the line it begins on. Without a second column there are no tags."""
    sentence: list[Line] = []
    for line in lines(path, limit):
        if line.raw.strip(b" \t\r\n"):
            sentence.append(line)
        elif sentence:
            yield from _sentence_rows(sentence, limit)
            sentence = []
    if sentence:
        yield from _sentence_rows(sentence, limit)


def _sentence_rows(sentence: list[Line], limit: int) -> Iterator[Row]:
    try:
        cells = [_BETWEEN.split(decode(line, limit).strip(" \t\r\n")) for line in sentence]
        kept = [(line, row) for line, row in zip(sentence, cells, strict=True) if row[0] != _DOCUMENT]
        if kept:
            yield Row(f":{kept[0][0].number}", _sentence(kept))
    except Bad as bad:
        yield Row(f":{bad.line or sentence[0].number}", bad)


def _sentence(rows: list[tuple[Line, list[str]]]) -> dict[str, list[str]]:
    columns = len(rows[0][1])
    for line, row in rows:
        if len(row) != columns:
            what = f"{len(row)} column{'s' * (len(row) > 1)}; the sentence began with {columns}"
            raise Bad("wrong number of columns", what, "each line is a token and its tag", line.number)
    tokens = {"tokens": [row[0] for _, row in rows]}
    return tokens if columns == 1 else {**tokens, "tags": [row[-1] for _, row in rows]}
