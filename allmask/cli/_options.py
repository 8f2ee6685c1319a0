"""Options on the command line: those of the commands that train come from their declarations; --help has sections.

python -m allmask.cli._options > docs/options.md        # the same as a page of the docs
"""

from __future__ import annotations

import inspect
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Union, get_args, get_origin, get_type_hints

import typer
from typer.core import TyperCommand

from allmask.errors import AllmaskError, UsageError
from allmask.options import CommandOptions, Option, described
from allmask.registry import TASKS
from allmask.runs.options import GUESTS, TASKS_OF, Entry, Run, check_resumed, check_values, run_of, tasks_of

# ---- sections of --help --------------------------------------------------------------------------------------

SECTIONS = ("data", "model", "training", "writing", "sampling", "options", "output", "advanced")
_SECTION_OF = {  # of parameters that do not say it themselves
    name: section
    for section, names in (
        ("data", "text file files first second field columns limit most repeats on_bad_record text_field name pair"),
        ("data", "source target order each window tokens"),
        ("model", "model preset heads layers precision pool normalize features mask keep_tokens"),
        ("writing", "beams n_best length_penalty no_repeat_ngram min_new max_new"),
        ("sampling", "sample temperature top_k top_p"),
        ("output", "out as_json quiet show show_mask stream keep png svg title top every search force dtype to"),
        ("output", "version help"),
        ("advanced", "debug seed"),
    )
    for name in names.split()
}


class Command(TyperCommand):
    """A command whose --help has sections."""

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        return [piece.upper() for piece in super().collect_usage_pieces(ctx)]

    def format_options(self, ctx: Any, formatter: Any) -> None:
        write_sections(self, ctx, formatter)


def write_sections(command: Any, ctx: Any, formatter: Any) -> None:
    found = sections(command, ctx)
    for section, shown in found.items():
        with formatter.section(section.capitalize()):
            rows = [(one.words, f"{one.help}  [default: {one.default}]" if one.default else one.help) for one in shown]
            formatter.write_dl(rows, col_max=28)


@dataclass(frozen=True)
class Shown:
    """A parameter as --help and the docs show it."""

    words: str  # --out, -o FOLDER
    help: str
    default: str


def sections(command: Any, ctx: Any) -> dict[str, list[Shown]]:
    """The parameters of a command by section."""
    found: dict[str, list[Shown]] = {name: [] for name in ("arguments", *SECTIONS)}
    for param in command.get_params(ctx):
        if getattr(param, "hidden", False):
            continue
        argument = param.param_type_name == "argument"
        section = "arguments" if argument else param.rich_help_panel or _SECTION_OF.get(param.name, "options")
        found[section].append(_shown(param, ctx))
    return {section: shown for section, shown in found.items() if shown}


def _shown(param: Any, ctx: Any) -> Shown:
    words, help = param.get_help_record(ctx)
    if isinstance(param.show_default, str):  # made from a declaration
        help, default = param.help or "", param.show_default
    else:
        help = re.sub(r"\s*\[[^\]:;]*x[<>=][^\]]*\]|; [^\];]*x[<>=][^\]]*(?=\])", "", help)  # limits, such as x>=1
        matched = re.search(r"\s*\[default: ([^\]]*)\]", help)
        help, default = (help.replace(matched[0], ""), matched[1]) if matched else (help, "")
    if param.param_type_name == "argument":
        words = f"{param.name.upper()}{'...' if param.nargs == -1 else ''}"
    elif getattr(param, "secondary_opts", None):
        words = f"--[no-]{param.opts[0].removeprefix('--')}"
    return Shown(words.replace(" range>", ">"), " ".join(help.split()), default)


# ---- commands that train -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Request:
    """What a command that trains was asked: the values of its plan that were given, and how to go about it."""

    given: dict[str, Any]
    flags: frozenset[str]  # those of `given` that are flags; the others are of the file `config`
    config: str
    out: Path
    resume: bool
    quiet: bool
    json: bool
    shard: bool


class Training:
    """A command that trains: its command line is made from the options of its tasks."""

    def __init__(self, name: str, run: Callable[[Request], None]):
        self.name, self.run = name, run

    def function(self, argv: Sequence[str] = ()) -> Callable[..., None]:
        """The command for typer. If the words name a task and --help, only what that task has is there."""
        tasks = tasks_shown(self.name, _task_named(argv), only=bool({"--help", "-h"} & set(argv)))
        entries = [*_own(self.name), *merged([run_of(self.name, task) for task in tasks])]

        def command(**flags: Any) -> None:
            self.run(_request(self.name, flags))

        parameters = [*_arguments(entries), *_flags(entries)]
        command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        command.__annotations__ = {one.name: one.annotation for one in parameters}
        command.__doc__ = self.run.__doc__
        return command


def _task_named(argv: Sequence[str]) -> str | None:
    """The task that the words of a command line name, or the --config file that they name."""
    named = {}
    for flag in ("--task", "--config"):
        for number, word in enumerate(argv):
            if word.startswith(f"{flag}="):
                named[flag] = word.partition("=")[2]
            elif word == flag and number + 1 < len(argv):
                named[flag] = argv[number + 1]
    if "--task" not in named and "--config" in named:
        from allmask.runs.options import read_yaml

        try:
            return str(read_yaml(Path(named["--config"])).get("task"))
        except AllmaskError:
            return None  # said again when the command runs
    return named.get("--task")


def tasks_shown(command: str, task: str | None, only: bool) -> list[str]:
    """The tasks whose options a command line has: all of ours, and one of another package if it is named."""
    known = task in tasks_of(command) if task and command in TASKS_OF else False
    if task and known and only:
        return [task]
    ours = list(TASKS_OF[command])
    return [*ours, task] if task and known and task not in ours else ours


@dataclass(frozen=True)
class Merged:
    """An option that one task or several have, as a command shows it."""

    name: str
    type: Any
    option: Option
    help: str
    default: str


def merged(runs: Sequence[Run]) -> list[Merged]:
    """The options of all runs; where some have another help text or default, or none, it says which."""
    found: dict[str, dict[str, Entry]] = {}
    for run in runs:
        for entry in run.entries():
            found.setdefault(entry.name, {})[run.task] = entry
    return [_merged(name, entries, [run.task for run in runs]) for name, entries in found.items()]


def _merged(name: str, entries: Mapping[str, Entry], tasks: Sequence[str]) -> Merged:
    first = next(iter(entries.values()))
    helps = _by_value({task: entry.option.help for task, entry in entries.items()})
    texts = [
        (_uncapitalised(text) if len(helps) > 1 or len(whose) < len(tasks) else text, whose)
        for text, whose in ((_detailed(help, whose, entries, tasks), whose) for help, whose in helps.items())
    ]
    help = " ".join(text if len(whose) == len(tasks) else f"{_whose(whose, tasks)}: {text}" for text, whose in texts)
    usual, *others = _by_value({task: entry.default for task, entry in entries.items()}).items()
    defaults = [usual[0], *(f"{_whose(whose, tasks)}: {default}" for default, whose in others)]
    choices = dict.fromkeys(choice for entry in entries.values() for choice in entry.option.choices)
    option = replace(first.option, choices=tuple(choices))
    return Merged(name, first.type, option, help, "; ".join(filter(None, defaults)))


def _detailed(help: str, whose: Sequence[str], entries: Mapping[str, Entry], tasks: Sequence[str]) -> str:
    """A help text, and what is special to each of the tasks that have it."""
    details = _by_value({task: entries[task].detail for task in whose if entries[task].detail})
    said = [text if owners == whose else f"{_whose(owners, tasks)}: {text}" for text, owners in details.items()]
    return f"{help} {'; '.join(said)}." if said else re.sub(":$", ".", help)


def _uncapitalised(text: str) -> str:
    return text if text[:2].isupper() else text[:1].lower() + text[1:]


def _by_value(named: Mapping[str, str]) -> dict[str, list[str]]:
    """Names by what they have, in the order of the first ones."""
    found: dict[str, list[str]] = {}
    for name, value in named.items():
        found.setdefault(value, []).append(name)
    return found


def _whose(having: Iterable[str], tasks: Sequence[str]) -> str:
    having = list(having)
    texts = [task for task in tasks if task not in GUESTS]
    return "texts" if len(texts) < len(tasks) and having == texts else ", ".join(having)


def _own(command: str) -> list[Merged]:
    """The options of the command itself, and the task."""
    found, hints = [], get_type_hints(CommandOptions)
    if command != "pretrain":
        help = f"What to learn: {', '.join(TASKS_OF[command])}, or {TASKS.of_packages()}."
        found = [Merged("task", str, Option(help, "data", metavar="TASK"), help, TASKS_OF[command][0])]
    for entry in fields(CommandOptions):
        option = described(entry)
        if not option.commands or command in option.commands:
            found.append(Merged(entry.name, hints[entry.name], option, option.help, ""))
    return found


def _arguments(entries: Iterable[Merged]) -> Iterable[inspect.Parameter]:
    for entry in entries:
        if entry.option.argument and entry.option.flag == "":
            yield _made(entry.name, Annotated[str | None, typer.Argument(help=entry.help, show_default=False)])
        elif entry.option.argument:  # as the shell expands --data *.txt
            help = f"More of --{entry.name}, as in --{entry.name} corpus/*.txt"
            yield _made("files", Annotated[list[str] | None, typer.Argument(help=help, show_default=False)])


def _flags(entries: Iterable[Merged]) -> Iterable[inspect.Parameter]:
    for entry in entries:
        kind, option, dashed = _flag_type(entry.type), entry.option, entry.name.replace("_", "-")
        if option.flag == "" or kind is None:
            continue
        words = option.flag.split() if option.flag else [f"--{dashed}/--no-{dashed}" if kind is bool else f"--{dashed}"]
        info = typer.Option(
            *words, help=entry.help, show_default=entry.default or False, rich_help_panel=option.group,
            metavar=option.metavar or "|".join(option.choices) or None,
        )  # fmt: skip
        yield _made(entry.name, Annotated[kind | None, info])


def _made(name: str, annotation: Any) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)


def _flag_type(kind: Any) -> Any | None:
    """The type of a flag; None where the command line has no way to say it."""
    if get_origin(kind) in (Union, UnionType):
        kind = next(one for one in get_args(kind) if one is not type(None))
    if get_origin(kind) is tuple:
        items = get_args(kind)
        return list[items[0]] if items[-1] is Ellipsis else kind
    return kind if kind in (bool, int, float, str) else None


def _request(command: str, flags: dict[str, Any]) -> Request:
    """What was given, and checked as far as that is quick: before torch is imported."""
    flags = {name: value for name, value in flags.items() if value is not None and value != []}
    own = {entry.name: flags.pop(entry.name, None) for entry in fields(CommandOptions)}
    if "files" in flags:
        flags["data"] = [*flags.get("data", ()), *flags.pop("files")]
    given = {name: list(value) if isinstance(value, tuple) else value for name, value in flags.items()}
    if own["config"] is not None:
        from allmask.runs.options import read_yaml

        values = read_yaml(Path(own["config"]))  # perhaps of a run, which knows the bytes of its data besides
        given = {name: value for name, value in values.items() if name != "checksums"} | given
    if own["out"] is None:
        raise UsageError("no place for the run was named", "name a new folder with --out")
    out, resume = Path(own["out"]), bool(own["resume"])
    if "momentum" in flags and not resume and given.get("optimizer") != "sgd":
        raise UsageError("--momentum is for --optimizer sgd", "leave it out, or add that")
    asked = Request(
        given, frozenset(flags), own["config"] or "--config", out, resume, bool(own["quiet"]), bool(own["json"]),
        bool(own["shard"]),
    )  # fmt: skip
    if "WORLD_SIZE" in os.environ:  # of many processes, one speaks for all; see allmask/cli/_run.py
        return asked
    if resume:
        check_resumed(command, out, given)
    else:
        check_values(command, given, asked.config, asked.flags)
    return asked
