"""Read the records to compare: texts, rows of numbers or images; a random sample of them if there are many."""

from __future__ import annotations

import random
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any, Generic, TypeVar

import numpy as np
import torch
from torch import Tensor

from allmask.data import MAX_LINE, DataFile, Record, number, read_records, text
from allmask.data.fields import Bad, missing, show
from allmask.data.formats import columns_of
from allmask.data.source import kind, unreadable
from allmask.drift.features import SIDE
from allmask.errors import DataError
from allmask.vision.images import find_images, read_header, read_pixels

T = TypeVar("T")
OnProgress = Callable[[int, int], None]  # done, total


@dataclass
class Reservoir(Generic[T]):
    """Draw at most `size` items from a stream of any length, all equally likely, in the order of the stream."""

    size: int
    seed: str
    seen: int = field(default=0, init=False)  # items in the stream

    def __call__(self, stream: Iterable[T]) -> list[T]:
        rng, kept = random.Random(self.seed), []
        for self.seen, item in enumerate(stream, 1):
            if len(kept) < self.size:
                kept.append((self.seen, item))
            elif (place := rng.randrange(self.seen)) < self.size:
                kept[place] = (self.seen, item)
        return [item for _, item in sorted(kept, key=lambda entry: entry[0])]


# ---- texts and numbers -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Sample:
    """Texts, or a table of numbers, drawn from a file."""

    values: list[str] | np.ndarray  # texts, or (n, columns)
    where: list[str]  # file and line of each
    total: int  # records in the file
    names: list[str] | None = None  # of the columns


def read_texts(
    path: Path | DataFile, most: int, seed: str, on_bad_record: str = "stop", skipped: Counter[str] | None = None
) -> Sample:
    return sample_texts(read_records(path, {"text": text}, on_bad_record, skipped), most, seed)


def sample_texts(records: Iterator[Record], most: int, seed: str) -> Sample:
    draw: Reservoir[Record] = Reservoir(most, seed)
    kept = draw(records)
    return Sample([record.fields["text"] for record in kept], [record.where for record in kept], draw.seen)


def read_numbers(
    path: Path | DataFile, columns: Sequence[str] | None, most: int, seed: str, on_bad_record: str = "stop",
    skipped: Counter[str] | None = None,
) -> Sample:  # fmt: skip
    """Read a .npy array, or columns of numbers; all columns by default."""
    if kind(path) == ".npy":
        return _read_array(Path(path), most, seed, on_bad_record, Counter() if skipped is None else skipped)
    names = list(columns or _check_header(path, columns_of(path, MAX_LINE) or []))
    draw: Reservoir[Record] = Reservoir(most, seed)
    kept = draw(read_records(path, dict.fromkeys(names, _number), on_bad_record, skipped))
    table = np.array([[record.fields[name] for name in names] for record in kept], dtype=np.float64)
    return Sample(table, [record.where for record in kept], draw.seen, names)


def _number(value: Any) -> float:
    try:
        return number(value)
    except Bad as bad:
        hint = "name the columns of numbers: --columns age,income, or the text: --columns text=body"
        raise Bad(bad.reason, bad.what, f"{bad.hint}, or {hint}", bad.line) from None


def _check_header(path: Path | DataFile, names: list[str]) -> list[str]:
    """Refuse a header of numbers: the file has no column names."""
    for name in names:
        try:
            float(name)
        except ValueError:
            continue
        raise DataError(f"{path}:1: {show(name)} as the name of a column", "the first line names the columns: add one")
    return names or ["text"]


def _read_array(path: Path, most: int, seed: str, on_bad_record: str, skipped: Counter[str]) -> Sample:
    array = _array(path)
    rows = Reservoir[int](most, seed)(range(len(array)))
    table = np.asarray(array[rows], dtype=np.float64).reshape(len(rows), -1)
    bad = np.argwhere(~np.isfinite(table))
    if len(bad) and on_bad_record != "skip":
        row, column = bad[0]
        raise DataError(
            f"{path}: row {rows[row] + 1}, column {column + 1} is {table[row, column]}; expected a finite number",
            "fill in or remove missing values",
        )
    bad_rows = np.unique(bad[:, 0])
    if len(bad_rows):
        skipped["not a finite number"] += len(bad_rows)
    kept = np.delete(np.array(rows), bad_rows)
    return Sample(np.delete(table, bad_rows, 0), [f"{path}: row {row + 1}" for row in kept.tolist()], len(array))


def _array(path: Path) -> np.ndarray:
    """Map a .npy file into memory. Numpy raises many kinds of errors for a damaged header."""
    hint = "write it again with numpy.save"
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # an overflow in the header also raises an error
            array = np.load(path, allow_pickle=False, mmap_mode="r")
    except FileNotFoundError:
        raise DataError(f"{path}: no such file", "check the path") from None
    except OSError as error:
        raise unreadable(path, error) from None
    except Exception as error:
        reason = str(error).split("\n")[0]
        raise DataError(f"{path}: not a readable .npy file: {reason}", hint) from None
    if not isinstance(array, np.ndarray):
        raise DataError(f"{path}: several arrays, not one", hint)
    if array.dtype.kind not in "iufb" or array.ndim not in (1, 2) or 0 in array.shape:
        what = f"an array of shape {array.shape} and type {array.dtype}"
        raise DataError(f"{path}: {what}; expected numbers (rows, columns)", hint)
    return array


def same_columns(first: Sample, second: Sample, paths: tuple[Path, Path]) -> np.ndarray:
    """The second table with its columns in the order of the first."""
    assert isinstance(first.values, np.ndarray) and isinstance(second.values, np.ndarray)
    if first.names is None or second.names is None:
        if first.values.shape[1] != second.values.shape[1]:
            counts = f"{second.values.shape[1]} columns; {paths[0]} has {first.values.shape[1]}"
            raise DataError(f"{paths[1]}: {counts}", "compare tables with the same columns")
        return second.values
    for name in first.names:
        if name not in second.names:
            what, hint = missing(name, second.names, "the names, or choose some with --columns")
            raise DataError(f"{paths[1]}: no column {what.removeprefix('no ')}, as {paths[0]} has", hint)
    for name in second.names:
        if name not in first.names:
            raise DataError(f"{paths[1]}: has a column {show(name)}; {paths[0]} has none", "choose some with --columns")
    return second.values[:, [second.names.index(name) for name in first.names]]


# ---- images ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Pictures:
    """Images drawn from a folder, scaled to the same square."""

    pixels: Tensor  # (n, 3, SIDE, SIDE) bytes
    sizes: Tensor  # (n, 2) original width and height
    where: list[str]  # the file of each
    total: int  # images in the folder
    digests: list[bytes] | None = None  # SHA-256 of the files

    def keys(self) -> list[bytes]:
        """A key for each image; equal keys mean equal files, or equal pixels and sizes where there are no files."""
        if self.digests is not None:
            return self.digests
        rows = torch.cat([self.pixels.flatten(1), self.sizes.to(torch.int32).view(torch.uint8).view(-1, 8)], dim=1)
        return [row.tobytes() for row in rows.numpy()]


def read_images(
    folder: Path, most: int, seed: str, on_bad_record: str = "stop", skipped: Counter[str] | None = None,
    on_progress: OnProgress | None = None,
) -> Pictures:  # fmt: skip
    """Read at most `most` images. A file that is no image is an error, or is skipped and counted in `skipped`."""
    files = find_images(folder)
    chosen = Reservoir[Path](most, seed)(files)
    pixels, sizes, where, digests = [], [], [], []
    for done, file in enumerate(chosen, 1):
        if on_progress is not None:  # here, since a file that is skipped counts, too
            on_progress(done, len(chosen))
        try:
            header = read_header(file)  # refuses a file that is no image, or too large, before it is decoded
            pixels.append(read_pixels(file, 3, (SIDE, SIDE), crop=False))
        except DataError:
            if on_bad_record != "skip":
                raise
            (skipped if skipped is not None else Counter())["unreadable image"] += 1
            continue
        sizes.append((header.width, header.height))
        where.append(str(file))
        digests.append(sha256(file.read_bytes()).digest())
    if not pixels:
        raise DataError(f"{folder}: none of its {len(files):,} images can be read", "download or write them again")
    return Pictures(torch.stack(pixels), torch.tensor(sizes), where, len(files), digests)
