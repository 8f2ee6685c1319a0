"""`allmask average`: the mean of the last checkpoints of a run, as a model folder."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from allmask.cli import emit, listen

EXAMPLES = """
    allmask average runs/de-en --out models/de-en
    allmask average runs/de-en --last 3 --out models/de-en
    allmask evaluate models/de-en test.jsonl --beams 5
"""


def command(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run, finished or not.")],
    out: Annotated[Path, typer.Option("--out", "-o", help="The model folder to write: a new one.")],
    last: Annotated[
        int | None, typer.Option(min=1, help="How many checkpoints, from the last one. [default: up to 5]")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    """Write a model whose weights are the mean of those of the last checkpoints of RUN, often better than any of them.

    Every byte that is read is checked. A run keeps two checkpoints and the best one; --keep of the command that trains
    keeps more.
    """
    listen()
    from allmask.runs.average import mean_model
    from allmask.runs.folder import expect_free, save_model

    expect_free(out)
    model, task, steps = mean_model(run, last)
    save_model(model, task, out)
    data = {"model": str(out), "run": str(run), "steps": steps}
    emit(as_json, data, f"{out}: the mean of steps {', '.join(map(str, steps))}")
