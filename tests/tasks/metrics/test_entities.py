"""Entities and their scores against seqeval, which follows conlleval; what may follow what."""

from __future__ import annotations

import warnings

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from allmask.tasks.metrics.entities import EntityCount, PlainCount, TagSurvey, entities, scheme_of, split_tag, steps

TAGS = st.sampled_from(["O", *(f"{prefix}-{kind}" for prefix in "BIES" for kind in ("PER", "creative-work"))])
SENTENCES = st.lists(st.lists(st.tuples(TAGS, TAGS), min_size=1, max_size=8), min_size=1, max_size=4)


@settings(max_examples=150, deadline=None)
@given(SENTENCES)
def test_scores_are_those_of_seqeval(sentences):
    metrics = pytest.importorskip("seqeval.metrics")
    true = [[a for a, _ in sentence] for sentence in sentences]
    found = [[b for _, b in sentence] for sentence in sentences]
    count = EntityCount()
    for pair in zip(true, found, strict=True):
        count.add(*pair)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        theirs = {
            "f1": metrics.f1_score(true, found),
            "precision": metrics.precision_score(true, found),
            "recall": metrics.recall_score(true, found),
            "accuracy": metrics.accuracy_score(true, found),
        }
        report = metrics.classification_report(true, found, output_dict=True)
    assert count.scores() == pytest.approx(theirs)
    for kind, row in count.by_type().items():
        assert (row["f1"], row["precision"], row["recall"]) == pytest.approx(
            (report[kind]["f1-score"], report[kind]["precision"], report[kind]["recall"])
        )


@pytest.mark.parametrize(
    ("tags", "found"),
    [
        ("B-PER I-PER O B-LOC", [("PER", 0, 2), ("LOC", 3, 4)]),
        ("I-PER I-PER B-PER O", [("PER", 0, 2), ("PER", 2, 3)]),  # IOB1: B only between neighbours
        ("B-PER I-LOC", [("PER", 0, 1), ("LOC", 1, 2)]),
        ("S-PER B-PER E-PER I-PER", [("PER", 0, 1), ("PER", 1, 3), ("PER", 3, 4)]),
        ("O O", []),
    ],
)
def test_worked_cases(tags: str, found: list):
    assert [tuple(entity) for entity in entities(tags.split())] == found


def surveyed(*sentences: str) -> TagSurvey:
    survey = TagSurvey()
    for sentence in sentences:
        survey.add(sentence.split())
    return survey


@pytest.mark.parametrize(
    ("sentences", "scheme", "names"),
    [
        (["O B-b I-b", "B-a"], "bio", ("O", "B-a", "I-a", "B-b", "I-b")),
        (["O I-a I-a B-a", "I-b O"], "iob1", ("O", "B-a", "I-a", "B-b", "I-b")),
        (["O S-a B-a E-a"], "bioes", ("O", "B-a", "I-a", "E-a", "S-a")),
        (["NOUN VERB", "O"], "plain", ("NOUN", "O", "VERB")),
    ],
)
def test_schemes(sentences: list, scheme: str, names: tuple):
    assert surveyed(*sentences).scheme == scheme and surveyed(*sentences).names() == names


@pytest.mark.parametrize("scheme", ["bio", "bioes"])
def test_every_allowed_chain_is_well_formed(scheme: str):
    """What the rules allow gives back the entities it was made of."""
    names = surveyed("O B-a I-a B-b" if scheme == "bio" else "O B-a E-a S-b").names()
    starts, allowed = steps(names, scheme)
    for place, name in enumerate(names):
        assert bool(starts[place]) == (split_tag(name)[0] not in "IE")
        for before, other in enumerate(names):
            joined = len(entities([other, name])) < len(entities([other])) + len(entities([name]))
            open_end = scheme == "bioes" and split_tag(other)[0] in "BI"
            inside = split_tag(name)[0] in "IE"
            assert bool(allowed[before, place]) == (joined if inside else not open_end)
    assert steps(names, "iob1")[1].all() and scheme_of(names) == scheme


def test_plain_tags_are_scored_word_by_word():
    count = PlainCount()
    assert count.add(["N", "V", "N"], ["N", "N", "N"]) == 1
    assert count.scores() == pytest.approx({"accuracy": 2 / 3, "macro_f1": 0.4})
