"""Options on the command line: `--help` in sections, and flags made from the fields of dataclasses."""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import Field, dataclass, fields, replace
from functools import wraps
from types import UnionType
from typing import Annotated, Any, Union, get_args, get_origin

import typer
from typer.core import TyperCommand

from allmask.cli import Quiet, hush, show_log
from allmask.options import CommandOptions, Option, as_text, described
from allmask.registry import TASKS
from allmask.runs.options import GUESTS, TASKS_OF, Entry, Run, hints_of
from allmask.terminal import paint

# ---- sections of --help --------------------------------------------------------------------------------------

SECTIONS = {  # section -> the parameters of commands that do not train; the others declare their section themselves
    "data": "text file files first second data eval held_out field columns encoding label_names limit most repeats "
    "on_bad_record text_option text_field name pair special source target order each window tokens last token",
    "model": "model task tasks preset heads layers layer head part precision device encoder features mask keep_tokens "
    "kind size lowercase minimum alphabet",
    "training": "minutes fast",
    "writing": "beams n_best length_penalty end_bias no_repeat_ngram min_new max_new",
    "sampling": "sample temperature top_k top_p",
    "test": "test alpha permutations folds everything full again jobs",
    "server": "page port open_browser",
    "limits": "",
    "options": "",  # all that are not listed here
    "output": "out report as_json quiet show show_mask stream keep png svg animate title top no_special every search "
    "force dtype to predict compare shapes_only int8 version help",
    "advanced": "debug seed",
}


class Command(TyperCommand):
    """A command whose --help has sections."""

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        return [re.sub(r"[{}]", "", piece).upper() for piece in super().collect_usage_pieces(ctx)]

    def format_options(self, ctx: Any, formatter: Any) -> None:
        for section, rows in sections(self, ctx).items():
            with formatter.section(paint(section.capitalize(), "bold", sys.stdout)):
                formatter.write_dl([(row.words, row.with_default) for row in rows], col_max=28)


@dataclass(frozen=True)
class HelpRow:
    """A parameter as --help and docs/options.md show it."""

    words: str  # --out, -o FOLDER
    help: str
    default: str  # "required" if a value must be given

    @property
    def with_default(self) -> str:
        shown = self.default if self.default == REQUIRED else self.default and f"default: {self.default}"
        return f"{self.help}  [{shown}]" if shown else self.help


REQUIRED = "required"


def sections(command: Any, ctx: Any) -> dict[str, list[HelpRow]]:
    """Return the parameters of a command by section."""
    section_of = {name: section for section, names in SECTIONS.items() for name in names.split()}
    found: dict[str, list[HelpRow]] = {name: [] for name in ("arguments", *SECTIONS)}
    for param in command.get_params(ctx):
        if param.param_type_name == "argument":
            name = (param.metavar or param.name).upper()
            default = param.show_default if isinstance(param.show_default, str) else ""
            row = HelpRow(f"{name}..." if param.nargs == -1 else name, param.help or "", default)
            found["arguments"].append(row)
        else:
            found[param.rich_help_panel or section_of.get(param.name, "options")].append(_help_row(param, ctx))
    return {section: rows for section, rows in found.items() if rows}


def _help_row(option: Any, ctx: Any) -> HelpRow:
    words, _ = option.get_help_record(ctx)
    first = option.opts[0].removeprefix("--")
    if option.secondary_opts == [f"--no-{first}"]:
        words = f"--[no-]{first}"
    words = re.sub(r"<list\[(.*)\]>", r"<\1>...", words).replace(" range>", ">")
    default = option.show_default
    if not isinstance(default, str):  # it is one if the declaration says how to show it
        value = option.get_default(ctx, call=False) if default and not option.required else None
        default = as_text(value if value is not False or option.secondary_opts else None)
    return HelpRow(words, " ".join((option.help or "").split()), REQUIRED if option.required else default)


# ---- flags from fields ---------------------------------------------------------------------------------------


def with_fields(kind: type, *names: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return a decorator that gives a command, instead of its `**…`, a flag for each of these fields of a dataclass.

    The command gets None for a flag that was not given.
    """
    hints, declared = hints_of(kind), {entry.name: entry for entry in fields(kind)}
    options = [_as_declared(declared[name], hints[name]) for name in names]
    return lambda command: declare(command, options)


def declare(command: Callable[..., Any], options: Sequence[Entry]) -> Callable[..., Any]:
    """Replace the `**…` of a function by parameters for these options, which typer reads."""
    annotations = {**dict(_arguments(options)), **dict(_flags(options))}
    *own, rest = inspect.signature(command, eval_str=True).parameters.values()
    added = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)
        for name, annotation in annotations.items()
    ]
    command.__signature__ = inspect.Signature([*own, *added])  # type: ignore[attr-defined]
    del command.__annotations__[rest.name]
    command.__annotations__ |= annotations
    return command


def hushing(command: Any) -> Callable[..., Any]:
    """Return the command with --quiet, which keeps `note` from printing; it is added to those that do not have it."""
    if getattr(command, "is_hushing", False):  # a subcommand, which is registered once and used often
        return command
    signature = inspect.signature(command, eval_str=True)
    declared = "quiet" in signature.parameters

    @wraps(command)
    def run(*args: Any, **given: Any) -> Any:
        hush(bool(given.get("quiet") if declared else given.pop("quiet")))
        show_log(quiet=True)  # warnings, with control characters escaped; a command may ask for more
        return command(*args, **given)

    parameters = list(signature.parameters.values())
    if not declared:
        parameters.append(inspect.Parameter("quiet", inspect.Parameter.KEYWORD_ONLY, default=False, annotation=Quiet))
    run.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {one.name: one.annotation for one in parameters}
    run.is_hushing = True  # type: ignore[attr-defined]
    return run


def merged(runs: Sequence[Run]) -> list[Entry]:
    """Return the options of all runs; help texts and defaults that not all of them share name their tasks."""
    tasks = [run.task for run in runs]
    found: dict[str, dict[str, Entry]] = {}
    for run in runs:
        for entry in run.entries():
            found.setdefault(entry.name, {})[run.task] = entry
    return [_merge(name, entries, tasks) for name, entries in found.items()]


def _merge(name: str, entries: Mapping[str, Entry], tasks: Sequence[str]) -> Entry:
    first = next(iter(entries.values()))
    helps = []
    for text, owners in _by_value({task: entry.option.help for task, entry in entries.items()}).items():
        details = _by_value({task: entries[task].detail for task in owners if entries[task].detail})
        detail = "; ".join(_labelled(text, these, owners, tasks) for text, these in details.items())
        helps.append(_labelled(f"{text} {detail}." if detail else re.sub(":$", ".", text), owners, tasks, tasks))
    usual, *others = _by_value({task: entry.default for task, entry in entries.items()}).items()
    defaults = [usual[0], *(_labelled(default, owners, (), tasks) for default, owners in others)]
    choices = dict.fromkeys(choice for entry in entries.values() for choice in entry.option.choices)
    option = replace(first.option, help=" ".join(helps), choices=tuple(choices))
    return Entry(name, first.type, option, "; ".join(filter(None, defaults)))


def _as_declared(entry: Field[Any], type: Any) -> Entry:
    option = described(entry)
    default = option.shown_default or ("" if entry.default is False else as_text(entry.default))
    return Entry(entry.name, type, option, default)


def _by_value(named: Mapping[str, str]) -> dict[str, list[str]]:
    """Group names by their values."""
    found: dict[str, list[str]] = {}
    for name, value in named.items():
        found.setdefault(value, []).append(name)
    return found


def _labelled(text: str, owners: Sequence[str], everyone: Sequence[str], tasks: Sequence[str]) -> str:
    """Return the text after the names of the tasks it is about, unless it is about everyone."""
    if list(owners) == list(everyone):
        return text
    about_texts = [task for task in tasks if task not in GUESTS]
    names = "texts" if list(owners) == about_texts != list(tasks) else ", ".join(owners)
    return f"{names}: {text if text[:2].isupper() else text[:1].lower() + text[1:]}"


def command_options(command: str) -> list[Entry]:
    """Return the options that are not in config.yaml, and the task."""
    found, hints = [], hints_of(CommandOptions)
    if command != "pretrain":
        help = f"What to learn: {', '.join(TASKS_OF[command])}, or {TASKS.of_packages()}."
        found = [Entry("task", str, Option(help, "data", metavar="TASK"), TASKS_OF[command][0])]
    return found + [_as_declared(entry, hints[entry.name]) for entry in fields(CommandOptions)]


def _arguments(options: Iterable[Entry]) -> Iterator[tuple[str, Any]]:
    """Yield the names and annotations of positional arguments."""
    for entry in options:
        if entry.option.argument and entry.option.flag == "":
            yield (
                entry.name,
                Annotated[str | None, typer.Argument(help=entry.option.help, show_default=entry.default or False)],
            )
        elif entry.option.argument:  # the shell expands --data *.txt to one value and these
            help = f"More files for --{entry.name}, so that --{entry.name} corpus/*.txt works."
            yield "files", Annotated[list[str] | None, typer.Argument(help=help, show_default=False)]


def _flags(options: Iterable[Entry]) -> Iterator[tuple[str, Any]]:
    """Yield the names and annotations of flags."""
    for entry in options:
        kind, option, dashed = _flag_type(entry.type), entry.option, entry.name.replace("_", "-")
        if option.flag == "" or kind is None:
            continue
        words = option.flag.split() if option.flag else [f"--{dashed}/--no-{dashed}" if kind is bool else f"--{dashed}"]
        info = typer.Option(
            *words, help=entry.option.help, show_default=entry.default or False, rich_help_panel=option.group,
            metavar=option.metavar or "|".join(option.choices) or None,
        )  # fmt: skip
        yield entry.name, Annotated[kind | None, info]


def _flag_type(kind: Any) -> Any | None:
    """Return the type of a flag; None if the command line cannot express the type of the field."""
    if get_origin(kind) in (Union, UnionType):
        kind = next(one for one in get_args(kind) if one is not type(None))
    if get_origin(kind) is tuple:
        items = get_args(kind)
        return list[items[0]] if items[-1] is Ellipsis else kind
    return kind if kind in (bool, int, float, str) else None
