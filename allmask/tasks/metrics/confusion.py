"""A plot of the confusion matrix: true labels by row, predicted labels by column."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from allmask.mask import drawing

log = logging.getLogger("allmask")
_BLUE, _INK = "#5B84D7", "#2B2B2B"
MOST = 40  # labels; with more, the plot is unreadable
_NAME = 16  # longest name, in characters


def draw_confusion(matrix: np.ndarray, names: Sequence[str], path: Path) -> None:
    """Write the plot to `path`: colours are shares of a row, numbers are counts."""
    from matplotlib.colors import LinearSegmentedColormap
    from matplotlib.figure import Figure

    if len(names) > MOST:
        log.info("the confusion matrix is not drawn: %s labels are too many for a plot", len(names))
        return
    side = 2.2 + 0.55 * len(names)
    figure = Figure(figsize=(side + 0.6, side), dpi=120, layout="constrained")
    axes = figure.subplots()
    shares = matrix / np.maximum(matrix.sum(1, keepdims=True), 1)
    axes.imshow(shares, cmap=LinearSegmentedColormap.from_list("allmask", ["white", _BLUE]), vmin=0, vmax=1)
    for (row, column), count in np.ndenumerate(matrix):
        axes.text(column, row, f"{count:,}", ha="center", va="center", color=_INK, fontsize=8)
    shown = [name if len(name) <= _NAME else name[: _NAME - 1] + "…" for name in names]
    with_font: Any = {"fontfamily": drawing.Fonts.find("".join(shown), as_text=True).families, "parse_math": False}
    axes.set_xticks(range(len(shown)), shown, rotation=45, ha="right", rotation_mode="anchor", **with_font)
    axes.set_yticks(range(len(shown)), shown, **with_font)
    axes.set_xlabel("predicted label")
    axes.set_ylabel("true label")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing")  # a box is drawn instead
        figure.savefig(path)
