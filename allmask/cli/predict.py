"""`allmask predict`: a title, a label or a choice for each record of a file, in its order, into another file."""

from __future__ import annotations

import ctypes
import json
import os
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import count, islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from allmask.cli import _images as images
from allmask.cli import listen, many, note, ready_lines, tell_cut, tell_skipped
from allmask.cli.generate import (
    Beams,
    Folder,
    LengthPenalty,
    MaxNew,
    MinNew,
    NBest,
    NoRepeat,
    Precision,
    search_options,
)
from allmask.errors import ResourceError, UsageError

if TYPE_CHECKING:
    from allmask.data import Record
    from allmask.pipelines import Pipeline
    from allmask.tasks.answerer import Answerer
    from allmask.tasks.choosing import Chooser
    from allmask.tasks.classifier import Classifier
    from allmask.tasks.tagger import Tagger

EXAMPLES = """
    allmask predict runs/title/final articles.jsonl -o titles.jsonl
    allmask predict runs/title/final articles.parquet -o titles.jsonl --beams 4 --keep url,date
    allmask predict runs/title/final articles.csv -o - | jq -r .prediction
    allmask predict runs/de-en german.jsonl -o english.jsonl --beams 5
    allmask predict runs/reviews new.csv -o labels.jsonl
    allmask predict runs/reviews - -o - < lines.txt
    allmask predict runs/c3 questions.jsonl -o choices.jsonl
    allmask predict runs/names texts.jsonl -o tags.jsonl
    allmask predict runs/squad questions.json -o answers.jsonl --n-best 3
    allmask predict runs/photos new-photos/ -o classes.jsonl
"""
WINDOW, BATCH = 256, 32  # records in memory, sorted by length; texts written at a time
LABELLED = 1024  # records in memory where they are classified
TIDY = 16_384  # lines between two looks at memory
Put = Callable[[str], None]


def command(
    model: Folder,
    file: Annotated[
        Path,
        typer.Argument(metavar="FILE", help="jsonl, csv, parquet with source, text or choices; or txt, a line each."),
    ],
    out: Annotated[str, typer.Option("--out", "-o", help="The jsonl file to write, - for stdout.")],
    beams: Beams = 1,
    n_best: NBest = 1,
    length_penalty: LengthPenalty = 1.0,
    no_repeat_ngram: NoRepeat = None,
    min_new: MinNew = 0,
    max_new: MaxNew = None,
    precision: Precision = "auto",
    keep: Annotated[
        str, typer.Option(help="Other fields to copy, with commas between. id, target and label always are.")
    ] = "",
    on_bad_record: Annotated[
        Literal["stop", "skip"], typer.Option(help="What to do with one that cannot be used.")
    ] = "stop",
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress.")] = False,
) -> None:
    """Write a JSON line for each record of FILE: its fields, "prediction" and "score" (with --n-best, "predictions"),
    or of a classifier "prediction", "probability" and "probabilities"; a classifier reads a text a line from - as well.
    Of a model that chooses "prediction" is the number of a choice, and "choice" its text. Of a tagger "prediction" are
    tags, "entities" what they mark; one that answers gives "answer", "start", "end" and "score" (with --n-best,
    "answers"). Of one that sees images FILE is an image or a folder of images.

    The file appears when it is complete; one of that name is replaced.
    """
    listen(quiet)
    _check_out(out, file)
    from allmask.pipelines import is_chooser, is_classifier, open_chooser, open_classifier, token_task

    options = search_options(beams, n_best, length_penalty, no_repeat_ngram, min_new, max_new)
    keep_fields = [name for name in (word.strip() for word in keep.split(",")) if name]
    if images.reads(model):
        expect_no_search(options, "sees images")
        with _output(out) as put:
            images.predict(model, file, precision, keep_fields, on_bad_record, put, quiet)
        return
    asked = token_task(model)
    if asked is not None:
        expect_no_search(options | {"n_best": 1 if asked == "answer" else n_best}, f"{asked}s")
        _ask_tokens(asked, model, file, out, precision, n_best, on_bad_record, keep_fields, quiet)
        return
    if is_chooser(model):
        expect_no_search(options, "chooses")
        _expect_file(file, "chooses")
        chooser = open_chooser(model, precision)
        _run(_choosing(chooser, file, on_bad_record, keep_fields), out, quiet)
        tell_cut(chooser.cut, chooser.task.max_length)
        return
    if not is_classifier(model):
        _expect_file(file)
        _run(_writing(model, precision, options, file, on_bad_record, keep_fields), out, quiet)
        return
    expect_no_search(options)
    classifier = open_classifier(model, precision)
    if str(file) == "-":
        _label_lines(classifier, out)
    else:
        _run(_labelling(classifier, file, on_bad_record, keep_fields), out, quiet)
    tell_cut(classifier.cut, classifier.task.max_length)


@dataclass(frozen=True)
class _Job:
    """What is done for a window of records at a time."""

    read: Callable[[Counter[str]], Iterator[Record]]
    open: Callable[[], Callable[[list[Record]], list[dict[str, Any]]]]  # makes what answers, once the file was checked
    window: int
    done: str  # to the records, in a word
    hidden: tuple[str, ...] = ()  # fields that are read and not written
    after: Callable[[], None] = lambda: None  # what is told in the end


def _run(job: _Job, out: str, quiet: bool) -> None:
    skipped: Counter[str] = Counter()
    total = sum(1 for _ in job.read(skipped))  # all records are checked before the first is written
    tell_skipped(skipped)
    answer = job.open()
    with _output(out) as put:
        _predict(job, answer, put, total, quiet)
    if not quiet and out != "-":
        note(f"{out}: {many(total, 'record')}")
    job.after()


def _check_out(out: str, file: Path) -> None:
    if out == "-":
        return
    path = Path(out)
    if path.is_dir():
        raise UsageError(f"{out}: is a folder", "name a file for --out")
    if path.exists() and file.exists() and path.samefile(file):
        raise UsageError(f"{out}: is the input itself", "name another file for --out")
    if not path.absolute().parent.is_dir() or not os.access(path.absolute().parent, os.W_OK):
        raise ResourceError(f"{out}: cannot write in {path.absolute().parent}", "choose another --out")


@contextmanager
def _output(out: str) -> Iterator[Put]:
    """Something that takes lines; now and then, what was freed goes back to the system, however long the file."""
    written = count(1)
    with _opened(out) as put:

        def put_and_tidy(line: str) -> None:
            put(line)
            if next(written) % TIDY == 0:
                _give_back_memory()

        yield put_and_tidy


def _give_back_memory() -> None:
    """The C library keeps what is free between parts in use, and the parts scatter; glibc can be asked for it."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


@contextmanager
def _opened(out: str) -> Iterator[Put]:
    """Stdout, or a file that gets its name when it is complete."""
    if out == "-":
        yield lambda line: print(line, flush=True)
        return
    path = Path(out).resolve()  # through a link, to what it names
    if path.exists() and not path.is_file():  # a pipe or a device is written to, never replaced
        with path.open("w", encoding="utf-8") as stream:
            yield lambda line: print(line, file=stream)
        return
    beside = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        with beside.open("w", encoding="utf-8") as stream:
            yield lambda line: print(line, file=stream)
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(beside, path)
    finally:
        beside.unlink(missing_ok=True)


def _predict(
    job: _Job, answer: Callable[[list[Record]], list[dict[str, Any]]], put: Put, total: int, quiet: bool
) -> None:
    from allmask.training.progress import Progress

    bar = Progress(total, job.done, quiet=quiet)
    done, records = 0, job.read(Counter())
    while window := list(islice(records, job.window)):
        for record, told in zip(window, answer(window), strict=True):
            put(_line(record, told, job.hidden))
        done += len(window)
        bar.update(done)
    bar.close()


def _line(record: Record, told: dict[str, Any], hidden: tuple[str, ...]) -> str:
    fields = {name: value for name, value in record.fields.items() if value is not None and name not in hidden}
    return json.dumps({**fields, **told}, ensure_ascii=False, default=str)  # a date out of a parquet file as text


# ---- titles --------------------------------------------------------------------------------------------------


def _expect_file(file: Path, does: str = "writes") -> None:
    if str(file) == "-" and does != "writes":
        raise UsageError(f"this model {does}; a line of stdin is one text", "name a file")
    if str(file) == "-":
        raise UsageError("this model writes; from stdin that is allmask generate", "name a file, or use generate")


def _writing(
    model: str, precision: str, options: dict[str, Any], file: Path, on_bad_record: str, keep: list[str]
) -> _Job:
    from allmask.data import Maybe, read_records, text

    others = [name for name in ("id", "target", *keep) if name != "source"]
    fields = {"source": text, **{name: Maybe(lambda value: value) for name in others}}

    opened: list[Pipeline] = []

    def open_writer() -> Callable[[list[Record]], list[dict[str, Any]]]:
        from allmask.pipelines import open_pipeline

        pipeline = open_pipeline(model, precision, options.get("max_new"))
        pipeline.settings(**options)
        opened.append(pipeline)
        return lambda window: _write_sorted(pipeline, window, options)

    def after() -> None:
        tell_cut(opened[0].cut, opened[0].task.max_source)

    read = partial(read_records, file, fields, on_bad_record)
    return _Job(read, open_writer, WINDOW, "written", after=after)


def _write_sorted(pipeline: Pipeline, window: list[Record], options: dict[str, Any]) -> list[dict[str, Any]]:
    """The records' texts in their own order, written in an order in which neighbours are about as long."""
    sources = [record.fields["source"] for record in window]
    order = sorted(range(len(sources)), key=lambda number: len(sources[number]))
    found = dict(zip(order, pipeline.write([sources[number] for number in order], BATCH, **options), strict=True))
    best = [[{"prediction": text, "score": one.score} for text, one in found[number]] for number in range(len(sources))]
    return [{"predictions": entry} if options["n_best"] > 1 else entry[0] for entry in best]


# ---- labels --------------------------------------------------------------------------------------------------


def expect_no_search(options: dict[str, Any], does: str = "classifies") -> None:
    usual = search_options(1, 1, 1.0, None, 0, None)
    given = sorted(name for name, value in options.items() if usual.get(name) != value)
    if given:
        flags = ", ".join(f"--{name.replace('_', '-')}" for name in given)
        raise UsageError(f"{flags}: this model {does}, it does not write", "leave it out")


def _labelling(classifier: Classifier, file: Path, on_bad_record: str, keep: list[str]) -> _Job:
    from allmask.tasks.classify import text_of
    from allmask.tasks.labelling import read_texts

    others = ("id", "label", *keep)

    def label(window: list[Record]) -> list[dict[str, Any]]:
        return [one.to_dict() for one in classifier.stream([text_of(record) for record in window], len(window))]

    def read(skipped: Counter[str]) -> Iterator[Record]:
        return read_texts(file, None, classifier.task.pair, on_bad_record, skipped, others)

    return _Job(read, lambda: label, LABELLED, "classified")


def _label_lines(classifier: Classifier, out: str) -> None:
    """Each line of stdin is a text, and answered as soon as it is there; a blank one gives a blank one."""
    if classifier.task.pair:
        raise UsageError("this model compares two texts; a line is one", "name a file with text and text_b")
    with _output(out) as put:
        for lines in ready_lines():
            found = classifier.stream([line for line in lines if line.strip()])
            for line in lines:
                told = {"text": line, **next(found).to_dict()} if line.strip() else None
                put("" if told is None else json.dumps(told, ensure_ascii=False))


# ---- tags and answers ----------------------------------------------------------------------------------------


def _ask_tokens(
    asked: str, model: str, file: Path, out: str, precision: str, n_best: int, on_bad_record: str, keep: list[str],
    quiet: bool,
) -> None:  # fmt: skip
    from allmask.pipelines import open_answerer, open_tagger

    if asked == "answer":
        _run(_answering(open_answerer(model, precision), file, on_bad_record, keep, n_best), out, quiet)
    elif str(file) == "-":
        with _output(out) as put:
            _tag_lines(open_tagger(model, precision), put)
    else:
        _run(_tagging(open_tagger(model, precision), file, on_bad_record, keep), out, quiet)


def _tagging(tagger: Tagger, file: Path, on_bad_record: str, keep: list[str]) -> _Job:
    from allmask.tasks.tagger import WINDOW, read_sentences, sentence_of

    def read(skipped: Counter[str]) -> Iterator[Record]:
        return read_sentences(file, on_bad_record, skipped, ("id", "tags", *keep))

    def tag(window: list[Record]) -> list[dict[str, Any]]:
        return [one.to_dict() for one in tagger.stream([sentence_of(record) for record in window], len(window))]

    return _Job(read, lambda: tag, WINDOW, "tagged")


def _tag_lines(tagger: Tagger, put: Put) -> None:
    """Each line of stdin is a text, and answered as soon as it is there; a blank one gives a blank one."""
    for lines in ready_lines():
        found = tagger.stream([line for line in lines if line.strip()])
        for line in lines:
            told = {"text": line, **next(found).to_dict()} if line.strip() else None
            put("" if told is None else json.dumps(told, ensure_ascii=False))


def _answering(answerer: Answerer, file: Path, on_bad_record: str, keep: list[str], n_best: int) -> _Job:
    from allmask.tasks.answer import asked_of
    from allmask.tasks.answerer import WINDOW
    from allmask.tasks.questions import read_questions

    if str(file) == "-":
        raise UsageError("this model answers questions about contexts; a line of stdin is one text", "name a file")

    def read(skipped: Counter[str]) -> Iterator[Record]:
        return read_questions(file, False, on_bad_record, skipped, keep)

    def answer(window: list[Record]) -> list[dict[str, Any]]:
        told = []
        for found in answerer.stream([asked_of(record) for record in window], len(window)):
            best = [one.to_dict() for one in found.best[:n_best]]
            told.append({"answers": best} if n_best > 1 else best[0])
        return told

    hidden = () if "context" in keep else ("context",)  # a long text, the same of many questions
    return _Job(read, lambda: answer, WINDOW, "answered", hidden)


# ---- choices -------------------------------------------------------------------------------------------------


def _choosing(chooser: Chooser, file: Path, on_bad_record: str, keep: list[str]) -> _Job:
    from allmask.tasks.choosing import read_questions

    def choose(window: list[Record]) -> list[dict[str, Any]]:
        return [one.to_dict() for one in chooser.stream([record.fields for record in window], len(window))]

    def read(skipped: Counter[str]) -> Iterator[Record]:
        return read_questions(file, False, on_bad_record, skipped, ("id", *keep))

    return _Job(read, lambda: choose, WINDOW, "answered")
