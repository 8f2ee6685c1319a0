"""`allmask verify`: are a run's checkpoints, models and tokens, byte for byte, what was written?"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from allmask.cli import emit
from allmask.errors import CheckpointError, DataError

EXAMPLES = """
    allmask verify runs/title
    allmask verify runs/title/final --json
"""


def command(
    folder: Annotated[Path, typer.Argument(help="A run, or one of its parts: a checkpoint, a model, tokens.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> int:
    """Compare every file with the SHA-256 written down when it was saved.

    The exit code is 0 when all are whole and 4 when one is damaged or missing.
    """
    rows: list[dict[str, Any]] = [
        {"folder": str(found), "problem": _problem(found), "bytes": _size(found)} for found in _signed(folder)
    ]
    emit(as_json, rows, _table(rows))
    return CheckpointError.exit_code if any(row["problem"] for row in rows) else 0


def _signed(folder: Path) -> list[Path]:
    """The folders to check: this one, or those of a run in the order in which they were made."""
    from allmask.data.corpus import META
    from allmask.training.checkpoint import MANIFEST, checkpoints

    if not folder.is_dir():
        raise CheckpointError(f"{folder}: no such folder", "name a run, a checkpoint or a model folder")
    if (folder / MANIFEST).is_file() or (folder / META).is_file():
        return [folder]
    tokens = [folder / name for name in ("corpus", "corpus-eval")]
    parts = [*tokens, folder / "start", *reversed(checkpoints(folder)), folder / "final"]
    found = [part for part in parts if part.is_dir()]
    if not found:
        raise CheckpointError(f"{folder}: no {MANIFEST}, so there is nothing to compare with", "name a run's folder")
    return found


def _problem(folder: Path) -> str | None:
    """What is wrong with a folder; a store of tokens has checksums of its own kind."""
    from allmask.data.corpus import META, Corpus
    from allmask.training.checkpoint import verify

    if not (folder / META).is_file():
        return verify(folder)
    try:
        Corpus.open(folder)
    except DataError as error:
        return error.message
    return None


def _size(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.iterdir() if file.is_file())


def _table(rows: list[dict[str, Any]]) -> str:
    width = max(len(row["folder"]) for row in rows)
    return "\n".join(
        f"{row['folder']:<{width}}  {row['bytes'] / 1e6:9.1f} MB  {row['problem'] or 'whole'}" for row in rows
    )
