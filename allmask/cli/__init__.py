"""The command line: one file a command, and the few things all commands share.

Results go to stdout, everything else to stderr, so `allmask … --json | jq` always works. Command modules import
torch (and whatever imports it) inside their functions: `--help` must answer at once.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from typing import Any


def emit(as_json: bool, data: Any, text: str) -> None:
    """Print one result on stdout: `data` as JSON when the user asked for it, else `text` for people."""
    print(json.dumps(data, ensure_ascii=False, allow_nan=False, indent=2) if as_json else text)


def note(message: str) -> None:
    """Say something that is not a result: progress, a remark, where a file went."""
    print(message, file=sys.stderr)


def listen(quiet: bool = False) -> None:
    """Show what the library logs as plain lines among the notes: all of it, or warnings only."""
    import logging

    class Notes(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            note(self.format(record))

    logger = logging.getLogger("allmask")
    logger.handlers = [Notes()]
    logger.setLevel(logging.WARNING if quiet else logging.INFO)


def tell_skipped(skipped: Mapping[str, int]) -> None:
    """Records that were left out, by reason."""
    if skipped:
        note("skipped records: " + ", ".join(f"{count:,} × {reason}" for reason, count in skipped.items()))


def examples(text: str) -> str:
    """The closing part of a `--help`, kept line by line (`\\b` tells the help formatter not to rewrap)."""
    lines = [line.strip() for line in text.strip().splitlines()]
    return "\b\nExamples:\n" + "\n".join(f"  {line}" for line in lines if line)
