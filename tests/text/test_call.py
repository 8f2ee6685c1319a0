"""`tokenizer(texts)` is called like a tokenizer of transformers and returns the same."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer

import allmask
from allmask.errors import UsageError
from allmask.mask import Mask
from allmask.text import Tokenizer
from tests import tiny

TEXTS = ["The reader re-reads what the writers wrote.", "北京欢迎你，你想吃啥？", "", "a"]
PAIRS = ["白切鸡。", "readers and writers: reading, writing, rewriting", "x", "掩码决定一切：谁能看见谁。"]
CALLS = [
    {}, {"padding": True}, {"padding": "longest", "return_tensors": "pt"}, {"truncation": True, "max_length": 8},
    {"padding": "max_length", "max_length": 40, "return_tensors": "np"}, {"add_special_tokens": False},
    {"truncation": "longest_first", "padding": "max_length", "max_length": 9, "return_tensors": "pt"},
    {"truncation": True, "max_length": 6, "add_special_tokens": False},
]  # fmt: skip
OF_PAIRS = [
    *CALLS, {"truncation": True, "max_length": 11}, {"truncation": "only_first", "max_length": 60},
    {"truncation": "only_second", "max_length": 60, "padding": True},
]  # fmt: skip
KEYS = {"input_ids", "token_type_ids", "attention_mask"}


@pytest.fixture(scope="module", params=["uncased", "byte_bpe"])
def both(request, tmp_path_factory):
    """Our tokenizer and theirs; the byte-level one is made to have a padding token."""
    folder = tmp_path_factory.mktemp("call")
    request.getfixturevalue(request.param).save(folder)
    theirs = AutoTokenizer.from_pretrained(folder)
    if theirs.pad_token is None:
        theirs.pad_token = theirs.eos_token
        theirs.save_pretrained(folder)
    return Tokenizer.load(folder), theirs


def same(found, expected):
    assert found.keys() == KEYS
    for name in KEYS:
        ours, theirs = found[name], expected[name]
        assert type(ours) is type(theirs), name
        assert np.array_equal(ours, theirs) if isinstance(ours, np.ndarray | torch.Tensor) else ours == theirs, name


@pytest.mark.parametrize("call", CALLS)
def test_texts(both, call):
    ours, theirs = both
    same(ours(TEXTS, **call), theirs(TEXTS, return_token_type_ids=True, **call))
    for text in TEXTS:
        if call.get("return_tensors") is None or text:
            same(ours(text, **call), theirs(text, return_token_type_ids=True, **call))


@pytest.mark.parametrize("call", OF_PAIRS)
def test_pairs(both, call):
    ours, theirs = both
    same(ours(TEXTS, PAIRS, **call), theirs(TEXTS, PAIRS, return_token_type_ids=True, **call))
    together = list(zip(TEXTS, PAIRS, strict=True))
    same(ours(together, **call), theirs(TEXTS, PAIRS, return_token_type_ids=True, **call))
    same(ours(TEXTS[0], PAIRS[1], **call), theirs(TEXTS[0], PAIRS[1], return_token_type_ids=True, **call))


def test_the_model_reads_what_it_returns(tmp_path: Path):
    model = allmask.load(tiny.bert(tmp_path / "bert"))
    assert model.tokenizer is not None and model.tokenizer.max_length == 48
    tokens = model.tokenizer(["red cat", "北京" * 40], padding=True, truncation=True, return_tensors="pt")
    assert tokens.input_ids.shape == (2, 48) and tokens["attention_mask"].sum(1).tolist() == [4, 48]
    mask = Mask.bidirectional(tokens.attention_mask.bool())
    assert model(tokens.input_ids, mask, segments=tokens.token_type_ids).hidden.shape == (2, 48, 16)
    kept = model.keep_tokens(tokens.input_ids.unique().tolist())
    assert kept.tokenizer is not None and kept.tokenizer.max_length == 48
    with pytest.raises(AttributeError):
        tokens.offset_mapping  # noqa: B018


@pytest.mark.parametrize(
    ("call", "words"),
    [
        ({"truncation": True}, "pass max_length="),
        ({"padding": "max_length"}, "pass max_length="),
        ({"padding": "left"}, "padding is 'left'"),
        ({"truncation": "middle", "max_length": 3}, "truncation is 'middle'"),
        ({"truncation": "only_second", "max_length": 3}, "truncation is 'only_second'"),
        ({"truncation": True, "max_length": 1}, "max_length is 1"),
        ({"return_tensors": "tf", "padding": True}, "return_tensors is 'tf'"),
        ({"return_tensors": "pt"}, "pass padding=True"),
        ({"text_pair": ["one"]}, "4 texts, but 1"),
    ],
)
def test_what_is_refused(uncased, call, words):
    with pytest.raises(UsageError, match=words):
        uncased(TEXTS, **call)


def test_padding_needs_a_token(byte_bpe):
    with pytest.raises(UsageError, match="no padding token"):
        byte_bpe(TEXTS, padding=True)
