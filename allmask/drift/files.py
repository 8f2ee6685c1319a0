"""What is to be compared, out of a file: texts, or rows of numbers, at most so many of them, drawn from all."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from allmask.data import MAX_LINE, Record, number, read_records, text
from allmask.data.fields import Bad, missing, show
from allmask.data.records import csv_header, unreadable
from allmask.drift.sampling import Reservoir
from allmask.errors import DataError


@dataclass(frozen=True)
class Sample:
    """Texts, or a table (n, columns) with the names of its columns; where each stands; and out of how many."""

    values: list[str] | np.ndarray
    where: list[str]
    total: int
    names: list[str] | None = None


def columns_of(path: Path) -> list[str] | None:
    """The names of a table's columns; None of a file without a header, or whose header only its reader can judge."""
    if not path.is_file() or path.stat().st_size == 0:
        return None
    if path.name.lower().removesuffix(".gz").endswith(".csv"):
        return csv_header(path, MAX_LINE)
    if path.suffix.lower() == ".parquet":
        import pyarrow as arrow
        from pyarrow import parquet

        try:
            return list(parquet.read_schema(path).names)
        except (arrow.ArrowException, OSError):
            return None
    return None


def read_texts(
    path: Path, field: str, most: int, seed: str, on_bad_record: str = "stop", skipped: Counter[str] | None = None
) -> Sample:
    return sample_texts(read_records(path, {field: text}, on_bad_record, skipped), field, most, seed)


def sample_texts(records: Iterator[Record], field: str, most: int, seed: str) -> Sample:
    draw: Reservoir[Record] = Reservoir(most, seed)
    kept = draw(records)
    return Sample([one.fields[field] for one in kept], [one.where for one in kept], draw.seen)


def read_numbers(
    path: Path, columns: Sequence[str] | None, most: int, seed: str, on_bad_record: str = "stop",
    skipped: Counter[str] | None = None,
) -> Sample:  # fmt: skip
    """A .npy array, or columns of numbers; unless named, all columns."""
    if path.suffix.lower() == ".npy":
        return _read_array(path, most, seed, on_bad_record, Counter() if skipped is None else skipped)
    names = list(columns or _checked(path, columns_of(path) or []))
    draw: Reservoir[Record] = Reservoir(most, seed)
    kept = draw(read_records(path, dict.fromkeys(names, _number), on_bad_record, skipped))
    table = np.array([[one.fields[name] for name in names] for one in kept], dtype=np.float64)
    return Sample(table, [one.where for one in kept], draw.seen, names)


def _number(value: Any) -> float:
    try:
        return number(value)
    except Bad as bad:
        hint = "name the columns of numbers: --columns, or a column of texts: --field"
        raise Bad(bad.reason, bad.what, f"{bad.hint}, or {hint}", bad.line) from None


def _checked(path: Path, names: list[str]) -> list[str]:
    """A first line of numbers is a row that took the place of the names."""
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
            "fill in, or leave out, what is missing",
        )
    left_out = np.unique(bad[:, 0])
    if len(left_out):
        skipped["not a finite number"] += len(left_out)
    kept = np.delete(np.array(rows), left_out)
    return Sample(np.delete(table, left_out, 0), [f"{path}: row {row + 1}" for row in kept.tolist()], len(array))


def _array(path: Path) -> np.ndarray:
    """What numpy says of a damaged header is of many kinds."""
    hint = "write it again with numpy.save"
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # numbers that overflow in a header are an error as well
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
    """The second table with its columns in the first one's order."""
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
