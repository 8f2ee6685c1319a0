"""Words, the pieces they are cut into, and rows of pieces for a model: windows that together read every word.

A word is asked at its first piece. In a text longer than a row, windows overlap, and a word is asked in the window in
which it stands farthest from the edge.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from allmask.config import Config
from allmask.data import Example
from allmask.tasks.frames import Frame
from allmask.text import Tokenizer
from allmask.text.lengths import windows

OVERLAP = 128  # pieces that neighbouring windows share, or half a window


@dataclass(frozen=True)
class Word:
    text: str
    start: int  # in characters of the text
    end: int


def split_words(tokenizer: Tokenizer, texts: Sequence[str]) -> list[list[Word]]:
    """The words of each text as the tokenizer splits it: at spaces and punctuation, Chinese by character."""
    result = []
    for text, encoded in zip(texts, tokenizer.encode_batch(list(texts), special=False), strict=True):
        bounds: dict[int, list[int]] = {}
        for word, (start, end) in zip(encoded.raw.word_ids, encoded.offsets, strict=True):
            if word is not None and end > start:
                found = bounds.setdefault(word, [start, end])
                found[:] = min(found[0], start), max(found[1], end)
        result.append([Word(text[start:end], start, end) for start, end in _with_marks(text, bounds.values())])
    return result


def _with_marks(text: str, bounds: Iterable[Sequence[int]]) -> list[tuple[int, int]]:
    return [(start, with_marks(text, end)) for start, end in bounds]


def with_marks(text: str, end: int) -> int:
    """The end of a piece of text with the marks that belong to its last letter: accents, variants of emoji.

    Tokenizers drop some of them, and would end the piece before.
    """
    while end < len(text) and end > 0 and (unicodedata.category(text[end]) in ("Mn", "Me") or _joins(text, end)):
        end += 1
    return end


def _joins(text: str, place: int) -> bool:
    """Whether a character is part of the sign before it: a colour of skin, or joined to it."""
    return text[place] == "\u200d" or text[place - 1] == "\u200d" or "\U0001f3fb" <= text[place] <= "\U0001f3ff"


# ---- rows ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Window:
    """A row, and which of its tokens are asked for which words."""

    example: Example
    places: np.ndarray  # (M,) in the row
    words: np.ndarray  # (M,) numbers of words


def read_words(
    tokenizer: Tokenizer, config: Config, sentences: Sequence[Sequence[str]], size: int
) -> list[list[Window]]:
    """The windows of each sentence, of `size` tokens at most, [CLS] and [SEP] among them."""
    frame = Frame.of(tokenizer, config)
    pieces = _pieces(tokenizer, {word for sentence in sentences for word in sentence})
    return [_windows([pieces[word] for word in sentence], frame, size) for sentence in sentences]


def _pieces(tokenizer: Tokenizer, words: Iterable[str]) -> dict[str, list[int]]:
    """The ids of each word. One of which the tokenizer leaves nothing (a control character) is unknown to it."""
    some = sorted(words)
    unknown = [] if tokenizer.unk_id is None else [tokenizer.unk_id]
    encoded = tokenizer.encode_batch(some, special=False)
    return {word: one.ids or unknown for word, one in zip(some, encoded, strict=True)}


def _windows(words: Sequence[list[int]], frame: Frame, size: int) -> list[Window]:
    room, offset = frame.room(size), frame.start()
    ids = np.array([id for word in words for id in word], dtype=np.int32)
    counts = np.array([len(word) for word in words], dtype=np.int64)
    firsts = counts.cumsum() - counts
    if not len(ids):
        return []
    spans = windows(len(ids), room, max(1, room - min(OVERLAP, room // 2)))
    chosen = most_context(firsts, spans)
    made = []
    for number, (start, stop) in enumerate(spans):
        asked = np.flatnonzero((chosen == number) & (counts > 0))
        if not len(asked):  # within one very long word
            continue
        made.append(Window(frame.row(ids[start:stop].tolist()), firsts[asked] - start + offset, asked))
    return made


def most_context(places: np.ndarray, spans: Sequence[tuple[int, int]]) -> np.ndarray:
    """Of each place the number of the window in which the nearer edge is farthest; of several the first.

    Windows are all as long and in order, so that is the one whose middle is nearest.
    """
    middles = np.array(spans).sum(1) - 1  # twice
    return np.searchsorted(middles[:-1] + middles[1:], 4 * places, side="left")
