"""`allmask embed`: write a vector for each text of a file, as .npy or .jsonl, or find the texts nearest to a query."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import IO, TYPE_CHECKING, Annotated, Any

from typer import Argument, Option

from allmask.cli import (
    Columns,
    Device,
    Encoding,
    ModelName,
    OnBadRecord,
    Precision,
    Quiet,
    emit,
    note,
    note_cut,
    note_skipped,
    show_log,
    start_up,
    stdin_records,
    text_file,
)
from allmask.cli._options import with_fields
from allmask.cli._output import check_out, output
from allmask.errors import DataError, UsageError
from allmask.files import atomic_file
from allmask.options import EmbedOptions
from allmask.terminal import shortened

if TYPE_CHECKING:
    import numpy as np

    from allmask.data import DataFile, Record
    from allmask.tasks.embed import Embedder

EXAMPLES = """
    allmask embed allmask-en texts.jsonl -o vectors.npy --normalize
    allmask embed allmask-zh 新闻.txt -o vectors.jsonl
    allmask embed allmask-en --text "Beijing welcomes you" | jq .vector
    allmask embed allmask-en articles.csv --field title --search "how to cook a chicken" --top 5
    allmask embed allmask-en - -o vectors.npy < lines.txt
"""
WINDOW = 1024  # records in memory
Put = Callable[[list["Record"], "np.ndarray"], None]


@with_fields(EmbedOptions, "pool", "normalize")
def command(
    model: ModelName,
    file: Annotated[
        Path | None,
        Argument(
            metavar="FILE", help="The texts: jsonl, json, csv, tsv, xlsx, parquet; txt, or - for stdin, one per line."
        ),
    ] = None,
    text: Annotated[
        list[str] | None, Option("--text", "-t", help="A text, instead of FILE; repeat it for more.")
    ] = None,
    out: Annotated[
        str | None,
        Option("--out", "-o", help="File to write, .npy or .jsonl; - is jsonl on stdout.", metavar="FILE"),
    ] = None,
    search: Annotated[
        str | None, Option(help="Print the texts nearest to this query, by cosine, and write no vectors.")
    ] = None,
    top: Annotated[int, Option(min=1, help="Number of texts that --search prints.")] = 5,
    name: Annotated[
        str | None, Option("--field", help="Column that holds the text; short for --columns text=NAME.", metavar="NAME")
    ] = None,
    columns: Columns = None,
    encoding: Encoding = None,
    precision: Precision = "auto",
    device: Device = "auto",
    on_bad_record: OnBadRecord = "stop",
    quiet: Quiet = False,
    as_json: Annotated[bool, Option("--json", help="With --search: print the result as JSON.")] = False,
    **given: Any,
) -> None:
    """Write a vector for each text: the rows of a .npy file (texts × width), or one {"text", "vector"} per line.

    Memory does not grow with the file, and padding costs no time.
    """
    show_log(quiet)
    how = EmbedOptions(**{name: value for name, value in given.items() if value is not None})
    if (file is None) == (not text):
        raise UsageError("expected a file or --text", "name one of them")
    if search is not None and out is not None:
        raise UsageError("--search prints texts and writes no vectors", "leave out --out or --search")
    if as_json and search is None:
        raise UsageError("--json is for --search", "for vectors as JSON: -o -")
    if search is not None and not search.strip():
        raise UsageError("--search: the query is blank")
    if file is not None and str(file) != "-":
        if search is None and out is None:
            raise UsageError("no file for the vectors was named", "name a .npy or .jsonl file with -o, or - for stdout")
        if not file.exists():
            raise DataError(f"{file}: no such file", "check the path")
    check_out(out or "-", file, (".npy", ".jsonl"))
    named = text_file(file or Path("-"), name, columns, encoding)
    from allmask.tasks.task import ModelFolder

    opened = ModelFolder.open(model, device)
    with start_up():
        from allmask.tasks.embed import nearest, open_embedder

        embedder = open_embedder(opened, precision, how.pool, how.normalize)
    source = _Source(None if file is None else named, text or [], on_bad_record)
    if search is None:
        _write(embedder, source, out or "-", quiet)
    else:
        found = nearest(embedder(search), source.windows(embedder, quiet), top)
        rows = [{"score": round(one.score, 6), "where": one.what.where, **one.what.fields} for one in found]
        rows = [{name: value for name, value in row.items() if value is not None} for row in rows]
        lines = (f"{row['score']:6.3f}  {row['where']}  {shortened(row['text'], 100)}" for row in rows)
        emit(as_json, rows, "\n".join(lines))
    note_cut(embedder.cut, embedder.model.config.max_positions)


# ---- texts ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Source:
    """The texts to embed: a file, stdin or --text."""

    file: DataFile | None
    texts: list[str]
    on_bad_record: str

    def read(self, skipped: Counter[str]) -> Iterator[Record]:
        from allmask.data import Maybe, Record, read_records, text

        if self.file is None:
            return (Record({"text": one}, f"--text {number}") for number, one in enumerate(self.texts, 1))
        if str(self.file) == "-":
            return stdin_records()
        return read_records(self.file, {"id": Maybe(lambda value: value), "text": text}, self.on_bad_record, skipped)

    def windows(self, embedder: Embedder, quiet: bool) -> Iterator[tuple[list[Record], np.ndarray]]:
        """Check and count all texts, except those of stdin, which can be read only once; then embed them."""
        from allmask.training.progress import Progress

        total, is_stdin = 0, str(self.file) == "-"
        if not is_stdin:
            skipped: Counter[str] = Counter()
            total = sum(1 for _ in self.read(skipped))
            note_skipped(skipped)
        bar = Progress(total, "embedded", quiet=quiet or is_stdin)
        done, records = 0, self.read(Counter())
        while window := list(islice(records, WINDOW)):
            yield window, embedder([record.fields["text"] for record in window])
            done += len(window)
            bar.update(done)
        bar.close()


# ---- vectors -------------------------------------------------------------------------------------------------


def _write(embedder: Embedder, source: _Source, out: str, quiet: bool) -> None:
    count, width = 0, embedder.model.config.features
    with _output(out, width) as put:
        for records, vectors in source.windows(embedder, quiet):
            put(records, vectors)
            count += len(records)
    if out != "-" and not quiet:
        note(f"{out}: {count:,} × {width}")


@contextmanager
def _output(out: str, width: int) -> Iterator[Put]:
    """Yield a function that writes records with their vectors; a file appears when it is complete."""
    if out != "-" and Path(out).resolve().suffix.lower() == ".npy":
        with atomic_file(out, "wb") as stream, _npy(stream, width) as put:
            yield put
        return
    from allmask.tasks.embed import as_digits

    with output(out) as put_row:

        def put_rows(records: list[Record], vectors: np.ndarray) -> None:
            for record, vector in zip(records, vectors.tolist(), strict=True):
                fields = {name: value for name, value in record.fields.items() if value is not None}
                put_row({**fields, "vector": as_digits(vector)})

        yield put_rows


@contextmanager
def _npy(stream: IO[bytes], width: int) -> Iterator[Put]:
    """Yield a function that appends rows; the header, which holds their number, is written again at the end."""
    from numpy.lib import format

    count = 0

    def header() -> None:
        format.write_array_header_1_0(stream, {"descr": "<f4", "fortran_order": False, "shape": (count, width)})

    def put(records: list[Record], vectors: np.ndarray) -> None:
        nonlocal count
        count += len(records)
        stream.write(vectors.astype("<f4").tobytes())

    header()
    begin = stream.tell()
    yield put
    stream.seek(0)
    header()
    assert stream.tell() == begin, "the header must not move the rows"
