"""Images in memory: labelled images as bytes, image files and arrays converted to bytes, normalization.

No image file is decoded before its header has been checked. Shapes: N images, C channels, H × W pixels.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import Tensor

from allmask.data import source
from allmask.data.source import unreadable
from allmask.errors import AllmaskError, CheckpointError, DataError, ResourceError

if TYPE_CHECKING:
    from PIL.Image import Image

LIMIT = 4 << 30  # default limit of a data set, in bytes of pixels
_SMALL, _RATIO = 64 << 20, 32  # of compressed arrays: bytes that need no explanation, and the ratio of larger ones
ENDINGS = frozenset((".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".ppm", ".pgm", ".tif", ".tiff"))
FORMATS = ("PNG", "JPEG", "BMP", "DIB", "GIF", "WEBP", "PPM", "TIFF")  # the only decoders that are used
_MAX_CLASSES = 65_536  # a larger label is a mistake
_MAX_PIXELS = 64_000_000  # of one image before it is scaled: 200 MB
_CHANNELS = {"1": 1, "L": 1, "LA": 2, "P": 3, "RGB": 3, "CMYK": 3, "YCbCr": 3, "RGBA": 4, "PA": 4}  # of PIL's modes
_MODES = {1: "L", 2: "LA", 3: "RGB", 4: "RGBA"}
_ORIENTATION = 0x0112  # EXIF tag: how the camera was held
_CHUNK = 1024  # images converted at once


# ---- labelled images ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Images:
    """A data set of images with class labels."""

    pixels: Tensor  # (N, C, H, W) uint8
    labels: Tensor  # (N,) int64, indices into names
    names: tuple[str, ...]  # of the classes
    files: tuple[str, ...] = ()  # the file of each image, if each has its own

    def __len__(self) -> int:
        return len(self.pixels)

    def subset(self, limit: int | None) -> Images:
        """At most `limit` images, evenly spaced over the data, which may be ordered by class. None means all."""
        if limit is None or limit >= len(self):
            return self
        chosen = evenly_spaced(len(self), limit)
        files = tuple(self.files[number] for number in chosen.tolist()) if self.files else ()
        return Images(self.pixels[chosen], self.labels[chosen], self.names, files)

    def with_names(self, names: tuple[str, ...], where: str | Path) -> Images:
        """The same images with labels that are indices into `names`. A class that `names` lacks is an error."""
        if self.names == names:
            return self
        unknown = next((name for name in self.names if name not in names), None)
        if unknown is not None:
            known = ", ".join(names[:12]) + (", …" if len(names) > 12 else "")
            raise DataError(
                f"{where}: has a class {unknown}; expected one of {known}", "held-out images need the same classes"
            )
        numbers = torch.tensor([names.index(name) for name in self.names])
        return Images(self.pixels, numbers[self.labels], names, self.files)


def evenly_spaced(total: int, limit: int) -> Tensor:
    """At most `limit` indices below `total`, as far apart as possible."""
    return torch.linspace(0, total - 1, min(limit, total), dtype=torch.float64).round().long()


def checked(
    where: str | Path, pixels: Tensor, labels: Tensor, names: tuple[str, ...] | None = None,
    files: tuple[str, ...] = (),
) -> Images:  # fmt: skip
    """Build a data set after checking it: there are pixels, one valid label per image, and at least two classes."""
    if not pixels.numel():
        raise DataError(f"{where}: no pixels: {_times(pixels.shape)} numbers", "each image needs at least one pixel")
    if len(pixels) != len(labels):
        raise DataError(f"{where}: {len(pixels):,} images, but {len(labels):,} labels", "download both again")
    lowest, highest = int(labels.min()), int(labels.max())
    if lowest < 0 or highest >= (len(names) if names else _MAX_CLASSES):
        wrong = lowest if lowest < 0 else highest
        number = int((labels == wrong).nonzero()[0])
        classes = f"there are {len(names)} classes" if names else f"expected 0 to {_MAX_CLASSES - 1:,}"
        raise DataError(f"{where}: the label of image {number + 1:,} is {wrong}; {classes}")
    names = names or tuple(map(str, range(highest + 1)))
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise DataError(f"{where}: two classes are called {twice}", "rename one of the two")
    if lowest == highest:
        raise DataError(
            f"{where}: all {len(labels):,} images are of one class, {names[lowest]}",
            "give images of at least two classes",
        )
    return Images(pixels, labels, names, files)


def unpacked_limit(path: Path, limit: int) -> int:
    """The most bytes that a compressed file may unpack to: 32 times as many as it has, or 64 MB.

    MNIST shrinks to a fifth; sorted labels to far less, but they are few bytes.
    """
    return min(limit, source.unpacked_limit(path, small=_SMALL, times=_RATIO))


def check_size(where: str | Path, size: int, limit: int) -> None:
    """Refuse data that is larger than the limit, before any memory is allocated for it."""
    if size > limit:
        raise ResourceError(
            f"{where}: {size:,} bytes of pixels; the limit is {limit:,}",
            "take fewer or smaller images, or raise limit=",
        )


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Turn whatever a library raises on a broken file into an error that names the file."""
    try:
        yield
    except AllmaskError:
        raise
    except MemoryError as error:
        raise ResourceError(f"{path}: not enough memory to read it") from error
    except Exception as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise unreadable(path, error) from error
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise DataError(
            f"{path}: cannot be read: {reason}", "it is damaged, or its name is wrong: download or write it again"
        ) from error


def _times(numbers: tuple[int, ...]) -> str:
    return " × ".join(f"{number:,}" for number in numbers)


# ---- image files ---------------------------------------------------------------------------------------------------


class Header(NamedTuple):
    width: int
    height: int
    channels: int


def find_images(path: Path) -> list[Path]:
    """The path itself if it is a file, or all images in a folder and its subfolders, sorted.

    Images are recognized by their endings, so other files may lie beside them. Hidden files and folders
    (.ipynb_checkpoints/) are ignored.
    """
    if path.is_file():
        return [path]
    if not path.is_dir():
        raise DataError(f"{path}: does not exist", "give an image, or a folder with images in it")
    with reading(path):
        found = sorted(file for file in path.rglob("*") if file.suffix.lower() in ENDINGS)
        found = [file for file in found if not any(word[0] == "." for word in file.relative_to(path).parts)]
    if not found:
        raise DataError(f"{path}: no images in it", f"expected {', '.join(sorted(ENDINGS))}; or remove the folder")
    return found


def read_header(file: Path) -> Header:
    """Size and channels of an image, which is not decoded; an image that cannot be used is an error."""
    with _opened(file) as image:
        width, height = image.size
        if not width or not height:
            raise DataError(f"{file}: an image of {width} × {height} pixels", "remove it or write it again")
        if width * height > _MAX_PIXELS:
            raise DataError(f"{file}: {width:,} × {height:,} pixels; more than {_MAX_PIXELS:,}", "make it smaller")
        if image.mode not in _CHANNELS:
            raise DataError(f"{file}: pixels of kind {image.mode}; expected 8 bits a channel", "save it as 8-bit")
        turned, channels = _orientation(image) in (5, 6, 7, 8), _CHANNELS[image.mode]
        most = source.unpacked_limit(file)
        if width * height * channels > most:
            what = f"{width:,} × {height:,} pixels in {file.stat().st_size:,} bytes"
            raise DataError(f"{file}: {what}; at most {most:,} bytes are unpacked from that", "make it smaller")
        return Header(*((height, width) if turned else (width, height)), channels)


def read_pixels(file: Path, channels: int, size: tuple[int, int] | None = None, crop: bool = True) -> Tensor:
    """Decode an image to bytes (C, H, W).

    With a size (width, height) the image is scaled to cover it and its middle is cut out; with `crop=False` the whole
    image is scaled, distorted if its aspect ratio differs.
    """
    from PIL import ImageOps

    with _opened(file) as image:
        upright = image if _orientation(image) == 1 else ImageOps.exif_transpose(image)
        return _converted(upright, channels, size, crop)


def read_all(images: Sequence[Path | np.ndarray], height: int, width: int, channels: int, first: int = 1) -> Tensor:
    """Bytes (N, C, H, W) of image files or arrays of any size: each is scaled and its middle is cut out.

    Arrays are height × width, or have 1 to 4 channels last or first; bytes, or fractions from 0 to 1. Errors name an
    array by its number, counted from `first`.
    """
    pixels = torch.empty(len(images), channels, height, width, dtype=torch.uint8)
    for number, image in enumerate(images):
        if isinstance(image, np.ndarray):
            from PIL import Image

            where = f"image {first + number:,}"
            if image.ndim not in (2, 3) or not image.size:
                what = f"an array of shape {list(image.shape)}"
                raise DataError(f"{where}: {what}", "expected height × width, and channels")
            array = pixels_of(where, image[None])[0].permute(1, 2, 0).numpy()
            array = array[..., 0] if array.shape[2] == 1 else array
            pixels[number] = _converted(Image.fromarray(array), channels, (width, height))
        else:
            read_header(image)  # refuses a file that is no image, or too large, before it is decoded
            pixels[number] = read_pixels(image, channels, (width, height))
    return pixels


def _converted(image: Image, channels: int, size: tuple[int, int] | None, crop: bool = True) -> Tensor:
    from PIL import Image, ImageOps

    if image.mode != _MODES[channels]:
        image = image.convert(_MODES[channels])
    if size is not None:
        bilinear = Image.Resampling.BILINEAR
        image = ImageOps.fit(image, size, bilinear) if crop else image.resize(size, bilinear)
    values = torch.frombuffer(bytearray(image.tobytes()), dtype=torch.uint8)
    return values.view(image.height, image.width, channels).permute(2, 0, 1)


def _orientation(image: Image) -> int:
    return image.getexif().get(_ORIENTATION, 1) if image.format in ("JPEG", "MPO") else 1


@contextmanager
def _opened(file: Path) -> Iterator[Image]:
    try:
        from PIL import Image
    except ImportError as error:
        raise ResourceError("images need Pillow, which is not installed", "pip install pillow") from error
    with reading(file):
        if not file.stat().st_size:
            raise DataError(f"{file}: an empty file, not an image", "remove it or download it again")
        Image.init()
        with Image.open(file, formats=[name for name in FORMATS if name in Image.OPEN]) as image:
            yield image


# ---- arrays --------------------------------------------------------------------------------------------------------


def labels_of(where: str, labels: np.ndarray) -> Tensor:
    if labels.dtype.kind not in "ui" or labels.shape[:1] != (labels.size,):
        raise DataError(
            f"{where}: {labels.dtype} of shape {list(labels.shape)}; expected a whole number for each image",
            "number the classes from 0",
        )
    return torch.from_numpy(labels.reshape(-1).astype(np.int64))


def pixels_of(where: str, images: np.ndarray) -> Tensor:
    """Convert an array of images, in any of the usual shapes and types, to bytes (N, C, H, W)."""
    images = _channels_first(where, images)
    if images.dtype != np.uint8:
        images = _as_bytes(where, images)
    return torch.from_numpy(np.ascontiguousarray(images))


def _channels_first(where: str, images: np.ndarray) -> np.ndarray:
    shape = images.shape
    if len(shape) == 2 and shape[1] == 3 * 32 * 32:  # a row of CIFAR
        return images.reshape(-1, 3, 32, 32)
    if len(shape) == 3:
        return images[:, None]
    for channels in ((1, 3), (2, 4)):  # without and with opacity
        if len(shape) == 4 and shape[3] in channels:
            return images.transpose(0, 3, 1, 2)
        if len(shape) == 4 and shape[1] in channels:
            return images
    raise DataError(
        f"{where}: an array of shape {list(shape)}; expected images × height × width, and 1 to 4 channels last or first"
    )


def _as_bytes(where: str, images: np.ndarray) -> np.ndarray:
    """Round numbers from 0 to 255; scale booleans and fractions from 0 to 1 to that range."""
    if images.dtype.kind not in "uifb":
        raise DataError(f"{where}: {images.dtype}; pixels are numbers")
    for start in range(0, len(images), _CHUNK):
        bad = ~np.isfinite(images[start : start + _CHUNK]).all((1, 2, 3))
        if bad.any():
            number = start + int(bad.argmax()) + 1
            raise DataError(f"{where}: image {number:,} has pixels that are NaN or infinite", "repair or drop it")
    lowest, highest = (float(f(images)) if images.size else 0.0 for f in (np.min, np.max))
    if lowest < 0.0 or highest > 255.0:
        raise DataError(f"{where}: pixels from {lowest:g} to {highest:g}; expected 0 to 255, or fractions from 0 to 1")
    scale = 255.0 if images.dtype.kind in "fb" and highest <= 1.0 else 1.0
    converted = np.empty(images.shape, np.uint8)
    for start in range(0, len(images), _CHUNK):
        converted[start : start + _CHUNK] = np.rint(images[start : start + _CHUNK] * scale)
    return converted


# ---- normalization -------------------------------------------------------------------------------------------------


def statistics(pixels: Tensor, chunk: int = _CHUNK) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation of each channel, (C,) each, for pixels scaled to 0…1."""
    total = torch.zeros(2, pixels.shape[1], dtype=torch.float64)
    for part in pixels.split(chunk):
        values = part.double().div_(255.0)
        total += torch.stack([values.sum((0, 2, 3)), values.square_().sum((0, 2, 3))])
    mean, second = total / (pixels.numel() // pixels.shape[1])
    deviation = (second - mean.square()).clamp(min=0.0).sqrt()
    return mean.float(), deviation.clamp(min=1.0 / 255.0).float()  # a constant channel becomes 0


def normalize(pixels: Tensor, mean: Tensor, deviation: Tensor) -> Tensor:
    """Bytes (B, C, H, W) as floats with mean 0 and standard deviation 1 in each channel."""
    scale, shift = 1.0 / (255.0 * deviation), mean / deviation
    return pixels.float().mul_(scale[:, None, None]).sub_(shift[:, None, None])


@dataclass(frozen=True)
class Preparation:
    """The input of a network: image size, and mean and standard deviation of each channel of its training images."""

    height: int
    width: int
    mean: tuple[float, ...]
    deviation: tuple[float, ...]

    def __post_init__(self):
        if not all(isinstance(side, int) and side > 0 for side in (self.height, self.width)):
            raise CheckpointError(f"images of {self.width!r} × {self.height!r} pixels; expected numbers from 1")
        numbers = (*self.mean, *self.deviation)
        if not self.mean or len(self.mean) != len(self.deviation) or not all(map(_is_finite_number, numbers)):
            raise CheckpointError(
                f"a mean of {self.mean!r} and a deviation of {self.deviation!r}; expected a number for each channel"
            )
        if min(self.deviation) <= 0.0:
            raise CheckpointError(f"a deviation of {self.deviation!r}; expected numbers above 0")

    @classmethod
    def of(cls, pixels: Tensor) -> Preparation:
        """From the training images, bytes (N, C, H, W)."""
        mean, deviation = statistics(pixels)
        height, width = pixels.shape[2:]
        return cls(height, width, tuple(mean.tolist()), tuple(deviation.tolist()))

    @property
    def channels(self) -> int:
        return len(self.mean)

    def __call__(self, pixels: Tensor) -> Tensor:
        """Normalize bytes (B, C, H, W); the result is channels-last, in which convolutions are fastest."""
        floats = normalize(pixels, torch.tensor(self.mean), torch.tensor(self.deviation))
        return floats.contiguous(memory_format=torch.channels_last)

    def expect(self, where: str | Path, pixels: Tensor) -> None:
        """Raise an error unless images (N, C, H, W) have the size and the channels of this network."""
        found, expected = tuple(pixels.shape[1:]), (self.channels, self.height, self.width)
        if found != expected:
            raise DataError(
                f"{where}: images of {_times(found)} (channels × height × width); "
                f"the network expects {_times(expected)}",
                "convert them, or train another network",
            )


def _is_finite_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
