"""Every objective on a short sentence, worked out by hand: the draws are written down, and so are the rows."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from allmask.data import Batch
from allmask.objectives import Causal, Mass, Mlm, Nsp, Permutation, Prefix, Reverse, Span, Unilm, Vocabulary
from tests.objectives.texts import CLS, MASK, SEP, SIZE, UNK, Scripted, Texts

北, 京, 欢, 迎, 你, 们 = range(10, 16)
SENTENCE = [北, 京, 欢, 迎, 你, 们]
SAMPLES = [np.array(SENTENCE)]
NEVER = 0.99


def rows(batch: Batch) -> dict[str, list[int]]:
    """By place: a batch of one sample stands in its order."""
    by_place = batch.mask.position[0].argsort()
    tensors = {"ids": batch.ids, "order": batch.mask.order, "segments": batch.segments, "labels": batch.labels}
    assert batch.mask.position[0][by_place].tolist() == list(range(batch.tokens))
    return {name: tensor[0][by_place].tolist() for name, tensor in tensors.items()}


def test_mlm(vocabulary: Vocabulary):
    draw = Scripted(
        #       [CLS]  北    京     欢    迎     你    们   [SEP]
        chosen=[0.00, 0.15, 0.149, 0.5, 0.10, 0.00, NEVER, 0.0],  # special tokens drew lots, too
        fate=[0.00, 0.00, 0.799, 0.0, 0.80, 0.90, 0.0, 0.0],  # of the chosen: hide, replace, keep
        other=[0.00, 0.00, 0.0, 0.0, 0.999, 0.0, 0.0, 0.0],  # the last ordinary token
    )
    assert rows(Mlm(vocabulary).batch(SAMPLES, draw)) == {
        "ids": [CLS, 北, MASK, 欢, SIZE - 1, 你, 们, SEP],
        "order": [0] * 8,
        "segments": [0] * 8,
        "labels": [-1, -1, 京, -1, 迎, 你, -1, -1],
    }


def test_mlm_of_whole_words(vocabulary: Vocabulary):
    """11 31 32 | 12 | [UNK] | 33 13: pieces from 30 on go on with a word, but not with a special token."""
    samples = [np.array([11, 31, 32, 12, UNK, 33, 13])]
    #      [CLS]  11   31     32     12   [UNK]  33    13   [SEP]
    lots = [0.5, 0.1, NEVER, NEVER, 0.5, 0.5, 0.1, NEVER, 0.5]
    draw = Scripted(chosen=lots, fate=[0.0] * 9, other=[0.0] * 9)
    made = rows(Mlm(vocabulary, whole_words=True).batch(samples, draw))
    assert made["ids"] == [CLS, MASK, MASK, MASK, 12, UNK, MASK, 13, SEP]
    assert made["labels"] == [-1, 11, 31, 32, -1, -1, 33, -1, -1]


def test_mlm_of_several_at_once(vocabulary: Vocabulary):
    """Lengths 1 3 2 …: [CLS] | 北 京 欢 | 迎 你 | 们 [SEP], where special tokens stand apart; 北 京 欢 is chosen."""
    draw = Scripted(
        length=[0.0, 0.9, 0.7, 0.0, NEVER, NEVER, NEVER, NEVER],  # weights 6 3 2: up to 6/11 one, up to 9/11 two
        chosen=[0.0, 0.1, NEVER, NEVER, 0.5, 0.1, 0.5, 0.1],
        fate=[0.0] * 8,
        other=[0.0] * 8,
    )
    made = rows(Mlm(vocabulary, ngrams=(6, 3, 2)).batch(SAMPLES, draw))
    assert made["ids"] == [CLS, MASK, MASK, MASK, 迎, 你, 们, SEP]
    assert made["labels"] == [-1, 北, 京, 欢, -1, -1, -1, -1]


def test_mlm_of_several_words_in_two_rows(vocabulary: Vocabulary):
    samples = [np.array([10, 30, 11]), np.array([12, 31, 13, 32, 14])]
    draw = Scripted(
        2,
        #       [CLS] 10 30 11 [SEP] | [CLS] 12 31 13 32 14 [SEP]; one number a word:
        length=[0.0, 0.9, 0.0, 0.0, 0.0, 0.0, 0.9, 0.0, 0.0],  # 1 2 1 1 | 1 1 2 1 1
        chosen=[0.5, 0.1, NEVER, NEVER, 0.5, 0.5, 0.5, NEVER, 0.1, NEVER, NEVER, 0.5],
        fate=[0.0] * 12,
        other=[0.0] * 12,
    )
    batch = Mlm(vocabulary, whole_words=True, ngrams=(1, 1)).batch(samples, draw)
    assert batch.ids.tolist() == [[CLS, MASK, MASK, MASK, SEP, CLS, 12, 31, MASK, MASK, MASK, SEP]]


PASSAGES = Texts(
    [[[北, 京], [欢, 迎], [你]], [[20, 21], [22, 23, 24]], [[25]]], limit=6
)  # three documents, one sample each


@pytest.mark.parametrize(
    ("lots", "ids", "relations"),
    [
        # the second of the cuts 2 and 4; the next sample
        ({"cut": 0.5, "elsewhere": 0.5}, [CLS, 北, 京, 欢, 迎, SEP, 你, SEP], [0]),
        # a sentence of sample 1 that leaves one token: either
        ({"cut": 0.5, "elsewhere": 0.49, "stranger": 0.4, "begin": 0.5}, [CLS, 北, 京, 欢, 迎, SEP, 22, SEP], [1]),
        # three tokens are wanted: both sentences leave as many
        ({"cut": 0.0, "elsewhere": 0.0, "stranger": 0.4, "begin": NEVER}, [CLS, 北, 京, SEP, 22, 23, 24, SEP], [1]),
        ({"cut": 0.0, "elsewhere": 0.0, "stranger": 0.4, "begin": 0.0}, [CLS, 北, 京, SEP, 20, 21, 22, SEP], [1]),
        # sample 2 is shorter than that; sample 0 is the same document, so the next one
        ({"cut": 0.0, "elsewhere": 0.0, "stranger": 0.9, "begin": NEVER}, [CLS, 北, 京, SEP, 25, SEP], [1]),
        ({"cut": 0.0, "elsewhere": 0.0, "stranger": 0.0, "begin": 0.0}, [CLS, 北, 京, SEP, 20, 21, 22, SEP], [1]),
    ],
)
def test_nsp(vocabulary: Vocabulary, lots: dict[str, float], ids: list[int], relations: list[int]):
    drawn = {name: [lots.get(name, 0.0)] for name in ("cut", "elsewhere", "stranger", "begin")}
    size = len(ids)
    chosen, zeros = [NEVER, 0.0] + [NEVER] * (size - 2), [0.0] * size
    draw = Scripted(chosen=chosen, fate=zeros, other=zeros, **drawn)
    batch = Nsp(vocabulary).batch(PASSAGES, draw)
    second = ids.index(SEP) + 1
    assert rows(batch) == {
        "ids": [CLS, MASK, *ids[2:]],
        "order": [0] * size,
        "segments": [0] * second + [1] * (size - second),
        "labels": [-1, 北] + [-1] * (size - 2),
    }
    assert batch.relations is not None and batch.relations.tolist() == relations


def test_causal(vocabulary: Vocabulary):
    assert rows(Causal(vocabulary).batch(SAMPLES, Scripted())) == {
        "ids": [CLS, 北, 京, 欢, 迎, 你, 们, SEP],
        "order": [0, 1, 2, 3, 4, 5, 6, 7],
        "segments": [0] * 8,
        "labels": [北, 京, 欢, 迎, 你, 们, SEP, -1],
    }


def test_rows_cut_out_of_a_stream_have_no_frame(vocabulary: Vocabulary):
    made = rows(Causal(vocabulary, framed=False).batch(SAMPLES, Scripted()))
    assert (made["ids"], made["labels"]) == (SENTENCE, [*SENTENCE[1:], -1])
    made = rows(Reverse(vocabulary, framed=False).batch(SAMPLES, Scripted()))
    assert (made["ids"], made["labels"]) == (SENTENCE, [-1, *SENTENCE[:-1]])


def test_reverse(vocabulary: Vocabulary):
    batch = Reverse(vocabulary).batch(SAMPLES, Scripted())
    assert rows(batch) == {
        "ids": [CLS, 北, 京, 欢, 迎, 你, 们, SEP],
        "order": [7, 6, 5, 4, 3, 2, 1, 0],
        "segments": [0] * 8,
        "labels": [-1, CLS, 北, 京, 欢, 迎, 你, 们],
    }
    assert batch.ids.tolist() == [[SEP, 们, 你, 迎, 欢, 京, 北, CLS]]  # as it is read


#        [CLS] 北   京   欢   迎   你   们  [SEP]
ORDER = [0.9, 0.3, 0.8, 0.0, 0.7, 0.2, 0.5, 0.0]


def test_permutation(vocabulary: Vocabulary):
    batch = Permutation(vocabulary, part=3).batch(SAMPLES, Scripted(order=ORDER))
    assert rows(batch) == {
        "ids": [CLS, 北, 京, 欢, 迎, 你, 们, SEP],
        "order": [0, 0, 2, 0, 1, 0, 0, 0],
        "segments": [0] * 8,
        "labels": [-1, -1, 京, -1, 迎, -1, -1, -1],
    }
    assert batch.query == MASK
    assert Permutation(vocabulary).batch(SAMPLES, Scripted(order=ORDER)).labels.tolist() == [[-1] * 7 + [京]]


def test_permutation_as_a_shuffled_input(vocabulary: Vocabulary):
    batch = Permutation(vocabulary, part=3, two_streams=False).batch(SAMPLES, Scripted(order=ORDER))
    assert batch.query is None
    assert batch.ids.tolist() == [[CLS, 北, 欢, 你, 们, SEP, 迎, 京]]
    assert batch.mask.position.tolist() == [[0, 1, 3, 5, 6, 7, 4, 2]]
    assert batch.mask.order.tolist() == [[0, 0, 0, 0, 0, 0, 1, 2]]
    assert batch.labels.tolist() == [[-1, -1, -1, -1, -1, 迎, 京, -1]]


def test_a_permutation_of_all_tokens(vocabulary: Vocabulary):
    batch = Permutation(vocabulary, part=1).batch(SAMPLES, Scripted(order=ORDER))
    assert batch.ids.tolist() == [[CLS, SEP, 欢, 你, 北, 们, 迎, 京]]
    assert batch.mask.order.tolist() == [[0, 0, 1, 2, 3, 4, 5, 6]]
    assert batch.labels.tolist() == [[-1, -1, 欢, 你, 北, 们, 迎, 京]]


def test_prefix(vocabulary: Vocabulary):
    assert rows(Prefix(vocabulary).batch(SAMPLES, Scripted(cut=[0.3]))) == {
        "ids": [CLS, 北, 京, SEP, 欢, 迎, 你, 们, SEP],
        "order": [0, 0, 0, 0, 1, 2, 3, 4, 5],
        "segments": [0, 0, 0, 0, 1, 1, 1, 1, 1],
        "labels": [-1, -1, -1, 欢, 迎, 你, 们, SEP, -1],
    }


@pytest.mark.parametrize(("cut", "source"), [(0.0, 1), (NEVER, 5)])
def test_neither_part_of_a_prefix_is_empty(vocabulary: Vocabulary, cut: float, source: int):
    made = rows(Prefix(vocabulary).batch(SAMPLES, Scripted(cut=[cut])))
    assert made["segments"].index(1) == source + 2


@pytest.mark.parametrize(
    ("lot", "order"),
    [
        (0.32, [0, 0, 0, 0, 0, 0, 0, 0]),
        (0.34, [0, 1, 2, 3, 4, 5, 6, 7]),
        (0.49, [0, 1, 2, 3, 4, 5, 6, 7]),
        (0.51, [7, 6, 5, 4, 3, 2, 1, 0]),
        (0.66, [7, 6, 5, 4, 3, 2, 1, 0]),
    ],
)
def test_unilm(vocabulary: Vocabulary, lot: float, order: list[int]):
    draw = Scripted(
        batch=lot,
        length=[0.0] * 8,
        chosen=[NEVER, NEVER, 0.1, NEVER, NEVER, NEVER, NEVER, NEVER],
        fate=[0.0] * 8,
        other=[0.0] * 8,
    )
    assert rows(Unilm(vocabulary).batch(SAMPLES, draw)) == {
        "ids": [CLS, 北, MASK, 欢, 迎, 你, 们, SEP],
        "order": order,
        "segments": [0] * 8,
        "labels": [-1, -1, 京, -1, -1, -1, -1, -1],
    }


def test_unilm_seq2seq(vocabulary: Vocabulary):
    draw = Scripted(
        batch=0.67,
        cut=[0.3],
        length=[0.0, 0.0, 0.0, 0.0, 0.85, 0.0, 0.0, 0.0, 0.0],  # 1 1 1 1 2 …
        chosen=[NEVER, NEVER, NEVER, 0.0, 0.1, NEVER, NEVER, NEVER, NEVER],
        fate=[0.0] * 9,
        other=[0.0] * 9,
    )
    assert rows(Unilm(vocabulary).batch(SAMPLES, draw)) == {
        "ids": [CLS, 北, 京, SEP, MASK, MASK, 你, 们, SEP],
        "order": [0, 0, 0, 0, 1, 2, 3, 4, 5],
        "segments": [0, 0, 0, 0, 1, 1, 1, 1, 1],
        "labels": [-1, -1, -1, -1, 欢, 迎, -1, -1, -1],
    }


def pair_rows(batch: Batch, number: int = 0) -> dict[str, list[int]]:
    """A sample's source, and its target as the decoder reads it."""
    mine, order = batch.mask.group[0] == number, batch.mask.order[0]
    source, target = mine & (order == 0), mine & (order > 0)
    assert batch.mask.position[0, source].tolist() == list(range(int(source.sum())))
    assert (batch.labels[0, source] == -1).all() and torch.equal(batch.segments[0], (order > 0).long())
    tensors = {"ids": batch.ids, "order": batch.mask.order, "position": batch.mask.position, "labels": batch.labels}
    return {"source": batch.ids[0, source].tolist()} | {name: x[0, target].tolist() for name, x in tensors.items()}


def test_mass(vocabulary: Vocabulary):
    assert pair_rows(Mass(vocabulary).batch(SAMPLES, Scripted(start=[0.3]))) == {
        "source": [CLS, 北, MASK, MASK, MASK, 你, 们, SEP],
        "ids": [MASK, 京, 欢],
        "order": [1, 2, 3],
        "position": [2, 3, 4],
        "labels": [京, 欢, 迎],
    }


def test_mass_in_two_rows(vocabulary: Vocabulary):
    batch = Mass(vocabulary).batch([np.array([北, 京]), *SAMPLES], Scripted(2, start=[NEVER, NEVER]))
    first, second = pair_rows(batch), pair_rows(batch, 1)
    assert (first["source"], second["source"]) == ([CLS, 北, MASK, SEP], [CLS, 北, 京, 欢, MASK, MASK, MASK, SEP])
    assert (first["labels"], second["labels"]) == ([京], [迎, 你, 们])
    assert (first["position"], second["position"]) == ([2], [4, 5, 6])
    assert (batch.tokens, batch.targets) == (16, 4)


def test_span(vocabulary: Vocabulary):
    """Of nine tokens 4 are hidden in 2 runs: 3 shown, 1 hidden, 2 shown, 3 hidden, none shown."""
    samples = [np.arange(10, 19)]
    draw = Scripted(
        shown=[0.9, 0.5, 0.6, 0.7, 0.2, 0.8, 0.1],  # 4 2 1, less one at both ends; the first begins a part anyway
        hidden=[0.9, 0.1, 0.5, 0.3],
    )
    first, second = SIZE, SIZE + 1
    assert pair_rows(Span(vocabulary, share=0.45, mean_length=2.0).batch(samples, draw)) == {
        "source": [10, 11, 12, first, 14, 15, second, SEP],
        "ids": [CLS, first, 13, second, 16, 17, 18],
        "order": [1, 2, 3, 4, 5, 6, 7],
        "position": [0, 1, 2, 3, 4, 5, 6],
        "labels": [first, 13, second, 16, 17, 18, SEP],
    }


def test_span_in_three_rows(vocabulary: Vocabulary):
    """15 % of 6 is one token, here the last, of 2 the first; a single token is left alone."""
    samples = [*SAMPLES, np.array([20]), np.array([21, 22])]
    draw = Scripted(3, shown=[0.5] * 6 + [0.0] + [0.5] * 3 + [0.5, 0.0, 0.5], hidden=[0.0] * 2)
    batch = Span(vocabulary).batch(samples, draw)
    made = [pair_rows(batch, row) for row in range(3)]
    assert [row["source"] for row in made] == [[北, 京, 欢, 迎, 你, SIZE, SEP], [20, SEP], [SIZE, 22, SEP]]
    assert [row["ids"] for row in made] == [[CLS, SIZE, 们], [CLS], [CLS, SIZE, 21]]
    assert [row["labels"] for row in made] == [[SIZE, 们, SEP], [SEP], [SIZE, 21, SEP]]


def test_rows_without_special_tokens():
    """A vocabulary of letters only, as a character model has it: nothing is put around a sample."""
    plain = Vocabulary(SIZE, None, None, None, np.zeros(SIZE, bool), np.zeros(SIZE, bool), np.empty(0, int))
    made = rows(Causal(plain).batch(SAMPLES, Scripted()))
    assert (made["ids"], made["labels"]) == (SENTENCE, [*SENTENCE[1:], -1])
    made = rows(Reverse(plain).batch(SAMPLES, Scripted()))
    assert (made["ids"], made["labels"]) == (SENTENCE, [-1, *SENTENCE[:-1]])
    shuffled = Permutation(plain, part=1, two_streams=False).batch(SAMPLES, Scripted(order=ORDER[1:-1]))
    assert shuffled.ids.tolist() == [[欢, 你, 北, 们, 迎, 京]]
    assert shuffled.labels.tolist() == [[你, 北, 们, 迎, 京, -1]]  # nothing is known before 欢
