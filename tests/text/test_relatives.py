"""The tokenizers of RoBERTa, XLM-R and ALBERT: the ids of transformers and of sentencepiece, saved and read back."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tokenizers import ByteLevelBPETokenizer
from transformers import AlbertTokenizer, RobertaTokenizer, XLMRobertaTokenizer

from allmask.errors import CheckpointError
from allmask.text import Tokenizer
from tests.objectives.texts import chinese_documents, english_documents
from tests.text.references import CORPUS, TEXTS, assert_read_back

MARKS = ["<s>", "<pad>", "</s>", "<unk>"]
ROBERTA = {"cls": 0, "bos": 0, "pad": 1, "sep": 2, "eos": 2, "unk": 3}


@pytest.fixture(scope="module")
def roberta(tmp_path_factory) -> Path:
    """vocab.json and merges.txt, trained by another library."""
    place = tmp_path_factory.mktemp("roberta")
    trainer = ByteLevelBPETokenizer()
    trainer.train_from_iterator(CORPUS, 420, special_tokens=[*MARKS, "<mask>"], show_progress=False)
    trainer.save_model(str(place))
    return place


def spiece(place: Path, name: str, **more) -> Path:
    """A vocabulary trained by sentencepiece itself."""
    pieces = pytest.importorskip("sentencepiece")
    lines = [line for document in [*english_documents(), *chinese_documents()] for line in document]
    (place / "text.txt").write_text("\n".join(lines), encoding="utf-8")
    pieces.SentencePieceTrainer.train(
        input=str(place / "text.txt"), model_prefix=str(place / "spiece"), vocab_size=900, model_type="unigram",
        character_coverage=0.999, minloglevel=2, **more,
    )  # fmt: skip
    (place / "text.txt").unlink()
    (place / "spiece.vocab").unlink()
    (place / "spiece.model").rename(place / name)
    return place


@pytest.fixture(scope="module")
def xlmr(tmp_path_factory) -> Path:
    return spiece(tmp_path_factory.mktemp("xlmr"), "sentencepiece.bpe.model")


@pytest.fixture(scope="module")
def albert(tmp_path_factory) -> Path:
    marks = {"pad_id": 0, "unk_id": 1, "bos_id": -1, "eos_id": -1, "control_symbols": "[CLS],[SEP],[MASK]"}
    return spiece(tmp_path_factory.mktemp("albert"), "spiece.model", **marks)


CLASSES = {"roberta": RobertaTokenizer, "xlmr": XLMRobertaTokenizer, "albert": AlbertTokenizer}


@pytest.mark.parametrize("name", CLASSES)
def test_ids_and_segments_are_those_of_transformers(name, request, tmp_path):
    folder = request.getfixturevalue(name)
    ours, theirs = Tokenizer.load(folder), CLASSES[name].from_pretrained(folder)
    for text in [*TEXTS, "``quoted'' Crème", "北京<mask>欢迎", "北京[MASK]欢迎"]:
        assert ours.encode(text).ids == theirs(text)["input_ids"], text
    pair = ours.encode("北京欢迎你", "two Words")
    expected = theirs("北京欢迎你", "two Words", return_token_type_ids=True)
    assert (pair.ids, pair.segments) == (expected["input_ids"], expected["token_type_ids"])
    assert ours.separators == (1 if name == "albert" else 2)
    for role in ("pad", "unk", "cls", "sep", "mask"):
        assert ours.special_id(role) == getattr(theirs, f"{role}_token_id"), role
    theirs.save_pretrained(tmp_path)  # with a tokenizer.json
    again = Tokenizer.load(tmp_path)
    assert all(again.encode(text).ids == ours.encode(text).ids for text in TEXTS)
    (tmp_path / "tokenizer_config.json").unlink()
    bare = Tokenizer.load(tmp_path)
    assert all(bare.special_id(role) == ours.special_id(role) for role in ("pad", "unk", "cls", "sep", "mask"))


@pytest.mark.parametrize("name", CLASSES)
def test_they_are_saved_for_transformers_and_read_back(name, request, tmp_path):
    ours = Tokenizer.load(request.getfixturevalue(name))
    again, alone, theirs = assert_read_back(ours, tmp_path, [*TEXTS, f"a {ours.specials['mask']} b"])
    assert again.specials == ours.specials and alone.special_id("mask") == ours.special_id("mask")
    assert theirs.mask_token_id == ours.mask_id
    if name == "roberta":
        assert type(theirs).__name__ == "RobertaTokenizer"
        (tmp_path / "tokenizer.json").unlink()
        assert Tokenizer.load(tmp_path).encode("a <mask> b").ids == ours.encode("a <mask> b").ids  # from vocab.json


def test_the_ids_of_xlmr_are_those_of_its_file_plus_one(xlmr):
    import sentencepiece

    ours = Tokenizer.load(xlmr)
    reference = sentencepiece.SentencePieceProcessor(model_file=str(xlmr / "sentencepiece.bpe.model"))
    for text in [
        "The quick brown fox, 1984!",
        "  two  spaces  ",
        "春眠不觉晓，处处闻啼鸟。",
        "ｆｕｌｌ　ｗｉｄｔｈ",
        "ﬁ é",
    ]:
        expected = [piece + 1 if piece else ROBERTA["unk"] for piece in reference.encode(text)]
        assert ours.encode(text, special=False).ids == expected, text
    assert {role: ours.special_id(role) for role in ROBERTA} == ROBERTA
    assert ours.mask_id == ours.size - 1 == reference.get_piece_size() + 1


def test_a_space_before_mask_belongs_to_it(roberta):
    """So it is in the published tokenizer.json: the answer itself begins with a space, or does not."""
    ours = Tokenizer.load(roberta)
    assert ours.tokens(ours.encode("a <mask> b").ids) == ["<s>", "a", "<mask>", "Ġb", "</s>"]


def test_settings_in_the_same_folder(albert, roberta, tmp_path):
    (tmp_path / "spiece.model").write_bytes((albert / "spiece.model").read_bytes())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"do_lower_case": False}))
    lower, cased = Tokenizer.load(albert), Tokenizer.load(tmp_path)
    assert lower.encode("The FOX").ids == lower.encode("the fox").ids == cased.encode("the fox").ids
    assert cased.encode("The FOX").ids != cased.encode("the fox").ids
    for name in ("vocab.json", "merges.txt"):
        (tmp_path / name).write_bytes((roberta / name).read_bytes())
    settings = {"tokenizer_class": "RobertaTokenizerFast", "add_prefix_space": True}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    assert Tokenizer.load(tmp_path).encode("mask").ids == Tokenizer.load(roberta).encode(" mask").ids
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings | {"sep_token": "<nowhere>"}))
    with pytest.raises(CheckpointError, match="<nowhere>"):
        Tokenizer.load(tmp_path)


@pytest.mark.parametrize("told_by", ["tokenizer_config.json", "config.json", "the kind of model"])
def test_a_roformer_that_splits_words_with_jieba_is_refused(uncased, tmp_path, told_by):
    uncased.save(tmp_path)
    for name in ("tokenizer_config.json", "tokenizer.json"):
        (tmp_path / name).unlink()
    assert Tokenizer.load(tmp_path).size == uncased.size
    named, model = {"tokenizer_class": "RoFormerTokenizer"}, {"model_type": "roformer"}
    if told_by == "tokenizer_config.json":
        (tmp_path / told_by).write_text(json.dumps(named))
    else:
        (tmp_path / "config.json").write_text(json.dumps(model | (named if told_by == "config.json" else {})))
    with pytest.raises(CheckpointError, match="jieba"):
        Tokenizer.load(tmp_path)
    (tmp_path / "tokenizer_config.json").unlink(missing_ok=True)
    (tmp_path / "config.json").write_text(json.dumps(model | {"tokenizer_class": "BertTokenizer"}))
    assert Tokenizer.load(tmp_path).encode("北京").ids == uncased.encode("北京").ids


def test_a_file_of_another_model_is_refused(albert, tmp_path):
    (tmp_path / "sentencepiece.bpe.model").write_bytes((albert / "spiece.model").read_bytes())
    with pytest.raises(CheckpointError, match="is it the file of an XLM-R"):
        Tokenizer.load(tmp_path)
