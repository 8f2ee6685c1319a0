"""Images with their classes, in memory; what every reader checks."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from allmask.data.records import unreadable
from allmask.errors import AllmaskError, CheckpointError, DataError, ResourceError

LIMIT = 4 << 30  # bytes of pixels that a reader takes unless told otherwise
_MOST_CLASSES = 65_536  # a label beyond is a mistake, not a class


@dataclass(frozen=True, eq=False)
class Images:
    """A data set: pixels as they are stored, and which of the names each image has."""

    pixels: Tensor  # (N, C, H, W) uint8
    labels: Tensor  # (N,) int64
    names: tuple[str, ...]
    files: tuple[str, ...] = ()  # of each image, where it has one of its own

    def __len__(self) -> int:
        return len(self.pixels)

    def some(self, most: int | None) -> Images:
        """At most so many, from all over the data: folders stand in it class by class. None: all."""
        if most is None or most >= len(self):
            return self
        chosen = all_over(len(self), most)
        files = tuple(self.files[number] for number in chosen.tolist()) if self.files else ()
        return Images(self.pixels[chosen], self.labels[chosen], self.names, files)

    def place(self, number: int) -> str:
        """Where an image is to be found."""
        return self.files[number] if self.files else f"image {number + 1:,}"

    def renumbered(self, names: tuple[str, ...], where: str | Path) -> Images:
        """The same with the numbers that other names have; a class that is none of them is an error."""
        if self.names == names:
            return self
        strange = next((name for name in self.names if name not in names), None)
        if strange is not None:
            raise DataError(
                f"{where}: has a class {strange}; the others have {_some(names)}",
                "held-out images need the same classes",
            )
        numbers = torch.tensor([names.index(name) for name in self.names])
        return Images(self.pixels, numbers[self.labels], names, self.files)


def all_over(total: int, most: int) -> Tensor:
    """At most so many numbers below a total, as far apart as they can be."""
    return torch.linspace(0, total - 1, min(most, total), dtype=torch.float64).round().long()


def _some(names: tuple[str, ...], most: int = 12) -> str:
    return ", ".join(names[:most]) + (", …" if len(names) > most else "")


def checked(
    where: str | Path, pixels: Tensor, labels: Tensor, names: tuple[str, ...] | None = None,
    files: tuple[str, ...] = (),
) -> Images:  # fmt: skip
    """The data set, if it is one: something to see, a label for each image, at least two classes."""
    if not pixels.numel():
        raise DataError(f"{where}: no pixels: {_times(pixels.shape)} numbers", "each image needs at least one pixel")
    if len(pixels) != len(labels):
        raise DataError(f"{where}: {len(pixels):,} images, but {len(labels):,} labels", "fetch both again")
    lowest, highest = int(labels.min()), int(labels.max())
    if lowest < 0 or highest >= (len(names) if names else _MOST_CLASSES):
        wrong = lowest if lowest < 0 else highest
        number = int((labels == wrong).nonzero()[0])
        classes = f"there are {len(names)} classes" if names else f"expected 0 to {_MOST_CLASSES - 1:,}"
        raise DataError(f"{where}: the label of image {number + 1:,} is {wrong}; {classes}")
    names = names or tuple(map(str, range(highest + 1)))
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise DataError(f"{where}: two classes are called {twice}", "rename one of the two")
    if lowest == highest:
        raise DataError(
            f"{where}: all {len(labels):,} images are of one class, {names[lowest]}",
            "there is nothing to tell apart; give images of at least two classes",
        )
    return Images(pixels, labels, names, files)


def within(where: str | Path, size: int, limit: int) -> None:
    """Said before anything is allocated."""
    if size > limit:
        raise ResourceError(
            f"{where}: {size:,} bytes of pixels; the limit is {limit:,}",
            "take fewer or smaller images, or raise limit=",
        )


def _times(numbers: tuple[int, ...]) -> str:
    return " × ".join(f"{number:,}" for number in numbers)


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Whatever a library says about a broken file becomes an error that names the file."""
    try:
        yield
    except AllmaskError:
        raise
    except MemoryError as error:
        raise ResourceError(f"{path}: not enough memory to read it") from error
    except Exception as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise unreadable(path, error) from error
        words = (str(error) or type(error).__name__).splitlines()[0]
        raise DataError(
            f"{path}: cannot be read: {words}", "it is damaged or not what its name says: fetch or write it again"
        ) from error


# ---- from bytes to what a network reads --------------------------------------------------------------------------


def statistics(pixels: Tensor, at_once: int = 1024) -> tuple[Tensor, Tensor]:
    """Mean and deviation of each channel, (C,) each, of pixels from 0 to 1."""
    total = torch.zeros(2, pixels.shape[1], dtype=torch.float64)
    for part in pixels.split(at_once):
        values = part.double().div_(255.0)
        total += torch.stack([values.sum((0, 2, 3)), values.square_().sum((0, 2, 3))])
    mean, second = total / (pixels.numel() // pixels.shape[1])
    deviation = (second - mean.square()).clamp(min=0.0).sqrt()
    return mean.float(), deviation.clamp(min=1.0 / 255.0).float()  # a channel of one value is left at 0


def normalized(pixels: Tensor, mean: Tensor, deviation: Tensor) -> Tensor:
    """Pixels of mean 0 and size 1, as floats (B, C, H, W)."""
    scale, shift = 1.0 / (255.0 * deviation), mean / deviation
    return pixels.float().mul_(scale[:, None, None]).sub_(shift[:, None, None])


@dataclass(frozen=True)
class Preparation:
    """What images are to a network: their size, and the mean and deviation of each channel where it learnt."""

    height: int
    width: int
    mean: tuple[float, ...]
    deviation: tuple[float, ...]

    def __post_init__(self):
        if not all(isinstance(side, int) and side > 0 for side in (self.height, self.width)):
            raise CheckpointError(f"images of {self.width!r} × {self.height!r} pixels; expected numbers from 1")
        numbers = (*self.mean, *self.deviation)
        if not self.mean or len(self.mean) != len(self.deviation) or not all(map(_is_size, numbers)):
            raise CheckpointError(
                f"a mean of {self.mean!r} and a deviation of {self.deviation!r}; expected a number for each channel"
            )
        if min(self.deviation) <= 0.0:
            raise CheckpointError(f"a deviation of {self.deviation!r}; expected numbers above 0")

    @classmethod
    def of(cls, pixels: Tensor) -> Preparation:
        mean, deviation = statistics(pixels)
        height, width = pixels.shape[2:]
        return cls(height, width, tuple(mean.tolist()), tuple(deviation.tolist()))

    @property
    def channels(self) -> int:
        return len(self.mean)

    def __call__(self, pixels: Tensor) -> Tensor:
        """Bytes as the network reads them, in the layout in which convolutions are fastest."""
        ready = normalized(pixels, torch.tensor(self.mean), torch.tensor(self.deviation))
        return ready.contiguous(memory_format=torch.channels_last)

    def expect(self, where: str | Path, pixels: Tensor) -> None:
        """Images of another size or kind are an error."""
        found, wanted = tuple(pixels.shape[1:]), (self.channels, self.height, self.width)
        if found != wanted:
            raise DataError(
                f"{where}: images of {_times(found)} (channels × height × width); the network reads {_times(wanted)}",
                "convert them, or train another network",
            )


def _is_size(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
