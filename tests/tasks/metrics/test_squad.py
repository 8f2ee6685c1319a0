"""Exact match and F1 on cases worked by hand from the definitions of SQuAD's and CMRC's scorers."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from allmask.tasks.metrics.squad import AnswerCount, best_threshold, exact, f1, marks, units


@pytest.mark.parametrize(
    ("predicted", "true", "em", "score"),
    [
        ("The Denver Broncos!", "denver broncos", 1.0, 1.0),
        ("a dog and a cat", "the cat", 0.0, 0.5),  # dog and cat / cat: 2·1/(3+1)
        ("in 1990", "1990.", 0.0, 2 / 3),
        ("red red blue", "red red red", 0.0, 2 / 3),  # a word counts as often as it is in both
        ("theatre", "atre", 0.0, 0.0),
        ("", "", 1.0, 1.0),
        ("the", "a", 1.0, 1.0),
        ("x", "", 0.0, 0.0),
    ],
)
def test_squad(predicted: str, true: str, em: float, score: float):
    assert exact(predicted, true, chinese=False) == em and f1(predicted, true, chinese=False) == pytest.approx(score)


@pytest.mark.parametrize(
    ("predicted", "true", "em", "score"),
    [
        ("《战国无双3》", "战国无双3", 1.0, 1.0),
        ("北京市海淀区", "海淀", 0.0, 0.5),  # 2·2/(6+2)
        ("海北淀京", "海淀", 0.0, 1 / 3),  # the longest run in common has one character
        ("由Nexon开发", "NEXON", 0.0, 0.4),  # 由 nexon 开 发 against one word: 2·1/(4+1)
        ("1996年", "1996 年", 0.0, 1.0),
        ("上海", "北京", 0.0, 0.0),
    ],
)
def test_cmrc(predicted: str, true: str, em: float, score: float):
    assert exact(predicted, true, chinese=True) == em and f1(predicted, true, chinese=True) == pytest.approx(score)


def test_units():
    assert units("由Nexon-HK开发，2006年。") == ["由", "nexonhk", "开", "发", "2006", "年"]


def test_the_best_target_counts_and_without_targets_no_answer_is_right():
    assert marks("cat", ["dog", "the cat"], False) == (1.0, 1.0)
    assert marks("", [], False) == (1.0, 1.0) and marks("cat", [], False) == (0.0, 0.0)
    count = AnswerCount(chinese=False)
    for predicted, targets in (("cat", ["cat"]), ("", ["dog"]), ("", []), ("x", []), ("y", [])):
        count.add(predicted, targets)
    assert count.scores() == pytest.approx(
        {"exact": 40.0, "f1": 40.0, "answered_exact": 50.0, "answered_f1": 50.0, "unanswerable_exact": 100 / 3}
    )


QUESTIONS = st.lists(
    st.tuples(st.integers(-3, 3), st.sampled_from([0.0, 0.5, 1.0]), st.booleans()), min_size=1, max_size=7
)


@given(QUESTIONS)
def test_the_threshold_is_the_best_there_is(questions):
    null, right, answerable = ([row[place] for row in questions] for place in range(3))

    def value(threshold: float) -> float:
        gained = [(r if has else 0.0) if n <= threshold else float(not has) for n, r, has in questions]
        return sum(gained)

    found = best_threshold(null, right, answerable)
    assert value(found) == max(value(limit + 0.5) for limit in range(-5, 5))
