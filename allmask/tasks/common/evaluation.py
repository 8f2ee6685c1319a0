"""What `allmask evaluate` finds: scores, tables and the errors worth reading, as plain values and as Markdown."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

WIDEST = 12  # labels, up to which a table has a column for each


@dataclass(frozen=True)
class Table:
    """Cells as they are shown; the first column says what a row is about."""

    header: Sequence[str]
    rows: Sequence[Sequence[str]]


@dataclass(frozen=True)
class Evaluation:
    """`values` is what --json prints, `tables`, `notes` and `examples` (lines each) are the same for people.

    The first column of the first table is headed by the number of records, "20 records".
    """

    count: int
    values: dict[str, Any]
    tables: Sequence[Table]
    notes: Sequence[str] = ()
    examples: Sequence[Sequence[str]] = ()
    cut: int | None = None  # texts that were longer than the model reads; None where none is ever cut
    unit: str = "record"

    def markdown(self) -> str:
        """Tables that read well in a terminal and can go into a page as they are."""
        blocks = []
        for number, table in enumerate(self.tables):
            header = [self._counted(self.count, self.unit), *table.header[1:]] if number == 0 else table.header
            rows = ["|" + "".join(f" {cell} |" if cell else " |" for cell in cells) for cells in (header, *table.rows)]
            blocks.append([rows[0], "|---" * len(header) + "|", *rows[1:]])
        blocks += [list(self.notes)] if self.notes else []
        blocks += [[f"{self._counted(self.cut, 'text')} cut"]] if self.cut else []
        return "\n\n".join("\n".join(lines) for lines in [*blocks, *self.examples])

    @staticmethod
    def _counted(count: int, thing: str) -> str:
        return f"{count:,} {thing}" + ("" if count == 1 else "s")


def score_table(scores: Mapping[str, float], digits: int = 3) -> Table:
    """The scores of a model in one row."""
    names = [name.replace("_", " ") for name in scores]
    return Table(["", *names], [["model", *(f"{value:.{digits}f}" for value in scores.values())]])


def label_table(
    rows: Mapping[str, Mapping[str, float]], confusion: Sequence[Sequence[int]] | None = None,
    of: str = "true label", unit: str = "texts", key: str = "texts",
) -> Table:  # fmt: skip
    """Precision, recall and F1 of each label and, of a few labels, how often each was predicted for it.

    Rows have the number of texts (or other units) of a label under `key`.
    """
    wide = bool(confusion) and len(rows) <= WIDEST
    header = [of, unit, "precision", "recall", "F1", *(f"predicted {name}" for name in rows if wide)]
    cells = []
    for number, (name, row) in enumerate(rows.items()):
        counts = [f"{count:,}" for count in confusion[number]] if confusion and wide else []
        shares = (f"{row[share]:.3f}" for share in ("precision", "recall", "f1"))
        cells.append([name, f"{row[key]:,}", *shares, *counts])
    return Table(header, cells)


@dataclass
class Worst:
    """The largest errors, and no more of them than asked for."""

    count: int
    kept: list[tuple[float, int, Any]] = field(default_factory=list)
    seen: int = 0

    def add(self, size: float, make: Callable[[], Any]) -> None:
        """Consider an error of some size (0: no error); `make` is called only if it is kept."""
        self.seen += 1
        if not self.count or size <= 0 or (len(self.kept) == self.count and size <= self.kept[0][0]):
            return
        heapq.heappush(self.kept, (size, -self.seen, make()))  # the number keeps what was made from being compared
        if len(self.kept) > self.count:
            heapq.heappop(self.kept)

    def rows(self) -> list[Any]:
        """The largest first, of equal ones the earlier."""
        return [row for _, _, row in sorted(self.kept, key=lambda entry: entry[:2], reverse=True)]


def shortened(text: str, limit: int = 100) -> str:
    """A text on one line."""
    text = " ".join(text.split())
    return text if len(text) <= limit else text[: limit - 1] + "…"
