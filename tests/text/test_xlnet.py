"""XLNet's unigram: read from spiece.model as transformers does, <sep> and <cls> behind a text, saved and read back."""

from __future__ import annotations

import json

import numpy as np
import pytest
from transformers import XLNetTokenizer

from allmask.errors import CheckpointError
from allmask.objectives import Draw, Permutation, Vocabulary
from allmask.objectives.ragged import Ragged
from allmask.text import Tokenizer
from tests.objectives.texts import chinese_documents, english_documents
from tests.text.references import assert_read_back

TEXTS = [
    "The quick brown fox, 1984!", "  two  spaces  ", "春眠不觉晓，处处闻啼鸟。", "``quoted'' é ñ ﬁ ①",
    "tab\tand\nnewline", "", "Mixed 中文 and English.", "🙂 end", "a <mask> b<sep>c", "ｆｕｌｌ　ｗｉｄｔｈ",
    "<eop> <eod></s>",
]  # fmt: skip
MARKS = {"unk": 0, "bos": 1, "eos": 2, "cls": 3, "sep": 4, "pad": 5, "mask": 6}  # as in the published vocabularies


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A vocabulary trained by sentencepiece itself, with XLNet's special tokens."""
    pieces = pytest.importorskip("sentencepiece")
    place = tmp_path_factory.mktemp("xlnet")
    lines = [line for document in [*english_documents(), *chinese_documents()] for line in document]
    (place / "text.txt").write_text("\n".join(lines), encoding="utf-8")
    pieces.SentencePieceTrainer.train(
        input=str(place / "text.txt"), model_prefix=str(place / "spiece"), vocab_size=900, model_type="unigram",
        control_symbols="<cls>,<sep>,<pad>,<mask>,<eod>", user_defined_symbols="<eop>,.,(,),-,£,€",
        character_coverage=0.999, minloglevel=2,
    )  # fmt: skip
    (place / "text.txt").unlink()
    return place


def test_ids_and_segments_are_those_of_transformers(folder):
    ours, theirs = Tokenizer.load(folder), XLNetTokenizer.from_pretrained(folder)
    for text in TEXTS:
        found, expected = ours.encode(text), theirs(text, return_token_type_ids=True)
        assert found.ids == expected["input_ids"], text
        assert found.segments == expected["token_type_ids"], text
    pair = ours.encode("北京欢迎你", "two words")
    expected = theirs("北京欢迎你", "two words", return_token_type_ids=True)
    assert (pair.ids, pair.segments) == (expected["input_ids"], expected["token_type_ids"])
    assert {role: ours.special_id(role) for role in MARKS} == MARKS and ours.kind == "unigram"


def test_pieces_are_those_of_sentencepiece(folder):
    """Signs such as ( are pieces of their own, and the space before one is kept, as in pretraining."""
    import sentencepiece

    ours = Tokenizer.load(folder)
    reference = sentencepiece.SentencePieceProcessor(model_file=str(folder / "spiece.model"))
    for text in ["Mixed 中文 and English. (twice) - once", "a (b) c.d", "春眠不觉晓，处处闻啼鸟。", "  two  spaces  "]:
        assert ours.encode(text, special=False).ids == reference.encode(text), text


def test_cls_closes_a_text_and_nothing_begins_it(folder):
    ours = Tokenizer.load(folder)
    assert (ours.begin_id, ours.end_id, ours.closing_id) == (None, MARKS["sep"], MARKS["cls"])
    vocabulary = Vocabulary.of(ours)
    framed = vocabulary.framed(Ragged.of([np.array([20, 21]), np.array([22])]))
    assert framed.values.tolist() == [20, 21, 4, 3, 22, 4, 3] and framed.lengths.tolist() == [4, 3]
    batch = Permutation(vocabulary).batch([np.array([20, 21, 22])], Draw(0, 0, [0]))
    closing = batch.ids[0] == MARKS["cls"]
    assert batch.segments[0].tolist() == (2 * closing).tolist() and batch.mask.position[0, closing].tolist() == [4]
    assert (batch.mask.order[0, closing] == 0).all() and batch.query == MARKS["mask"]


def test_it_is_saved_for_transformers_and_read_back(folder, tmp_path):
    ours = Tokenizer.load(folder)
    again, alone, theirs = assert_read_back(ours, tmp_path, TEXTS)
    assert again.specials == alone.specials == ours.specials and again.closing_id == MARKS["cls"]
    assert theirs.padding_side == "left"


def test_settings_in_the_same_folder(folder, tmp_path):
    (tmp_path / "spiece.model").write_bytes((folder / "spiece.model").read_bytes())
    settings = {"tokenizer_class": "XLNetTokenizer", "do_lower_case": True}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    ours, plain = Tokenizer.load(tmp_path), Tokenizer.load(folder)
    assert ours.encode("The FOX").ids == plain.encode("the fox").ids != plain.encode("The FOX").ids
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({**settings, "sep_token": "<nowhere>"}))
    with pytest.raises(CheckpointError, match="<nowhere>"):
        Tokenizer.load(tmp_path)
