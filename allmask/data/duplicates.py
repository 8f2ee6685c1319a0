"""Texts that occur twice: equal, or nearly equal (bottom-k sketches of character 5-grams; Broder 1997)."""

from __future__ import annotations

import re
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

SHINGLE = 5  # characters
SKETCH = 24  # hashes of a text that are compared first
COMMON = 200  # a hash that more texts share says nothing, such as one of a signature
NEAR = 0.8  # share of 5-grams that two nearly equal texts have in common (Jaccard)
_NOT_LETTERS = re.compile(r"[\W_]+")


class Twin(NamedTuple):
    """A text of one list that is in another one."""

    number: int
    other: int  # in the other list
    alike: float  # 1.0: equal but for capitals, white space and punctuation


def plain(text: str) -> str:
    """Return a text without capitals, white space and punctuation."""
    return _NOT_LETTERS.sub("", unicodedata.normalize("NFKC", text).casefold()) or text.strip()


def twins(texts: Sequence[str], others: Sequence[str], near: float = NEAR) -> list[Twin]:
    """Return the texts that are also among `others`, each with the one that is most like it."""
    texts, others = [plain(text) for text in texts], [plain(text) for text in others]
    equal = {text: number for number, text in reversed(list(enumerate(others)))}
    posted: dict[int, list[int]] = defaultdict(list)
    for number, text in enumerate(others):
        for value in _shingles(text)[:SKETCH].tolist():
            posted[value].append(number)
    found = []
    for number, text in enumerate(texts):
        if text in equal:
            found.append(Twin(number, equal[text], 1.0))
            continue
        mine = _shingles(text)
        shared = [posted[value] for value in mine[:SKETCH].tolist() if 0 < len(posted.get(value, ())) <= COMMON]
        counts = Counter(other for numbers in shared for other in numbers)
        likeliest = [other for other, count in counts.most_common(5) if 2 * count >= min(SKETCH, len(mine)) * near]
        best = max(((_jaccard(mine, _shingles(others[other])), other) for other in likeliest), default=(0.0, -1))
        if best[0] >= near:
            found.append(Twin(number, best[1], round(best[0], 3)))
    return found


def _shingles(text: str) -> np.ndarray:
    """Return the different hashes of all 5-grams of a text, sorted; none for a shorter text."""
    codes = np.frombuffer(text.encode("utf-32-le", "replace"), dtype="<u4").astype(np.uint64)
    if len(codes) < SHINGLE:
        return codes[:0]
    hashes = np.zeros(len(codes) - SHINGLE + 1, dtype=np.uint64)
    for place in range(SHINGLE):  # modulo 2 ** 64
        hashes = hashes * np.uint64(0x100000001B3) + codes[place : len(codes) - SHINGLE + 1 + place]
    hashes = (hashes ^ (hashes >> np.uint64(29))) * np.uint64(0xBF58476D1CE4E5B9)
    return np.unique(hashes ^ (hashes >> np.uint64(32)))


def _jaccard(one: np.ndarray, other: np.ndarray) -> float:
    both = len(np.intersect1d(one, other, assume_unique=True))
    return both / (len(one) + len(other) - both)
