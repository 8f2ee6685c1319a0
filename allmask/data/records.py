"""Read files as streams of records: JSON lines, csv, parquet, plain text or CoNLL columns, chosen by the file name.

for record in read_records("train.jsonl", {"source": text, "target": text}):
    record.fields["source"], record.where   # "北京欢迎你", "train.jsonl:1"

There is one reader per format. It yields the location of each row with its fields, or with the `Bad` that explains why
the row cannot be used. A fault of the whole file (a missing column, a broken header) is a DataError.
"""

from __future__ import annotations

import codecs
import csv
import gzip
import json
import re
import zlib
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from io import BufferedIOBase
from pathlib import Path
from typing import Any, NamedTuple

from allmask.data.fields import Bad, Cell, Checker, as_checkers, check_row, missing, required, show
from allmask.errors import DataError, UsageError
from allmask.files import same_content

MAX_LINE = 10_000_000  # bytes; a longer line means that the file lost its line ends
_CHUNK = 1 << 20  # bytes read at a time from a line that is too long
_PARQUET_ROWS = 256  # decoded at a time
_COLUMN_GAP = re.compile(r"[ \t]+")  # not other spaces: a full-width one is a token of Chinese text
_DOCUMENT = "-DOCSTART-"  # marks the start of a document in CoNLL files
_CLOSE = 'close the quote (a quote inside a quoted cell is written twice: "")'


@dataclass(frozen=True)
class Record:
    """The requested fields of a row and its location: "train.jsonl:214" or "train.parquet: row 214"."""

    fields: dict[str, Any]
    where: str


Row = tuple[str, dict[str, Any] | Bad]  # its location, its fields


def read_records(
    path: str | Path, fields: Mapping[str, Checker | type], on_bad_record: str = "stop",
    skipped: Counter[str] | None = None, max_line: int = MAX_LINE,
) -> Iterator[Record]:  # fmt: skip
    """Return the records of a file as a stream. A file that cannot be read at all is refused at once.

    With "stop", the first bad record raises a DataError. With "skip", bad records are left out and counted in `skipped`
    by reason. A file without any usable record is an error in both modes.
    """
    skips(on_bad_record)  # refuses other values
    path, checkers = Path(path), as_checkers(fields)
    check_file(path)
    reader = _READERS.get(kind(path))
    if reader is None or (reader is _parquet_rows and path.suffix.lower() == ".gz"):
        hint = f"expected one of {', '.join(_READERS)}, or .gz of a text"
        raise DataError(f'{path}: unknown kind of file "{path.suffix}"', hint)
    if reader is _text_rows and "tokens" in checkers:  # tagged text in columns, not one text per line
        reader = _column_rows
    rows = reader(path, checkers, max_line)
    return _good_records(path, rows, lambda row: check_row(checkers, row), on_bad_record, skipped)


def usable(
    path: Path, records: Iterable[Record], check: Callable[[dict[str, Any]], object], on_bad_record: str,
    skipped: Counter[str] | None = None,
) -> Iterator[Record]:  # fmt: skip
    """Yield the records that pass `check`, which raises Bad if the fields of a record do not fit together."""

    def checked(fields: dict[str, Any]) -> dict[str, Any]:
        check(fields)
        return fields

    rows = ((record.where, record.fields) for record in records)
    return _good_records(path, rows, checked, on_bad_record, skipped)


def _good_records(
    path: Path, rows: Iterable[Row], check: Callable[[dict[str, Any]], dict[str, Any]], on_bad_record: str,
    skipped: Counter[str] | None,
) -> Iterator[Record]:  # fmt: skip
    skipped = Counter() if skipped is None else skipped
    found, first, before = False, None, skipped.copy()
    for where, row in rows:
        try:
            if isinstance(row, Bad):
                raise row
            record = Record(check(row), where)
        except Bad as bad:
            hint = bad.hint.replace("the line", "the row") if where.startswith(f"{path}: row ") else bad.hint
            error = DataError(f"{where}: {bad.what}", f"{hint}, or pass --on-bad-record skip")
            if not skips(on_bad_record):
                raise error from None
            first = first or error
            skipped[bad.reason] += 1
        else:
            found = True
            yield record
    if not found:
        if first is None:
            raise DataError(f"{path}: there are no records in it", "check how the file was made")
        what = f"no record can be used; skipped {reasons(skipped - before)}"
        raise DataError(f"{path}: {what}", f"the first: {first.message}")


def skips(on_bad_record: str) -> bool:
    """Whether bad records are skipped, not reported as errors."""
    if on_bad_record not in ("stop", "skip"):
        raise UsageError(f"on_bad_record is {on_bad_record!r}; expected one of stop, skip")
    return on_bad_record == "skip"


def reasons(skipped: Counter[str]) -> str:
    """Return why records were skipped, the most frequent reason first: '2 × malformed JSON, 1 × missing field'."""
    return ", ".join(f"{count:,} × {reason}" for reason, count in skipped.most_common())


def expect_held_out(data: Iterable[str | Path], held_out: Iterable[str | Path]) -> None:
    """Refuse evaluation files that are also training files, by path or by content."""
    by_size: dict[int, list[Path]] = {}
    for file in filter(Path.is_file, map(Path, data)):
        by_size.setdefault(file.stat().st_size, []).append(file)
    for file in filter(Path.is_file, map(Path, held_out)):
        for other in by_size.get(file.stat().st_size, []):
            if same_content(file, other):
                what = "is" if file.resolve() == other.resolve() else f"has the same content as {other}, which is"
                raise UsageError(
                    f"--eval {file}: {what} also trained on (--data)",
                    "a score on training records says nothing: name other files, or leave --eval out",
                )


# ---- files and physical lines --------------------------------------------------------------------------------------


def kind(path: Path) -> str:
    """Return the ending of a file name in lower case, without .gz."""
    return (Path(path.stem) if path.suffix.lower() == ".gz" else path).suffix.lower()


def check_file(path: Path) -> None:
    """Refuse a folder and a file that is absent, empty or cannot be opened."""
    try:
        if path.is_dir():
            raise DataError(f"{path}: is a folder", "name a file in it")
        size = path.stat().st_size
        with path.open("rb"):
            pass
    except FileNotFoundError:
        raise DataError(f"{path}: no such file", "check the path") from None
    except OSError as error:
        raise unreadable(path, error) from None
    if size == 0:
        raise DataError(f"{path}: the file is empty", "check how it was made")


def unreadable(path: Path, error: OSError) -> DataError:
    return DataError(f"{path}: cannot be read: {error.strerror or error}", "check the path and its permissions")


@contextmanager
def open_bytes(path: Path) -> Iterator[BufferedIOBase]:
    """Open a file, decompressed if its name ends in .gz. Errors while reading become DataErrors that name the file."""
    try:
        with gzip.open(path, "rb") if path.suffix.lower() == ".gz" else path.open("rb") as stream:
            yield stream
    except (gzip.BadGzipFile, zlib.error, EOFError) as error:
        raise DataError(f"{path}: cannot be decompressed: {error}", "the file may be cut off: copy it again") from None
    except OSError as error:
        raise unreadable(path, error) from None


class Line(NamedTuple):
    number: int  # from 1
    offset: int  # of its first byte in the file, after decompression
    raw: bytes
    whole: bool  # False: longer than the limit, and cut off here


def lines(path: Path, limit: int) -> Iterator[Line]:
    """Yield all lines with their line ends. Of a line longer than `limit` bytes only the beginning is in memory."""
    with open_bytes(path) as stream:
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
                if raw.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):  # UTF-32's begins like the first
                    raise DataError(f"{path}: the file is UTF-16 or UTF-32", "save it as UTF-8")
                bom = len(codecs.BOM_UTF8) if raw.startswith(codecs.BOM_UTF8) else 0
            yield Line(number, offset + bom, raw[bom:], whole)
            offset += size


def decode(line: Line, limit: int) -> str:
    """Return a line as text; raise Bad if it is too long, has a NUL byte or is not UTF-8."""
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
    hint = "save the file as UTF-8"
    try:
        line.raw.decode("gb18030")  # often used for Chinese; other text is hardly ever well-formed in it by chance
        hint += " (if it is Chinese in GB18030: iconv -f GB18030 -t UTF-8)"
    except UnicodeDecodeError:
        pass
    raise Bad("not UTF-8", what, hint, line.number)


# ---- JSON lines and plain text -------------------------------------------------------------------------------------


def _json_rows(path: Path, checkers: Mapping[str, Checker], limit: int) -> Iterator[Row]:
    """JSON lines: one object per line."""
    return _rows_of_lines(path, limit, _parse_object)


def _text_rows(path: Path, checkers: Mapping[str, Checker], limit: int) -> Iterator[Row]:
    """Plain text: each line is the value of the only required field."""
    names = required(checkers) or list(checkers)
    if len(names) > 1:
        raise DataError(
            f"{path}: a text file has one field, but {', '.join(map(show, names))} are needed",
            'write one JSON object per line to a .jsonl file: {"' + '": "…", "'.join(names) + '": "…"}',
        )
    return _rows_of_lines(path, limit, lambda line: {names[0]: line.rstrip("\r\n")})


def _rows_of_lines(path: Path, limit: int, parse: Callable[[str], dict[str, Any]]) -> Iterator[Row]:
    """Yield a row for each line that is not blank."""
    for line in lines(path, limit):
        if line.raw.strip():
            try:
                row = parse(decode(line, limit))
            except Bad as bad:
                row = bad
            yield f"{path}:{line.number}", row


def _parse_object(line: str) -> dict[str, Any]:
    line = line.rstrip()
    # Hints for whole JSON documents, which are often given as JSON lines
    program = ".[]" if line.lstrip().startswith("[") else "." if line.strip() == "{" else None
    hint = f"write one object a line (jq -c {program} in.json > out.jsonl)" if program else "fix the line"
    try:
        found = json.loads(line, object_pairs_hook=_unique_keys)
    except json.JSONDecodeError as error:
        what = error.msg[:1].lower() + error.msg[1:].removesuffix(" at")
        raise Bad("malformed JSON", f"not valid JSON: {what} at column {error.colno}", hint) from None
    except (ValueError, RecursionError):  # thousands of digits, or of brackets
        raise Bad("malformed JSON", "not valid JSON: a number too long or nested too deeply") from None
    if not isinstance(found, dict):
        raise Bad("not an object", f"expected a JSON object, found {show(found)}", hint)
    return found


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) < len(pairs):
        raise Bad("duplicate key", f"{show(_first_repeated([name for name, _ in pairs]))} occurs twice in one object")
    return made


def _first_repeated(names: Sequence[str]) -> str | None:
    seen: set[str] = set()
    return next((name for name in names if name in seen or seen.add(name)), None)


# ---- csv -----------------------------------------------------------------------------------------------------------


class _CsvLines:
    """Feeds physical lines to the csv parser and keeps those of the current record, so that it can go back to them."""

    def __init__(self, path: Path, limit: int):
        self.source, self.limit = lines(path, limit), limit
        self.again: deque[Line] = deque()
        self.taken: list[Line] = []
        self.bad: Bad | None = None  # the first line of this record that is not text

    def _next(self) -> Line | None:
        return self.again.popleft() if self.again else next(self.source, None)

    def begin(self) -> Line | None:
        """Start the next record and return its first line."""
        self.taken, self.bad = [], None
        line = self._next()
        if line is not None:
            self.again.appendleft(line)
        return line

    def __iter__(self) -> Iterator[str]:
        size = 0
        while line := self._next():
            self.taken.append(line)
            size += len(line.raw)
            if len(self.taken) > 1 and size > self.limit:
                raise Bad("unclosed quote", f"a quoted cell goes on for more than {self.limit:,} bytes", _CLOSE)
            try:
                content = decode(line, self.limit)
            except Bad as bad:
                if not line.whole:
                    raise
                self.bad = self.bad or bad
                content = line.raw.decode("utf-8", "replace")  # so that the parser finds the end of the record
            yield content

    def back(self) -> None:
        """Return all lines of a broken record but the first, so that reading continues at its second line."""
        self.again.extendleft(reversed(self.taken[1:]))


def _csv_rows(path: Path, checkers: Mapping[str, Checker], limit: int) -> Iterator[Row]:
    """Comma-separated values under a header; a quoted cell may contain commas, quotes and line breaks."""
    csv.field_size_limit(max(csv.field_size_limit(), limit))  # of the whole process; its 128 kB would refuse long texts
    rows = _csv_cells(path, limit)
    header = _csv_columns(path, next(rows, None), required(checkers))
    for number, cells in rows:
        if isinstance(cells, Bad):
            yield f"{path}:{cells.line or number}", cells
        elif len(cells) != len(header):
            listed = ", ".join(header[:6]) + (", …" if len(header) > 6 else "")
            what = f"{len(cells)} column{'s' * (len(cells) > 1)}; the header has {len(header)} ({listed})"
            yield f"{path}:{number}", Bad("wrong number of columns", what, "put cells with a comma in quotes")
        else:
            yield f"{path}:{number}", dict(zip(header, map(Cell, cells), strict=True))


def csv_header(path: Path, limit: int) -> list[str]:
    """Return the names of the columns."""
    return _csv_columns(path, next(_csv_cells(path, limit), None), [])


def _csv_cells(path: Path, limit: int) -> Iterator[tuple[int, list[str] | Bad]]:
    """Yield the cells of each record and the number of its first line. Blank lines are not records."""
    feed = _CsvLines(path, limit)
    while first := feed.begin():
        try:
            cells = next(csv.reader(feed, strict=True))
        except Bad as bad:
            feed.back()
            yield first.number, bad
        except csv.Error as error:
            feed.back()
            if "unexpected end of data" in str(error):
                yield first.number, Bad("unclosed quote", "a quoted cell begins here and never ends", _CLOSE)
            else:
                yield first.number, Bad("malformed csv", f"not valid csv: {error}", _CLOSE)
        else:
            if feed.bad or len(cells) > 1 or first.raw.strip():
                yield first.number, feed.bad or cells


def _csv_columns(path: Path, first: tuple[int, list[str] | Bad] | None, names: list[str]) -> list[str]:
    """Check the header, the first record of the file, and return its columns; `names` must be among them."""
    if first is None:
        raise DataError(f"{path}: nothing but blank lines", f"the first line names the columns: {','.join(names)}")
    number, cells = first
    if isinstance(cells, Bad):
        raise DataError(f"{path}:{cells.line or number}: the header cannot be read: {cells.what}", cells.hint)
    header = [cell.strip() for cell in cells]
    _expect_columns(f"{path}:{number}", header, names)
    return header


def _expect_columns(where: str, columns: list[str], names: list[str]) -> None:
    repeated = _first_repeated(columns)
    if repeated is not None:
        raise DataError(f"{where}: two columns are called {show(repeated)}", "rename one of the two")
    for name in names:
        if name not in columns:
            what, hint = missing(name, columns, "the names of the columns")
            if len(columns) == 1 and any(mark in columns[0] for mark in ";\t|"):
                hint = "separate columns with commas"
            raise DataError(f"{where}: no column {what.removeprefix('no ')}", hint)


# ---- parquet -------------------------------------------------------------------------------------------------------


def _parquet_rows(path: Path, checkers: Mapping[str, Checker], limit: int) -> Iterator[Row]:
    """The requested columns of a parquet file, a few hundred rows at a time."""
    import pyarrow as arrow
    from pyarrow import parquet

    try:
        with parquet.ParquetFile(path, pre_buffer=False) as file:
            columns = file.schema_arrow.names
            _expect_columns(str(path), columns, required(checkers))
            chosen, number = [name for name in columns if name in checkers], 0
            for batch in file.iter_batches(_PARQUET_ROWS, columns=chosen, use_threads=False):
                cells = dict(zip(batch.schema.names, batch.columns, strict=True))
                for index in range(batch.num_rows):
                    number += 1
                    try:
                        row = {name: _parquet_value(column[index], name, limit) for name, column in cells.items()}
                    except Bad as bad:
                        row = bad
                    yield f"{path}: row {number}", row
    except (arrow.ArrowException, OSError) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise unreadable(path, error) from None
        reason = str(error).split("\n")[0]
        raise DataError(f"{path}: not a readable parquet file: {reason}", "it may be cut off: copy it again") from None


def _parquet_value(cell: Any, name: str, limit: int) -> Any:
    try:
        value = cell.as_py()
    except UnicodeDecodeError as error:
        what = f"{show(name)} is not UTF-8: 0x{error.object[error.start]:02x} at byte {error.start + 1}"
        raise Bad("not UTF-8", what, "write the column again as UTF-8") from None
    if isinstance(value, str | bytes) and len(value) > limit:
        raise Bad("cell too long", f"{show(name)} is longer than {limit:,} characters", "split it")
    return value


# ---- CoNLL columns: a token per line with its tag in the last column, a blank line between sentences ---------------


def _column_rows(path: Path, checkers: Mapping[str, Checker], limit: int) -> Iterator[Row]:
    """A row per sentence with `tokens` and `tags`, located by its first line. Without a second column: no tags."""
    sentence: list[Line] = []
    for line in lines(path, limit):
        if line.raw.strip(b" \t\r\n"):
            sentence.append(line)
        elif sentence:
            yield from _sentence_rows(path, sentence, limit)
            sentence = []
    if sentence:
        yield from _sentence_rows(path, sentence, limit)


def _sentence_rows(path: Path, sentence: list[Line], limit: int) -> Iterator[Row]:
    """Yield the row of a sentence; nothing for the start of a document."""
    try:
        cells = [_COLUMN_GAP.split(decode(line, limit).strip(" \t\r\n")) for line in sentence]
        kept = [(line, row) for line, row in zip(sentence, cells, strict=True) if row[0] != _DOCUMENT]
        if not kept:
            return
        columns = len(kept[0][1])
        for line, row in kept:
            if len(row) != columns:
                what = f"{len(row)} column{'s' * (len(row) > 1)}; the sentence began with {columns}"
                raise Bad("wrong number of columns", what, "each line is a token and its tag", line.number)
    except Bad as bad:
        yield f"{path}:{bad.line or sentence[0].number}", bad
        return
    fields = {"tokens": [row[0] for _, row in kept]}
    if columns > 1:
        fields["tags"] = [row[-1] for _, row in kept]
    yield f"{path}:{kept[0][0].number}", fields


_READERS = {
    ".jsonl": _json_rows, ".ndjson": _json_rows, ".json": _json_rows,
    ".csv": _csv_rows, ".parquet": _parquet_rows, ".txt": _text_rows, ".conll": _column_rows, ".bio": _column_rows,
}  # fmt: skip
