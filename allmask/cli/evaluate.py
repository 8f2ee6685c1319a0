"""`allmask evaluate`: titles for held-out records, scored beside the first sentence of each source."""

from __future__ import annotations

import time
from collections import Counter
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from allmask.cli import emit, listen, tell_skipped
from allmask.cli.generate import (
    BATCH,
    Beams,
    Folder,
    LengthPenalty,
    MaxNew,
    MinNew,
    NoRepeat,
    Precision,
    search_options,
)  # fmt: skip
from allmask.errors import UsageError

if TYPE_CHECKING:
    from allmask.data import Record
    from allmask.pipelines import Pipeline

EXAMPLES = """
    allmask evaluate runs/title/final test.jsonl
    allmask evaluate runs/title/final test.jsonl --beams 4 --limit 200 --json
    allmask evaluate runs/zh/final test.csv --show 3
"""
COLUMNS = {
    "rouge_1": "ROUGE-1", "rouge_2": "ROUGE-2", "rouge_l": "ROUGE-L",
    "bleu": "BLEU", "exact": "exact", "length": "length",
}  # fmt: skip


def command(
    model: Folder,
    file: Annotated[Path, typer.Argument(metavar="FILE", help="jsonl, csv or parquet with source and target.")],
    beams: Beams = 1,
    length_penalty: LengthPenalty = 1.0,
    no_repeat_ngram: NoRepeat = None,
    min_new: MinNew = 0,
    max_new: MaxNew = None,
    precision: Precision = "auto",
    limit: Annotated[int | None, typer.Option(min=1, help="Only the first N records.")] = None,
    show: Annotated[int, typer.Option(min=0, help="Print the N best and the N worst, by ROUGE-L.")] = 0,
    on_bad_record: Annotated[
        Literal["stop", "skip"], typer.Option(help="What to do with one that cannot be used.")
    ] = "stop",
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    """Write a title for each record of FILE and score it: ROUGE, BLEU, exact matches, length.

    The lead sentence beside it is what a title must beat. Chinese is scored by characters.
    """
    listen(quiet)
    from allmask.pipelines import open_pipeline
    from allmask.tasks.title import Title

    pipeline = open_pipeline(model, precision)
    if not isinstance(pipeline.task, Title):
        raise UsageError(f"{model}: continues prompts; only titles can be scored", "name a model fine-tuned for titles")
    options = search_options(beams, 1, length_penalty, no_repeat_ngram, min_new, max_new)
    pipeline.settings(**options)
    records = _read(file, on_bad_record, limit)
    began = time.monotonic()
    written = _write(pipeline, records, options, quiet)
    result: dict[str, Any] = {"model": model, "file": str(file), "records": len(records)}
    result |= {"seconds": round(time.monotonic() - began, 2), "scores": pipeline.task.score(written, records)}
    if show:
        result["examples"] = _extremes(records, written, show)
    emit(as_json, result, _in_words(result))


def _read(file: Path, on_bad_record: str, limit: int | None) -> list[Record]:
    from allmask.data import read_records
    from allmask.tasks.title import FIELDS

    skipped: Counter[str] = Counter()
    records = list(islice(read_records(file, FIELDS, on_bad_record, skipped), limit))
    tell_skipped(skipped)
    return records


def _write(pipeline: Pipeline, records: list[Record], options: dict[str, Any], quiet: bool) -> list[str]:
    from allmask.training.progress import Progress

    bar = Progress(len(records), "written", quiet=quiet)
    titles = []
    for found in pipeline.write([record.fields["source"] for record in records], BATCH, **options):
        titles.append(found[0][0])
        bar.update(len(titles))
    bar.close()
    return titles


def _extremes(records: list[Record], written: list[str], count: int) -> dict[str, list[dict[str, Any]]]:
    """The best and the worst by ROUGE-L, each with what was asked for."""
    from allmask.tasks.scores import is_chinese, rouge

    chinese = is_chinese([record.fields["target"] for record in records])
    rows = []
    for record, title in zip(records, written, strict=True):
        score = rouge([title], [record.fields["target"]], chinese)["rouge_l"]
        rows.append({"where": record.where, "rouge_l": score, "written": title, "reference": record.fields["target"]})
    rows.sort(key=lambda row: -row["rouge_l"])
    return {"best": rows[:count], "worst": rows[: -count - 1 : -1]}


def _in_words(result: dict[str, Any]) -> str:
    """A Markdown table: it reads well in a terminal and goes into a page as it is."""
    lines = [f"| {result['records']:,} records | " + " | ".join(COLUMNS.values()) + " |", "|---" * 7 + "|"]
    for name, scores in result["scores"].items():
        lines.append(f"| {name} | " + " | ".join(f"{scores[column]:.1f}" for column in COLUMNS) + " |")
    reference = result["scores"]["model"]["reference_length"]
    lines.append(f"| reference | {'| ' * 5}{reference:.1f} |")
    for name, rows in result.get("examples", {}).items():
        lines += ["", f"{name}:"]
        for row in rows:
            lines += [
                f"  {row['rouge_l']:5.1f}  {row['where']}",
                f"         {row['written']}",
                f"       = {row['reference']}",
            ]
    return "\n".join(lines)
