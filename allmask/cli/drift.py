"""`allmask drift`: test whether two files come from one distribution, and show how they differ."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from typer import Argument, Option

from allmask.cli import (
    AsJson,
    Device,
    Encoding,
    OnBadRecord,
    Precision,
    Quiet,
    emit,
    note,
    note_default,
    note_skipped,
    show_log,
    stdin_records,
    text_file,
)
from allmask.errors import DataError, UsageError
from allmask.terminal import shortened

if TYPE_CHECKING:
    from allmask.data import DataFile
    from allmask.drift import Verdict
    from allmask.drift.compare import Represent
    from allmask.drift.records import OnProgress, Pictures, Sample

EXAMPLES = """
    allmask drift last-month.txt today.txt
    allmask drift train.jsonl live.jsonl --field source --features ngrams --alpha 0.01
    tail -n 2000 requests.log | allmask drift train.txt - --features ngrams || echo "look at this"
    allmask drift reference.csv today.csv --columns age,income
    allmask drift may.csv june.csv --columns text=Body --encoding cp1252
    allmask drift vectors.npy other.npy --test permutation --json
    allmask drift photos-of-may/ photos-of-june/
"""
SHIFTED = 7  # the exit code, so that the command can guard a pipeline
MOST, MOST_ROWS = 2000, 5000  # records of each file: images and embedded texts; numbers and n-grams
_DEFAULT_MOST = f"{MOST} images or embedded texts, else {MOST_ROWS}"
WINDOW = 256  # texts between two updates of the progress bar


def command(
    first: Annotated[
        Path,
        Argument(
            metavar="A", help="txt, one text per line; jsonl, json, csv, tsv, xlsx, parquet; npy; a folder of images."
        ),
    ],
    second: Annotated[Path, Argument(metavar="B", help="Data of the same kind. A or B may be -, stdin.")],
    field: Annotated[
        str | None,
        Option(help="Column that holds the text; short for --columns text=NAME.", metavar="NAME"),
    ] = None,
    columns: Annotated[
        str | None,
        Option(
            help="Columns of numbers to compare: age,income; or that of the text: text=body.",
            metavar="COLUMN,…",
            show_default="the text, if there is one, else all",
        ),
    ] = None,
    encoding: Encoding = None,
    features: Annotated[
        Literal["embedding", "ngrams"] | None,
        Option(help="Compare texts by their vectors, or by their words (fast).", show_default="embedding"),
    ] = None,
    model: Annotated[
        str | None,
        Option(
            help="Model that computes the vectors of texts.",
            show_default="allmask-en or allmask-zh, by the script of the texts",
        ),
    ] = None,
    test: Annotated[
        Literal["binomial", "permutation"],
        Option(help="binomial: train on one half, test on the other; permutation: cross-validate, then relabel."),
    ] = "binomial",
    permutations: Annotated[
        int | None, Option(min=1, max=9999, help="permutation: number of relabellings.", show_default="999")
    ] = None,
    folds: Annotated[int | None, Option(min=2, max=20, help="permutation: number of folds.", show_default="5")] = None,
    alpha: Annotated[float, Option(help="Accepted rate of false alarms.")] = 0.05,
    most: Annotated[
        int | None,
        Option(min=1, help="Records to draw from each file, at most.", show_default=_DEFAULT_MOST),
    ] = None,
    repeats: Annotated[
        Literal["drop", "keep"] | None,
        Option(
            help="Drop or keep repeated records of a file.", show_default="drop texts and images, keep rows of numbers"
        ),
    ] = None,
    top: Annotated[int, Option(min=0, help="Words and examples to show for each file.")] = 5,
    seed: Annotated[int, Option(help="Random seed: of the records drawn, the halves and the folds.")] = 0,
    precision: Precision = "auto",
    device: Device = "auto",
    on_bad_record: OnBadRecord = "stop",
    quiet: Quiet = False,
    as_json: AsJson = False,
) -> int:
    """Test whether A and B come from one distribution.

    A small discriminator learns to tell records of A from records of B. If it classifies unseen records better than
    chance, something has shifted: the most telling differences are shown, and the exit code is 7. Otherwise it is 0.
    """
    show_log(quiet)
    named = columns if columns is not None and "=" in columns else None
    if field is not None and columns is not None:
        raise UsageError("--field names a text, so does --columns, or numbers", "leave one of them out")
    given = {name: value for name, value in (("permutations", permutations), ("folds", folds)) if value is not None}
    if given and test != "permutation":
        raise UsageError(f"--{' and --'.join(given)}: for the permutation test only", "add --test permutation")
    if not 0 < alpha <= 0.5:
        raise UsageError(f"--alpha is {alpha}; expected more than 0 and at most 0.5")
    chosen = None
    if columns is not None and named is None:
        chosen = [name.strip() for name in columns.split(",") if name.strip()]
    paths = (first, second)
    said: set[str] = set()
    files = [
        replace(text_file(path, *((None,) * 3 if str(path) == "-" else (field, named, encoding))), said=said)
        for path in paths
    ]
    kind = _kind(files, chosen)
    if kind != "texts" and (features is not None or model is not None or precision != "auto"):
        raise UsageError("--features, --model and --precision are for texts", f"leave them out: these are {kind}")
    if features == "ngrams" and (model is not None or precision != "auto"):
        raise UsageError("--model and --precision are for vectors", "leave them out, or use --features embedding")
    import numpy as np

    from allmask import drift
    from allmask.drift.records import same_columns

    settings = drift.Settings(alpha, test, repeats=repeats, seed=seed, shown=top, **given)
    represent = _embedder(model, precision, device, quiet) if features != "ngrams" else None
    limit = most or (MOST_ROWS if kind == "numbers" or features == "ngrams" else MOST)
    a, b = samples = [
        _read(kind, file, chosen, limit, f"{seed} {side}", on_bad_record, quiet) for side, file in enumerate(files)
    ]
    names = ("stdin" if str(first) == "-" else str(first), "stdin" if str(second) == "-" else str(second))
    on_progress = _progress("relabelled", quiet)
    if kind == "images":
        verdict = drift.compare_images(a, b, settings, names, on_progress)
    elif kind == "numbers":
        table = np.asarray(a.values)
        verdict = drift.compare_numbers(table, same_columns(a, b, paths), a.names, settings, names, on_progress)
    else:
        verdict = drift.compare_texts(list(a.values), list(b.values), represent, settings, names, on_progress)
    if not quiet:
        _note_counts(verdict, samples, names, kind)
    emit(as_json, _data(verdict, samples, names), _report(verdict, samples, names))
    return SHIFTED if verdict.shifted else 0


def _kind(files: Sequence[DataFile], columns: list[str] | None) -> str:
    """Return what both files hold: images, numbers or texts."""
    from allmask.data.source import check_file

    paths = [file.path for file in files]
    named = columns is not None or any(file.columns for file in files)
    if str(paths[0]) == str(paths[1]) == "-":
        raise UsageError("only one of the two can be -, stdin", "name a file")
    for path in paths:
        if str(path) != "-" and not path.exists():
            raise DataError(f"{path}: no such file or folder", "check the path")
        if path.is_file():
            check_file(path)
        if (path.is_dir() or path.suffix.lower() == ".npy") and named:
            what = "a folder of images has no fields" if path.is_dir() else "an array has no names"
            raise UsageError(f"{path}: {what}", "leave out --field and --columns")
    folders = [path for path in paths if path.is_dir()]
    if len(folders) == 2:
        return "images"
    if folders:
        other = paths[1] if folders[0] == paths[0] else paths[0]
        raise DataError(f"{folders[0]} is a folder, {other} is not", "compare two folders of images, or two files")
    tables = [file for file in files if _is_table(file, columns)]
    if len(tables) == 1:
        other = files[1] if tables[0] is files[0] else files[0]
        raise DataError(
            f"{tables[0]} is a table of numbers, {other} is not", "compare files of one kind; see --columns"
        )
    return "numbers" if tables else "texts"


def _is_table(file: DataFile, columns: list[str] | None) -> bool:
    """Whether a file holds numbers: an array, named columns, or a table in which nothing could be the text."""
    if file.path.suffix.lower() == ".npy" or columns is not None or file.columns:
        return not file.columns
    from allmask.data import MAX_LINE, Maybe, read_records
    from allmask.data.columns import fitting
    from allmask.data.formats import columns_of

    names = columns_of(file, MAX_LINE)
    aliases = fitting("text", names or [])
    if names is None or "text" in names or not aliases:
        return names is not None and "text" not in names
    first = next(read_records(file, {aliases[0]: Maybe(lambda value: value)}, "skip"))
    try:
        return float(first.fields[aliases[0]] or "") is not None
    except ValueError:
        return False


def _read(
    kind: str, file: DataFile, columns: list[str] | None, limit: int, seed: str, on_bad_record: str, quiet: bool
) -> Any:
    """Draw at most `limit` records of a file."""
    from allmask.drift.records import read_images, read_numbers, read_texts, sample_texts

    skipped: Counter[str] = Counter()
    if kind == "images":
        found = read_images(file.path, limit, seed, on_bad_record, skipped, _progress("read", quiet))
    elif kind == "numbers":
        if str(file) == "-":
            raise UsageError("stdin is read as texts, one per line", "name a file of numbers")
        found = read_numbers(file, columns, limit, seed, on_bad_record, skipped)
    elif str(file) == "-":
        found = sample_texts(stdin_records(), limit, seed)
    else:
        found = read_texts(file, limit, seed, on_bad_record, skipped)
    note_skipped(skipped)
    return found


def _embedder(model: str | None, precision: str, device: str, quiet: bool) -> Represent:
    """Return a function that embeds texts; it loads the model when it is called, after the files have been checked."""

    def represent(texts: list[str]):
        import numpy as np

        from allmask.tasks.embed import open_embedder
        from allmask.tasks.task import ModelFolder

        embedder = open_embedder(ModelFolder.open(model or note_default(texts), device), precision)
        on_progress, rows, done = _progress("embedded", quiet), [], 0
        for window in embedder.stream(texts, WINDOW):
            rows.append(window)
            done += len(window)
            on_progress(done, len(texts))
        return np.concatenate(rows)

    return represent


def _progress(word: str, quiet: bool) -> OnProgress:
    """Return a function that shows `done` of `total` as a progress bar, from its first call on."""
    from allmask.training.progress import Progress

    bars: list[Progress] = []

    def on_progress(done: int, total: int) -> None:
        if not bars:
            bars.append(Progress(total, word, quiet=quiet))
        bars[0].update(done)
        if done == total:
            bars[0].close()

    return on_progress


# ---- output --------------------------------------------------------------------------------------------------


def _note_counts(verdict: Verdict, samples: Sequence[Sample | Pictures], names: tuple[str, str], kind: str) -> None:
    totals = [sample.total for sample in samples]
    if totals != [verdict.each] * 2:
        note(f"compared {verdict.each:,} of each: {names[0]} has {totals[0]:,} records, {names[1]} {totals[1]:,}")
    if any(verdict.repeats):
        a, b = verdict.repeats
        note(f"dropped as repeated: {a:,} of {names[0]}, {b:,} of {names[1]} (--repeats keep counts them)")
    if verdict.shared:
        note(f"{verdict.shared:,} {kind} are in both files; they do not count for p")


def _data(verdict: Verdict, samples: Sequence[Sample | Pictures], names: tuple[str, str]) -> dict[str, Any]:
    settings = verdict.settings
    return {
        "shifted": verdict.shifted, "p": verdict.p, "alpha": settings.alpha, "test": settings.test,
        "accuracy": verdict.accuracy, "chance": 0.5, "right": verdict.right, "trials": verdict.trials,
        "files": list(names), "records": [sample.total for sample in samples], "compared_of_each": verdict.each,
        "shared": verdict.shared, "repeats_dropped": list(verdict.repeats), "seed": settings.seed,
        "differences": [
            {"name": one.name, "more_in": names[one.more_in], "measure": one.measure, "a": one.first, "b": one.second}
            | ({} if one.weight is None else {"weight": one.weight})
            for one in verdict.differences
        ],
        "examples": [
            {"of": names[one.side], "where": samples[one.side].where[one.number], "certainty": one.certainty,
             "text": one.text}
            for one in verdict.examples
        ],
    }  # fmt: skip


def _report(verdict: Verdict, samples: Sequence[Sample | Pictures], names: tuple[str, str]) -> str:
    settings = verdict.settings
    how = f"{settings.permutations} relabellings" if settings.test == "permutation" else "exact binomial"
    lines = [
        "shifted" if verdict.shifted else "no shift found",
        f"p         {verdict.p:.3g} ({how}; alpha {settings.alpha:g})",
        f"accuracy  {verdict.accuracy:.3f} on records it did not learn from; chance is 0.500",
        f"right     {verdict.right:,} of {verdict.trials:,}",
    ]
    for side in (0, 1):
        differences = [
            f"  A {one.first:6.1%}  B {one.second:6.1%}  {one.name}"
            if one.measure == "share"
            else f"  {one.measure} A {one.first:.4g}  B {one.second:.4g}  {one.name}"
            for one in verdict.differences
            if one.more_in == side
        ]
        typical = [
            f"  {one.certainty:5.3f}  {samples[side].where[one.number]}  {shortened(one.text, 90)}"
            for one in verdict.examples
            if one.side == side
        ]
        if differences or typical:
            lines += ["", f"{'AB'[side]}: {names[side]}", *differences, *typical]
    return "\n".join(lines)
