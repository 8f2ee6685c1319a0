"""Files of running text: as sentences of documents for pretraining, as plain texts for training a tokenizer.

Plain text has a sentence a line and a blank line between documents. A record of any other file (JSON lines, parquet,
csv) is a document, and its lines are the sentences.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from io import StringIO
from itertools import islice
from pathlib import Path
from typing import Any

from allmask.data.fields import Bad, text, wrong_type
from allmask.data.formats import decode, lines, open_bytes, unreadable
from allmask.data.records import MAX_LINE, read_records
from allmask.errors import DataError, UsageError

KINDS = (".txt", ".jsonl", ".ndjson", ".parquet", ".csv")  # what is taken out of a folder, also as .gz
_BLOCK = 1 << 18  # bytes
_REPORT = 1 << 20  # bytes between two calls of `progress`
ON_BAD_RECORD = ("stop", "skip")

Sentence = tuple[int, str]  # the number of its document, which only grows; the text
Progress = Callable[[int, int], None]  # bytes of text read so far, about how many there are


@dataclass(frozen=True)
class Reading:
    """How files are read. `skipped` counts, by reason, the lines and records that were left out."""

    text_field: str = "text"
    on_bad_record: str = "stop"
    verbatim: bool = False  # nothing is trimmed: line ends stay, a text file is one document, blank lines and all
    skipped: Counter[str] = field(default_factory=Counter)

    def __post_init__(self):
        if self.on_bad_record not in ON_BAD_RECORD:
            raise UsageError(f"on_bad_record is {self.on_bad_record!r}; expected one of {', '.join(ON_BAD_RECORD)}")

    @property
    def skip(self) -> bool:
        return self.on_bad_record == "skip"


def find_files(paths: Sequence[str | Path]) -> list[Path]:
    """The files, those of folders in the order of their names; what cannot be read is said before any work is done."""
    if not paths:
        raise DataError("no text files given", "name at least one .txt, .jsonl or .parquet file, or a folder of them")
    found = [file for path in map(Path, paths) for file in (_inside(path) if path.is_dir() else [path])]
    for file in found:
        _check(file)
    return found


def _inside(folder: Path) -> list[Path]:
    files = sorted(file for file in folder.rglob("*") if file.is_file() and _is_ours(file.relative_to(folder)))
    if not files:
        raise DataError(f"{folder}: no text in this folder", f"expected files of these kinds: {', '.join(KINDS)}")
    return files


def _is_ours(file: Path) -> bool:
    return kind(file) in KINDS and not any(part.startswith(".") for part in file.parts)


def kind(file: Path) -> str:
    """The ending of the name, before .gz."""
    return (Path(file.stem) if file.suffix.lower() == ".gz" else file).suffix.lower()


def _check(file: Path) -> None:
    try:
        with file.open("rb") as stream:
            empty = not stream.read(1)
    except FileNotFoundError:
        raise DataError(f"{file}: no such file", "check the path") from None
    except OSError as error:
        raise unreadable(file, error) from None
    if empty:
        raise DataError(f"{file}: the file is empty", "check how it was made, or remove it from the list")


def sentences(files: Sequence[Path], reading: Reading) -> Iterator[Sentence]:
    """All sentences of all files, one after another; never more than a record in memory."""
    document = 0
    for file in files:
        source = _lines_of_text(file, reading) if kind(file) == ".txt" else _lines_of_records(file, reading)
        found, document = False, document + 1
        for line in source:
            if line is None:
                document += 1
            else:
                found = True
                yield document, line
        if not found:
            raise DataError(f"{file}: there is no text in it", "check how it was made, or remove it from the list")


def _lines_of_text(file: Path, reading: Reading) -> Iterator[str | None]:
    """The lines that hold text; None where a document ends."""
    for line in _text(file, reading):
        yield line if reading.verbatim else line.strip() or None


def _text(file: Path, reading: Reading) -> Iterator[str]:
    """The lines with their ends: by the block as long as all is well, which is much faster, then one by one."""
    done = 0
    for block in _blocks(file):
        if block is None:
            yield from _one_by_one(file, done, reading)
        else:
            yield from block
            done += len(block)


def _blocks(file: Path) -> Iterator[list[str] | None]:
    """The lines of a block of the file at a time; None, and the end, where one of them is not plainly text."""
    with open_bytes(file) as stream:
        rest, more, first = b"", True, True
        while more:
            data = stream.read(_BLOCK)
            more, block = bool(data), rest + data
            cut = block.rfind(b"\n") + 1 if more else len(block)
            if len(block) > MAX_LINE or b"\0" in block:
                yield None
                return
            try:
                text = block[:cut].decode("utf-8-sig" if first and cut else "utf-8")
            except UnicodeDecodeError:
                yield None
                return
            yield list(StringIO(text, newline="\n"))
            rest, first = block[cut:], first and not cut


def _one_by_one(file: Path, start: int, reading: Reading) -> Iterator[str]:
    """The lines from number `start` on, each checked, so that what is wrong is named or skipped."""
    for line in islice(lines(file, MAX_LINE), start, None):
        try:
            yield decode(line, MAX_LINE)
        except Bad as bad:
            if not reading.skip:
                hint = f"{bad.hint}, or pass --on-bad-record skip"
                raise DataError(f"{file}:{line.number}: {bad.what}", hint) from None
            reading.skipped[bad.reason] += 1


def _lines_of_records(file: Path, reading: Reading) -> Iterator[str | None]:
    fields = {reading.text_field: text}
    for record in read_records(file, fields, reading.on_bad_record, reading.skipped):
        found = record.fields[reading.text_field]
        if reading.verbatim:
            yield from StringIO(found, newline="\n")
        else:
            yield from filter(None, map(str.strip, found.split("\n")))
        yield None


class Texts:
    """The texts of files, and of folders of files, to be read as often as needed: never more than one in memory.

    Of records (JSON lines, csv, parquet, also as .gz) a text is the whole of the text field; of any other file it is a
    line, trimmed. Blank ones are left out.
    """

    def __init__(
        self, paths: Sequence[str | Path], reading: Reading | None = None, progress: Progress | None = None
    ):  # fmt: skip
        self.files = find_files(paths)
        self.reading = Reading() if reading is None else reading
        self.progress = progress

    def __iter__(self) -> Iterator[str]:
        total = sum(text_size(file, self.reading.text_field) for file in self.files)
        done = reported = 0
        self.reading.skipped.clear()
        for found in self._texts():
            done += len(found.encode()) + 1
            if self.progress and done - reported >= _REPORT:
                self.progress(min(done, total), total)
                reported = done
            yield found
        if not done:
            raise DataError(f"{', '.join(map(str, self.files))}: nothing but blank lines", "check how it was made")
        if self.progress:
            self.progress(total, total)

    def _texts(self) -> Iterator[str]:
        name, reading = self.reading.text_field, self.reading
        for file in self.files:
            if kind(file) in (".json", *KINDS) and kind(file) != ".txt":
                for record in read_records(file, {name: _any_text}, reading.on_bad_record, reading.skipped):
                    if record.fields[name]:
                        yield record.fields[name]
            else:
                yield from filter(None, _lines_of_text(file, reading))


def _any_text(value: Any) -> str:
    """Text, blank or not; half of a surrogate pair, which JSON can spell and no tokenizer accepts, becomes a "?"."""
    if not isinstance(value, str):
        raise wrong_type(value, "text")
    return value.encode("utf-8", "replace").decode()


def text_size(file: Path, text_field: str) -> int:
    """About how many bytes of text are in a file, for a bar of progress: of a compressed one what it says itself."""
    size = file.stat().st_size
    try:
        if file.suffix.lower() == ".gz":
            return max(size, _unpacked(file))
        return _column_size(file, text_field) if kind(file) == ".parquet" else size
    except Exception:  # whatever is wrong with the file is said when it is read
        return size


def _unpacked(file: Path) -> int:
    """The last four bytes of a gzip file: its size, if that is below 4 GB and it was written in one go."""
    with file.open("rb") as stream:
        stream.seek(-4, 2)
        return int.from_bytes(stream.read(4), "little")


def _column_size(file: Path, name: str) -> int:
    from pyarrow import parquet

    with parquet.ParquetFile(file) as opened:
        groups = (opened.metadata.row_group(number) for number in range(opened.metadata.num_row_groups))
        columns = (group.column(place) for group in groups for place in range(group.num_columns))
        return sum(column.total_uncompressed_size for column in columns if column.path_in_schema == name)
