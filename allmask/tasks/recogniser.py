"""From a network of images to what it says of them.

recognise = allmask.pipeline("image", "runs/digits")
recognise("seven.png").label             # or an array; or a list of them
recognise.answers(pixels)                # scores of bytes (N, C, H, W)
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, overload

import numpy as np
from torch import Tensor

from allmask.errors import CheckpointError, UsageError
from allmask.heads import Labels
from allmask.tasks.classifier import Prediction, predictions
from allmask.tasks.marks import mark
from allmask.training import resolve_precision
from allmask.vision import files
from allmask.vision.images import decoded, has_part, images_below, kind_of, read
from allmask.vision.labelled import Images, Preparation
from allmask.vision.learning import scores_of
from allmask.vision.resnet import ResNet

WINDOW = 256  # images in memory
Image = (
    str | Path | np.ndarray | Tensor
)  # a file; or height × width, with channels last or first, in bytes or fractions


@dataclass(frozen=True, eq=False)
class Recogniser:
    """A network, the names of its classes, and what it expects of images."""

    model: ResNet
    labels: Labels
    preparation: Preparation
    precision: str = "auto"  # fp32, bf16; auto is the fastest here

    def __post_init__(self):
        if self.precision not in ("auto", "fp32", "bf16"):
            raise UsageError(f"images are not read in {self.precision}", "expected auto, fp32 or bf16")

    @classmethod
    def open(cls, folder: str | Path, precision: str = "auto") -> Recogniser:
        found = files.load(folder)
        if found.labels is None or found.preparation is None:
            raise CheckpointError(
                f"{folder}: does not say what its classes are called and what images it learnt from",
                "train one that does: allmask train --task image",
            )
        return cls(found.model, found.labels, found.preparation, precision)

    @overload
    def __call__(self, images: str | Path) -> Prediction: ...
    @overload
    def __call__(self, images: Sequence[Image]) -> list[Prediction]: ...
    @overload
    def __call__(self, images: np.ndarray | Tensor) -> Prediction | list[Prediction]: ...

    def __call__(self, images: Image | Sequence[Image]) -> Prediction | list[Prediction]:
        """A file or an array, of any size and kind, or several; an array of four dimensions is several."""
        if isinstance(images, str | Path) or (isinstance(images, np.ndarray | Tensor) and images.ndim < 4):
            return next(self._told([_taken(images)]))
        return list(self._told([_taken(image) for image in images]))

    def answers(self, pixels: Tensor) -> Tensor:
        """Scores (N, classes) of bytes (N, C, H, W), which have the size that is expected."""
        self.preparation.expect("pixels", pixels)
        return scores_of(self.model, pixels, self.preparation, resolve_precision(self.precision))

    def stream(self, path: Path) -> tuple[int, Iterator[tuple[str, Prediction]]]:
        """How many images a file, a folder or a data set has, then where each is and what it shows."""
        if kind_of(path) in ("folder", None):
            found = images_below(path)
            return len(found), zip(map(str, found), self._told(found), strict=True)
        data = self.read(path)
        places = map(data.place, range(len(data)))
        return len(data), zip(places, predictions(self.labels, self.answers(data.pixels)), strict=True)

    def _told(self, images: Sequence[Path | np.ndarray]) -> Iterator[Prediction]:
        expected = self.preparation
        for at in range(0, len(images), WINDOW):
            pixels = decoded(images[at : at + WINDOW], expected.height, expected.width, expected.channels, at)
            yield from predictions(self.labels, self.answers(pixels))

    def read(self, path: Path) -> Images:
        """A data set, or its part for tests if it has one; images of a folder are made as they are expected."""
        expected = self.preparation
        square = expected.height == expected.width
        made = (expected.height if square else None, expected.channels) if kind_of(path) == "folder" else (None, None)
        images = read(path, "test" if has_part(path, "test") else "train", *made)
        expected.expect(path, images.pixels)
        return images.renumbered(self.labels.names, path)

    def judged(self, images: Images, show: int = 0) -> dict[str, Any]:
        """All metrics, what each class was taken for, and the errors of which it was surest."""
        scores = self.answers(images.pixels)
        told = mark(self.labels, scores, images.labels)
        classes = {name: _counted(row) for name, row in told.labels.items()}
        result = {"scores": told.scores, "classes": classes, "confusion": told.confusion.tolist()}
        return result | ({"errors": self._worst(images, scores, show)} if show else {})

    def _worst(self, images: Images, scores: Tensor, count: int) -> list[dict[str, Any]]:
        shares, found = scores.softmax(1).max(1)
        wrong = (found != images.labels).nonzero()[:, 0]
        rows = wrong[shares[wrong].argsort(descending=True)][:count].tolist()
        names = self.labels.names
        return [
            {
                "where": images.place(row),
                "label": names[int(images.labels[row])],
                "prediction": names[int(found[row])],
                "probability": float(shares[row]),
            }
            for row in rows
        ]


def _taken(image: Any) -> Path | np.ndarray:
    if isinstance(image, str | Path):
        return Path(image)
    if isinstance(image, np.ndarray | Tensor):
        return np.asarray(image)
    raise UsageError(f"an image is a file or an array, not {type(image).__name__}", "give np.asarray(image)")


def _counted(row: dict[str, float]) -> dict[str, float]:
    return {"images" if name == "texts" else name: value for name, value in row.items()}
