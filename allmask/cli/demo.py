"""`allmask demo`: one file of weights under four masks, then learning; or your own text under the four masks."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated, Any, Literal

from typer import Option

from allmask.cli import Device, emit, note, show_log
from allmask.cli._program import program
from allmask.terminal import shortened

EXAMPLES = """
    allmask demo
    allmask demo --text README.md
    allmask demo --minutes 2 --out demo-short
    allmask demo --fast --json
"""


def command(
    text: Annotated[
        Path | None,
        Option(help="Your own text, plain or Markdown: show in seconds what the four masks do.", metavar="FILE"),
    ] = None,
    out: Annotated[
        Path,
        Option(
            "--out", "-o", metavar="FOLDER",
            help="Folder to write; an earlier demo there is replaced. With --text, the demo whose model writes, too.",
        ),
    ] = Path("demo-run"),
    minutes: Annotated[float, Option(min=0.5, max=600, help="Approximate duration.")] = 3.5,
    precision: Annotated[
        Literal["auto", "fp32", "bf16"], Option(help="Arithmetic of learning; auto: bf16 if the CPU has it.")
    ] = "auto",
    device: Device = "auto",
    fast: Annotated[bool, Option("--fast", help="Run every step on little data, in seconds.")] = False,
    as_json: Annotated[bool, Option("--json", help="Print the result as JSON; the rest goes to stderr.")] = False,
) -> None:  # fmt: skip
    """See what a mask decides: one file of weights fills, continues, writes titles and compares, by its mask alone.

    Then it learns to write titles for the docstrings of the Python files on this machine, and is judged on files that
    it has not seen. Nothing is downloaded.
    """
    say = note if as_json else lambda line: print(line, flush=True)  # at once: progress goes to stderr in between
    if text is not None:
        from allmask.demo.texts import read_paragraphs

        parts = read_paragraphs(text)  # refuses a bad file without torch
        show_log(quiet=True)
        from allmask.demo.run import show_text

        result = show_text(parts, out, say, device)
        _finish(as_json, result, commands_for_text(result))
        return
    from allmask.demo import expect_replaceable

    expect_replaceable(out)
    from allmask.demo.run import FAST, FULL, run_demo

    show_log(quiet=True)
    result = run_demo(out, minutes, FAST if fast else FULL, say, precision=precision, device=device)
    _finish(as_json, result, commands_for_demo(result["final"], out))


def _finish(as_json: bool, result: dict[str, Any], commands: list[list[str]]) -> None:
    emit(as_json, result, "\n".join(["", "Go on with:", *(f"  {shlex.join(words)}" for words in commands)]))


def commands_for_demo(final: str, out: Path) -> list[list[str]]:
    """Return commands that use the model and the data of a demo; each runs as it is printed."""
    text = "The lines of the file are parsed one after another. Lines that cannot be parsed are skipped."
    commands = [
        ["demo", "--text", str(out / "texts.txt"), "--out", str(out)],
        ["generate", final, "--text", text, "--beams", "4"],
        ["evaluate", final, str(out / "data" / "test.jsonl"), "--beams", "4"],
        ["audit", "allmask-en", "--mask", "prefix"],
    ]
    return [[*program(), *words] for words in commands]


def commands_for_text(result: dict[str, Any]) -> list[list[str]]:
    """Return commands that do again with a text what was shown; each runs as it is printed."""
    model, text, shown = result["model"], result["text"], {view["name"]: view["result"] for view in result["masks"]}
    beginnings = (shortened(part, 60) for part in result["paragraphs"])
    commands = [
        ["fill", model, shown["fill"][-1]["text"]],
        ["generate", model, "--task", "continue", "--text", shown["continue"]["prompt"], "--sample", "--top-k", "20"],
        ["generate", model, "--text", text, "--beams", "4", "--show-mask"],
        ["embed", model, *(word for part in beginnings for word in ("--text", part)), "--search", text],
    ]
    return [[*program(), *words] for words in commands]
