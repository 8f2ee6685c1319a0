"""Masks as grids of cells for notebooks: named tokens, the order beside the rows, padding hatched.

A cell that may be read has the colour of its column: one colour per document, or two if a document has a source, which
is read both ways, and a target, which is written token by token. More than 64 tokens become an image without names.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from allmask.errors import UsageError
from allmask.files import write_atomically
from allmask.mask.canvas import EMPTY, HATCH, INK, QUIET, TINTS, Box, Canvas, Pixels, Shape, Words, words_width
from allmask.mask.labels import printable, shorten

MAX_NAMED = 64
HATCHED = "hatched"  # instead of a colour
_PAGE = 900  # width of a page of several grids
_IMAGE = 560  # side of a mask without names
_EDGE = 12
_NAME = 16  # columns of a name, at most


@dataclass(frozen=True)
class Drawing:
    """A picture that shows itself in a notebook; `save` writes it as .svg or .png."""

    canvas: Canvas

    def _repr_svg_(self) -> str:
        return self.canvas.svg()

    def __repr__(self) -> str:
        return f"Drawing({self.canvas.width:.0f}×{self.canvas.height:.0f})"

    def save(self, path: str | Path) -> None:
        path = Path(path)
        if path.suffix == ".svg":
            write_atomically(path, self.canvas.svg())
        elif path.suffix == ".png":
            write_atomically(path, png_bytes(self.canvas))
        else:
            raise UsageError(
                f'{path}: the suffix is "{path.suffix}"', "name the picture something.svg or something.png"
            )


def png_bytes(canvas: Canvas) -> bytes:
    import io

    file = io.BytesIO()
    canvas.image().save(file, "PNG", optimize=True)
    return file.getvalue()


# ---- layout -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Grid:
    """Cells with names on the left and above; `fills` are colours, HATCHED, or "" for no cell at all."""

    rows: Sequence[str]
    columns: Sequence[str]
    fills: Sequence[Sequence[str]]
    order: Sequence[str] = ()  # shown beside the rows
    order_tints: Sequence[str] = ()
    title: str = ""
    looks: str = ""  # title of the rows
    seen: str = ""  # title of the columns
    faded: frozenset[int] = frozenset()  # rows whose names are grey

    @property
    def cell(self) -> float:
        return max(11.0, min(26.0, 640 / max(len(self.rows), len(self.columns))))

    @property
    def font(self) -> float:
        return min(13.0, self.cell * 0.62)

    @property
    def left(self) -> float:
        """Where the cells begin."""
        names = max((words_width(self._name(name), self.font) for name in self.rows), default=0.0)
        return _EDGE + (18 if self.looks else 0) + names + 8 + self.order_width

    @property
    def order_width(self) -> float:
        return max(30.0, 12 + words_width(max(self.order, key=len), self.font)) if self.order else 0.0

    @property
    def top(self) -> float:
        heads = [words_width(self._name(name), self.font) for name in self.columns]
        above = 0.78 * max(heads) + 14 if self.slanted else self.font + 9
        above = max(above, 22.0) if self.order else above
        return _EDGE + (22 if self.title else 0) + (18 if self.seen else 0) + above

    @property
    def slanted(self) -> bool:
        return any(words_width(self._name(name), self.font) > self.cell + 2 for name in self.columns)

    @property
    def size(self) -> tuple[float, float]:
        right = 0.66 * words_width(self._name(self.columns[-1]), self.font) if self.slanted else 0.0
        wide = self.left + len(self.columns) * self.cell + max(right - self.cell / 2, 0) + _EDGE
        return max(wide, words_width(self.title, 14) + 2 * _EDGE), self.top + len(self.rows) * self.cell + _EDGE

    def _name(self, name: str) -> str:
        return shorten(printable(name), _NAME)

    def frame(self) -> list[Shape]:
        """Return everything but the cells."""
        left, top, cell, size = self.left, self.top, self.cell, self.font
        shapes: list[Shape] = []
        if self.title:
            shapes.append(Words(_EDGE, _EDGE + 7, self.title, 14))
        if self.seen:
            over = _EDGE + (22 if self.title else 0) + 6
            shapes.append(Words(left + len(self.columns) * cell / 2, over, self.seen, 11, QUIET, "middle"))
        if self.looks:
            shapes.append(Words(_EDGE + 6, top + len(self.rows) * cell / 2, self.looks, 11, QUIET, "middle", 90))
        for column, name in enumerate(map(self._name, self.columns)):
            middle = left + (column + 0.5) * cell
            if self.slanted:
                shapes.append(Words(middle - 2, top - 9, name, size, angle=52))
            else:
                shapes.append(Words(middle, top - 4 - size / 2, name, size, anchor="middle"))
        if self.order:
            shapes.append(Words(left - self.order_width / 2 - 2, top - 11, "order", 9.5, QUIET, "middle"))
        for row, name in enumerate(map(self._name, self.rows)):
            middle = top + (row + 0.5) * cell
            ink = QUIET if row in self.faded else INK
            shapes.append(Words(left - self.order_width - 7, middle, name, size, ink, "end"))
            if not self.order:
                continue
            start, wide = left - self.order_width + 4, self.order_width - 12
            if cell >= 18:
                shapes.append(Box(start, middle - (cell - 6) / 2, wide, cell - 6, "#fff", 5, self.order_tints[row]))
            else:
                ink = self.order_tints[row]
            shapes.append(Words(start + wide / 2, middle, self.order[row], min(11.5, size), ink, "middle"))
        return shapes

    def cells(self) -> list[Shape]:
        """Return the cells, alike ones together, which makes the file small."""
        left, top, cell = self.left, self.top, self.cell
        room = 1.0 if cell < 16 else 1.5
        found: list[Box] = [
            Box(
                left + column * cell + room / 2, top + row * cell + room / 2, cell - room, cell - room,
                "#fff" if fill == HATCHED else fill, 3.0 if cell >= 16 else 1.5, hatched=fill == HATCHED,
            )
            for row, fills in enumerate(self.fills)
            for column, fill in enumerate(fills)
            if fill
        ]  # fmt: skip
        found.sort(key=lambda box: (box.hatched, box.fill))
        return [*found]


Legend = Sequence[tuple[str, str]]  # a colour and what it means


def legend_shapes(legend: Legend, x: float, y: float, width: float) -> tuple[list[Shape], float]:
    """Return lines of colours and their meanings, at most `width` long, and where they end below."""
    shapes: list[Shape] = []
    first = x
    for fill, meaning in legend:
        if x > first and x + 17 + words_width(meaning, 11) > width:
            x, y = first, y + 18
        shapes.append(Box(x, y - 6, 12, 12, "#fff" if fill == HATCHED else fill, 2.5, hatched=fill == HATCHED))
        shapes.append(Words(x + 17, y, meaning, 11, QUIET))
        x += 17 + words_width(meaning, 11) + 14
    return shapes, y + 16


# ---- masks --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Row:
    """One row of a mask, as plain arrays."""

    visible: np.ndarray  # (T, T)
    order: np.ndarray  # (T,)
    group: np.ndarray  # (T,) -1 is padding
    has_order: bool  # no matrix restricts it
    tokens: Sequence[str] | None = None
    step: int = 1  # only every step-th token is here
    title: str = ""


def draw_rows(rows: Sequence[Row], note: str = "") -> Drawing:
    """Draw rows of a mask one beside another, as far as the page is wide, with one legend."""
    if all(len(row.order) <= MAX_NAMED for row in rows):
        grids = [_grid(row) for row in rows]
        parts = [(grid.size, [*grid.frame(), *grid.cells()]) for grid in grids]
    else:
        parts = [_image(row) for row in rows]
    placed: list[Shape] = []
    x = y = height = wide = 0.0
    for (part_width, part_height), shapes in parts:
        if x and x + part_width > _PAGE:
            x, y, height = 0.0, y + height, 0.0
        placed += [_moved(shape, x, y) for shape in shapes]
        x, height = x + part_width, max(height, part_height)
        wide = max(wide, x)
    wide = max(wide, 260.0, words_width(note, 11) + 2 * _EDGE)
    under, bottom = legend_shapes(_legend(rows), _EDGE, y + height + 6, wide - _EDGE)
    if note:
        under.append(Words(_EDGE, bottom + 2, note, 11, QUIET))
        bottom += 18
    return Drawing(Canvas(wide, bottom, [*placed, *under]))


def _moved(shape: Shape, x: float, y: float) -> Shape:
    from dataclasses import replace

    return replace(shape, x=shape.x + x, y=shape.y + y)


def _grid(row: Row) -> Grid:
    names = list(row.tokens) if row.tokens is not None else [str(position) for position in range(len(row.order))]
    tints, padding = token_tints(row), row.group < 0
    fills = [
        [
            HATCHED if padding[q] or padding[k] else tints[k] if row.visible[q, k] else EMPTY
            for k in range(len(names))
        ]
        for q in range(len(names))
    ]  # fmt: skip
    order = [] if not row.has_order else ["·" if gone else str(o) for o, gone in zip(row.order, padding, strict=True)]
    faded = frozenset(np.flatnonzero(padding).tolist())
    return Grid(names, names, fills, order, tints, row.title, "who looks", "what is seen", faded)


def _image(row: Row) -> tuple[tuple[float, float], list[Shape]]:
    """A mask of many tokens."""
    padding, size = row.group < 0, (len(row.order), len(row.order), 3)
    colours = np.broadcast_to(_rgb(EMPTY), size).copy()
    tints = np.array([_rgb(tint) for tint in token_tints(row)])
    colours[row.visible] = np.broadcast_to(tints, size)[row.visible]
    return image_part(striped(colours, padding[:, None] | padding), row.title, row.step)


def striped(colours: np.ndarray, where: np.ndarray) -> np.ndarray:
    """Return an image (Q, K, 3) that is hatched where the matrix (Q, K) is True."""
    rows, columns = np.indices(where.shape)
    stripe = np.asarray((rows + columns) % 4 == 0)[..., None]
    return np.where(where[..., None], np.where(stripe, _rgb(HATCH), np.uint8(255)), colours).astype(np.uint8)


def image_part(colours: np.ndarray, title: str = "", step: int = 1) -> tuple[tuple[float, float], list[Shape]]:
    """Return the size and the shapes of an image (Q, K, 3) with positions at its edges, for many tokens."""
    from PIL import Image

    rows, columns = colours.shape[:2]
    cell = max(1, _IMAGE // max(rows, columns)) if max(rows, columns) <= _IMAGE else _IMAGE / max(rows, columns)
    height, width = rows * cell, columns * cell
    if cell < 1:  # neighbours share a pixel
        colours = np.asarray(Image.fromarray(colours).resize((round(width), round(height)), Image.Resampling.BOX))
    left, top = _EDGE + 52.0, _EDGE + (22.0 if title else 0.0) + 34.0
    shapes: list[Shape] = [Pixels(left, top, width, height, colours)]
    longest = max(rows, columns) * step
    every = next(n for n in (10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10**9) if longest / n <= 12)
    for mark in range(0, rows * step, every):
        shapes.append(Words(left - 6, top + (mark / step + 0.5) * cell, str(mark), 10, QUIET, "end"))
    for mark in range(0, columns * step, every):
        shapes.append(Words(left + (mark / step + 0.5) * cell, top - 9, str(mark), 10, QUIET, "middle"))
    shapes += [
        Words(left + width / 2, top - 27, "what is seen", 11, QUIET, "middle"),
        Words(_EDGE + 6, top + height / 2, "who looks", 11, QUIET, "middle", 90),
    ]
    if title:
        shapes.append(Words(_EDGE, _EDGE + 7, title, 14))
    return (left + width + _EDGE + 8, top + height + _EDGE), shapes


def _rgb(colour: str) -> np.ndarray:
    return np.array(list(bytes.fromhex(colour[1:])), np.uint8)


def sides(row: Row) -> np.ndarray:
    """(T,) 0 at sources, whose tokens become known together, 1 at targets; 0 everywhere if a document has only one."""
    found = np.zeros(len(row.order), dtype=int)
    for group in np.unique(row.group[row.group >= 0]):
        own = np.flatnonzero(row.group == group)
        _, which, counts = np.unique(row.order[own], return_inverse=True, return_counts=True)
        alone = counts[which] == 1
        if row.has_order and alone.any() and not alone.all():
            found[own] = alone
    return found


def token_tints(row: Row) -> list[str]:
    """The colour of each token: by its document, and by its side if any document has both."""
    side = sides(row)
    number = np.unique(row.group.clip(min=0), return_inverse=True)[1]
    number = number * 2 + side if side.any() else number
    return [HATCH if group < 0 else TINTS[n % len(TINTS)] for n, group in zip(number, row.group, strict=True)]


def _legend(rows: Sequence[Row]) -> list[tuple[str, str]]:
    """What the colours mean, as far as there is more than one."""
    found: dict[str, str] = {}
    several = max(len(np.unique(row.group[row.group >= 0])) for row in rows) > 1
    two_sided = any(sides(row).any() for row in rows)
    for row in rows:
        side, tints = sides(row), token_tints(row)
        numbers = np.unique(row.group.clip(min=0), return_inverse=True)[1]
        for token, tint in enumerate(tints):
            if row.group[token] < 0:
                continue
            words = [f"document {numbers[token] + 1}"] if several else []
            words += [("source", "target")[side[token]]] if two_sided else []
            if words and tint not in found:
                found[tint] = ", ".join(words)
    hidden = any(bool((~row.visible & (row.group >= 0) & (row.group >= 0)[:, None]).any()) for row in rows)
    padded = any(bool((row.group < 0).any()) for row in rows)
    legend = [(tint, words) for tint, words in found.items()] or [(TINTS[0], "may be read")]
    return legend + [(EMPTY, "hidden")] * hidden + [(HATCHED, "padding")] * padded
