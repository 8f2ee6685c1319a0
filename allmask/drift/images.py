"""Folders of images, and what a discriminator sees of one: a few measures with names, a small copy, its edges.

Images of any size and kind are compared: each is scaled to the same square, distorted if it is none. What classes they
have, if their folders say so, is not looked at.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from allmask.drift.features import Features, Made, number_features, scaled, vector_features
from allmask.drift.sampling import Reservoir
from allmask.errors import DataError
from allmask.vision.images import images_below
from allmask.vision.pictures import header_of, pixels_of

SIDE, COARSE, CELLS = 32, 8, 4  # pixels of a side, of the small copy's, and the cells in which edges are counted
MEASURES = ("width", "height", "brightness", "contrast", "colourfulness", "warmth", "sharpness", "symmetry")
_LIGHT = torch.tensor([0.299, 0.587, 0.114])  # how bright red, green and blue look
OnProgress = Callable[[int, int], None]  # done, of


@dataclass(frozen=True, eq=False)
class Pictures:
    """Images of a folder, at most so many of them, drawn from all."""

    pixels: Tensor  # (n, 3, SIDE, SIDE) bytes
    sizes: Tensor  # (n, 2) width and height as they were
    where: list[str]
    total: int
    digests: list[bytes] | None = None  # of the files

    def keys(self) -> list[bytes]:
        """Two images with the same key are the same: files byte for byte, otherwise what is seen of them."""
        if self.digests is not None:
            return self.digests
        rows = torch.cat([self.pixels.flatten(1), self.sizes.to(torch.int32).view(torch.uint8).view(-1, 8)], dim=1)
        return [row.tobytes() for row in rows.numpy()]


def read_images(
    folder: Path, most: int, seed: str, on_bad_record: str = "stop", skipped: Counter[str] | None = None,
    told: OnProgress | None = None,
) -> Pictures:  # fmt: skip
    """What is no image is an error that names the file, or is left out and counted."""
    files = images_below(folder)
    chosen = Reservoir[Path](most, seed)(files)
    pixels, sizes, where, digests = [], [], [], []
    for number, file in enumerate(chosen, 1):
        try:
            header = header_of(file)  # what is no image, or too large, is refused before it is decoded
            pixels.append(pixels_of(file, 3, (SIDE, SIDE), whole=True))
        except DataError:
            if on_bad_record != "skip":
                raise
            (skipped if skipped is not None else Counter())["unreadable image"] += 1
            continue
        sizes.append((header.width, header.height))
        where.append(str(file))
        digests.append(sha256(file.read_bytes()).digest())
        if told is not None:
            told(number, len(chosen))
    if not pixels:
        raise DataError(f"{folder}: none of its {len(files):,} images can be read", "fetch or write them again")
    return Pictures(torch.stack(pixels), torch.tensor(sizes), where, len(files), digests)


def table_of(pixels: Tensor, sizes: Tensor) -> tuple[Tensor, list[str]]:
    """(n, columns) of named numbers, in the units people know: measures first, then the pixels of a small copy."""
    image = pixels.double()
    light = (image * _LIGHT.double()[:, None, None]).sum(1)  # (n, SIDE, SIDE)
    down, right = _edges(light)
    measures = [
        *sizes.double().T,
        light.mean((1, 2)),
        light.std((1, 2)),
        (image.amax(1) - image.amin(1)).mean((1, 2)),
        (image[:, 0] - image[:, 2]).mean((1, 2)),
        down.mean((1, 2)) + right.mean((1, 2)),
        (light - light.flip(2)).abs().mean((1, 2)).neg(),
    ]
    small = F.avg_pool2d(image, SIDE // COARSE)  # (n, 3, COARSE, COARSE)
    names = [
        f"{colour} in row {row}, column {column} of {COARSE}"
        for colour in ("red", "green", "blue")
        for row in range(1, COARSE + 1)
        for column in range(1, COARSE + 1)
    ]
    return torch.cat([torch.stack(measures, dim=1), small.flatten(1)], dim=1), [*MEASURES, *names]


def image_features(pixels: Tensor, table: Tensor, names: list[str], teaches: Tensor) -> Features:
    """Ranks of the measures, their spreads and products; the small copy; and edges. A third of a row each."""
    light = (pixels.double() * _LIGHT.double()[:, None, None]).sum(1)
    edges = torch.cat([F.avg_pool2d(one[:, None], SIDE // CELLS).flatten(1) for one in _edges(light)], dim=1)
    count = len(MEASURES)
    measured = number_features(table[:, :count], names[:count], teaches)
    small, drawn = vector_features(table[:, count:], teaches), vector_features(edges.sqrt(), teaches)
    rows = torch.cat([measured.rows, small.rows, drawn.rows], dim=1)
    called = [f"edges {way} in cell {cell}" for way in ("down", "across") for cell in range(1, CELLS**2 + 1)]
    made_of = [*measured.made_of, *(Made("median", (place,)) for place in range(count, len(names)))]
    return Features(scaled(rows, teaches), [*measured.names, *names[count:], *called], made_of + [None] * len(called))


def _edges(light: Tensor) -> tuple[Tensor, Tensor]:
    """How much brightness changes from each pixel to the one below, and to the one on its right; (n, SIDE, SIDE)."""
    padded = F.pad(light[:, None], (0, 1, 0, 1), mode="replicate")[:, 0]
    return (padded[:, 1:, :-1] - light).abs(), (padded[:, :-1, 1:] - light).abs()
