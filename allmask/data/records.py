"""Read files as streams of records: JSON, csv, Excel, parquet, plain text or CoNLL columns, chosen by the file name.

for record in read_records("train.jsonl", {"source": text, "target": text}):
    record.fields["source"], record.where   # "北京欢迎你", "train.jsonl:1"

for record in read_records(DataFile(Path("mails.csv"), {"source": "Body"}, "cp1252"), {"source": text}): …
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from allmask.data.columns import Wanted
from allmask.data.fields import Bad, Checker, as_checkers, check_row
from allmask.data.formats import rows_of
from allmask.data.source import MAX_LINE, DataFile, check_file, data_file
from allmask.errors import DataError, UsageError
from allmask.files import same_content


@dataclass(frozen=True)
class Record:
    """The requested fields of a row and its location: "train.jsonl:214" or "train.parquet: row 214"."""

    fields: dict[str, Any]
    where: str
    row: dict[str, Any] | None = None  # all columns of the file, if they were asked for (`DataFile.whole`)


def read_records(
    path: str | Path | DataFile, fields: Mapping[str, Checker | type], on_bad_record: str = "stop",
    skipped: Counter[str] | None = None, max_line: int = MAX_LINE,
) -> Iterator[Record]:  # fmt: skip
    """Return the records of a file as a stream. A file that cannot be read at all is refused at once.

    With "stop", the first bad record raises a DataError. With "skip", bad records are left out and counted in `skipped`
    by reason. A file without any usable record is an error in both modes.
    """
    skips(on_bad_record)  # refuses other values
    file, checkers = data_file(path), as_checkers(fields)
    if file.items is None:
        check_file(file.path)
    wanted = Wanted(file, checkers)
    rows = rows_of(wanted, max_line)

    def records() -> Iterator[Record | tuple[str, Bad]]:
        for where, raw in rows:
            try:
                if isinstance(raw, Bad):
                    raise raw
                found = check_row(checkers, wanted.row(raw, where))
            except Bad as bad:
                yield where, bad
            else:
                yield Record(found, where, _whole_row(raw, found, wanted) if file.whole else None)

    return _good_records(file, records(), on_bad_record, skipped)


def _whole_row(raw: dict[str, Any], found: dict[str, Any], wanted: Wanted) -> dict[str, Any]:
    """Return all cells of a row; lists that a csv cell holds as JSON become lists."""
    columns = wanted.fit(tuple(raw), "").columns
    return raw | {columns[name]: value for name, value in found.items() if isinstance(value, list) and name in columns}


def usable(
    path: str | Path | DataFile, records: Iterable[Record], check: Callable[[dict[str, Any]], object],
    on_bad_record: str, skipped: Counter[str] | None = None,
) -> Iterator[Record]:  # fmt: skip
    """Yield the records that pass `check`, which raises Bad if the fields of a record do not fit together."""

    def checked() -> Iterator[Record | tuple[str, Bad]]:
        for record in records:
            try:
                check(record.fields)
            except Bad as bad:
                yield record.where, bad
            else:
                yield record

    return _good_records(data_file(path), checked(), on_bad_record, skipped)


def _good_records(
    file: DataFile, found: Iterable[Record | tuple[str, Bad]], on_bad_record: str, skipped: Counter[str] | None
) -> Iterator[Record]:
    """Yield the records among `found`; of the others, raise or count what is wrong."""
    skipped = Counter() if skipped is None else skipped
    some, first, before = False, None, skipped.copy()
    for entry in found:
        if isinstance(entry, Record):
            some = True
            yield entry
            continue
        where, bad = entry
        hint = bad.hint.replace("the line", "the row") if where.startswith(f"{file}: row ") else bad.hint
        if file.items is None:
            error = DataError(f"{where}: {bad.what}", f"{hint}, or pass --on-bad-record skip")
        else:
            error = DataError(f"{where}: {bad.what}", hint.replace("fix the line", f"fix this {file}"))
        if not skips(on_bad_record):
            raise error
        first = first or (error, hint)
        skipped[bad.reason] += 1
        if file.problems is not None:
            file.problems.setdefault(where, error)
    if not some:
        if first is None:
            raise DataError(f"{file}: there are no records in it", "check how the file was made")
        what = f"no record can be used; skipped {reasons(skipped - before)}"
        raise DataError(f"{file}: {what}", f"the first: {first[0].message}\n{first[1]}")


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
