"""Which column of a file holds which field of a record: by its name, by --columns, or by a natural alias.

    --columns source=Body,target=Subject       what the user says goes first
    Body, Subject                              then the column that the model learnt from, if the file has it
    source, target                             then the name of the field itself
    Body, Subject                              then an alias; it is said: "columns: Body → source, Subject → target"

Two columns that could be the same field are an error that names both. Capitals, spaces, - and _ do not count.
"""

from __future__ import annotations

import csv
import json
import re
import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from allmask.data.fields import Bad, Cell, Checker, missing, required, show
from allmask.data.source import MAX_LINE, DataFile, check_encoding, lines
from allmask.errors import DataError, UsageError
from allmask.files import closest

ALIASES: dict[str, tuple[str, ...]] = {
    "source": (
        "content", "body", "article", "abstract", "document", "text", "input", "src",
        "正文", "内容", "文章", "原文", "文本",
    ),
    "target": (
        "title", "summary", "subject", "headline", "highlights", "output", "tgt",
        "标题", "题目", "主题", "摘要", "译文",
    ),
    "text": (
        "sentence", "review", "comment", "content", "body", "message", "tweet",
        "text_a", "text1", "sentence1", "premise", "question1",
        "文本", "句子", "评论", "内容", "正文", "文本1", "句子1",
    ),
    "text_b": ("text2", "sentence2", "hypothesis", "question2", "文本2", "句子2"),
    "label": (
        "labels", "class", "category", "sentiment", "stars", "rating", "score",
        "标签", "类别", "分类", "情感", "评分",
    ),
    "tokens": ("words",),
    "tags": ("ner_tags", "labels"),
    "context": ("passage", "paragraph", "article"),
    "choices": ("options", "endings"),
}  # fmt: skip
LAST = {  # aliases where there is no other: 摘要 is an abstract beside a title, and a summary beside its text
    "source": ("description", "摘要", "邮件内容", "邮件正文", "新闻内容", "文章内容"),
    "target": ("synopsis", "邮件标题", "邮件主题", "新闻标题", "文章标题"),
    "text": ("评论内容",),
    "label": ("情感倾向",),
}
FIELDS = (*ALIASES, "question", "answer", "answers", "start", "id")  # what --columns may name
_OTHER_TASKS = {"label": "classify", "tags": "tag"}  # for a file that has this field and no target
_NEXT_FIELD = re.compile(r",(?=\s*\w+\s*=)")
_NAMED = ("label", "tags")  # fields whose values may be numbers that have names


def parse_columns(given: str) -> dict[str, str]:
    """Read --columns: `source=body,target=subject`. A name may contain commas; one with `,x=` needs double quotes."""
    found: dict[str, str] = {}
    quoted = '"' in given
    for item in next(csv.reader([given], skipinitialspace=True), []) if quoted else _NEXT_FIELD.split(given):
        name, equals, column = (part.strip() for part in item.partition("="))
        if not (name and equals and column):
            raise UsageError(f'--columns: "{item}" is not FIELD=COLUMN', "write --columns source=body,target=subject")
        if name in found:
            raise UsageError(f"--columns: {name} is named twice", "name one column")
        found[name] = column
    if not found:
        raise UsageError("--columns names nothing", "write --columns source=body,target=subject")
    return found


def parse_names(given: str) -> tuple[str, ...]:
    """Read --label-names: names separated by commas, or a file with a name per line."""
    file = Path(given).expanduser()
    if file.is_file():
        names = [line.raw.decode("utf-8", "replace").strip() for line in lines(file, MAX_LINE)]
        names = names[:-1] if names and not names[-1] else names
    else:
        names = [name.strip() for name in next(csv.reader([given], skipinitialspace=True), [])]
    twice = first_repeated(names)
    if len(names) < 2 or "" in names or twice is not None:
        what = f"{show(twice)} twice" if twice else "a blank name" if "" in names else "one name only"
        raise UsageError(f"--label-names {given}: {what}", "write --label-names neg,pos, or name a file")
    return tuple(names)


def read_options(
    path: str | Path, columns: str | None = None, encoding: str | None = None, label_names: str | None = None,
    **more: Any,
) -> DataFile:  # fmt: skip
    """Return a file as the options of the command line say it is to be read; `more` are other fields of `DataFile`."""
    return DataFile(
        Path(path), {} if columns is None else parse_columns(columns),
        None if encoding is None else check_encoding(encoding),
        () if label_names is None else parse_names(label_names), **more,
    )  # fmt: skip


def check_columns(given: Mapping[str, str], known: Sequence[str]) -> None:
    """Refuse a field that no task has; `known` are fields besides those of this package."""
    fields = dict.fromkeys((*known, *FIELDS))
    for name, column in given.items():
        if name not in fields:
            turned = f"write {column}={name}" if column in fields else None
            close = closest(name, fields)
            hint = turned or (f"did you mean {close}?" if close else f"there are: {', '.join(fields)}")
            raise UsageError(f"--columns {name}={column}: there is no field {show(name)}", hint)


def _plain(name: str) -> str:
    """Return a name without what does not count in an alias."""
    return re.sub(r"[\s_\-]+", "", unicodedata.normalize("NFKC", name).casefold())


@dataclass(frozen=True)
class Fit:
    """The column of each field, for the fields that have one, and the names of labels that are numbers."""

    columns: dict[str, str]
    label_names: tuple[str, ...] = ()
    names_column: str | None = None  # a column with the name of each record's label

    def row(self, raw: dict[str, Any]) -> dict[str, Any]:
        """Return the fields of a row; a number that has a name is replaced by it."""
        made = {name: raw[column] for name, column in self.columns.items()}
        for name in _NAMED:
            if name in made and self.label_names:
                made[name] = _named(made[name], self.label_names, name)
        if self.names_column is not None and _whole(made["label"]) is not None:
            name = raw.get(self.names_column)
            made["label"] = name if isinstance(name, str) and name.strip() else made["label"]
        return made


def _whole(value: Any) -> int | None:
    """Return a whole number, also one in a csv cell; None for anything else."""
    if isinstance(value, Cell):
        return int(value) if re.fullmatch(r"\s*\d{1,9}\s*", value) and value.isascii() else None
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _named(value: Any, names: tuple[str, ...], name: str) -> Any:
    """Replace a number, or the numbers of a list, by their names; leave anything else as it is."""
    if isinstance(value, Cell) and value.lstrip().startswith("["):
        try:
            value = json.loads(value)
        except ValueError:
            return value
    if isinstance(value, list):
        return [_named(item, names, name) for item in value]
    number = _whole(value)
    if number is None:
        return value
    if not 0 <= number < len(names):
        known = f"0 to {len(names) - 1} have names"
        raise Bad("label without a name", f"{show(name)} is {number}; {known}", "fix the line, or the names")
    return names[number]


@dataclass
class Wanted:
    """The fields that are asked of a file. `fit` finds their columns, once for each set of columns."""

    file: DataFile
    checkers: Mapping[str, Checker]
    label_names: tuple[str, ...] = ()  # that the file itself has
    fits: dict[tuple[str, ...], Fit] = field(default_factory=dict)

    def __post_init__(self):
        check_columns(self.file.columns, list(self.checkers))
        self.given = {name: column for name, column in self.file.columns.items() if name in self.checkers}

    @property
    def names(self) -> tuple[str, ...]:
        """The names of labels that are numbers; the label of a multiple choice is an index and has none."""
        return () if "choices" in self.checkers else self.file.label_names or self.label_names

    def header(self, columns: Sequence[str], where: str) -> Fit:
        """Return the columns of a table; refuse one that lacks a required field, or has two columns of one name."""
        repeated = first_repeated(columns)
        if repeated is not None:
            raise DataError(f"{where}: two columns are called {show(repeated)}", "rename one of the two")
        fit = self.fit(columns, where)
        if absent := [name for name in required(self.checkers) if name not in fit.columns]:
            what, hint = _absent(absent, columns, fit, "the names of the columns")
            raise DataError(f"{where}: no column {what.removeprefix('no ')}", hint)
        return fit

    def row(self, raw: dict[str, Any], where: str) -> dict[str, Any]:
        """Return the fields of a row of the file."""
        fit = self.fit(tuple(raw), where)
        if absent := [name for name in required(self.checkers) if name not in fit.columns]:
            known = any(absent[0] in other.columns for other in self.fits.values())  # other rows have it
            by_line = known or self.file.items is not None
            said = missing(absent[0], list(raw), "the line") if by_line else _absent(absent, list(raw), fit, "the line")
            raise Bad("missing field", *said)
        return fit.row(raw)

    def fit(self, columns: Sequence[str], where: str) -> Fit:
        key = tuple(columns)
        if key not in self.fits:
            self.fits[key] = self._fit(key, where)
        return self.fits[key]

    def could_fit(self, columns: Sequence[str]) -> int:
        """Count the fields that have a column; to compare two ways of splitting a header."""
        found = sum(_match(column, columns) is not None for column in (*self.given.values(), *self.file.usual.values()))
        plain = {_plain(column) for column in columns}
        return found + sum(
            name in columns or any(_plain(known) in plain for known in (name, *ALIASES.get(name, ())))
            for name in self.checkers.keys() - self.given.keys()
        )

    def _fit(self, columns: tuple[str, ...], where: str) -> Fit:
        chosen: dict[str, str] = {}
        for name, column in self.given.items():
            match = _match(column, columns)
            if match is None:
                what, _ = missing(column, list(columns), "")
                close = closest(column, columns)
                hint = "check --columns" if close is None else f"did you mean --columns {_quoted(f'{name}={close}')}?"
                raise DataError(f"{where}: no column {what.removeprefix('no ')} (--columns {name}={column})", hint)
            chosen[name] = match
        for name, column in self.file.usual.items():
            match = _match(column, columns)
            if match is not None and name in self.checkers and name not in chosen and match not in chosen.values():
                chosen[name] = match
        taken = set(chosen.values())
        chosen |= {name: name for name in self.checkers if name in columns and name not in chosen and name not in taken}
        taken = set(chosen.values())
        for name in [name for name in self.checkers if name not in chosen]:
            found = fitting(name, [column for column in columns if column not in taken])
            before = {fit.columns[name] for fit in self.fits.values() if name in fit.columns}
            if before:  # rows of JSON may differ, but no field changes its column
                found = [column for column in found if column in before]
            if len(found) > 1:
                self._ambiguous(name, found, where)
            elif found:
                chosen[name] = found[0]
                taken.add(found[0])
        names_column = self._names_column(chosen, columns)
        renamed = [f"{column} → {name}" for name, column in chosen.items() if column != name]
        renamed += [f"{names_column} → the names of label"] if names_column else []
        if renamed:
            self.file.say(f"columns: {', '.join(renamed)}")
        ordered = {name: chosen[name] for name in self.checkers if name in chosen}
        return Fit(ordered, self.names, names_column)

    def _ambiguous(self, name: str, found: Sequence[str], where: str) -> None:
        listed = f"{', '.join(map(show, found[:-1]))} and {show(found[-1])}"
        each = "both" if len(found) == 2 else "all"
        if name in required(self.checkers):
            hint = f"say which: --columns {name}={found[0]}, or {name}={found[1]}"
            hint = hint if self.file.items is None else f"call one of them {show(name)}"
            raise DataError(f"{where}: {listed} could {each} be {show(name)}", hint)
        self.file.say(f"columns: {listed} could {each} be {name}, so none is used (--columns {name}={found[0]})")

    def _names_column(self, chosen: Mapping[str, str], columns: Sequence[str]) -> str | None:
        """Return a column such as label_text beside label, unless --columns says what the label is."""
        label = chosen.get("label")
        if label is None or "label" in self.given or self.names or "choices" in self.checkers:
            return None
        names = {_plain(label) + ending for ending in ("text", "name", "names")}
        return next((column for column in columns if _plain(column) in names), None)


def _absent(names: Sequence[str], columns: Sequence[str], fit: Fit, where: str) -> tuple[str, str]:
    """Return the message and the hint for fields without a column."""
    what, _ = missing(names[0], list(columns), "")
    free = [column for column in columns if column not in fit.columns.values()]
    _, hint = missing(names[0], free, where)
    say = _quoted(",".join(f"{name}={closest(name, free) or _containing(name, free) or 'NAME'}" for name in names))
    task = next((task for field, task in _OTHER_TASKS.items() if names[-1] == "target" and fitting(field, free)), None)
    other = "" if task is None else f"; a file like this one is for --task {task}"
    return what, f"{hint}, or name {'its column' if len(names) == 1 else 'their columns'}: --columns {say}{other}"


def _containing(name: str, columns: Sequence[str]) -> str | None:
    """Return the only column with a field or its alias as part of its name: "Mail body", 来信正文."""
    known = {name, *ALIASES.get(name, ())}
    found = [
        column for column in columns
        if known & set(re.split(r"[\W_]+", column.casefold())) or any(a in column for a in known if not a.isascii())
    ]  # fmt: skip
    return found[0] if len(found) == 1 else None


def _quoted(columns: str) -> str:
    """Return what --columns takes as a shell needs it."""
    return columns if re.fullmatch(r"[\w=.,-]+", columns) else f'"{columns}"'


def first_repeated(names: Sequence[str]) -> str | None:
    seen: set[str] = set()
    return next((name for name in names if name in seen or seen.add(name)), None)


def _match(name: str, columns: Sequence[str]) -> str | None:
    """Return the column of this name, or the only one that differs in capitals, spaces, - and _."""
    if name in columns:
        return name
    found = [column for column in columns if _plain(column) == _plain(name)]
    return found[0] if len(found) == 1 else None


def fitting(name: str, columns: Sequence[str]) -> list[str]:
    """Return the columns that could be a field: spelt a little differently, or else under an alias."""
    for names in ((name,), ALIASES.get(name, ()), LAST.get(name, ())):
        plain = {_plain(alias) for alias in names}
        if found := [column for column in columns if _plain(column) in plain]:
            return found
    return []
