"""Damaged files: each is named, with the line where there is one; what does no harm is read; no id ever shifts."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from pathlib import Path

import pytest

from allmask.errors import CheckpointError, DataError, UsageError
from allmask.text import Tokenizer

PIECES = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "read", "##er", "##s", "北", "京", "é", "e"]
TEXT = "\n".join(PIECES) + "\n"


@pytest.fixture
def vocab_txt(tmp_path: Path) -> Path:
    path = tmp_path / "vocab.txt"
    path.write_text(TEXT, encoding="utf-8")
    return path


def pieces(source: Path) -> list[str | None]:
    return [Tokenizer.load(source).id_to_token(id) for id in range(len(PIECES))]


@pytest.mark.parametrize(
    "data",
    [
        TEXT.encode(),
        TEXT.strip().encode(),
        TEXT.encode() + b"\n\n",
        TEXT.encode("utf-8-sig"),
        TEXT.replace("\n", "\r\n").encode(),
        (TEXT.replace("\n", "\r\n") + "\r\n").encode("utf-8-sig"),
    ],
    ids=["plain", "no last line end", "blank lines at the end", "byte-order mark", "windows", "windows, mark, blank"],
)
def test_harmless_differences_change_no_id(vocab_txt: Path, data: bytes):
    vocab_txt.write_bytes(data)
    assert pieces(vocab_txt) == PIECES
    assert Tokenizer.load(vocab_txt).encode("Readers 北京").ids == [2, 5, 6, 7, 8, 9, 3]


def test_odd_characters_do_not_split_a_line(tmp_path: Path):
    odd = ["a\u2028b", "a\x0bb", "a\x85b", "\u00a0x"]
    (tmp_path / "vocab.txt").write_bytes("\n".join([*PIECES, *odd, "last"]).encode())
    assert Tokenizer.load(tmp_path).token_to_id("last") == len(PIECES) + len(odd)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (TEXT.replace("##s\n", "read\n").encode(), "vocab.txt:8: 'read' is already on line 6"),
        (TEXT.replace("##s\n", "\n").encode(), "vocab.txt:8: the line is blank"),
        (TEXT.replace("##s\n", "  \r\n").encode(), "vocab.txt:8: the line is blank"),
        (TEXT.replace("[UNK]\n", "").encode(), r"no line is \[UNK\] \(the unk token\)"),
        (TEXT.replace("[CLS]\n", "").encode(), r"no line is \[CLS\] \(the cls token\)"),
        (TEXT.encode().replace(b"##s", b"##\xff"), "vocab.txt:8: not UTF-8"),
        (TEXT.encode("utf-16"), "vocab.txt:1: not UTF-8"),
        (b"", "no pieces"),
        (b"\n\n", "no pieces"),
    ],
)
def test_a_damaged_vocab_txt_is_refused(vocab_txt: Path, data: bytes, message: str):
    vocab_txt.write_bytes(data)
    with pytest.raises(CheckpointError, match=message):
        Tokenizer.load(vocab_txt)


def test_missing_pad_and_mask_are_none(vocab_txt: Path):
    vocab_txt.write_text(TEXT.replace("[PAD]", "[unused0]").replace("[MASK]", "[unused1]"), encoding="utf-8")
    tokenizer = Tokenizer.load(vocab_txt)
    assert (tokenizer.pad_id, tokenizer.mask_id, tokenizer.cls_id, tokenizer.bos_id) == (None, None, 2, None)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ('{"do_lower_case": "yes"}', "do_lower_case is 'yes'"),
        ('{"unk_token": 5}', "unk_token is 5"),
        ('{"unk_token": "<unk>"}', "no line is <unk>"),
        ('{"tokenizer_class": "BertJapaneseTokenizer"}', "says BertJapaneseTokenizer"),
        ('{"added_tokens_decoder": {"99": {"content": "<x>"}}}', "'<x>' has id 99 but would get 12"),
        ('{"added_tokens_decoder": {"3": {"content": "read"}}}', "'read' has id 3 but would get 5"),
        ('{"added_tokens_decoder": {"x": {"content": "read"}}}', "the id 'x'"),
        ('{"added_tokens_decoder": {"5": "read"}}', "not an added token"),
        ('{"added_tokens_decoder": []}', "added_tokens_decoder"),
        ('{"additional_special_tokens": [5]}', "additional_special_tokens"),
        ("[]", "expected a JSON object"),
        ('{"do_lower_case": tr', "tokenizer_config.json:1: not valid JSON"),
        ('{"a": 1, "a": 2}', "'a' occurs twice"),
        ("[" * 100_000, "not valid JSON"),
    ],
)
def test_a_damaged_tokenizer_config_is_refused(vocab_txt: Path, config: str, message: str):
    vocab_txt.with_name("tokenizer_config.json").write_text(config, encoding="utf-8")
    with pytest.raises(CheckpointError, match=message):
        Tokenizer.load(vocab_txt.parent)


def test_old_files_for_special_and_added_tokens_are_honoured(vocab_txt: Path):
    vocab_txt.write_text(TEXT.replace("[CLS]", "<s>"), encoding="utf-8")
    vocab_txt.with_name("special_tokens_map.json").write_text('{"cls_token": {"content": "<s>", "lstrip": false}}')
    vocab_txt.with_name("added_tokens.json").write_text('{"<name>": 12}')
    assert Tokenizer.load(vocab_txt.parent).encode("read <name>").ids == [2, 5, 12, 3]


def test_lowercase_can_be_set_for_folders_without_settings(vocab_txt: Path):
    assert Tokenizer.load(vocab_txt).encode("READ É", special=False).tokens == ["read", "e"]
    assert Tokenizer.load(vocab_txt, lowercase=False).encode("READ é", special=False).tokens == ["[UNK]", "é"]


def damage(**changes: object) -> Callable[[dict], None]:
    return lambda data: data.update(changes)


def damage_model(**changes: object) -> Callable[[dict], None]:
    return lambda data: data["model"].update(changes)


ADDED = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
FAULTS = {
    "bad regular expression": damage(
        pre_tokenizer={"type": "Split", "pattern": {"Regex": "("}, "behavior": "Isolated", "invert": False}
    ),
    "longest word": damage_model(max_input_chars_per_word=30_000),
    "panic while loading": damage(normalizer={"type": "Precompiled", "precompiled_charsmap": "AAAA"}),
    "panic in use": damage(
        post_processor={
            "type": "TemplateProcessing",
            "single": [{"SpecialToken": {"id": "[X]", "type_id": 0}}],
            "pair": [],
            "special_tokens": {},
        }
    ),
    "no model": damage(model=None),
    "unknown model": damage_model(type="Oracle"),
    "no unknown token": lambda data: data["model"]["vocab"].pop("[UNK]"),
    "two pieces, one id": lambda data: data["model"]["vocab"].update({"read": 6}),
    "negative id": lambda data: data["model"]["vocab"].update({"read": -1}),
    "absurd id": lambda data: data["model"]["vocab"].update({"read": 10**12}),
    "id that is no number": lambda data: data["model"]["vocab"].update({"read": "5"}),
    "empty vocabulary": damage_model(vocab={}),
    "added token elsewhere": lambda data: data["added_tokens"].append({"id": 77, "content": "<x>", **ADDED}),
    "added tokens that are none": damage(added_tokens=[5]),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_damaged_tokenizer_json_is_refused(vocab_txt: Path, tmp_path: Path, fault: str):
    Tokenizer.load(vocab_txt).save(tmp_path / "saved")
    path = tmp_path / "tokenizer.json"
    data = json.loads((tmp_path / "saved/tokenizer.json").read_text(encoding="utf-8"))
    path.write_text(json.dumps(data), encoding="utf-8")
    assert pieces(path) == PIECES
    FAULTS[fault](data)
    path.write_text(json.dumps(data), encoding="utf-8")
    with pytest.raises(CheckpointError, match=r"tokenizer\.json"):
        Tokenizer.load(path)


@pytest.mark.parametrize("data", [b"", b"{", b"nope", b"[]", b"{}", b"\xff\xfe{", b'{"model": 5}'])
def test_a_file_that_is_not_a_tokenizer_json_is_refused(tmp_path: Path, data: bytes):
    (tmp_path / "tokenizer.json").write_bytes(data)
    with pytest.raises(CheckpointError, match=r"tokenizer\.json"):
        Tokenizer.load(tmp_path)


def test_every_cut_off_tokenizer_json_is_refused(vocab_txt: Path, tmp_path: Path):
    Tokenizer.load(vocab_txt).save(tmp_path / "saved")
    data = (tmp_path / "saved/tokenizer.json").read_bytes().rstrip()
    for length in range(0, len(data), 97):
        (tmp_path / "tokenizer.json").write_bytes(data[:length])
        with pytest.raises(CheckpointError):
            Tokenizer.load(tmp_path / "tokenizer.json")


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("merges.txt", lambda text: text + "a b c\n", r"merges.txt:\d+: expected two pieces"),
        ("merges.txt", lambda text: text + "lonely\n", r"merges.txt:\d+: expected two pieces"),
        ("merges.txt", lambda text: text + "q q\n", r"merges.txt:\d+: 'qq' is not in vocab.json"),
        ("merges.txt", None, "merges.txt: no such file"),
        ("vocab.json", lambda text: text[:-1] + ', "a": 7}', "'a' occurs twice"),
        ("vocab.json", lambda text: text[:-1] + ', "zz": 7}', "both have the id 7"),
        ("vocab.json", lambda text: text.replace('"!": 0, ', ""), "1 of 256 bytes have no piece .0x21"),
        ("vocab.json", lambda text: text[:-9], "not valid JSON"),
        ("vocab.json", lambda text: "{}", "no pieces"),
        ("tokenizer_config.json", lambda text: '{"tokenizer_class": "CLIPTokenizer"}', "says CLIPTokenizer"),
    ],
)
def test_damaged_gpt2_files_are_refused(byte_bpe: Tokenizer, tmp_path: Path, name: str, change, message: str):
    byte_bpe.save(tmp_path)
    (tmp_path / "tokenizer.json").unlink()
    path = tmp_path / name
    path.unlink() if change is None else path.write_text(change(path.read_text(encoding="utf-8")), encoding="utf-8")
    with pytest.raises(CheckpointError, match=message):
        Tokenizer.load(tmp_path)


def test_nothing_to_read(tmp_path: Path):
    with pytest.raises(CheckpointError, match=r"none of tokenizer\.json, vocab\.txt, vocab\.json"):
        Tokenizer.load(tmp_path)
    with pytest.raises(CheckpointError, match="no such file or folder"):
        Tokenizer.load(tmp_path / "absent")
    assert Tokenizer.find(tmp_path) is None


def test_find_gives_what_load_gives(vocab_txt: Path):
    assert Tokenizer.find(vocab_txt.parent) == Tokenizer.load(vocab_txt)


@pytest.mark.parametrize("part", ["pre_tokenizer", "normalizer", "decoder"])
def test_a_pattern_without_end_is_given_up(vocab_txt: Path, tmp_path: Path, part: str):
    """The library counts its tries, and panics. Ordinary texts, such as the one that loading tries, are fast."""
    vocab_txt.write_text(f"{TEXT}{'e' * 40}\n", encoding="utf-8")
    Tokenizer.load(vocab_txt).save(tmp_path / "made")
    file, pattern = tmp_path / "made" / "tokenizer.json", {"Regex": "(e+)+b"}
    parts = {"pre_tokenizer": {"type": "Split", "pattern": pattern, "behavior": "Isolated", "invert": False}}
    parts |= {name: {"type": "Replace", "pattern": pattern, "content": "x"} for name in ("normalizer", "decoder")}
    file.write_text(json.dumps(json.loads(file.read_text()) | {part: parts[part]}))
    made = Tokenizer.load(tmp_path / "made")
    with pytest.raises(CheckpointError, match="retry-limit-in-match"):
        made.decode([len(PIECES)]) if part == "decoder" else made.encode("e" * 40)


def test_half_a_surrogate_pair_is_a_data_error(uncased: Tokenizer):
    with pytest.raises(DataError, match=r"text 1: character 2 is half of a surrogate pair \(U\+D83D\)"):
        uncased.encode_batch(["fine", "ok\ud83d"])
    with pytest.raises(DataError, match="text 0: character 0"):
        uncased.encode("fine", "\udc00")


def test_wrong_types_and_unknown_ids_are_usage_errors(uncased: Tokenizer):
    with pytest.raises(UsageError, match="text 0 is int"):
        uncased.encode(5)  # type: ignore[arg-type]
    for ids in ([-1], [uncased.size], [10**12]):
        with pytest.raises(UsageError, match="no token with id"):
            uncased.decode(ids)


def test_a_tokenizer_is_a_value(uncased: Tokenizer, cased: Tokenizer):
    copy = pickle.loads(pickle.dumps(uncased))
    assert copy == uncased and hash(copy) == hash(uncased)
    assert uncased != cased
    assert repr(uncased) == "Tokenizer(wordpiece, 200 tokens, [PAD], [UNK], [CLS], [SEP], [MASK])"


def test_tensors_and_arrays_of_ids_are_decoded(uncased: Tokenizer):
    import torch

    encoded = uncased.encode("The readers read.")
    assert uncased.decode(torch.tensor(encoded.ids)) == "the readers read."
    assert uncased.tokens(torch.tensor(encoded.ids)) == encoded.tokens
    assert uncased.decode(encoded.ids, skip_special=False) == "[CLS] the readers read. [SEP]"


def test_offsets_point_into_the_text(uncased: Tokenizer):
    text = "Readers  北京 Café"
    encoded = uncased.encode(text, special=False)
    parts = [text[start:end] for start, end in encoded.offsets]
    assert "".join(parts) == text.replace(" ", "")
    assert len(encoded) == len(parts) == len(encoded.tokens)
