"""`allmask evaluate`: titles, translations, labels or choices for held-out records, scored."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from allmask.cli import _images as images
from allmask.cli import emit, listen, many, tell_skipped
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
from allmask.cli.predict import LABELLED, expect_no_search
from allmask.errors import UsageError

if TYPE_CHECKING:
    from torch import Tensor

    from allmask.data import Record
    from allmask.pipelines import Pipeline
    from allmask.tasks.classifier import Classifier, Prediction
    from allmask.tasks.labelling import Label

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
WIDEST = 12  # labels, up to which the table says what each was taken for
COLUMNS = {
    "rouge_1": "ROUGE-1", "rouge_2": "ROUGE-2", "rouge_l": "ROUGE-L",
    "bleu": "BLEU", "chrf": "chrF", "exact": "exact", "length": "length",
}  # fmt: skip


def command(
    model: Folder,
    file: Annotated[
        Path,
        typer.Argument(
            metavar="FILE", help="jsonl, csv or parquet: source and target, text and label, or choices and label."
        ),
    ],
    beams: Beams = 1,
    length_penalty: LengthPenalty = 1.0,
    no_repeat_ngram: NoRepeat = None,
    min_new: MinNew = 0,
    max_new: MaxNew = None,
    precision: Precision = "auto",
    limit: Annotated[int | None, typer.Option(min=1, help="Only the first N records.")] = None,
    show: Annotated[
        int, typer.Option(min=0, help="Print the N best and the N worst titles, or the N worst errors.")
    ] = 0,
    on_bad_record: Annotated[
        Literal["stop", "skip"], typer.Option(help="What to do with one that cannot be used.")
    ] = "stop",
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    """Write a title for each record of FILE and score it: ROUGE, BLEU, exact matches, length.

    The lead sentence beside it is what a title must beat. Chinese is scored by characters.
    Of a translator: BLEU and chrF, with sacrebleu's signatures.
    Of a classifier: accuracy, F1 and Matthews, or Pearson and Spearman; what each label was taken for.
    Of a model that chooses: accuracy, beside that of guessing. Of a tagger: F1 of entities, as conlleval counts.
    Of one that answers: exact match and F1, as SQuAD's scorer, or CMRC's if it is Chinese.
    Of one that sees images FILE is a data set of images, and the scores are those of a classifier.
    """
    listen(quiet)
    from allmask.pipelines import is_chooser, is_classifier, open_answerer, open_pipeline, open_tagger, token_task
    from allmask.tasks.continuation import Continuation

    if images.reads(model):
        expect_no_search(search_options(beams, 1, length_penalty, no_repeat_ngram, min_new, max_new), "sees images")
        result = images.evaluated(model, file, precision, limit, show, on_bad_record)
        emit(as_json, result, images.in_words(result))
        return
    asked = token_task(model)
    if asked is not None:
        from allmask.tasks.evaluating import evaluated

        expect_no_search(search_options(beams, 1, length_penalty, no_repeat_ngram, min_new, max_new), f"{asked}s")
        worker = open_tagger(model, precision) if asked == "tag" else open_answerer(model, precision)
        skipped: Counter[str] = Counter()
        result = {"model": model, **evaluated(worker, file, limit, show, on_bad_record, skipped)}
        tell_skipped(skipped)
        emit(as_json, result, _tokens_in_words(result))
        return
    if is_chooser(model):
        expect_no_search(search_options(beams, 1, length_penalty, no_repeat_ngram, min_new, max_new), "chooses")
        result = _chosen(model, file, precision, limit, show, on_bad_record)
        emit(as_json, result, _choices_in_words(result))
        return
    if is_classifier(model):
        expect_no_search(search_options(beams, 1, length_penalty, no_repeat_ngram, min_new, max_new))
        result = _classified(model, file, precision, limit, show, on_bad_record)
        emit(as_json, result, _labels_in_words(result))
        return
    pipeline = open_pipeline(model, precision)
    if isinstance(pipeline.task, Continuation):
        raise UsageError(f"{model}: continues prompts; only titles and labels can be scored", "name a fine-tuned model")
    options = search_options(beams, 1, length_penalty, no_repeat_ngram, min_new, max_new)
    pipeline.settings(**options)
    records = _read(file, on_bad_record, limit)
    began = time.monotonic()
    written = _write(pipeline, records, options, quiet)
    result: dict[str, Any] = {"model": model, "file": str(file), "records": len(records), "cut": pipeline.cut}
    result |= {"seconds": round(time.monotonic() - began, 2), "scores": pipeline.task.score(written, records)}
    result |= _counted(pipeline, records)
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


def _counted(pipeline: Pipeline, records: list[Record]) -> dict[str, Any]:
    """How translations were scored: numbers of sacrebleu mean little without."""
    from allmask.tasks.scores import signatures
    from allmask.tasks.translate import Translate

    if not isinstance(pipeline.task, Translate):
        return {}
    return {"signatures": signatures([record.fields["target"] for record in records])}


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
    columns = {name: label for name, label in COLUMNS.items() if name in result["scores"]["model"]}
    lines = [f"| {many(result['records'], 'record')} | " + " | ".join(columns.values()) + " |"]
    lines += ["|---" * (1 + len(columns)) + "|"]
    for name, scores in result["scores"].items():
        lines.append(f"| {name} | " + " | ".join(f"{scores[column]:.1f}" for column in columns) + " |")
    reference = result["scores"]["model"]["reference_length"]
    lines.append(f"| reference | {'| ' * (len(columns) - 1)}{reference:.1f} |")
    lines += [f"{COLUMNS[name]}: {signature}" for name, signature in result.get("signatures", {}).items()]
    if result["cut"]:
        lines += ["", f"{many(result['cut'], 'text')} cut"]
    for name, rows in result.get("examples", {}).items():
        lines += ["", f"{name}:"]
        for row in rows:
            lines += [
                f"  {row['rouge_l']:5.1f}  {row['where']}",
                f"         {row['written']}",
                f"       = {row['reference']}",
            ]
    return "\n".join(lines)


# ---- labels --------------------------------------------------------------------------------------------------


def _classified(
    model: str, file: Path, precision: str, limit: int | None, show: int, on_bad_record: str
) -> dict[str, Any]:
    from allmask.pipelines import open_classifier
    from allmask.tasks.labelling import read_texts
    from allmask.tasks.marks import mistakes

    classifier = open_classifier(model, precision)
    skipped: Counter[str] = Counter()
    began = time.monotonic()
    records = read_texts(file, classifier.labels, classifier.task.pair, on_bad_record, skipped)
    seen = _Seen(classifier, [], [])
    worst = mistakes(seen.answered(islice(records, limit)), max(show, 1))[:show]
    tell_skipped(skipped)
    result: dict[str, Any] = {"model": model, "file": str(file), "records": len(seen.given), "cut": classifier.cut}
    result |= {"seconds": round(time.monotonic() - began, 2), **seen.marked()}
    return result | ({"errors": [one.to_dict() for one in worst]} if show else {})


@dataclass(frozen=True)
class _Seen:
    """What is remembered of records that were answered: a row of scores each, and what was right."""

    classifier: Classifier
    answers: list[Tensor]
    given: list[Label]

    def answered(self, records: Iterator[Record]) -> Iterator[tuple[Record, Label, Prediction]]:
        """Records with what is right and what is predicted, a window of them in memory."""
        from allmask.tasks.classifier import predictions
        from allmask.tasks.classify import text_of

        while window := list(islice(records, LABELLED)):
            self.answers.append(self.classifier.answers([text_of(record) for record in window]))
            for record, found in zip(window, predictions(self.classifier.labels, self.answers[-1]), strict=True):
                self.given.append(record.fields["label"])
                yield record, self.given[-1], found

    def marked(self) -> dict[str, Any]:
        import torch

        from allmask.tasks.labelling import golds
        from allmask.tasks.marks import mark

        labels = self.classifier.labels
        told = mark(labels, torch.cat(self.answers), golds(labels, self.given))
        tables = {"labels": told.labels, "confusion": told.confusion.tolist()}
        return {"scores": told.scores, **{name: table for name, table in tables.items() if table}}


def _labels_in_words(result: dict[str, Any]) -> str:
    """Markdown tables, as for titles."""
    scores = result["scores"]
    lines = [f"| {many(result['records'], 'record')} | " + " | ".join(name.replace("_", " ") for name in scores) + " |"]
    lines += ["|---" * (1 + len(scores)) + "|", "| model | " + " | ".join(map(_number, scores.values())) + " |"]
    if "labels" in result:
        lines += ["", *_label_table(result["labels"], result.get("confusion"))]
    if result["cut"]:
        lines += ["", f"{many(result['cut'], 'text')} cut"]
    for row in result.get("errors", ()):
        lines += ["", f"{row['where']}: is {_said(row['label'])}, taken for {_said(row['prediction'])}{_sure(row)}"]
        lines += [f"  {row[name]}" for name in ("text", "text_b") if name in row]
    return "\n".join(lines)


def _label_table(labels: dict[str, dict[str, float]], confusion: list[list[int]] | None) -> list[str]:
    """Of each label how well it is told, and what its texts were taken for."""
    taken = [f"→ {name}" for name in labels] if confusion and len(labels) <= WIDEST else []
    lines = ["| label | texts | precision | recall | F1 | " + "".join(f"{name} | " for name in taken)]
    lines = [lines[0].rstrip(), "|---" * (5 + len(taken)) + "|"]
    for number, (name, row) in enumerate(labels.items()):
        counts = [f"{count:,}" for count in confusion[number]] if confusion and taken else []
        cells = [name, f"{row['texts']:,}", *(_number(row[one]) for one in ("precision", "recall", "f1")), *counts]
        lines.append("| " + " | ".join(cells) + " |")
    return lines


# ---- choices -------------------------------------------------------------------------------------------------


def _chosen(model: str, file: Path, precision: str, limit: int | None, show: int, on_bad_record: str) -> dict[str, Any]:
    from allmask.pipelines import open_chooser
    from allmask.tasks.choosing import WINDOW, Tally, read_questions

    chooser = open_chooser(model, precision)
    skipped: Counter[str] = Counter()
    began = time.monotonic()
    records = islice(read_questions(file, True, on_bad_record, skipped), limit)
    tally = Tally(show)
    while window := list(islice(records, WINDOW)):
        for record, choice in zip(window, chooser.stream([record.fields for record in window]), strict=True):
            tally.add(record, choice)
    tell_skipped(skipped)
    result = {"model": model, "file": str(file), "records": tally.seen, "cut": chooser.cut}
    result |= {"seconds": round(time.monotonic() - began, 2), "scores": tally.scores}
    return result | ({"errors": tally.errors()} if show else {})


def _choices_in_words(result: dict[str, Any]) -> str:
    scores = result["scores"]
    lines = [f"| {many(result['records'], 'record')} | " + " | ".join(scores) + " |", "|---" * (1 + len(scores)) + "|"]
    lines += ["| model | " + " | ".join(map(_number, scores.values())) + " |"]
    if result["cut"]:
        lines += ["", f"{many(result['cut'], 'text')} cut"]
    for row in result.get("errors", ()):
        taken = f"taken for {row['choice']}{_sure(row)}"
        lines += ["", f"{row['where']}: is {row['choices'][row['label']]}, {taken}"]
        lines += [f"  {' '.join(row[name].split())}" for name in ("context", "question") if name in row]
    return "\n".join(lines)


# ---- tags and answers ----------------------------------------------------------------------------------------


def _tokens_in_words(result: dict[str, Any]) -> str:
    """Markdown tables, as for titles."""
    scores, records = result["scores"], many(result["records"], "record")
    digits = 1 if "scored_as" in result else 3
    lines = [f"| {records} | " + " | ".join(name.replace("_", " ") for name in scores) + " |"]
    lines += ["|---" * (1 + len(scores)) + "|"]
    lines += ["| model | " + " | ".join(f"{value:.{digits}f}" for value in scores.values()) + " |"]
    if "types" in result:
        lines += ["", "| type | there are | precision | recall | F1 |", "|---|---|---|---|---|"]
    for name, row in result.get("types", {}).items():
        lines += [f"| {name} | {row['texts']:,} | {row['precision']:.3f} | {row['recall']:.3f} | {row['f1']:.3f} |"]
    for row in result.get("errors", ()):
        lines += ["", *(_tag_lines(row) if "tokens" in row else _answer_lines(row))]
    return "\n".join(lines)


def _tag_lines(row: dict[str, Any]) -> list[str]:
    return [
        f"{row['where']}: {' '.join(row['tokens'])}",
        f"  is         {row['is']}",
        f"  taken for  {row['taken_for']}",
    ]


def _answer_lines(row: dict[str, Any]) -> list[str]:
    gold = " / ".join(row["gold"]) or "nothing"
    said = f"{row['answer'] or 'nothing'} ({row['score']:.0%})"
    return [f"{row['where']}: {row['question']}", f"  is         {gold}", f"  answered   {said}"]


# ---- words ---------------------------------------------------------------------------------------------------


def _number(value: float) -> str:
    return f"{value:.3f}"


def _said(label: Any) -> str:
    if isinstance(label, float):
        return f"{label:.3g}"
    return label if isinstance(label, str) else ", ".join(label) or "nothing"


def _sure(row: dict[str, Any]) -> str:
    return f" ({row['probability']:.0%})" if "probability" in row else ""
