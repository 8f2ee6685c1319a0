"""Scores for written text: ROUGE (rouge-score), BLEU (sacrebleu), exact matches, length.

Upper and lower case are the same; Chinese counts by the character.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import numpy as np

CHINESE = "\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0003ffff"
_ONE = re.compile(f"[{CHINESE}]|[^{CHINESE}\\W_]+")  # a Chinese character, or a word of anything else


def is_chinese(texts: Sequence[str]) -> bool:
    """Whether most letters of these texts are Chinese characters."""
    joined = "".join(texts[:1000])
    chinese = len(re.findall(f"[{CHINESE}]", joined))
    return chinese > 0.3 * max(1, sum(character.isalpha() for character in joined))


class Characters:
    """A tokenizer for rouge-score: Chinese by the character, everything else by the word; it keeps only a-z itself."""

    def tokenize(self, text: str) -> list[str]:
        return _ONE.findall(text.lower())


def rouge(written: Sequence[str], references: Sequence[str], chinese: bool) -> dict[str, float]:
    """Mean F1 of ROUGE-1, -2 and -L, in percent; English words are stemmed as is usual."""
    return mean_rouge(rouge_of_each(written, references, chinese))


def mean_rouge(each: Sequence[dict[str, float]]) -> dict[str, float]:
    totals = dict.fromkeys(LABELS, 0.0)
    for scores in each:
        for name in LABELS:
            totals[name] += scores[name]
    return {name: 100 * totals[name] / max(1, len(each)) for name in LABELS}


LABELS = {"rouge_1": "rouge1", "rouge_2": "rouge2", "rouge_l": "rougeL"}  # and what rouge-score calls them


def rouge_of_each(written: Sequence[str], references: Sequence[str], chinese: bool) -> list[dict[str, float]]:
    """The same of each text, from 0 to 1."""
    from rouge_score.rouge_scorer import RougeScorer

    names = list(LABELS.values())
    scorer = RougeScorer(names, tokenizer=Characters()) if chinese else RougeScorer(names, use_stemmer=True)
    pairs = zip(written, references, strict=True)
    found = [scorer.score(theirs, mine) for mine, theirs in pairs]
    return [{name: scores[theirs].fmeasure for name, theirs in LABELS.items()} for scores in found]


def bleu(written: Sequence[str], references: Sequence[str], chinese: bool) -> float:
    from sacrebleu.metrics.bleu import BLEU

    metric = BLEU(tokenize="zh" if chinese else "13a", lowercase=True)  # as ROUGE counts, too
    return metric.corpus_score(list(written), [list(references)]).score


def score_texts(written: Sequence[str], references: Sequence[str]) -> dict[str, float]:
    """ROUGE, BLEU, exact matches and mean lengths."""
    chinese = is_chinese(references)
    same = sum(mine.strip().lower() == theirs.strip().lower() for mine, theirs in zip(written, references, strict=True))
    return {
        **rouge(written, references, chinese),
        "bleu": bleu(written, references, chinese),
        "exact": 100 * same / max(1, len(written)),
        "length": _mean_length(written, chinese),
        "reference_length": _mean_length(references, chinese),
    }


def score_translations(written: Sequence[str], references: Sequence[str]) -> dict[str, float]:
    """BLEU and chrF as sacrebleu counts them, case-sensitive; see `signatures`."""
    chinese = is_chinese(references)
    same = sum(mine.strip() == theirs.strip() for mine, theirs in zip(written, references, strict=True))
    found = {
        name: metric.corpus_score(list(written), [list(references)]).score for name, metric in _metrics(chinese).items()
    }
    lengths = {"length": _mean_length(written, chinese), "reference_length": _mean_length(references, chinese)}
    return {**found, "exact": 100 * same / max(1, len(written)), **lengths}


def bleu_stderr(written: Sequence[str], references: Sequence[str]) -> float | None:
    """The standard error of a corpus's BLEU, by leaving out a text at a time (jackknife); None if BLEU is always 0."""
    metric = _metrics(is_chinese(references))["bleu"]
    pairs = zip(written, references, strict=True)
    each = [metric.corpus_score([mine], [[theirs]]) for mine, theirs in pairs]
    rows = np.array([[*one.counts, *one.totals, one.sys_len, one.ref_len] for one in each]).reshape(len(each), -1)
    left = [row.tolist() for row in rows.sum(0) - rows]
    scores = [metric.compute_bleu(row[:4], row[4:8], row[8], row[9], smooth_method="exp").score for row in left]
    if len(scores) < 2 or not any(scores):
        return None
    return float(np.std(scores) * (len(scores) - 1) ** 0.5)


def signatures(references: Sequence[str]) -> dict[str, str]:
    """How these scores were counted, in sacrebleu's words."""
    made = {}
    for name, metric in _metrics(is_chinese(references)).items():
        metric.corpus_score([""], [list(references[:1])])  # it knows how many references there are once it has counted
        made[name] = str(metric.get_signature())
    return made


def _metrics(chinese: bool) -> dict[str, Any]:
    from sacrebleu.metrics.bleu import BLEU
    from sacrebleu.metrics.chrf import CHRF

    return {"bleu": BLEU(tokenize="zh" if chinese else "13a"), "chrf": CHRF()}


def _mean_length(texts: Sequence[str], chinese: bool) -> float:
    count = Characters().tokenize if chinese else str.split
    return sum(len(count(text)) for text in texts) / max(1, len(texts))


def lead_sentence(text: str) -> str:
    """The first sentence: what a title must beat."""
    found = re.match(r".+?(?:[。！？!?]|\.(?=\s|$|[\u3400-\u9fff])|\n|$)", text.strip(), re.DOTALL)
    return found[0].strip() if found else text.strip()
