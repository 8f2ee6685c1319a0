"""`allmask demo`: the main job from end to end, offline, in minutes."""

from __future__ import annotations

import shlex
import shutil
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from allmask.cli import emit, listen, note

EXAMPLES = """
    allmask demo
    allmask demo --minutes 2 --out demo-short
    allmask demo --fast --json
"""


def command(
    out: Annotated[
        Path, typer.Option("--out", "-o", help="The run's folder; an earlier demo there is replaced.")
    ] = Path("demo-run"),
    minutes: Annotated[float, typer.Option(min=0.5, max=600, help="How long it may take, about.")] = 5.0,
    fast: Annotated[
        bool, typer.Option("--fast", help="All the steps with very little of each: under a minute.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON; the rest goes to stderr.")] = False,
) -> None:
    """Turn a BERT into a writer while you watch: the mask, the training, the evaluation, a model of your own.

    The texts are docstrings of this machine's Python files; the BERT is the bundled MiniLM. Nothing is downloaded.
    """
    from allmask.demo.run import FAST, FULL, run_demo

    listen()
    result = run_demo(out, minutes, FAST if fast else FULL, note if as_json else _tell)
    emit(as_json, result, _next(result, out))


def _tell(text: str) -> None:
    print(text, flush=True)  # at once: progress goes to stderr in between


def _next(result: dict[str, Any], out: Path) -> str:
    return "\n".join(["", "Go on with:", *(f"  {shlex.join(words)}" for words in next_commands(result["final"], out))])


def next_commands(final: str, out: Path) -> list[list[str]]:
    """Commands to try with what a demo has left, each of which runs as it is printed."""
    data = {name: str(out / "data" / f"{name}.jsonl") for name in ("train", "dev", "test")}
    text = "The file is read line by line, and bad lines are skipped."
    commands = [
        ["generate", final, "--text", text, "--beams", "4"],
        ["evaluate", final, data["test"]],
        ["finetune", "minilm", "--data", data["train"], "--eval", data["dev"], "--out", f"{out}-finetuned"],
        ["inspect", final],
    ]
    return [[*program(), *words] for words in commands]


def program() -> list[str]:
    """How this command line is called here: by its name, if that is found, or as it was started."""
    if shutil.which("allmask"):
        return ["allmask"]
    started = Path(sys.argv[0])
    return [str(started)] if started.name == "allmask" and started.is_file() else [sys.executable, "-m", "allmask"]
