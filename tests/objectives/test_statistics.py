"""The shares that papers promise, on real English and Chinese, within what chance allows."""

from __future__ import annotations

from collections import Counter
from itertools import combinations, pairwise

import numpy as np
import pytest

from allmask.errors import DataError
from allmask.objectives import Mass, Mlm, Nsp, Permutation, Prefix, Span, Unilm, Vocabulary
from allmask.objectives.nsp import pairs
from allmask.objectives.objective import read
from allmask.objectives.ragged import Ragged
from allmask.text import Tokenizer
from tests.objectives.texts import Texts, chinese_documents, draw, english_documents, real_texts, small_vocabulary

LANGUAGES = {"English": english_documents, "Chinese": chinese_documents}
EPOCHS = {"English": 4, "Chinese": 60}


@pytest.fixture(scope="module", params=LANGUAGES)
def language(request) -> str:
    return request.param


@pytest.fixture(scope="module")
def texts(language: str, tokenizer: Tokenizer) -> Texts:
    return real_texts(tokenizer, LANGUAGES[language]())


@pytest.fixture(scope="module")
def real(tokenizer: Tokenizer) -> Vocabulary:
    return Vocabulary.of(tokenizer)


def expect(count: float, total: float, share: float) -> None:
    """So many of so many within 4.5 standard deviations: a fair draw misses it once in 150,000."""
    assert total * share * (1 - share) > 20, "too few to say anything"
    assert abs(count - total * share) < 4.5 * np.sqrt(total * share * (1 - share)), (count / total, share)


def expect_alike(counts: dict, kinds: int) -> None:
    """All kinds equally often: χ² within 4.5 standard deviations."""
    mean = sum(counts.values()) / kinds
    assert mean > 20 and len(counts) == kinds
    chi = sum((count - mean) ** 2 / mean for count in counts.values())
    assert abs(chi - (kinds - 1)) < 4.5 * np.sqrt(2 * (kinds - 1)), chi


def epochs(language: str, texts: Texts):
    return [draw(range(len(texts)), epoch) for epoch in range(EPOCHS[language])]


# ---- masked language models --------------------------------------------------------------------------------


def test_mlm_15_80_10_10(language: str, texts: Texts, real: Vocabulary):
    mlm, counts = Mlm(real), Counter()
    for chance in epochs(language, texts):
        text = real.framed(read(texts, chance))
        ids, labels = mlm.corrupt(text, chance)
        chosen = labels >= 0
        assert not real.special[text.values[chosen]].any() and (ids[~chosen] == text.values[~chosen]).all()
        assert (labels[chosen] == text.values[chosen]).all()
        others = ids[chosen & (ids != real.mask)]
        assert not real.special[others].any()
        counts["tokens"] += int((~real.special[text.values]).sum())
        counts["chosen"] += int(chosen.sum())
        counts["masked"] += int((ids[chosen] == real.mask).sum())
        counts["kept"] += int((ids == text.values)[chosen].sum())
        counts.update({"replaced": int(((ids != text.values) & (ids != real.mask))[chosen].sum())})
    same = 0.1 / len(real.ordinary)  # a random token may be the same one
    expect(counts["chosen"], counts["tokens"], 0.15)
    expect(counts["masked"], counts["chosen"], 0.8)
    expect(counts["replaced"], counts["chosen"], 0.1 - same)
    expect(counts["kept"], counts["chosen"], 0.1 + same)


def test_shares_of_the_corruption(real: Vocabulary):
    """Any weights; where a random token is the same one, it counts as unchanged."""
    row, same = np.full(4000, real.ordinary[7]), 1 / len(real.ordinary)

    def counted(*weights: float) -> tuple[int, int, int]:
        ids, labels = Mlm(real, share=0.5, corruption=weights).corrupt(Ragged(row, np.array([4000])), draw([0]))
        found = ids[labels >= 0]
        return len(found), int((found == real.mask).sum()), int((found == row[0]).sum())

    chosen, masked, kept = counted(6, 3, 1)
    expect(masked, chosen, 0.6)
    expect(kept, chosen, 0.1 + 0.3 * same)
    assert counted(1, 0, 0) == (chosen, chosen, 0) and counted(0, 0, 2) == (chosen, 0, chosen)
    assert counted(0, 1, 0)[1] == 0 and counted(0, 1, 0)[2] < 20


def test_each_epoch_masks_other_tokens(language: str, texts: Texts, real: Vocabulary):
    """Any two epochs agree on a token as often as chance has it, 2.25 %."""
    chosen = [Mlm(real).choose(read(texts, chance), chance) for chance in epochs(language, texts)]
    ordinary = int((~real.special[read(texts, draw(range(len(texts)))).values]).sum())
    expect(sum((a & b).sum() for a, b in pairwise(chosen)), ordinary * (len(chosen) - 1), 0.0225)


def test_random_tokens_are_drawn_from_all(real: Vocabulary):
    mlm, seen = Mlm(real, share=0.99), Counter()
    row = np.full(2000, real.ordinary[7])
    for epoch in range(40):
        ids, _ = mlm.corrupt(Ragged(row, np.array([2000])), draw([0], epoch))
        seen.update(ids[(ids != real.mask) & (ids != row)].tolist())
    halves = [sum(seen[id] for id in half) for half in np.array_split(real.ordinary, 2)]
    expect(halves[0], sum(halves), 0.5)
    assert len(seen) > 0.99 * (len(real.ordinary) - 1)


def test_words_are_chosen_whole(language: str, texts: Texts, real: Vocabulary, tokenizer: Tokenizer):
    words, hidden, pieces = 0, 0, 0
    for chance in epochs(language, texts):
        text = real.framed(read(texts, chance))
        chosen = Mlm(real, whole_words=True).choose(text, chance)
        marked = np.array([token.startswith("##") for token in tokenizer.tokens(text.values)])
        assert (chosen[1:] == chosen[:-1])[marked[1:]].all()  # a piece shares the fate of the one before it
        begins = ~marked & ~real.special[text.values]
        words, hidden, pieces = words + begins.sum(), hidden + (chosen & begins).sum(), pieces + marked.sum()
    expect(hidden, words, 0.15)
    assert language == "Chinese" or pieces > 1000


def unit_lengths(begins: np.ndarray, stops: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Where units begin and how long they are, without those that a special token or the end cuts short."""
    at = np.flatnonzero(begins)
    lengths = np.diff(at, append=len(begins))
    cut_short = np.append(stops, True)[at + lengths] | stops[at]
    return at[~cut_short], lengths[~cut_short]


@pytest.mark.parametrize("weights", [(6, 3, 2), (0.8, 0.1, 0.1), (0, 0, 1)])
def test_lengths_of_ngrams(language: str, texts: Texts, real: Vocabulary, weights: tuple[float, ...]):
    mlm, drawn, chosen, tokens, hidden = Mlm(real, ngrams=weights), Counter(), Counter(), 0, 0
    long = Texts([[np.concatenate(texts)]], limit=100_000)  # few ends, which cut an n-gram short
    for epoch in range(EPOCHS[language]):
        text, chance = read(long, draw([0])), draw([0], epoch)
        special = real.special[text.values]
        at, lengths = unit_lengths(mlm.units(text, chance), special)
        picked = mlm.choose(text, chance)
        drawn.update(lengths.tolist())
        chosen.update(lengths[picked[at]].tolist())
        tokens, hidden = tokens + (~special).sum(), hidden + picked.sum()
    for length, weight in enumerate(weights, 1):
        share = weight / sum(weights)
        if 0 < share < 1:
            expect(drawn[length], drawn.total(), share)
            expect(chosen[length], chosen.total(), share)
        assert (drawn[length] == 0) == (weight == 0)
    expect(chosen.total(), drawn.total(), 0.15)
    assert abs(hidden / tokens - 0.15) < 0.02


# ---- next sentences ----------------------------------------------------------------------------------------


def test_half_of_the_sentences_follow(language: str, texts: Texts, real: Vocabulary):
    answers, tokens, chosen = Counter(), 0, 0
    for chance in epochs(language, texts):
        batch = Nsp(real).batch(texts, chance)
        assert batch.relations is not None
        answers.update(batch.relations.tolist())
        labels, ids = batch.labels[0].numpy(), batch.ids[0].numpy()
        assert not real.special[labels[labels >= 0]].any()
        tokens, chosen = tokens + int((~real.special[ids] | (labels >= 0)).sum()), chosen + batch.targets
    expect(answers[1], answers.total(), 0.5)
    expect(chosen, tokens, 0.15)


def test_the_balance_of_next_sentences():
    counts: Counter[int] = Counter()
    texts = documents_by_thousands()
    for epoch in range(60):
        counts.update(pairs(texts, draw(range(len(texts)), epoch))[2])
    expect(counts[1], counts.total(), 0.5)


def documents_by_thousands() -> Texts:
    """Nine documents; the tokens of document d are d·1000, d·1000 + 1, …, in sentences of three."""
    sizes = (1, 4, 9, 2, 5, 3, 7, 6, 12)
    rows = [[[d * 1000 + 3 * s + t for t in range(3)] for s in range(size)] for d, size in enumerate(sizes)]
    return Texts(rows, limit=14)


def test_what_follows_is_the_true_next_or_of_another_document():
    texts = documents_by_thousands()
    strangers = Counter()
    for epoch in range(200):
        first, second, relations = pairs(texts, draw(range(len(texts)), epoch))
        for number, relation in enumerate(relations):
            a = first.values[first.row == number]
            b = second.values[second.row == number]
            assert len(a) and len(b) and (np.diff(a) == 1).all() and (np.diff(b) == 1).all()
            assert a[0] == texts[number][0]
            if relation == 0:
                assert b[0] == a[-1] + 1 and b[-1] == texts[number][-1]
                assert b[0] % 1000 % 3 == 0 or len(texts[number]) == 3  # cut between sentences, if there are several
            else:
                assert b[0] // 1000 != a[0] // 1000 and b[0] % 1000 % 3 == 0
                assert len(a) + len(b) <= len(texts[number])
                strangers[b[0] // 1000] += 1
    assert set(strangers) == set(range(9))


def test_one_document_has_no_other():
    with pytest.raises(DataError, match="only one document"):
        pairs(Texts([[[7, 8, 9]] * 30], limit=3), draw(range(30)))


# ---- orders ------------------------------------------------------------------------------------------------


def test_all_orders_are_equally_likely():
    """Four tokens between [CLS] and [SEP] have 24 orders."""
    whole, part = Permutation(small_vocabulary(), part=1), Permutation(small_vocabulary(), part=4)
    counts, guessed = Counter(), Counter()
    for epoch in range(60):
        text = Ragged(np.tile([2, 10, 11, 12, 13, 3], 100), np.full(100, 6))
        order, asked = whole.order(text, draw(range(100), epoch))
        counts.update(map(tuple, order.reshape(100, 6)[:, 1:5].tolist()))
        assert (order.reshape(100, 6)[:, [0, 5]] == 0).all() and (asked == (order > 0)).all()
        order, asked = part.order(text, draw(range(100), epoch))
        guessed.update(text.values[asked].tolist())
        assert (order.reshape(100, 6).sum(1) == 1).all() and (asked == (order > 0)).all()
    expect_alike(counts, 24)
    expect_alike(guessed, 4)


def test_a_sixth_is_predicted_after_all_others_are_known(language: str, texts: Texts, real: Vocabulary):
    for chance in epochs(language, texts)[:4]:
        batch = Permutation(real).batch(texts, chance)
        group, special = batch.mask.group[0].numpy(), real.special[batch.ids[0].numpy()]
        tokens = np.bincount(group[~special], minlength=len(texts))
        asked = np.bincount(group[batch.labels[0].numpy() >= 0], minlength=len(texts))
        assert (asked == np.ceil(tokens / 6)).all()
        order = batch.mask.order[0].numpy()
        assert ((order > 0) == (batch.labels[0].numpy() >= 0)).all()
        assert (np.bincount(group, order) == asked * (asked + 1) / 2).all()  # 1, 2, 3, …


def test_a_text_is_cut_anywhere():
    samples, cuts = [np.arange(5, 15)] * 3000, Counter()
    batch = Prefix(small_vocabulary()).batch(samples, draw(range(3000)))
    for start in batch.segments.view(3000, 13).sum(1).tolist():
        cuts[start] += 1
    expect_alike(cuts, 9)


@pytest.mark.parametrize("weights", [(1 / 3, 1 / 6, 1 / 6, 1 / 3), (1, 1, 1, 1), (4, 3, 2, 1)])
def test_orders_of_unilm(weights: tuple[float, ...]):
    unilm = Unilm(small_vocabulary(), weights=weights)
    counts = Counter(unilm.way(draw([3 * n, 3 * n + 1, 3 * n + 2])) for n in range(6000))
    for way, weight in zip(("bidirectional", "left-to-right", "right-to-left", "seq2seq"), weights, strict=True):
        expect(counts[way], 6000, weight / sum(weights))


# ---- spans -------------------------------------------------------------------------------------------------


def test_a_gap_of_half_a_text_anywhere():
    text = Ragged(np.zeros(3000 * 7, int), np.full(3000, 7))
    gaps = Counter(tuple(row) for row in Mass(small_vocabulary()).choose(text, draw(range(3000))).reshape(3000, 7))
    assert {sum(gap) for gap in gaps} == {4}  # 3.5, rounded to even
    expect_alike(gaps, 4)


@pytest.mark.parametrize("runs", [1, 2, 3])
def test_all_positions_of_spans_are_equally_likely(runs: int):
    """Three of nine tokens in so many runs: every arrangement with a token between the runs."""
    arrangements = [
        row
        for row in combinations(range(9), 3)
        if 1 + sum(b - a > 1 for a, b in pairwise(row)) == runs
    ]  # fmt: skip
    span = Span(small_vocabulary(), share=1 / 3, mean_length=3 / runs)
    hidden, _ = span.choose(Ragged(np.zeros(4000 * 9, int), np.full(4000, 9)), draw(range(4000)))
    counts = Counter(tuple(np.flatnonzero(row).tolist()) for row in hidden.reshape(4000, 9))
    assert set(counts) == set(arrangements)
    expect_alike(counts, len(arrangements))


def test_spans_of_three_on_average(language: str, texts: Texts, real: Vocabulary):
    tokens, hidden, runs, lengths = 0, 0, 0, Counter()
    for chance in epochs(language, texts):
        text = read(texts, chance)
        is_hidden, first = Span(real).choose(text, chance)
        per_row = np.bincount(text.row[is_hidden], minlength=len(texts))
        runs_per_row = np.bincount(text.row[is_hidden & first], minlength=len(texts))
        limit = text.lengths - 1
        assert (per_row == np.minimum(np.maximum(np.round(text.lengths * 0.15), 1), limit)).all()
        assert (runs_per_row == np.minimum(np.maximum(np.round(per_row / 3), 1), per_row)).all()
        starts = np.flatnonzero(first)
        lengths.update(np.diff(starts, append=len(first))[is_hidden[starts]].tolist())
        tokens, hidden, runs = tokens + len(text.values), hidden + is_hidden.sum(), runs + runs_per_row.sum()
    assert hidden / tokens == pytest.approx(0.15, abs=0.01)
    assert hidden / runs == pytest.approx(3.0, abs=0.4)  # of short texts a run or two, rounded
    assert lengths.total() == runs and sum(length * count for length, count in lengths.items()) == hidden
    assert len(lengths) >= 5  # of different lengths


def test_nothing_is_lost_behind_sentinels(language: str, texts: Texts, real: Vocabulary):
    """Putting the written runs back where their sentinels stand gives the text."""
    chance = draw(range(len(texts)), 2)
    batch = Span(real).batch(texts, chance)
    sentinels = set(real.sentinels.tolist())
    group, is_target = batch.mask.group[0], batch.mask.order[0] > 0
    for row, text in enumerate(texts):
        source = batch.ids[0, (group == row) & ~is_target].tolist()
        target = (group == row) & is_target
        written = batch.labels[0, target].tolist()
        assert batch.ids[0, target].tolist() == [real.begin, *written[:-1]]
        assert source.pop() == written.pop() == real.end
        runs: dict[int, list[int]] = {}
        for id in written:
            if id in sentinels:
                runs[id] = []
            else:
                runs[list(runs)[-1]].append(id)
        assert list(runs) == real.sentinels[: len(runs)].tolist()
        assert [id for shown in source for id in runs.get(shown, [shown])] == text.tolist()
