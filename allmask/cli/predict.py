"""`allmask predict`: apply a trained model to each record of a file, and write the predictions to another."""

from __future__ import annotations

from collections import Counter
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument, Option

from allmask.cli import (
    ModelName,
    OnBadRecord,
    Precision,
    Quiet,
    note,
    note_cut,
    note_skipped,
    plural,
    show_log,
    stdin_batches,
)
from allmask.cli._options import with_fields
from allmask.cli._output import FORMATS, Put, check_out, output
from allmask.cli.generate import SEARCH, open_predictor
from allmask.options import Decoding

if TYPE_CHECKING:
    from allmask.data import Record
    from allmask.tasks.task import Predictor

EXAMPLES = """
    allmask predict runs/title articles.jsonl -o titles.jsonl
    allmask predict runs/title articles.parquet -o titles.jsonl --beams 4 --keep url,date
    allmask predict runs/title articles.csv -o - | jq -r .prediction
    allmask predict runs/de-en german.jsonl -o english.jsonl --beams 5
    allmask predict runs/reviews new.csv -o labels.csv
    allmask predict runs/reviews - -o - < lines.txt
    allmask predict runs/c3 questions.jsonl -o choices.jsonl
    allmask predict runs/names texts.jsonl -o tags.jsonl
    allmask predict runs/squad questions.json -o answers.jsonl --n-best 3
    allmask predict runs/photos new-photos/ -o classes.jsonl
"""


@with_fields(Decoding, *SEARCH)
def command(
    model: ModelName,
    file: Annotated[
        Path,
        Argument(metavar="FILE", help="The inputs: jsonl, csv or parquet; txt, or - for stdin, one per line."),
    ],
    out: Annotated[
        str, Option("--out", "-o", help=f"File to write ({', '.join(FORMATS)}); - is stdout.", metavar="FILE")
    ],
    precision: Precision = "auto",
    keep: Annotated[
        str, Option(help="More fields to copy, separated by commas; id, target and label are always copied.")
    ] = "",
    on_bad_record: OnBadRecord = "stop",
    quiet: Quiet = False,
    **search: Any,
) -> None:
    """Apply MODEL to each record of FILE. The output has one row per record, in the same order, with these fields:

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
    show_log(quiet)
    check_out(out, file, FORMATS)
    predictor, options = open_predictor(model, file, precision, search)
    if str(file) == "-":
        predictor.expect_lines()
        with output(out) as put:
            _predict_lines(predictor, options, put)
    else:
        kept = [name for name in (word.strip() for word in keep.split(",")) if name]
        total = _predict_file(predictor, options, file, kept, on_bad_record, out, quiet)
        if not quiet and out != "-":
            note(f"{out}: {plural(total, 'record')}")
    note_cut(predictor.cut, predictor.max_tokens)


def _predict_file(
    predictor: Predictor, options: dict[str, Any], file: Path, keep: list[str], on_bad_record: str, out: str,
    quiet: bool,
) -> int:  # fmt: skip
    """Check all records, then predict with a window of them in memory; return their number."""
    from allmask.training.progress import Progress

    skipped: Counter[str] = Counter()
    total = sum(1 for _ in predictor.read(file, on_bad_record, skipped, keep))
    note_skipped(skipped)
    hidden = predictor.hidden - set(keep)
    bar = Progress(total, predictor.done, quiet=quiet)
    done, records = 0, predictor.read(file, on_bad_record, Counter(), keep)
    with output(out) as put:
        while window := list(islice(records, predictor.window)):
            for record, prediction in zip(window, predictor.predict(window, **options), strict=True):
                put(_row(record, prediction, hidden))
            done += len(window)
            bar.update(done)
    bar.close()
    return total


def _row(record: Record, prediction: dict[str, Any], hidden: frozenset[str]) -> dict[str, Any]:
    fields = {name: value for name, value in record.fields.items() if value is not None and name not in hidden}
    return {**fields, **prediction}


def _predict_lines(predictor: Predictor, options: dict[str, Any], put: Put) -> None:
    """Predict for each line of stdin as soon as it arrives; a blank line gives a blank line."""
    for records in stdin_batches():
        texts = [record for record in records if record.fields["text"].strip()]
        predictions = predictor.predict(texts, **options) if texts else iter(())
        for record in records:
            put(_row(record, next(predictions), predictor.hidden) if record.fields["text"].strip() else None)
