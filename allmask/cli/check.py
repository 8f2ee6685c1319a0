"""`allmask check`: look at a file of records before training on it."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument, Option

from allmask.cli import AsJson, Columns, Encoding, LabelNames, OnBadRecord, emit, plural, show_log
from allmask.cli._options import with_fields
from allmask.cli._program import program
from allmask.errors import DataError
from allmask.options import ClassifyOptions, FinetuneOptions, TitleOptions, another_default

if TYPE_CHECKING:
    from allmask.runs.checking import Pair, Report
    from allmask.tasks.task import Lengths

EXAMPLES = """
    allmask check mails.csv
    allmask check reviews.csv --task classify --eval dev.csv
    allmask check 标题.csv bert-base-chinese --encoding gb18030
    allmask check names.json allmask-en --task tag --columns tags=pos_tags --json
"""
BAR = 30  # characters


@dataclass(frozen=True)
class Limits:
    """Lengths as `finetune` has them; those that are not given are the task's own."""

    max_source: int | None = another_default(TitleOptions, "max_source", None, shown_default="the task's")
    max_target: int | None = another_default(TitleOptions, "max_target", None, shown_default="the task's")
    max_length: int | None = another_default(ClassifyOptions, "max_length", None, shown_default="the task's")


@with_fields(Limits, "max_source", "max_target", "max_length")
def command(
    data: Annotated[Path, Argument(metavar="DATA", help="Training records: jsonl, json, csv, tsv, xlsx, parquet, …")],
    model: Annotated[
        str | None,
        Argument(
            metavar="MODEL",
            help="The model to train; only its tokenizer is read.",
            show_default="allmask-en or allmask-zh, by the script of the texts",
        ),
    ] = None,
    task: Annotated[str, Option(help="What to learn: title, translate, classify, choose, tag, answer, …")] = "title",
    eval: Annotated[
        Path | None, Option(help="Held-out records.", metavar="FILE", show_default="see --held-out")
    ] = None,
    held_out: Annotated[
        float, Option(min=0, max=1, help="Share of the records held out, without --eval.")
    ] = FinetuneOptions.held_out,
    columns: Columns = None,
    encoding: Encoding = None,
    label_names: LabelNames = None,
    on_bad_record: OnBadRecord = "stop",
    as_json: AsJson = False,
    **limits: Any,
) -> int:
    """Read DATA as `finetune` would, without training: columns, labels, lengths in tokens, duplicates, texts that are
    both trained on and held out, what MODEL would cut, and the first ten problems with their lines.

    The exit code is 0 if it can be trained on, and 3 if a record cannot be used (unless --on-bad-record skip).
    """
    from allmask.data.columns import read_options
    from allmask.data.source import check_file
    from allmask.runs.options import run_of

    given = {name: value for name, value in limits.items() if value is not None}
    run_of("finetune", task).expect_own(given, "", given)  # refuses an unknown task, too
    file = read_options(data, columns, encoding, label_names)
    for path in filter(None, (data, eval)):
        check_file(path)
    if model is not None and not Path(model).expanduser().exists():
        from allmask.checkpoints import resolve

        resolve(model)
    from allmask.runs.checking import check

    show_log(quiet=True)
    report = check(task, file, eval and replace(file, path=eval), model, held_out, given)
    stops = bool(report.problems) and on_bad_record == "stop"
    options = {
        "data": data, "eval": eval, "held_out": None if held_out == FinetuneOptions.held_out else held_out,
        "columns": columns, "encoding": encoding, "label_names": label_names, **given,
        "on_bad_record": None if on_bad_record == "stop" else on_bad_record, "out": f"runs/{task}",
    }  # fmt: skip
    text = _text(report, stops, _training_command(task, model, options))
    emit(as_json, {"trainable": not stops, **report.to_dict()}, text)
    return DataError.exit_code if stops else 0


def _training_command(task: str, model: str | None, options: dict[str, Any]) -> str:
    """Return the command that trains on the file that was checked; options that are None are left out."""
    from allmask.runs.options import TASKS_OF

    # without a model, the first task of `train` begins with a new one
    verb = "train" if model is None and task == TASKS_OF["train"][0] else "finetune"
    words = [*program(), verb, *filter(None, [model]), *([] if task == TASKS_OF["finetune"][0] else ["--task", task])]
    for name, value in options.items():
        words += [] if value is None else [f"--{name.replace('_', '-')}", str(value)]
    return shlex.join(words)


def _text(report: Report, stops: bool, training: str) -> str:
    from allmask.runs.finetuning import UNKNOWN

    rows = [("records", f"{plural(report.records, 'record')} for {report.task}"), *_columns(report)]
    how = f" ({report.eval})" if report.eval else ", by a hash of the input" if report.held_out else ""
    rows.append(("split", f"{report.train:,} to learn from, {report.held_out:,} held out{how}"))
    if report.labels:
        rows.append(("labels", _listed([f"{name} ({count:,})" for name, count in report.labels.items()], 12)))
        rows += [("", f"{' and '.join(names)} differ only in capitals or spaces") for names in _alike(report.labels)]
    if report.numbers:
        rows.append(("labels", "numbers: " + ", ".join(f"{name} {value:g}" for name, value in report.numbers.items())))
    for one in report.lengths:
        rows += _lengths(one, report.model or "")
    if report.unknown > UNKNOWN:
        rows.append(("unknown", f"{report.unknown:.0%} of the tokens: {report.model} has no such words or characters"))
    if report.model is None:
        rows.append(("lengths", "name a MODEL to count tokens"))
    again = f", {report.contradictions:,} of them with another target" if report.contradictions else ""
    rows.append(("duplicates", f"{plural(report.duplicates, 'record')}{again}" if report.duplicates else "none"))
    rows += [("", _pair(pair)) for pair in report.duplicate_examples[:3]]
    if report.held_out:
        found = f"{report.leaked:,} of {report.held_out:,} held-out texts are also trained on, or nearly the same"
        rows.append(("leakage", found if report.leaked else "none"))
        rows += [("", _pair(pair)) for pair in report.leak_examples[:3]]
    total = sum(report.skipped.values())
    rows.append(("problems", f"{plural(total, 'record')} cannot be used" if total else "none"))
    lines = [f"{name:10}  {value}".rstrip() for name, value in rows]
    said = {""}  # a hint is printed once
    for problem in report.problems[:10]:
        hint = (problem.hint or "").removesuffix(", or pass --on-bad-record skip")
        lines += [f"  {problem.message}", *([f"    {hint}"] if hint not in said else [])]
        said.add(hint)
    if total > 10:
        reasons = ", ".join(f"{count:,} × {reason}" for reason, count in report.skipped.items())
        lines.append(f"  … and {total - 10:,} more; in all: {reasons}")
    if stops:
        return "\n".join([*lines, "", f"a run would stop at the first problem: {_remedy(report, total)}"])
    return "\n".join([*lines, "", f"it can be trained on: {training}"])


def _remedy(report: Report, total: int) -> str:
    """Advise an encoding if most problems come from it: skipping them would lose much of the file."""
    named = re.findall(r"--encoding (\w+)", " ".join(problem.hint or "" for problem in report.problems))
    if named and 2 * report.skipped.get("not UTF-8", 0) > total:
        return f"try --encoding {max(named, key=named.count)}"
    return "fix them, or pass --on-bad-record skip"


def _alike(labels: Iterable[str]) -> list[list[str]]:
    """Return groups of labels that may be one, written in different ways."""
    groups: dict[str, list[str]] = {}
    for label in labels:
        groups.setdefault("".join(label.split()).casefold(), []).append(label)
    return [names for names in groups.values() if len(names) > 1]


def _columns(report: Report) -> list[tuple[str, str]]:
    found = [message.removeprefix("columns: ") for message in report.columns]
    return [("columns" if number == 0 else "", message) for number, message in enumerate(found)]


def _lengths(one: Lengths, model: str) -> list[tuple[str, str]]:
    from statistics import median

    from allmask.runs.checking import histogram

    share = f"{one.too_long:,} of {len(one.tokens):,}"
    treated = "read in windows" if one.windows else "cut"
    what = f"{share} have more than {one.limit:,} and are {treated}" if one.too_long else f"none has over {one.limit:,}"
    spread = f"{min(one.tokens):,} to {max(one.tokens):,} tokens of {model}, median {median(one.tokens):,g}; {what}"
    bars = histogram(one.tokens)
    most = max(count for _, _, count in bars)
    lines = [
        f"{low:>6,}–{high:<6,} {'█' * round(BAR * count / most) or '▏' * bool(count):{BAR}} {count:,}".rstrip()
        for low, high, count in bars
    ]
    return [(one.name if len(one.name) <= 10 else "lengths", spread), *(("", line) for line in lines)]


def _pair(pair: Pair) -> str:
    alike = "the same as" if pair.alike == 1 else f"{pair.alike:.0%} the same as"
    return f"{pair.where}: {alike} {pair.other}"


def _listed(items: list[str], most: int) -> str:
    return ", ".join(items[:most]) + (f", … ({len(items)} in all)" if len(items) > most else "")
