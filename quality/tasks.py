"""How good are fine-tuned models? allmask with all its defaults against transformers' own heads on the same body.

    python quality/tasks.py DATA --chinese bge-small-zh/ --out quality-runs/tasks
    python quality/tasks.py DATA --only sst2,mrpc --seeds 3 --limit 500

DATA holds folders with train, dev and test files: sst2, mrpc, wnut17 (MiniLM) and chnsenticorp, ocnli, cluener,
cmrc2018, c3 (the body of --chinese); missing ones are skipped. Both sides train on the same token rows in the same
batches for the same number of epochs, with the same seeds, keep the best of ten evaluations on dev, and are scored on
test by the same function. The learning rate of transformers is ours or, for classifiers, its usual one if that is
better on dev with the first seed. Minutes are CPU time of all threads, evaluations included.

Without a test file, dev is the test set; without a dev file, the end of train is. Finished runs are in results.jsonl
and are not repeated, so the command can be stopped at any time, and several can work on one folder, each with its own
--only.
"""

from __future__ import annotations

import argparse
import json
import logging
import random
import re
import shutil
import statistics
import sys
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import common
import sheets
from peers import peer_logits, tune

import allmask
from allmask.checkpoints import resolve
from allmask.data import Bad, Record
from allmask.errors import AllmaskError
from allmask.files import write_atomically
from allmask.runs.driver import start
from allmask.runs.finetuning import FineTuning
from allmask.runs.plan import Plan
from allmask.tasks.answer import learnable, read_questions

T = TypeVar("T")
USUAL_RATE = 5e-5  # transformers' default; tried for classifiers only, as it was far behind elsewhere
_SENTENCE_ENDS = re.compile(r"[。！？；.!?;]+[”」』\s]*")
OURS, PEER = "allmask", "transformers"


@dataclass(frozen=True)
class DataSet:
    """A task, its language, and how many records are used: the whole table takes about 100 minutes on two cores."""

    task: str
    chinese: bool
    train: int
    dev: int
    test: int
    seeds: int = 3
    longest: int | None = None  # characters of a context: longer ones are skipped, or cut around the answer


SETS = {
    "sst2": DataSet("classify", False, 3000, 400, 1821),
    "mrpc": DataSet("classify", False, 1200, 200, 1725),
    "wnut17": DataSet("tag", False, 2000, 300, 1287, seeds=6),
    "chnsenticorp": DataSet("classify", True, 800, 150, 1000),
    "ocnli": DataSet("classify", True, 2400, 300, 2000, seeds=6),
    "cluener": DataSet("tag", True, 2400, 300, 1343),
    "cmrc2018": DataSet("answer", True, 1600, 100, 600, seeds=2, longest=160),  # cut around answers
    "c3": DataSet("choose", True, 1200, 120, 800, seeds=2, longest=100),  # mostly dialogues
}


# ---- records -------------------------------------------------------------------------------------------------


def prepare(folder: Path, about: DataSet, limit: int | None, out: Path) -> dict[str, int]:
    """Write train.jsonl, dev.jsonl and test.jsonl for both sides; return how many records each has."""
    found = {part: _read(folder, part, about) for part in ("train", "dev", "test")}
    sizes = (about.train, about.dev, about.test) if limit is None else (limit, min(limit, about.dev), limit)
    parts = split(found["train"], found["dev"], found["test"], *sizes)
    out.mkdir(parents=True, exist_ok=True)
    for part, lines in parts.items():
        write_atomically(out / f"{part}.jsonl", "".join(f"{line}\n" for line in lines))  # others may be reading it
    return {part: len(lines) for part, lines in parts.items()}


def _read(folder: Path, part: str, about: DataSet) -> list[str]:
    """The records of a file as JSON lines; none if it does not exist. Unusable SQuAD records are skipped."""
    if about.task != "answer":
        file = folder / f"{part}.jsonl"
        lines = [line for line in file.read_text(encoding="utf-8").split("\n") if line.strip()] if file.exists() else []
        return [line for line in lines if about.longest is None or len(json.loads(line)["context"]) <= about.longest]
    file = folder / f"{part}.json"
    records = read_questions(file, True, on_bad_record="skip") if file.exists() else []
    return [
        json.dumps(_question(record, about.longest), ensure_ascii=False) for record in records if _is_usable(record)
    ]


def _is_usable(record: Record) -> bool:
    try:
        learnable(record.fields)
    except Bad:
        return False
    return True


def _question(record: Record, longest: int | None) -> dict[str, Any]:
    fields = {name: record.fields[name] for name in ("id", "question", "context")}
    answers, target = record.fields["answers"], learnable(record.fields)
    if longest is not None and target is not None:
        text, at = target
        start, end = around(fields["context"], at, at + len(text), longest, fields["id"])
        fields["context"] = fields["context"][start:end]
        inside = [(text, at - start) for text, at in answers if at >= start]
        answers = [(text, at) for text, at in inside if fields["context"][at : at + len(text)] == text]
    texts, starts = zip(*answers, strict=True) if answers else ((), ())
    return fields | {"answer": texts, "start": starts}


def around(context: str, start: int, end: int, longest: int, seed: str) -> tuple[int, int]:
    """Whole sentences that contain these characters, extended at random to either side, up to `longest` characters."""
    rng, edges = random.Random(seed), [0, *(found.end() for found in _SENTENCE_ENDS.finditer(context)), len(context)]
    first = max(number for number, edge in enumerate(edges) if edge <= start)
    last = min(number for number, edge in enumerate(edges) if edge >= end)
    while True:
        wider = [(max(first - 1, 0), last), (first, min(last + 1, len(edges) - 1))]
        wider = [(a, b) for a, b in wider if (a, b) != (first, last) and edges[b] - edges[a] <= longest]
        if not wider:
            return edges[first], edges[last]
        first, last = rng.choice(wider)


def split(train: list[T], dev: list[T], test: list[T], trains: int, devs: int, tests: int) -> dict[str, list[T]]:
    """Limit each part to its size, evenly spaced. Without test, dev is the test set; without dev, the end of train."""
    if not test:
        dev, test = [], dev
    if not dev:
        devs = min(devs, len(train) // 5)
        train, dev = train[: len(train) - devs], train[len(train) - devs :]
    return {"train": spread(train, trains), "dev": spread(dev, devs), "test": spread(test, tests)}


def spread(items: list[T], count: int) -> list[T]:
    """At most `count` items, evenly spaced."""
    count = min(count, len(items))
    return [items[number * len(items) // count] for number in range(count)]


# ---- runs ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """A data set: its prepared files, and the complete plan of our own runs."""

    name: str
    folder: Path  # of the prepared files
    sizes: dict[str, int]
    plan: Plan
    job: FineTuning

    @classmethod
    def of(cls, name: str, args: argparse.Namespace) -> Case:
        about, folder = SETS[name], Path(args.out) / "data" / name
        sizes = prepare(args.data / name, about, args.limit, folder)
        body = args.chinese if about.chinese else args.english
        given = {"model": str(resolve(body)), "task": about.task, "data": str(folder / "train.jsonl")}
        epochs = {} if args.epochs is None else {"epochs": args.epochs}
        plan = Plan.from_dict(given | {"eval": str(folder / "dev.jsonl"), **epochs})
        assert isinstance(plan.job, FineTuning)
        data = plan.job.records()
        plan = plan.job.settled(plan, data.task, allmask.load(given["model"]), data.train)
        return cls(name, folder, sizes, plan, plan.job)

    def seeded(self, seed: int) -> Plan:
        return replace(self.plan, settings=replace(self.plan.settings, seed=seed))

    def key(self, side: str, seed: int, rate: float) -> dict[str, Any]:
        """Identifies a run in results.jsonl."""
        settings = self.plan.settings
        run = {"set": self.name, "side": side, "seed": seed, "lr": rate, "records": self.sizes}
        body = {"body": Path(self.job.model or "").name}
        return run | body | {"epochs": settings.epochs, "batch_tokens": settings.batch_tokens}

    def test(self) -> list[Record]:
        return self.job.task.read_data(Path(self.job.data), self.folder / "test.jsonl", "stop", Counter())[2]


def ours(case: Case, seed: int, run: Path) -> dict[str, Any]:
    """Fine-tune as a user would, and score the model on test."""
    shutil.rmtree(run, ignore_errors=True)  # left by an interrupted run
    before = time.process_time()
    result = start(case.seeded(seed), run, quiet=True)
    minutes = (time.process_time() - before) / 60
    model = allmask.load(run / "final")
    sheet = sheets.sheet_of(case.job.task, model, case.test())
    scores = sheets.score_of(model, sheet)
    for part in ("start", "final", "checkpoints"):  # large, and no longer needed
        shutil.rmtree(run / part, ignore_errors=True)
    dev = result["score"] * (1.0 if isinstance(sheet, sheets.Asked) else 100.0)
    return {"dev": dev, "scores": scores, "metric": sheet.metric, "minutes": minutes}


def theirs(case: Case, seed: int, rate: float) -> dict[str, Any]:
    """Fine-tune with transformers at a given learning rate, and score the model on test."""
    job, settings = case.job, replace(case.plan.settings, lr=rate, seed=seed)
    data = job.records()
    body = Path(job.model or "")
    model = job.task.prepare(allmask.load(body), data.train, seed)
    train, dev, test = (
        sheets.sheet_of(job.task, model, records) for records in (data.train, data.held_out, case.test())
    )
    tuned = tune(body, train, dev, settings, f"{case.name} {PEER} seed {seed} lr {rate:g}")
    scores = test.score(peer_logits(tuned.model, test))
    return {"dev": tuned.dev, "scores": scores, "metric": test.metric, "minutes": tuned.minutes}


# ---- results -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Results:
    """A file with a line for each finished run."""

    file: Path

    def rows(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.file.read_text(encoding="utf-8").splitlines()]

    def find(self, key: dict[str, Any]) -> dict[str, Any] | None:
        rows = self.rows() if self.file.exists() else []
        return next((row for row in rows if key.items() <= row.items()), None)

    def add(self, row: dict[str, Any]) -> dict[str, Any]:
        with self.file.open("a", encoding="utf-8") as stream:  # one write: another process may add at the same time
            stream.write(json.dumps(row, ensure_ascii=False) + "\n")
        return row


@dataclass(frozen=True)
class Compared:
    """A row of the table."""

    name: str
    sizes: dict[str, int]
    epochs: float
    ours: list[dict[str, Any]]
    theirs: list[dict[str, Any]]

    def cells(self) -> list[str]:
        metric = self.ours[0]["metric"]
        means = [statistics.mean(_values(rows)) for rows in (self.ours, self.theirs)]
        sizes = " / ".join(f"{self.sizes[part]:,}" for part in ("train", "dev", "test"))
        rates = f"{self.ours[0]['lr']:g} / {self.theirs[0]['lr']:g}"
        minutes = " / ".join(f"{statistics.mean(row['minutes'] for row in rows):.1f}" for rows in self.sides)
        first = [self.name, metric, sizes, f"{self.epochs:g}", str(len(self.ours)), rates]
        return [*first, *map(with_deviation, self.sides), f"{means[0] - means[1]:+.1f}", minutes]

    @property
    def sides(self) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        return self.ours, self.theirs


def _values(rows: Sequence[dict[str, Any]]) -> list[float]:
    return [row["scores"][row["metric"]] for row in rows]


def with_deviation(rows: Sequence[dict[str, Any]]) -> str:
    values = _values(rows)
    deviation = f" ± {statistics.stdev(values):.1f}" if len(values) > 1 else ""
    return f"{statistics.mean(values):.1f}{deviation}"


def table(lines: Iterable[Compared]) -> str:
    sizes = ("train / dev / test", "epochs", "seeds", "learning rates")
    head = ("data", "metric", *sizes, OURS, PEER, "difference", "CPU minutes")
    return common.table(head, [line.cells() for line in lines])


def compare(case: Case, seeds: int, results: Results, runs: Path) -> Compared:
    """Do the runs of a data set that are not in the results yet."""
    rate = case.plan.settings.lr

    def done(side: str, seed: int, rate: float) -> dict[str, Any]:
        key = case.key(side, seed, rate)
        if (row := results.find(key)) is None:
            made = ours(case, seed, runs / f"{case.name}-{seed}") if side == OURS else theirs(case, seed, rate)
            row = results.add(key | made)
        test, where = row["scores"][row["metric"]], f"{row['set']} {row['side']} seed {row['seed']} lr {row['lr']:g}"
        line = f"{where}: dev {row['dev']:.2f} test {test:.2f}, {row['minutes']:.1f} minutes"
        print(line, file=sys.stderr, flush=True)
        return row

    mine = [done(OURS, seed, rate) for seed in range(seeds)]
    rates = (rate, USUAL_RATE) if SETS[case.name].task == "classify" else (rate,)
    tried = [done(PEER, 0, one) for one in rates]
    best = max(tried, key=lambda row: row["dev"])
    others = [best, *(done(PEER, seed, best["lr"]) for seed in range(1, seeds))]
    return Compared(case.name, case.sizes, case.plan.settings.epochs, mine, others)


# ---- the command ---------------------------------------------------------------------------------------------


def arguments() -> argparse.Namespace:
    parser = common.parser(__doc__)
    parser.add_argument("data", type=Path, help="a folder of data sets")
    parser.add_argument("--out", default="quality-runs/tasks")
    parser.add_argument("--only", help="data sets, separated by commas")
    parser.add_argument("--seeds", type=int, help="runs of each side [default: 2 to 6, by data set]")
    parser.add_argument("--limit", type=int, help="training records, and at most as many of the other parts")
    parser.add_argument("--epochs", type=float, help="[default: that of the task]")
    parser.add_argument("--english", default="minilm", help="the body for English")
    parser.add_argument("--chinese", help="the body for Chinese, a model folder [default: Chinese data is skipped]")
    return parser.parse_args()


def chosen(args: argparse.Namespace) -> list[str]:
    """The data sets to run; prints which are skipped and why."""
    names = list(SETS) if args.only is None else args.only.split(",")
    if unknown := [name for name in names if name not in SETS]:
        sys.exit(f"error: unknown data set {', '.join(unknown)}; known: {', '.join(SETS)}")
    missing = [name for name in names if not (args.data / name).is_dir()]
    no_body = [name for name in names if SETS[name].chinese and args.chinese is None]
    for reason, skipped in ((f"not in {args.data}", missing), ("no --chinese body", no_body)):
        if skipped:
            print(f"skipped, {reason}: {', '.join(skipped)}", file=sys.stderr)
    return [name for name in names if name not in {*missing, *no_body}]


def main() -> None:
    logging.getLogger("allmask").setLevel(logging.WARNING)
    try:
        run(arguments())
    except AllmaskError as error:
        print(f"error[{error.kind}]: {error}", file=sys.stderr)
        sys.exit(error.exit_code)


def run(args: argparse.Namespace) -> None:
    out = Path(args.out)
    out.mkdir(parents=True, exist_ok=True)
    results, lines = Results(out / "results.jsonl"), []
    for name in chosen(args):
        case = Case.of(name, args)
        lines.append(compare(case, args.seeds or SETS[name].seeds, results, out / "runs"))
        print(table(lines), flush=True)
    (out / "table.md").write_text(table(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
