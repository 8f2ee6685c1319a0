"""Files that commands write record by record: the format follows from the name; a file is complete or absent."""

from __future__ import annotations

import csv
import ctypes
import io
import json
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import islice
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO, Any

from allmask.cli import note, plural, to_json
from allmask.errors import ResourceError, UsageError
from allmask.files import atomic_file

TRIM_EVERY = 16_384  # rows
ROWS = 1024  # of a parquet file in memory
EXCEL_CELL = 32_767  # characters
Row = dict[str, Any] | None  # None: a blank line
Put = Callable[[Row], None]


def check_out(out: str, file: Path | None, formats: Iterable[str]) -> None:
    """Refuse, before any work, an output that cannot be written or is not one of `formats`; "-" is stdout."""
    if out == "-":
        return
    path = Path(out)
    folder = path.absolute().parent
    if path.is_dir():
        raise UsageError(f"{out}: is a folder", "name a file for --out")
    if file is not None and path.exists() and file.exists() and path.samefile(file):
        raise UsageError(f"{out}: is the input itself", "name another file for --out")
    if not folder.is_dir() or not os.access(folder, os.W_OK):
        raise ResourceError(f"{out}: cannot write in {folder}", "choose another --out")
    if not _is_device(path) and path.resolve().suffix.lower() not in formats:
        raise UsageError(f"{out}: unknown file format", f"expected one of {', '.join(formats)}, or - for stdout")
    if path.suffix.lower() == ".xlsx":
        from allmask.data.formats import excel

        excel(out)


@contextmanager
def output(out: str, array: bool = False) -> Iterator[Put]:
    """Yield a function that writes rows to stdout or to a file, which appears when all are written.

    With `array`, stdout gets one JSON array, at the end, instead of a line per row.
    """
    with _json_array() if array else _json_lines(out) as stream:
        count = 0

        def put(row: Row) -> None:
            nonlocal count
            print("" if row is None else as_json(row), file=stream, flush=out == "-" and not array)
            count += 1
            if count % TRIM_EVERY == 0:
                _trim_memory()

        yield put


def as_json(row: dict[str, Any]) -> str:
    """Return a row as a line of JSON; a date, which a parquet file may have, becomes text."""
    return to_json(row, default=str)


def _trim_memory() -> None:
    """Return freed memory to the system, where the C library is glibc: its heap fragments over a long file."""
    with suppress(AttributeError, OSError, TypeError):  # another C library, or Windows
        ctypes.CDLL(None).malloc_trim(0)


@contextmanager
def _json_lines(out: str) -> Iterator[IO[str] | None]:
    """Yield a stream for JSON lines; at the end they are converted to the format of the file."""
    path = Path(out)
    convert = None if out == "-" or _is_device(path) else FORMATS[path.resolve().suffix.lower()]
    if out == "-":
        yield None
    elif convert is None:
        with atomic_file(path) as stream:
            yield stream
    else:
        with TemporaryFile("w+", encoding="utf-8", dir=path.resolve().parent) as lines:
            yield lines
            with atomic_file(path, "wb") as target:
                convert(lines, target)


@contextmanager
def _json_array() -> Iterator[IO[str]]:
    """Yield a stream for JSON lines; at the end they are printed on stdout as one array."""
    with TemporaryFile("w+", encoding="utf-8") as lines:
        yield lines
        for piece in _array(lines):
            print(piece, end="")


def _is_device(path: Path) -> bool:
    """Whether the path is a pipe, a terminal or /dev/null, which is written to as JSON lines and never replaced."""
    return path.exists() and not path.is_file()


# ---- file formats --------------------------------------------------------------------------------------------


def _rows(lines: IO[str]) -> Iterator[dict[str, Any]]:
    lines.seek(0)
    return (json.loads(line) for line in lines if line.strip())


def _chunks(lines: IO[str]) -> Iterator[list[dict[str, Any]]]:
    rows = _rows(lines)
    return iter(lambda: list(islice(rows, ROWS)), [])


def _columns(lines: IO[str]) -> list[str]:
    """Return the fields of all rows, in the order in which they first occur."""
    return list(dict.fromkeys(name for row in _rows(lines) for name in row))


def _write_json(lines: IO[str], target: IO[bytes]) -> None:
    for piece in _array(lines):
        target.write(piece.encode())


def _array(lines: IO[str]) -> Iterator[str]:
    """Yield the pieces of one array, with one object per line."""
    separator = "[\n"
    for row in _rows(lines):
        yield f"{separator}{as_json(row)}"
        separator = ",\n"
    yield "[]\n" if separator == "[\n" else "\n]\n"


def _write_csv(lines: IO[str], target: IO[bytes], delimiter: str = ",") -> None:
    """Write a header and rows; lists and objects are JSON in their cells, as the readers expect them."""
    columns = _columns(lines)
    text = io.TextIOWrapper(target, encoding="utf-8", newline="")
    writer = csv.writer(text, delimiter=delimiter, lineterminator="\n")
    writer.writerow(columns)
    writer.writerows([_cell(row.get(name)) for name in columns] for row in _rows(lines))
    text.detach()  # flushes, and leaves the file open for the caller, who opened it


def _cell(value: Any) -> str:
    if value is None:
        return ""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _write_parquet(lines: IO[str], target: IO[bytes]) -> None:
    """Write columns of a common type; a column that has none holds text."""
    import pyarrow
    from pyarrow import parquet

    columns = _columns(lines)
    types: dict[str, Any] = dict.fromkeys(columns, pyarrow.null())
    for rows in _chunks(lines):
        for name in columns:
            types[name] = _common_type(types[name], [row.get(name) for row in rows])
    schema = pyarrow.schema([(name, types[name] or pyarrow.string()) for name in columns])
    with parquet.ParquetWriter(target, schema) as writer:
        for rows in _chunks(lines):
            arrays = []
            for name in columns:
                values = [row.get(name) for row in rows]
                if types[name] is None:
                    values = [None if value is None else _cell(value) for value in values]
                arrays.append(pyarrow.array(values, schema.field(name).type))
            writer.write_table(pyarrow.table(arrays, schema=schema))


def _common_type(before: Any, values: Sequence[Any]) -> Any:
    """Return the Arrow type that holds these values and those of type `before`; None if there is none."""
    import pyarrow

    if before is None:
        return None
    try:
        kinds = [pyarrow.schema([("column", kind)]) for kind in (before, pyarrow.array(values).type)]
        return pyarrow.unify_schemas(kinds, promote_options="permissive").field("column").type
    except (pyarrow.ArrowInvalid, pyarrow.ArrowTypeError):
        return None


def _write_xlsx(lines: IO[str], target: IO[bytes]) -> None:
    """Write one sheet; lists and objects are JSON in their cells, and characters that Excel refuses are left out."""
    from allmask.data.formats import excel

    openpyxl = excel(target.name)
    from openpyxl.cell.cell import ILLEGAL_CHARACTERS_RE

    book = openpyxl.Workbook(write_only=True)
    sheet, columns, cut = book.create_sheet("predictions"), _columns(lines), 0
    sheet.append(columns)
    for row in _rows(lines):
        cells = [value if isinstance(value := row.get(name), int | float) else _cell(value) for name in columns]
        cut += sum(isinstance(cell, str) and len(cell) > EXCEL_CELL for cell in cells)
        sheet.append(
            [ILLEGAL_CHARACTERS_RE.sub("", cell)[:EXCEL_CELL] if isinstance(cell, str) else cell for cell in cells]
        )
    book.save(target)
    if cut:
        note(f"{plural(cut, 'cell')} cut to {EXCEL_CELL:,} characters, the most that Excel holds")


FORMATS: dict[str, Callable[[IO[str], IO[bytes]], None] | None] = {
    ".jsonl": None,
    ".json": _write_json,
    ".csv": _write_csv,
    ".tsv": lambda lines, target: _write_csv(lines, target, "\t"),
    ".parquet": _write_parquet,
    ".xlsx": _write_xlsx,
}
