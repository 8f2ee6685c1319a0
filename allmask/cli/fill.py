"""`allmask fill`: predict the tokens behind [MASK]."""

from __future__ import annotations

from dataclasses import asdict
from itertools import chain
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument, Option

from allmask.cli import Device, ModelOrDefault, note_default, show_log, start_up, stdin_batches, to_json
from allmask.cli._options import with_fields
from allmask.errors import DataError, UsageError
from allmask.options import FillOptions
from allmask.terminal import printable

if TYPE_CHECKING:
    from allmask.tasks.fill import Filled

EXAMPLES = """
    allmask fill "北京欢[MASK]你"
    allmask fill runs/a "北京欢[MASK]你"
    allmask fill --text "He comes from [MASK]."
    allmask fill bert-base-chinese "白切[MASK]很好[MASK]" --top 3
    allmask fill runs/a --json < gaps.txt
"""


@with_fields(FillOptions, "top")
def command(
    model: ModelOrDefault = None,
    text: Annotated[
        str | None, Argument(metavar="TEXT", help="A text with [MASK] in it; without it, each line of stdin.")
    ] = None,
    text_option: Annotated[str | None, Option("--text", help="The same as TEXT.", metavar="TEXT")] = None,
    device: Device = "auto",
    as_json: Annotated[bool, Option("--json", help="Print one JSON object per text.")] = False,
    **given: Any,
) -> None:
    """Show the most probable tokens for each [MASK] of a text.

    Several [MASK] are predicted independently of each other. An empty line of stdin gives an empty line. allmask-en and
    allmask-zh guess words that fit; facts, such as the capital of a country, are beyond models of their size.
    """
    top = FillOptions(**{name: value for name, value in given.items() if value is not None}).top
    show_log()
    if text is not None and text_option is not None:
        raise UsageError("two texts were given", "give one of them, or one per line on stdin")
    text = text_option if text is None else text
    if text is None and model is not None and "[MASK]" in model:
        model, text = None, model
    batches = stdin_batches()
    if model is None:
        first = [] if text is not None else next(batches, [])
        model = note_default([text] if text is not None else [record.fields["text"] for record in first])
        batches = chain([first], batches)
    from allmask.registry import USES
    from allmask.tasks.task import ModelFolder

    opened = ModelFolder.open(model, device)  # a missing folder is refused before torch is imported
    with start_up():
        fill = USES["fill"](opened, "auto")
    if text is not None:
        _print(fill(text, top), as_json)
        return
    for records in batches:
        lines = [record.fields["text"] for record in records]
        for record, line in zip(records, lines, strict=True):
            if line.strip() and "[MASK]" not in line:
                raise DataError(f"{record.where}: there is no [MASK]", "write [MASK] where a token is to be predicted")
        filled = iter(fill([line for line in lines if line.strip()], top))
        for line in lines:
            if line.strip():
                _print(next(filled), as_json)
            else:
                print(flush=True)


def _print(filled: Filled, as_json: bool) -> None:
    lines = [filled.text]
    for number, answers in enumerate(filled.gaps, 1):
        lines += [f"  [MASK] {number}"] if len(filled.gaps) > 1 else []
        lines += [f"  {answer.probability:7.2%}  {answer.token}" for answer in answers]
    print(to_json(asdict(filled)) if as_json else printable("\n".join(lines)), flush=True)
