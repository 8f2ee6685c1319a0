"""Scores of generated text: ROUGE (rouge-score), BLEU and chrF (sacrebleu), exact matches, length.

Chinese is counted by character.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import numpy as np

from allmask.text.script import CHINESE, is_chinese

_ONE = re.compile(f"[{CHINESE}]|[^{CHINESE}\\W_]+")  # a Chinese character, or a word of anything else


class Characters:
    """A tokenizer for rouge-score, whose own keeps only a-z: Chinese by character, everything else by word."""

    def tokenize(self, text: str) -> list[str]:
        return _ONE.findall(text.lower())


LABELS = {"rouge_1": "rouge1", "rouge_2": "rouge2", "rouge_l": "rougeL"}  # our names, and those of rouge-score


def rouge(written: Sequence[str], references: Sequence[str], chinese: bool) -> dict[str, float]:
    """Return the mean F1 of ROUGE-1, -2 and -L, in per cent; English words are stemmed, as is usual."""
    return mean_rouge(rouge_of_each(written, references, chinese))


def mean_rouge(each: Sequence[dict[str, float]]) -> dict[str, float]:
    totals = dict.fromkeys(LABELS, 0.0)
    for scores in each:
        for name in LABELS:
            totals[name] += scores[name]
    return {name: 100 * totals[name] / max(1, len(each)) for name in LABELS}


def rouge_of_each(written: Sequence[str], references: Sequence[str], chinese: bool) -> list[dict[str, float]]:
    """Return ROUGE of each text, from 0 to 1."""
    from rouge_score.rouge_scorer import RougeScorer

    names = list(LABELS.values())
    scorer = RougeScorer(names, tokenizer=Characters()) if chinese else RougeScorer(names, use_stemmer=True)
    found = [scorer.score(reference, text) for text, reference in zip(written, references, strict=True)]
    return [{name: scores[label].fmeasure for name, label in LABELS.items()} for scores in found]


def score_texts(written: Sequence[str], references: Sequence[str]) -> dict[str, float]:
    """Return ROUGE, BLEU, exact matches and mean lengths; case is ignored."""
    chinese = is_chinese(references)
    bleu = _metrics(chinese, lowercase=True)["bleu"].corpus_score(list(written), [list(references)]).score
    scores = {**rouge(written, references, chinese), "bleu": bleu}
    lower = [text.lower() for text in written], [text.lower() for text in references]
    return {**scores, **_exact_and_lengths(*lower, chinese)}


def score_translations(written: Sequence[str], references: Sequence[str]) -> dict[str, float]:
    """Return BLEU and chrF as sacrebleu counts them (see `signatures`), exact matches and mean lengths; with case."""
    chinese = is_chinese(references)
    metrics = _metrics(chinese).items()
    scores = {name: metric.corpus_score(list(written), [list(references)]).score for name, metric in metrics}
    return {**scores, **_exact_and_lengths(written, references, chinese)}


def _exact_and_lengths(written: Sequence[str], references: Sequence[str], chinese: bool) -> dict[str, float]:
    same = sum(text.strip() == reference.strip() for text, reference in zip(written, references, strict=True))
    count = Characters().tokenize if chinese else str.split
    lengths = [sum(len(count(text)) for text in texts) / max(1, len(texts)) for texts in (written, references)]
    return {"exact": 100 * same / max(1, len(written)), "length": lengths[0], "reference_length": lengths[1]}


def bleu_stderr(written: Sequence[str], references: Sequence[str]) -> float | None:
    """Return the standard error of the corpus BLEU, leaving out one text at a time (jackknife); None if it is 0."""
    metric = _metrics(is_chinese(references))["bleu"]
    each = [metric.corpus_score([text], [[other]]) for text, other in zip(written, references, strict=True)]
    rows = np.array([[*one.counts, *one.totals, one.sys_len, one.ref_len] for one in each]).reshape(len(each), -1)
    left = [row.tolist() for row in rows.sum(0) - rows]
    scores = [metric.compute_bleu(row[:4], row[4:8], row[8], row[9], smooth_method="exp").score for row in left]
    if len(scores) < 2 or not any(scores):
        return None
    return float(np.std(scores) * (len(scores) - 1) ** 0.5)


def signatures(references: Sequence[str]) -> dict[str, str]:
    """Return sacrebleu's signatures of BLEU and chrF, which say how they are counted."""
    made = {}
    for name, metric in _metrics(is_chinese(references)).items():
        metric.corpus_score([""], [list(references[:1])])  # the signature needs the number of references
        made[name] = str(metric.get_signature())
    return made


def _metrics(chinese: bool, lowercase: bool = False) -> dict[str, Any]:
    from sacrebleu.metrics.bleu import BLEU
    from sacrebleu.metrics.chrf import CHRF

    return {"bleu": BLEU(tokenize="zh" if chinese else "13a", lowercase=lowercase), "chrf": CHRF(lowercase=lowercase)}


def lead_sentence(text: str) -> str:
    """Return the first sentence, the baseline for titles; the salutation of a letter is none."""
    text = re.sub(r"^[^\n]{1,40}[,，:：][ \t\r]*\n\s*(?=\S)", "", text.strip())
    found = re.match(r".+?(?:[。！？!?]|\.(?=\s|$|[\u3400-\u9fff])|\n|$)", text, re.DOTALL)
    return found[0].strip() if found else text
