"""`allmask demo`: teach a BERT to write titles, from data to a saved model, offline, in minutes."""

from __future__ import annotations

import shlex
import shutil
import sys
from pathlib import Path
from typing import Annotated

from typer import Option

from allmask.cli import emit, note, show_log

EXAMPLES = """
    allmask demo
    allmask demo --minutes 2 --out demo-short
    allmask demo --fast --json
"""


def command(
    out: Annotated[
        Path, Option("--out", "-o", help="Folder to write; an earlier demo there is replaced.", metavar="FOLDER")
    ] = Path("demo-run"),
    minutes: Annotated[float, Option(min=0.5, max=600, help="Approximate duration.")] = 5.0,
    fast: Annotated[bool, Option("--fast", help="Run every step on little data: under a minute.")] = False,
    as_json: Annotated[bool, Option("--json", help="Print the result as JSON; the rest goes to stderr.")] = False,
) -> None:
    """Fine-tune a BERT to write titles, and watch: the mask, the training, the evaluation, the saved model.

    The texts are docstrings of the Python files on this machine; the BERT is the bundled MiniLM. Nothing is downloaded.
    """
    from allmask.demo import expect_replaceable

    expect_replaceable(out)
    from allmask.demo.run import FAST, FULL, run_demo

    show_log()
    say = note if as_json else lambda text: print(text, flush=True)  # at once: progress goes to stderr in between
    result = run_demo(out, minutes, FAST if fast else FULL, say)
    lines = (f"  {shlex.join(words)}" for words in next_commands(result["final"], out))
    emit(as_json, result, "\n".join(["", "Go on with:", *lines]))


def next_commands(final: str, out: Path) -> list[list[str]]:
    """Return commands that use the model and the data of a demo; each runs as it is printed."""
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
    """Return the words that call this command line here: its name, if that is found, or as it was started."""
    if shutil.which("allmask"):
        return ["allmask"]
    started = Path(sys.argv[0])
    return [str(started)] if started.name == "allmask" and started.is_file() else [sys.executable, "-m", "allmask"]
