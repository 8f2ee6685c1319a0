"""Colours on a terminal: none in files and pipes, and none if NO_COLOR is set (no-color.org) or TERM is dumb.

Text that comes from files may contain control characters, which could move the cursor, hide what was printed or change
the settings of a terminal. They are printed as escapes: \\x1b[2J.
"""

from __future__ import annotations

import os
import re
import unicodedata
from itertools import accumulate
from typing import IO

CODES = {
    "bold": "1", "dim": "2", "red": "1;31", "green": "32", "yellow": "33", "blue": "34", "cyan": "36",
    "tint 0": "38;5;68", "tint 1": "38;5;173", "tint 2": "38;5;72", "tint 3": "38;5;133", "tint 4": "38;5;179",
    "tint 5": "38;5;74",
}  # fmt: skip


# C0 but for tab and line feed, delete, C1, and the marks that reverse the order of the letters after them
_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")
_OWN = re.compile(rf"(\x1b\[(?:{'|'.join(['0', *CODES.values()])})m)")  # what `paint` writes


def printable(text: str, stream: IO[str] | None = None) -> str:
    """Return the text with its control characters escaped; colours are kept if `stream` shows them."""
    if _CONTROL.search(text) is None:
        return text
    parts = _OWN.split(text) if stream is not None and has_colours(stream) else [text]
    return "".join(
        part if number % 2 else _CONTROL.sub(lambda found: ascii(found[0])[1:-1], part)
        for number, part in enumerate(parts)
    )


def printable_json(text: str) -> str:
    """Return JSON that means the same, with the control characters escaped that `json` does not escape."""
    return re.sub(_CONTROL, lambda found: f"\\u{ord(found[0]):04x}", text)


def text_width(text: str) -> int:
    """The number of terminal columns of the text: two per Chinese character, none for a combining accent."""
    return sum(map(_columns, text))


def _columns(character: str) -> int:
    if unicodedata.category(character) in ("Mn", "Me", "Cf"):
        return 0
    return 2 if unicodedata.east_asian_width(character) in "WF" else 1


def shortened(text: str, limit: int = 100) -> str:
    """Return the text on one line of at most `limit` columns."""
    line = " ".join(text.split())
    ends = list(accumulate(map(_columns, line[: 4 * limit])))
    if not ends or (ends[-1] <= limit and len(ends) == len(line)):
        return line
    return line[: sum(end < limit for end in ends)] + "…"


def has_colours(stream: IO[str]) -> bool:
    """Whether the stream is a terminal that shows colours. FORCE_COLOR says yes where it is none, as in a CI log."""
    if os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb":
        return False
    return bool(os.environ.get("FORCE_COLOR")) or stream.isatty()


def paint(text: str, style: str, stream: IO[str]) -> str:
    """Return the text in a colour if the stream shows colours, else as it is."""
    return f"\x1b[{CODES[style]}m{text}\x1b[0m" if text and has_colours(stream) else text


def paint_words(text: str, styles: dict[str, str], stream: IO[str]) -> str:
    """Paint each match of a pattern in its style."""
    if not has_colours(stream):
        return text
    for pattern, style in styles.items():
        text = re.sub(pattern, lambda match, style=style: paint(match[0], style, stream), text)
    return text
