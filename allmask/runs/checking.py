"""Look at the data of a run without training: what would be learnt, what would be cut, what is wrong with it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from statistics import fmean, median
from typing import Any

from allmask.checkpoints import default_model
from allmask.data import DataFile, Record, expect_held_out
from allmask.data.duplicates import plain, twins
from allmask.errors import DataError
from allmask.registry import TASKS
from allmask.runs.finetuning import FEWEST, divided, sample_texts, unknown_share
from allmask.tasks.task import Lengths, ModelFolder

SHOWN = 10  # problems and examples
_TARGETS = ("target", "label", "tags", "answers")  # fields that a record is to predict


@dataclass(frozen=True)
class Pair:
    """Two places with the same text."""

    where: str
    other: str
    alike: float = 1.0  # share of the text that they have in common


@dataclass(frozen=True)
class Report:
    """What `allmask check` says about a file, or about two."""

    task: str
    model: str | None  # None: none was named, and the task has no default
    data: str
    eval: str | None
    columns: list[str]  # messages, such as "columns: Body → source"
    records: int
    train: int
    held_out: int
    labels: dict[str, int]  # most frequent first
    numbers: dict[str, float] | None  # of labels that are quantities: min, mean, max
    lengths: list[Lengths]
    unknown: float  # share of tokens that the model does not know, of some records
    duplicates: int
    contradictions: int  # records whose input occurs again with another target
    duplicate_examples: list[Pair]
    leaked: int  # held-out records whose source is also trained on
    leak_examples: list[Pair]
    skipped: dict[str, int]
    problems: list[DataError]

    def to_dict(self) -> dict[str, Any]:
        """Return plain values; lengths as their distribution."""
        lengths = {
            one.name: {
                "min": min(one.tokens), "median": median(one.tokens), "max": max(one.tokens), "limit": one.limit,
                "too_long": one.too_long, "treated": "windows" if one.windows else "cut",
                "histogram": [{"from": low, "to": high, "count": count} for low, high, count in histogram(one.tokens)],
            }
            for one in self.lengths
        }  # fmt: skip
        problems = [{"message": one.message, "hint": one.hint} for one in self.problems]
        own = {name: value for name, value in vars(self).items() if name not in ("lengths", "problems")}
        pairs = {name: [asdict(pair) for pair in own[name]] for name in ("duplicate_examples", "leak_examples")}
        return {**own, **pairs, "lengths": lengths, "problems": problems}


def check(
    task_name: str, data: DataFile, held_out: DataFile | None = None, model: str | None = None, share: float = 0.1,
    options: Mapping[str, Any] | None = None,
) -> Report:  # fmt: skip
    """Read the records that a run would train on, bad ones skipped, and everything that they show.

    `share` is what a run holds out without a file of held-out records; `options` are those of the task.
    """
    expect_held_out([data.path], [held_out.path] if held_out else [])
    problems: dict[str, DataError] = {}
    data = replace(data, problems=problems)
    held_out = held_out and replace(held_out, problems=problems, said=data.said)
    skipped: Counter[str] = Counter()
    task, train, others = TASKS[task_name](**options or {}).read_data(data, held_out, "skip", skipped)
    every = [*train, *others]
    if held_out is None and len(train) >= FEWEST:
        train, others = divided(train, share, task.unit)
    name = model or (default_model(sample_texts(task, train)) if task.has_default_model else None)
    lengths, unknown = [], 0.0
    if name is not None:
        outline = ModelFolder.open(name).outline
        task = task.fitted(outline)
        lengths = task.lengths(outline, every)
        unknown = unknown_share(outline, sample_texts(task, every))
    first, duplicates = duplicates_in(task, every)
    leaks = twins([task.unit(record) for record in others], [task.unit(record) for record in train])
    counts = task.label_counts(every)
    numbers = None
    if getattr(task, "kind", None) == "number":
        values = [record.fields["label"] for record in every]
        counts, numbers = Counter(), {"min": min(values), "mean": fmean(values), "max": max(values)}
    return Report(
        task.name, name, str(data), None if held_out is None else str(held_out), sorted(data.said), len(every),
        len(train), len(others), dict(counts.most_common()), numbers, lengths, unknown,
        len(duplicates), sum(_target(one) != _target(first[where]) for where, one in duplicates.items()),
        [Pair(where, first[where].where) for where in list(duplicates)[:SHOWN]], len(leaks),
        [Pair(others[one.number].where, train[one.other].where, one.alike) for one in leaks[:SHOWN]],
        dict(skipped), list(problems.values()),
    )  # fmt: skip


def duplicates_in(task: Any, records: Sequence[Record]) -> tuple[dict[str, Record], dict[str, Record]]:
    """Return the records whose input occurred before, by location, and for each the first record with that input."""
    seen: dict[str, Record] = {}
    first: dict[str, Record] = {}
    found: dict[str, Record] = {}
    for record in records:
        earlier = seen.setdefault(plain(task.input_text(record)), record)
        if earlier is not record:
            first[record.where], found[record.where] = earlier, record
    return first, found


def _target(record: Record) -> list[Any]:
    return [record.fields[name] for name in _TARGETS if name in record.fields]


def histogram(tokens: Sequence[int]) -> list[tuple[int, int, int]]:
    """Count numbers of tokens in intervals that double: (1, 16, count), (17, 32, count), …"""
    found, low, high = [], 0, 16
    while low <= max(tokens):
        found.append((low, high, sum(low <= count <= high for count in tokens)))
        low, high = high + 1, 2 * high
    return found
