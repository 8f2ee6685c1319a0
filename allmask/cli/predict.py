"""`allmask predict`: a title for each record of a file, in its order, into another file."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from allmask.cli import listen, note, tell_skipped
from allmask.cli.generate import (
    Beams,
    Folder,
    LengthPenalty,
    MaxNew,
    MinNew,
    NBest,
    NoRepeat,
    Precision,
    search_options,
)
from allmask.errors import ResourceError, UsageError

if TYPE_CHECKING:
    from allmask.data import Record
    from allmask.pipelines import Pipeline
    from allmask.tasks.writing import Written

EXAMPLES = """
    allmask predict runs/title/final articles.jsonl -o titles.jsonl
    allmask predict runs/title/final articles.parquet -o titles.jsonl --beams 4 --keep url,date
    allmask predict runs/title/final articles.csv -o - | jq -r .prediction
"""
WINDOW, BATCH = 256, 32  # records in memory, sorted by length; texts written at a time


def command(
    model: Folder,
    file: Annotated[
        Path, typer.Argument(metavar="FILE", help="jsonl, csv, parquet with a source; or txt, a line each.")
    ],
    out: Annotated[str, typer.Option("--out", "-o", help="The jsonl file to write, - for stdout.")],
    beams: Beams = 1,
    n_best: NBest = 1,
    length_penalty: LengthPenalty = 1.0,
    no_repeat_ngram: NoRepeat = None,
    min_new: MinNew = 0,
    max_new: MaxNew = None,
    precision: Precision = "auto",
    keep: Annotated[
        str, typer.Option(help="Other fields to copy, with commas between. id and target always are.")
    ] = "",
    on_bad_record: Annotated[
        Literal["stop", "skip"], typer.Option(help="What to do with one that cannot be used.")
    ] = "stop",
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress.")] = False,
) -> None:
    """Write a JSON line for each record of FILE: its fields, "prediction" and "score" (with --n-best, "predictions").

    The file appears when it is complete; one of that name is replaced.
    """
    listen(quiet)
    _check_out(out, file)
    from allmask.pipelines import open_pipeline

    skipped: Counter[str] = Counter()
    read = _reader(file, on_bad_record, keep)
    total = sum(1 for _ in read(skipped))  # all records are checked before the first is written
    tell_skipped(skipped)
    pipeline = open_pipeline(model, precision, max_new)
    options = search_options(beams, n_best, length_penalty, no_repeat_ngram, min_new, max_new)
    pipeline.settings(**options)
    with _output(out) as put:
        _predict(pipeline, read(Counter()), options, put, total, quiet)
    if not quiet and out != "-":
        note(f"{out}: {total:,} records")


def _check_out(out: str, file: Path) -> None:
    if out == "-":
        return
    path = Path(out)
    if path.is_dir():
        raise UsageError(f"{out}: is a folder", "name a file for --out")
    if path.exists() and file.exists() and path.samefile(file):
        raise UsageError(f"{out}: is the input itself", "name another file for --out")
    if not path.absolute().parent.is_dir() or not os.access(path.absolute().parent, os.W_OK):
        raise ResourceError(f"{out}: cannot write in {path.absolute().parent}", "choose another --out")


def _reader(file: Path, on_bad_record: str, keep: str) -> Callable[[Counter[str]], Iterator[Record]]:
    from allmask.data import Maybe, read_records, text

    others = ["id", "target", *filter(None, (name.strip() for name in keep.split(",")))]
    fields = {"source": text, **{name: Maybe(lambda value: value) for name in others if name != "source"}}
    return lambda skipped: read_records(file, fields, on_bad_record, skipped)


@contextmanager
def _output(out: str) -> Iterator[Callable[[str], None]]:
    """Something that takes lines: stdout, or a file that gets its name when it is complete."""
    if out == "-":
        yield lambda line: print(line, flush=True)
        return
    path = Path(out).resolve()  # through a link, to what it names
    if path.exists() and not path.is_file():  # a pipe or a device is written to, never replaced
        with path.open("w", encoding="utf-8") as stream:
            yield lambda line: print(line, file=stream)
        return
    beside = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        with beside.open("w", encoding="utf-8") as stream:
            yield lambda line: print(line, file=stream)
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(beside, path)
    finally:
        beside.unlink(missing_ok=True)


def _predict(
    pipeline: Pipeline, records: Iterator[Record], options: dict[str, Any], put: Callable[[str], None], total: int,
    quiet: bool,
) -> None:  # fmt: skip
    from allmask.training.progress import Progress

    bar = Progress(total, "written", quiet=quiet)
    done = 0
    while window := list(islice(records, WINDOW)):
        for record, found in zip(window, _write_sorted(pipeline, window, options), strict=True):
            put(_line(record, found, options["n_best"] > 1))
        done += len(window)
        bar.update(done)
    bar.close()


def _write_sorted(pipeline: Pipeline, window: list[Record], options: dict[str, Any]) -> list[Written]:
    """The records' texts in their own order, written in an order in which neighbours are about as long."""
    sources = [record.fields["source"] for record in window]
    order = sorted(range(len(sources)), key=lambda number: len(sources[number]))
    found = dict(zip(order, pipeline.write([sources[number] for number in order], BATCH, **options), strict=True))
    return [found[number] for number in range(len(sources))]


def _line(record: Record, found: Written, several: bool) -> str:
    best = [{"prediction": text, "score": one.score} for text, one in found]
    fields = {name: value for name, value in record.fields.items() if value is not None}
    told = {**fields, **({"predictions": best} if several else best[0])}
    return json.dumps(told, ensure_ascii=False, default=str)  # a date out of a parquet file as text
