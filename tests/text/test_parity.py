"""The same ids as the reference implementations: transformers, and the algorithms written out in plain Python."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from hypothesis import given, settings

from allmask.text import Tokenizer
from tests.text import references
from tests.text.references import TEXTS, any_text

TEXT_FILES = ("vocab.txt", "vocab.json", "merges.txt", "tokenizer_config.json")


@pytest.fixture(params=["uncased", "cased"])
def wordpiece(request: pytest.FixtureRequest) -> Tokenizer:
    return request.getfixturevalue(request.param)


def reference(folder: Path):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder)


def expect_same(ours: Tokenizer, theirs) -> None:
    for text in TEXTS:
        assert ours.encode(text).ids == theirs(text)["input_ids"], text
        assert ours.encode(text, special=False).ids == theirs(text, add_special_tokens=False)["input_ids"], text
    first, second = TEXTS[2], TEXTS[4]
    pair = theirs(first, second, return_token_type_ids=True)
    assert ours.encode(first, second).ids == pair["input_ids"]
    if ours.kind == "wordpiece":
        assert ours.encode(first, second).segments == pair["token_type_ids"]


@pytest.mark.parametrize("part", ["tokenizer.json", "vocab.txt"])
def test_minilm_gives_the_ids_of_transformers(minilm: Path, part: str):
    expect_same(Tokenizer.load(minilm / part), reference(minilm))


def test_minilm_gives_the_ids_of_plain_python(minilm: Path):
    tokenizer = Tokenizer.load(minilm)
    vocabulary = {piece: id for id, piece in enumerate((minilm / "vocab.txt").read_text(encoding="utf-8").splitlines())}
    for text in TEXTS:
        if "[" not in text:  # special tokens inside text are not part of the algorithm
            assert tokenizer.encode(text, special=False).ids == references.wordpiece(text, vocabulary, True), text


def test_files_that_pad_and_truncate_do_neither_here(minilm: Path):
    assert len(Tokenizer.load(minilm).encode("word " * 300)) == 302
    assert len(Tokenizer.load(minilm).encode("word")) == 3


@settings(max_examples=300)
@given(text=any_text.filter(lambda text: "[" not in text))
def test_wordpiece_gives_the_ids_of_plain_python(uncased: Tokenizer, cased: Tokenizer, text: str):
    for tokenizer, lowercase in ((uncased, True), (cased, False)):
        vocabulary = tokenizer.backend.get_vocab()
        assert tokenizer.encode(text, special=False).ids == references.wordpiece(text, vocabulary, lowercase)


@settings(max_examples=300)
@given(text=any_text.filter(lambda text: "<|" not in text))
def test_byte_bpe_gives_the_ids_of_plain_python_and_the_text_back(byte_bpe: Tokenizer, text: str):
    model = json.loads(byte_bpe.backend.to_str())["model"]
    merges = [(a, b) for a, b in model["merges"]]
    ids = byte_bpe.encode(text).ids
    assert ids == references.byte_bpe(text, model["vocab"], merges)
    assert byte_bpe.decode(ids) == text


def test_a_word_of_more_than_100_characters_is_unknown(uncased: Tokenizer):
    assert "[UNK]" not in uncased.encode("read" * 25).tokens
    assert uncased.encode("read" * 25 + "s").tokens == ["[CLS]", "[UNK]", "[SEP]"]


@pytest.mark.parametrize("files", ["all", "tokenizer.json alone", "vocabulary files alone"])
@pytest.mark.parametrize("name", ["uncased", "cased", "byte_bpe", "plain_bpe"])
def test_what_is_saved_loads_here_and_in_transformers(request, tmp_path: Path, name: str, files: str):
    tokenizer: Tokenizer = request.getfixturevalue(name)
    tokenizer.save(tmp_path)
    if files == "vocabulary files alone":
        if name == "plain_bpe":
            pytest.skip("has none")
        (tmp_path / "tokenizer.json").unlink()
    if files == "tokenizer.json alone":
        for file in TEXT_FILES:
            (tmp_path / file).unlink(missing_ok=True)
        assert Tokenizer.load(tmp_path) == tokenizer
        return
    assert Tokenizer.load(tmp_path) == tokenizer
    theirs = reference(tmp_path)
    expect_same(tokenizer, theirs)
    assert len(theirs) == tokenizer.size
    for role in ("pad", "unk", "cls", "sep", "mask", "bos", "eos"):
        assert getattr(theirs, f"{role}_token_id", None) == tokenizer.special_id(role), role


def test_minilm_saved_again_is_the_same_in_transformers(minilm: Path, tmp_path: Path):
    Tokenizer.load(minilm).save(tmp_path)
    expect_same(Tokenizer.load(minilm), reference(tmp_path))
    assert (tmp_path / "vocab.txt").read_bytes() == (minilm / "vocab.txt").read_bytes()


@pytest.mark.parametrize(
    "setting",
    [
        {"do_lower_case": False},
        {"do_lower_case": False, "strip_accents": True},
        {"do_lower_case": True, "strip_accents": False},
        {"tokenize_chinese_chars": False},
    ],
)
@pytest.mark.parametrize("part", ["vocab.txt", "tokenizer.json"])
def test_settings_mean_what_they_mean_in_transformers(uncased: Tokenizer, tmp_path: Path, setting: dict, part: str):
    uncased.save(tmp_path / "old")
    (tmp_path / "new").mkdir()
    shutil.copy(tmp_path / "old" / part, tmp_path / "new")
    config = json.loads((tmp_path / "old/tokenizer_config.json").read_text())
    (tmp_path / "new/tokenizer_config.json").write_text(json.dumps(config | setting))
    ours = Tokenizer.load(tmp_path / "new")
    expect_same(ours, reference(tmp_path / "new"))
    ours.save(tmp_path / "again")
    expect_same(ours, reference(tmp_path / "again"))
    (tmp_path / "again/tokenizer.json").unlink()
    assert Tokenizer.load(tmp_path / "again") == ours


@pytest.mark.parametrize("setting", [{"add_prefix_space": True}, {"add_bos_token": True}, {"pad_token": "<|pad|>"}])
def test_gpt2_settings_mean_what_they_mean_in_transformers(byte_bpe: Tokenizer, tmp_path: Path, setting: dict):
    byte_bpe.save(tmp_path)
    (tmp_path / "tokenizer.json").unlink()
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config | setting))
    ours, theirs = Tokenizer.load(tmp_path), reference(tmp_path)
    expect_same(ours, theirs)
    assert ours.pad_id == theirs.pad_token_id
    ours.save(tmp_path / "again")
    expect_same(ours, reference(tmp_path / "again"))
    assert Tokenizer.load(tmp_path / "again") == ours


def test_added_tokens_have_the_ids_of_transformers(uncased: Tokenizer, tmp_path: Path):
    uncased.save(tmp_path)
    theirs = reference(tmp_path)
    theirs.add_tokens(["<name>", "<place>"])
    theirs.add_special_tokens({"additional_special_tokens": ["[TITLE]"]})
    theirs.save_pretrained(tmp_path / "more")
    ours = Tokenizer.load(tmp_path / "more")
    text = "from <place> to <name> [TITLE] 北京<name>"
    assert ours.encode(text).ids == theirs(text)["input_ids"]
    assert ours.token_to_id("[TITLE]") in ours.special_ids
    ours.save(tmp_path / "again")
    assert reference(tmp_path / "again")(text)["input_ids"] == theirs(text)["input_ids"]
    (tmp_path / "again/tokenizer.json").unlink()
    assert Tokenizer.load(tmp_path / "again").encode(text).ids == ours.encode(text).ids
