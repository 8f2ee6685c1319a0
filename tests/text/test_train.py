"""Training: the right shape, the same result every time, and files that are not text."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from allmask.data import Texts
from allmask.errors import DataError, UsageError
from allmask.text import Tokenizer, train_tokenizer
from tests.text.references import CORPUS

ROLES = ("pad", "unk", "cls", "sep", "mask", "bos", "eos")


def write(path: Path, text: str | bytes) -> Path:
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def test_wordpiece_has_the_shape_of_bert(uncased: Tokenizer):
    assert [uncased.special_id(role) for role in ROLES] == [0, 1, 2, 3, 4, None, None]
    assert uncased.size == 200
    assert uncased.encode("Reading", "写").tokens == ["[CLS]", "reading", "[SEP]", "写", "[SEP]"]
    assert uncased.encode("Reading", "写").segments == [0, 0, 0, 1, 1]


def test_chinese_characters_stay_single_in_wordpiece(uncased: Tokenizer):
    chinese = [piece for piece in uncased.backend.get_vocab() if any("\u4e00" <= c <= "\u9fff" for c in piece)]
    assert len(chinese) > 30 and all(len(piece) == 1 for piece in chinese)


def test_byte_bpe_has_the_shape_of_gpt2(byte_bpe: Tokenizer):
    assert [byte_bpe.special_id(role) for role in ROLES] == [None, 419, None, None, None, 419, 419]
    assert byte_bpe.size == 420
    assert byte_bpe.tokens([0, 1, 220]) == ["!", '"', "Ġ"]  # as in GPT-2
    assert byte_bpe.encode("The mask").tokens == ["Th", "e", "Ġm", "as", "k"]


def test_plain_bpe_frames_and_gives_the_text_back(plain_bpe: Tokenizer):
    assert [plain_bpe.special_id(role) for role in ROLES] == [0, 1, None, None, None, 2, 3]
    for text in CORPUS:
        encoded = plain_bpe.encode(text)
        assert encoded.ids[0] == 2 and encoded.ids[-1] == 3 and 1 not in encoded.ids
        assert plain_bpe.decode(encoded.ids) == text


@pytest.mark.parametrize("kind", ["wordpiece", "bpe", "byte-bpe"])
def test_the_same_files_give_the_same_tokenizer(corpus: Path, kind: str):
    limit = {} if kind == "byte-bpe" else {"alphabet": 60}
    assert (
        train_tokenizer(Texts([corpus]), kind, 400)
        == train_tokenizer(Texts([corpus]), kind, 400)
        == train_tokenizer(Texts([corpus]), kind, 400)
    )
    assert train_tokenizer(Texts([corpus]), kind, 270, **limit) == train_tokenizer(Texts([corpus]), kind, 270, **limit)


def test_the_most_frequent_pair_is_merged_first(tmp_path: Path):
    path = write(tmp_path / "a.txt", "abab abab abab cd\n" * 5)
    tokenizer = train_tokenizer(Texts([path]), "wordpiece", 14)
    # ab, ##ba and ##ab are equally frequent; the pair with the smaller ids is first
    assert tokenizer.tokens(range(5, 14)) == ["a", "b", "c", "d", "##a", "##b", "##d", "ab", "##ab"]


def test_json_lines_and_text_give_the_same(corpus: Path, uncased: Tokenizer, tmp_path: Path):
    lines = [json.dumps({"id": n, "text": line}, ensure_ascii=n % 2 == 0) for n, line in enumerate(CORPUS)]
    first = write(tmp_path / "a.jsonl", "\n".join(lines[:9]) + "\n\n")
    second = write(tmp_path / "b.jsonl", b"\xef\xbb\xbf" + "\r\n".join(lines[9:]).encode())
    assert train_tokenizer(Texts([first, second]), "wordpiece", 200) == uncased


def test_a_limited_alphabet_leaves_rare_characters_unknown(corpus: Path):
    tokenizer = train_tokenizer(Texts([corpus]), "wordpiece", 120, alphabet=40)
    singles = [piece for piece in tokenizer.tokens(range(5, 120)) if len(piece) == 1]
    assert len(singles) == 40
    assert "[UNK]" in tokenizer.encode("北京欢迎你 Ångström 😀").tokens
    assert "[UNK]" not in tokenizer.encode("the weights").tokens


def test_cased_keeps_case(cased: Tokenizer):
    assert cased.encode("The BERT", special=False).tokens[0] == "The"
    assert not any(piece.isupper() for piece in cased.encode("bert", special=False).tokens)


@pytest.mark.parametrize(
    ("name", "data", "message"),
    [
        ("a.txt", b"", "a.txt: the file is empty"),
        ("a.txt", b"\n  \n\t\n", "nothing but blank lines"),
        ("a.txt", b"good\nfine\nb\xffd\n", "a.txt:3: not UTF-8"),
        ("a.txt", "文字\n".encode("gb18030"), "a.txt:1: not UTF-8"),
        ("a.jsonl", b'{"text": "fine"}\n{"text": "cut', "a.jsonl:2: not valid JSON"),
        ("a.jsonl", b'{"text": "fine"}\n{"txt": "name"}', 'a.jsonl:2: no "text"'),
        ("a.jsonl", b'{"text": null}', 'a.jsonl:1: "text" is null; expected text'),
        ("a.jsonl", b'["text"]', "a.jsonl:1: expected a JSON object"),
        ("a.csv", b"txt\nname\n", 'a.csv:1: no column "text"'),
        ("a.txt.gz", b"name", "a.txt.gz: cannot be decompressed"),
        ("a.parquet", b"PAR1", "a.parquet: not a readable parquet file"),
    ],
)
@pytest.mark.parametrize("kind", ["wordpiece", "byte-bpe"])
def test_files_that_are_not_text_are_named(tmp_path: Path, name: str, data: bytes, message: str, kind: str):
    with pytest.raises(DataError, match=message):
        train_tokenizer(Texts([write(tmp_path / name, data)]), kind, 500)


def test_missing_files_are_named_before_work_begins(corpus: Path, tmp_path: Path):
    with pytest.raises(DataError, match=r"absent\.txt: no such file"):
        train_tokenizer(Texts([corpus, tmp_path / "absent.txt"]))
    with pytest.raises(DataError, match="no text in this folder"):
        train_tokenizer(Texts([tmp_path]))
    with pytest.raises(DataError, match="no text files"):
        train_tokenizer(Texts([]))


@pytest.mark.parametrize(
    ("kind", "size", "options", "message"),
    [
        ("wordpeice", 300, {}, "expected one of wordpiece, bpe, byte-bpe"),
        ("wordpiece", 50, {}, "alone need 1[0-9][0-9]"),
        ("bpe", 50, {}, "alone need 96"),
        ("byte-bpe", 256, {}, "alone need 257"),
        ("byte-bpe", 300, {"lowercase": True}, "lowercase is a setting of wordpiece"),
        ("byte-bpe", 300, {"alphabet": 9}, "alphabet is 9"),
        ("wordpiece", 300, {"alphabet": 0}, "alphabet is 0"),
        ("wordpiece", 0, {}, "size is 0"),
        ("wordpiece", 300, {"minimum": 0}, "minimum count 0"),
    ],
)
def test_what_cannot_be_trained_is_refused(corpus: Path, kind: str, size: int, options: dict, message: str):
    with pytest.raises(UsageError, match=message):
        train_tokenizer(Texts([corpus]), kind, size, **options)


def test_the_size_that_is_named_as_enough_is_enough(corpus: Path):
    with pytest.raises(UsageError) as refused:
        train_tokenizer(Texts([corpus]), "wordpiece", 50)
    enough = int(str(refused.value).split("need ")[1].split("\n")[0])
    tokenizer = train_tokenizer(Texts([corpus]), "wordpiece", enough)
    assert tokenizer.size == enough
    assert all("[UNK]" not in tokenizer.encode(line).tokens for line in CORPUS)


def test_half_a_surrogate_pair_in_json_does_no_harm(tmp_path: Path):
    path = write(tmp_path / "a.jsonl", b'{"text": "aa \\ud83d aa"}')
    assert train_tokenizer(Texts([path]), "byte-bpe", 300).encode("aa").tokens


def test_progress_is_reported_up_to_the_end(corpus: Path):
    told: list[tuple[int, int]] = []
    train_tokenizer(Texts([corpus], progress=lambda done, total: told.append((done, total))), "byte-bpe", 300)
    size = corpus.stat().st_size
    assert told == [(size, size)]


def test_texts_that_can_be_read_only_once_are_refused():
    for texts in (iter(CORPUS), "one text"):
        with pytest.raises(UsageError, match="more than once"):
            train_tokenizer(texts)


@pytest.mark.parametrize("kind", ["wordpiece", "bpe", "byte-bpe", "unigram"])
def test_text_in_memory_gives_what_its_file_gives(corpus: Path, kind: str):
    assert train_tokenizer(CORPUS, kind, 400) == train_tokenizer(Texts([corpus]), kind, 400)
