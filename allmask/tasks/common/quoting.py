"""Quoting, a first exercise for a reader that shall write: the target of a text is one of its own sentences.

Titles are mostly made of their text's words, but a BERT has never carried a word from one place to another. Titles
teach that slowly, and few of them are soon known by heart. Any text teaches to quote, as often as one likes. What the
reader knows is not to be lost meanwhile: its lower layers should learn slowly (`layer_decay`).
"""

from __future__ import annotations

import math
import random
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import pairwise

from allmask.data import Record

_ENDS = re.compile(r"(?<=[.!?:;])\s+|(?<=[。！？；，])\s*|(?<=[.,!?:;])(?=[\u3400-\u9fff])|\n+")
_UNITS = re.compile(r"[\u3400-\u9fff]|[^\s\u3400-\u9fff]+")  # a Chinese character, or a word
LEAST = 3  # words or characters of a quotation
TELLING = 3  # one sentence in so many is among the telling ones
WORDS_A_TOKEN = 0.7  # English words in a token, so that a quotation stands in what is read of its text


def quotations(records: Iterable[Record], tokens: int, rng: random.Random) -> list[Record]:
    """Each record with a sentence from its source's first `tokens` tokens as target; one without any is left out.

    It is drawn from those that say most about their text, so that what to quote is learnt as well.
    """

    def choices(text: str) -> list[str]:
        return most_telling(sentences(text, tokens), text)

    found = ((record, choices(record.fields["source"])) for record in records)
    return [replace(record, fields={**record.fields, "target": rng.choice(some)}) for record, some in found if some]


def sentences(text: str, tokens: int) -> list[str]:
    """Sentences in the beginning of a text; Chinese ones also end at a comma, as a title is rarely longer."""
    parts = (part.strip() for part in _ENDS.split(_beginning(text, tokens)))
    return [part for part in parts if len(_UNITS.findall(part)) >= LEAST]


def most_telling(choices: Sequence[str], text: str) -> list[str]:
    """The third of a text's sentences that share most with the rest of it (as PEGASUS chooses, arXiv 1912.08777)."""
    whole = _pieces(text)
    ranked = sorted(choices, key=lambda sentence: _shared(_pieces(sentence), whole), reverse=True)
    return ranked[: math.ceil(len(ranked) / TELLING)]


def _pieces(text: str) -> Counter:
    """Words or characters, and pairs of neighbours."""
    units = _UNITS.findall(text)
    return Counter(units) + Counter(pairwise(units))


def _shared(sentence: Counter, whole: Counter) -> float:
    """F1 of the pieces of a sentence and those of the rest."""
    rest = whole - sentence
    return 2 * (sentence & rest).total() / max(1, sentence.total() + rest.total())


def _beginning(text: str, tokens: int) -> str:
    """About so many tokens of a text."""
    room, end = float(tokens), 0
    for unit in _UNITS.finditer(text):
        room -= 1.0 if len(unit[0]) == 1 else 1.0 / WORDS_A_TOKEN
        if room < 0.0:
            break
        end = unit.end()
    return text[:end]
