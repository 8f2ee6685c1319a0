"""Small files that ask for much memory, time or output are refused before they get it.

ALLMASK_BOMBS=200 draws that many at random, instead of the usual few.
"""

from __future__ import annotations

import json
import os
import random
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from itertools import islice, product
from pathlib import Path

import pytest
from tokenizers import Tokenizer as Backend

import allmask
from allmask import presets
from allmask.errors import CheckpointError
from allmask.model import Model
from allmask.text import Tokenizer
from allmask.text.limits import check_growth
from tests.forked import peak_of
from tests.hostile import BOMBS, EMPTY_TOKENIZER, Opened, Opener, dense_trie, random_bomb, short_lines

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


# ---- vocabularies take what the library of tokenizers needs, and little more ---------------------------------------


@cache
def many_words() -> list[str]:
    rng = random.Random(0)
    words = ("".join(rng.choices("abcdefghijklmnopqrstuvwxyz", k=rng.randint(4, 9))) for _ in range(120_000))
    return sorted(set(words))


def wordpieces(words: list[str]) -> dict:
    marks = ["[UNK]", "[CLS]", "[SEP]", "[PAD]", "[MASK]"]
    vocabulary = {piece: number for number, piece in enumerate([*marks, *words])}
    return {"type": "WordPiece", "unk_token": "[UNK]", "continuing_subword_prefix": "##",
            "max_input_chars_per_word": 100, "vocab": vocabulary}  # fmt: skip


def merged(words: list[str]) -> dict:
    """A BPE, with pieces of two letters to four, and pairs of those."""
    letters = sorted(set("".join(words)))
    parts = sorted({word[at : at + 2] for word in words for at in (0, 1, 2)})
    pairs = [(one[0], one[1]) for one in parts] + list(islice(product(parts, parts), len(words)))
    vocabulary = {piece: number for number, piece in enumerate([*letters, *map("".join, pairs)])}
    return {"type": "BPE", "vocab": vocabulary, "merges": pairs}


def unigrams(words: list[str]) -> dict:
    entries = [["<unk>", 0.0], *([word, -len(word) - 0.123456] for word in words)]
    return {"type": "Unigram", "unk_id": 0, "vocab": entries, "byte_fallback": False}


@pytest.mark.parametrize("model", [wordpieces, merged, unigrams])
def test_a_vocabulary_takes_little_more_than_the_library_needs(tmp_path: Path, model: Callable[[list[str]], dict]):
    """Of 120,000 pieces, as many as a multilingual BERT has."""
    file = tmp_path / "tokenizer.json"
    lines = (",\n      ", ": ")  # as with an indent, which json writes ten times as slowly
    file.write_text(json.dumps(EMPTY_TOKENIZER | {"model": model(many_words())}, separators=lines))
    needed = peak_of(lambda: Backend.from_file(str(file)))
    taken = peak_of(lambda: Tokenizer.load(file))
    assert needed > 10.0, "not measured"
    assert taken < 1.4 * needed + 10.0, (taken, needed)


@pytest.mark.parametrize("pieces", [40_000, 120_000, 250_000])
@pytest.mark.parametrize("make", [dense_trie, short_lines])
def test_a_vocabulary_takes_at_most_what_is_promised(
    opener: Opener, tmp_path: Path, make: Callable[[Path, int], Path], pieces: int
):
    """The densest ones: 100 MB, or 50 times the file, 80 times where the format has no quotes."""
    file = make(tmp_path, pieces)
    happened = opener(file)
    times = 50 if file.suffix == ".json" else 80
    assert happened.megabytes < max(100.0, times * bytes_of(file) / 2**20), happened
    assert happened.refused or happened.words == "", happened


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
