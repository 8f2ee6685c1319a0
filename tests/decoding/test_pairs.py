"""An encoder–decoder writes the same with and without a cache; in any batch, with any search."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from allmask import presets
from allmask.decoding import Decoding, PairWriter, generate, stream
from allmask.errors import UsageError
from allmask.mask import Mask
from allmask.model import Model
from tests.decoding.references import Forgetful, assert_same, assert_same_at_any_time, scattered

SMALL = {
    "vocab_size": 40,
    "width": 16,
    "heads": 2,
    "ffn_width": 32,
    "layers": 2,
    "decoder_layers": 2,
    "max_positions": 24,
}
CONFIGS = {
    "2017": replace(presets.transformer_base(), **SMALL, start_token=2),
    "T5": replace(presets.t5_v1_1_small(), **SMALL, head_width=6, buckets=8, bucket_distance=6),
}
END = (3,)
PROMPTS = [[2, 9, 7, 11, 3], [4, 3], [2, 8, 8, 20, 31, 6, 3], [2, 9, 7, 11, 3], [5]]
RULES = {
    "greedy": Decoding(end=END, max_new=8),
    "beams": Decoding(end=END, max_new=8, beams=4, n_best=4, length_penalty=0.6),
    "samples": Decoding(end=END, max_new=8, sample=True, n_best=2, temperature=0.5),
}


def tiny(name, dtype=torch.float64):
    return scattered(CONFIGS[name]).to(dtype)


class RecomputePairs(Forgetful):
    """No cache: reads source and target at every step."""

    def __init__(self, model, start=None):
        self.model, self.begins = model, [model.config.start_token] if start is None else start

    def room(self, prompt):
        return 1 << 20

    def logits(self, prompt, rows):
        ids = torch.tensor([[*prompt, *written] for written in rows])
        mask = Mask.encoder_decoder((torch.arange(ids.shape[1]) >= len(prompt)).expand_as(ids))
        return self.model(ids, mask).logits[:, -1]


@cache
def reference_of(name: str) -> RecomputePairs:
    return RecomputePairs(tiny(name))


@pytest.mark.parametrize("rules", RULES)
@pytest.mark.parametrize("name", CONFIGS)
def test_cached_equals_no_cache(name, rules):
    slow = reference_of(name)
    found = generate(PairWriter(slow.model), PROMPTS, RULES[rules])
    assert_same(found, generate(slow, PROMPTS, RULES[rules]))


@pytest.mark.parametrize("rules", RULES)
@pytest.mark.parametrize("name", CONFIGS)
def test_a_text_does_not_depend_on_its_batch(name, rules):
    writer = PairWriter(tiny(name, torch.float32))
    together = generate(writer, PROMPTS, RULES[rules])
    assert_same([generate(writer, [prompt], RULES[rules])[0] for prompt in PROMPTS], together)
    assert_same(generate(writer, PROMPTS[::-1], RULES[rules]), together[::-1])


@settings(max_examples=15, deadline=None)
@given(
    st.sampled_from(list(CONFIGS)),
    st.lists(st.lists(st.integers(0, 39), min_size=1, max_size=8), min_size=1, max_size=4),
    st.lists(st.integers(0, 39), min_size=1, max_size=3),
    st.data(),
)
def test_any_rows_at_any_time(name, prompts, start, data):
    """Rows repeated, dropped and reordered at will, from any beginning: logits as if each were read alone."""
    model = tiny(name)
    writer, slow = PairWriter(model, start), RecomputePairs(model, start)
    assert_same_at_any_time(writer, slow, prompts, data, steps=3)


def test_sources_are_stored_once_for_all_their_rows():
    writer = PairWriter(tiny("2017"))
    _, state = writer.begin([PROMPTS[2], PROMPTS[0]])
    kept = [layer.text.keys.data_ptr() for layer in state.memory.layers]
    for _ in range(3):
        rows = torch.tensor([1, 0, 0, 1, 0])[: len(state.mask) + 3] % len(state.mask)
        _, state = writer.step(torch.arange(len(rows)), state.select(rows))
        assert [layer.text.keys.data_ptr() for layer in state.memory.layers] == kept


def test_a_stream_is_the_greedy_text():
    writer = PairWriter(tiny("T5"))
    [[best]] = generate(writer, PROMPTS[:1], RULES["greedy"])
    assert tuple(stream(writer, PROMPTS[0], RULES["greedy"])) == best.tokens


def test_room_is_that_of_the_decoder():
    model = Model.fresh(replace(CONFIGS["2017"], position_kind="learned"), ["lm"]).eval()
    assert PairWriter(model).room([1] * 24) == 24 and PairWriter(model, [2, 4]).room([1]) == 23
    [[long]] = generate(PairWriter(model), [[5] * 24], Decoding(max_new=50))
    assert len(long.tokens) == 24
    with pytest.raises(UsageError, match="no room"):
        generate(PairWriter(model), [[5] * 25], Decoding())
    for name in ("T5", "2017"):  # neither relative nor sinusoidal positions have a last one
        [[beyond]] = generate(PairWriter(tiny(name)), [[5] * 30], Decoding(max_new=30))
        assert len(beyond.tokens) == 30


def test_clear_refusals():
    with pytest.raises(UsageError, match="prompt 1 is empty"):
        generate(PairWriter(tiny("T5")), [[1], []], Decoding())
    model = tiny("2017")
    model.config = replace(model.config, start_token=None)
    with pytest.raises(UsageError, match="no start_token"):
        PairWriter(model)
