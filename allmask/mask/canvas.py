"""Boxes, words and pixels on a page, which becomes SVG text or an image: one layout for notebooks, PNG and GIF.

Lengths are in pixels; y grows downwards. Words are placed by the middle of their line.
"""

from __future__ import annotations

import base64
import io
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from html import escape
from itertools import chain, groupby
from typing import TYPE_CHECKING, Any

import numpy as np

from allmask.mask.labels import text_width

if TYPE_CHECKING:
    from PIL import Image

    from allmask.mask.fonts import Fonts

TINTS = ("#5B84D7", "#E39A57", "#5BA886", "#B276B2", "#CBAA3D", "#66AFCB")  # of documents, in turn
EMPTY, INK, QUIET, HATCH = "#EEF1F5", "#2A2F3A", "#8B93A1", "#C3C9D3"
FAMILIES = "DejaVu Sans, Noto Sans SC, Noto Sans CJK SC, PingFang SC, Microsoft YaHei, sans-serif"
_STRIPE = 6  # pixels between the lines of a hatched box
_SMOOTH = 2  # an image is drawn larger by this factor and then scaled down


@dataclass(frozen=True)
class Box:
    x: float
    y: float
    width: float
    height: float
    fill: str
    radius: float = 3.0
    edge: str = ""  # colour of an outline
    hatched: bool = False


@dataclass(frozen=True)
class Words:
    x: float
    y: float
    text: str
    size: float = 13.0
    fill: str = INK
    anchor: str = "start"  # start, middle, end: which point of the text is at x
    angle: float = 0.0  # degrees, counter-clockwise


@dataclass(frozen=True)
class Pixels:
    """An image of cells, each drawn as a rectangle."""

    x: float
    y: float
    width: float
    height: float
    colours: np.ndarray  # (rows, columns, 3), bytes


Shape = Box | Words | Pixels


@dataclass
class Canvas:
    width: float
    height: float
    shapes: list[Shape] = field(default_factory=list)

    def svg(self) -> str:
        """Return the picture as SVG; its words are text, shown in the fonts of the viewer."""
        return svg_page(self.width, self.height, svg_shapes(self.shapes))

    def image(self, scale: float = 2.0) -> Image.Image:
        """Return the picture as an image of `scale` times as many pixels, with fonts of this machine."""
        (image,) = self.images([[]], scale)
        return image

    def images(self, overlays: Sequence[Sequence[Shape]], scale: float = 2.0) -> list[Image.Image]:
        """Return an image for each overlay: the shapes of this canvas, painted once, and those of the overlay."""
        from PIL import Image

        text = "".join(shape.text for shape in chain(self.shapes, *overlays) if isinstance(shape, Words))
        base = _Painter.blank(self.width, self.height, scale * _SMOOTH, text).painted(self.shapes)
        size = (math.ceil(self.width * scale), math.ceil(self.height * scale))
        return [base.painted(shapes).image.resize(size, Image.Resampling.LANCZOS) for shapes in overlays]


def words_width(text: str, size: float = 13.0) -> float:
    """About how wide a text is drawn: a Chinese character is a square, a letter a bit more than half of one."""
    return size * sum(1.0 if text_width(c) == 2 else 0.62 for c in text)


# ---- SVG ----------------------------------------------------------------------------------------------------


def svg_page(width: float, height: float, body: str) -> str:
    """Return a whole SVG file, white, with the pattern that hatched boxes use."""
    size = f'width="{_n(width)}" height="{_n(height)}" viewBox="0 0 {_n(width)} {_n(height)}"'
    pattern = (
        f'<defs><pattern id="allmask-hatch" width="{_STRIPE}" height="{_STRIPE}" patternUnits="userSpaceOnUse" '
        f'patternTransform="rotate(45)"><path d="M0 0v{_STRIPE}" stroke="{HATCH}" stroke-width="2.4"/></pattern></defs>'
    )
    page = f'<rect width="{_n(width)}" height="{_n(height)}" fill="#fff"/>'
    start = f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="{FAMILIES}">'
    return f"{start}{pattern}{page}{body}</svg>\n"


def svg_shapes(shapes: Sequence[Shape]) -> str:
    """Return shapes as elements of SVG; adjacent boxes that look alike share one."""
    return "".join(_svg_run(list(run)) for _, run in groupby(shapes, _look))


def _look(shape: Shape) -> Any:
    return (shape.fill, shape.radius, shape.edge, shape.hatched) if isinstance(shape, Box) else id(shape)


def _svg_run(run: Sequence[Shape]) -> str:
    first = run[0]
    if isinstance(first, Words):
        return _svg_words(first)
    if isinstance(first, Pixels):
        file = io.BytesIO()
        _as_image(first).save(file, "PNG", optimize=True)
        data = base64.b64encode(file.getvalue()).decode()
        place = f'x="{_n(first.x)}" y="{_n(first.y)}" width="{_n(first.width)}" height="{_n(first.height)}"'
        style = 'preserveAspectRatio="none" style="image-rendering:pixelated"'
        return f'<image {place} {style} href="data:image/png;base64,{data}"/>'
    boxes = [shape for shape in run if isinstance(shape, Box)]
    fill = "url(#allmask-hatch)" if first.hatched else first.fill
    if first.edge or first.hatched:
        edge = f' stroke="{first.edge}"' if first.edge else ""
        return "".join(
            f'<rect x="{_n(b.x)}" y="{_n(b.y)}" width="{_n(b.width)}" height="{_n(b.height)}" rx="{_n(b.radius)}" '
            f'fill="{fill}"{edge}/>'
            for b in boxes
        )
    # A square with a round outline of its own colour has round corners, and takes few letters.
    inset = first.radius
    path = "".join(
        f"M{_n(b.x + inset)} {_n(b.y + inset)}h{_n(b.width - 2 * inset)}v{_n(b.height - 2 * inset)}"
        f"h{_n(2 * inset - b.width)}z"
        for b in boxes
    )
    outline = f' stroke="{fill}" stroke-width="{_n(2 * first.radius)}" stroke-linejoin="round"' if first.radius else ""
    return f'<path fill="{fill}"{outline} d="{path}"/>'


def _svg_words(words: Words) -> str:
    y = words.y + 0.36 * words.size  # from the middle of the line to its baseline
    turn = f' transform="rotate({_n(-words.angle)} {_n(words.x)} {_n(words.y)})"' if words.angle else ""
    anchor = f' text-anchor="{words.anchor}"' if words.anchor != "start" else ""
    style = f'font-size="{_n(words.size)}" fill="{words.fill}"{anchor}{turn}'
    return f'<text x="{_n(words.x)}" y="{_n(y)}" {style} xml:space="preserve">{escape(words.text)}</text>'


def _n(number: float) -> str:
    return f"{number:.2f}".rstrip("0").rstrip(".")


# ---- images -------------------------------------------------------------------------------------------------


def _as_image(pixels: Pixels) -> Image.Image:
    from PIL import Image

    return Image.fromarray(pixels.colours.astype(np.uint8), "RGB")


class _Painter:
    """Draws shapes with pillow, larger by `scale`."""

    def __init__(self, image: Image.Image, scale: float, fonts: Fonts):
        from PIL import ImageDraw

        self.image, self.scale, self.fonts = image, scale, fonts
        self.draw = ImageDraw.Draw(image)

    @classmethod
    def blank(cls, width: float, height: float, scale: float, text: str) -> _Painter:
        """A white page; Chinese letters of the text that no font here has are refused."""
        from PIL import Image

        from allmask.mask.fonts import Fonts

        page = Image.new("RGB", (math.ceil(width * scale), math.ceil(height * scale)), "white")
        return cls(page, scale, Fonts.find(text, as_text=False))

    def painted(self, shapes: Iterable[Shape]) -> _Painter:
        """A copy with these shapes on top."""
        copy = _Painter(self.image.copy(), self.scale, self.fonts)
        for shape in shapes:
            if isinstance(shape, Words):
                copy._words(shape)
            elif isinstance(shape, Pixels):
                copy._pixels(shape)
            else:
                copy._box(shape)
        return copy

    def _corners(self, shape: Box | Pixels) -> tuple[int, int, int, int]:
        x, y, s = shape.x, shape.y, self.scale
        return round(x * s), round(y * s), round((x + shape.width) * s), round((y + shape.height) * s)

    def _box(self, box: Box) -> None:
        from PIL import Image, ImageDraw

        left, top, right, bottom = self._corners(box)
        place, radius = (left, top, right - 1, bottom - 1), box.radius * self.scale
        if box.hatched:
            tile = Image.new("RGB", (right - left, bottom - top), "white")
            lines, step = ImageDraw.Draw(tile), _STRIPE * self.scale * math.sqrt(2)
            first = -((left + top) % step)  # so that the stripes of neighbours meet
            for start in np.arange(first - tile.height, tile.width + tile.height, step).tolist():
                lines.line([(start, tile.height), (start + tile.height, 0)], HATCH, round(2.4 * self.scale))
            shape = Image.new("L", tile.size, 0)
            ImageDraw.Draw(shape).rounded_rectangle((0, 0, tile.width - 1, tile.height - 1), radius, 255)
            self.image.paste(tile, (left, top), shape)
        else:
            self.draw.rounded_rectangle(place, radius, box.fill if box.fill != "none" else None)
        if box.edge:
            self.draw.rounded_rectangle(place, radius, None, box.edge, round(self.scale))

    def _pixels(self, pixels: Pixels) -> None:
        from PIL import Image

        left, top, right, bottom = self._corners(pixels)
        self.image.paste(_as_image(pixels).resize((right - left, bottom - top), Image.Resampling.NEAREST), (left, top))

    def _words(self, words: Words) -> None:
        from PIL import Image, ImageDraw

        runs = [(run, _font(path, round(words.size * self.scale))) for run, path in _runs(self.fonts.show(words.text))]
        width = sum(font.getlength(run) for run, font in runs)
        shift = {"start": 0.0, "middle": width / 2, "end": width}[words.anchor]
        x, y = words.x * self.scale, words.y * self.scale
        if not words.angle:
            baseline, x = y + 0.36 * words.size * self.scale, x - shift
            for run, font in runs:
                self.draw.text((x, baseline), run, words.fill, font, anchor="ls")
                x += font.getlength(run)
            return
        side = 2 * math.ceil(width + 2 * words.size * self.scale)  # a square around x, y: turned, nothing is cut off
        layer = Image.new("L", (side, side), 0)
        pen, along = ImageDraw.Draw(layer), side / 2 - shift
        for run, font in runs:
            pen.text((along, side / 2 + 0.36 * words.size * self.scale), run, 255, font, anchor="ls")
            along += font.getlength(run)
        turned = layer.rotate(words.angle, Image.Resampling.BICUBIC)
        self.image.paste(words.fill, (round(x - side / 2), round(y - side / 2)), turned)


def _runs(text: str) -> Iterator[tuple[str, str]]:
    """Cut a text where the font changes; yield each piece and the file of its font."""
    for path, run in groupby(text, _font_file):
        yield "".join(run), path


@cache
def _font_file(character: str) -> str:
    from allmask.mask.fonts import characters

    return next((path for path in _font_files() if character in characters(path)), _font_files()[0])


@cache
def _font_files() -> tuple[str, ...]:
    from allmask.mask.fonts import candidates

    return tuple(path for _, path in candidates())


@cache
def _font(path: str, size: int) -> Any:
    from PIL import ImageFont

    return ImageFont.truetype(path, size)
