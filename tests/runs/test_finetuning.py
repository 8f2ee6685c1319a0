"""What a run on records decides for itself: which of them it holds out."""

from __future__ import annotations

from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from allmask.data import Record
from allmask.runs.finetuning import divided
from tests import tiny


def source(record: Record) -> str:
    return record.fields["source"]


@given(st.lists(st.sampled_from("abcdefghij"), min_size=1, max_size=40), st.floats(0, 0.99), st.randoms())
def test_equal_texts_are_on_one_side_in_any_order(texts: list[str], share: float, rng):
    records = [Record({"source": text, "number": number}, "") for number, text in enumerate(texts)]
    train, held_out = divided(records, share, source)
    assert train and sorted(r.fields["number"] for r in (*train, *held_out)) == list(range(len(texts)))
    assert not {*map(source, train)} & {*map(source, held_out)}
    others = rng.sample(records, len(records))
    assert {*map(source, divided(others, share, source)[0])} == {*map(source, train)}


def test_about_the_share_is_held_out():
    records = [Record({"source": str(number)}, "") for number in range(10_000)]
    held_out = len(divided(records, 0.1, source)[1])
    assert 900 < held_out < 1100  # three standard deviations
    assert not divided(records, 0.0, source)[1]


def test_a_run_without_held_out_records_takes_some(cli, tmp_path: Path):
    bert = tiny.bert(tmp_path / "bert")
    data = tiny.write_jsonl(tmp_path / "data.jsonl", tiny.english(150))
    words = ("finetune", bert, "--data", data, "--max-target", 8, "--steps", 2)
    ran = cli(*words, "--out", tmp_path / "run")
    assert ran.code == 0, ran.err
    (said,) = (line for line in ran.err.splitlines() if line.startswith("data: "))
    learnt, held_out = (int(word) for word in said.split() if word.isdigit())
    assert learnt + held_out == 150 and 5 <= held_out <= 30
    assert "rouge_l" in ran.out
    ran = cli(*words, "--held-out", 0, "--out", tmp_path / "all")
    assert ran.code == 0 and "data: 150 to learn from, 0 held out" in ran.err and "nothing is held out" in ran.err
