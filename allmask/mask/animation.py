"""Writing under a mask, step by step: which rows are computed, and whose keys and values come from the cache.

The prover says which tokens can be added without changing the rows before them. If there is no such way to add them,
tokens are added from left to right, and the animation shows the rows that must be computed again.
"""

from __future__ import annotations

import io
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from torch import Tensor

from allmask.errors import UsageError
from allmask.files import write_atomically
from allmask.mask import Mask
from allmask.mask.canvas import EMPTY, INK, QUIET, TINTS, Box, Canvas, Shape, Words, svg_page, svg_shapes, words_width
from allmask.mask.grid import HATCHED, Grid, Row, legend_shapes, token_tints
from allmask.mask.labels import printable
from allmask.mask.prover import cache_blocks, influence

SECONDS, LAST = 1.3, 3.0  # of a step, and of the last one
MAX_TOKENS = 40
_FUTURE, _KEPT, _AGAIN = "#F6F7F9", "#5F6B7E", "#D2574B"
_STATUS = 58  # width of the words to the right of the cells
_EDGE = 12


@dataclass(frozen=True)
class Step:
    """Tokens that are added, rows before them that change, and rows whose keys and values are read from the cache."""

    new: tuple[int, ...]
    again: tuple[int, ...]
    kept: tuple[int, ...]

    @property
    def computed(self) -> int:
        return len(self.new) + len(self.again)


def writing_steps(visible: Tensor, given: Collection[int] = ()) -> list[Step]:
    """How the tokens of a matrix (T, T) are added one after another; the `given` ones, such as a source, come first."""
    blocks = cache_blocks(visible)
    if len(blocks) == 1:  # nothing can be kept
        blocks = [[token] for token in blocks[0]]
    added = [sorted(given)] if given else []
    added += [rest for block in blocks if (rest := [token for token in block if token not in given])]
    steps, before = [], list[int]()
    for new in added:
        written = [*before, *new]
        reach = influence(visible[written][:, written])[: len(before), len(before) :].any(-1).tolist()
        again = tuple(token for token, changes in zip(before, reach, strict=True) if changes)
        steps.append(Step(tuple(new), again, tuple(token for token in before if token not in again)))
        before = sorted(written)
    return steps


def animate(
    mask: Mask, path: str | Path, tokens: Sequence[str], *, given: Collection[int] = (), first: int = 0, title: str = ""
) -> list[Step]:
    """Write the steps of a mask as an animated .gif or .svg, and return them; rows before `first` are not drawn."""
    path = Path(path)
    if path.suffix not in (".gif", ".svg"):
        raise UsageError(f'{path}: the suffix is "{path.suffix}"', "name the animation something.gif or something.svg")
    if mask.shape != (1, len(tokens)):
        raise UsageError(
            f"animation: {len(tokens)} tokens for a mask of shape {mask.shape}", "animate one row: mask[0]"
        )
    if len(tokens) > MAX_TOKENS:
        raise UsageError(f"animation: {len(tokens)} tokens", f"at most {MAX_TOKENS} can be shown step by step")
    visible = mask.visible()[0].cpu()
    steps = writing_steps(visible, given)
    if not steps:
        raise UsageError("animation: nothing but padding")
    film = _Film.make(mask, list(tokens), first, title, steps)
    write_atomically(path, film.svg() if path.suffix == ".svg" else film.gif())
    return steps


@dataclass(frozen=True)
class _Film:
    grid: Grid  # names and order; the cells are those of a step
    visible: np.ndarray
    tints: Sequence[str]  # of the columns
    padding: np.ndarray
    first: int
    steps: list[Step]

    @classmethod
    def make(cls, mask: Mask, tokens: list[str], first: int, title: str, steps: list[Step]) -> _Film:
        visible, order, group = (x.cpu().numpy() for x in (mask.visible()[0], mask.order[0], mask.group[0]))
        tints = token_tints(Row(visible, order, group, mask.matrix is None))
        shown = [] if mask.matrix is not None else ["·" if g < 0 else str(o) for o, g in zip(order, group, strict=True)]
        names = ("who looks", "what is seen")
        grid = Grid(tokens[first:], tokens, [], shown[first:], tints[first:], title, *names)
        return cls(grid, visible, tints, group < 0, first, steps)

    @property
    def canvas(self) -> Canvas:
        width, height = self.grid.size
        lines = [line for number in range(len(self.steps)) for line in self._caption(number)]
        wide = max(width + _STATUS, 340.0, *(words_width(line, 12) + 2 * _EDGE for line in lines))
        return Canvas(wide, height + self.grid.cell + 116)

    def gif(self) -> bytes:
        from PIL import Image

        page, scale = self.canvas, 1.5 if len(self.visible) <= 16 else 1.0
        page.shapes = self._still()
        pictures = page.images([self._moving(number) for number in range(len(self.steps))], scale)
        # one palette for all frames: with one for each, colours would flicker
        width, height = pictures[0].size
        strip = Image.new("RGB", (width, height * len(pictures)))
        for number, picture in enumerate(pictures):
            strip.paste(picture, (0, number * height))
        strip = strip.quantize(128, Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE)
        colours, page_colour = strip.getpalette() or [], 3 * int(strip.getpixel((0, 0)))  # type: ignore[arg-type]
        colours[page_colour : page_colour + 3] = [255, 255, 255]
        strip.putpalette(colours)
        frames = [strip.crop((0, number * height, width, (number + 1) * height)) for number in range(len(pictures))]
        file = io.BytesIO()
        times = [round(1000 * SECONDS)] * (len(frames) - 1) + [round(1000 * LAST)]
        frames[0].save(file, "GIF", save_all=True, append_images=frames[1:], duration=times, loop=0, optimize=False)
        return file.getvalue()

    def svg(self) -> str:
        """The names once, and for each step a group that is visible at its time; where nothing moves, the last one."""
        total = SECONDS * (len(self.steps) - 1) + LAST
        groups = []
        for number in range(len(self.steps)):
            start, last = SECONDS * number / total, number == len(self.steps) - 1
            times = [0.0, start, 1.0 if last else SECONDS * (number + 1) / total]
            values = ["0", "1", "0"]
            if number == 0:
                times, values = times[1:], values[1:]
            if last:
                times, values = times[:-1], values[:-1]
            timing = f'values="{";".join(values)}" keyTimes="{";".join(f"{time:.4f}" for time in times)}"'
            move = f'<animate attributeName="opacity" calcMode="discrete" {timing} dur="{total:.1f}s" '
            move = f'{move}repeatCount="indefinite"/>' if len(self.steps) > 1 else ""
            groups.append(f'<g opacity="{int(last)}">{move}{svg_shapes(self._moving(number))}</g>')
        page = self.canvas
        return svg_page(page.width, page.height, svg_shapes(self._still()) + "".join(groups))

    # ---- parts -------------------------------------------------------------------------------------------------

    def _still(self) -> list[Shape]:
        _, height = self.grid.size
        cell = self.grid.cell
        legend = [(TINTS[0], "computed now")]
        if any(step.kept for step in self.steps):
            legend += [(_faded(TINTS[0]), "computed before"), (_KEPT, "in the cache")]
        under, _ = legend_shapes(legend, _EDGE, height + cell + 98, self.canvas.width - _EDGE)
        name = Words(self.grid.left - 7, height + cell / 2 - 4, "cache", 11, QUIET, "end")
        return [*self.grid.frame(), name, *under]

    def _moving(self, number: int) -> list[Shape]:
        """The cells of a step, its cache, and its caption."""
        step, grid = self.steps[number], self.grid
        computed, known = {*step.new, *step.again}, {*step.new, *step.again, *step.kept}
        rows = range(self.first, len(self.visible))
        fills = [[self._fill(q, k, computed, known) for k in range(len(self.visible))] for q in rows]
        shapes = replace(grid, fills=fills).cells()
        right = grid.left + len(grid.columns) * grid.cell + 7
        words = {token: ("new", INK) for token in step.new} | {token: ("again", _AGAIN) for token in step.again}
        for row, token in enumerate(rows):
            if token in words:
                text, ink = words[token]
                shapes.append(Words(right, grid.top + (row + 0.5) * grid.cell, text, 11, ink))
        _, height = grid.size
        for token, tint in enumerate(self.tints):
            place = (grid.left + token * grid.cell + 2, height - 2, grid.cell - 4, grid.cell - 4)
            if token in step.kept:
                shapes.append(Box(*place, _KEPT))
            elif token in step.again:
                shapes.append(Box(*place, "#fff", edge=_AGAIN))
            elif token in step.new:
                shapes.append(Box(*place, "#fff", edge=tint))
            else:
                shapes.append(Box(*place, _FUTURE))
        first, *others = self._caption(number)
        below = height + grid.cell + 20
        shapes.append(Words(_EDGE, below, first, 13))
        return shapes + [Words(_EDGE, below + 21 * line, text, 12, QUIET) for line, text in enumerate(others, 1)]

    def _fill(self, query: int, key: int, computed: set[int], known: set[int]) -> str:
        if self.padding[query] or self.padding[key]:
            return HATCHED
        if query not in known or key not in known:
            return _FUTURE
        if not self.visible[query, key]:
            return EMPTY
        return self.tints[key] if query in computed else _faded(self.tints[key])

    def _caption(self, number: int) -> tuple[str, str, str]:
        step, until = self.steps[number], self.steps[: number + 1]
        names = [printable(self.grid.columns[token]) for token in step.new]
        what = f"{names[0]} is added" if len(names) == 1 else f"{len(names)} tokens are added together"
        done = f"{step.computed} row{'s' * (step.computed != 1)} computed"
        if step.again:
            done += f", {len(step.again)} of them again: they read what is new"
        elif step.kept:
            done += f"; keys and values of {len(step.kept)} are in the cache"
        so_far, uncached = sum(one.computed for one in until), sum(one.computed + len(one.kept) for one in until)
        counts = f"{so_far} so far" + (f"; {uncached} without a cache" if so_far != uncached else "")
        return f"step {number + 1} of {len(self.steps)}: {what}", done, counts


def _faded(colour: str, strength: float = 0.3) -> str:
    rgb = np.frombuffer(bytes.fromhex(colour[1:]), np.uint8)
    return "#" + bytes((255 + strength * (rgb - 255.0)).round().astype(np.uint8)).hex()


def steps_text(steps: Sequence[Step]) -> str:
    """Say how many rows were computed, and how many without a cache."""
    computed, again = sum(step.computed for step in steps), sum(len(step.again) for step in steps)
    uncached = sum(step.computed + len(step.kept) for step in steps)
    if again:
        return f"{len(steps)} steps compute {computed} rows, {again} of them again: this mask cannot be cached"
    return f"{len(steps)} steps compute {computed} rows; without a cache, {uncached}"
