"""The comparison of translators is fair: the peer learns and is judged by the same rows; sounds are counted rightly."""

from __future__ import annotations

from itertools import islice
from pathlib import Path

import common
import phonemes
import pytest
import torch
import translate
from hypothesis import given
from hypothesis import strategies as st

from allmask.data import Record, pack
from allmask.nn.relative_attention import sinusoids
from allmask.runs.fresh import Fresh
from allmask.tasks.common.writing import tokenizer_of
from allmask.tasks.seq2seq import Translate
from allmask.training import Settings
from allmask.training.loop import Trainer
from tests import tiny

RECORDS = [Record(row, f"rows:{number}") for number, row in enumerate(tiny.english(20), 1)]


@pytest.fixture(scope="module")
def model():
    return Fresh(layers=1, width=16, heads=2, ffn_width=32, vocab_size=60).model(RECORDS, 1)


def test_both_sides_read_the_same(model):
    task = Translate().fitted(model)
    examples = task.examples(tokenizer_of(model), RECORDS[:5])
    inputs, labels = translate.padded(examples, 0)
    batch = pack(examples)
    source = batch.mask.order == 0
    assert inputs["attention_mask"].sum() == source.sum() and inputs["decoder_attention_mask"].sum() == (~source).sum()
    assert sorted(inputs["input_ids"][inputs["attention_mask"] > 0].tolist()) == sorted(batch.ids[source].tolist())
    assert sorted(labels[labels != -100].tolist()) == sorted(batch.labels[batch.labels >= 0].tolist())
    for row in range(len(examples)):  # what is read is what was to be predicted, a place later
        kept = labels[row] != -100
        read = inputs["decoder_input_ids"][row][kept]
        assert read[0] == tokenizer_of(model).start_id and torch.equal(read[1:], labels[row][kept][:-1])


def test_both_sides_see_the_same_batches(model, tmp_path: Path):
    work = Translate().fitted(model).workload(model, RECORDS)
    how = Settings(steps=9, batch_tokens=60, seed=5)
    trainer = Trainer(model, work, how, tmp_path)
    ours = [numbers for _, numbers in islice(trainer._plan_from(0), 12)]
    assert list(islice(translate.batches_of(work.lengths, how), 12)) == ours


def test_the_peer_is_of_the_same_size(model):
    from transformers import MarianMTModel

    made = MarianMTModel(translate.marian_config(model, 0.1))
    count = sum(parameter.numel() for parameter in made.parameters() if parameter.requires_grad)
    assert count == sum(parameter.numel() for parameter in model.parameters())
    assert made.config.decoder_start_token_id == model.config.start_token


@torch.no_grad()
def test_the_peer_begins_with_our_weights(model):
    """With our waves for positions, which it orders in another way, it says the same."""
    from transformers import MarianMTModel

    made = MarianMTModel(translate.marian_config(model, 0.1)).eval()
    translate.copy_weights(model, made)
    examples = Translate().fitted(model).examples(tokenizer_of(model), RECORDS[:3])
    inputs, labels = translate.padded(examples, made.config.pad_token_id)
    other = made(**inputs).logits[labels != -100]
    for stack in (made.model.encoder, made.model.decoder):
        stack.embed_positions.weight.copy_(sinusoids(*stack.embed_positions.weight.shape))
    theirs = made(**inputs).logits[labels != -100]
    batches = [pack([example]) for example in examples]
    ours = torch.cat([model.eval()(one.ids, one.mask).logits[one.labels >= 0] for one in batches])
    torch.testing.assert_close(theirs, ours, atol=1e-5, rtol=0)
    assert (other - ours).abs().max() > 1e-3


def test_a_curve_counts_training_alone(tmp_path: Path):
    rows = [{"step": 1, "tokens": 600, "speed": 10.0}, {"step": 2, "tokens": 1200, "speed": 10.0}]
    tiny.write_jsonl(tmp_path / "metrics.jsonl", [*rows, {"step": 2, "eval_bleu": 7.0}, {**rows[0], "step": 3}])
    assert common.curve_of(tmp_path, "bleu") == [(2, 3.0, 7.0), (3, 4.0, None)]


# ---- sounds ----------------------------------------------------------------------------------------------------


def test_errors_are_counted_against_the_nearest_way():
    words = {"read": ["R EH D", "R IY D"], "cat": ["K AE T"], "oh": ["OW"]}
    found = phonemes.errors({"read": "R IY D", "cat": "K AE T S", "oh": ""}, words)
    assert found == {"word_error": pytest.approx(200 / 3), "sound_error": pytest.approx(100 * 2 / 7)}


@given(st.text("ab", max_size=5), st.text("ab", max_size=5))
def test_distances(a: str, b: str):
    def slow(a: str, b: str) -> int:
        if not a or not b:
            return len(a) + len(b)
        return min(slow(a[1:], b) + 1, slow(a, b[1:]) + 1, slow(a[1:], b[1:]) + (a[0] != b[0]))

    assert phonemes.distance(a, b) == slow(a, b)


def test_words_are_held_out_as_a_whole(tmp_path: Path):
    words = {f"word{number}": ["W ER D", "W AO D"] for number in range(2000)}
    parts = phonemes.split(words)
    assert sum(map(len, parts.values())) == 2000 and 60 < len(parts["test"]) < 140 and 60 < len(parts["dev"]) < 140
    phonemes.write_files(parts, tmp_path)
    rows = tiny.read_jsonl(tmp_path / "test.jsonl")
    assert len(rows) == 2 * len(parts["test"]) and rows[0]["source"].startswith("w o r d")
    assert phonemes.unstressed(["HH", "AH0", "L", "OW1"]) == "HH AH L OW"
