"""Names of tokens in pictures: printable, short, and measured in columns of a terminal."""

from __future__ import annotations

import re
import unicodedata

from allmask.terminal import text_width as text_width

# Chinese characters, kana and full-width punctuation are tokens of their own; everything else is split at spaces.
_ALONE = "\u3000-\u30ff\u3400-\u9fff\uf900-\ufaff\uff00-\uffef\U00020000-\U0003ffff"


def pad(text: str, columns: int, centre: bool = False) -> str:
    room = max(columns - text_width(text), 0)
    left = (room + 1) // 2 if centre else 0
    return " " * left + text + " " * (room - left)


def shorten(text: str, columns: int) -> str:
    if text_width(text) <= columns:
        return text
    while text_width(text) > columns - 1:
        text = text[:-1]
    return text + "…"


def printable(token: str) -> str:
    """The token without line breaks: a space is ␣, a line break ⏎, any other control character �."""
    named = token.replace("\r\n", "⏎").replace("\n", "⏎").replace("\t", "⇥").replace(" ", "␣")
    return "".join("�" if unicodedata.category(c) in ("Cc", "Cs", "Zl", "Zp") else c for c in named) or "∅"


def split(text: str) -> list[str]:
    """Split a text into words and Chinese characters: `GPT 写诗` is GPT, 写, 诗."""
    return [token for token in re.findall(rf"[{_ALONE}]|[^\s{_ALONE}]+", text) if not token.isspace()]
