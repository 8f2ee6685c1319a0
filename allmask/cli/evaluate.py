"""`allmask evaluate`: the predictions of a trained model for held-out records, scored."""

from __future__ import annotations

import time
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from allmask.cli import emit, listen, tell_skipped
from allmask.cli.generate import (
    Beams,
    Folder,
    LengthPenalty,
    MaxNew,
    MinNew,
    NoRepeat,
    Precision,
    accepted,
    search_options,
)

if TYPE_CHECKING:
    from allmask.tasks.task import Predictor

EXAMPLES = """
    allmask evaluate runs/title/final test.jsonl
    allmask evaluate runs/title/final test.jsonl --beams 4 --limit 200 --json
    allmask evaluate runs/zh/final test.csv --show 3
    allmask evaluate runs/de-en test.jsonl --beams 5
    allmask evaluate runs/reviews test.csv --show 5
    allmask evaluate runs/c3 test.jsonl --show 3
    allmask evaluate runs/names test.conll --show 3
    allmask evaluate runs/squad dev.json --json
    allmask evaluate runs/digits digits
"""


def command(
    model: Folder,
    file: Annotated[
        Path, typer.Argument(metavar="FILE", help="jsonl, csv or parquet with the inputs and targets of the task.")
    ],
    beams: Beams = 1,
    length_penalty: LengthPenalty = 1.0,
    no_repeat_ngram: NoRepeat = None,
    min_new: MinNew = 0,
    max_new: MaxNew = None,
    precision: Precision = "auto",
    limit: Annotated[
        int | None, typer.Option(min=1, help="Only N records: the first; of images, from all over.")
    ] = None,
    show: Annotated[
        int, typer.Option(min=0, help="Print the N best and the N worst titles, or the N worst errors.")
    ] = 0,
    on_bad_record: Annotated[
        Literal["stop", "skip"], typer.Option(help="What to do with an unusable record.")
    ] = "stop",
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    """Predict with MODEL for each record of FILE and compare with the targets:

    \b
    title      ROUGE, BLEU, exact matches, length, beside the lead sentence; Chinese by characters
    translate  BLEU and chrF, with sacrebleu's signatures
    classify   accuracy, F1 and Matthews, or Pearson and Spearman; true against predicted labels
    choose     accuracy, beside that of guessing
    tag        F1 of entities, as conlleval counts
    answer     exact match and F1, as SQuAD's scorer, or CMRC's for Chinese
    image      as classify; FILE is a data set of images
    """
    listen(quiet)
    from allmask.tasks.task import ModelFolder

    predictor: Predictor = ModelFolder.open(model).predictor(precision=precision)
    options = accepted(predictor, search_options(beams, 1, length_penalty, no_repeat_ngram, min_new, max_new))
    skipped: Counter[str] = Counter()
    began = time.monotonic()
    found = predictor.evaluate(
        predictor.read(file, on_bad_record, skipped, targets=True, limit=limit), show, quiet, **options
    )
    tell_skipped(skipped)
    result: dict[str, Any] = {"model": model, "file": str(file), f"{found.unit}s": found.count}
    result |= {} if found.cut is None else {"cut": found.cut}
    result |= {"seconds": round(time.monotonic() - began, 2), **found.values}
    emit(as_json, result, found.markdown())
