"""The demo: one file of weights under four masks, which then learns from the Python files on this machine."""

from __future__ import annotations

import os
from pathlib import Path

from allmask.errors import ResourceError

RESULT = "result.json"


def expect_replaceable(out: Path) -> None:
    """Refuse a folder that is not a finished demo, or cannot be written, before any work."""
    if out.exists() and not (out / RESULT).is_file() and (not out.is_dir() or any(out.iterdir())):
        raise ResourceError(f"{out}: already there, and not a finished demo", "name another folder with --out")
    above = next(folder for folder in (out.absolute(), *out.absolute().parents) if folder.is_dir())
    if not os.access(above, os.W_OK | os.X_OK):
        raise ResourceError(f"{out}: cannot write in {above}", "name another folder with --out")
