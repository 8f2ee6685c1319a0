"""The `allmask` command: finds the command module, runs it, and turns errors into messages and exit codes.

A command module `allmask/cli/<name>.py` defines `command` (a function with typer annotations, a `typer.Typer` with
subcommands, or a `Training`) and `EXAMPLES`, the last lines of its `--help`. Only a module named in the arguments is
imported.
"""

from __future__ import annotations

import io
import os
import sys
import traceback
from importlib import import_module
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from allmask import __version__
from allmask.cli import examples, hush
from allmask.cli._options import Command, hushing
from allmask.cli._program import as_called
from allmask.cli._run import Training
from allmask.errors import AllmaskError, DataError, ResourceError, UsageError, out_of_memory
from allmask.files import closest, disk_problem
from allmask.terminal import paint

COMMANDS = {  # name -> module, one line of help
    "demo": ("allmask.cli.demo", "One file of weights under four masks; then it learns titles."),
    "check": ("allmask.cli.check", "Look at a file of records before training on it."),
    "finetune": ("allmask.cli.finetune", "Fine-tune a pretrained model for a task."),
    "train": ("allmask.cli.train", "Train a translator, an image classifier or a GAN from scratch."),
    "pretrain": ("allmask.cli.pretrain", "Train a model on plain text, by one or more of nine objectives."),
    "generate": ("allmask.cli.generate", "Write a title or a translation, or continue a prompt."),
    "fill": ("allmask.cli.fill", "Predict the tokens behind [MASK]."),
    "predict": ("allmask.cli.predict", "Apply a fine-tuned model to each record of a file."),
    "evaluate": ("allmask.cli.evaluate", "Score a fine-tuned model on held-out records."),
    "embed": ("allmask.cli.embed", "Turn texts into vectors, or search by similarity."),
    "serve": ("allmask.cli.serve", "Answer requests over HTTP with one or several models."),
    "drift": ("allmask.cli.drift", "Test whether two files come from one distribution."),
    "mask": ("allmask.cli.mask", "Draw an attention mask and prove what it lets through."),
    "audit": ("allmask.cli.audit", "Measure which outputs of a model depend on which inputs."),
    "attention": ("allmask.cli.attention", "Show which token looks at which, per layer and head."),
    "play": ("allmask.cli.play", "A page where masks are drawn, proven, and tried with real weights."),
    "claims": ("allmask.cli.claims", "Run claims of the literature, and report whether they hold."),
    "inspect": ("allmask.cli.inspect", "Show a model's parameters, shapes and signal per layer."),
    "tokenizer": ("allmask.cli.tokenizer", "Train a tokenizer, or show how one splits a text."),
    "average": ("allmask.cli.average", "Average the last checkpoints of a run into a model."),
    "convert": ("allmask.cli.convert", "Write a model as a folder that other libraries load."),
    "verify": ("allmask.cli.verify", "Check a run or a model folder against its checksums."),
    "doctor": ("allmask.cli.doctor", "Show what this machine has, and test that allmask works on it."),
}

GROUPS = {  # of commands, in the order of --help
    "Start here": "demo generate fill embed",
    "Train": "check finetune train pretrain",
    "Use and measure": "predict evaluate serve drift",
    "Masks": "mask audit attention play claims",
    "Models and files": "inspect convert average verify doctor tokenizer",
}

EXAMPLES = """
    allmask mask prefix --source 你想吃啥 --target 白切鸡
    allmask inspect allmask-en
    allmask COMMAND --help
"""


_UNSET = {"help": False, "install_completion": False, "show_completion": False}
_COMPLETE = "_ALLMASK_COMPLETE"  # set by a shell that wants to complete a command line


class Group(TyperGroup):
    """All commands; --help lists them in groups, one line each."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        width = max(map(len, self.commands))
        grouped = {name for names in GROUPS.values() for name in names.split()}
        others = " ".join(name for name in self.commands if name not in grouped)
        for group, names in {**GROUPS, "Commands": others}.items():
            rows = [name for name in names.split() if name in self.commands]
            if rows:
                with formatter.section(paint(group, "bold", sys.stdout)):
                    for name in rows:
                        short_help = self.commands[name].get_short_help_str(1000)
                        formatter.write(f"{'':{formatter.current_indent}}{name:<{width}}  {short_help}\n")


def main(argv: list[str] | None = None) -> int:
    """Run one command line and return its exit code; allmask/errors.py lists the codes."""
    argv, debug = _take_debug(sys.argv[1:] if argv is None else list(argv))
    hush(False)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # escape characters that the terminal's encoding lacks
            stream.reconfigure(errors="backslashreplace")
    try:
        result = built(argv).main(argv or ["--help"], prog_name="allmask", standalone_mode=False)
        sys.stdout.flush()  # here, so that a closed pipe is noticed while it can still be handled
        return result if isinstance(result, int) else 0
    except SystemExit as exit:
        return exit.code if isinstance(exit.code, int) else 1
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # the reader of stdout closed it, as `head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes stdout again at exit
        return 1
    except BaseException as error:  # not only Exception: a panic in the Rust tokenizers is a BaseException
        return _report(error, debug)


def _take_debug(argv: list[str]) -> tuple[list[str], bool]:
    """Remove `--debug`, wherever it is before `--`: users add it to the end of a command line that has just failed."""
    end = argv.index("--") if "--" in argv else len(argv)
    rest = [word for word in argv[:end] if word != "--debug"] + argv[end:]
    asked = len(rest) < len(argv) or os.environ.get("ALLMASK_DEBUG", "0") not in ("", "0")
    return rest, asked


def built(argv: list[str]) -> Any:
    """Return all commands: those named in `argv` imported, the others with their name and help text only."""
    completing = _COMPLETE in os.environ
    if completing:  # the words are in the environment
        from allmask.cli._completion import add_names, words_typed

        argv = words_typed()
    app = typer.Typer(
        cls=Group,
        rich_markup_mode=None,  # plain help: importing rich would double the time
        context_settings={
            "help_option_names": ["-h", "--help"],
            "max_content_width": 110,
            # With defaults for these flags, typer does not import pydantic to parse them: half of the time.
            "default_map": {**_UNSET, **{name: {"help": False} for name in COMMANDS}},
        },
        help="One Transformer, every mask: the attention mask is the program.",
        epilog=examples(EXAMPLES),
    )
    app.callback()(_global_options)
    for name, (module, help) in COMMANDS.items():
        if name in argv:
            _register(app, name, module, help, argv)
        else:
            app.command(name, help=help)(_not_imported)
    made: Any = typer.main.get_command(app)
    if completing:
        for name in filter(made.commands.__contains__, argv):
            add_names(made.commands[name])
    return made


def _register(app: typer.Typer, name: str, module_name: str, short_help: str, argv: list[str]) -> None:
    module = import_module(module_name)
    epilog = examples(module.EXAMPLES)
    if isinstance(module.command, typer.Typer):
        texts = {"help": module.__doc__, "short_help": short_help, "epilog": epilog}
        for subcommand in module.command.registered_commands:
            subcommand.cls = Command
            subcommand.callback = hushing(subcommand.callback)
        app.add_typer(module.command, name=name, no_args_is_help=False, **texts)  # without a subcommand: an error
    else:
        made = module.command.function(argv) if isinstance(module.command, Training) else module.command
        app.command(name, cls=Command, short_help=short_help, epilog=epilog)(hushing(made))


def _not_imported() -> None:
    """A command that the arguments do not name; `--help` lists it, and "did you mean" knows it."""


def _show_version(asked: bool) -> None:
    if asked:
        print(f"allmask {__version__}")
        raise typer.Exit()


def _global_options(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version and stop.")
    ] = False,
    debug: Annotated[
        bool, typer.Option("--debug", help="Show the traceback of an error (also ALLMASK_DEBUG=1).")
    ] = False,
) -> None:
    """Declare both for `--help`; they are handled before this runs."""


def _report(error: BaseException, debug: bool) -> int:
    if debug:
        traceback.print_exception(error)
    known = _as_our_error(error)
    print(f"{paint(f'error[{known.kind}]:', 'red', sys.stderr)} {known.message}", file=sys.stderr)
    for line in as_called(known.hint or "").splitlines():
        print(f"  {paint(line, 'dim', sys.stderr)}", file=sys.stderr)
    return known.exit_code


def _as_our_error(error: BaseException) -> AllmaskError:
    if isinstance(error, AllmaskError):
        return error
    if isinstance(error, typer.TyperException):
        return _usage_error(error)
    if isinstance(error, FileNotFoundError) and error.filename:
        return DataError(f"{error.filename}: no such file or folder")
    if isinstance(error, OSError) and "temporary directory" in str(error):  # Python's words and Matplotlib's
        hint = "name a folder: TMPDIR=FOLDER; in a container that is read-only, add --tmpfs /tmp"
        return ResourceError("there is no folder to which temporary files can be written", hint)
    wanted = out_of_memory(error)
    if wanted is not None:
        return ResourceError(f"out of memory{wanted}", "close other programs, or ask for less at a time")
    reason = disk_problem(error)
    if reason is not None:
        where = f"{error.filename}: " if isinstance(error, OSError) and error.filename else ""
        return ResourceError(f"{where}cannot be written or read: {reason}", "free some space, or use another disk")
    if isinstance(error, OSError) and error.filename:
        return ResourceError(f"{error.filename}: {error.strerror}")
    summary = " ".join(f"{type(error).__name__}: {error}".split())
    return AllmaskError(summary, "run with --debug for the traceback; please report")


def _usage_error(error: typer.TyperException) -> UsageError:
    known = getattr(error, "possibilities", None) or ()  # for a mistyped option; dashes, which all have, do not count
    bare = closest(getattr(error, "option_name", "").lstrip("-"), [name.lstrip("-") for name in known])
    close = next((name for name in known if name.lstrip("-") == bare), None)
    message = error.message if known else error.format_message()
    message = f"{message}. Did you mean {close}?" if close else message
    message = message.replace("Value error, ", "")  # pydantic's prefix
    context = getattr(error, "ctx", None)
    hint = f"see {context.command_path} --help" if context else "add --help to see what is expected"
    return UsageError(message, hint)
