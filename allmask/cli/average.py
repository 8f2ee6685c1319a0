"""`allmask average`: average the last checkpoints of a run into a model."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from allmask.cli import AsJson, emit, show_log
from allmask.errors import CheckpointError
from allmask.runs.options import expect_free

EXAMPLES = """
    allmask average runs/de-en --out models/de-en
    allmask average runs/de-en --last 3 --out models/de-en
    allmask evaluate models/de-en test.jsonl --beams 5
"""


def command(
    run: Annotated[Path, Argument(metavar="RUN", help="The folder of a run, finished or not.")],
    out: Annotated[Path, Option("--out", "-o", help="Model folder to write: a new one.", metavar="FOLDER")],
    last: Annotated[int | None, Option(min=1, help="Number of checkpoints.", show_default="up to 5")] = None,
    as_json: AsJson = False,
) -> None:
    """Write a model with the mean weights of the last checkpoints of RUN; it is often better than each of them.

    The checksums of all files are verified. A run keeps two checkpoints and the best one; to keep more, train with
    --keep.
    """
    show_log()
    if not any((run / "checkpoints").glob("step-*")):
        what = "no run with checkpoints" if run.is_dir() else "no such folder"
        raise CheckpointError(f"{run}: {what}", "name the folder that was the --out of a run")
    expect_free(out)
    from allmask.runs.average import mean_model
    from allmask.runs.folder import save_model

    model, task, steps = mean_model(run, last)
    save_model(model, task, out)
    data = {"model": str(out), "run": str(run), "steps": steps}
    emit(as_json, data, f"{out}: the mean of steps {', '.join(map(str, steps))}")
