"""The command line: one file a command, and the few things all commands share.

Results go to stdout, everything else to stderr, so `allmask … --json | jq` always works. Command modules import
torch (and whatever imports it) inside their functions: `--help` must answer at once.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Mapping
from typing import Any

from allmask.errors import DataError


def emit(as_json: bool, data: Any, text: str) -> None:
    """Print one result on stdout: `data` as JSON when the user asked for it, else `text` for people."""
    print(json.dumps(data, ensure_ascii=False, allow_nan=False, indent=2) if as_json else text)


def note(message: str) -> None:
    """Say something that is not a result: progress, a remark, where a file went."""
    print(message, file=sys.stderr)


def many(count: int, thing: str) -> str:
    """1 text, 2,000 texts."""
    return f"{count:,} {thing}" + ("" if count == 1 else "s")


def tell_cut(count: int, limit: int) -> None:
    """Texts that were longer than a model reads."""
    if count:
        note(f"{many(count, 'text')} cut to {limit:,} tokens")


def listen(quiet: bool = False) -> None:
    """Show what the library logs as plain lines among the notes: all of it, or warnings only."""
    import logging

    class Notes(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            note(self.format(record))

    logger = logging.getLogger("allmask")
    logger.handlers = [Notes()]
    logger.propagate = False  # ROUGE's package gives the root a handler of its own, which would say everything again
    logger.setLevel(logging.WARNING if quiet else logging.INFO)


def tell_skipped(skipped: Mapping[str, int]) -> None:
    """Records that were left out, by reason."""
    if skipped:
        note("skipped records: " + ", ".join(f"{count:,} × {reason}" for reason, count in skipped.items()))


def examples(text: str) -> str:
    """The closing part of a `--help`, kept line by line (`\\b` tells the help formatter not to rewrap)."""
    lines = [line.strip() for line in text.strip().splitlines()]
    return "\b\nExamples:\n" + "\n".join(f"  {line}" for line in lines if line)


# ---- lines of stdin --------------------------------------------------------------------------------------------


def ready_lines() -> Iterator[list[str]]:
    """The lines of stdin as they arrive: one at a time from someone who types, many at once from a file."""
    if sys.stdin.isatty():
        note("a text a line, please; Ctrl-D ends")
    number, left = 0, b""
    while chunk := os.read(sys.stdin.fileno(), 1 << 16):
        *whole, left = (left + chunk).split(b"\n")
        yield [_decode(raw, number + place) for place, raw in enumerate(whole, 1)]
        number += len(whole)
    if left:
        yield [_decode(left, number + 1)]


def _decode(raw: bytes, number: int) -> str:
    try:
        return raw.decode("utf-8-sig" if number == 1 else "utf-8").rstrip("\r")
    except UnicodeDecodeError as error:
        raise DataError(
            f"stdin:{number}: not UTF-8 at byte {error.start + 1} of the line", "recode it: iconv"
        ) from None
