"""Pages of parquet files are measured as they are: files of all kinds are read, and those that lie are refused."""

from __future__ import annotations

import random
from contextlib import suppress
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import pytest

from allmask.data import list_of, parquet_pages, read_records, text
from allmask.data.fields import Maybe
from allmask.errors import DataError
from tests import hostile

arrow = pytest.importorskip("pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")

CODECS = ("none", "snappy", "gzip", "brotli", "zstd", "lz4")
ENCODINGS = (None, "PLAIN", "DELTA_LENGTH_BYTE_ARRAY", "DELTA_BYTE_ARRAY")  # None: a dictionary
VERSIONS = ("1.0", "2.0")


def table(seed: int) -> Any:
    """Texts that share their beginnings, some of them null, and lists of such texts."""
    rng = random.Random(seed)
    starts = ["", "a cat ", "一只猫", "x" * 300]
    texts = [rng.choice(starts) + str(rng.randrange(1_000)) for _ in range(200)]
    lists = [rng.choices(texts, k=rng.randrange(1, 6)) for _ in texts]
    some = [value if rng.random() < 0.8 else None for value in texts]
    return arrow.table({"source": texts, "target": some, "tokens": lists, "nested": [{"a": value} for value in texts]})


def write(file: Path, content: Any, codec: str, encoding: str | None, version: str) -> None:
    chosen = {"use_dictionary": True} if encoding is None else {"use_dictionary": False, "column_encoding": encoding}
    parquet.write_table(
        content, file, compression=codec, data_page_version=version, data_page_size=2_000, row_group_size=70,
        write_batch_size=20, **chosen,
    )  # fmt: skip


@pytest.mark.parametrize("codec, encoding, version", list(product(CODECS, ENCODINGS, VERSIONS)))
def test_every_kind_of_file_is_read_and_measured(tmp_path: Path, codec: str, encoding: str | None, version: str):
    file, content = tmp_path / "train.parquet", table(0)
    write(file, content, codec, encoding, version)
    found = [one.fields for one in read_records(file, {"source": text, "target": Maybe(text), "tokens": list_of(text)})]
    expected = content.select(["source", "target", "tokens"]).to_pylist()
    assert [{name: row.get(name) for name in ("source", "target", "tokens")} for row in found] == expected
    with parquet.ParquetFile(file) as opened, file.open("rb") as stream:
        for group in map(opened.metadata.row_group, range(opened.metadata.num_row_groups)):
            for number in range(group.num_columns):
                column, schema = group.column(number), opened.schema.column(number)
                chunk = parquet_pages.measure(stream, file.stat().st_size, column, schema, 1 << 30)
                assert chunk.values == column.num_values
                # which counts the headers, too, of some tens of bytes each
                assert 0.7 * column.total_uncompressed_size < chunk.unpacked < column.total_uncompressed_size
                assert bool(chunk.dictionary) == column.has_dictionary_page
                assert chunk.shares == ("DELTA_BYTE_ARRAY" in column.encodings)


def test_shared_beginnings_are_counted(tmp_path: Path):
    """As by hand: what each text of the lists has in common with the one before."""
    file, content = tmp_path / "train.parquet", table(1)
    parquet.write_table(content, file, use_dictionary=False, column_encoding="DELTA_BYTE_ARRAY")
    texts = [value.encode() for row in content["tokens"].to_pylist() for value in row]
    shared = 0
    for before, after in pairwise(texts):
        shared += next((at for at, (a, b) in enumerate(zip(before, after, strict=False)) if a != b),
                       min(len(before), len(after)))  # fmt: skip
    with parquet.ParquetFile(file) as opened, file.open("rb") as stream:
        column, schema = opened.metadata.row_group(0).column(2), opened.schema.column(2)
        assert column.path_in_schema.startswith("tokens.")
        assert parquet_pages.measure(stream, file.stat().st_size, column, schema, 1 << 30).shared == shared


def test_a_file_made_by_hand_is_read(tmp_path: Path):
    """So what the lying ones are refused for is the lie."""
    found = read_records(hostile.honest_page(tmp_path), {"source": text})
    assert [one.fields["source"] for one in found] == ["a cat", "a dog"]


def test_a_name_with_a_point_does_not_hide_a_column(tmp_path: Path):
    file = tmp_path / "train.parquet"
    texts = arrow.array(["a" * (1 << 20)] * 40)
    parquet.write_table(arrow.table({"so.urce": texts}), file, compression="zstd", use_dictionary=False)
    with pytest.raises(DataError, match="unpacks to more than"):
        list(read_records(file, {"so.urce": text}))


@pytest.mark.parametrize("seed", range(40))
def test_flipped_bits_give_an_error_or_rows(tmp_path: Path, seed: int):
    """No error of another kind, and no hang."""
    rng, file = random.Random(seed), tmp_path / "train.parquet"
    write(file, table(2), "zstd", rng.choice(ENCODINGS), rng.choice(VERSIONS))
    data = bytearray(file.read_bytes())
    for _ in range(rng.randrange(1, 6)):
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    file.write_bytes(data)
    with suppress(DataError):
        list(read_records(file, {"source": text, "tokens": list_of(text)}))
