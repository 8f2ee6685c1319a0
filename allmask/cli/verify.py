"""`allmask verify`: are a run's checkpoints and models, byte for byte, what was written?"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from allmask.cli import emit
from allmask.errors import CheckpointError

EXAMPLES = """
    allmask verify runs/title
    allmask verify runs/title/final --json
"""


def command(
    folder: Annotated[Path, typer.Argument(help="A run, one of its checkpoints, or a model folder made by finetune.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> int:
    """Compare every file with the SHA-256 written down when it was saved.

    The exit code is 0 when all are whole and 4 when one is damaged or missing.
    """
    from allmask.training.runs import verify

    rows: list[dict[str, Any]] = [
        {"folder": str(found), "problem": verify(found), "bytes": _size(found)} for found in _signed(folder)
    ]
    emit(as_json, rows, _table(rows))
    return CheckpointError.exit_code if any(row["problem"] for row in rows) else 0


def _signed(folder: Path) -> list[Path]:
    """The folders to check: this one, or those of a run in the order in which they were made."""
    from allmask.training.runs import MANIFEST, checkpoints

    if not folder.is_dir():
        raise CheckpointError(f"{folder}: no such folder", "name a run, a checkpoint or a model folder")
    if (folder / MANIFEST).is_file():
        return [folder]
    parts = [folder / "start", *reversed(checkpoints(folder)), folder / "final"]
    found = [part for part in parts if part.is_dir()]
    if not found:
        raise CheckpointError(f"{folder}: no {MANIFEST}, so there is nothing to compare with", "name a run's folder")
    return found


def _size(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.iterdir() if file.is_file())


def _table(rows: list[dict[str, Any]]) -> str:
    width = max(len(row["folder"]) for row in rows)
    return "\n".join(
        f"{row['folder']:<{width}}  {row['bytes'] / 1e6:9.1f} MB  {row['problem'] or 'whole'}" for row in rows
    )
