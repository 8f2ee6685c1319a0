"""Small files that ask for much memory, time or output are refused before they get it.

ALLMASK_BOMBS=200 draws that many at random, instead of the usual few.
"""

from __future__ import annotations

import os
import random
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

import allmask
from allmask import presets
from allmask.errors import CheckpointError
from allmask.model import Model
from allmask.text.limits import check_growth
from tests.hostile import BOMBS, Opened, Opener, random_bomb

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="measures memory as Linux has it")


@pytest.fixture(scope="module")
def opener() -> Iterator[Opener]:
    made = Opener()
    yield made
    made.close()


def is_refused(happened: Opened, size: int) -> bool:
    """In our words, few of them, and with little memory and time: twenty times the file at most, or 100 MB."""
    assert happened.refused and len(happened.words) < 11_000, happened
    assert happened.megabytes < max(100.0, 20 * size / 2**20) and happened.seconds < 10.0, happened
    return True


def bytes_of(path: Path) -> int:
    return path.stat().st_size if path.is_file() else sum(file.stat().st_size for file in path.iterdir())


@pytest.mark.parametrize("name", BOMBS)
def test_a_bomb_is_refused_with_little_memory(opener: Opener, tmp_path: Path, name: str):
    path = BOMBS[name](tmp_path / name)
    assert is_refused(opener(path), bytes_of(path))


@pytest.mark.parametrize("seed", range(int(os.environ.get("ALLMASK_BOMBS", "2"))))
def test_bombs_at_random(opener: Opener, tmp_path: Path, seed: int):
    path = random_bomb(tmp_path, random.Random(seed))
    assert is_refused(opener(path), bytes_of(path))


def test_a_model_with_millions_of_positions_takes_memory_for_those_in_use(opener: Opener, tmp_path: Path):
    """It is a valid file, and of a few kB: the table of positions is computed, and grows with the texts."""
    small = replace(
        presets.transformer_base(), vocab_size=40, width=16, layers=1, decoder_layers=1, heads=2, ffn_width=32
    )
    Model.fresh(replace(small, max_positions=4_000_000)).save(tmp_path / "model")
    happened = opener(tmp_path / "model")
    assert not happened.refused and happened.words == "" and happened.megabytes < 100.0, happened
    assert len(allmask.load(tmp_path / "model").body.embedding.positions.weight) < 100_000


@pytest.mark.parametrize(
    "normalizer",
    [
        {"type": "Sequence", "normalizers": [{"type": "ByteLevel"}] * 6},
        # spaces around a Chinese character, which then become Chinese characters
        {
            "type": "Sequence",
            "normalizers": [
                {"type": "BertNormalizer", "handle_chinese_chars": True},
                {"type": "Replace", "pattern": {"String": " "}, "content": "中"},
            ]
            * 6,
        },
        # a letter becomes a ligature, the ligature eighteen letters
        {
            "type": "Sequence",
            "normalizers": [
                {"type": "NFKD"},
                {"type": "Replace", "pattern": {"Regex": "[^x]"}, "content": "\ufdfa"},
            ]
            * 3,
        },
        {"type": "Prepend", "prepend": "x" * 100_000},
        {"type": "Replace", "pattern": {"String": ""}, "content": "x" * 1_000},
    ],
)
def test_steps_that_multiply_only_together(normalizer: dict):
    with pytest.raises(CheckpointError, match="times as long"):
        check_growth(Path("tokenizer.json"), "normalizer", normalizer)
