"""The options that a command has for a task: what its command line shows, and what it and config.yaml may say.

They are made from the dataclasses of allmask/options.py and of the task. Nothing here imports torch, so that a value
that cannot be is refused at once.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import Field, dataclass, fields, is_dataclass, replace
from pathlib import Path
from typing import Any, get_type_hints

from allmask.errors import CheckpointError, DataError, UsageError
from allmask.files import did_you_mean
from allmask.options import (
    BATCH_IMAGES,
    TASK_OPTIONS,
    CommandOptions,
    FinetuneOptions,
    FreshOptions,
    GanOptions,
    ImageOptions,
    Option,
    PretrainOptions,
    Settings,
    as_text,
    described,
    setting_names,
)
from allmask.registry import OBJECTIVES, TASKS
from allmask.runs.values import differences, read_yaml, typed
from allmask.tasks.task import Task

TASKS_OF = {  # command -> its tasks, the default first; those of other packages come after them
    "finetune": ("title", "translate", "classify", "choose", "tag", "answer"),
    "train": ("translate", "title", "image", "gan"),
    "pretrain": ("",),
}
GUESTS = {"image": ImageOptions, "gan": GanOptions}  # of texts they know nothing


@dataclass(frozen=True)
class Entry:
    """An option of a kind of run. `default` is as --help shows it; `detail` is what is special to this run."""

    name: str
    type: Any
    option: Option
    default: str
    detail: str = ""


@dataclass(frozen=True)
class Run:
    """The options that one command has for one task: those of a kind of run, of the task, and settings."""

    command: str
    task: str  # "" where a command has no tasks
    kind: type[Any]  # a dataclass that is a `RunOptions`
    others: tuple[type[Any], ...] = ()  # dataclasses: of the task, of a new model

    @property
    def label(self) -> str:
        """What it is called in messages."""
        return self.task or "pretraining"

    @property
    def types(self) -> dict[str, Any]:
        """The names that values may have, and their types."""
        named = {"task": str} if self.task else {}
        for part in (self.kind, *self.others):
            hints = get_type_hints(part)
            named |= {entry.name: hints[entry.name] for entry in fields(part)}
        hints = get_type_hints(Settings)
        return named | {name: hints[theirs] for name, theirs in setting_names(self.kind).items()}

    @property
    def _fields(self) -> list[Field[Any]]:
        """Fields of all dataclasses."""
        own = [entry for part in (self.kind, *self.others) for entry in fields(part)]
        return [*own, *(entry for entry in fields(Settings) if entry.name not in self.kind.unused)]

    def entries(self) -> list[Entry]:
        """What the command line and the docs show."""
        types, task = self.types, self.others[-1] if self.others else None
        scratch = self.command == "train" and FreshOptions in self.others
        usual = self.kind.usual({"preset": FreshOptions.preset} if scratch else {})
        shown = {**self.kind.suggests, **getattr(task, "suggests", {}), **(_FROM_SCRATCH if scratch else {})}
        shown["prune"] = as_text(getattr(task, "prunes", False))
        reads = getattr(task, "reads", None) or ", ".join([*getattr(task, "inputs", ()), *getattr(task, "targets", ())])
        details = self.kind.details | {"data": reads, "objective": f"Also {OBJECTIVES.of_packages()}"}
        found = []
        for entry in self._fields:
            name, option = self.kind.renamed.get(entry.name, entry.name), described(entry)
            if option.commands and self.command not in option.commands:
                continue
            if name == BATCH_IMAGES:
                option = replace(option, help="Images per batch.")
            default = shown.get(name) or option.shown_default or as_text(usual.get(name, entry.default))
            found.append(Entry(name, types[name], option, default, details.get(name, "")))
        return found

    def expect_own(self, names: Iterable[str], where: Path | str, flags: Collection[str]) -> None:
        """Refuse an option of another task: it would change nothing, which nobody who gives it expects."""
        types = self.types
        for name in names:
            owners = "" if name in types else _owners(name, self.command)
            if owners:
                said = f"--{name.replace('_', '-')}" if name in flags else f"{where}: {name}"
                raise UsageError(f"{said} is for {owners}, not for {self.label}", "leave it out")

    def parse(
        self, values: Mapping[str, Any], where: Path | str = "--config", flags: Collection[str] = ()
    ) -> dict[str, Any]:
        """Typed values, checked as far as that is possible without data and model.

        They come from a file, `where`, but for `flags`.
        """
        self.expect_own(values, where, flags)
        types = self.types
        given = {name: typed(name, value, types, where) for name, value in values.items()}
        options = {self.kind.renamed.get(entry.name, entry.name): described(entry) for entry in self._fields}
        for name, value in given.items():
            if name in options:
                flag = f"--{name.replace('_', '-')}"
                options[name].check(flag if name in flags else name, value, "" if name in flags else f"{where}: ")
        known = self.kind.usual(given) | given
        if FreshOptions in self.others:
            _check_start(given)
        self.kind(**part_of(known, self.kind)).check(self.settings(known))
        for part in self.others:
            if part is not FreshOptions or given.get("preset") is not None:
                part(**part_of(known, part))
        return given

    def settings(self, known: Mapping[str, Any]) -> Settings:
        """The settings among typed values."""
        return Settings(**{theirs: known[name] for name, theirs in setting_names(self.kind).items() if name in known})


_FROM_SCRATCH = {  # settings that are chosen for a new model
    "lr": "by the width, 7e-4 at 512",
    "warmup": "4000 steps, or a tenth of a short run",
}


def _check_start(given: Mapping[str, Any]) -> None:
    """A run for texts begins with a model or with a preset, and with data."""
    fresh = part_of(given, FreshOptions)
    if fresh and fresh.get("preset") is None:
        raise UsageError(f"{', '.join(fresh)}: for a new model", "leave it out, or name a --preset")
    if not fresh and given.get("model") is None:
        raise UsageError("no model was named", "name it as the first argument")
    if fresh and given.get("model") is not None:
        raise UsageError("a run begins with a model or with a preset", "name one of them")
    if given.get("data") is None:
        raise UsageError("no data was named", "name it with --data")


def part_of(values: Mapping[str, Any], kind: type[Any]) -> dict[str, Any]:
    """The values that are fields of a dataclass."""
    return {entry.name: values[entry.name] for entry in fields(kind) if entry.name in values}


# ---- which there are -----------------------------------------------------------------------------------------


def run_of(command: str, task: str) -> Run:
    """The options of a command for a task; one of another package is imported."""
    if command == "pretrain":
        return Run(command, "", PretrainOptions)
    if task not in tasks_of(command):
        others = [other for other, tasks in TASKS_OF.items() if task in tasks]
        hint = f"allmask {others[0]} has it" if others else did_you_mean(str(task), tasks_of(command))
        raise UsageError(f"unknown task {task}", hint)
    if task in GUESTS:
        return Run(command, task, GUESTS[task])
    return Run(command, task, FinetuneOptions, (FreshOptions, TASK_OPTIONS.get(task) or _task_of_a_package(task)))


def _task_of_a_package(task: str) -> type[Any]:
    """The class of a task that another package added; one that cannot be trained is refused."""
    kind: type[Any] = TASKS[task]
    if not (isinstance(kind, type) and is_dataclass(kind)):
        raise UsageError(f"task {task}: {kind!r} is not a dataclass", "write @dataclass(frozen=True) above the class")
    if getattr(kind, "name", task) != task:
        raise UsageError(f"task {task}: the name of {kind!r} is {kind.name!r}", f'write name = "{task}" in it')
    if getattr(kind, "workload", Task.workload) is Task.workload:
        raise UsageError(f"task {task} cannot be trained", "choose another --task")
    taken = {entry.name for part in (FinetuneOptions, FreshOptions, CommandOptions, Settings) for entry in fields(part)}
    clashes = [entry.name for entry in fields(kind) if entry.name in taken]
    if clashes:
        raise UsageError(f"task {task}: {', '.join(clashes)} is an option of every run", "rename the field")
    return kind


def run_in(values: Mapping[str, Any]) -> Run:
    """The options that the values of a plan may have, as they are in config.yaml."""
    task = values.get("task", "title")
    return run_of("pretrain" if "objective" in values else "train" if task in GUESTS else "finetune", task)


def completed(command: str, values: Mapping[str, Any]) -> dict[str, Any]:
    """Values with what a command implies: `train` makes a new model, and each has its default task."""
    if command == "pretrain":
        return {"objective": PretrainOptions.objective, **values}
    task = values.get("task") or TASKS_OF[command][0]
    fresh = {"preset": FreshOptions.preset} if command == "train" and task not in GUESTS else {}
    return {"task": task, **fresh, **values}


def tasks_of(command: str) -> list[str]:
    """The tasks of a command, its default first; those of other packages last."""
    if command == "pretrain":
        return [""]
    return [*TASKS_OF[command], *TASKS.others]


def check_values(
    command: str, values: Mapping[str, Any], where: Path | str = "--config", flags: Collection[str] = ()
) -> None:
    """Refuse values that cannot be, as far as that can be known without data and model; see `Run.parse`."""
    values = completed(command, values)
    run = run_of(command, values.get("task", ""))
    given = run.parse(values, where, flags)
    for name in () if run.task in GUESTS else ("data", "eval"):
        paths = given.get(name) or ()
        for path in paths if isinstance(paths, tuple) else (paths,):
            if not Path(path).expanduser().exists():
                raise DataError(f"{path}: no such file", "check the path")


def check_resumed(command: str, out: Path, given: Mapping[str, Any]) -> None:
    """Refuse to continue a run with other values than it was started with."""
    if not (out / "config.yaml").is_file():
        raise CheckpointError(f"{out}: no config.yaml, so there is no run to resume", "leave --resume out to start one")
    saved = read_yaml(out / "config.yaml")
    run = run_in(saved)
    if run.task not in tasks_of(command):
        raise CheckpointError(f"{out}: this is not a run of allmask {command}", f"use allmask {run.command}")
    run.expect_own(given, "--config", given)
    found = differences(saved, given, run.types, run.kind.paths, run.kind.fitted)
    if found:
        raise UsageError(
            f"{out}: a resumed run keeps its settings; {'; '.join(found)}",
            "leave these options out, or start a new run with another --out",
        )


def _owners(name: str, command: str) -> str:
    """Which tasks of a command have an option, or which other commands; nothing if there are none."""
    owners = [task for task in TASKS_OF[command] if name in run_of(command, task).types]
    if not owners:
        return " or ".join(
            f"allmask {other}"
            for other, tasks in TASKS_OF.items()
            if any(name in run_of(other, t).types for t in tasks)
        )
    texts = [task for task in TASKS_OF[command] if task not in GUESTS]
    if owners == texts:
        return "texts"
    return "--task " + " or ".join(filter(None, [", ".join(owners[:-1]), owners[-1]]))
