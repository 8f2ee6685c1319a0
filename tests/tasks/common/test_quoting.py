"""Quotations stand in what is read of their text, word for word, in English and Chinese."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from allmask.data import Record
from allmask.tasks.common.quoting import most_telling, quotations, sentences


def test_sentences_of_a_text():
    text = "Masks decide every role. Why? Because they say who sees whom: an order, and no more.\nThat is all of it."
    assert sentences(text, 100) == [
        "Masks decide every role.", "Because they say who sees whom:", "an order, and no more.", "That is all of it.",
    ]  # fmt: skip


def test_chinese_sentences_end_with_commas_too():
    assert sentences("北京欢迎你，有勇气就会有奇迹。好！BERT 也会写字；不多", 100) == [
        "北京欢迎你，", "有勇气就会有奇迹。", "BERT 也会写字；",
    ]  # fmt: skip


def test_chinese_with_western_stops():
    assert sentences("用消去法建立关系,提出一种(SOS)方法.结果表明,它收敛更快.", 100) == [
        "用消去法建立关系,", "提出一种(SOS)方法.", "结果表明,", "它收敛更快.",
    ]  # fmt: skip


def test_what_is_cut_off_is_not_quoted():
    text = "One two three four. " * 30
    assert sum(len(part.split()) for part in sentences(text, 12)) == 8  # twelve tokens are about eight words
    assert "".join(sentences("白切鸡。" * 30, 10)) == "白切鸡。白切鸡。"  # a stop counts as a word


def test_the_most_telling_sentences_share_most_with_the_rest():
    text = "We like tea. The mask decides who reads whom. A mask is an order. It is late."
    tea, decides, order, late = sentences(text, 100)
    # shared with the rest: nothing; "mask"; "mask" and "is"; "is". Of four sentences two are a third, rounded up.
    assert most_telling([tea, decides, order, late], text) == [order, decides]
    assert most_telling(["早安啊。", "蒸白切鸡，", "白切鸡，"], "早安啊。蒸白切鸡，白切鸡，") == ["蒸白切鸡，"]
    assert most_telling([], "") == []


def test_telling_quotations_are_quotations():
    records = [Record({"source": "We like tea. The mask is an order. A mask is a value.", "target": "t"}, "a:1")] * 20
    made = quotations(records, 64, random.Random(0))
    assert {record.fields["target"] for record in made} == {"The mask is an order."}


def test_each_record_once_with_its_own_words():
    text = "The text {0} is a text. The number {0} is a number. We like tea. It snows today."
    records = [Record({"source": text.format(n), "target": "t"}, f"a:{n}") for n in range(50)]
    records.append(Record({"source": "Too short", "target": "t"}, "a:50"))
    made = quotations(records, 64, random.Random(0))
    assert [record.where for record in made] == [f"a:{n}" for n in range(50)]
    assert all(record.fields["target"] in record.fields["source"] for record in made)
    drawn = {record.fields["target"][:8] for record in made}
    assert drawn == {"The text", "The numb"}  # the telling half, both of them
    assert quotations(records, 64, random.Random(0)) == made


@given(st.text(alphabet="ab .!?。，白\n", max_size=60), st.integers(1, 40))
def test_a_quotation_is_a_part_of_its_text(text: str, tokens: int):
    for part in sentences(text, tokens):
        assert part in text and part == part.strip()
