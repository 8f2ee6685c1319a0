"""Train tokenizers on texts: WordPiece like BERT's, byte-level BPE like GPT-2's, plain BPE, unigram like T5's.

The same texts always give the same tokenizer, on every machine.
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
_RARE = 1e-4  # the library's distance between the scores of characters that are not frequent enough to be pieces


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

    Texts are read more than once. `lowercase` is for wordpiece only, where it is the default. `minimum` is how often a
    pair must occur to become a piece. `alphabet` keeps only that many characters, the most frequent ones; others become
    unknown.
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
    if kind == "wordpiece":
        backend, specials = _train_wordpiece(texts, size, minimum, alphabet, lowercase is not False)
    elif kind == "bpe":
        backend, specials = _train_plain_bpe(texts, size, minimum, alphabet)
    elif kind == "unigram":
        backend, specials = _train_unigram(texts, size, alphabet)
    else:
        backend, specials = _train_byte_bpe(texts, size, minimum)
    backend.add_special_tokens(list(dict.fromkeys(specials.values())))
    return Tokenizer(backend, dict(specials))


Trained = tuple[Backend, dict[str, str]]  # the tokenizer, its special tokens


def _train_wordpiece(texts: Iterable[str], size: int, minimum: int, alphabet: int | None, lowercase: bool) -> Trained:
    start = {piece: id for id, piece in enumerate(BERT_SPECIALS.values())}
    backend = kinds.wordpiece(start, BERT_SPECIALS, lowercase=lowercase)
    characters = _frequent(texts, backend, alphabet)
    # The library numbers ##-characters in the order of a random hash, which then decides ties between pairs. So the
    # first pass only collects the characters; the second gets them in a fixed order.
    found = _fit(backend, trainers.WordPieceTrainer(**_options(0, minimum, [], characters)), texts)["vocab"].keys()
    marked = {piece for piece in found if len(piece) == 3 and piece.startswith("##")}
    first = [*start, *sorted(found - marked - start.keys()), *sorted(marked)]
    _expect_room(size, len(first))
    vocabulary = _fit(backend, trainers.WordPieceTrainer(**_options(size, minimum, first, characters)), texts)["vocab"]
    return kinds.wordpiece(vocabulary, BERT_SPECIALS, lowercase=lowercase), BERT_SPECIALS


def _train_plain_bpe(texts: Iterable[str], size: int, minimum: int, alphabet: int | None) -> Trained:
    start = {piece: id for id, piece in enumerate(PLAIN_SPECIALS.values())}
    backend = kinds.plain_bpe(start, [], PLAIN_SPECIALS)
    characters = _frequent(texts, backend, alphabet)
    model = _fit(backend, trainers.BpeTrainer(**_options(size, minimum, list(start), characters)), texts)
    _expect_room(size, len(model["vocab"]))
    return kinds.plain_bpe(model["vocab"], _merges(model), PLAIN_SPECIALS), PLAIN_SPECIALS


def _train_byte_bpe(texts: Iterable[str], size: int, minimum: int) -> Trained:
    characters = list(kinds.byte_alphabet())
    _expect_room(size, len(characters) + 1)
    trainer = trainers.BpeTrainer(**_options(size - 1, minimum, [], characters))
    model = _fit(kinds.byte_bpe({}, []), trainer, texts)
    vocabulary = {**model["vocab"], GPT2_SPECIALS["eos"]: len(model["vocab"])}  # the last id, as in GPT-2
    return kinds.byte_bpe(vocabulary, _merges(model)), GPT2_SPECIALS


def _train_unigram(texts: Iterable[str], size: int, alphabet: int | None) -> Trained:
    """Special tokens come first, then pieces by descending probability, then the sentinels, as in T5."""
    first, last = [(piece, 0.0) for piece in T5_SPECIALS.values()], kinds.sentinels()
    backend = kinds.unigram(first, T5_SPECIALS)
    characters = _frequent(texts, backend, alphabet)
    if characters is not None:  # the library makes every character a piece, so the others are removed before
        known = "".join(re.escape(character) for character in characters)
        rare = pre_tokenizers.Split(Regex(f"[^▁{known}]"), "removed")
        backend.pre_tokenizer = pre_tokenizers.Sequence([backend.pre_tokenizer, rare])
    trainer = trainers.UnigramTrainer(vocab_size=max(1, size - len(first) - len(last)), show_progress=False)
    try:
        found = _without_chance(_fit(backend, trainer, texts)["vocab"])
    except Exception:
        _expect_room(size, len(first) + len(last) + len(_frequent(texts, backend, sys.maxsize) or ()))
        raise
    found.sort(key=lambda entry: (-entry[1], entry[0]))
    backend = kinds.unigram([*first, *found, *last], T5_SPECIALS)
    backend.add_special_tokens([piece for piece, _ in last])
    return backend, T5_SPECIALS


def _without_chance(found: list[tuple[str, float]]) -> list[tuple[str, float]]:
    """Fix what the library leaves to chance: the order of rare characters, and the last digits of scores."""
    lowest = min(score for _, score in found)
    steps = {piece: (score - lowest) / _RARE for piece, score in found if len(piece) == 1}
    rare = [piece for piece, step in steps.items() if step < len(steps) and abs(step - round(step)) < 1e-6]
    scores = dict(found) | {piece: lowest + _RARE * number for number, piece in enumerate(sorted(rare))}
    return [(piece, round(score, 9)) for piece, score in scores.items()]


def _batches(texts: Iterable[str]) -> Iterator[list[str]]:
    source = iter(texts)
    while batch := list(islice(source, _BATCH)):
        yield batch


def _frequent(texts: Iterable[str], backend: Backend, count: int | None) -> list[str] | None:
    """Return the `count` most frequent characters after normalization; of equally frequent ones those seen first."""
    if count is None:
        return None
    counts: Counter[str] = Counter()
    for text in texts:
        for word, _ in backend.pre_tokenizer.pre_tokenize_str(backend.normalizer.normalize_str(text)):
            counts.update(word)
    return [character for character, _ in counts.most_common(count)]


def _options(size: int, minimum: int, first: list[str], characters: list[str] | None) -> dict[str, Any]:
    """Return the options of a trainer: `first` are the first tokens; `characters` are the alphabet, if given."""
    options = {"vocab_size": size, "min_frequency": minimum, "special_tokens": first, "show_progress": False}
    return options if characters is None else {
        **options, "initial_alphabet": characters, "limit_alphabet": len(characters),
    }  # fmt: skip


def _fit(pipeline: Backend, trainer: Any, texts: Iterable[str]) -> dict[str, Any]:
    """Train a new model with the normalizer and pre-tokenizer of `pipeline`; return the model as plain data."""
    if isinstance(trainer, trainers.WordPieceTrainer):
        fresh = Backend(models.WordPiece(unk_token="[UNK]"))
    else:
        fresh = Backend(models.BPE() if isinstance(trainer, trainers.BpeTrainer) else models.Unigram())
    if pipeline.normalizer is not None:
        fresh.normalizer = pipeline.normalizer
    fresh.pre_tokenizer = pipeline.pre_tokenizer
    fresh.train_from_iterator(_batches(texts), trainer)
    return json.loads(fresh.to_str())["model"]


def _merges(model: dict[str, Any]) -> Merges:
    return [(a, b) for a, b in model["merges"]]


def _expect_room(size: int, needed: int) -> None:
    if needed > size:
        raise UsageError(
            f"size is {size:,}, but the special tokens and the characters of the text alone need {needed:,}",
            f"ask for at least {needed:,}, or leave rare characters out (alphabet; not for byte-bpe)",
        )
