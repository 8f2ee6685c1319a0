"""New tokenizers from texts: WordPiece in BERT's form, byte-level BPE in GPT-2's, plain BPE, unigram in T5's.

The same texts give the same tokenizer, every time and on every machine.
"""

from __future__ import annotations

import json
import re
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any

from tokenizers import Regex, models, pre_tokenizers, trainers
from tokenizers import Tokenizer as Backend

from allmask.errors import UsageError
from allmask.text import kinds
from allmask.text.kinds import BERT_SPECIALS, GPT2_SPECIALS, PLAIN_SPECIALS, T5_SPECIALS, Merges
from allmask.text.tokenizer import Tokenizer

KINDS = ("wordpiece", "bpe", "byte-bpe", "unigram")
_BATCH = 1000


def train_tokenizer(
    texts: Iterable[str],
    kind: str = "wordpiece",
    size: int = 8000,
    *,
    lowercase: bool | None = None,
    minimum: int = 2,
    alphabet: int | None = None,
) -> Tokenizer:
    """Train a tokenizer of at most `size` tokens on a list of texts, or on files: `allmask.data.Texts(["corpus/"])`.

    Texts are read more than once. `lowercase` is for wordpiece only, where it is the default; `minimum` is how often a
    pair must occur to become a piece; `alphabet` keeps only that many characters, the most frequent ones, and leaves
    the others unknown.
    """
    if kind not in KINDS:
        raise UsageError(f"tokenizer kind is {kind!r}; expected one of {', '.join(KINDS)}")
    if lowercase is not None and kind != "wordpiece":
        raise UsageError(f"lowercase is a setting of wordpiece; a {kind} tokenizer keeps text as it is")
    if alphabet is not None and (kind == "byte-bpe" or alphabet < 1):
        raise UsageError(f"alphabet is {alphabet} for {kind}; expected at least 1 (byte-bpe always has its 256 bytes)")
    if size < 1 or minimum < 1:
        raise UsageError(f"size is {size} and the minimum count {minimum}; both must be at least 1")
    if isinstance(texts, str) or iter(texts) is texts:
        raise UsageError("train_tokenizer reads its texts more than once", "pass a list of them, or allmask.data.Texts")
    corpus = _Corpus(texts)
    if kind == "wordpiece":
        return _train_wordpiece(corpus, size, minimum, alphabet, lowercase is not False)
    if kind == "bpe":
        return _train_plain_bpe(corpus, size, minimum, alphabet)
    if kind == "unigram":
        return _train_unigram(corpus, size, alphabet)
    return _train_byte_bpe(corpus, size, minimum)


class _Corpus:
    """Texts, to be read as often as needed."""

    def __init__(self, texts: Iterable[str]):
        self.texts = texts

    def batches(self) -> Iterator[list[str]]:
        texts = iter(self.texts)
        while batch := list(islice(texts, _BATCH)):
            yield batch

    def frequent(self, backend: Backend, count: int | None) -> list[str] | None:
        """The `count` most frequent characters after cleaning; among equals those seen first."""
        if count is None:
            return None
        counts: Counter[str] = Counter()
        for batch in self.batches():
            for text in batch:
                for word, _ in backend.pre_tokenizer.pre_tokenize_str(backend.normalizer.normalize_str(text)):
                    counts.update(word)
        return [character for character, _ in counts.most_common(count)]


def _train_wordpiece(corpus: _Corpus, size: int, minimum: int, alphabet: int | None, lowercase: bool) -> Tokenizer:
    specials = dict(BERT_SPECIALS)
    start = {piece: id for id, piece in enumerate(specials.values())}
    backend = kinds.wordpiece(start, specials, lowercase=lowercase)
    characters = corpus.frequent(backend, alphabet)
    # The library numbers ##-characters in the order of a random hash, which then decides ties between pairs. So the
    # first pass only collects the characters; the second is given them in an order of ours.
    found = _fit(backend, trainers.WordPieceTrainer(**_options(0, minimum, [], characters)), corpus)["vocab"].keys()
    marked = {piece for piece in found if len(piece) == 3 and piece.startswith("##")}
    first = [*start, *sorted(found - marked - start.keys()), *sorted(marked)]
    _expect_room(size, len(first))
    vocabulary = _fit(backend, trainers.WordPieceTrainer(**_options(size, minimum, first, characters)), corpus)["vocab"]
    backend = kinds.wordpiece(vocabulary, specials, lowercase=lowercase)
    return _finished(backend, specials)


def _train_plain_bpe(corpus: _Corpus, size: int, minimum: int, alphabet: int | None) -> Tokenizer:
    specials = dict(PLAIN_SPECIALS)
    start = {piece: id for id, piece in enumerate(specials.values())}
    backend = kinds.plain_bpe(start, [], specials)
    characters = corpus.frequent(backend, alphabet)
    model = _fit(backend, trainers.BpeTrainer(**_options(size, minimum, list(start), characters)), corpus)
    _expect_room(size, len(model["vocab"]))
    return _finished(kinds.plain_bpe(model["vocab"], _merges(model), specials), specials)


def _train_byte_bpe(corpus: _Corpus, size: int, minimum: int) -> Tokenizer:
    characters, specials = list(kinds.byte_alphabet()), dict(GPT2_SPECIALS)
    _expect_room(size, len(characters) + 1)
    backend = kinds.byte_bpe({}, [])
    model = _fit(backend, trainers.BpeTrainer(**_options(size - 1, minimum, [], characters)), corpus)
    vocabulary = {**model["vocab"], specials["eos"]: len(model["vocab"])}  # the last id, as in GPT-2
    return _finished(kinds.byte_bpe(vocabulary, _merges(model)), specials)


def _train_unigram(corpus: _Corpus, size: int, alphabet: int | None) -> Tokenizer:
    """Special tokens first, then pieces, likeliest first, and the sentinels last, as T5 has them."""
    specials = dict(T5_SPECIALS)
    first, last = [(piece, 0.0) for piece in specials.values()], kinds.sentinels()
    backend = kinds.unigram(first, specials)
    characters = corpus.frequent(backend, alphabet)
    if characters is not None:  # the library wants every character to be a piece, so it must not see the others
        known = "".join(re.escape(character) for character in characters)
        rare = pre_tokenizers.Split(Regex(f"[^▁{known}]"), "removed")
        backend.pre_tokenizer = pre_tokenizers.Sequence([backend.pre_tokenizer, rare])
    trainer = trainers.UnigramTrainer(vocab_size=max(1, size - len(first) - len(last)), show_progress=False)
    try:
        found = _settled(_fit(backend, trainer, corpus)["vocab"])
    except Exception:
        _expect_room(size, len(first) + len(last) + len(corpus.frequent(backend, sys.maxsize) or ()))
        raise
    backend = kinds.unigram([*first, *sorted(found, key=_likeliest_first), *last], specials)
    backend.add_special_tokens([piece for piece, _ in last])
    return _finished(backend, specials)


_RARE = 1e-4  # what the library puts between the scores of characters that are no piece on their own


def _settled(found: list[tuple[str, float]]) -> list[tuple[str, float]]:
    """The same without what is left to chance: the order of such characters, and the last digits of sums."""
    lowest = min(score for _, score in found)
    steps = {piece: (score - lowest) / _RARE for piece, score in found if len(piece) == 1}
    rare = [piece for piece, step in steps.items() if step < len(steps) and abs(step - round(step)) < 1e-6]
    scores = dict(found) | {piece: lowest + _RARE * number for number, piece in enumerate(sorted(rare))}
    return [(piece, round(score, 9)) for piece, score in scores.items()]


def _likeliest_first(entry: tuple[str, float]) -> tuple[float, str]:
    return -entry[1], entry[0]


def _options(size: int, minimum: int, first: list[str], characters: list[str] | None) -> dict[str, Any]:
    """`first` come first, in this order; `characters` are the whole alphabet when given."""
    return {
        "vocab_size": size,
        "min_frequency": minimum,
        "special_tokens": first,
        "show_progress": False,
    } | ({} if characters is None else {"initial_alphabet": characters, "limit_alphabet": len(characters)})


def _fit(pipeline: Backend, trainer: Any, corpus: _Corpus) -> dict[str, Any]:
    """Train a fresh model behind this pipeline's way of cleaning and cutting; gives the model as plain data."""
    models_of = {
        trainers.WordPieceTrainer: lambda: models.WordPiece(unk_token="[UNK]"),
        trainers.BpeTrainer: models.BPE,
    }
    fresh = Backend(models_of.get(type(trainer), models.Unigram)())
    if pipeline.normalizer is not None:
        fresh.normalizer = pipeline.normalizer
    fresh.pre_tokenizer = pipeline.pre_tokenizer
    fresh.train_from_iterator(corpus.batches(), trainer)
    return json.loads(fresh.to_str())["model"]


def _merges(model: dict[str, Any]) -> Merges:
    return [(a, b) for a, b in model["merges"]]


def _expect_room(size: int, needed: int) -> None:
    if needed > size:
        raise UsageError(
            f"size is {size:,}, but the special tokens and the characters of the text alone need {needed:,}",
            f"ask for at least {needed:,}, or leave rare characters out (alphabet; not for byte-bpe)",
        )


def _finished(backend: Backend, specials: dict[str, str]) -> Tokenizer:
    backend.add_special_tokens(list(dict.fromkeys(specials.values())))
    return Tokenizer(backend, specials)
