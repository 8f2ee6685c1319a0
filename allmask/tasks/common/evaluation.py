"""Results of `allmask evaluate`: scores, tables and the worst errors, as plain values and as Markdown."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from allmask.terminal import shortened

WIDEST = 12  # most labels for which a table has a column each


@dataclass(frozen=True)
class Table:
    """Formatted cells; the first column names the row."""

    header: Sequence[str]
    rows: Sequence[Sequence[str]]


@dataclass(frozen=True)
class Evaluation:
    """`values` is what --json prints; `tables`, `notes` and `examples` (lists of lines) are the same as text.

    The first column of the first table gets the number of records as its header, "20 records".
    """

    count: int
    values: dict[str, Any]
    tables: Sequence[Table]
    notes: Sequence[str] = ()
    examples: Sequence[Sequence[str]] = ()
    cut: int | None = None  # truncated texts; None where texts are never truncated
    unit: str = "record"

    def markdown(self) -> str:
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
    """Return a table with one row, the scores of the model."""
    names = [name.replace("_", " ") for name in scores]
    return Table(["", *names], [["model", *(f"{value:.{digits}f}" for value in scores.values())]])


def label_table(
    rows: Mapping[str, Mapping[str, float]], confusion: Sequence[Sequence[int]] | None = None,
    of: str = "true label", unit: str = "texts", key: str = "texts",
) -> Table:  # fmt: skip
    """Return a table of precision, recall and F1 by label; with few labels, also of the confusion matrix.

    `rows` has a dictionary for each label; its entry `key` is the number of texts (or other units) with that label.
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
    """Collects the `count` largest errors."""

    count: int
    kept: list[tuple[float, int, Any]] = field(default_factory=list)
    seen: int = 0

    def add(self, size: float, make: Callable[[], Any]) -> None:
        """Add an error (size 0: no error); `make` is called only if it is kept, and returns the row to keep."""
        self.seen += 1
        if not self.count or size <= 0 or (len(self.kept) == self.count and size <= self.kept[0][0]):
            return
        heapq.heappush(self.kept, (size, -self.seen, make()))  # rows cannot be compared, so a number comes before
        if len(self.kept) > self.count:
            heapq.heappop(self.kept)

    def rows(self) -> list[Any]:
        """Return the errors, largest first; of equal errors the earlier is first."""
        return [row for _, _, row in sorted(self.kept, key=lambda entry: entry[:2], reverse=True)]


def sample_lines(**rows: str) -> list[str]:
    """Return lines to show during training: each value on one line, after its name."""
    return [*(f"  {name:9}  {shortened(value)}" for name, value in rows.items()), ""]
