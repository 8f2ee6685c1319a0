"""The formats of data files: JSON lines and arrays, csv, Excel, parquet, plain text, CoNLL columns.

There is one reader per format. It yields the location of each row with its cells by column, or with the `Bad` that
explains why the row cannot be used. A fault of the whole file (a missing column, a broken header) is a DataError.
"""

from __future__ import annotations

import csv
import json
import re
import zipfile
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from importlib import import_module
from itertools import islice
from pathlib import Path
from typing import Any

from allmask.data import parquet_pages
from allmask.data.columns import Wanted, first_repeated
from allmask.data.fields import Bad, Cell, Maybe, required, show
from allmask.data.source import (
    DataFile,
    Line,
    data_file,
    decode,
    kind,
    lines,
    open_bytes,
    unpacked_limit,
    unpacks_to_much,
    unreadable,
)
from allmask.errors import DataError, ResourceError

Row = tuple[str, dict[str, Any] | Bad]  # its location, its cells by column
_PARQUET_ROWS = 256  # decoded at a time
_COLUMN_GAP = re.compile(r"[ \t]+")  # not other spaces: a full-width one is a token of Chinese text
_DOCUMENT = "-DOCSTART-"  # marks the start of a document in CoNLL files
_CLOSE = 'close the quote (a quote inside a quoted cell is written twice: "")'
_SPACE = re.compile(r"[ \t\r\n]*")
_SEPARATORS = ",;\t|"  # of csv files; of two that fit equally well, the first
_SAMPLED = 20  # records from which the separator is guessed
_CHUNK = 1 << 20  # bytes of XML that are examined at a time
_ELEMENTS = 200_000  # of a part of a workbook, rows aside; Excel has at most 65,490 formats of cells
_EXCEL_ROWS, _EXCEL_CELLS = 1_048_576, 100_000_000  # of a sheet: what Excel can have; what is read
_ENTITY = re.compile(rb"<\0?!\0?E\0?N\0?T\0?I\0?T\0?Y")  # in UTF-8 or UTF-16
_PARQUET_BYTES = 16 << 20  # decoded at a time, at most, if each row may have the longest text of a column
_PARQUET_VALUES = 4_000_000  # in lists, per group of rows, that need no explanation


def rows_of(wanted: Wanted, limit: int) -> Iterator[Row]:
    """Return the rows of a file as a stream; the name of the file decides its format."""
    file = wanted.file
    if file.items is not None:
        return _given_rows(wanted, file.items)
    reader = READERS.get(kind(file))
    if reader is None or (reader in (_parquet_rows, _xlsx_rows) and file.path.suffix.lower() == ".gz"):
        hint = f"expected one of {', '.join(READERS)}, or .gz of a text"
        raise DataError(f'{file}: unknown kind of file "{file.path.suffix}"', hint)
    if reader is _text_rows and "tokens" in wanted.checkers:  # tagged text in columns, not one text per line
        reader = _column_rows
    rows = reader(wanted, limit)
    return _bounded(file, rows) if reader in (_parquet_rows, _xlsx_rows) else rows


def _bounded(file: DataFile, rows: Iterator[Row]) -> Iterator[Row]:
    """The rows of a compressed table, until they are far more than it can hold: a long text may be stored once."""
    most, seen = unpacked_limit(file.path), 0
    for where, row in rows:
        seen += 0 if isinstance(row, Bad) else sum(len(cell) for cell in row.values() if isinstance(cell, str | list))
        if seen > most:
            raise unpacks_to_much(file, most)
        yield where, row


def _given_rows(wanted: Wanted, items: Sequence[Any]) -> Iterator[Row]:
    """Rows that are in memory; a text is the value of the only required field."""
    names = required(wanted.checkers) or list(wanted.checkers)[-1:]
    for number, item in enumerate(items, 1):
        where = f"{wanted.file} {number}"
        if isinstance(item, str) and len(names) == 1:
            yield where, {names[0]: item}
        elif isinstance(item, dict):
            yield where, item
        else:
            fields = ", ".join(f'"{name}": …' for name in names)
            expected = "a text, or {" + fields + "}" if len(names) == 1 else "{" + fields + "}"
            yield where, Bad("wrong type", f"{show(item)} is not an object", f"pass {expected}")


# ---- JSON and plain text -------------------------------------------------------------------------------------------


def _json_rows(wanted: Wanted, limit: int) -> Iterator[Row]:
    """JSON lines: one object per line."""
    return _rows_of_lines(wanted.file, limit, _parse_object)


def _json_or_array_rows(wanted: Wanted, limit: int) -> Iterator[Row]:
    """One array of objects, which is read into memory, or JSON lines."""
    with open_bytes(wanted.file) as stream:
        start = stream.read(1024).removeprefix(b"\xef\xbb\xbf").lstrip()
    return _array_rows(wanted.file, limit) if start.startswith(b"[") else _json_rows(wanted, limit)


def _text_rows(wanted: Wanted, limit: int) -> Iterator[Row]:
    """Plain text: each line is the value of the only required field."""
    names = required(wanted.checkers) or list(wanted.checkers)
    if len(names) > 1:
        raise DataError(
            f"{wanted.file}: a text file has one field, but {', '.join(map(show, names))} are needed",
            'write one JSON object per line to a .jsonl file: {"' + '": "…", "'.join(names) + '": "…"}',
        )
    return _rows_of_lines(wanted.file, limit, lambda line: {names[0]: line.rstrip("\r\n")})


def _rows_of_lines(file: DataFile, limit: int, parse: Callable[[str], dict[str, Any]]) -> Iterator[Row]:
    """Yield a row for each line that is not blank."""
    for line in lines(file, limit):
        if line.raw.strip():
            try:
                row = parse(decode(line, limit))
            except Bad as bad:
                row = bad
            yield f"{file}:{line.number}", row


def _parse_object(line: str) -> dict[str, Any]:
    line = line.rstrip()
    # Hints for whole JSON documents, which are often given as JSON lines
    is_array, is_document = line.lstrip().startswith("["), line.strip() == "{"
    hint = "if the file is one array, call it .json" if is_array else "fix the line"
    hint = "write one object a line (jq -c . in.json > out.jsonl)" if is_document else hint
    try:
        found = json.loads(line, object_pairs_hook=_unique_keys)
    except json.JSONDecodeError as error:
        raise Bad("malformed JSON", f"not valid JSON: {_said(error)} at column {error.colno}", hint) from None
    except (ValueError, RecursionError):  # thousands of digits, or of brackets
        raise Bad("malformed JSON", "not valid JSON: a number too long or nested too deeply") from None
    return _expect_object(found, hint)


def _said(error: json.JSONDecodeError) -> str:
    return error.msg[:1].lower() + error.msg[1:].removesuffix(" at")


def _expect_object(found: Any, hint: str) -> dict[str, Any]:
    if not isinstance(found, dict):
        raise Bad("not an object", f"expected a JSON object, found {show(found)}", hint)
    return found


def _array_rows(file: DataFile, limit: int) -> Iterator[Row]:
    """The objects of an array, each located by its first line. A fault of the syntax ends the file."""
    try:
        content = "".join(decode(line, limit) for line in lines(file, limit))
    except Bad as bad:
        raise DataError(f"{file}:{bad.line}: {bad.what}", bad.hint) from None
    decoder, plain = json.JSONDecoder(object_pairs_hook=_unique_keys), json.JSONDecoder()
    number, counted = 1, 0

    def skip(at: int) -> int:
        """Return the next index that is not white space, and count the lines up to it."""
        nonlocal number, counted
        end = _SPACE.match(content, at).end()  # type: ignore[union-attr]
        number, counted = number + content.count("\n", counted, end), end
        return end

    def fault(what: str, at: int) -> DataError:
        column = at - content.rfind("\n", 0, at)
        line = content.count("\n", 0, at) + 1
        return DataError(f"{file}:{line}: not valid JSON: {what} at column {column}", "fix the line")

    at = skip(content.index("[") + 1)
    while not content.startswith("]", at):
        where = f"{file}:{number}"
        try:
            try:
                found, end = decoder.raw_decode(content, at)
            except Bad as bad:
                yield where, bad
                _, end = plain.raw_decode(content, at)
            else:
                try:
                    row = _expect_object(found, "fix the line")
                except Bad as bad:
                    row = bad
                yield where, row
        except json.JSONDecodeError as error:
            raise fault(_said(error), error.pos) from None
        except (ValueError, RecursionError):
            raise fault("a number too long or nested too deeply", at) from None
        at = skip(end)
        if content.startswith(",", at):
            at = skip(at + 1)
        elif not content.startswith("]", at):
            raise fault("expecting ',' or ']'", at)
    rest = skip(at + 1)
    if rest < len(content):
        raise fault("more text after the array", rest)


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) < len(pairs):
        raise Bad("duplicate key", f"{show(first_repeated([name for name, _ in pairs]))} occurs twice in one object")
    return made


# ---- csv -----------------------------------------------------------------------------------------------------------


class _CsvLines:
    """Feeds physical lines to the csv parser and keeps those of the current record, so that it can go back to them."""

    def __init__(self, file: DataFile, limit: int):
        self.source, self.limit = lines(file, limit), limit
        self.again: deque[Line] = deque()
        self.taken: list[Line] = []
        self.bad: Bad | None = None  # the first line of this record that is not text

    def next_line(self) -> Line | None:
        return self.again.popleft() if self.again else next(self.source, None)

    def begin(self) -> Line | None:
        """Start the next record and return its first line."""
        self.taken, self.bad = [], None
        line = self.next_line()
        if line is not None:
            self.again.appendleft(line)
        return line

    def __iter__(self) -> Iterator[str]:
        size = 0
        while line := self.next_line():
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


def _csv_rows(wanted: Wanted, limit: int) -> Iterator[Row]:
    """Values under a header, separated by , ; | or tabs; a quoted cell may contain separators, quotes, line breaks."""
    csv.field_size_limit(max(csv.field_size_limit(), limit))  # of the whole process; its 128 kB would refuse long texts
    file = wanted.file
    separator = _separator(file, limit, wanted.could_fit)
    rows = _csv_cells(file, limit, separator)
    number, header = _csv_columns(file, next(rows, None), required(wanted.checkers))
    wanted.header(header, f"{file}:{number}")
    for number, cells in rows:
        if isinstance(cells, Bad):
            yield f"{file}:{cells.line or number}", cells
        elif len(cells) != len(header):
            listed = ", ".join(header[:6]) + (", …" if len(header) > 6 else "")
            what = f"{len(cells)} column{'s' * (len(cells) > 1)}; the header has {len(header)} ({listed})"
            name = {",": "a comma", ";": "a semicolon", "\t": "a tab"}.get(separator, separator)
            yield f"{file}:{number}", Bad("wrong number of columns", what, f"put cells with {name} in quotes")
        else:
            yield f"{file}:{number}", dict(zip(header, map(Cell, cells), strict=True))


def csv_header(file: DataFile, limit: int) -> list[str]:
    """Return the names of the columns."""
    separator = _separator(file, limit, lambda columns: 0)
    return _csv_columns(file, next(_csv_cells(file, limit, separator), None), [])[1]


def _separator(file: DataFile, limit: int, could_fit: Callable[[Sequence[str]], int]) -> str:
    """Guess what separates the cells: what splits the header into wanted columns, and the first rows alike."""
    if kind(file) == ".tsv":
        return "\t"
    first = next((line for line in lines(file, limit) if line.raw.strip()), None)
    if first is None or not first.whole:
        return ","
    declared = _declared(first)
    if declared:
        return declared
    best, most = ",", (0, 0.0)
    for separator in _SEPARATORS:
        if separator.encode() not in first.raw:
            continue
        records = list(islice(_csv_cells(file, limit, separator), _SAMPLED))
        header = records[0][1]
        if isinstance(header, Bad) or len(header) < 2:
            continue
        alike = [not isinstance(cells, Bad) and len(cells) == len(header) for _, cells in records]
        found = (could_fit([cell.strip() for cell in header]), sum(alike) / len(alike))
        if found > most:
            best, most = separator, found
    return best


def _declared(first: Line) -> str | None:
    """Return the separator that Excel writes into a first line `sep=;`."""
    found = re.fullmatch(rb'"?sep=(.)"?', first.raw.strip(b"\r\n"))
    return found[1].decode("latin-1") if found else None


def _csv_cells(file: DataFile, limit: int, separator: str) -> Iterator[tuple[int, list[str] | Bad]]:
    """Yield the cells of each record and the number of its first line. Blank lines are not records.

    Many files with tabs know no quotes. There, a record that is broken as a quoted one, or goes over lines that are
    records by themselves, is read as it is.
    """
    feed, width = _CsvLines(file, limit), None
    while first := feed.begin():
        if first.number == 1 and _declared(first) == separator:
            feed.next_line()
            continue
        try:
            cells = next(csv.reader(feed, strict=True, delimiter=separator))
        except Bad as bad:
            cells = bad
        except csv.Error as error:
            if "unexpected end of data" in str(error):
                cells = Bad("unclosed quote", "a quoted cell begins here and never ends", _CLOSE)
            else:
                cells = Bad("malformed csv", f"not valid csv: {error}", _CLOSE)
        if separator == "\t" and width is not None and first.whole:
            broken = isinstance(cells, Bad)
            plain = [line.raw.rstrip(b"\r\n").count(b"\t") + 1 == width for line in feed.taken]
            if plain[0] and (broken or (len(plain) > 1 and all(plain[1:]))):
                feed.back()
                feed.bad = None
                yield first.number, _plain_cells(first, limit)
                continue
        if isinstance(cells, Bad):
            feed.back()
            yield first.number, cells
        elif feed.bad or len(cells) > 1 or first.raw.strip():
            width = width or len(cells)
            yield first.number, feed.bad or cells


def _plain_cells(line: Line, limit: int) -> list[str] | Bad:
    try:
        return decode(line, limit).rstrip("\r\n").split("\t")
    except Bad as bad:
        return bad


def _csv_columns(
    file: DataFile, first: tuple[int, list[str] | Bad] | None, names: Sequence[str]
) -> tuple[int, list[str]]:
    """Return the line of the header, the first record of the file, and its columns; `names` are for the hint."""
    if first is None:
        raise DataError(f"{file}: nothing but blank lines", f"the first line names the columns: {','.join(names)}")
    number, cells = first
    if isinstance(cells, Bad):
        raise DataError(f"{file}:{cells.line or number}: the header cannot be read: {cells.what}", cells.hint)
    return number, _with_names([cell.strip() for cell in cells])


def _with_names(header: Sequence[str]) -> list[str]:
    """Name the columns that have no name, such as the numbers that pandas writes before each row."""
    return [name or f"column {number}" for number, name in enumerate(header, 1)]


# ---- Excel ---------------------------------------------------------------------------------------------------------


def _xlsx_rows(wanted: Wanted, limit: int) -> Iterator[Row]:
    """The first sheet that is not empty; its first row names the columns. A cell is text, as in a csv file."""
    openpyxl = excel(wanted.file)
    try:
        check_workbook(wanted.file)
        book = openpyxl.load_workbook(wanted.file.path, read_only=True, data_only=True)
    except DataError:
        raise
    except Exception as error:  # whatever a damaged archive or its XML raises
        reason = " ".join(str(error).split())
        raise DataError(f"{wanted.file}: not a readable .xlsx file: {reason}", "save it again in Excel") from None
    try:
        for sheet in book.worksheets:
            sheet.reset_dimensions()  # as written in the file, they may be wrong
            rows = ((number, cells) for number, cells in enumerate(sheet.iter_rows(values_only=True), 1))
            rows = _filled_rows(wanted.file, rows)
            first = next(rows, None)
            if first is not None:
                if len(book.worksheets) > 1:
                    wanted.file.say(f"{wanted.file}: sheet {show(sheet.title)} of {len(book.worksheets)} is read")
                yield from _sheet_rows(wanted, first, rows)
                return
    finally:
        book.close()


def check_workbook(file: DataFile) -> None:
    """Refuse a workbook whose XML unpacks to far more than the file, or has very many elements outside of rows.

    openpyxl reads rows one at a time, and everything else into memory, at up to 2 kB for an element of five bytes.
    """
    with zipfile.ZipFile(file.path) as archive:
        most, size = unpacked_limit(file.path), file.path.stat().st_size
        if sum(info.file_size for info in archive.infolist()) > most:
            raise unpacks_to_much(file, most)
        for info in archive.infolist():
            allowed = max(_ELEMENTS, 2 * size) if info.filename.endswith("/sharedStrings.xml") else _ELEMENTS
            elements, rest = 0, b""
            with archive.open(info) as stream:
                while chunk := stream.read(_CHUNK):
                    if _ENTITY.search(rest + chunk):
                        raise DataError(f"{file}: {info.filename} defines entities", "save it again in Excel")
                    at = chunk.rfind(b"</row>")
                    elements = elements + chunk.count(b"<") if at < 0 else chunk.count(b"<", at)
                    if elements > allowed:
                        what = f"{info.filename} has more than {allowed:,} elements that are not in rows"
                        raise DataError(f"{file}: {what}", "save it again in Excel, or as .csv")
                    rest = chunk[-16:]


def _filled_rows(
    file: DataFile, rows: Iterator[tuple[int, tuple[Any, ...]]]
) -> Iterator[tuple[int, list[Cell]]]:  # fmt: skip
    """Yield the rows that have a cell. openpyxl adds the empty ones, up to any number that a row claims to have."""
    seen = 0
    for number, cells in rows:
        seen += len(cells)
        if number > _EXCEL_ROWS or seen > _EXCEL_CELLS:
            what = f"more than {_EXCEL_ROWS:,} rows" if number > _EXCEL_ROWS else f"more than {_EXCEL_CELLS:,} cells"
            raise DataError(f"{file}: {what}", "no sheet of Excel has so many: save it again, or as .csv")
        if cells and any(cell is not None for cell in cells):
            made = [*map(_excel_cell, cells)]
            if any(made):
                yield number, made


def _sheet_rows(wanted: Wanted, first: tuple[int, list[Cell]], rows: Iterator[tuple[int, list[Cell]]]) -> Iterator[Row]:
    number, names = first
    while not names[-1]:
        names.pop()
    header = _with_names([name.strip() for name in names])
    wanted.header(header, f"{wanted.file}: row {number}")
    for number, cells in rows:
        more = len(cells) - len(header)
        if any(cells[len(header) :]):
            what = f"{len(cells)} cells; the header has {len(header)}"
            yield f"{wanted.file}: row {number}", Bad("wrong number of columns", what)
        else:
            cells = [*cells[: len(header)], *[Cell("")] * max(0, -more)]
            yield f"{wanted.file}: row {number}", dict(zip(header, cells, strict=True))


def _excel_cell(value: Any) -> Cell:
    if value is None:
        return Cell("")
    if isinstance(value, bool):
        return Cell("true" if value else "false")
    if isinstance(value, float) and value.is_integer():
        return Cell(int(value))
    return Cell(value)  # a date as in ISO 8601


def excel(file: Any) -> Any:
    """Return openpyxl, which reads and writes Excel's files."""
    try:
        import openpyxl
    except ImportError:
        raise ResourceError(
            f"{file}: .xlsx needs the package openpyxl", "install it: pip install openpyxl, or save as .csv"
        ) from None
    return openpyxl


# ---- parquet -------------------------------------------------------------------------------------------------------


def _parquet_rows(wanted: Wanted, limit: int) -> Iterator[Row]:
    """The wanted columns of a parquet file, or all, a few hundred rows at a time."""
    import pyarrow as arrow
    from pyarrow import parquet

    path = wanted.file.path
    try:
        with parquet.ParquetFile(path) as opened:
            columns, metadata = opened.schema_arrow.names, opened.metadata
            wanted.label_names = _names_in(opened.schema_arrow.metadata)
        fit = wanted.header(columns, str(path))
        used = {*fit.columns.values(), fit.names_column}
        chosen, number = [name for name in columns if wanted.file.whole or name in used], 0
        at_once, lists = _parquet_measured(wanted.file, metadata, chosen)
        with parquet.ParquetFile(path, metadata=metadata, pre_buffer=False, read_dictionary=lists) as opened:
            for batch in _batches(opened, at_once, chosen):
                cells = dict(zip(batch.schema.names, batch.columns, strict=True))
                for index in range(batch.num_rows):
                    number += 1
                    try:
                        row = {name: _parquet_value(column[index], name, limit) for name, column in cells.items()}
                    except Bad as bad:
                        row = bad
                    yield f"{path}: row {number}", row
    except (arrow.ArrowException, parquet_pages.BadPage, OSError) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise unreadable(path, error) from None
        reason = str(error).split("\n")[0]
        raise DataError(f"{path}: not a readable parquet file: {reason}", "it may be cut off: copy it again") from None


def _batches(opened: Any, rows: int, chosen: Sequence[str]) -> Iterator[Any]:
    """Batches of one group of rows after another: lists of texts cannot be read across two groups."""
    for group in range(opened.metadata.num_row_groups):
        yield from opened.iter_batches(rows, row_groups=[group], columns=chosen, use_threads=False)


def _parquet_measured(file: DataFile, metadata: Any, chosen: Sequence[str]) -> tuple[int, list[str]]:
    """Return how many rows can be decoded at a time, and the columns whose lists of texts have a dictionary.

    A text may be stored once for many rows, in a dictionary, or as the beginning that it shares with the one before.
    Columns that unpack to far more than the file are refused. A dictionary of lists stays one in memory.
    """
    most, longest, size = unpacked_limit(file.path), 1, file.path.stat().st_size
    packed = 0  # bytes of all columns that are read
    texts: dict[str, bool] = {}  # columns with lists of texts: whether they are read as a dictionary
    if metadata.num_rows > max(_PARQUET_VALUES, size):
        what = f"{metadata.num_rows:,} rows in {size:,} bytes"
        raise DataError(f"{file}: {what}", "no usual data does that; if you trust it, save it as .jsonl")
    with file.path.open("rb") as stream:
        for group in map(metadata.row_group, range(metadata.num_row_groups)):
            unpacked = repeated = 0  # of all columns, which are read side by side
            for number in range(group.num_columns):
                column, schema = group.column(number), metadata.schema.column(number)
                if not any(f"{column.path_in_schema}.".startswith(f"{name}.") for name in chosen):
                    continue
                is_list = schema.max_repetition_level > 0
                if is_list and column.num_values > max(_PARQUET_VALUES, size):
                    what = f"{column.path_in_schema} has {column.num_values:,} values in {group.num_rows:,} rows"
                    raise DataError(f"{file}: {what}", "write shorter lists")
                packed += max(0, column.total_compressed_size)
                if packed > size:
                    raise parquet_pages.BadPage("its columns are larger than the file")
                chunk = parquet_pages.measure(stream, size, column, schema, most)
                unpacked += max(column.total_uncompressed_size, chunk.unpacked) + chunk.shared
                if is_list and column.physical_type == "FIXED_LEN_BYTE_ARRAY":
                    unpacked += column.num_values * schema.length
                elif is_list and column.physical_type == "BYTE_ARRAY":
                    texts.setdefault(schema.path, True)
                    if chunk.delta:  # which pyarrow reads only without a dictionary
                        texts[schema.path] = False
                        unpacked += column.num_values * chunk.dictionary
                if unpacked > most:
                    raise unpacks_to_much(file, most)
                repeated += chunk.unpacked if chunk.shares else chunk.dictionary
            longest = max(longest, repeated)
    lists = [path for path, has_dictionary in texts.items() if has_dictionary]
    return max(1, min(_PARQUET_ROWS, _PARQUET_BYTES // longest)), lists


def _names_in(metadata: dict[bytes, bytes] | None) -> tuple[str, ...]:
    """Return the names of numbered labels that the `datasets` library keeps in a parquet file; () if there are none."""
    try:
        features = json.loads((metadata or {})[b"huggingface"])["info"]["features"]
        found = [features[name].get("feature", features[name]) for name in _OF_LABELS if name in features]
        return tuple(next(one["names"] for one in found if one.get("_type") == "ClassLabel"))
    except (KeyError, TypeError, AttributeError, ValueError, StopIteration):
        return ()


_OF_LABELS = ("label", "labels", "tags", "ner_tags")


def _list_bytes(cell: Any) -> int:
    """Return how much the lists of a cell hold."""
    import pyarrow as arrow

    if isinstance(cell, arrow.StructScalar):
        return sum(map(_list_bytes, cell.values())) if cell.is_valid else 0
    values: Any = getattr(cell, "values", None)
    if not isinstance(values, arrow.Array):
        return 0
    while isinstance(values, arrow.ListArray | arrow.LargeListArray):
        values = values.flatten()
    if isinstance(values, arrow.DictionaryArray):
        compute: Any = import_module("pyarrow.compute")
        return compute.sum(compute.take(compute.binary_length(values.dictionary), values.indices)).as_py() or 0
    return values.nbytes


def _parquet_value(cell: Any, name: str, limit: int) -> Any:
    if _list_bytes(cell) > limit:
        raise Bad("cell too long", f"{show(name)} is longer than {limit:,} bytes", "split it")
    try:
        value = cell.as_py()
    except UnicodeDecodeError as error:
        what = f"{show(name)} is not UTF-8: 0x{error.object[error.start]:02x} at byte {error.start + 1}"
        raise Bad("not UTF-8", what, "write the column again as UTF-8") from None
    if isinstance(value, str | bytes) and len(value) > limit:
        raise Bad("cell too long", f"{show(name)} is longer than {limit:,} characters", "split it")
    return value


# ---- CoNLL columns: a token per line with its tag in the last column, a blank line between sentences ---------------


def _column_rows(wanted: Wanted, limit: int) -> Iterator[Row]:
    """A row per sentence with `tokens` and `tags`, located by its first line. Without a second column: no tags."""
    sentence: list[Line] = []
    for line in lines(wanted.file, limit):
        if line.raw.strip(b" \t\r\n"):
            sentence.append(line)
        elif sentence:
            yield from _sentence_rows(wanted.file, sentence, limit)
            sentence = []
    if sentence:
        yield from _sentence_rows(wanted.file, sentence, limit)


def _sentence_rows(file: DataFile, sentence: list[Line], limit: int) -> Iterator[Row]:
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
        yield f"{file}:{bad.line or sentence[0].number}", bad
        return
    fields = {"tokens": [row[0] for _, row in kept]}
    if columns > 1:
        fields["tags"] = [row[-1] for _, row in kept]
    yield f"{file}:{kept[0][0].number}", fields


# ---- names of columns ----------------------------------------------------------------------------------------------


def columns_of(file: Path | DataFile, limit: int) -> list[str] | None:
    """The column names of a table; None for other files, and where the header of a parquet file cannot be read."""
    file = data_file(file)
    if not file.path.is_file() or file.path.stat().st_size == 0:
        return None
    if kind(file) in (".csv", ".tsv"):
        return csv_header(file, limit)
    if kind(file) == ".xlsx":
        row = next(_xlsx_rows(Wanted(file, {"": Maybe(show)}), limit), None)
        return None if row is None or isinstance(row[1], Bad) else list(row[1])
    if kind(file) == ".parquet":
        import pyarrow as arrow
        from pyarrow import parquet

        try:
            return list(parquet.read_schema(file.path).names)
        except (arrow.ArrowException, OSError):
            return None
    return None


READERS: dict[str, Callable[[Wanted, int], Iterator[Row]]] = {
    ".jsonl": _json_rows, ".ndjson": _json_rows, ".json": _json_or_array_rows,
    ".csv": _csv_rows, ".tsv": _csv_rows, ".xlsx": _xlsx_rows, ".parquet": _parquet_rows,
    ".txt": _text_rows, ".conll": _column_rows, ".bio": _column_rows,
}  # fmt: skip
