"""Tagged text in columns, as the CoNLL tasks write it: a token a line and its tag at the end, a blank line between."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from allmask.data.fields import Bad, Checker
from allmask.data.formats import Row
from allmask.data.lines import Line, decode, lines

_BETWEEN = re.compile(r"[ \t]+")  # not other spaces: a full-width one is a token of Chinese text
_DOCUMENT = "-DOCSTART-"


def column_rows(path: Path, checkers: Mapping[str, Checker], limit: int) -> Iterator[Row]:
    """A sentence a row, `tokens` and `tags`, under the line it begins on. Without a second column there are no tags."""
    sentence: list[Line] = []
    for line in lines(path, limit):
        if line.raw.strip(b" \t\r\n"):
            sentence.append(line)
        elif sentence:
            yield from _rows(sentence, limit)
            sentence = []
    if sentence:
        yield from _rows(sentence, limit)


def _rows(sentence: list[Line], limit: int) -> Iterator[Row]:
    try:
        cells = [_BETWEEN.split(decode(line, limit).strip(" \t\r\n")) for line in sentence]
        kept = [(line, row) for line, row in zip(sentence, cells, strict=True) if row[0] != _DOCUMENT]
        if kept:
            yield Row(f":{kept[0][0].number}", _sentence(kept))
    except Bad as bad:
        yield Row(f":{bad.line or sentence[0].number}", bad)


def _sentence(rows: list[tuple[Line, list[str]]]) -> dict[str, list[str]]:
    columns = len(rows[0][1])
    for line, row in rows:
        if len(row) != columns:
            what = f"{len(row)} column{'s' * (len(row) > 1)}; the sentence began with {columns}"
            raise Bad("wrong number of columns", what, "each line is a token and its tag", line.number)
    tokens = {"tokens": [row[0] for _, row in rows]}
    return tokens if columns == 1 else {**tokens, "tags": [row[-1] for _, row in rows]}
