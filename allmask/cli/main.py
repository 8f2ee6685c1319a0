"""The `allmask` command: finds the command module, runs it, and turns what goes wrong into words and an exit code.

A command module `allmask/cli/<name>.py` defines `command` (a function with typer annotations, or a `typer.Typer` with
subcommands) and `EXAMPLES`, the lines that end its `--help`. Only a module named in the arguments is imported.
"""

from __future__ import annotations

import io
import os
import sys
import traceback
from importlib import import_module
from typing import Annotated, Any

import typer

from allmask import __version__
from allmask.cli import examples
from allmask.cli._options import Command, Training
from allmask.errors import AllmaskError, DataError, ResourceError, UsageError

COMMANDS = {  # name -> module, one line of help
    "demo": ("allmask.cli.demo", "The main job from end to end, offline, in minutes."),
    "finetune": ("allmask.cli.finetune", "Fine-tune a pretrained model for a task."),
    "train": ("allmask.cli.train", "Train a translator, an image classifier or a GAN from scratch."),
    "pretrain": ("allmask.cli.pretrain", "Train a model on plain text: every objective, every mask."),
    "generate": ("allmask.cli.generate", "Write a title or a translation, or continue a prompt."),
    "fill": ("allmask.cli.fill", "Predict the tokens behind [MASK]."),
    "predict": ("allmask.cli.predict", "Apply a fine-tuned model to each record of a file."),
    "evaluate": ("allmask.cli.evaluate", "Score a fine-tuned model on held-out records."),
    "embed": ("allmask.cli.embed", "Embed each text of a file, or search for the nearest ones."),
    "drift": ("allmask.cli.drift", "Test whether two files come from one distribution."),
    "mask": ("allmask.cli.mask", "Draw a mask and prove what it lets through."),
    "audit": ("allmask.cli.audit", "Measure which outputs of a model depend on which inputs."),
    "inspect": ("allmask.cli.inspect", "Show a model's parameters, shapes and signal per layer."),
    "tokenizer": ("allmask.cli.tokenizer", "Train a tokenizer, or show how one splits a text."),
    "average": ("allmask.cli.average", "Average the last checkpoints of a run into a model."),
    "convert": ("allmask.cli.convert", "Write a model as a folder that other libraries load."),
    "verify": ("allmask.cli.verify", "Check a run or a model folder, byte by byte."),
}

EXAMPLES = """
    allmask mask prefix --source 你想吃啥 --target 白切鸡
    allmask inspect minilm
    allmask COMMAND --help
"""


WORDS = {"help_option_names": ["-h", "--help"], "max_content_width": 110}


def main(argv: list[str] | None = None) -> int:
    """Run one command line and return its exit code (see allmask/errors.py for what the codes mean)."""
    argv, debug = _take_debug(sys.argv[1:] if argv is None else list(argv))
    _never_fail_to_print()
    try:
        code = _run(argv or ["--help"])
        sys.stdout.flush()  # here, so that a closed pipe is noticed while it can still be handled
        return code
    except SystemExit as exit:
        return exit.code if isinstance(exit.code, int) else 1
    except (BrokenPipeError, KeyboardInterrupt) as error:
        return _interrupted(error)
    except BaseException as error:  # not only Exception: a panic in the Rust tokenizers is a BaseException
        return _report(error, debug)


def _run(argv: list[str]) -> int:
    result = built(argv).main(argv, prog_name="allmask", standalone_mode=False)
    return result if isinstance(result, int) else 0


def _take_debug(argv: list[str]) -> tuple[list[str], bool]:
    """`--debug` is understood anywhere before `--`: it is added to the end of a line that has just failed."""
    end = argv.index("--") if "--" in argv else len(argv)
    rest = [word for word in argv[:end] if word != "--debug"] + argv[end:]
    asked = len(rest) < len(argv) or os.environ.get("ALLMASK_DEBUG", "0") not in ("", "0")
    return rest, asked


def built(argv: list[str]) -> Any:
    """All commands, those named in `argv` imported, and the others present by name and help only."""
    app = typer.Typer(
        add_completion=False,
        rich_markup_mode=None,  # plain help: rich would double the time it takes to answer
        context_settings={**WORDS, "default_map": _no_help_asked()},
        help="One Transformer, every mask: the attention mask is the program.",
        epilog=examples(EXAMPLES),
    )
    app.callback()(_global_options)
    for name, (module, help) in COMMANDS.items():
        if name in argv:
            _register(app, name, module, help, argv)
        else:
            app.command(name, help=help)(_not_imported)
    return typer.main.get_command(app)


def _no_help_asked() -> dict[str, Any]:
    """With a default, typer need not ask pydantic whether `--help` was typed; importing that takes half the time."""
    return {"help": False, **{name: {"help": False} for name in COMMANDS}}


def _register(app: typer.Typer, name: str, module_name: str, short_help: str, argv: list[str]) -> None:
    module = import_module(module_name)
    epilog = examples(module.EXAMPLES)
    if isinstance(module.command, typer.Typer):
        texts = {"help": module.__doc__, "short_help": short_help, "epilog": epilog}
        for subcommand in module.command.registered_commands:
            subcommand.cls = Command
        app.add_typer(module.command, name=name, no_args_is_help=False, **texts)  # refused without a command
    else:
        made = module.command.function(argv) if isinstance(module.command, Training) else module.command
        app.command(name, cls=Command, short_help=short_help, epilog=epilog)(made)


def _not_imported() -> None:
    """Stands in `--help` and in suggestions for a command that the arguments do not name."""


def _show_version(asked: bool) -> None:
    if asked:
        print(f"allmask {__version__}")
        raise typer.Exit()


def _global_options(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version and stop.")
    ] = False,
    debug: Annotated[
        bool, typer.Option("--debug", help="Show a traceback when something fails (also ALLMASK_DEBUG=1).")
    ] = False,
) -> None:
    """Both are dealt with before this runs; they are declared here so that `--help` tells of them."""


def _report(error: BaseException, debug: bool) -> int:
    if debug:
        traceback.print_exception(error)
    known = _in_our_words(error)
    print(f"error[{known.kind}]: {known.message}", file=sys.stderr)
    for line in (known.hint or "").splitlines():
        print(f"  {line}", file=sys.stderr)
    return known.exit_code


def _in_our_words(error: BaseException) -> AllmaskError:
    if isinstance(error, AllmaskError):
        return error
    if isinstance(error, typer.TyperException):
        return _usage_error(error)
    if isinstance(error, FileNotFoundError) and error.filename:
        return DataError(f"{error.filename}: no such file or folder")
    if isinstance(error, MemoryError):
        return ResourceError("out of memory", "close other programs, or ask for less at a time")
    if isinstance(error, OSError) and error.filename:
        return ResourceError(f"{error.filename}: {error.strerror}")
    summary = " ".join(f"{type(error).__name__}: {error}".split())
    return AllmaskError(summary, "run with --debug for the traceback; please report")


def _usage_error(error: typer.TyperException) -> UsageError:
    close = getattr(error, "possibilities", None)  # of a mistyped option, best first
    message = f"{error.message}. Did you mean {close[0]}?" if close else error.format_message()
    message = message.replace("Value error, ", "")  # what pydantic puts before a refused choice
    context = getattr(error, "ctx", None)
    hint = f"see {context.command_path} --help" if context else "add --help to see what is expected"
    return UsageError(message, hint)


def _interrupted(error: BaseException) -> int:
    """Quietly: whoever closed the pipe or pressed Ctrl-C knows."""
    if isinstance(error, KeyboardInterrupt):
        return 130
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes stdout once more as it ends
    return 1


def _never_fail_to_print() -> None:
    """In a terminal that knows no Chinese, an escaped character is better than a crash."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
