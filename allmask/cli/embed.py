"""`allmask embed`: a vector for each text of a file, into .npy or jsonl, or the texts nearest to a query."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import IO, TYPE_CHECKING, Annotated, Any, Literal

import typer

from allmask.cli import emit, listen, note, ready_lines, tell_cut, tell_skipped
from allmask.cli.generate import Folder, Precision
from allmask.errors import ResourceError, UsageError
from allmask.files import atomic_file

if TYPE_CHECKING:
    import numpy as np

    from allmask.data import Record
    from allmask.tasks.embed import Embedder

EXAMPLES = """
    allmask embed minilm texts.jsonl -o vectors.npy --normalize
    allmask embed bge-small-zh 新闻.txt -o vectors.jsonl --pool cls
    allmask embed minilm --text "Beijing welcomes you" | jq .vector
    allmask embed minilm articles.csv --field title --search "how to cook a chicken" --top 5
    allmask embed minilm - -o vectors.npy < lines.txt
"""
WINDOW = 1024  # records in memory
Put = Callable[[list["Record"], "np.ndarray"], None]


def command(
    model: Folder,
    file: Annotated[
        Path | None,
        typer.Argument(metavar="[FILE]", help="jsonl, csv, parquet with text; txt, or - for stdin, a line each."),
    ] = None,
    text: Annotated[
        list[str] | None, typer.Option("--text", "-t", help="A text instead of a file; repeatable.")
    ] = None,
    out: Annotated[
        str | None, typer.Option("--out", "-o", help="The .npy or .jsonl file to write; - is jsonl on stdout.")
    ] = None,
    pool: Annotated[
        Literal["mean", "cls"] | None,
        typer.Option(
            help="The mean of all hidden states, or the first one. [default: as the model folder says, or mean]"
        ),
    ] = None,
    normalize: Annotated[bool, typer.Option("--normalize", help="Scale vectors to length 1.")] = False,
    search: Annotated[str | None, typer.Option(help="Show the texts nearest to this one, by cosine.")] = None,
    top: Annotated[int, typer.Option(min=1, help="How many texts --search shows.")] = 5,
    name: Annotated[str, typer.Option("--field", help="Which field of a record is the text.")] = "text",
    precision: Precision = "auto",
    on_bad_record: Annotated[
        Literal["stop", "skip"], typer.Option(help="What to do with an unusable record.")
    ] = "stop",
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print what was found as JSON.")] = False,
) -> None:
    """Write a vector for each text: rows of a .npy file (n, width), or {"text", "vector"} a line.

    Texts are read as a stream, so memory does not grow with the file, and share rows without padding. With --search
    nothing is written: the nearest texts are shown.
    """
    listen(quiet)
    if (file is None) == (not text):
        raise UsageError("expected a file or --text", "name one of them")
    if search is not None and out is not None:
        raise UsageError("--search shows texts, it writes no vectors", "leave --out out, or --search")
    if as_json and search is None:
        raise UsageError("--json is for --search", "for vectors as JSON: -o -")
    if search is not None and not search.strip():
        raise UsageError("--search: the query is blank")
    if search is None:
        _check_out(out, file)
    from allmask.checkpoints import resolve
    from allmask.tasks.embed import Embedder

    embedder = Embedder.open(resolve(model), pool, normalize, precision)
    source = _Source(file, text or [], name, on_bad_record)
    if search is None:
        _write(embedder, source, out or "-", quiet)
    else:
        found = _search(embedder, source, search, top, quiet)
        emit(as_json, found, "\n".join(f"{row['score']:6.3f}  {row['where']}  {_line(row['text'])}" for row in found))
    tell_cut(embedder.cut, embedder.model.config.max_positions)


def _line(text: str, limit: int = 100) -> str:
    joined = " ".join(text.split())
    return joined if len(joined) <= limit else joined[: limit - 1] + "…"


def _check_out(out: str | None, file: Path | None) -> None:
    if out is None:
        if file is not None and str(file) != "-":
            raise UsageError(
                "no place for the vectors was named", "name a .npy or .jsonl file with -o, or - for stdout"
            )
        return
    if out == "-":
        return
    path = Path(out)
    if path.suffix not in (".npy", ".jsonl"):
        raise UsageError(f"{out}: unknown kind of file", "name a .npy or .jsonl file, or - for jsonl on stdout")
    if path.is_dir() or (file is not None and path.exists() and file.exists() and path.samefile(file)):
        raise UsageError(f"{out}: is {'a folder' if path.is_dir() else 'the input itself'}", "name another --out")
    above = path.absolute().parent
    if not above.is_dir() or not os.access(above, os.W_OK):
        raise ResourceError(f"{out}: cannot write in {above}", "choose another --out")


# ---- texts ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Source:
    """Where texts come from, as records."""

    file: Path | None
    texts: list[str]
    name: str
    on_bad_record: str

    def read(self, skipped: Counter[str]) -> Iterator[Record]:
        from allmask.data import Maybe, Record, read_records, text

        if self.file is None:
            return (Record({"text": one}, f"--text {number}") for number, one in enumerate(self.texts, 1))
        if str(self.file) == "-":
            return self._lines()
        fields = {"id": Maybe(lambda value: value), self.name: text}
        found = read_records(self.file, fields, self.on_bad_record, skipped)
        return (Record({"id": one.fields["id"], "text": one.fields[self.name]}, one.where) for one in found)

    def _lines(self) -> Iterator[Record]:
        from allmask.data import Record

        number = 0
        for lines in ready_lines():
            for line in lines:
                number += 1
                if line.strip():
                    yield Record({"text": line}, f"stdin:{number}")

    def total(self) -> int | None:
        """Check all texts and count them; None for stdin, which can be read only once."""
        if str(self.file) == "-":
            return None
        skipped: Counter[str] = Counter()
        count = sum(1 for _ in self.read(skipped))
        tell_skipped(skipped)
        return count


def _windows(embedder: Embedder, source: _Source, quiet: bool) -> Iterator[tuple[list[Record], np.ndarray]]:
    from allmask.training.progress import Progress

    total = source.total()
    bar = Progress(total or 0, "embedded", quiet=quiet or total is None)
    done, records = 0, source.read(Counter())
    while window := list(islice(records, WINDOW)):
        yield window, embedder([record.fields["text"] for record in window])
        done += len(window)
        bar.update(done)
    bar.close()


# ---- vectors -------------------------------------------------------------------------------------------------


def _write(embedder: Embedder, source: _Source, out: str, quiet: bool) -> None:
    count = 0
    with _output(out, embedder.model.config.features) as put:
        for records, vectors in _windows(embedder, source, quiet):
            put(records, vectors)
            count += len(records)
    if out != "-" and not quiet:
        note(f"{out}: {count:,} × {embedder.model.config.features}")


@contextmanager
def _output(out: str, width: int) -> Iterator[Put]:
    """A function that writes records with their vectors; a file gets its name when it is complete."""
    if out == "-":
        yield lambda records, vectors: print("\n".join(_json_lines(records, vectors)), flush=True)
        return
    with atomic_file(out, "wb") as stream:
        kind = _npy(stream, width) if Path(out).resolve().suffix == ".npy" else _jsonl(stream)
        with kind as put:
            yield put


@contextmanager
def _npy(stream: IO[bytes], width: int) -> Iterator[Put]:
    """Write rows one after another; the header, which comes first, leaves room for their number, known last."""
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


@contextmanager
def _jsonl(stream: IO[bytes]) -> Iterator[Put]:
    def put(records: list[Record], vectors: np.ndarray) -> None:
        stream.writelines(f"{line}\n".encode() for line in _json_lines(records, vectors))

    yield put


def _json_lines(records: Iterable[Record], vectors: np.ndarray) -> Iterator[str]:
    for record, vector in zip(records, vectors.tolist(), strict=True):
        fields = {name: value for name, value in record.fields.items() if value is not None}
        rounded = [float(f"{number:.7g}") for number in vector]  # all that fp32 knows
        yield json.dumps({**fields, "vector": rounded}, ensure_ascii=False, default=str)


# ---- the nearest ---------------------------------------------------------------------------------------------


def _search(embedder: Embedder, source: _Source, query: str, top: int, quiet: bool) -> list[dict[str, Any]]:
    from allmask.tasks.embed import nearest

    found = nearest(embedder(query), _windows(embedder, source, quiet), top)
    rows = [{"score": round(one.score, 6), "where": one.what.where, **one.what.fields} for one in found]
    return [{name: value for name, value in row.items() if value is not None} for row in rows]
