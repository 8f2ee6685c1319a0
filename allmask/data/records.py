"""Records out of a file, one at a time: JSON lines, csv, parquet or plain text, by the name of the file.

for record in read_records("train.jsonl", {"source": text, "target": text}):
    record.fields["source"], record.where   # "北京欢迎你", "train.jsonl:1"
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from allmask.data.fields import Bad, Checker, as_checkers, check_row
from allmask.data.formats import Row, column_rows, csv_rows, json_rows, parquet_rows, text_rows, unreadable
from allmask.errors import DataError, UsageError
from allmask.files import same_content

MAX_LINE = 10_000_000  # bytes; a longer one is a file that lost its line ends
_READERS = {
    ".jsonl": json_rows, ".ndjson": json_rows, ".json": json_rows,
    ".csv": csv_rows, ".parquet": parquet_rows, ".txt": text_rows, ".conll": column_rows, ".bio": column_rows,
}  # fmt: skip
_ON_BAD_RECORD = ("stop", "skip")


@dataclass(frozen=True)
class Record:
    """The fields that were asked for, and where they stand: "train.jsonl:214" or "train.parquet: row 214"."""

    fields: dict[str, Any]
    where: str


def read_records(
    path: str | Path, fields: Mapping[str, Checker | type], on_bad_record: str = "stop",
    skipped: Counter[str] | None = None, max_line: int = MAX_LINE,
) -> Iterator[Record]:  # fmt: skip
    """The records of a file as a stream; what is wrong with the file as a whole is said at once.

    A record that cannot be used stops the reading with a DataError, or, with "skip", is counted in `skipped` by its
    reason. No usable record in the whole file is an error either way.
    """
    if on_bad_record not in _ON_BAD_RECORD:
        raise UsageError(f"on_bad_record is {on_bad_record!r}; expected one of {', '.join(_ON_BAD_RECORD)}")
    path, checkers = Path(path), as_checkers(fields)
    reader = _reader(path)
    reader = column_rows if reader is text_rows and "tokens" in checkers else reader  # tagged text, not lines of it
    rows = reader(path, checkers, max_line)
    return _records(path, rows, checkers, on_bad_record == "skip", Counter() if skipped is None else skipped)


def usable(
    path: Path, records: Iterable[Record], check: Callable[[dict[str, Any]], object], on_bad_record: str,
    skipped: Counter[str] | None = None,
) -> Iterator[Record]:  # fmt: skip
    """The records whose fields go together; `check` raises Bad where they do not, which is said, or counted."""
    found, reasons = False, Counter[str]()
    for record in records:
        try:
            check(record.fields)
        except Bad as bad:
            if on_bad_record == "stop":
                raise DataError(f"{record.where}: {bad.what}", f"{bad.hint}, or pass --on-bad-record skip") from None
            reasons[bad.reason] += 1
        else:
            found = True
            yield record
    if skipped is not None:
        skipped.update(reasons)
    if not found:
        counts = ", ".join(f"{count} × {reason}" for reason, count in reasons.items())
        raise DataError(f"{path}: no record can be used; skipped {counts}", "check how the file was made")


def expect_held_out(data: Iterable[str | Path], held_out: Iterable[str | Path]) -> None:
    """Refuse files to evaluate on that are, by path or byte for byte, among those to train on."""
    by_size: dict[int, list[Path]] = {}
    for file in filter(Path.is_file, map(Path, data)):
        by_size.setdefault(file.stat().st_size, []).append(file)
    for file in filter(Path.is_file, map(Path, held_out)):
        for other in by_size.get(file.stat().st_size, []):
            if same_content(file, other):
                what = "is" if file.resolve() == other.resolve() else f"has the same content as {other}, which is"
                raise UsageError(
                    f"--eval {file}: {what} also trained on (--data)",
                    "a score on records that were learnt says nothing: name others, or leave --eval out",
                )


def _reader(path: Path):
    """The reader for this file, if it is one."""
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
    suffix = Path(path.stem).suffix if path.suffix.lower() == ".gz" else path.suffix
    reader = _READERS.get(suffix.lower())
    if reader is None or (reader is parquet_rows and path.suffix.lower() == ".gz"):
        kinds = ", ".join(_READERS)
        raise DataError(f'{path}: unknown kind of file "{path.suffix}"', f"expected one of {kinds}, or .gz of a text")
    if size == 0:
        raise DataError(f"{path}: the file is empty", "check how it was made")
    return reader


def _records(
    path: Path, rows: Iterator[Row], checkers: Mapping[str, Checker], skip: bool, skipped: Counter[str]
) -> Iterator[Record]:
    found, reasons, first = False, Counter[str](), None
    for where, row in rows:
        try:
            record = Record(_fields(checkers, row), f"{path}{where}")
        except Bad as bad:
            error = _error(path, where, bad)
            if not skip:
                raise error from None
            first = first or error
            reasons[bad.reason] += 1
            skipped[bad.reason] += 1
        else:
            found = True
            yield record
    if not found:
        raise _nothing(path, reasons, first)


def _fields(checkers: Mapping[str, Checker], row: dict[str, Any] | Bad) -> dict[str, Any]:
    if isinstance(row, Bad):
        raise row
    return check_row(checkers, row)


def _error(path: Path, where: str, bad: Bad) -> DataError:
    hint = bad.hint.replace("the line", "the row") if where.startswith(": row") else bad.hint
    return DataError(f"{path}{where}: {bad.what}", f"{hint}, or pass --on-bad-record skip")


def _nothing(path: Path, reasons: Counter[str], first: DataError | None) -> DataError:
    if first is None:
        return DataError(f"{path}: there are no records in it", "check how the file was made")
    counts = ", ".join(f"{count} × {reason}" for reason, count in reasons.most_common())
    return DataError(f"{path}: no record can be used; skipped {counts}", f"the first: {first.message}")
