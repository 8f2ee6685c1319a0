"""Unigram vocabularies, T5's: read from spiece.model as sentencepiece and transformers do; trained; files that lie."""

from __future__ import annotations

import json
import random
import subprocess
import sys

import pytest
from transformers import AutoTokenizer, T5Tokenizer

from allmask.data import Texts
from allmask.errors import CheckpointError, UsageError
from allmask.objectives import Vocabulary
from allmask.text import Tokenizer, train_tokenizer
from allmask.text.sentencepiece import read_pieces
from tests.objectives.texts import chinese_documents, english_documents
from tests.text.references import assert_read_back

TEXTS = [
    "The quick brown fox, 1984!", "  two  spaces  ", "春眠不觉晓，处处闻啼鸟。", "ｆｕｌｌ　ｗｉｄｔｈ，",
    "tab\tand\nnewline",
    "é ñ ﬁ ① Ⅳ", "🙂 emoji 👨‍👩‍👧 end", "", "   ", "ﷺ Å ｶﾞ가각", "\u200bzero\u00a0nbsp\u3000", "x" * 50, "ก็ไทย हिन्दी",
    "▁under_score ▁▁", "做白切鸡要选三斤左右的嫩鸡。Mixed 中文 and English.",
]  # fmt: skip


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    path = tmp_path_factory.mktemp("corpus") / "text.txt"
    lines = [line for document in [*english_documents(), *chinese_documents()] for line in document]
    path.write_text("\n".join(lines), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def folder(corpus, tmp_path_factory):
    """A vocabulary trained by sentencepiece itself, with T5's special tokens."""
    pieces = pytest.importorskip("sentencepiece")
    place = tmp_path_factory.mktemp("spiece")
    pieces.SentencePieceTrainer.train(
        input=str(corpus), model_prefix=str(place / "spiece"), vocab_size=900, model_type="unigram", pad_id=0, eos_id=1,
        unk_id=2, bos_id=-1, character_coverage=0.999, minloglevel=2,
    )  # fmt: skip
    return place


def test_ids_are_those_of_sentencepiece_and_of_transformers(folder):
    import sentencepiece

    ours, theirs = Tokenizer.load(folder), T5Tokenizer.from_pretrained(folder)
    reference = sentencepiece.SentencePieceProcessor(model_file=str(folder / "spiece.model"))
    lines = [line for document in [*english_documents(), *chinese_documents()] for line in document]
    for text in [*TEXTS, *lines[:200]]:
        ids = ours.encode(text, special=False).ids
        assert ids == reference.encode(text), text
        assert ours.encode(text).ids == [*ids, 1] == theirs(text)["input_ids"], text
    assert (ours.size, ours.pad_id, ours.eos_id, ours.unk_id) == (1000, 0, 1, 2) and ours.kind == "unigram"


def test_random_texts_are_cut_alike(folder):
    import sentencepiece

    ours = Tokenizer.load(folder)
    reference = sentencepiece.SentencePieceProcessor(model_file=str(folder / "spiece.model"))
    rng = random.Random(0)
    letters = "abcdeE .,  ( 天地人，。！é１あ한\t"
    for _ in range(300):
        text = "".join(rng.choice(letters) for _ in range(rng.randint(1, 30)))
        assert ours.encode(text, special=False).ids == reference.encode(text), text


def test_sentinels_are_the_last_ids_the_first_one_last(folder):
    ours, theirs = Tokenizer.load(folder), T5Tokenizer.from_pretrained(folder)
    for number in (0, 1, 42, 99):
        piece = f"<extra_id_{number}>"
        assert ours.token_to_id(piece) == theirs.convert_tokens_to_ids(piece) == 999 - number
    text = "今天 <extra_id_0> 很好 <extra_id_1></s>"
    assert ours.encode(text).ids == theirs(text)["input_ids"]
    assert Vocabulary.of(ours).sentinels.tolist() == list(range(999, 899, -1))


def test_it_is_saved_for_transformers_and_read_back(folder, tmp_path):
    ours = Tokenizer.load(folder)
    _, alone, _ = assert_read_back(ours, tmp_path, TEXTS)
    assert alone.specials == ours.specials
    assert ours.decode(ours.encode("the  北京 and a module.").ids) == "the 北京 and a module."


def test_as_many_sentinels_as_the_settings_say(folder, tmp_path):
    (tmp_path / "spiece.model").write_bytes((folder / "spiece.model").read_bytes())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"extra_ids": 5, "tokenizer_class": "T5Tokenizer"}))
    assert Tokenizer.load(tmp_path).size == 905
    for change, words in (({"extra_ids": "many"}, "extra_ids"), ({"tokenizer_class": "BigBirdTokenizer"}, "BigBird")):
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(change))
        with pytest.raises(CheckpointError, match=words):
            Tokenizer.load(tmp_path)


def test_other_kinds_are_refused(corpus, tmp_path):
    pieces = pytest.importorskip("sentencepiece")
    pieces.SentencePieceTrainer.train(
        input=str(corpus), model_prefix=str(tmp_path / "spiece"), vocab_size=900, model_type="bpe", minloglevel=2
    )
    with pytest.raises(CheckpointError, match="not a unigram model") as caught:
        Tokenizer.load(tmp_path)
    assert "cut off" not in str(caught.value)


def test_damaged_files_are_refused_by_name(folder, tmp_path):
    """Cut anywhere, or with any byte changed: read as it is, or refused in our words, never a crash."""
    data, file = (folder / "spiece.model").read_bytes(), tmp_path / "spiece.model"
    rng = random.Random(0)
    for number in range(150):
        at = rng.randrange(len(data))
        broken = data[:at] if number % 2 else data[:at] + bytes([rng.randrange(256)]) + data[at + 1 :]
        file.write_bytes(broken)
        try:
            read_pieces(file)
        except CheckpointError as error:
            assert str(file) in error.message
    for broken in (b"", b"\xff" * 40, b"\x0a\x05ab", b"not a model at all"):
        file.write_bytes(broken)
        with pytest.raises(CheckpointError, match=r"spiece\.model"):
            Tokenizer.load(tmp_path)


# ---- training ------------------------------------------------------------------------------------------------------


def test_training_gives_the_form_of_t5(corpus, tmp_path):
    tokenizer = train_tokenizer(Texts([corpus]), "unigram", 900)
    assert tokenizer.kind == "unigram" and tokenizer.size <= 900
    assert [tokenizer.id_to_token(id) for id in range(3)] == ["<pad>", "</s>", "<unk>"]
    assert tokenizer.token_to_id("<extra_id_0>") == tokenizer.size - 1
    text = "北京的秋天很短，The module of json."
    encoded = tokenizer.encode(text)
    assert tokenizer.decode(encoded.ids) == text and encoded.ids[-1] == 1 and len(encoded) < len(text)
    tokenizer.save(tmp_path)
    assert (
        AutoTokenizer.from_pretrained(tmp_path)(text)["input_ids"]
        == encoded.ids
        == Tokenizer.load(tmp_path).encode(text).ids
    )


def test_the_same_files_give_the_same_tokenizer_in_any_process(corpus):
    code = (
        "from allmask.data import Texts; from allmask.text import train_tokenizer; "
        f"print(train_tokenizer(Texts([{str(corpus)!r}]), 'unigram', 900).backend.to_str())"
    )
    made = {subprocess.run([sys.executable, "-c", code], capture_output=True, check=True).stdout for _ in range(2)}
    assert len(made) == 1


def test_rare_characters_can_be_left_out(corpus):
    tokenizer = train_tokenizer(Texts([corpus]), "unigram", 400, alphabet=60)
    assert tokenizer.unk_id in tokenizer.encode("鸽").ids and tokenizer.unk_id not in tokenizer.encode("the").ids
    with pytest.raises(UsageError, match="alone need"):
        train_tokenizer(Texts([corpus]), "unigram", 200)
