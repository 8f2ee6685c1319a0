"""Scores against hand-worked values and plain implementations."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from allmask.tasks.metrics.text import Characters, lead_sentence, rouge, score_texts
from allmask.text.script import is_chinese


def f1(hits: int, written: int, reference: int) -> float:
    return 200 * hits / (written + reference) if hits else 0.0


def plain_rouge(written: str, reference: str) -> dict[str, float]:
    """By the definition: shared n-grams, and the longest common subsequence by its recursion."""
    found = {}
    for n, name in ((1, "rouge_1"), (2, "rouge_2")):
        grams = [Counter(text[i : i + n] for i in range(len(text) - n + 1)) for text in (written, reference)]
        found[name] = f1((grams[0] & grams[1]).total(), grams[0].total(), grams[1].total())
    table = [[0] * (len(reference) + 1) for _ in range(len(written) + 1)]
    for i, a in enumerate(written):
        for j, b in enumerate(reference):
            table[i + 1][j + 1] = table[i][j] + 1 if a == b else max(table[i][j + 1], table[i + 1][j])
    return {**found, "rouge_l": f1(table[-1][-1], len(written), len(reference))}


@given(st.text("白切鸡北京", min_size=1, max_size=12), st.text("白切鸡北京", min_size=1, max_size=12))
def test_chinese_rouge_counts_characters(written: str, reference: str):
    assert rouge([written], [reference], chinese=True) == pytest.approx(plain_rouge(written, reference))


def test_english_rouge_by_hand():
    found = rouge(["the cats sat"], ["a cat sat down"], chinese=False)  # cats and cat have one stem
    assert found == pytest.approx({"rouge_1": f1(2, 3, 4), "rouge_2": f1(1, 2, 3), "rouge_l": f1(2, 3, 4)})


def test_the_mean_over_texts():
    both = rouge(["白切鸡", "北京"], ["白切鸡", "你好"], chinese=True)
    assert both == pytest.approx({"rouge_1": 50, "rouge_2": 50, "rouge_l": 50})


def test_all_scores_of_equal_texts():
    text = "a small cat sat on the mat"
    assert score_texts([text], [text]) == pytest.approx(
        {"rouge_1": 100, "rouge_2": 100, "rouge_l": 100, "bleu": 100, "exact": 100, "length": 7, "reference_length": 7}
    )


def test_exact_and_length():
    found = score_texts(["red cat ", "dog"], ["red cat", "a dog"])
    assert (found["exact"], found["length"], found["reference_length"]) == (50, 1.5, 2)
    chinese = score_texts(["白切鸡"], ["白切鸡和BERT"])
    assert (chinese["length"], chinese["reference_length"]) == (3, 5)  # BERT is one


def test_bleu_of_chinese_is_by_characters():
    """One of five characters wrong: precisions 4/5, 3/4, 2/3 and 1/2, no brevity penalty."""
    found = score_texts(["北京欢迎他"], ["北京欢迎你"])
    assert found["bleu"] == pytest.approx(100 * (4 / 5 * 3 / 4 * 2 / 3 * 1 / 2) ** 0.25)


def test_nothing_written():
    found = score_texts([""], ["red cat"])
    assert found["rouge_l"] == found["bleu"] == found["length"] == 0


def test_words_and_characters():
    assert Characters().tokenize("用BERT-base写诗，v2!") == ["用", "bert", "base", "写", "诗", "v2"]


@pytest.mark.parametrize(
    ("texts", "expected"),
    [
        (["北京欢迎你"], True),
        (["Beijing"], False),
        (["用 BERT 写标题的方法"], True),
        (["The word 鸡 in English"], False),
        ([], False),
    ],
)
def test_which_language(texts: list[str], expected: bool):
    assert is_chinese(texts) is expected


@pytest.mark.parametrize(
    ("text", "lead"),
    [
        ("One here. Two there.", "One here."),
        ("It costs 3.5 euros! Cheap.", "It costs 3.5 euros!"),
        ("北京欢迎你。白切鸡。", "北京欢迎你。"),
        ("no end at all", "no end at all"),
        ("  a line\nanother", "a line"),
        ("", ""),
        ("本文用 v2.1 建模.结果更好.", "本文用 v2.1 建模."),
        ("Dear Ms. Li,\n\nthe room is free. See you there.", "the room is free."),
        ("王老师：\n会议改到周三。谢谢！", "会议改到周三。"),
        ("Masks, roles,\n", "Masks, roles,"),
    ],
)
def test_the_lead_sentence(text: str, lead: str):
    assert lead_sentence(text) == lead
