"""Tagging: words to pieces and back, the loss it learns from, and what is made of what a model says."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise, product
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st

from allmask.data import Bad, Record
from allmask.errors import CheckpointError, DataError, UsageError
from allmask.model import Model, load
from allmask.nn.heads import Labels
from allmask.objectives import losses_of
from allmask.tasks.common.heads import HeldOut
from allmask.tasks.common.reading import most_context, with_marks
from allmask.tasks.metrics.entities import entities
from allmask.tasks.tag import (
    Tag,
    Tagger,
    _check_prefixes,
    best_tags,
    read_sentences,
    read_words,
    split_words,
    word_scores,
)
from allmask.text.truncate import windows
from tests import tiny

transformers.logging.set_verbosity_error()
transformers.utils.logging.disable_progress_bar()
NAMES = ("O", "B-a", "I-a", "B-中", "I-中")


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return load(tiny.bert(tmp_path_factory.mktemp("models") / "bert"))


def answering(model: Model, kind: str = "tag") -> Model:
    """With a head whose answers differ: fresh ones are all near zero."""
    rng = torch.Generator().manual_seed(1)
    made = model.with_labels(Labels(kind, NAMES), rng)
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=rng) * 0.3 + ("norm.weight" in name))
            parameter.div_(100.0 if "chain" in name else 1.0)  # they are stretched
        made.task_head.output.bias.zero_()
    return made


def rows(count: int = 12, longest: int = 12, seed: int = 0) -> list[Record]:
    rng = random.Random(seed)
    words = [*tiny.WORDS, *tiny.CHARACTERS, "unknownword", "\u200b"]
    made = []
    for number in range(count):
        tokens = [rng.choice(words) for _ in range(rng.randint(1, longest))]
        made.append(Record({"tokens": tokens, "tags": [rng.choice(NAMES) for _ in tokens]}, f"rows:{number}"))
    return made


# ---- words and pieces ------------------------------------------------------------------------------------------


def test_a_word_is_asked_at_its_first_piece(bert):
    ((window,),) = read_words(bert.tokenizer, bert.config, [["red", "redcat", "北", "\u200b"]], 32)
    tokens = bert.tokenizer.tokens(window.example.ids)
    assert [tokens[place] for place in window.places][::2] == ["red", "北"] and tokens[-2] == "[UNK]"
    assert tokens[0] == "[CLS]" and tokens[-1] == "[SEP]" and window.words.tolist() == [0, 1, 2, 3]
    assert len(window.places) == 4 and not any(tokens[place].startswith("##") for place in window.places)


def test_same_alignment_as_transformers(bert, tmp_path: Path):
    bert.tokenizer.save(tmp_path)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    words = ["redcat", "blue", "北", "欢", "singsthere", "dog"]
    ((window,),) = read_words(bert.tokenizer, bert.config, [words], 48)
    expected = theirs(words, is_split_into_words=True)
    assert window.example.ids.tolist() == expected["input_ids"]
    numbers = expected.word_ids()
    first = [place for place, word in enumerate(numbers) if word is not None and word != numbers[place - 1]]
    assert window.places.tolist() == first


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 60), st.integers(4, 20), st.integers(0, 9))
def test_every_word_is_asked_once_where_it_has_the_most_context(bert, count: int, size: int, seed: int):
    rng = random.Random(seed)
    words = [rng.choice(["red", "redcatblue", "北"]) for _ in range(count)]
    (read,) = read_words(bert.tokenizer, bert.config, [words], size)
    assert sorted(word for window in read for word in window.words) == list(range(count))
    ids = {word: bert.tokenizer.encode(word, special=False).ids[0] for word in set(words)}
    for window in read:
        assert len(window.example) <= size
        assert [window.example.ids[place] for place in window.places] == [ids[words[word]] for word in window.words]


@given(st.integers(1, 80), st.integers(1, 20), st.data())
def test_the_most_context_is_that_of_the_definition(length: int, size: int, data):
    spans = windows(length, size, data.draw(st.integers(1, size)))
    inside = [[min(place - start, end - 1 - place) for start, end in spans] for place in range(length)]
    assert most_context(np.arange(length), spans).tolist() == [row.index(max(row)) for row in inside]


def test_a_word_longer_than_a_row(bert):
    (read,) = read_words(bert.tokenizer, bert.config, [["red" * 30, "cat"]], 12)
    assert sorted(word for window in read for word in window.words) == [0, 1]
    assert all(len(window.words) for window in read)


def test_most_context():
    spans = windows(10, 6, 4)  # 0–6, 4–10
    assert spans == [(0, 6), (4, 10)]
    assert most_context(np.arange(10), spans).tolist() == [0, 0, 0, 0, 0, 1, 1, 1, 1, 1]


TEXTS = ["Zoë's 北京 cafe\u0301 👩🏽‍🚀!", "ein\u0301e a\u200bb", "  red,cat  ", "👍🏽❤️北\u3000京", "é́x", "𠀀𠀁 red"]


@pytest.mark.parametrize("text", TEXTS)
def test_words_of_a_text_have_their_exact_place(bert, text: str):
    (words,) = split_words(bert.tokenizer, [text])
    assert all(text[word.start : word.end] == word.text for word in words)
    assert all(a.end <= b.start for a, b in pairwise(words))
    between = set(text) - set("".join(word.text for word in words))
    assert all(letter.isspace() or letter == "\u200b" for letter in between)


def test_marks_belong_to_the_letter_before():
    assert with_marks("cafe\u0301s", 4) == 5 and with_marks("👍🏽 a", 1) == 2 and with_marks("❤️", 1) == 2
    assert with_marks("ab", 1) == 1 and with_marks("ab", 2) == 2


# ---- the loss, against transformers ------------------------------------------------------------------------------


def theirs_of(model: Model, folder: Path) -> transformers.PreTrainedModel:
    model.save(folder)
    return transformers.AutoModelForTokenClassification.from_pretrained(folder).eval()


def test_forward_loss_and_gradient_are_those_of_transformers(bert, tmp_path: Path):
    model, records = answering(bert).eval(), rows()
    theirs = theirs_of(model, tmp_path / "model")
    assert theirs.config.id2label == dict(enumerate(NAMES)) and type(theirs).__name__ == "BertForTokenClassification"
    work = Tag(max_length=48).workload(model, records)
    loss, count = losses_of(model, work.batch(list(range(len(records))), 0))["tag"]
    (loss / count).backward()
    longest = max(work.lengths)
    ids, valid, labels = (torch.full((len(records), longest), fill) for fill in (0, 0, -100))
    for row, (window, true) in enumerate(zip(work.windows, work.targets, strict=True)):
        ids[row, : len(window.example)] = torch.from_numpy(window.example.ids)
        valid[row, : len(window.example)] = 1
        labels[row, torch.from_numpy(window.places)] = torch.from_numpy(true)
    result = theirs(ids, attention_mask=valid, labels=labels)
    result.loss.backward()
    torch.testing.assert_close(loss / count, result.loss, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(model.task_head.output.weight.grad, theirs.classifier.weight.grad, atol=1e-5, rtol=1e-4)
    mine = word_scores(model, [[window] for window in work.windows], [len(true) for true in work.targets])
    for row, (window, scores) in enumerate(zip(work.windows, mine, strict=True)):
        torch.testing.assert_close(scores, result.logits[row, window.places], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("kind", ["tag", "chain"])
def test_there_and_back(bert, tmp_path: Path, kind: str):
    model = answering(bert, kind)
    theirs = theirs_of(model, tmp_path / "ours")
    theirs.save_pretrained(tmp_path / "theirs")
    again, foreign = load(tmp_path / "ours"), load(tmp_path / "theirs")
    assert again.labels == model.labels and again.pooler is None and foreign.labels == Labels("tag", NAMES)
    for name, tensor in model.state_dict().items():
        assert torch.equal(again.state_dict()[name], tensor)
    ids = torch.tensor([[2, 7, 9, 11, 3]])
    torch.testing.assert_close(again(ids).answers, theirs(ids).logits[0], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(foreign(ids).answers, theirs(ids).logits[0], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("kind", ["tag", "chain"])
def test_packed_is_one_by_one(bert, kind: str):
    model, records = answering(bert, kind), rows(8, 40)
    work = Tag(max_length=12).workload(model, records)  # most are read in several windows
    assert len(work.windows) > len(records)
    numbers = [7, 2, 9, 0, 4]
    together = losses_of(model, work.batch(numbers, 0))["tag"]
    alone = [losses_of(model, work.batch([number], 0))["tag"] for number in numbers]
    assert together[0].item() == pytest.approx(sum(loss.item() for loss, _ in alone), rel=1e-5)
    assert together[1] == sum(count for _, count in alone)


# ---- at work -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["tag", "chain"])
def test_tags_do_not_depend_on_the_batch(bert, kind: str):
    tagger = Tagger(answering(bert, kind), Tag(max_length=16), "fp32")
    sentences = [record.fields["tokens"] for record in rows(20, 30)]
    result = tagger(sentences)
    assert [one.tags for one in result] == [next(tagger.stream([sentence])).tags for sentence in sentences]
    assert result[::-1] == tagger(sentences[::-1]) or [one.tags for one in result[::-1]] == [
        one.tags for one in tagger(sentences[::-1])
    ]
    assert all(len(one.tags) == len(sentence) for one, sentence in zip(result, sentences, strict=True))


@pytest.mark.parametrize("kind", ["tag", "chain"])
def test_what_the_scheme_forbids_is_never_predicted(bert, kind: str):
    tagger = Tagger(answering(bert, kind), Tag(scheme="bio"), "fp32")
    for result in tagger([record.fields["tokens"] for record in rows(30, 30)]):
        for before, tag in zip(["O", *result.tags], result.tags, strict=False):
            assert not tag.startswith("I-") or before[2:] == tag[2:]
    scores = [torch.zeros(3, 5) + torch.tensor([0.0, 0, 9, 0, 0])]  # I-a everywhere
    assert best_tags(tagger.frozen, scores, "bio")[0][0] == 1
    assert best_tags(answering(bert), scores, "iob1") == [[2, 2, 2]]  # where it begins an entity


@given(length=st.integers(0, 5), seed=st.integers(0, 10**6))
@settings(max_examples=30, deadline=None)
def test_tags_are_the_best_of_all_that_the_scheme_allows(bert, length: int, seed: int):
    """Against all sequences of tags there are, one by one."""
    scores = torch.randn(length, len(NAMES), generator=torch.Generator().manual_seed(seed))
    result = best_tags(answering(bert), [scores, scores[:0], scores[:1]], "bio")[0]

    def allowed(tags: Sequence[int]) -> bool:
        answered = ["O", *(NAMES[tag] for tag in tags)]
        return all(now[0] != "I" or before[2:] == now[2:] for before, now in pairwise(answered))

    def worth(tags: Sequence[int]) -> float:
        return float(sum(scores[place, tag] for place, tag in enumerate(tags)))

    best = max((tags for tags in product(range(len(NAMES)), repeat=length) if allowed(tags)), key=worth)
    assert allowed(result) and worth(result) == pytest.approx(worth(best), abs=1e-5)


def test_entities_of_a_text_have_their_characters(bert):
    tagger = Tagger(answering(bert), Tag(), "fp32")
    for text in TEXTS:
        result = tagger(text)
        assert [entity.kind for entity in result.entities] == [entity.kind for entity in entities(result.tags)]
        for entity in result.entities:
            assert text[entity.start : entity.end] == entity.text and 0 < entity.score <= 1
    result = tagger(("red", "北"))
    assert result.words == ["red", "北"] and all(entity.start is None for entity in result.entities)
    assert tagger([]) == [] and tagger("").tags == []
    with pytest.raises(UsageError, match="not a sentence"):
        tagger(7)


def test_an_evaluator_of_perfect_predictions(bert):
    model, records = answering(bert), rows()
    task = Tag(scheme="bio")
    found = Tagger(model, task, "fp32")([record.fields["tokens"] for record in records])
    perfect = [Record({**r.fields, "tags": one.tags}, r.where) for r, one in zip(records, found, strict=True)]
    score = HeldOut(task, perfect, task.reading(model, perfect), "fp32")(model)
    assert score.value == 1.0 and score.metrics["accuracy"] == 1.0 and score.samples == []
    score = HeldOut(task, records, task.reading(model, records), "fp32")(model)
    assert score.value < 1.0 and any("predicted" in line for line in score.samples)


def test_only_a_body_that_reads_both_ways(tmp_path: Path, bert):
    gpt2 = load(tiny.gpt2(tmp_path / "gpt2"))
    with pytest.raises(UsageError, match="left to right"):
        Tag().fitted(gpt2)
    with pytest.raises(CheckpointError, match='no head for "tag"'):
        Tagger(bert, Tag())


def test_preparing_drops_what_is_not_used(tmp_path: Path):
    model = load(tiny.bert(tmp_path / "bert", ["pooler", "nsp", "lm"]))
    made = Tag(crf=True).prepare(model, rows())
    assert made.heads == {"task"} and made.labels == Labels("chain", NAMES)
    assert Tag(crf=True).prepare(made, rows()) is made
    assert Tag().prepare(model, rows(), language=True).heads == {"task", "lm"}


def test_a_new_head_expects_tags_as_often_as_they_occur(bert):
    records = [
        Record({"tokens": ["red", "cat"], "tags": ["O", "B-a"]}, ""),
        Record({"tokens": ["a"], "tags": ["O"]}, ""),
    ]
    made = Tag().prepare(bert, records)
    assert made.labels == Labels("tag", ("O", "B-a", "I-a"))
    shares = torch.tensor([3 / 6, 2 / 6, 1 / 6])  # 2, 1 and 0 words, and one more of each so that none is impossible
    assert torch.allclose(made.task_head.output.bias, shares.log())
    learnt = torch.nn.Parameter(torch.zeros(3))
    made.task_head.output.bias = learnt
    assert Tag().prepare(made, records).task_head.output.bias is learnt  # trained further


# ---- files -------------------------------------------------------------------------------------------------------

GOOD = {"tokens": ["red", "cat"], "tags": ["O", "B-a"]}


@pytest.mark.parametrize(
    ("train", "dev", "says"),
    [
        ([GOOD, {**GOOD, "tags": ["O"]}], [GOOD], r"train.jsonl:2: 2 tokens but 1 tags"),
        (
            [GOOD],
            [{**GOOD, "tags": ["O", "B-b"]}],
            r'dev.jsonl:1: "tags" has an item 2 that is "B-b"; expected one of O, B-a',
        ),
        ([GOOD], [{"tokens": ["a"]}], r'dev.jsonl:1: no "tags"'),
        (
            [GOOD, {**GOOD, "tags": ["O", "Ba"]}],
            [GOOD],
            r'train.jsonl:2: "tags" has an item 2 that is "Ba"; expected O',
        ),
        ([{**GOOD, "tags": ["O", "O"]}], [GOOD], r"train.jsonl: all tags are O"),
        ([{"tokens": [], "tags": []}], [GOOD], r'train.jsonl:1: "tokens" is an empty list'),
        ([{"tokens": ["a", ""], "tags": ["O", "O"]}], [GOOD], r'train.jsonl:1: "tokens" has an item 2 that is empty'),
        ([{"tokens": "red cat", "tags": ["O", "O"]}], [GOOD], r'train.jsonl:1: "tokens" is "red cat"'),
    ],
)
def test_bad_records_are_named(tmp_path: Path, train: list, dev: list, says: str):
    files = [tiny.write_jsonl(tmp_path / name, some) for name, some in (("train.jsonl", train), ("dev.jsonl", dev))]
    with pytest.raises(DataError, match=says):
        Tag().read_data(*files, "stop", Counter())


def test_a_tag_without_prefix_is_refused_unless_no_tag_has_one(tmp_path: Path):
    with pytest.raises(Bad, match='item 3 that is "Ia"; expected O, or B-'):
        _check_prefixes({"tags": ["O", "B-a", "Ia"]})
    _check_prefixes({"tags": ["O", "B-a", "S-b"]})
    file = tiny.write_jsonl(tmp_path / "a.jsonl", [{"tokens": ["a", "b"], "tags": ["NOUN", "VERB"]}])
    assert Tag().read_data(file, None, "stop", Counter())[0].scheme == "plain"


def test_bad_records_are_skipped_and_counted(tmp_path: Path):
    bad = [{**GOOD, "tags": ["O"]}, {**GOOD, "tags": ["O", "Ba"]}, {"tokens": ["a"]}]
    files = [tiny.write_jsonl(tmp_path / name, [GOOD, *bad]) for name in ("train.jsonl", "dev.jsonl")]
    skipped: Counter[str] = Counter()
    task, train, held_out = Tag().read_data(*files, "skip", skipped)
    assert task.scheme == "bio" and len(train) == len(held_out) == 1
    assert skipped == {
        "tokens and tags differ in length": 2, "unknown tag": 1, "unknown label": 1, "missing field": 2,
    }  # fmt: skip


def test_sentences_without_tags(tmp_path: Path):
    file = tiny.write_jsonl(tmp_path / "a.jsonl", [{"text": "red cat"}, {"tokens": ["red"]}, {"id": 1}])
    with pytest.raises(DataError, match=r'a.jsonl:3: neither "tokens" nor "text"'):
        list(read_sentences(file))
    assert len(list(read_sentences(file, "skip"))) == 2
    (tmp_path / "a.txt").write_text("red cat\nblue\n")
    assert [record.fields["text"] for record in read_sentences(tmp_path / "a.txt")] == ["red cat", "blue"]
    (tmp_path / "a.conll").write_text("red\ncat\n\nblue\n")
    assert [record.fields["tokens"] for record in read_sentences(tmp_path / "a.conll")] == [["red", "cat"], ["blue"]]


@pytest.mark.parametrize("values", [{"max_length": 3}, {"scheme": "bilou"}])
def test_what_a_task_cannot_be(values):
    with pytest.raises(UsageError):
        Tag(**values)
