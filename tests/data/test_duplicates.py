"""Duplicates: what brute force over sets of 5-grams finds."""

from __future__ import annotations

import random

from allmask.data.duplicates import plain, twins


def grams(text: str) -> set[str]:
    return {text[place : place + 5] for place in range(len(text) - 4)}


def test_the_same_as_brute_force():
    rng = random.Random(0)
    words = ["".join(rng.choices("abcdefghij北京欢迎你", k=rng.randint(2, 8))) for _ in range(300)]
    others = [" ".join(rng.choices(words, k=rng.randint(3, 40))) for _ in range(150)]
    texts = []
    for text in others[:100]:  # some words changed, from none to a half
        share = rng.choice([0, 0.02, 0.05, 0.1, 0.5])
        changed = [rng.choice(words) if rng.random() < share else word for word in text.split()]
        texts.append(" ".join(changed).upper() + "!")
    expected = {}
    for number, text in enumerate(texts):
        mine = grams(plain(text))
        scores = [len(mine & theirs) / max(1, len(mine | theirs)) for theirs in map(grams, map(plain, others))]
        if max(scores) >= 0.8:
            expected[number] = (scores.index(max(scores)), round(max(scores), 3))
    found = {one.number: (one.other, one.alike) for one in twins(texts, others)}
    assert found == expected and 20 < len(found) < 95


def test_short_texts_and_capitals():
    found = twins(["Yes", "no!", "北京", "maybe"], ["YES.", "No", "南京", "", "maybe not"])
    assert [(one.number, one.other, one.alike) for one in found] == [(0, 0, 1.0), (1, 1, 1.0)]
    assert twins(["!!!"], ["???"]) == [] and len(twins(["!!!"], ["!!!"])) == 1
