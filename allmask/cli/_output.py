"""Where `allmask predict` writes: stdout, or a file of the kind that its name asks for, complete or not at all."""

from __future__ import annotations

import csv
import ctypes
import json
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any, TextIO

from allmask.errors import ResourceError, UsageError
from allmask.files import put_in_place

TIDY = 16_384  # rows between two looks at memory
ROWS = 1024  # of a parquet file in memory
Row = dict[str, Any] | None  # None: a blank line
Put = Callable[[Row], None]


def check_out(out: str, file: Path) -> None:
    """Refuse a place that cannot be written to, or a kind of file that is not known, before any work is done."""
    if out == "-":
        return
    path = Path(out)
    if path.is_dir():
        raise UsageError(f"{out}: is a folder", "name a file for --out")
    if path.exists() and file.exists() and path.samefile(file):
        raise UsageError(f"{out}: is the input itself", "name another file for --out")
    if not path.absolute().parent.is_dir() or not os.access(path.absolute().parent, os.W_OK):
        raise ResourceError(f"{out}: cannot write in {path.absolute().parent}", "choose another --out")
    if not _is_device(path.resolve()) and path.resolve().suffix.lower() not in FORMATS:
        raise UsageError(f"{out}: unknown kind of file", f"expected one of {', '.join(FORMATS)}, or - for stdout")


@contextmanager
def output(out: str) -> Iterator[Put]:
    """Something that takes rows. Freed memory goes back to the system now and then, however long the file."""
    with _lines(out) as stream:
        count = 0

        def put(row: Row) -> None:
            nonlocal count
            print(as_line(row), file=stream, flush=out == "-")
            count += 1
            if count % TIDY == 0:
                _give_back_memory()

        yield put


def as_line(row: Row) -> str:
    """A date, which a parquet file may have, is written as text."""
    return "" if row is None else json.dumps(row, ensure_ascii=False, default=str)


def _give_back_memory() -> None:
    """The C library keeps what is free between parts in use, and the parts scatter; glibc can be asked for it."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


@contextmanager
def _lines(out: str) -> Iterator[TextIO | None]:
    """A stream for JSON lines. They become a file of another kind, and it gets its name, when all are there."""
    if out == "-":
        yield None
        return
    path = Path(out).resolve()  # through a link, to what it names
    if _is_device(path):  # written to, never replaced
        with path.open("w", encoding="utf-8") as stream:
            yield stream
        return
    write = FORMATS[path.suffix.lower()]
    lines, made = (path.with_name(f".{path.name}.{os.getpid()}.{part}") for part in ("lines", "partial"))
    try:
        with lines.open("w", encoding="utf-8") as stream:
            yield stream
        if write is not None:
            write(lines, made)
        put_in_place(lines if write is None else made, path)
    finally:
        lines.unlink(missing_ok=True)
        made.unlink(missing_ok=True)


def _is_device(path: Path) -> bool:
    """A pipe, a terminal, /dev/null: there, and no file that could be replaced."""
    return path.exists() and not path.is_file()


# ---- kinds of files --------------------------------------------------------------------------------------------


def _rows(lines: Path) -> Iterator[dict[str, Any]]:
    with lines.open(encoding="utf-8") as stream:
        yield from (json.loads(line) for line in stream if line.strip())


def _columns(lines: Path) -> list[str]:
    """All fields that a row has, in the order in which they first come."""
    return list(dict.fromkeys(name for row in _rows(lines) for name in row))


def _write_json(lines: Path, made: Path) -> None:
    """One array of objects, one a line."""
    with lines.open(encoding="utf-8") as source, made.open("w", encoding="utf-8") as target:
        before = "[\n"
        for line in source:
            if line.strip():
                target.write(before + line.rstrip("\n"))
                before = ",\n"
        target.write("[]\n" if before == "[\n" else "\n]\n")


def _write_csv(lines: Path, made: Path, delimiter: str = ",") -> None:
    """Lists and objects are written as JSON in their cells, which is how they are read, too."""
    columns = _columns(lines)
    with made.open("w", encoding="utf-8", newline="") as target:
        writer = csv.writer(target, delimiter=delimiter, lineterminator="\n")
        writer.writerow(columns)
        writer.writerows([_cell(row.get(name)) for name in columns] for row in _rows(lines))


def _cell(value: Any) -> str:
    if value is None:
        return ""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _write_parquet(lines: Path, made: Path) -> None:
    """A column whose values have no type in common holds them as text."""
    import pyarrow
    from pyarrow import parquet

    columns = _columns(lines)
    types: dict[str, Any] = dict.fromkeys(columns, pyarrow.null())
    for rows in _chunks(_rows(lines)):
        for name in columns:
            types[name] = _common_type(types[name], [row.get(name) for row in rows])
    schema = pyarrow.schema([(name, types[name] or pyarrow.string()) for name in columns])
    with parquet.ParquetWriter(made, schema) as writer:
        for rows in _chunks(_rows(lines)):
            arrays = []
            for name in columns:
                values = [row.get(name) for row in rows]
                as_text = types[name] is None
                values = [None if value is None else _cell(value) for value in values] if as_text else values
                arrays.append(pyarrow.array(values, schema.field(name).type))
            writer.write_table(pyarrow.table(arrays, schema=schema))


def _common_type(before: Any, values: Sequence[Any]) -> Any:
    """The Arrow type of values and of those before them; None if there is none."""
    import pyarrow

    if before is None:
        return None
    try:
        kinds = [pyarrow.schema([("column", kind)]) for kind in (before, pyarrow.array(values).type)]
        return pyarrow.unify_schemas(kinds, promote_options="permissive").field("column").type
    except (pyarrow.ArrowInvalid, pyarrow.ArrowTypeError):
        return None


def _chunks(rows: Iterator[dict[str, Any]]) -> Iterator[list[dict[str, Any]]]:
    while some := list(islice(rows, ROWS)):
        yield some


FORMATS: dict[str, Callable[[Path, Path], None] | None] = {
    ".jsonl": None,
    ".json": _write_json,
    ".csv": _write_csv,
    ".tsv": lambda lines, made: _write_csv(lines, made, "\t"),
    ".parquet": _write_parquet,
}
