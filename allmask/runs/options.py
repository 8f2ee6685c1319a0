"""The options that a command has for a task, and their values: read from YAML, converted, checked, compared.

Values are flat: names and plain values, as in config.yaml and on the command line. The options come from the
dataclasses of allmask/options.py and of the task. Nothing here imports torch, so an invalid value is refused at once.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Mapping
from dataclasses import Field, dataclass, fields, is_dataclass, replace
from functools import cache, cached_property
from pathlib import Path
from typing import Any, NamedTuple, get_args, get_origin, get_type_hints

from allmask.errors import CheckpointError, DataError, ResourceError, UsageError
from allmask.files import LOCK, MANIFEST, closest, did_you_mean, is_leftover, seal
from allmask.options import (
    BATCH_IMAGES,
    IMAGE_SETS,
    TASK_OPTIONS,
    CommandOptions,
    FinetuneOptions,
    FreshOptions,
    GanOptions,
    ImageOptions,
    Option,
    PretrainOptions,
    ReadOptions,
    Settings,
    as_text,
    described,
)
from allmask.registry import OBJECTIVES, TASKS
from allmask.tasks.task import Task

CONFIG, START = "config.yaml", "start"  # in the folder of a run
CHECKSUMS, SEAL = "checksums", "config"  # in config.yaml: checksums of data and model, and of the values themselves
TASKS_OF = {  # command -> its tasks, the default first; tasks of other packages come after them
    "finetune": ("title", "translate", "classify", "choose", "tag", "answer"),
    "train": ("translate", "title", "image", "gan"),
    "pretrain": ("",),
}
GUESTS = {kind.task_name: kind for kind in (ImageOptions, GanOptions)}  # tasks without texts


hints_of = cache(get_type_hints)  # of a dataclass: evaluated once, since several runs and commands share it


@dataclass(frozen=True)
class Entry:
    """An option of a run. `default` is as --help shows it; `detail` is added to the help text of this run."""

    name: str
    type: Any
    option: Option
    default: str
    detail: str = ""


@dataclass(frozen=True)
class Run:
    """The options that one command has for one task: those of a kind of run, of the task, and settings."""

    command: str
    task: str  # "" if the command has no tasks
    kind: type[Any]  # a dataclass that is a `RunOptions`
    others: tuple[type[Any], ...] = ()  # dataclasses: the options of a new model, of the task

    @cached_property
    def declared(self) -> dict[str, tuple[Any, Field[Any]]]:
        """The type and the dataclass field of each option."""
        found: dict[str, tuple[Any, Field[Any]]] = {}
        names = {part: {entry.name: entry.name for entry in fields(part)} for part in (self.kind, *self.others)}
        for part, named in {**names, Settings: self.kind.setting_names()}.items():
            hints, entries = hints_of(part), {entry.name: entry for entry in fields(part)}
            found |= {name: (hints[entry], entries[entry]) for name, entry in named.items()}
        return found

    @cached_property
    def types(self) -> dict[str, Any]:
        """The names that values may have, and their types."""
        return ({"task": str} if self.task else {}) | {name: type for name, (type, _) in self.declared.items()}

    def entries(self) -> list[Entry]:
        """Return what the command line and the docs show."""
        task = self.others[-1] if self.others else None
        scratch = self.command == "train" and FreshOptions in self.others
        usual = self.kind.usual({"preset": FreshOptions.preset} if scratch else {})
        shown = {
            **self.kind.shown_defaults,
            **getattr(task, "suggests", {}),
            **(FreshOptions.suggests if scratch else {}),
        }
        many = getattr(task, "prunes_from", None)
        shown["prune"] = as_text(False) if many is None else f"{as_text(True)} from {many:,} records on"
        reads = getattr(task, "reads", None) or ", ".join([*getattr(task, "inputs", ()), *getattr(task, "targets", ())])
        details = self.kind.details | {"data": reads, "objective": f"Also {OBJECTIVES.of_packages()}"}
        found = []
        for name, (type, entry) in self.declared.items():
            option = described(entry)
            if option.commands and self.command not in option.commands:
                continue
            if name == BATCH_IMAGES:
                option = replace(option, help="Images per batch.")
            default = shown.get(name) or option.shown_default or as_text(usual.get(name, entry.default))
            found.append(Entry(name, type, option, default, details.get(name, "")))
        return found

    def expect_own(self, names: Iterable[str], where: Path | str, flags: Collection[str]) -> None:
        """Refuse options of other tasks and commands, instead of ignoring them."""
        for name in names:
            owners = "" if name in self.types else _owners(name, self.command)
            if owners:
                given = _flag(name) if name in flags else f"{where}: {name}"
                raise UsageError(f"{given} is for {owners}, not for {self.task or 'pretraining'}", "leave it out")

    def parse(
        self, values: Mapping[str, Any], where: Path | str = "--config", flags: Collection[str] = ()
    ) -> dict[str, Any]:
        """Convert values to their types, and check them as far as possible without data and model.

        For error messages: the values named in `flags` come from the command line, the others from the file `where`.
        """
        self.expect_own(values, where, flags)
        given = {name: typed(name, value, self.types, where) for name, value in values.items()}
        for name, value in given.items():
            if name in self.declared:
                shown = (_flag(name), "") if name in flags else (name, f"{where}: ")
                described(self.declared[name][1]).check(shown[0], value, shown[1])
        known = self.kind.usual(given) | given
        if FreshOptions in self.others:
            _check_start(given)
        self.kind(**part_of(known, self.kind)).check(self.settings(known))
        for part in self.others:
            if part is not FreshOptions or given.get("preset") is not None:
                part(**part_of(known, part))
        return given

    def settings(self, known: Mapping[str, Any]) -> Settings:
        """Return the settings among typed values."""
        return Settings(**{entry: known[name] for name, entry in self.kind.setting_names().items() if name in known})


def _check_start(given: Mapping[str, Any]) -> None:
    """Refuse a run on texts without data, or with both a model and a preset."""
    fresh = part_of(given, FreshOptions)
    if fresh and fresh.get("preset") is None:
        raise UsageError(f"{', '.join(fresh)}: for a new model", "leave it out, or name a --preset")
    if fresh and given.get("model") is not None:
        raise UsageError("a run begins with a model or with a preset", "name one of them")
    if given.get("data") is None:
        raise UsageError("no data was named", "name it with --data")


def part_of(values: Mapping[str, Any], kind: type[Any]) -> dict[str, Any]:
    """Return the values that are fields of a dataclass."""
    return {entry.name: values[entry.name] for entry in fields(kind) if entry.name in values}


# ---- commands and tasks --------------------------------------------------------------------------------------


def run_of(command: str, task: str) -> Run:
    """Return the options of a command for a task. A task of another package is imported."""
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
    """Return the class of a task that another package added; refuse one that cannot be trained."""
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
    """Return the options of the run that these values describe, as config.yaml has them."""
    task = values.get("task", "title")
    return run_of("pretrain" if "objective" in values else "train" if task in GUESTS else "finetune", task)


def completed(command: str, values: Mapping[str, Any]) -> dict[str, Any]:
    """Add the values that a command implies: its default task or objective, and a new model for `train`."""
    if command == "pretrain":
        return {"objective": PretrainOptions.objective, **values}
    task = values.get("task") or TASKS_OF[command][0]
    fresh = {"preset": FreshOptions.preset} if command == "train" and task not in GUESTS else {}
    return {"task": task, **fresh, **values}


def tasks_of(command: str) -> list[str]:
    """List the tasks of a command: its default first, those of other packages last."""
    return [*TASKS_OF[command], *(TASKS.others if command != "pretrain" else ())]


def _owners(name: str, command: str) -> str:
    """Say which tasks of a command, or else which other commands, have an option; empty if none has."""
    owners = [task for task in TASKS_OF[command] if name in run_of(command, task).types]
    if owners == [task for task in TASKS_OF[command] if task not in GUESTS]:
        return "texts"
    if owners:
        return "--task " + " or ".join(filter(None, [", ".join(owners[:-1]), owners[-1]]))
    commands = [other for other, tasks in TASKS_OF.items() if any(name in run_of(other, t).types for t in tasks)]
    return " or ".join(f"allmask {other}" for other in commands)


# ---- checks before torch is imported -------------------------------------------------------------------------


_NOT_THERE = {  # the error for a path that does not exist
    "texts": (DataError, "no such file", "check the path"),
    "images": (DataError, "does not exist", "give a folder with a subfolder for each class, or of MNIST or CIFAR-10"),
    "judge": (CheckpointError, "does not exist", "give the folder of an image classifier, or of its run"),
}


def check_values(
    command: str, values: Mapping[str, Any], where: Path | str = "--config", flags: Collection[str] = ()
) -> None:
    """Refuse invalid values and missing files, as far as possible without data and model; see `Run.parse`."""
    from allmask.checkpoints.sources import is_on_hub, resolve
    from allmask.data.columns import read_options
    from allmask.data.source import check_file

    values = completed(command, values)
    run = run_of(command, values.get("task", ""))
    given = run.parse(values, where, flags)
    read_options("", **part_of(given, ReadOptions))  # refuses what cannot be parsed
    if (tokenizer := given.get("tokenizer")) and not is_on_hub(tokenizer):
        resolve(tokenizer)  # refuses what is not there
    for name in ("data", "eval", "lm_text", "judge"):
        paths = given.get(name) or ()
        for path in paths if isinstance(paths, tuple) else (paths,):
            content = name if name in _NOT_THERE else "images" if run.task in GUESTS else "texts"
            if not Path(path).expanduser().exists() and not (content == "images" and path in IMAGE_SETS):
                error, what, hint = _NOT_THERE[content]
                raise error(f"{path}: {what}", hint)
            if content == "texts" and run.task in TASK_OPTIONS:
                check_file(Path(path).expanduser())


def expect_free(out: Path, leaves: Collection[str] = ()) -> None:
    """Refuse a folder that is occupied or cannot be written, before any work. Writes nothing itself.

    Leftovers of a run that ended before it began, and files named in `leaves`, may be there.
    """
    if out.is_file() or (out.is_dir() and not _is_unbegun(out, leaves)):
        hint = "to continue this run: --resume" if (out / CONFIG).is_file() else "name another --out"
        raise ResourceError(f"{out}: already there", hint)
    if out.absolute() == Path.cwd():
        raise ResourceError(f"{out}: the current folder cannot be the folder of a run", "name another: --out run")
    above = next(folder for folder in (out.absolute(), *out.absolute().parents) if folder.exists())
    if not above.is_dir() or not os.access(above, os.W_OK | os.X_OK):
        raise ResourceError(f"{out}: cannot write in {above}", "choose another --out")


def _is_unbegun(out: Path, leaves: Collection[str]) -> bool:
    """Whether a folder holds only files that a run writes before it begins; a start/ without manifest is not ours."""
    if (out / START).exists() and not (out / START / MANIFEST).is_file():
        return False
    return all(item.name in (START, LOCK, *leaves) or is_leftover(item.name) for item in out.iterdir())


def check_resumed(command: str, out: Path, given: Mapping[str, Any]) -> None:
    """Refuse to continue a run with other values than it was started with."""
    saved = saved_values(out)
    run = run_in(saved)
    if run.task not in tasks_of(command):
        raise CheckpointError(f"{out}: this is not a run of allmask {command}", f"use allmask {run.command}")
    found = differences(saved, given)
    if found:
        raise UsageError(
            f"{out}: a resumed run keeps its settings; {'; '.join(found)}",
            "leave these options out, or start a new run with another --out",
        )


def differences(saved: Mapping[str, Any], given: Mapping[str, Any]) -> list[str]:
    """Describe where given values contradict those in the config.yaml of a run.

    Lengths that were lowered to what the model can hold do not count.
    """
    run, found = run_in(saved), []
    run.expect_own(given, "--config", given)
    values = {name: typed(name, value, run.types, _flag(name)) for name, value in given.items()}
    for name, now in as_saved(values, run.kind.paths).items():
        before = saved.get(name)
        lowered = name in run.kind.fitted and before is not None and now > before
        if now != before and not lowered:
            found.append(f"{name} is {before}, not {now}")
    return found


# ---- values --------------------------------------------------------------------------------------------------


def read_yaml(path: Path) -> dict[str, Any]:
    import yaml

    hint = "write lines such as lr: 0.0003"
    try:
        found = yaml.safe_load(path.read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise UsageError(f"{path}: cannot be read: {error.strerror}", "check the path") from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # or thousands of digits, or brackets
        raise UsageError(f"{path}: not YAML: {' '.join(str(error).split())}", hint) from None
    if not isinstance(found, dict):
        raise UsageError(f"{path}: expected names and values", hint)
    return found


def saved_values(out: Path) -> dict[str, Any]:
    """Read the config.yaml of a run; refuse one that is damaged, or was changed since the run began."""
    if not (out / CONFIG).is_file():
        raise CheckpointError(f"{out}: no {CONFIG}, so there is no run to resume", "leave --resume out to start one")
    hint = "restore the file, or start a new run with another --out"
    try:
        values = read_yaml(out / CONFIG)
    except UsageError as error:
        raise CheckpointError(f"{error.message}; the run cannot be resumed", hint) from None
    signed = values.get(CHECKSUMS)
    if not isinstance(signed, dict) or signed.get(SEAL) != _seal(values):
        raise CheckpointError(f"{out / CONFIG}: damaged, or changed since the run began: its checksum is wrong", hint)
    return values


def sealed_values(values: Mapping[str, Any], checksums: Mapping[str, str]) -> dict[str, Any]:
    """Return values for config.yaml, with checksums: those given, and one of the values themselves."""
    complete = {**values, CHECKSUMS: dict(checksums)}
    return {**values, CHECKSUMS: {**checksums, SEAL: _seal(complete)}}


def _seal(values: Mapping[str, Any]) -> str:
    others = {name: checksum for name, checksum in values[CHECKSUMS].items() if name != SEAL}
    try:
        return seal({**values, CHECKSUMS: others})
    except (TypeError, ValueError):  # a damaged file may hold values that JSON does not have, such as dates
        return ""


class UsualReading(NamedTuple):
    """The training file of a run and the options it was read with; empty for a model that is not of a run."""

    columns: dict[str, str]  # by field
    label_names: str | None = None
    encoding: str | None = None
    trained_on: str | None = None  # the checksum of its file of training records


def usual_reading(model: str | Path) -> UsualReading:
    from allmask.data.columns import parse_columns
    from allmask.data.source import check_encoding

    folder = Path(model).expanduser()
    run = folder if (folder / CONFIG).is_file() else folder.resolve().parent
    if not folder.is_dir() or not (run / CONFIG).is_file():
        return UsualReading({})
    values = read_yaml(run / CONFIG)
    columns, names, encoding = (values.get(name) for name in ("columns", "label_names", "encoding"))
    is_list = isinstance(names, str) and ("," in names or Path(names).expanduser().is_file())
    return UsualReading(
        parse_columns(columns) if isinstance(columns, str) else {},
        names if is_list else None,
        check_encoding(encoding) if isinstance(encoding, str) else None,
        checksums.get("data") if isinstance(checksums := values.get(CHECKSUMS), dict) else None,
    )


def as_saved(values: Mapping[str, Any], paths: Collection[str]) -> dict[str, Any]:
    """Return values as config.yaml has them: lists instead of tuples, and absolute paths."""
    listed = {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}
    return listed | {name: _absolute(listed[name]) for name in paths if name in listed}


def _absolute(value: Any) -> Any:
    """Return the absolute path of an existing file or folder, or of several; the name of a model stays as it is."""
    if isinstance(value, list):
        return [_absolute(name) for name in value]
    return os.path.abspath(Path(value).expanduser()) if value and Path(value).expanduser().exists() else value


def typed(name: Any, value: Any, types: Mapping[str, Any], where: Path | str) -> Any:
    """Convert a value to the type of its option. YAML reads 3e-4 as text, and a whole number may stand for a float."""
    if name not in types:
        close = closest(str(name), types)
        hint = f"did you mean {close}?" if close else f"known: {', '.join(types)}"
        raise UsageError(f"{where}: unknown setting {name}", hint)
    kinds = get_args(types[name]) or (types[name],)
    if get_origin(types[name]) is tuple:
        pair = kinds[-1] is not Ellipsis
        listed = value if isinstance(value, list | tuple) else [] if pair else [value]
        converted = tuple(_convert(kinds[0], item) for item in listed)
        valid = None not in converted and (not pair or len(converted) == 2)
        expected = "two numbers, such as [0.9, 0.999]" if pair else f"a list of {_PLURALS[kinds[0]]}"
    elif value is None and type(None) in kinds:
        return None
    else:
        converted = _convert(kinds[0], value)
        valid, expected = converted is not None, _SINGULARS[kinds[0]]
    if not valid:
        raise UsageError(f"{where}: {name} is {value!r}; expected {expected}")
    return converted


_SINGULARS = {bool: "true or false", int: "a whole number", float: "a number", str: "text"}
_PLURALS = {float: "numbers", str: "names"}


def _convert(kind: type, value: Any) -> Any:
    """Return the value as this type; None if it cannot be converted."""
    if isinstance(value, bool) != (kind is bool):
        return None
    if kind is float and isinstance(value, str | int):
        try:
            return float(value)
        except ValueError:
            return None
    return value if isinstance(value, kind) else None


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"
