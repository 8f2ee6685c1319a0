"""The texts that the four masks are shown on: an example, or the paragraphs of a file of the user's. Without torch."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from allmask.errors import DataError
from allmask.text.script import CHINESE

EXAMPLE = (
    "This package provides a simple tool to convert images from one format to another. It can also change the size of "
    "an image and remove its background."
)
OTHERS = (  # to compare the example with, in no particular order
    "The weather in the mountains will be cold tomorrow.",
    "A program that edits photos.",
    "How to bake bread with olives.",
)
LARGEST = 1 << 20  # bytes of a file that are read
LEAST = 12  # words, or Chinese characters, of a text
SHORT = 5  # a paragraph with fewer is a heading or a caption
_UNITS = re.compile(rf"[{CHINESE}]|[^\W_{CHINESE}]+")  # a Chinese character, or a word


def count_words(text: str) -> int:
    """Return the number of words; each Chinese character is one."""
    return len(_UNITS.findall(text))


# ---- a file ------------------------------------------------------------------------------------------------------


def read_paragraphs(path: Path) -> list[str]:
    """Return the paragraphs of a plain text or Markdown file, without its headings, lists, tables and code."""
    markdown = path.suffix.lower() in (".md", ".markdown")
    found = [part for part in paragraphs(_decoded(path), markdown) if count_words(part) >= SHORT]
    total = sum(map(count_words, found))
    if total < LEAST:
        raise DataError(
            f"{path}: too little text: {total} words in paragraphs, headings and lists not counted",
            f"give at least {LEAST} words, or as many Chinese characters",
        )
    return found


def _decoded(path: Path) -> str:
    if not path.exists():
        raise DataError(f"{path}: no such file", "check the path")
    if path.is_dir():
        raise DataError(f"{path}: is a folder", "name a text file in it")
    try:
        with path.open("rb") as stream:
            data = stream.read(LARGEST + 1)
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}", "check its permissions") from None
    if not data.strip():
        raise DataError(f"{path}: the file is empty", "give it a paragraph of text")
    if b"\0" in data:
        raise DataError(f"{path}: not a text file: it contains zero bytes", "give plain text or Markdown in UTF-8")
    if len(data) > LARGEST:
        data = data[: max(data.rfind(b"\n", 0, LARGEST), 0) or LARGEST]
    try:
        # a character may be cut where the reading stopped
        return data.decode("utf-8-sig", errors="ignore" if len(data) == LARGEST else "strict")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise DataError(
            f"{path}:{line}: not UTF-8 text", "convert it: iconv -f gb18030 -t utf-8, for example"
        ) from None


_MARKDOWN = [  # in this order
    (re.compile(r"\A---\n.*?\n---\n", re.DOTALL), ""),  # front matter
    (re.compile(r"^(```|~~~).*?^\1", re.DOTALL | re.MULTILINE), "\n"),  # code
    (re.compile(r"<!--.*?-->", re.DOTALL), ""),
    (re.compile(r"^#+ .*$", re.MULTILINE), "\n"),  # a heading, which needs no empty line after it
    (re.compile(r"!\[[^\]]*\]\([^)]*\)"), ""),
    (re.compile(r"\[([^\]]*)\]\([^)]*\)"), r"\1"),
    (re.compile(r"`+|\*\*+|(?<!\w)[*_](?=\w)|(?<=\w)[*_](?!\w)"), ""),
]
_NOT_PROSE = re.compile(r"\s*([-*+>|] |\d+[.)] |<|\$\$|[-=*_]{3,}\s*$)|( {4}|\t)")  # lists, tables, HTML, code
_ENDS = re.compile(r"[.!?。！？…”\"’]\s*$")


def paragraphs(text: str, markdown: bool = False) -> list[str]:
    """Return the paragraphs of a text, each on one line; of Markdown only prose, without markup.

    Paragraphs are separated by empty lines, or they are single lines if each line ends a sentence.
    """
    text = text.replace("\r\n", "\n")
    for pattern, replacement in _MARKDOWN if markdown else []:
        text = pattern.sub(replacement, text)
    found: list[list[str]] = []
    for block in re.split(r"\n[ \t\u3000]*\n", text):
        lines = [line for line in block.splitlines() if line.strip()]
        if not lines or (markdown and _NOT_PROSE.match(lines[0])):
            continue
        found += [[line] for line in lines] if all(map(_ENDS.search, lines)) else [lines]
    return [_joined(lines) for lines in found]


def _joined(lines: Sequence[str]) -> str:
    """Join lines with spaces, but Chinese ones without."""
    line = " ".join(" ".join(lines).split())
    return re.sub(rf"(?<=[{CHINESE}，。！？；：、]) (?=[{CHINESE}])", "", line)


# ---- parts of a text ---------------------------------------------------------------------------------------------


def opening(text: str, words: int = 40) -> str:
    """Return the first sentences, of at most so many words in all; if the first is longer, its first words."""
    text, end = text[: 10 * words], 0  # not even a text without spaces is longer
    for found in re.finditer(r".+?(?:[.!?](?=\s|$)|[。！？]|$)", text, re.DOTALL):
        if count_words(text[: found.end()]) > words:
            break
        end = found.end()
    return text[:end].strip() if end else cut(text, words)[0]


def cut(text: str, words: int) -> tuple[str, str]:
    """Return the first words of a text, and the rest."""
    spans = [found.span() for found in _UNITS.finditer(text)]
    if len(spans) <= words:
        return text, ""
    return text[: spans[words - 1][1]].strip(), text[spans[words - 1][1] :].strip()


def hideable(text: str) -> list[tuple[int, int]]:
    """Return the places (start, end) of words and Chinese characters; of numbers only if there is nothing else."""
    found = list(_UNITS.finditer(text))
    return [word.span() for word in [word for word in found if word[0].isalpha()] or found]
