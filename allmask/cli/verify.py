"""`allmask verify`: compare the files of a run or a model folder with the checksums written when they were saved."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from typer import Argument

from allmask.checkpoints.sources import BUNDLED, resolve
from allmask.cli import AsJson, emit
from allmask.errors import CheckpointError, DataError
from allmask.files import MANIFEST, META, beginning_problem, read_json, verify
from allmask.options import CORPORA
from allmask.runs.options import CONFIG, saved_values

EXAMPLES = """
    allmask verify runs/title
    allmask verify runs/title/final --json
    allmask verify allmask-en
"""


def command(
    folder: Annotated[
        str,
        Argument(
            metavar="FOLDER",
            help="A run, or a part of one: a checkpoint, a model folder, a tokenized corpus; or allmask-en.",
        ),
    ],
    as_json: AsJson = False,
) -> int:
    """Compare every file with the SHA-256 written when it was saved.

    The exit code is 0 if all files are intact and 4 if one is damaged or missing.
    """
    path = Path(folder).expanduser()
    if not path.is_dir() and folder in BUNDLED:
        path = resolve(folder)
    if not path.is_dir():
        raise CheckpointError(f"{folder}: no such folder", "name a run, a checkpoint or a model folder")
    rows: list[dict[str, Any]] = [
        {
            "folder": str(part),
            "problem": _problem(part),
            "bytes": sum(file.stat().st_size for file in part.iterdir() if file.is_file()),
        }
        for part in _parts(path)
    ]
    rows += _metrics(path)
    width = max(len(row["folder"]) for row in rows)
    lines = (f"{row['folder']:<{width}}  {row['bytes'] / 1e6:9.1f} MB  {row['problem'] or 'intact'}" for row in rows)
    emit(as_json, rows, "\n".join(lines))
    return CheckpointError.exit_code if any(row["problem"] for row in rows) else 0


def _metrics(run: Path) -> list[dict[str, Any]]:
    """Return the row of metrics.jsonl, compared with the newest checkpoint that is whole; none without one."""
    for part in sorted((run / "checkpoints").glob("step-*"), reverse=True):
        if verify(part) is None:
            seal = read_json(part / "state.json").get("metrics")
            if seal is None:
                break
            file = run / "metrics.jsonl"
            size = file.stat().st_size if file.is_file() else 0
            return [{"folder": str(file), "problem": beginning_problem(file, seal), "bytes": size}]
    return []


def _parts(folder: Path) -> list[Path]:
    """Return the folders to check: this one, or those of a run in the order in which they were written."""
    if (folder / MANIFEST).is_file() or (folder / META).is_file():
        return [folder]
    parts = [folder / name for name in (*CORPORA, "start")]
    parts += [*sorted((folder / "checkpoints").glob("step-*")), folder / "final"]
    if (folder / CONFIG).is_file():
        saved_values(folder)  # refuses a config.yaml that is damaged
    found = [part for part in parts if part.is_dir()]
    if not found:
        raise CheckpointError(f"{folder}: no {MANIFEST}, so there is nothing to compare with", "name a run's folder")
    return found


def _problem(folder: Path) -> str | None:
    """Return what is wrong with a folder; a tokenized corpus has its own checksums."""
    if not (folder / META).is_file():
        return verify(folder)
    from allmask.data.corpus import Corpus

    try:
        Corpus.open(folder)
    except DataError as error:
        return error.message
    return None
