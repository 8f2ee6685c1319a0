"""Mixtures: what can be written, what is refused and how, and which objective a batch gets."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from allmask.errors import UsageError
from allmask.objectives import Draw, Mixture, Vocabulary
from allmask.registry import OBJECTIVES
from tests.objectives.texts import draw, small_texts


@pytest.mark.parametrize(
    ("text", "shares"),
    [
        ("mlm", {"mlm": 1.0}),
        ("mlm:0.5,causal:0.25,permutation:0.25", {"mlm": 0.5, "causal": 0.25, "permutation": 0.25}),
        (" mlm : 3 , causal:1 ", {"mlm": 0.75, "causal": 0.25}),
        ("mass,span", {"mass": 0.5, "span": 0.5}),
    ],
)
def test_mixtures_that_can_be_parsed(text: str, shares: dict[str, float]):
    mixture = Mixture.parse(text)
    assert mixture.shares == shares
    assert Mixture.parse(str(mixture)) == mixture


@pytest.mark.parametrize(
    ("text", "message", "hint"),
    [
        ("mml:1", 'there is no "mml"', "did you mean mlm?"),
        ("MLM", 'there is no "MLM"', "did you mean mlm?"),
        ("permutations", 'there is no "permutations"', "did you mean permutation?"),
        ("zzz", 'there is no "zzz"', "there are: mlm, nsp, causal"),
        ("", 'there is no ""', "there are: mlm"),
        ("mlm,,causal", 'there is no ""', "there are: mlm"),
        ("mlm:0", 'the weight of mlm is "0"', "mlm:0.5"),
        ("mlm:-1", 'the weight of mlm is "-1"', "positive"),
        ("mlm:nan", 'the weight of mlm is "nan"', "positive"),
        ("mlm:inf", 'the weight of mlm is "inf"', "positive"),
        ("mlm:", 'the weight of mlm is ""', "positive"),
        ("mlm:half", 'the weight of mlm is "half"', "positive"),
        ("mlm:1:2", 'the weight of mlm is "1:2"', "positive"),
        ("mlm:1,mlm:2", "mlm is named twice", "once"),
        ("mlm,span", "span and mlm cannot be trained in one model", "encoder–decoder"),
    ],
)
def test_mixtures_that_are_refused(text: str, message: str, hint: str):
    with pytest.raises(UsageError) as caught:
        Mixture.parse(text)
    assert message in caught.value.message
    assert caught.value.hint is not None and hint in caught.value.hint


def test_what_a_model_needs():
    assert Mixture.parse("nsp,causal").heads == {"lm", "nsp"}
    assert Mixture.parse("mass,span").heads == {"lm"}
    assert Mixture.parse("mass,span").pairs and not Mixture.parse("mlm,prefix").pairs
    assert Mixture.parse("mlm,causal").frame == 2 and Mixture.parse("mlm,prefix").frame == 3


def test_a_batch_gets_an_objective_by_its_samples(vocabulary: Vocabulary):
    mixed = Mixture.parse("mlm:0.5,causal:0.25,permutation:0.25").build(vocabulary)
    chosen = [mixed.choose(Draw(1, n % 3, range(5 * n, 5 * n + 5))).name for n in range(4000)]
    again = [mixed.choose(Draw(1, n % 3, [5 * n + at for at in (3, 0, 4, 1, 2)])).name for n in range(4000)]
    assert chosen == again  # in whatever order its samples come
    counts = Counter(chosen)
    for name, share in (("mlm", 0.5), ("causal", 0.25), ("permutation", 0.25)):
        assert abs(counts[name] - 4000 * share) < 4 * np.sqrt(4000 * share * (1 - share))
    assert chosen != [mixed.choose(Draw(2, n % 3, range(5 * n, 5 * n + 5))).name for n in range(4000)]


def test_the_batch_is_that_of_the_objective(vocabulary: Vocabulary):
    texts, mixed = small_texts(), Mixture.parse("mlm,causal,nsp").build(vocabulary)
    for epoch in range(12):
        chance = draw([1, 2, 3], epoch)
        made, alone = mixed.batch(texts, chance), mixed.choose(chance).batch(texts, chance)
        assert made.mask == alone.mask and (made.labels == alone.labels).all() and (made.ids == alone.ids).all()


def test_options_reach_their_objective(vocabulary: Vocabulary):
    mixed = Mixture.parse("mlm,causal").build(vocabulary, {"mlm": {"whole_words": True, "share": 0.3}})
    assert mixed.objectives[0].whole_words and mixed.objectives[0].share == 0.3
    with pytest.raises(UsageError, match="options are given for span"):
        Mixture.parse("mlm").build(vocabulary, {"span": {"share": 0.3}})


@pytest.mark.parametrize("name", OBJECTIVES)
def test_a_sample_is_drawn_alike_in_any_batch_and_anew_in_each_epoch(name: str, vocabulary: Vocabulary):
    """Its rows in a batch of its own are those among others; only UniLM's way belongs to the whole batch."""
    options = {"weights": (1, 0, 0, 0)} if name == "unilm" else {}
    objective, texts = OBJECTIVES[name](vocabulary, **options), small_texts()
    together = objective.batch(texts, draw([5, 2, 7]))
    alone = objective.batch(texts, draw([2]))
    mine = together.mask.group[0] == 1
    assert together.ids[0, mine].tolist() == alone.ids[0].tolist()
    assert together.labels[0, mine].tolist() == alone.labels[0].tolist()
    assert together.mask.position[0, mine].tolist() == alone.mask.position[0].tolist()
    drawn = {str(objective.batch(texts, draw([2], epoch)).labels.tolist()) for epoch in range(8)}
    assert (len(drawn) == 1) == (name in ("causal", "reverse"))


@pytest.mark.parametrize("name", OBJECTIVES)
def test_the_frame_is_what_an_objective_adds_at_most(name: str, vocabulary: Vocabulary):
    objective, texts = OBJECTIVES[name](vocabulary), small_texts()
    for number in range(len(texts)):
        for epoch in range(6):
            batch = objective.batch(texts, draw([number], epoch))
            limit = max(2, len(texts[number])) if name == "nsp" else len(texts[number])  # A and B have a token each
            assert int(batch.mask.position.max()) < limit + objective.frame
