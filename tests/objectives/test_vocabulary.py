"""What objectives know of real tokenizers."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from tokenizers import AddedToken

from allmask.data import Texts
from allmask.errors import UsageError
from allmask.objectives import Mass, Mlm, Nsp, Permutation, Prefix, Span, Unilm, Vocabulary
from allmask.registry import OBJECTIVES
from allmask.text import Tokenizer, train_tokenizer
from tests.objectives.texts import Scripted, chinese_documents, english_documents, small_vocabulary

SENTENCES = [sentence for document in english_documents() + chinese_documents() for sentence in document]


def words(vocabulary: Vocabulary, ids: list[int]) -> list[int]:
    """Where words begin."""
    return [at for at, id in enumerate(ids) if at == 0 or not vocabulary.continues[id]]


def test_wordpiece(tokenizer: Tokenizer):
    vocabulary = Vocabulary.of(tokenizer)
    assert (vocabulary.begin, vocabulary.end, vocabulary.mask) == (
        tokenizer.cls_id,
        tokenizer.sep_id,
        tokenizer.mask_id,
    )
    assert np.flatnonzero(vocabulary.special[: tokenizer.size]).tolist() == sorted(tokenizer.special_ids)
    for sentence in SENTENCES:
        encoded = tokenizer.encode(sentence, special=False)
        starts = [at for at, word in enumerate(encoded.raw.word_ids) if at == 0 or word != encoded.raw.word_ids[at - 1]]
        assert words(vocabulary, encoded.ids) == starts


@pytest.mark.parametrize(("kind", "first"), [("bpe", "Returns"), ("byte-bpe", "Rëturns")])
def test_words_of_other_kinds(kind: str, first: str, corpus):
    tokenizer = train_tokenizer(Texts([corpus]), kind, 900)
    vocabulary = Vocabulary.of(tokenizer)
    text = f"{first} unbelievable things, don't stop 北京欢迎你"
    cut = tokenizer.encode(text, special=False)
    starts = words(vocabulary, cut.ids)
    pieces = [cut.offsets[begin:end] for begin, end in zip(starts, [*starts[1:], len(cut)], strict=True)]
    found = [text[piece[0][0] : piece[-1][1]].strip() for piece in pieces]
    assert [word for word in found if word][:7] == [first, "unbelievable", "things", ",", "don", "'t", "stop"]
    assert [word for word in found if word][7:] == list("北京欢迎你")


def test_letters_are_words_where_nothing_marks_them():
    assert not small_vocabulary().continues[:30].any()


def test_random_tokens_are_ordinary(tokenizer: Tokenizer):
    vocabulary = Vocabulary.of(tokenizer)
    assert len(vocabulary.ordinary) == tokenizer.size - len(tokenizer.special_ids)
    assert not set(vocabulary.ordinary.tolist()) & (tokenizer.special_ids | set(vocabulary.sentinels.tolist()))


def test_sentinels_beyond_the_tokenizer(tokenizer: Tokenizer):
    vocabulary = Vocabulary.of(tokenizer)
    assert vocabulary.sentinels.tolist() == list(range(tokenizer.size, tokenizer.size + 100))
    assert vocabulary.rows == tokenizer.size + 100 and vocabulary.special[tokenizer.size :].all()


@pytest.mark.parametrize(("pattern", "first"), [("<extra_id_{}>", 0), ("[unused{}]", 1)])
def test_sentinels_of_the_tokenizer(corpus, pattern: str, first: int):
    tokenizer = train_tokenizer(Texts([corpus]), "wordpiece", 1200)
    tokenizer.backend.add_tokens([AddedToken(pattern.format(n), special=False) for n in range(first, first + 7)])
    vocabulary = Vocabulary.of(tokenizer)
    assert tokenizer.tokens(vocabulary.sentinels) == [pattern.format(n) for n in range(first, first + 7)]
    assert vocabulary.rows == tokenizer.size and vocabulary.special[vocabulary.sentinels].all()


def test_objectives_that_need_a_mask_token_are_refused(corpus):
    vocabulary = Vocabulary.of(train_tokenizer(Texts([corpus]), "byte-bpe", 400))
    for name in ("mlm", "nsp", "unilm", "permutation", "mass"):
        with pytest.raises(UsageError, match=rf"{name}: this tokenizer has no \[MASK\]"):
            OBJECTIVES[name](vocabulary)
    for name in ("causal", "reverse", "prefix", "span"):
        OBJECTIVES[name](vocabulary)
    assert Permutation(vocabulary, two_streams=False).batch([np.arange(5)], Scripted(order=[0.5] * 7)).targets == 1


def test_a_missing_first_token_is_named():
    with pytest.raises(UsageError, match=r"nsp: this tokenizer has no \[CLS\] or other first token"):
        Nsp(replace(small_vocabulary(), begin=None))


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (Mlm, {"share": 0.0}), (Mlm, {"share": 1.0}), (Mlm, {"ngrams": ()}), (Mlm, {"ngrams": (0, 0)}),
        (Mlm, {"ngrams": (1, -1)}), (Mlm, {"corruption": (1, 1)}), (Mlm, {"corruption": (0, 0, 0)}),
        (Unilm, {"corruption": (2, -1, 0)}),
        (Nsp, {"share": 2.0}), (Unilm, {"share": -1.0}), (Unilm, {"weights": (1, 1, 1)}),
        (Unilm, {"weights": (0, 0, 0, 0)}), (Unilm, {"weights": (1, 1, 1, float("nan"))}), (Permutation, {"part": 0}),
        (Mass, {"share": 0.0}), (Span, {"share": 1.0}), (Span, {"mean_length": 0.5}),
    ],
)  # fmt: skip
def test_options_that_make_no_sense(kind, options):
    with pytest.raises(UsageError):
        kind(small_vocabulary(), **options)


def test_a_sample_without_tokens_is_named():
    with pytest.raises(UsageError, match="sample 1 has no tokens"):
        Prefix(small_vocabulary()).batch([np.arange(5, 8), np.empty(0, int)], Scripted(2, cut=[0.0, 0.0]))
