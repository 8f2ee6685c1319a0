"""`allmask predict`: apply a trained model to each record of a file, and write the predictions to another."""

from __future__ import annotations

import shlex
import shutil
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

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
    note_doubtful,
    note_skipped,
    plural,
    show_log,
    stdin_batches,
)
from allmask.cli._options import with_fields
from allmask.cli._output import FORMATS, Put, check_out, output
from allmask.cli._output import as_json as json_line
from allmask.cli._program import program
from allmask.cli.generate import SEARCH, open_predictor
from allmask.errors import UsageError
from allmask.options import Decoding
from allmask.runs.options import usual_reading
from allmask.terminal import printable, shortened, text_width

if TYPE_CHECKING:
    from allmask.data import DataFile, Record
    from allmask.tasks.task import Predictor

EXAMPLES = """
    allmask predict runs/title articles.jsonl
    allmask predict runs/title articles.jsonl -o titles.jsonl
    allmask predict runs/title articles.parquet -o titles.csv --beams 4 --keep url,date
    allmask predict runs/mails mails.csv --columns source=Body --encoding cp1252 -o subjects.xlsx
    allmask predict runs/title articles.csv -o - | jq -r .prediction
    allmask predict runs/de-en german.jsonl -o english.jsonl --beams 5
    allmask predict runs/reviews new.csv -o labels.csv
    allmask predict runs/reviews new.csv --json
    allmask predict runs/reviews - -o - < lines.txt
    allmask predict runs/c3 questions.jsonl -o choices.jsonl
    allmask predict runs/names texts.jsonl -o tags.jsonl
    allmask predict runs/squad questions.json -o answers.jsonl --n-best 3
    allmask predict runs/photos new-photos/ -o classes.jsonl
"""
SHOWN = 10  # records on the screen


@with_fields(Decoding, *SEARCH)
def command(
    model: ModelName,
    file: Annotated[
        Path,
        Argument(
            metavar="FILE", help="The inputs: jsonl, json, csv, tsv, xlsx, parquet; txt, or - for stdin, one per line."
        ),
    ],
    out: Annotated[
        str | None,
        Option(
            "--out",
            "-o",
            help=f"File to write ({', '.join(FORMATS)}); - is stdout.",
            metavar="FILE",
            show_default=f"the first {SHOWN} records on the screen",
        ),
    ] = None,
    precision: Precision = "auto",
    device: Device = "auto",
    keep: Annotated[
        str, Option(help="Columns to copy, separated by commas.", metavar="COLUMN,…", show_default="all")
    ] = "",
    columns: Columns = None,
    encoding: Encoding = None,
    on_bad_record: OnBadRecord = "stop",
    quiet: Quiet = False,
    as_json: Annotated[
        bool, Option("--json", help="Print all records as one JSON array; with --out FILE, a summary.")
    ] = False,
    **search: Any,
) -> None:
    """Apply MODEL to each record of FILE. The output has one row per record, in the same order, with all columns of
    FILE and these:

    \b
    title, translate   prediction, score; with --n-best, predictions
    classify           prediction, probability, probabilities
    choose             prediction (the number of a choice), choice, probability, probabilities
    tag                tokens, prediction (tags), entities
    answer             answer, start, end, score; with --n-best, answers
    image              file, prediction, probability, probabilities; FILE is an image or a folder of images

    Classifiers and taggers also read stdin, one text per line. The output file appears when it is complete; it
    replaces an existing one.
    """
    from allmask.data.columns import read_options

    show_log(quiet)
    usual = usual_reading(model)
    source = read_options(file, columns, encoding, whole=True, usual=usual.columns, usual_encoding=usual.encoding)
    is_stdin = str(file) == "-"
    if is_stdin and (columns or encoding):
        raise UsageError("stdin is read line by line, as UTF-8", "leave out --columns and --encoding, or name a file")
    if as_json and out == "-":
        raise UsageError("-o - prints a JSON object per line, --json one array", "leave out one of them")
    check_out(out or "-", file, FORMATS)
    predictor, options = open_predictor(model, file, precision, device, search)
    skipped: Counter[str] = Counter()
    kept = [name for name in (word.strip() for word in keep.split(",")) if name]
    if is_stdin:
        predictor.expect_lines()
        with output(out or "-", array=as_json and out is None) as put:
            total = _predict_lines(predictor, options, put)
    else:
        rows = Rows(source, kept, predictor.hidden)
        if out is None and not as_json:
            again = {"--columns": columns, "--encoding": encoding}
            flags = [word for flag, value in again.items() if value for word in (flag, value)]
            command = [*program(), "predict", model, str(file), *flags]
            total = _show(predictor, options, rows, on_bad_record, skipped, command)
        else:
            with output(out or "-", array=out is None) as put:
                total = _predict_file(predictor, options, rows, on_bad_record, skipped, put, quiet)
        rows.note_absent()
    if as_json and out is not None:
        emit(True, {"out": out, "records": total, "skipped": skipped, "cut": predictor.cut}, "")
    elif out not in (None, "-"):
        note(f"{out}: {plural(total, 'record')}")
    note_cut(predictor.cut, predictor.max_tokens)
    note_doubtful(predictor.doubtful, total if out is not None or as_json else min(total, SHOWN))


def _predict_file(
    predictor: Predictor, options: dict[str, Any], rows: Rows, on_bad_record: str, skipped: Counter[str], put: Put,
    quiet: bool,
) -> int:  # fmt: skip
    """Check all records, then predict with a window of them in memory; return their number."""
    from allmask.training.progress import Progress

    total = _count(predictor, rows.file, on_bad_record, skipped)
    bar = Progress(total, predictor.done, quiet=quiet)
    done, records = 0, predictor.read(rows.file, on_bad_record, Counter())
    while window := list(islice(records, predictor.window)):
        for record, prediction in zip(window, predictor.predict(window, **options), strict=True):
            put(rows.row(record, prediction))
        done += len(window)
        bar.update(done)
    bar.close()
    return total


def _count(predictor: Predictor, file: DataFile, on_bad_record: str, skipped: Counter[str]) -> int:
    """Check all records, and return their number."""
    total = sum(1 for _ in predictor.read(file, on_bad_record, skipped))
    note_skipped(skipped)
    return total


def _show(
    predictor: Predictor,
    options: dict[str, Any],
    rows: Rows,
    on_bad_record: str,
    skipped: Counter[str],
    command: list[str],
) -> int:
    """Print the first records with their predictions, and how to write all to a file; return the number of all."""
    total = _count(predictor, rows.file, on_bad_record, skipped)
    width = max(40, shutil.get_terminal_size((100, 24)).columns)
    records = list(islice(predictor.read(rows.file, on_bad_record, Counter()), SHOWN))
    for record, prediction in zip(records, predictor.predict(records, **options), strict=True):
        row = rows.row(record, prediction)
        names = max(map(text_width, row))
        print(printable(record.where))
        for name, value in row.items():
            shown = value if isinstance(value, str) else json_line({"": _rounded(value)})[5:-1]
            gap = " " * (names - text_width(name) + 2)
            print(printable(f"  {name}{gap}{shortened(shown, width - names - 4)}"))
        print()
    name = rows.file.path.name.removesuffix(".gz").rpartition(".")[0] or "out"
    ending = rows.file.path.suffix.lower()
    example = f"{name}-predictions{ending if ending in FORMATS else '.jsonl'}"
    again = shlex.join([*command, "-o", example])
    if total > len(records):
        print(printable(f"{len(records):,} of {plural(total, 'record')}; for all of them: {again}"))
    else:
        print(printable(f"to write a file: {again}"))
    return total


def _rounded(value: Any) -> Any:
    """Round a number, or all numbers of a list or an object, to four digits."""
    if isinstance(value, dict):
        return {name: _rounded(item) for name, item in value.items()}
    if isinstance(value, list):
        return [_rounded(item) for item in value]
    return round(value, 4) if isinstance(value, float) else value


@dataclass
class Rows:
    """The rows to write: the columns of the file, or some of them, and what the model predicts."""

    file: DataFile
    keep: list[str]  # empty: all columns
    hidden: Collection[str]  # fields of records without columns, such as images, that are not written
    found: set[str] = field(default_factory=set)  # of `keep`

    def row(self, record: Record, prediction: dict[str, Any]) -> dict[str, Any]:
        if record.row is None:  # a file without columns: --keep asks for more
            hidden = {name for name, value in record.fields.items() if value is None or name in self.hidden}
            names = record.fields.keys() - (hidden - set(self.keep))
            row = {name: value for name, value in record.fields.items() if name in names}
        else:
            row = {name: value for name, value in record.row.items() if not self.keep or name in self.keep}
        self.found.update(row)
        for name, value in prediction.items():
            if name in record.fields and record.fields[name] == value and (name in row or record.row is not None):
                continue  # the words of a sentence that was given as words
            row[self._free(name, row)] = value
        return row

    def _free(self, name: str, row: dict[str, Any]) -> str:
        """Return a name for a predicted field that is not a column of the file."""
        free = name
        while free in row:
            free = f"model_{free}"
        if free != name:
            self.file.say(f'the file has a column "{name}", so that of the model is called "{free}"')
        return free

    def note_absent(self) -> None:
        absent = [name for name in self.keep if name not in self.found]
        if absent:
            note(f"--keep: no record has {', '.join(absent)}")


def _predict_lines(predictor: Predictor, options: dict[str, Any], put: Put) -> int:
    """Predict for each line of stdin as soon as it arrives, and return their number. Blank lines stay blank."""
    count = 0
    for records in stdin_batches():
        texts = [record for record in records if record.fields["text"].strip()]
        predictions = predictor.predict(texts, **options) if texts else iter(())
        for record in records:
            put({**record.fields, **next(predictions)} if record.fields["text"].strip() else None)
        count += len(records)
    return count
