"""`allmask fill`: what may stand where a text says [MASK]."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from allmask.cli import listen, ready_lines
from allmask.errors import DataError

if TYPE_CHECKING:
    from allmask.tasks.fill import Filled, Filler

EXAMPLES = """
    allmask fill runs/a/final "北京欢[MASK]你"
    allmask fill bert-base-chinese "白切[MASK]很好[MASK]" --top 3
    allmask fill runs/a/final --json < gaps.txt
"""


def command(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="A model folder or a run, or org/name.")],
    text: Annotated[
        str | None, typer.Argument(metavar="[TEXT]", help="A text with [MASK] in it. Without it, each line of stdin.")
    ] = None,
    top: Annotated[int, typer.Option(min=1, help="How many answers for each [MASK].")] = 5,
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON object a line.")] = False,
) -> None:
    """Show the likeliest tokens for each [MASK] of a text.

    Several gaps are filled independently of each other. An empty line of stdin gives an empty line.
    """
    listen()
    from allmask.pipelines import pipeline

    fill = pipeline("fill", model)
    if text is not None:
        _show(fill(text, top), as_json)
        return
    number = 0
    for lines in ready_lines():
        _expect_gaps(lines, number)
        _fill_lines(fill, lines, top, as_json)
        number += len(lines)


def _expect_gaps(lines: list[str], before: int) -> None:
    for number, line in enumerate(lines, before + 1):
        if line.strip() and "[MASK]" not in line:
            raise DataError(f"stdin:{number}: there is no [MASK]", "write [MASK] where a token is to be guessed")


def _fill_lines(fill: Filler, lines: list[str], top: int, as_json: bool) -> None:
    filled = iter(fill([line for line in lines if line.strip()], top))
    for line in lines:
        if line.strip():
            _show(next(filled), as_json)
        else:
            print(flush=True)


def _show(filled: Filled, as_json: bool) -> None:
    print(json.dumps(asdict(filled), ensure_ascii=False) if as_json else _in_words(filled), flush=True)


def _in_words(filled: Filled) -> str:
    lines = [filled.text]
    for number, answers in enumerate(filled.gaps, 1):
        lines += [f"  [MASK] {number}"] if len(filled.gaps) > 1 else []
        lines += [f"  {answer.probability:7.2%}  {answer.token}" for answer in answers]
    return "\n".join(lines)
