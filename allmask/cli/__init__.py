"""The command line: one file per command, and what several commands share.

Results go to stdout, everything else to stderr, so `allmask … --json | jq` always works. Command modules import torch
(and whatever imports it) inside their functions: `--help` and usage errors must answer at once.
"""

from __future__ import annotations

import gc
import json
import os
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from typer import Argument, Option

from allmask.cli._program import as_called
from allmask.devices import DEVICES, HELP, expect_device
from allmask.errors import DataError, UsageError
from allmask.options import ReadOptions, described
from allmask.terminal import printable, printable_json

if TYPE_CHECKING:
    from allmask.data import DataFile, Record

# ---- options of several commands -----------------------------------------------------------------------------

_MODEL = "A model folder or file, a run, allmask-en or another bundled name, or org/name."
ModelName = Annotated[str, Argument(metavar="MODEL", help=_MODEL)]
ModelOrDefault = Annotated[
    str | None,
    Argument(metavar="MODEL", help=_MODEL, show_default="allmask-en or allmask-zh, by the script of the text"),
]
Precisions = Literal["auto", "fp32", "bf16", "int8"]
Precision = Annotated[
    Precisions,
    Option(help="Arithmetic; auto is the fastest that this CPU supports: int8 to generate text, else bf16."),
]
Device = Annotated[str, Option(help=HELP, metavar="|".join(DEVICES), callback=expect_device)]
OnBadRecord = Annotated[
    Literal["stop", "skip"],
    Option(help="Stop at a record that cannot be used, or skip it; skipped records are counted."),
]


def _declared(name: str) -> Any:
    (one,) = (described(entry) for entry in fields(ReadOptions) if entry.name == name)
    return Option(help=one.help, metavar=one.metavar, show_default=one.shown_default or False)


Columns = Annotated[str | None, _declared("columns")]
Encoding = Annotated[str | None, _declared("encoding")]
LabelNames = Annotated[str | None, _declared("label_names")]
Quiet = Annotated[bool, Option("--quiet", "-q", help="No progress; warnings and errors only.")]
AsJson = Annotated[bool, Option("--json", help="Print the result as JSON.")]


# ---- start-up ------------------------------------------------------------------------------------------------


@contextmanager
def start_up() -> Iterator[None]:
    """Import torch and load a model in here: Python looks for no garbage meanwhile, nor later among what was made.

    It would look through half a million objects again and again, for 0.2 s, and once more when the process ends.
    """
    from allmask.cli._torch import import_torch

    gc.disable()
    try:
        import_torch()
        yield
    finally:
        gc.freeze()
        gc.enable()


# ---- messages ------------------------------------------------------------------------------------------------


def emit(as_json: bool, data: Any, text: str) -> None:
    """Print a result on stdout: `data` as JSON if the user asked for it, else `text`."""
    if as_json:
        print(to_json(data, allow_nan=False, indent=2))
    else:
        print(printable(text, sys.stdout))


def to_json(data: Any, **options: Any) -> str:
    """Return JSON for stdout: readable, but for control characters."""
    return printable_json(json.dumps(data, ensure_ascii=False, **options))


def markdown_table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Return the lines of a table in Markdown."""
    lines = ["|" + "".join(f" {cell} |" if cell else " |" for cell in cells) for cells in (header, *rows)]
    return [lines[0], "|---" * len(header) + "|", *lines[1:]]


_hushed = False


def hush(quiet: bool) -> None:
    """Print no more notes, except important ones, until it is called again; --quiet."""
    global _hushed
    _hushed = quiet


def hushed() -> bool:
    return _hushed


def note(message: str, important: bool = False) -> None:
    """Print a message that is not a result, such as progress, on stderr; --quiet leaves only important ones."""
    if important or not _hushed:
        print(printable(message, sys.stderr), file=sys.stderr)


def plural(count: int, thing: str) -> str:
    """Return 1 text, 2,000 texts."""
    return f"{count:,} {thing}" + ("" if count == 1 else "s")


def note_cut(count: int, limit: int) -> None:
    """Print how many texts were cut because they had more than `limit` tokens."""
    if count:
        note(f"{plural(count, 'text')} cut to {limit:,} tokens", important=True)


def note_doubtful(count: int, total: int) -> None:
    """Print how many texts have less than the usual score, which 95 % of held-out records reach, if that is unusual."""
    if count > 0.1 * total:
        some = f"{count:,} of {total:,} have" if total > 1 else "it has"
        what = f"{some} a lower score than 95 % of the held-out records: probably unlike the texts in training"
        note(f"{what}; read {'these' if total > 1 else 'it'} with care", important=True)


def note_default(texts: Sequence[str]) -> str:
    """Return the name of the bundled model for the script of these texts, and print it."""
    from allmask.checkpoints import default_model

    name = default_model(texts)
    note(f"model: {name}, by the script of the text")
    return name


def note_skipped(skipped: Mapping[str, int]) -> None:
    """Print how many records were skipped, by reason."""
    if skipped:
        note(
            "skipped records: " + ", ".join(f"{count:,} × {reason}" for reason, count in skipped.items()),
            important=True,
        )


def show_log(quiet: bool = False) -> None:
    """Print what the library logs as plain lines on stderr; with `quiet`, warnings only."""
    import logging

    class Notes(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            note(self.format(record), important=True)  # the level of the logger decides

    logger = logging.getLogger("allmask")
    logger.handlers = [Notes()]
    logger.propagate = False  # ROUGE's package adds a handler to the root logger, which would print every line again
    logger.setLevel(logging.WARNING if quiet else logging.INFO)


def examples(text: str) -> str:
    """Return the last part of a `--help`, line by line (`\\b` keeps the help formatter from rewrapping it)."""
    lines = [as_called(line.strip()) for line in text.strip().splitlines()]
    return "\b\nExamples:\n" + "\n".join(f"  {line}" for line in lines if line)


def text_file(path: Path, field: str | None, columns: str | None, encoding: str | None) -> DataFile:
    """Return a file of texts as --field, --columns and --encoding say; - is stdin."""
    from allmask.data.columns import read_options

    if field is not None and columns is not None:
        raise UsageError("--field and --columns both name the text", "leave one of them out")
    if str(path) == "-" and (columns or encoding):
        raise UsageError("stdin is read line by line, as UTF-8", "leave out --columns and --encoding, or name a file")
    file = read_options(path, columns, encoding)
    return file if field is None else replace(file, columns={"text": field})


# ---- lines of stdin ------------------------------------------------------------------------------------------


def stdin_batches(field: str = "text") -> Iterator[list[Record]]:
    """Yield the lines of stdin as records, as they arrive: one by one when typed, many at once from a file."""
    from allmask.data import Record

    if sys.stdin.isatty():
        note("type one text per line; Ctrl-D ends")
    number, rest = 0, b""
    while chunk := os.read(sys.stdin.fileno(), 1 << 16):
        *lines, rest = (rest + chunk).split(b"\n")
        yield [Record({field: _decode(line, number + n)}, f"stdin:{number + n}") for n, line in enumerate(lines, 1)]
        number += len(lines)
    if rest:
        yield [Record({field: _decode(rest, number + 1)}, f"stdin:{number + 1}")]


def stdin_records(field: str = "text") -> Iterator[Record]:
    """Yield the lines of stdin that are not blank."""
    return (record for batch in stdin_batches(field) for record in batch if record.fields[field].strip())


def _decode(line: bytes, number: int) -> str:
    try:
        return line.decode("utf-8-sig" if number == 1 else "utf-8").rstrip("\r")
    except UnicodeDecodeError as error:
        raise DataError(
            f"stdin:{number}: not UTF-8 at byte {error.start + 1} of the line", "convert it with iconv"
        ) from None
