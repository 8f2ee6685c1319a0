"""A few records with what was written for them, as lines to look at while a model learns."""

from __future__ import annotations

from collections.abc import Sequence

from allmask.data import Record

LONGEST = 100  # characters of a line


def samples(records: Sequence[Record], written: Sequence[str]) -> list[str]:
    """Source, reference and what was written, of as many records as there are."""
    lines = []
    for record, text in zip(records, written, strict=False):
        lines += [
            f"  source     {_short(record.fields['source'])}",
            f"  reference  {_short(record.fields['target'])}",
            f"  written    {_short(text)}",
            "",
        ]
    return lines


def _short(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= LONGEST else text[: LONGEST - 1] + "…"
