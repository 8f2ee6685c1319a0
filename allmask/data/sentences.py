"""Read text corpora: as sentences of documents for pretraining, as plain texts for training a tokenizer.

Plain text has a sentence per line and a blank line between documents. A record of any other file (JSON lines, parquet,
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
from allmask.data.records import read_records, reasons, skips
from allmask.data.source import MAX_LINE, DataFile, check_file, decode, kind, lines, open_bytes
from allmask.errors import DataError

KINDS = (".txt", ".jsonl", ".ndjson", ".parquet", ".csv")  # read from a folder, also as .gz
_RECORDS = (".json", ".tsv", ".xlsx", *KINDS[1:])
_BLOCK = 1 << 18  # bytes
_REPORT = 1 << 20  # bytes between two calls of `progress`
_CHECK = "check how it was made, or remove it from the list"

Sentence = tuple[int, str]  # the number of its document, which never decreases; the text
Progress = Callable[[int, int], None]  # bytes of text read so far, and an estimate of the total


@dataclass(frozen=True)
class Reading:
    """How files are read. `skipped` counts the lines and records that were left out, by reason."""

    text_field: str = "text"
    on_bad_record: str = "stop"
    verbatim: bool = False  # keep line ends and blank lines, trim nothing; a text file is one document
    encoding: str | None = None  # None: UTF-8, or what a byte-order mark says
    skipped: Counter[str] = field(default_factory=Counter)

    def __post_init__(self):
        skips(self.on_bad_record)  # refuses other values

    @property
    def skip(self) -> bool:
        return skips(self.on_bad_record)

    def of(self, file: Path) -> DataFile:
        return DataFile(file, encoding=self.encoding)


def find_files(paths: Sequence[str | Path]) -> list[Path]:
    """Return the files, and the text files in folders sorted by name. A file that cannot be read is refused at once."""
    if not paths:
        raise DataError("no text files given", "name at least one .txt, .jsonl or .parquet file, or a folder of them")
    found: list[Path] = []
    for path in map(Path, paths):
        if not path.is_dir():
            found.append(path)
            continue
        files = [file for file in sorted(path.rglob("*")) if file.is_file() and kind(file) in KINDS]
        files = [file for file in files if not any(part.startswith(".") for part in file.relative_to(path).parts)]
        if not files:
            raise DataError(f"{path}: no text in this folder", f"expected files of these kinds: {', '.join(KINDS)}")
        found += files
    for file in found:
        check_file(file)
    return found


def sentences(files: Sequence[Path], reading: Reading) -> Iterator[Sentence]:
    """Yield all sentences of all files, with at most one record in memory."""
    document = 0
    for file in files:
        source = _lines_of_text(file, reading) if kind(file) == ".txt" else _lines_of_records(file, reading)
        found, document, before = False, document + 1, reading.skipped.copy()
        for line in source:
            if line is None:
                document += 1
            else:
                found = True
                yield document, line
        if not found:
            raise DataError(f"{file}: {_why_nothing(reading.skipped - before, 'there is no text in it')}", _CHECK)


def _why_nothing(skipped: Counter[str], otherwise: str) -> str:
    return f"no line can be used; skipped {reasons(skipped)}" if skipped else otherwise


def _lines_of_text(file: Path, reading: Reading) -> Iterator[str | None]:
    """Yield the lines of a text file, and None where a document ends."""
    for line in _text(file, reading):
        yield line if reading.verbatim else line.strip() or None


def _text(file: Path, reading: Reading) -> Iterator[str]:
    """Yield the lines with their line ends: block by block, which is much faster, until one is not plain text."""
    done = 0
    with open_bytes(reading.of(file)) as stream:
        rest, more, first = b"", True, True
        while more:
            data = stream.read(_BLOCK)
            more, block = bool(data), rest + data
            cut = block.rfind(b"\n") + 1 if more else len(block)
            if len(block) > MAX_LINE or b"\0" in block:
                break
            try:
                content = block[:cut].decode("utf-8-sig" if first and cut else "utf-8")
            except UnicodeDecodeError:
                break
            found = list(StringIO(content, newline="\n"))
            yield from found
            done += len(found)
            rest, first = block[cut:], first and not cut
        else:
            return
    yield from _one_by_one(file, done, reading)


def _one_by_one(file: Path, start: int, reading: Reading) -> Iterator[str]:
    """Yield the lines from number `start` on, each checked, so that a bad one is reported or skipped."""
    for line in islice(lines(reading.of(file), MAX_LINE), start, None):
        try:
            yield decode(line, MAX_LINE)
        except Bad as bad:
            if not reading.skip:
                hint = f"{bad.hint}, or pass --on-bad-record skip"
                raise DataError(f"{file}:{line.number}: {bad.what}", hint) from None
            reading.skipped[bad.reason] += 1


def _lines_of_records(file: Path, reading: Reading) -> Iterator[str | None]:
    """Yield the lines of the text field of each record, and None after each record."""
    for record in read_records(reading.of(file), {reading.text_field: text}, reading.on_bad_record, reading.skipped):
        found = record.fields[reading.text_field]
        if reading.verbatim:
            yield from StringIO(found, newline="\n")
        else:
            yield from filter(None, map(str.strip, found.split("\n")))
        yield None


class Texts:
    """The texts of files and folders, one in memory at a time; can be iterated over several times.

    In a file of records (JSON lines, csv, parquet, also as .gz) a text is the whole text field; in any other file it is
    a line, trimmed. Blank texts are left out.
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
            why = _why_nothing(self.reading.skipped, "nothing but blank lines")
            raise DataError(f"{', '.join(map(str, self.files))}: {why}", "check how it was made")
        if self.progress:
            self.progress(total, total)

    def _texts(self) -> Iterator[str]:
        name, reading = self.reading.text_field, self.reading
        for file in self.files:
            if kind(file) in _RECORDS:
                records = read_records(reading.of(file), {name: _any_text}, reading.on_bad_record, reading.skipped)
                yield from filter(None, (record.fields[name] for record in records))
            else:
                yield from filter(None, _lines_of_text(file, reading))


def _any_text(value: Any) -> str:
    """A checker for any text, also blank. Half of a surrogate pair, which no tokenizer accepts, becomes a "?"."""
    if not isinstance(value, str):
        raise wrong_type(value, "text")
    return value.encode("utf-8", "replace").decode()


def text_size(file: Path, text_field: str) -> int:
    """Estimate the bytes of text in a file, for a progress bar."""
    size = file.stat().st_size
    try:
        if file.suffix.lower() == ".gz":
            with file.open("rb") as stream:
                stream.seek(-4, 2)  # where gzip writes the uncompressed size, modulo 4 GB
                return max(size, int.from_bytes(stream.read(4), "little"))
        if kind(file) != ".parquet":
            return size
        from pyarrow import parquet

        with parquet.ParquetFile(file) as opened:
            groups = (opened.metadata.row_group(number) for number in range(opened.metadata.num_row_groups))
            columns = (group.column(number) for group in groups for number in range(group.num_columns))
            return sum(column.total_uncompressed_size for column in columns if column.path_in_schema == text_field)
    except Exception:  # a damaged file is reported when it is read
        return size
