"""A model that reads from right to left writes leftwards: the prompt is the end of the text."""

from __future__ import annotations

from dataclasses import replace
from functools import cache, partial

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from allmask import presets
from allmask.decoding import Decoding, MaskWriter, generate, stream
from allmask.decoding.fast.engines import writer_for
from allmask.errors import UsageError
from allmask.mask import Mask
from allmask.model import Model
from tests.decoding.references import CONFIGS, SMALL, Forgetful, assert_same, assert_same_at_any_time, scattered, tiny
from tests.decoding.test_writers import PROMPTS, RULES

XLNET = replace(presets.xlnet_tiny(), **SMALL)
SINUSOIDAL = replace(CONFIGS["gpt2"], position_kind="sinusoidal")
ELMO = replace(presets.elmo_tiny(), vocab_size=40, width=16, ffn_width=16)
LENGTH = 20


def model_of(config) -> Model:
    return scattered(config).double()


class RecomputeLeftwards(Forgetful):
    """No cache: reads the whole text at every step, in reading order, under Mask.reverse."""

    def __init__(self, model: Model, mask=Mask.reverse, length: int = LENGTH):
        self.model, self.mask, self.length = model, mask, length

    def room(self, prompt):
        return self.length - len(prompt) + 1

    def logits(self, prompt, rows):
        ids = torch.tensor([[*reversed(written), *prompt] for written in rows])
        second = int(self.model.config.segments == 2)
        segments = second * (torch.arange(ids.shape[1]) < ids.shape[1] - len(prompt)).long()
        positions = torch.arange(ids.shape[1]) + self.length - ids.shape[1]
        mask = self.mask(torch.ones_like(ids, dtype=torch.bool))
        return self.model(ids, mask, segments=segments.expand_as(ids), positions=positions).logits[:, 0]


CASES = {
    "BERT": (CONFIGS["bert"], Mask.reverse),
    "GPT-2": (CONFIGS["gpt2"], Mask.reverse),
    "a window": (CONFIGS["gpt2"], partial(Mask.reverse, window=3)),
    "sinusoidal": (SINUSOIDAL, Mask.reverse),
    "XLNet": (XLNET, Mask.reverse),
    "ELMo": (ELMO, Mask.reverse),
    **{name: (CONFIGS[name], Mask.reverse) for name in ("roberta", "roformer", "nezha")},
}


@cache
def reference_of(name: str) -> RecomputeLeftwards:
    config, mask = CASES[name]
    return RecomputeLeftwards(model_of(config), mask)


@pytest.mark.parametrize("rules", RULES)
@pytest.mark.parametrize("name", CASES)
def test_cached_equals_no_cache(name, rules):
    config, mask = CASES[name]
    prompts = PROMPTS[:4] if name == "ELMo" else PROMPTS
    slow = reference_of(name)
    segments = (0, 0) if config.segments == 3 else None  # XLNet has no second segment for what is written
    writer = MaskWriter(slow.model, mask, segments, max_length=LENGTH)
    assert writer.leftwards
    assert_same(generate(writer, prompts, RULES[rules]), generate(slow, prompts, RULES[rules]))


@settings(max_examples=20, deadline=None)
@given(st.lists(st.lists(st.integers(0, 39), min_size=1, max_size=8), min_size=1, max_size=4), st.data())
def test_any_rows_at_any_time(prompts, data):
    slow = reference_of("BERT")
    writer = MaskWriter(slow.model, Mask.reverse, max_length=LENGTH)
    assert_same_at_any_time(writer, slow, prompts, data, steps=3)


def test_a_trained_model_writes_what_stands_before_the_prompt():
    """Texts are runs of the alphabet, a b c d …; so before "k l" stands "… i j"."""
    rng = torch.Generator().manual_seed(0)
    sizes = {"vocab_size": 30, "width": 32, "ffn_width": 64, "layers": 1, "max_positions": 8}
    model = Model.fresh(replace(presets.bert_tiny(), **sizes, dropout=0.0, attention_dropout=0.0), ["lm"], rng)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(80):
        ids = torch.randint(0, 22, (32, 1), generator=rng) + torch.arange(8)
        logits = model(ids, Mask.reverse(torch.ones_like(ids, dtype=torch.bool))).logits
        loss = F.cross_entropy(logits[:, 1:].flatten(0, 1), ids[:, :-1].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    model.eval()
    for make in (partial(MaskWriter, segments=(0, 0)), partial(writer_for, precision="fp32", segments=(0, 0))):
        writer = make(model, mask=Mask.reverse)
        [[best]] = generate(writer, [[12, 13]], Decoding(max_new=5))
        assert list(best.tokens) == [11, 10, 9, 8, 7] == list(stream(writer, [12, 13], Decoding(max_new=5)))
        assert writer.joined([12, 13], best.tokens) == [7, 8, 9, 10, 11, 12, 13]


def test_the_whole_text_in_reading_order():
    model = tiny("bert")
    assert MaskWriter(model).joined([1, 2], (3, 4)) == [1, 2, 3, 4]
    assert MaskWriter(model, Mask.reverse).joined([1, 2], (3, 4)) == [4, 3, 1, 2]


def test_there_is_room_for_as_many_tokens_as_positions_are_left():
    model = tiny("bert")
    assert MaskWriter(model, Mask.reverse).room([1, 2, 3]) == 24 - 3 + 1
    assert MaskWriter(model, Mask.reverse, max_length=10).room([1, 2, 3]) == 10 - 3 + 1
    assert MaskWriter(model, max_length=10).room([1, 2, 3]) == 24 - 3 + 1
    written = generate(MaskWriter(model, Mask.reverse, max_length=10), [[1, 2, 3]], Decoding(max_new=99))[0][0]
    assert len(written.tokens) == 8


def test_a_direction_that_cannot_be_known_is_refused():
    with pytest.raises(UsageError, match="from one token"):
        MaskWriter(model_of(ELMO), Mask.reverse).begin([[7]])
    with pytest.raises(UsageError, match="from right to left"):
        MaskWriter(tiny("bert"), lambda valid: Mask.permutation(torch.tensor([[2, 1, 0]]), valid)).begin([[7, 8, 9]])
    with pytest.raises(UsageError, match="expected a function"):
        MaskWriter(tiny("bert"), Mask.reverse(torch.ones(1, 3, dtype=torch.bool)))
