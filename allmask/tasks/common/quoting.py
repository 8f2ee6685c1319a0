"""Quoting: pretraining for a BERT that is to write; the target is a sentence of the source itself.

A title consists mostly of words of its text, but a BERT has never learnt to copy words. Titles teach it slowly, and few
titles are soon memorized; quotations can be made from any text, in any number. The lower layers should learn slowly
meanwhile (`layer_decay`), so that the model does not forget how to read.
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
LEAST = 3  # fewest words or characters of a quotation
TELLING = 3  # a third of the sentences may be quoted
WORDS_A_TOKEN = 0.7  # estimate for English, to quote only from the part of a text that the model reads


def quotations(records: Iterable[Record], tokens: int, rng: random.Random) -> list[Record]:
    """Return the records with a sentence from the first `tokens` tokens of the source as target.

    The sentence is drawn from the most representative ones, so the model also learns what to quote. Records without a
    sentence are left out.
    """
    made = []
    for record in records:
        source = record.fields["source"]
        choices = most_telling(sentences(source, tokens), source)
        if choices:
            made.append(replace(record, fields={**record.fields, "target": rng.choice(choices)}))
    return made


def sentences(text: str, tokens: int) -> list[str]:
    """Return the sentences in the first `tokens` tokens; Chinese ones also end at a comma, as titles are short."""
    parts = (part.strip() for part in _ENDS.split(_beginning(text, tokens)))
    return [part for part in parts if len(_UNITS.findall(part)) >= LEAST]


def most_telling(choices: Sequence[str], text: str) -> list[str]:
    """Return the third of the sentences with the most overlap with the rest of the text (PEGASUS, arXiv 1912.08777)."""
    whole = _pieces(text)
    ranked = sorted(choices, key=lambda sentence: _shared(_pieces(sentence), whole), reverse=True)
    return ranked[: math.ceil(len(ranked) / TELLING)]


def _pieces(text: str) -> Counter:
    """Count words (or Chinese characters) and pairs of neighbours."""
    units = _UNITS.findall(text)
    return Counter(units) + Counter(pairwise(units))


def _shared(sentence: Counter, whole: Counter) -> float:
    """Return the F1 of the pieces of a sentence and those of the rest of the text."""
    rest = whole - sentence
    return 2 * (sentence & rest).total() / max(1, sentence.total() + rest.total())


def _beginning(text: str, tokens: int) -> str:
    """Return about the first `tokens` tokens of a text."""
    room, end = float(tokens), 0
    for unit in _UNITS.finditer(text):
        room -= 1.0 if len(unit[0]) == 1 else 1.0 / WORDS_A_TOKEN
        if room < 0.0:
            break
        end = unit.end()
    return text[:end]
