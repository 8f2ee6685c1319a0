"""One image, from its file or an array to bytes. Nothing is decoded before its header was looked at."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import Tensor

from allmask.errors import DataError, ResourceError
from allmask.vision.arrays import as_pixels
from allmask.vision.labelled import reading

if TYPE_CHECKING:
    from PIL.Image import Image

ENDINGS = frozenset((".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".ppm", ".pgm", ".tif", ".tiff"))
FORMATS = ("PNG", "JPEG", "BMP", "DIB", "GIF", "WEBP", "PPM", "TIFF")  # of these; no other decoder is asked
_CHANNELS = {"1": 1, "L": 1, "LA": 2, "P": 3, "RGB": 3, "CMYK": 3, "YCbCr": 3, "RGBA": 4, "PA": 4}  # of PIL's modes
_MODES = {1: "L", 2: "LA", 3: "RGB", 4: "RGBA"}
_MOST_PIXELS = 64_000_000  # of one image, before it is made smaller: 200 MB
_ORIENTATION = 0x0112  # a photograph's note on how the camera was held


class Header(NamedTuple):
    """What an image is before it is decoded."""

    width: int
    height: int
    channels: int


def header_of(file: Path) -> Header:
    with opened(file) as image:
        width, height = image.size
        if not width or not height:
            raise DataError(f"{file}: an image of {width} × {height} pixels", "remove it or write it again")
        if width * height > _MOST_PIXELS:
            raise DataError(f"{file}: {width:,} × {height:,} pixels; more than {_MOST_PIXELS:,}", "make it smaller")
        if image.mode not in _CHANNELS:
            raise DataError(f"{file}: pixels of kind {image.mode}; expected 8 bits a channel", "save it as 8-bit")
        turned = _orientation(image) in (5, 6, 7, 8)
        return Header(*((height, width) if turned else (width, height)), _CHANNELS[image.mode])


def pixels_of(file: Path, channels: int, size: tuple[int, int] | None = None, whole: bool = False) -> Tensor:
    """(C, H, W). With a size (width, height), scaled to cover it and cut out of the middle; or `whole`, distorted."""
    from PIL import ImageOps

    with opened(file) as image:
        upright = image if _orientation(image) == 1 else ImageOps.exif_transpose(image)
        return _made(upright, channels, size, whole)


def pixels_from(where: str, array: np.ndarray, channels: int, size: tuple[int, int]) -> Tensor:
    """The same of an array: height × width, or with 1 to 4 channels last or first; bytes, or fractions from 0 to 1."""
    from PIL import Image

    if array.ndim not in (2, 3) or not array.size:
        raise DataError(f"{where}: an array of shape {list(array.shape)}", "expected height × width, and channels")
    found = as_pixels(where, array[None])[0].permute(1, 2, 0).numpy()
    return _made(Image.fromarray(found[..., 0] if found.shape[2] == 1 else found), channels, size)


def _made(image: Image, channels: int, size: tuple[int, int] | None, whole: bool = False) -> Tensor:
    from PIL import Image, ImageOps

    made = image.convert(_MODES[channels])
    if size is not None:
        how = Image.Resampling.BILINEAR
        made = made.resize(size, how) if whole else ImageOps.fit(made, size, how)
    values = torch.frombuffer(bytearray(made.tobytes()), dtype=torch.uint8)
    return values.view(made.height, made.width, channels).permute(2, 0, 1)


def _orientation(image: Image) -> int:
    return image.getexif().get(_ORIENTATION, 1) if image.format in ("JPEG", "MPO") else 1


@contextmanager
def opened(file: Path) -> Iterator[Image]:
    try:
        from PIL import Image
    except ImportError as error:
        raise ResourceError("images need Pillow, which is not installed", "pip install pillow") from error
    with reading(file):
        if not file.stat().st_size:
            raise DataError(f"{file}: an empty file, not an image", "remove it or fetch it again")
        Image.init()
        with Image.open(file, formats=[name for name in FORMATS if name in Image.OPEN]) as image:
            yield image
