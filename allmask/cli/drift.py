"""`allmask drift`: do two files come from one distribution? A discriminator tries to tell, and says by what."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from allmask.cli import emit, listen, note, ready_lines, tell_skipped
from allmask.cli.generate import Precision
from allmask.errors import DataError, UsageError

if TYPE_CHECKING:
    from allmask.drift import Difference, Pictures, Settings, Verdict
    from allmask.drift.compare import Represent
    from allmask.drift.records import OnProgress, Sample

    Seen = Sample | Pictures

EXAMPLES = """
    allmask drift last-month.txt today.txt
    allmask drift train.jsonl live.jsonl --field source --features ngrams --alpha 0.01
    tail -n 2000 requests.log | allmask drift train.txt - --features ngrams || echo "look at this"
    allmask drift reference.csv today.csv --columns age,income
    allmask drift vectors.npy other.npy --test permutation --json
    allmask drift photos-of-may/ photos-of-june/
"""
SHIFTED = 7  # the exit code, so that the command can guard a pipeline
EMBEDDED, OTHERS = 2000, 5000  # records of each file, at most; images as texts that are embedded
WINDOW = 256  # texts between two looks at the progress


def command(
    first: Annotated[
        Path, typer.Argument(metavar="A", help="txt, a line each; jsonl, csv, parquet; npy; a folder of images.")
    ],
    second: Annotated[Path, typer.Argument(metavar="B", help="The same kind. One of them may be -, stdin.")],
    field: Annotated[
        str | None, typer.Option(help="Which field of a record is the text. [default: text, where there is one]")
    ] = None,
    columns: Annotated[str | None, typer.Option(help="Compare these numbers, with commas between.")] = None,
    features: Annotated[
        Literal["embedding", "ngrams"] | None,
        typer.Option(help="What is seen of a text: its vector, or its words, fast. [default: embedding]"),
    ] = None,
    model: Annotated[str | None, typer.Option(help="The model that makes the vectors. [default: minilm]")] = None,
    test: Annotated[
        Literal["binomial", "permutation"],
        typer.Option(help="Learn from one half, guess the other; or guess all by folds, and relabel."),
    ] = "binomial",
    permutations: Annotated[
        int | None, typer.Option(min=1, max=9999, help="How often to relabel. [default: 999]")
    ] = None,
    folds: Annotated[int | None, typer.Option(min=2, max=20, help="Of the permutation test. [default: 5]")] = None,
    alpha: Annotated[float, typer.Option(help="How often a false alarm is all right.")] = 0.05,
    most: Annotated[
        int | None,
        typer.Option(
            min=1, help="Records of each file. [default: 2000 of images and of texts that are embedded, else 5000]"
        ),
    ] = None,
    repeats: Annotated[
        Literal["drop", "keep"] | None,
        typer.Option(help="Records said before in their file. [default: drop texts and images, keep rows of numbers]"),
    ] = None,
    top: Annotated[int, typer.Option(min=0, help="How many words and texts to show of each file.")] = 5,
    seed: Annotated[int, typer.Option(help="Draws the records, the halves and the folds.")] = 0,
    precision: Precision = "auto",
    on_bad_record: Annotated[
        Literal["stop", "skip"], typer.Option(help="What to do with one that cannot be used.")
    ] = "stop",
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress and no remarks.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> int:
    """Say whether A and B come from one distribution.

    A small discriminator learns to tell records of A from records of B. If it guesses unseen ones better than chance,
    something has shifted; then what gives it away is shown, and the exit code is 7. It is 0 where no shift was found.
    """
    listen(quiet)
    if field is not None and columns is not None:
        raise UsageError("--field names a text, --columns numbers", "leave one of them out")
    if str(first) == str(second) == "-":
        raise UsageError("only one of the two can be -, stdin", "name a file")
    from allmask.drift import Settings

    given = {name: value for name, value in (("permutations", permutations), ("folds", folds)) if value is not None}
    if given and test != "permutation":
        raise UsageError(f"--{' and --'.join(given)}: of the permutation test", "ask for it: --test permutation")
    settings = Settings(alpha, test, repeats=repeats, seed=seed, shown=top, **given)
    chosen = [name.strip() for name in columns.split(",") if name.strip()] if columns is not None else None
    source = _Source((first, second), field, chosen, on_bad_record, quiet)
    if source.has_images():
        _expect_texts("images", features, model, precision)
        verdict, samples = _images(source, settings, most or EMBEDDED)
    elif source.has_numbers():
        _expect_texts("numbers", features, model, precision)
        verdict, samples = _numbers(source, settings, most or OTHERS)
    else:
        if features == "ngrams" and (model is not None or precision != "auto"):
            raise UsageError("--model and --precision are of vectors", "leave them out, or --features embedding")
        represent = None if features == "ngrams" else _embedder(model or "minilm", precision, quiet)
        verdict, samples = _texts(source, settings, most or (EMBEDDED if represent else OTHERS), represent)
    if not quiet:
        _remark(verdict, samples, source.called, "images" if source.has_images() else "texts")
    emit(as_json, _data(verdict, samples, source.called), _report(verdict, samples, source.called))
    return SHIFTED if verdict.shifted else 0


def _expect_texts(what: str, features: str | None, model: str | None, precision: str) -> None:
    if features is not None or model is not None or precision != "auto":
        raise UsageError("--features, --model and --precision are for texts", f"leave them out: these are {what}")


def _name(path: Path) -> str:
    return "stdin" if str(path) == "-" else str(path)


class _Source:
    """The two files, and whether they hold texts or numbers."""

    def __init__(
        self, paths: tuple[Path, Path], field: str | None, columns: list[str] | None, on_bad_record: str, quiet: bool
    ):
        self.paths, self.field, self.columns = paths, field, columns
        self.on_bad_record, self.quiet = on_bad_record, quiet
        self.called = (_name(paths[0]), _name(paths[1]))

    def has_images(self) -> bool:
        kinds = [path.is_dir() for path in self.paths]
        if kinds[0] != kinds[1]:
            other = self.paths[1 if kinds[0] else 0]
            if str(other) != "-" and not other.exists():
                raise DataError(f"{other}: no such file or folder", "check the path")
            folder, file = self.called if kinds[0] else self.called[::-1]
            raise DataError(f"{folder} is a folder, {file} is not", "compare two folders of images, or two files")
        if kinds[0] and (self.field is not None or self.columns is not None):
            raise UsageError(f"{self.called[0]}: a folder of images has no fields", "leave out --field and --columns")
        return kinds[0]

    def has_numbers(self) -> bool:
        kinds = [self._is_table(path) for path in self.paths]
        if kinds[0] != kinds[1]:
            table, texts = self.called if kinds[0] else self.called[::-1]
            raise DataError(f"{table} is a table of numbers, {texts} is not", "compare files of one kind; see --field")
        return kinds[0]

    def _is_table(self, path: Path) -> bool:
        from allmask.drift.records import columns_of

        if path.suffix.lower() == ".npy":
            if self.field is not None or self.columns is not None:
                raise UsageError(f"{path}: an array has no names", "leave out --field and --columns")
            return True
        if self.columns is not None or self.field is not None:
            return self.field is None
        names = columns_of(path)
        return names is not None and "text" not in names

    def texts(self, side: int, most: int, seed: int) -> Sample:
        from allmask.drift.records import read_texts, sample_texts

        field, path, skipped = self.field or "text", self.paths[side], Counter()
        if str(path) == "-":
            return sample_texts(_lines(field), field, most, f"{seed} {side}")
        found = read_texts(path, field, most, f"{seed} {side}", self.on_bad_record, skipped)
        tell_skipped(skipped)
        return found

    def numbers(self, side: int, most: int, seed: int) -> Sample:
        from allmask.drift.records import read_numbers

        skipped: Counter[str] = Counter()
        path = self.paths[side]
        if str(path) == "-":
            raise UsageError("stdin is read as texts, a line each", "name a file of numbers")
        found = read_numbers(path, self.columns, most, f"{seed} {side}", self.on_bad_record, skipped)
        tell_skipped(skipped)
        return found

    def images(self, side: int, most: int, seed: int) -> Pictures:
        from allmask.drift import read_images
        from allmask.training.progress import Progress

        skipped: Counter[str] = Counter()
        bar: list[Progress] = []

        def told(done: int, total: int) -> None:
            if not bar:
                bar.append(Progress(total, "read", quiet=self.quiet))
            bar[0].update(done)

        found = read_images(self.paths[side], most, f"{seed} {side}", self.on_bad_record, skipped, told)
        bar[0].close()
        tell_skipped(skipped)
        return found


def _lines(field: str):
    from allmask.data import Record

    number = 0
    for lines in ready_lines():
        for line in lines:
            number += 1
            if line.strip():
                yield Record({field: line}, f"stdin:{number}")


def _texts(source: _Source, settings: Settings, most: int, represent: Represent | None) -> tuple[Verdict, list[Sample]]:
    from allmask.drift import compare_texts

    samples = [source.texts(side, most, settings.seed) for side in (0, 1)]
    first, second = (list(sample.values) for sample in samples)
    told = _relabelling(settings, source.quiet)
    return compare_texts(first, second, represent, settings, source.called, told), samples


def _numbers(source: _Source, settings: Settings, most: int) -> tuple[Verdict, list[Sample]]:
    import numpy as np

    from allmask.drift import compare_numbers
    from allmask.drift.records import same_columns

    samples = [source.numbers(side, most, settings.seed) for side in (0, 1)]
    second = same_columns(samples[0], samples[1], source.paths)
    told = _relabelling(settings, source.quiet)
    first = np.asarray(samples[0].values)
    return compare_numbers(first, second, samples[0].names, settings, source.called, told), samples


def _images(source: _Source, settings: Settings, most: int) -> tuple[Verdict, list[Pictures]]:
    from allmask.drift import compare_images

    first, second = (source.images(side, most, settings.seed) for side in (0, 1))
    told = _relabelling(settings, source.quiet)
    return compare_images(first, second, settings, source.called, told), [first, second]


def _embedder(model: str, precision: str, quiet: bool) -> Represent:
    """Opened when texts are there to embed: what is wrong with files is said before a model is loaded."""

    def represent(texts: list[str]):
        import numpy as np

        from allmask.checkpoints import resolve
        from allmask.tasks.embed import Embedder
        from allmask.training.progress import Progress

        embedder = Embedder.open(resolve(model), precision=precision)
        bar, rows, done = Progress(len(texts), "embedded", quiet=quiet), [], 0
        for window in embedder.stream(texts, WINDOW):
            rows.append(window)
            done += len(window)
            bar.update(done)
        bar.close()
        return np.concatenate(rows)

    return represent


def _relabelling(settings: Settings, quiet: bool) -> OnProgress | None:
    if settings.test != "permutation":
        return None
    from allmask.training.progress import Progress

    bar = Progress(settings.folds * (1 + settings.permutations), "relabelled", quiet=quiet)

    def told(done: int, total: int) -> None:
        bar.update(done)
        if done == total:
            bar.close()

    return told


# ---- what is said --------------------------------------------------------------------------------------------


def _remark(verdict: Verdict, samples: Sequence[Seen], called: tuple[str, str], what: str) -> None:
    totals = [sample.total for sample in samples]
    if totals != [verdict.each] * 2:
        note(f"compared {verdict.each:,} of each: {called[0]} has {totals[0]:,} records, {called[1]} {totals[1]:,}")
    if any(verdict.repeats):
        a, b = verdict.repeats
        note(f"left out as repeated: {a:,} of {called[0]}, {b:,} of {called[1]} (--repeats keep counts them)")
    if verdict.shared:
        note(f"{verdict.shared:,} {what} stand in both files; they do not count for p")


def _data(verdict: Verdict, samples: Sequence[Seen], called: tuple[str, str]) -> dict[str, Any]:
    settings = verdict.settings
    return {
        "shifted": verdict.shifted, "p": verdict.p, "alpha": settings.alpha, "test": settings.test,
        "accuracy": verdict.accuracy, "chance": 0.5, "right": verdict.right, "trials": verdict.trials,
        "files": list(called), "records": [sample.total for sample in samples], "compared_of_each": verdict.each,
        "shared": verdict.shared, "repeats_dropped": list(verdict.repeats), "seed": settings.seed,
        "differences": [
            {"name": one.name, "more_in": called[one.more_in], "measure": one.measure, "a": one.first, "b": one.second}
            | ({} if one.weight is None else {"weight": one.weight})
            for one in verdict.differences
        ],
        "examples": [
            {"of": called[one.side], "where": samples[one.side].where[one.number], "certainty": one.certainty,
             "text": one.text}
            for one in verdict.examples
        ],
    }  # fmt: skip


def _report(verdict: Verdict, samples: Sequence[Seen], called: tuple[str, str]) -> str:
    settings = verdict.settings
    how = f"{settings.permutations} relabellings" if settings.test == "permutation" else "exact binomial"
    lines = [
        f"{'shifted' if verdict.shifted else 'no shift found'}",
        f"p         {verdict.p:.3g} ({how}; alpha {settings.alpha:g})",
        f"accuracy  {verdict.accuracy:.3f} on records it did not learn from; chance is 0.500",
        f"right     {verdict.right:,} of {verdict.trials:,}",
    ]
    for side in (0, 1):
        lines += _side(verdict, samples, called, side)
    return "\n".join(lines)


def _side(verdict: Verdict, samples: Sequence[Seen], called: tuple[str, str], side: int) -> list[str]:
    found = [one for one in verdict.differences if one.more_in == side]
    sure = [one for one in verdict.examples if one.side == side]
    if not found and not sure:
        return []
    lines = ["", f"{'AB'[side]}: {called[side]}"]
    lines += [f"  {_figures(one)}  {one.name}" for one in found]
    for one in sure:
        words = " ".join(one.text.split())
        where = samples[side].where[one.number]
        lines.append(f"  {one.certainty:5.3f}  {where}  {words if len(words) <= 90 else words[:89] + '…'}")
    return lines


def _figures(one: Difference) -> str:
    if one.measure == "share":
        return f"A {one.first:6.1%}  B {one.second:6.1%}"
    return f"{one.measure} A {one.first:.4g}  B {one.second:.4g}"
