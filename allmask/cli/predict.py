"""`allmask predict`: the predictions of a trained model for each record of a file, in its order, into another file."""

from __future__ import annotations

from collections import Counter
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from allmask.cli import listen, many, note, ready_lines, tell_cut, tell_skipped
from allmask.cli._output import Put, check_out, output
from allmask.cli.generate import (
    Beams,
    Folder,
    LengthPenalty,
    MaxNew,
    MinNew,
    NBest,
    NoRepeat,
    Precision,
    accepted,
    search_options,
)

if TYPE_CHECKING:
    from allmask.data import Record
    from allmask.tasks.task import Predictor

EXAMPLES = """
    allmask predict runs/title/final articles.jsonl -o titles.jsonl
    allmask predict runs/title/final articles.parquet -o titles.jsonl --beams 4 --keep url,date
    allmask predict runs/title/final articles.csv -o - | jq -r .prediction
    allmask predict runs/de-en german.jsonl -o english.jsonl --beams 5
    allmask predict runs/reviews new.csv -o labels.csv
    allmask predict runs/reviews - -o - < lines.txt
    allmask predict runs/c3 questions.jsonl -o choices.jsonl
    allmask predict runs/names texts.jsonl -o tags.jsonl
    allmask predict runs/squad questions.json -o answers.jsonl --n-best 3
    allmask predict runs/photos new-photos/ -o classes.jsonl
"""


def command(
    model: Folder,
    file: Annotated[
        Path,
        typer.Argument(metavar="FILE", help="jsonl, csv, parquet with the inputs of the task; or txt, a line each."),
    ],
    out: Annotated[
        str, typer.Option("--out", "-o", help="The .jsonl, .json, .csv, .tsv or .parquet file to write, - for stdout.")
    ],
    beams: Beams = 1,
    n_best: NBest = 1,
    length_penalty: LengthPenalty = 1.0,
    no_repeat_ngram: NoRepeat = None,
    min_new: MinNew = 0,
    max_new: MaxNew = None,
    precision: Precision = "auto",
    keep: Annotated[
        str, typer.Option(help="Other fields to copy, separated by commas. id, target and label are always copied.")
    ] = "",
    on_bad_record: Annotated[
        Literal["stop", "skip"], typer.Option(help="What to do with an unusable record.")
    ] = "stop",
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress.")] = False,
) -> None:
    """Predict with MODEL for each record of FILE. A row has the fields of its record and those of the task:

    \b
    title, translate   prediction, score; with --n-best, predictions
    classify           prediction, probability, probabilities
    choose             prediction (the number of a choice), choice, probability, probabilities
    tag                tokens, prediction (tags), entities
    answer             answer, start, end, score; with --n-best, answers
    image              file, prediction, probability, probabilities; FILE is an image or a folder of images

    Classifiers and taggers also read - (stdin), a text a line. The file appears when it is complete; one of that name
    is replaced.
    """
    listen(quiet)
    check_out(out, file)
    from allmask.tasks.task import ModelFolder

    predictor: Predictor = ModelFolder.open(model).predictor(precision=precision)
    options = accepted(predictor, search_options(beams, n_best, length_penalty, no_repeat_ngram, min_new, max_new))
    if str(file) == "-":
        predictor.expect_lines()
        with output(out) as put:
            _predict_lines(predictor, options, put)
    else:
        kept = [name for name in (word.strip() for word in keep.split(",")) if name]
        total = _predict_file(predictor, options, file, kept, on_bad_record, out, quiet)
        if not quiet and out != "-":
            note(f"{out}: {many(total, 'record')}")
    tell_cut(predictor.cut, predictor.max_tokens)


def _predict_file(
    predictor: Predictor, options: dict[str, Any], file: Path, keep: list[str], on_bad_record: str, out: str,
    quiet: bool,
) -> int:  # fmt: skip
    """All records are checked before the first is predicted for; no more than a window of them is in memory."""
    from allmask.training.progress import Progress

    skipped: Counter[str] = Counter()
    total = sum(1 for _ in predictor.read(file, on_bad_record, skipped, keep))
    tell_skipped(skipped)
    hidden = predictor.hidden - set(keep)
    bar = Progress(total, predictor.done, quiet=quiet)
    done, records = 0, predictor.read(file, on_bad_record, Counter(), keep)
    with output(out) as put:
        while window := list(islice(records, predictor.window)):
            for record, found in zip(window, predictor.predict(window, **options), strict=True):
                put(_row(record, found, hidden))
            done += len(window)
            bar.update(done)
    bar.close()
    return total


def _row(record: Record, found: dict[str, Any], hidden: frozenset[str]) -> dict[str, Any]:
    fields = {name: value for name, value in record.fields.items() if value is not None and name not in hidden}
    return {**fields, **found}


def _predict_lines(predictor: Predictor, options: dict[str, Any], put: Put) -> None:
    """Each line of stdin is a text, and answered as soon as it is there; a blank one gives a blank one."""
    from allmask.data import Record

    number = 0
    for lines in ready_lines():
        records = [Record({"text": line}, f"stdin:{number + place}") for place, line in enumerate(lines, 1)]
        there = [record for record in records if record.fields["text"].strip()]
        found = predictor.predict(there, **options) if there else iter(())
        for record in records:
            put(_row(record, next(found), predictor.hidden) if record.fields["text"].strip() else None)
        number += len(lines)
