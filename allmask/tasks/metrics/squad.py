"""Metrics of answers: exact match and F1 as the scorers of SQuAD (1.1 and 2.0) and of CMRC 2018 define them.

SQuAD folds case, drops punctuation and articles, and counts words in common. CMRC folds case, drops punctuation, cuts
Chinese into characters and the rest into words, and counts the longest run in common.
"""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Iterator, Sequence
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
    """Of words in common; where one of the two is nothing, both must be."""
    said, right = _normal(answer).split(), _normal(target).split()
    if not said or not right:
        return float(said == right)
    return _harmonic((Counter(said) & Counter(right)).total(), len(said), len(right))


# ---- CMRC ------------------------------------------------------------------------------------------------------


def _plain(text: str) -> str:
    return "".join(letter for letter in text.lower().strip() if letter not in _CMRC_SIGNS)


def units(text: str) -> list[str]:
    """Chinese by character, anything else by word."""
    return list(_cut(_plain(text)))


def _cut(text: str) -> Iterator[str]:
    word = ""
    for letter in text:
        if "\u4e00" <= letter <= "\u9fa5":
            yield from _words(word)
            yield letter
            word = ""
        else:
            word += letter
    yield from _words(word)


def _words(text: str) -> list[str]:
    return re.findall(r"\w+|[^\w\s]", text)


def _cmrc_f1(answer: str, target: str) -> float:
    said, right = units(answer), units(target)
    return _harmonic(_longest_run(said, right), len(said), len(right))


def _longest_run(a: Sequence[str], b: Sequence[str]) -> int:
    """How long the longest piece is that stands in both without a gap."""
    best, row = 0, [0] * (len(b) + 1)
    for one in a:
        row = [0, *(row[place] + 1 if one == other else 0 for place, other in enumerate(b))]
        best = max(best, *row)
    return best


def _harmonic(common: int, said: int, right: int) -> float:
    return 2.0 * common / (said + right) if common else 0.0


# ---- many ------------------------------------------------------------------------------------------------------


@dataclass
class AnswerCount:
    """Sums over questions, from which scores in per cent are made; of several targets the nearest counts."""

    chinese: bool
    sums: dict[bool, list[float]] = field(default_factory=lambda: {True: [0.0, 0.0], False: [0.0, 0.0]})
    seen: Counter[bool] = field(default_factory=Counter)

    def add(self, answer: str, targets: Sequence[str]) -> tuple[float, float]:
        """Take a question in; where there are no targets, "no answer" is right."""
        pair = marks(answer, targets, self.chinese)
        self.seen[bool(targets)] += 1
        for place, value in enumerate(pair):
            self.sums[bool(targets)][place] += value
        return pair

    def scores(self) -> dict[str, float]:
        """Over all questions and, where some have no answer, over both sorts separately."""
        total = max(self.seen.total(), 1)
        scores = {
            name: 100.0 * (self.sums[True][place] + self.sums[False][place]) / total
            for place, name in enumerate(("exact", "f1"))
        }
        if self.seen[False]:
            for name, sort in (("answered", True), ("unanswerable", False)):
                for place, metric in enumerate(("exact", "f1") if sort else ("exact",)):
                    scores[f"{name}_{metric}"] = 100.0 * self.sums[sort][place] / max(self.seen[sort], 1)
        return scores


def marks(answer: str, targets: Sequence[str], chinese: bool) -> tuple[float, float]:
    """Exact match and F1 against the nearest of the targets."""
    if not targets:
        return float(not answer), float(not answer)
    exacts, f1s = ([metric(answer, target, chinese) for target in targets] for metric in (exact, f1))
    return max(exacts), max(f1s)


def best_threshold(null: Sequence[float], right: Sequence[float], answerable: Sequence[bool]) -> float:
    """The threshold with the best mean F1: predict "no answer" if it beats the best span by more (SQuAD 2.0's search).

    `null` is by how much "no answer" beats the best span, `right` the F1 of that span.
    """
    order = sorted(range(len(null)), key=lambda number: null[number])
    value = float(sum(not has for has in answerable))  # "no answer" for all
    best, threshold = value, (null[order[0]] - 1.0 if order else 0.0)
    for place, number in enumerate(order):
        value += right[number] if answerable[number] else -1.0
        after = null[order[place + 1]] if place + 1 < len(order) else null[number] + 2.0
        if value > best and after > null[number]:  # equal ones are on the same side
            best, threshold = value, (null[number] + after) / 2.0
    return threshold
