"""`allmask evaluate`: score the predictions of a trained model on held-out records."""

from __future__ import annotations

import logging
import time
from collections import Counter
from pathlib import Path
from typing import Annotated, Any

from typer import Argument, Option

from allmask.cli import (
    AsJson,
    Columns,
    Device,
    Encoding,
    LabelNames,
    ModelName,
    OnBadRecord,
    Precision,
    Quiet,
    emit,
    note_skipped,
    show_log,
)
from allmask.cli._options import with_fields
from allmask.cli.generate import SEARCH, open_predictor
from allmask.files import sha256
from allmask.options import Decoding
from allmask.runs.options import usual_reading

log = logging.getLogger("allmask")
EXAMPLES = """
    allmask evaluate runs/title test.jsonl
    allmask evaluate runs/title test.jsonl --beams 4 --limit 200 --json
    allmask evaluate runs/zh test.csv --show 3
    allmask evaluate runs/de-en test.jsonl --beams 5
    allmask evaluate runs/reviews test.csv --show 5
    allmask evaluate runs/mails mails.csv --columns source=Body,target=Subject --encoding cp1252
    allmask evaluate runs/c3 test.jsonl --show 3
    allmask evaluate runs/names test.conll --show 3
    allmask evaluate runs/squad dev.json --json
    allmask evaluate runs/digits digits
"""


@with_fields(Decoding, *(name for name in SEARCH if name != "n_best"))
def command(
    model: ModelName,
    file: Annotated[
        Path,
        Argument(
            metavar="FILE", help="Inputs and targets: jsonl, json, csv, tsv, xlsx, parquet; or a data set of images."
        ),
    ],
    precision: Precision = "auto",
    device: Device = "auto",
    limit: Annotated[
        int | None,
        Option(
            min=1,
            help="Evaluate only N records: the first N texts, or N images of all classes.",
            metavar="N",
            show_default="all",
        ),
    ] = None,
    show: Annotated[
        int,
        Option(min=0, help="Also print N of the best and worst titles, or of the worst errors.", metavar="N"),
    ] = 0,
    columns: Columns = None,
    encoding: Encoding = None,
    label_names: LabelNames = None,
    on_bad_record: OnBadRecord = "stop",
    quiet: Quiet = False,
    as_json: AsJson = False,
    **search: Any,
) -> None:
    """Predict with MODEL for each record of FILE, and compare the predictions with the targets:

    \b
    title      ROUGE, BLEU, exact matches and length, next to those of the first sentence; Chinese by character
    translate  BLEU and chrF, with sacrebleu's signatures
    classify   accuracy, F1 and Matthews correlation, or Pearson and Spearman; a confusion matrix
    choose     accuracy, next to that of guessing
    tag        F1 of entities, counted as conlleval does
    answer     exact match and F1, counted as SQuAD does, or CMRC for Chinese
    image      the same as classify
    """
    from allmask.data.columns import read_options

    show_log(quiet)
    usual = usual_reading(model)
    source = read_options(
        file, columns, encoding, label_names or usual.label_names, usual=usual.columns, usual_encoding=usual.encoding
    )
    if usual.trained_on is not None and file.is_file() and sha256(file) == usual.trained_on:
        log.warning("%s: the model was trained on these records, so its scores say little about new ones", file)
    predictor, options = open_predictor(model, file, precision, device, search)
    skipped: Counter[str] = Counter()
    start = time.monotonic()
    records = predictor.read(source, on_bad_record, skipped, targets=True, limit=limit)
    found = predictor.evaluate(records, show, quiet, **options)
    note_skipped(skipped)
    result: dict[str, Any] = {"model": model, "file": str(file), f"{found.unit}s": found.count}
    result |= {} if found.cut is None else {"cut": found.cut}
    result |= {"seconds": round(time.monotonic() - start, 2), **found.values}
    emit(as_json, result, found.markdown())
