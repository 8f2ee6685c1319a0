"""Metrics of answers: exact match and F1 as the scorers of SQuAD (1.1 and 2.0) and of CMRC 2018 define them.

SQuAD folds case, drops punctuation and articles, and counts common words. CMRC folds case, drops punctuation, splits
Chinese into characters and the rest into words, and counts the longest common run.
"""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_CMRC_SIGNS = frozenset("-:_*^/\\~`+=，。：？！“”；’《》·、「」（）－～『』")


def exact(answer: str, target: str, chinese: bool) -> float:
    return float(_plain(answer) == _plain(target)) if chinese else float(_normal(answer) == _normal(target))


def f1(answer: str, target: str, chinese: bool) -> float:
    return _cmrc_f1(answer, target) if chinese else _squad_f1(answer, target)


# ---- SQuAD -----------------------------------------------------------------------------------------------------


def _normal(text: str) -> str:
    kept = "".join(letter for letter in text.lower() if letter not in string.punctuation)
    return " ".join(_ARTICLES.sub(" ", kept).split())


def _squad_f1(answer: str, target: str) -> float:
    """Return the F1 of common words; if one of the two has no words, both must have none."""
    predicted, true = _normal(answer).split(), _normal(target).split()
    if not predicted or not true:
        return float(predicted == true)
    return 2.0 * (Counter(predicted) & Counter(true)).total() / (len(predicted) + len(true))


# ---- CMRC ------------------------------------------------------------------------------------------------------


def _plain(text: str) -> str:
    return "".join(letter for letter in text.lower().strip() if letter not in _CMRC_SIGNS)


def units(text: str) -> list[str]:
    """Split into Chinese characters, and anything else into words and signs."""
    return re.findall(r"[\u4e00-\u9fa5]|[^\W\u4e00-\u9fa5]+|[^\w\s]", _plain(text))


def _cmrc_f1(answer: str, target: str) -> float:
    """Return the F1 of the longest common run of units."""
    predicted, true = units(answer), units(target)
    longest, row = 0, [0] * (len(true) + 1)
    for one in predicted:
        row = [0, *(row[place] + 1 if one == other else 0 for place, other in enumerate(true))]
        longest = max(longest, *row)
    return 2.0 * longest / (len(predicted) + len(true)) if longest else 0.0


# ---- sums ------------------------------------------------------------------------------------------------------


@dataclass
class AnswerCount:
    """Sums over questions, from which scores in per cent are computed; the best of several targets counts."""

    chinese: bool
    sums: dict[bool, list[float]] = field(default_factory=lambda: {True: [0.0, 0.0], False: [0.0, 0.0]})  # answerable?
    seen: Counter[bool] = field(default_factory=Counter)

    def add(self, answer: str, targets: Sequence[str]) -> tuple[float, float]:
        """Count a question and return its exact match and F1; without targets, "no answer" is right."""
        pair = marks(answer, targets, self.chinese)
        self.seen[bool(targets)] += 1
        for place, value in enumerate(pair):
            self.sums[bool(targets)][place] += value
        return pair

    def scores(self) -> dict[str, float]:
        """Return scores over all questions and, if some have no answer, over both kinds separately."""
        total = max(self.seen.total(), 1)
        scores = {
            name: 100.0 * (self.sums[True][place] + self.sums[False][place]) / total
            for place, name in enumerate(("exact", "f1"))
        }
        if self.seen[False]:
            parts = {"answered_exact": (True, 0), "answered_f1": (True, 1), "unanswerable_exact": (False, 0)}
            for name, (has, place) in parts.items():
                scores[name] = 100.0 * self.sums[has][place] / max(self.seen[has], 1)
        return scores


def marks(answer: str, targets: Sequence[str], chinese: bool) -> tuple[float, float]:
    """Return exact match and F1 against the best of the targets."""
    if not targets:
        return float(not answer), float(not answer)
    exacts, f1s = ([metric(answer, target, chinese) for target in targets] for metric in (exact, f1))
    return max(exacts), max(f1s)


def best_threshold(null: Sequence[float], right: Sequence[float], answerable: Sequence[bool]) -> float:
    """Return the threshold with the best mean F1 (SQuAD 2.0): predict "no answer" if its margin is above it.

    `null` is the margin by which "no answer" beats the best span, `right` the F1 of that span.
    """
    order = sorted(range(len(null)), key=lambda number: null[number])
    value = float(sum(not has for has in answerable))  # the sum of F1 if all are predicted as "no answer"
    best, threshold = value, (null[order[0]] - 1.0 if order else 0.0)
    for place, number in enumerate(order):
        value += right[number] if answerable[number] else -1.0
        after = null[order[place + 1]] if place + 1 < len(order) else null[number] + 2.0
        if value > best and after > null[number]:  # equal margins are on the same side
            best, threshold = value, (null[number] + after) / 2.0
    return threshold
