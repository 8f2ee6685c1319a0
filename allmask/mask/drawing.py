"""Pictures of masks: rows are queries, columns are keys, a filled cell means "may read".

`draw` returns text for a terminal, `save` writes an SVG or PNG file.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from allmask.errors import UsageError
from allmask.mask import Mask, expect_mask
from allmask.mask.canvas import EMPTY, HATCH, INK, QUIET, TINTS
from allmask.mask.fonts import Fonts
from allmask.mask.labels import pad, printable, shorten, text_width

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SEEN, UNSEEN = "■", "·"
_MAX_NAMED = 40  # masks of more tokens are drawn as one image, without token names


def draw(
    mask: Mask | Tensor, tokens: Sequence[str], row_tokens: Sequence[str] | None = None, limit: int = 64,
    paint: Callable[[str, int], str] | None = None,
) -> str:  # fmt: skip
    """Return the matrix as text, aligned for double-width Chinese. At most `limit` rows and columns are drawn.

    `paint` colours a cell, given its text and its column.

       北 京 欢
    北  ■  ·  ·
    京  ■  ■  ·
    欢  ■  ■  ■
    """
    visible = _matrix(mask, tokens, row_tokens)
    columns = [shorten(printable(token), 8) for token in tokens[:limit]]
    rows = [shorten(printable(token), 12) for token in (row_tokens or tokens)[:limit]]
    margin = max((text_width(row) for row in rows), default=0)
    lines = []
    marks = [[SEEN if cell else UNSEEN for cell in cells] for cells in visible[:limit, :limit].tolist()]
    for name, cells in zip(["", *rows], [columns, *marks], strict=True):
        centred = [pad(cell, text_width(column), centre=True) for cell, column in zip(cells, columns, strict=True)]
        if paint is not None and name:
            centred = [paint(cell, column) for column, cell in enumerate(centred)]
        lines.append(" ".join([pad(name, margin), *centred]).rstrip())
    if max(visible.shape) > limit:
        lines.append(f"({len(rows)} of {visible.shape[0]} rows, {len(columns)} of {visible.shape[1]} columns)")
    return "\n".join(lines)


def beside(drawing: str, text: Sequence[str], gap: int = 3) -> str:
    """Return a drawing with lines of text to its right; more lines than the drawing has go on below, aligned."""
    left = drawing.splitlines()
    margin = max(map(text_width, left), default=0) + gap
    pairs = zip_longest(left, text, fillvalue="")
    return "\n".join((pad(one, margin) + other).rstrip() for one, other in pairs)


# ---- files --------------------------------------------------------------------------------------------------


def save(
    mask: Mask | Tensor, path: str | Path, tokens: Sequence[str], row_tokens: Sequence[str] | None = None, *,
    title: str = "", looks: str = "who looks", seen: str = "what is seen",
    tints: Tensor | None = None, padding: Tensor | None = None,
) -> None:  # fmt: skip
    """Write the matrix as a picture, .svg or .png by the suffix of `path`.

    `looks` and `seen` are the titles of rows and columns. Columns with the same number in `tints` (K,) share a colour;
    by default, those of one document do. Cells where `padding` (Q, K) is True are hatched; by default, those of the
    mask's padding.
    """
    path, visible = Path(path), _matrix(mask, tokens, row_tokens)
    if path.suffix not in (".svg", ".png"):
        raise UsageError(f'{path}: the suffix is "{path.suffix}"', "name the picture something.svg or something.png")
    rows, columns = ([printable(t) for t in names] for names in (row_tokens or tokens, tokens))
    fonts = Fonts.find("".join([title, looks, seen, *rows, *columns]), as_text=path.suffix == ".svg")
    picture = _Picture(
        rows=[shorten(fonts.show(row), 14) for row in rows],
        columns=[shorten(fonts.show(column), 14) for column in columns],
        colours=_colours(visible, _document(mask) if tints is None else tints),
        hatched=_padding(mask, visible) if padding is None else padding,
        titles=(fonts.show(title), looks, seen),
    )
    with _style(fonts):
        picture.write(path)


@dataclass(frozen=True)
class _Picture:
    """A grid of cells, with names on the left and above."""

    rows: list[str]
    columns: list[str]
    colours: Tensor  # (Q, K, 3) red, green, blue from 0 to 1
    hatched: Tensor  # (Q, K)
    titles: tuple[str, str, str]  # of the picture, of the rows, of the columns
    unit: float = 0.36  # inches per cell

    @property
    def named(self) -> bool:
        return max(self.colours.shape[:2]) <= _MAX_NAMED

    def write(self, path: Path) -> None:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure

        left, top, right, bottom = self._margins()
        height, width = self.colours.shape[0], self.colours.shape[1]
        scale = self.unit if self.named else min(self.unit, 6 / max(height, width))
        size = ((left + width + right) * scale, (top + height + bottom) * scale)
        figure = Figure(figsize=size, facecolor="white")
        FigureCanvasAgg(figure)
        axes = figure.add_axes((0, 0, 1, 1), xlim=(-left, width + right), ylim=(height + bottom, -top))
        axes.set_axis_off()
        self._cells(axes)
        self._names(axes, scale)
        # no date and no program name, so that the same mask gives the same file
        metadata = {"Date": None} if path.suffix == ".svg" else {"Software": None}
        figure.savefig(path, dpi=144, metadata=metadata)

    def _margins(self) -> tuple[float, float, float, float]:
        """Left, top, right and bottom, in cells."""
        if not self.named:
            edge = max(self.colours.shape[:2]) / 12
            return edge, edge * 1.4, edge / 2, edge / 2
        left = 1.15 + 0.24 * max(map(text_width, self.rows))
        names = 0.9 if not self._slanted else 0.6 + 0.18 * max(map(text_width, self.columns))
        right = 0.5 + (0.16 * text_width(self.columns[-1]) if self._slanted else 0)
        titled = 0.24 * text_width(self.titles[0]) - left - self.colours.shape[1]
        return left, names + (1.7 if self.titles[0] else 0.7), max(right, titled), 0.5

    @property
    def _slanted(self) -> bool:
        return max(map(text_width, self.columns)) > 6

    def _cells(self, axes: Axes) -> None:
        from matplotlib.collections import PatchCollection
        from matplotlib.patches import FancyBboxPatch

        if not self.named:
            height, width = self.colours.shape[0], self.colours.shape[1]
            axes.imshow(self.colours.numpy(), extent=(0, width, height, 0), interpolation="nearest", aspect="auto")
            return
        shape = "round,pad=0,rounding_size=0.2"
        plain: dict[str, Any] = {"facecolors": self.colours[~self.hatched].tolist()}
        striped: dict[str, Any] = {"facecolors": "white", "edgecolors": HATCH, "hatch": "////"}
        for cells, style in ((~self.hatched, plain), (self.hatched, striped)):
            boxes = [
                FancyBboxPatch((column + 0.06, row + 0.06), 0.88, 0.88, boxstyle=shape)
                for row, column in cells.nonzero().tolist()
            ]
            if boxes:
                axes.add_collection(PatchCollection(boxes, linewidths=0, **style))

    def _names(self, axes: Axes, scale: float) -> None:
        left, top, _, _ = self._margins()
        title, looks, seen = self.titles
        height, width = self.colours.shape[0], self.colours.shape[1]
        small = {"color": QUIET, "fontsize": 7.5, "parse_math": False}
        edge = 0.35 * self.unit / scale  # in cells, which are small in a large mask
        axes.text(0.06, -top + edge, title, color=INK, fontsize=10.5, va="top", parse_math=False)
        above = -top + (1.4 if title else 0.4) * self.unit / scale
        axes.text(width / 2, above, seen, ha="center", va="center", **small)
        axes.text(-left + edge, height / 2, looks, ha="center", va="center", rotation=90, **small)
        if not self.named:
            return
        for row, name in enumerate(self.rows):
            axes.text(-0.25, row + 0.52, name, ha="right", va="center", color=INK, fontsize=10.5, parse_math=False)
        for column, name in enumerate(self.columns):
            if self._slanted:
                style = {"rotation": 50, "rotation_mode": "anchor", "ha": "left", "va": "baseline", "fontsize": 9}
            else:  # a cell has room for about four narrow letters
                style = {"ha": "center", "va": "center", "fontsize": 10.5 * min(1.0, 3.6 / max(text_width(name), 1))}
            axes.text(column + 0.5, -0.25 if self._slanted else -0.5, name, color=INK, parse_math=False, **style)


def _matrix(mask: Mask | Tensor, tokens: Sequence[str], row_tokens: Sequence[str] | None) -> Tensor:
    """The boolean (Q, K) matrix; its shape must match the numbers of tokens."""
    if isinstance(mask, Mask) and len(mask) != 1:
        raise UsageError(f"drawing: the mask has {len(mask)} rows", "draw one of them: mask[0]")
    visible = mask if isinstance(mask, Tensor) else expect_mask(mask).visible()[0]
    sides = (len(tokens if row_tokens is None else row_tokens), len(tokens))
    if visible.dtype != torch.bool or visible.shape != sides or 0 in sides:
        found = f"{tuple(visible.shape)} of {visible.dtype}"
        raise UsageError(f"drawing: the matrix is {found}; for these tokens it must be {sides} of booleans")
    return visible.cpu()


def _document(mask: Mask | Tensor) -> Tensor:
    """The document of each token, (T,)."""
    return mask.group[0].cpu().clamp(min=0) if isinstance(mask, Mask) else torch.zeros(mask.shape[1], dtype=torch.long)


def _padding(mask: Mask | Tensor, visible: Tensor) -> Tensor:
    """The cells (Q, K) in the row or the column of padding."""
    if not isinstance(mask, Mask):
        return torch.zeros_like(visible)
    padding = (mask.group[0] < 0).cpu()
    return padding[:, None] | padding


def _colours(visible: Tensor, numbers: Tensor) -> Tensor:
    """(Q, K, 3): the tint of the column's number where visible, grey elsewhere."""
    from matplotlib.colors import to_rgb

    tint = torch.tensor([to_rgb(tint) for tint in TINTS])[numbers % len(TINTS)]
    grey = torch.tensor(to_rgb(EMPTY))
    return torch.where(visible[..., None], tint, grey)


@contextmanager
def _style(fonts: Fonts) -> Iterator[None]:
    """Draw outlines instead of text if the fonts are available, so that the picture looks the same everywhere."""
    from matplotlib import rc_context

    settings: Any = {
        "font.family": [*fonts.families, "sans-serif"] if fonts.as_text else fonts.families,
        "svg.fonttype": "none" if fonts.as_text else "path",
        "svg.hashsalt": "allmask",
    }
    with rc_context(settings), warnings.catch_warnings():
        if fonts.as_text:  # matplotlib warns about glyphs that it does not draw
            warnings.filterwarnings("ignore", message="Glyph .* missing")
        yield
