"""The two-sample test: silent without a shift as often as it promises, awake with one, and beside classical tests."""

from __future__ import annotations

import random
from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from sklearn.linear_model import LogisticRegression

from allmask.drift import Reservoir, Settings, binomial_tail, compare_numbers, compare_texts, min_records
from allmask.drift.features import (
    count_grams,
    grams,
    ngram_features,
    normal_scores,
    number_features,
    vector_features,
)
from allmask.drift.two_sample import balance, fit, permutation_test
from allmask.errors import DataError, UsageError

WORDS = [f"w{number}" for number in range(60)]


def sentences(count: int, seed: int, extra: str = "", share: float = 0.0) -> list[str]:
    rng = random.Random(seed)
    made = [" ".join(rng.choices(WORDS, k=8)) for _ in range(count)]
    return [f"{line} {extra}" if rng.random() < share else line for line in made]


# ---- the parts -------------------------------------------------------------------------------------------------


def test_logistic_regression_is_scikit_learns():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(80, 5))
    y = (x @ rng.normal(size=(5, 3)) + rng.normal(size=(80, 3)) > 0).astype(float)
    ours = fit(torch.from_numpy(x), torch.from_numpy(y), penalty=2.0, steps=2000, tolerance=1e-10)
    for column in range(3):
        model = LogisticRegression(C=1 / 2.0, fit_intercept=False, tol=1e-10, max_iter=1000).fit(x, y[:, column])
        np.testing.assert_allclose(ours[:, column], model.coef_[0], atol=1e-5)


@given(st.integers(1, 300), st.data())
def test_binomial_tail_is_scipys(trials: int, data: st.DataObject):
    right = data.draw(st.integers(0, trials))
    assert binomial_tail(right, trials) == pytest.approx(stats.binom.sf(right - 1, trials, 0.5), rel=1e-9)


def test_min_records_is_the_least_that_can_reach_alpha():
    for alpha in (0.5, 0.05, 0.01, 0.001):
        tested = min_records(alpha)  # half of two files' records
        assert 0.5**tested <= alpha < 0.5 ** (tested - 2)
    assert min_records(0.05) == 6


def test_normal_scores_are_scipys_ranks():
    column = np.array([3.0, 1.0, 3.0, 10.0, -2.0, 3.0])
    expected = stats.norm.ppf((stats.rankdata(column) - 0.5) / 6)
    np.testing.assert_allclose(normal_scores(torch.from_numpy(column)[:, None])[:, 0], expected, atol=1e-12)


def test_grams_of_words_and_characters():
    assert list(grams("我爱 BERT!")) == ["我", "爱", "BERT", "!", "我爱", "爱 BERT", "BERT !"]


def test_a_reservoir_keeps_each_as_often():
    counts = Counter(item for seed in range(400) for item in Reservoir[int](5, str(seed))(range(20)))
    assert stats.chisquare([counts[item] for item in range(20)]).pvalue > 1e-3
    draw = Reservoir[int](50, "a")
    assert draw(range(20)) == list(range(20)) and draw.seen == 20


@settings(max_examples=40)
@given(st.lists(st.integers(0, 12), min_size=1, max_size=40), st.lists(st.integers(0, 12), min_size=1, max_size=40))
def test_no_text_is_in_both_halves(first: list[int], second: list[int]):
    rng = torch.Generator().manual_seed(0)
    records = balance(first, second, True, rng)
    keys = [(first, second)[side][number] for side, number in zip(records.side, records.number, strict=True)]
    assert int((records.side == 0).sum()) == int((records.side == 1).sum()) == records.each
    assert max(Counter(zip(keys, records.side.tolist(), strict=True)).values(), default=1) == 1  # once a file
    is_train = records.halves(rng).tolist()
    assert not {key for key, one in zip(keys, is_train, strict=True) if one} & {
        key for key, one in zip(keys, is_train, strict=True) if not one
    }
    fold = records.folds(3, rng).tolist()
    assert len(set(zip(keys, fold, strict=True))) == len(set(keys))
    labels = records.permuted(4, rng)
    assert (labels.sum(0) == records.each).all() and (labels[records.shared] == labels[records.shared][:, :1]).all()
    assert [key in second and key in first for key in keys].count(True) >= int(records.shared.sum())


# ---- calibration -----------------------------------------------------------------------------------------------


def alarms(draw, repetitions: int = 200) -> int:
    return sum(draw(seed).shifted for seed in range(repetitions))


def bounds(alpha: float, repetitions: int = 200) -> int:
    """More false alarms than this happen to a test that keeps its promise once in a thousand times."""
    return int(stats.binom.ppf(0.999, repetitions, alpha))


@pytest.mark.parametrize("columns", [1, 12])
def test_false_alarms_of_numbers(columns: int):
    def draw(seed: int):
        rng = np.random.default_rng(seed)
        tables = rng.standard_t(3, size=(2, 60, columns))
        return compare_numbers(*tables, settings=Settings(seed=seed))

    level = stats.binom.sf(stats.binom.isf(0.05, 60, 0.5), 60, 0.5)  # what 60 tosses can attain of 0.05
    low = int(stats.binom.ppf(0.0005, 200, level / 2))
    assert low <= alarms(draw) <= bounds(0.05)


def test_false_alarms_of_texts_that_repeat():
    """Each line thrice, some lines in both files, one file longer: counted as they come, these would raise alarms."""

    def draw(seed: int):
        pool = [*sentences(100, seed + 1000), *WORDS[:20] * 2]
        random.Random(seed).shuffle(pool)
        return compare_texts(pool[:70] * 3, pool[70:] * 3, settings=Settings(seed=seed))

    assert alarms(draw, 100) <= bounds(0.05, 100)


def test_false_alarms_of_relabelling():
    def draw(seed: int):
        rng = np.random.default_rng(seed)
        how = Settings(seed=seed, test="permutation", permutations=19)
        return compare_numbers(*rng.normal(size=(2, 30, 4)), settings=how)

    assert 1 <= alarms(draw) <= bounds(0.05)


def test_relabelling_counts_the_true_labelling_among_the_rest():
    rng = torch.Generator().manual_seed(0)
    x = torch.cat([torch.full((20, 1), -1.0), torch.full((20, 1), 1.0)]).double()
    decision = permutation_test(x, balance(range(20), range(20), False, rng), rng, 199, 5)
    assert decision.p == 1 / 200 and decision.right == decision.trials == 40 and decision.accuracy == 1.0


# ---- power, beside classical tests -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shift", "scale", "differs"), [(0.0, 1.0, False), (0.8, 1.0, True), (0.0, 2.5, True), (3.0, 1.0, True)]
)
def test_one_column_beside_classical_tests(shift: float, scale: float, differs: bool):
    rng = np.random.default_rng(7)
    first, second = rng.normal(size=400), rng.normal(size=400) * scale + shift
    verdict = compare_numbers(first, second, names=["size"])
    assert verdict.shifted is differs
    assert (stats.ks_2samp(first, second).pvalue <= 0.05) == differs
    if scale == 1.0:  # the rank sum sees levels only
        assert (stats.mannwhitneyu(first, second).pvalue <= 0.05) == differs
    if differs:
        best = next(one for one in verdict.differences if one.more_in == 1)
        assert best.name == ("size" if scale == 1.0 else "size (spread)")
        assert best.second > best.first


def test_power_grows_with_the_shift():
    def found(shift: float) -> int:
        rng = np.random.default_rng(3)
        tables = [rng.normal(size=(2, 100, 3)) for _ in range(25)]
        return sum(compare_numbers(first, second + shift).shifted for first, second in tables)

    curve = [found(shift) for shift in (0.0, 0.3, 1.0)]
    assert curve[0] <= 5 < curve[1] < curve[2] == 25


def test_a_correlation_that_no_column_alone_shows():
    rng = np.random.default_rng(0)
    first = rng.normal(size=(400, 2))
    second = rng.multivariate_normal([0, 0], [[1, 0.8], [0.8, 1]], size=400)
    verdict = compare_numbers(first, second, names=["age", "income"])
    best = next(one for one in verdict.differences if one.more_in == 1)
    assert verdict.shifted and (best.name, best.measure) == ("age × income", "correlation")
    assert abs(best.first) < 0.15 and best.second == pytest.approx(0.8, abs=0.1)


@pytest.mark.parametrize("test", ["binomial", "permutation"])
@pytest.mark.parametrize("word", ["refund", "退款"])
def test_the_word_that_gives_it_away(test: str, word: str):
    first, second = sentences(200, 1), sentences(200, 2, word, 0.6)
    verdict = compare_texts(first, second, settings=Settings(test=test, permutations=99))
    assert verdict.shifted and verdict.accuracy > 0.65
    shown = {one.name: one for one in verdict.differences if one.more_in == 1}
    assert word in shown and shown[word].first == 0 and shown[word].second == pytest.approx(0.6, abs=0.1)
    of_second = [one for one in verdict.examples if one.side == 1]
    assert of_second and all(word in one.text and second[one.number] == one.text for one in of_second)


def test_vectors_instead_of_words():
    def represent(texts: list[str]) -> np.ndarray:
        return np.array([[len(text), text.count("z"), 1.0] for text in texts])

    first, second = sentences(100, 1), sentences(100, 2, "zz", 0.9)
    verdict = compare_texts(first, second, represent)
    assert verdict.shifted and verdict.differences[-1].name and verdict.differences[-1].weight is None
    assert any(one.name == "zz" and one.more_in == 1 for one in verdict.differences)
    assert not compare_texts(first, sentences(100, 3), represent).shifted


def test_the_same_file_twice_is_the_same():
    texts = sentences(50, 0)
    verdict = compare_texts(texts, texts)
    assert (verdict.p, verdict.accuracy, verdict.trials, verdict.shared) == (1.0, 0.5, 0, 50)
    table = np.random.default_rng(0).normal(size=(50, 30))
    assert not compare_numbers(table, table).shifted


def test_too_few_texts_of_ones_own_are_no_verdict():
    """Nothing could have been found, whatever the difference: that is not "no shift"."""
    both = sentences(300, 0)
    first, second = [*both, "this", "that"], [*both, "these", "those"]
    for test in ("binomial", "permutation"):
        with pytest.raises(DataError, match="300 texts are in both, and 2 others of each are too few"):
            compare_texts(first, second, settings=Settings(test=test))
    with pytest.raises(DataError, match="0 others of each"):
        compare_texts(both, both + both[:50])
    compare_texts([*both, *sentences(6, 1)], [*both, *sentences(6, 2)])


@pytest.mark.parametrize("kind", ["numbers", "vectors", "ngrams"])
def test_what_is_seen_of_a_guessed_record_depends_on_it_and_the_teachers(kind: str):
    """Else guesses would depend on each other, and the binomial test would not be exact."""
    rng = torch.Generator().manual_seed(0)
    table, is_train = torch.randn(40, 3, generator=rng, dtype=torch.float64), torch.arange(40) % 2 == 0

    def seen(table: torch.Tensor) -> torch.Tensor:
        if kind == "numbers":
            return number_features(table, ["a", "b", "c"], is_train).rows
        if kind == "vectors":
            return vector_features(table, is_train).rows
        texts = [" ".join(WORDS[int(abs(value) * 3) % 20] for value in row) for row in table.tolist()]
        lengths = torch.tensor([len(text) for text in texts], dtype=torch.float64)
        return ngram_features(*count_grams(texts, is_train), lengths, is_train).rows

    before = seen(table)
    changed = torch.where((torch.arange(40) == 5)[:, None], table * 7.0 + 3.0, table)  # it is guessed
    after = seen(changed)
    assert after.isfinite().all() and not torch.equal(after[5], before[5])
    assert torch.equal(after[is_train], before[is_train]) and torch.equal(after[7:], before[7:])
    constant = torch.where(is_train[:, None], 1.5, table)  # nothing to learn from
    assert kind == "ngrams" or seen(constant).abs().max() < 1e-9


def test_names_of_columns_may_say_anything():
    rng = np.random.default_rng(0)
    first, second = rng.normal(size=(300, 2)), rng.normal(size=(300, 2))
    second[:, 1] = second[:, 0]
    verdict = compare_numbers(first, second, ["w × h", "d (spread)"])
    found = {(one.name, one.measure) for one in verdict.differences}
    assert ("w × h × d (spread)", "correlation") in found


def test_frequencies_count_where_repeats_are_kept():
    first, second = ["yes", "no"] * 100, ["yes", "no", "no", "no"] * 50
    assert compare_texts(first, second, settings=Settings(repeats="keep")).shifted
    with pytest.raises(DataError, match=r"2 distinct texts of each can be compared; p ≤ 0.05 needs 6 or more"):
        compare_texts(first, second)


def test_a_seed_is_a_verdict():
    first, second = sentences(80, 1), sentences(90, 2, "new", 0.3)
    one, again, other = (compare_texts(first, second, settings=Settings(seed=seed)) for seed in (1, 1, 2))
    assert one == again and one.right != other.right


@pytest.mark.parametrize(
    ("how", "says"),
    [
        ({"alpha": 0.0}, "alpha"),
        ({"alpha": 0.9}, "alpha"),
        ({"test": "t"}, "expected one of binomial, permutation"),
        ({"repeats": "some"}, "drop or keep"),
        ({"folds": 1}, "folds"),
        ({"test": "permutation", "permutations": 10}, "10 permutations cannot give p ≤ 0.05"),
    ],
)
def test_settings_that_cannot_be(how: dict, says: str):
    with pytest.raises(UsageError, match=says):
        Settings(**how)


def test_tables_that_cannot_be_compared():
    table = np.zeros((20, 2))
    with pytest.raises(DataError, match="3 columns; the first sample has 2"):
        compare_numbers(table, np.zeros((20, 3)))
    with pytest.raises(DataError, match=r"old: row 3, column 2 is nan"):
        broken = table.copy()
        broken[2, 1] = np.nan
        compare_numbers(broken, table, called=("old", "new"))
    with pytest.raises(DataError, match="shape"):
        compare_numbers(np.zeros((2, 2, 2)), table)
    assert not compare_numbers(table, table).shifted  # constant columns say nothing
