"""Data sets in few files: MNIST's idx, CIFAR-10's binaries, npz archives, the digits of scikit-learn.

Headers are not believed: what they announce is compared with what is there before anything is allocated for it.
Pickles are not read.
"""

from __future__ import annotations

import gzip
import math
import os
import zipfile
from collections.abc import Sequence
from importlib import import_module
from io import BufferedIOBase
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from allmask.errors import DataError, ResourceError
from allmask.vision.labelled import LIMIT, Images, checked, reading, within

CIFAR10 = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
_RECORD = 1 + 3 * 32 * 32  # a label, then the red, green and blue planes
NPZ = {  # the names of images and labels
    "train": (("x_train", "y_train"), ("train_images", "train_labels"), ("images", "labels"), ("data", "labels")),
    "test": (("x_test", "y_test"), ("test_images", "test_labels")),
}
NPZ_NAMES = ("names", "class_names", "label_names")
_AT_ONCE = 1024  # images converted together


# ---- MNIST -------------------------------------------------------------------------------------------------------


def read_idx(images: Path, labels: Path, limit: int = LIMIT) -> Images:
    """Grey images and their labels, plain or gzipped."""
    pixels = torch.from_numpy(_idx(images, 3, limit))[:, None]
    return checked(images, pixels, torch.from_numpy(_idx(labels, 1, limit)).long())


def _idx(path: Path, dimensions: int, limit: int) -> np.ndarray:
    """The bytes of an idx file: two zeros, a type, how many dimensions, their sizes (big-endian), the numbers."""
    with reading(path), path.open("rb") as raw:
        packed = raw.read(2) == b"\x1f\x8b"
        raw.seek(0)
        stream = gzip.GzipFile(fileobj=raw) if packed else raw
        header = stream.read(4 + 4 * dimensions)
        sizes = _idx_sizes(path, header, dimensions)
        total = math.prod(sizes)
        within(path, total, limit)
        there = None if packed else os.fstat(raw.fileno()).st_size - len(header)
        if there is not None and there != total:
            raise _other_length(path, sizes, f"{there:,}")
        values = np.empty(total, np.uint8)  # costs no memory before it is filled
        filled = _fill(stream, values)
        if filled < total or stream.read(1):
            raise _other_length(path, sizes, f"{filled:,}" if filled < total else "more")
        return values.reshape(sizes)


def _idx_sizes(path: Path, header: bytes, dimensions: int) -> tuple[int, ...]:
    if len(header) < 4 or header[:2] != b"\0\0":
        raise DataError(
            f"{path}: not an idx file: it begins with {header[:4].hex(' ') or 'nothing'}",
            f"expected 00 00 08 {dimensions:02x}; fetch it again",
        )
    if header[2] != 8 or header[3] != dimensions:
        raise DataError(
            f"{path}: an idx file of type 0x{header[2]:02x} with {header[3]} dimensions; "
            f"expected bytes (0x08) with {dimensions}",
            "images have three dimensions, labels one: are the two files exchanged?",
        )
    if len(header) < 4 + 4 * dimensions:
        raise DataError(f"{path}: an idx file that ends within its header", "fetch it again")
    return tuple(int.from_bytes(header[at : at + 4], "big") for at in range(4, len(header), 4))


def _other_length(path: Path, sizes: tuple[int, ...], found: str) -> DataError:
    announced = " × ".join(f"{size:,}" for size in sizes)
    return DataError(f"{path}: the header announces {announced} bytes, there are {found}", "fetch it again")


def _fill(stream: BufferedIOBase, values: np.ndarray) -> int:
    """Read as much as there is room for; how much there was."""
    filled = 0
    while filled < len(values) and (count := stream.readinto(values[filled : filled + (1 << 20)].data)):
        filled += count
    return filled


# ---- CIFAR-10 ----------------------------------------------------------------------------------------------------


def read_cifar10(files: Sequence[Path], names: tuple[str, ...] = CIFAR10, limit: int = LIMIT) -> Images:
    """Records of 3,073 bytes, from one file after another."""
    counts = [_records(file) for file in files]
    within(files[0].parent, sum(counts) * _RECORD, limit)
    pixels = torch.empty(sum(counts), 3, 32, 32, dtype=torch.uint8)
    labels = torch.empty(sum(counts), dtype=torch.int64)
    begin = 0
    for file, count in zip(files, counts, strict=True):
        with reading(file):
            records = torch.from_numpy(np.fromfile(file, np.uint8, count * _RECORD).reshape(count, _RECORD))
        wrong = (records[:, 0] >= len(names)).nonzero()
        if len(wrong):
            number = int(wrong[0])
            raise DataError(
                f"{file}: the label of image {number + 1:,} is {records[number, 0]}; there are {len(names)} classes",
                "expected the binary version of CIFAR-10; fetch it again",
            )
        labels[begin : begin + count] = records[:, 0]
        pixels[begin : begin + count] = records[:, 1:].reshape(count, 3, 32, 32)
        begin += count
    return checked(files[0].parent, pixels, labels, names)


def _records(file: Path) -> int:
    with reading(file):
        size = file.stat().st_size
    if not size or size % _RECORD:
        raise DataError(
            f"{file}: {size:,} bytes; expected records of {_RECORD:,} (a label and 3 × 32 × 32 pixels)",
            "it is cut off, or not the binary version of CIFAR-10; fetch it again",
        )
    return size // _RECORD


# ---- npz ---------------------------------------------------------------------------------------------------------


def read_npz(path: Path, part: str = "train", limit: int = LIMIT) -> Images:
    """Arrays of images and labels under any of the usual names, see NPZ."""
    with reading(path), zipfile.ZipFile(path) as archive:
        members = {info.filename.removesuffix(".npy"): info for info in archive.infolist()}
        found = next((pair for pair in NPZ[part] if all(name in members for name in pair)), None)
        if found is None:
            known = " or ".join(" and ".join(pair) for pair in NPZ[part])
            raise DataError(f"{path}: it has {', '.join(members) or 'nothing'}; expected {known}", "rename the arrays")
        pixels = as_pixels(f"{path}: {found[0]}", _member(path, archive, members[found[0]], limit))
        labels = as_labels(f"{path}: {found[1]}", _member(path, archive, members[found[1]], limit))
        titles = next((_member(path, archive, members[name], limit) for name in NPZ_NAMES if name in members), None)
    return checked(path, pixels, labels, None if titles is None else tuple(map(str, titles.ravel().tolist())))


def has_arrays(path: Path, part: str) -> bool:
    with reading(path), zipfile.ZipFile(path) as archive:
        names = {name.removesuffix(".npy") for name in archive.namelist()}
    return any(names.issuperset(pair) for pair in NPZ[part])


def _member(path: Path, archive: zipfile.ZipFile, info: zipfile.ZipInfo, limit: int) -> np.ndarray:
    """One array, once its header has been compared with its length."""
    readers = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
    with archive.open(info) as stream:
        version = np.lib.format.read_magic(stream)
        if version not in readers:
            raise DataError(f"{path}: {info.filename} is of version {version} of the format; expected 1.0 or 2.0")
        shape, _, dtype = readers[version](stream)
        there = info.file_size - stream.tell()
    if dtype.hasobject:
        raise DataError(f"{path}: {info.filename} holds Python objects, which are never loaded", "save plain numbers")
    size = math.prod(shape) * dtype.itemsize
    within(f"{path}: {info.filename}", size, limit)
    if size != there:
        raise DataError(
            f"{path}: the header of {info.filename} announces {size:,} bytes, there are {there:,}", "write it again"
        )
    with archive.open(info) as stream:
        return np.lib.format.read_array(stream, allow_pickle=False)


def as_labels(where: str, labels: np.ndarray) -> Tensor:
    if labels.dtype.kind not in "ui" or labels.shape[:1] != (labels.size,):
        raise DataError(
            f"{where}: {labels.dtype} of shape {list(labels.shape)}; expected a whole number for each image",
            "number the classes from 0",
        )
    return torch.from_numpy(labels.reshape(-1).astype(np.int64))


def as_pixels(where: str, images: np.ndarray) -> Tensor:
    """(N, C, H, W) bytes from what arrays of images usually are."""
    images = _four_dimensions(where, images)
    if images.dtype != np.uint8:
        images = _as_bytes(where, images)
    return torch.from_numpy(np.ascontiguousarray(images))


def _four_dimensions(where: str, images: np.ndarray) -> np.ndarray:
    """A row of 3,072 is one of CIFAR; channels come last or first."""
    shape = images.shape
    if len(shape) == 2 and shape[1] == _RECORD - 1:
        return images.reshape(-1, 3, 32, 32)
    if len(shape) == 3:
        return images[:, None]
    for channels in ((1, 3), (2, 4)):  # the second with an opacity
        if len(shape) == 4 and shape[3] in channels:
            return images.transpose(0, 3, 1, 2)
        if len(shape) == 4 and shape[1] in channels:
            return images
    raise DataError(
        f"{where}: an array of shape {list(shape)}; expected images × height × width, and 1 to 4 channels last or first"
    )


def _as_bytes(where: str, images: np.ndarray) -> np.ndarray:
    """Whole numbers from 0 to 255 as they are; fractions from 0 to 1 are stretched to that."""
    if images.dtype.kind not in "uifb":
        raise DataError(f"{where}: {images.dtype}; pixels are numbers")
    parts = [images[at : at + _AT_ONCE] for at in range(0, len(images), _AT_ONCE)]
    for number, part in enumerate(parts):
        strange = ~np.isfinite(part).all((1, 2, 3))
        if strange.any():
            which = number * _AT_ONCE + int(strange.argmax()) + 1
            raise DataError(f"{where}: image {which:,} has pixels that are NaN or infinite", "repair or drop it")
    lowest, highest = (float(f(images)) if images.size else 0.0 for f in (np.min, np.max))
    if lowest < 0.0 or highest > 255.0:
        raise DataError(f"{where}: pixels from {lowest:g} to {highest:g}; expected 0 to 255, or fractions from 0 to 1")
    scale = 255.0 if images.dtype.kind in "fb" and highest <= 1.0 else 1.0
    made = np.empty(images.shape, np.uint8)
    for number, part in enumerate(parts):
        made[number * _AT_ONCE :][: len(part)] = np.rint(part * scale)
    return made


# ---- scikit-learn --------------------------------------------------------------------------------------------------


def read_digits(part: str = "train") -> Images:
    """1,797 digits of 8 × 8 pixels, which come with scikit-learn: 1,437 to learn from, the last 360 as a test."""
    try:
        found: Any = import_module("sklearn.datasets").load_digits()
    except ImportError as error:
        raise ResourceError("digits: scikit-learn is not installed", "pip install scikit-learn") from error
    rows = slice(None, 1437) if part == "train" else slice(1437, None)
    pixels = np.rint(found.images[rows, None] * (255.0 / 16.0)).astype(np.uint8)
    return checked("digits", torch.from_numpy(pixels), torch.from_numpy(found.target[rows].astype(np.int64)))
