"""With a cache the result is that without one: UniLM, GPT-2, ragged batches, beams; and texts are not copied."""

from __future__ import annotations

from dataclasses import replace
from functools import cache, partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from allmask.decoding import Decoding, MaskWriter, generate
from allmask.errors import UsageError
from allmask.mask import Mask
from allmask.nn.beam_cache import BeamLayout
from allmask.nn.cache import Cache
from tests.decoding.references import RecomputeWriter, assert_same, assert_same_at_any_time, close, tiny

END = (3,)
PROMPTS = [[2, 9, 7, 11, 3], [2, 4, 3], [2, 8, 8, 20, 31, 6, 3], [2, 9, 7, 11, 3], [5]]
MASKS = {
    "UniLM": ("bert", None),
    "GPT-2": ("gpt2", None),
    "BERT, left to right": ("bert", Mask.causal),
    "GPT-2, its prompt read both ways": ("gpt2", Mask.bidirectional),
    "GPT-2, a window": ("gpt2", partial(Mask.causal, window=3)),
    "RoBERTa": ("roberta", None),
    "ALBERT": ("albert", None),
    "RoFormer": ("roformer", None),
    "NEZHA": ("nezha", None),
}
RULES = {
    "greedy": Decoding(end=END, max_new=7),
    "beams": Decoding(end=END, max_new=7, beams=4, n_best=4, length_penalty=0.6),
    "beams without repetition": Decoding(end=END, max_new=7, beams=3, n_best=2, no_repeat_ngram=2, min_new=2),
    "samples": Decoding(end=END, max_new=7, sample=True, n_best=2, temperature=0.5),
}


@cache
def reference_of(name: str) -> RecomputeWriter:
    family, mask = MASKS[name]
    return RecomputeWriter(tiny(family), mask)


@pytest.mark.parametrize("rules", RULES)
@pytest.mark.parametrize("name", MASKS)
def test_cached_equals_no_cache(name, rules):
    slow = reference_of(name)
    found = generate(MaskWriter(slow.model, MASKS[name][1]), PROMPTS, RULES[rules])
    assert_same(found, generate(slow, PROMPTS, RULES[rules]))


@pytest.mark.parametrize("family", ["bert", "gpt2"])
@pytest.mark.parametrize("rules", RULES)
def test_a_text_does_not_depend_on_its_batch(family, rules):
    """In single precision, as people use it: alone, in any company, in any order."""
    writer = MaskWriter(tiny(family, dtype=torch.float32))
    together = generate(writer, PROMPTS, RULES[rules])
    assert_same([generate(writer, [prompt], RULES[rules])[0] for prompt in PROMPTS], together)
    assert_same(generate(writer, PROMPTS[::-1], RULES[rules]), together[::-1])
    assert_same(generate(writer, PROMPTS[:2], RULES[rules]), together[:2])


@settings(max_examples=25)
@given(
    st.sampled_from(list(MASKS)),
    st.lists(st.lists(st.integers(0, 39), min_size=1, max_size=8), min_size=1, max_size=4),
    st.data(),
)
def test_any_rows_at_any_time(name, prompts, data):
    """Rows repeated, dropped and reordered at will: logits as if each were read alone from the beginning."""
    slow = reference_of(name)
    writer = MaskWriter(slow.model, MASKS[name][1])
    assert_same_at_any_time(writer, slow, prompts, data, steps=4)


@pytest.mark.parametrize("family", ["bert", "gpt2"])
def test_a_score_is_what_training_sees(family):
    """One pass over prompt and text under the training mask, each token predicted by the one before it."""
    model, rules = tiny(family), RULES["beams"]
    for prompt, found in zip(PROMPTS, generate(MaskWriter(model), PROMPTS, rules), strict=True):
        for one in found:
            written = [*one.tokens, *(END if one.finished else ())]
            ids = torch.tensor([[*prompt, *written]])
            is_target = torch.arange(ids.shape[1])[None] >= len(prompt)
            mask = Mask.prefix(is_target) if family == "bert" else Mask.causal(torch.ones_like(is_target))
            segments = is_target.long() if family == "bert" else None
            table = model(ids, mask, segments=segments).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
            total = table.gather(1, torch.tensor(written)[:, None]).sum().item()
            assert close(one.log_probability, total)
            assert close(one.score, total / len(written) ** rules.length_penalty)


def test_new_tokens_have_the_second_segment():
    model, rules = tiny("bert"), RULES["greedy"]
    texts = {segments: generate(MaskWriter(model, segments=segments), PROMPTS, rules) for segments in [(0, 1), (0, 0)]}
    assert generate(MaskWriter(model), PROMPTS, rules) == texts[0, 1] != texts[0, 0]


def test_the_second_answer_of_a_chat_is_written_under_turns():
    """Cached, turn by turn or the history at once: the result of one pass over the whole chat."""
    model = tiny("bert")
    chat, is_target = [2, 9, 7, 11, 12, 3, 8, 20], torch.tensor([[0, 0, 0, 1, 1, 0, 0, 0]]).bool()
    writer = MaskWriter(model, lambda valid: Mask.turns(is_target, valid), segments=(0, 0))
    [[best]] = generate(writer, [chat], Decoding(max_new=4))
    ids = torch.tensor([[*chat, *best.tokens]])
    whole = Mask.turns(torch.cat([is_target, torch.ones(1, 4, dtype=torch.bool)], 1))
    table = model(ids, whole).logits[0, len(chat) - 1 : -1].log_softmax(-1)
    total = table.gather(1, torch.tensor(best.tokens)[:, None]).sum().item()
    assert best.log_probability == pytest.approx(total, abs=1e-5)
    assert list(best.tokens) == table.argmax(-1).tolist()
    cache, parts = Cache(), []
    for start, stop in ((0, 3), (3, 4), (4, 5), (5, 8), (8, 9), (9, 12)):  # sources at once, targets one by one or not
        out = model(ids[:, start:stop], whole[:, start:stop], cache=cache)
        cache, parts = out.cache, [*parts, out.hidden]
    torch.testing.assert_close(torch.cat(parts, 1), model(ids, whole).hidden, atol=1e-9, rtol=0)
    with pytest.raises(UsageError, match="cache: a new token is visible"):
        first = model(ids[:, :1], whole[:, :1], cache=Cache()).cache
        model(ids[:, 1:3], whole[:, 1:3], cache=first)


# ---- what is shared ------------------------------------------------------------------------------------------


def addresses(state):
    return [x.data_ptr() for layer in state.layers for x in layer.text]


def size(state):
    """Bytes of all tensors a state holds, each counted once."""
    tensors = [x for layer in state.layers for part in (layer.text, layer.own) for x in part]
    storages = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in tensors}
    return sum(storages.values())


def test_beams_share_the_keys_and_values_of_their_text():
    writer = MaskWriter(tiny("bert"))
    _, one = writer.begin([PROMPTS[2], PROMPTS[0]])
    four = one.select(torch.tensor([0, 0, 0, 0, 1, 1, 1, 1]))
    for step in range(3):
        _, one = writer.step(torch.tensor([7, 8]), one)
        _, four = writer.step(torch.arange(8), four.select(torch.tensor([1, 0, 0, 3, 7, 7, 4, 5])))
        assert addresses(four) == addresses(one)
        own = 8 * 3 * 2 * 16 * (step + 1)  # bytes of a float64, layers, keys and values, width, tokens
        assert size(four) - size(one) == (8 - 2) * own


def test_no_step_makes_a_tensor_as_large_as_one_copy_of_a_text_per_beam():
    class Largest(TorchDispatchMode):
        largest = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            made = [x for x in tree_leaves(out) if isinstance(x, torch.Tensor) and x.is_floating_point()]
            self.largest = max([self.largest, *(x.numel() for x in made)])
            return out

    writer = MaskWriter(tiny("bert"))
    _, state = writer.begin([list(range(20))])
    with torch.no_grad(), Largest() as seen:
        writer.step(torch.arange(16), state.select(torch.zeros(16, dtype=torch.long)))
    assert seen.largest < 16 * 20 * 16 / 4  # beams × tokens × width; scores are beams × tokens × heads


def test_texts_that_ended_are_let_go_when_they_are_half():
    writer = MaskWriter(tiny("gpt2"))
    _, state = writer.begin([[1, 2]] * 8)
    texts = lambda state: state.layers[0].text.keys.shape[0]  # noqa: E731
    five = state.select(torch.arange(5))
    assert texts(five) == 8 and addresses(five) == addresses(state)
    four = state.select(torch.tensor([7, 1, 3, 5]))
    assert texts(four) == 4
    again, _ = writer.step(torch.tensor([4, 4, 4, 4]), four)
    before, _ = writer.step(torch.tensor([4] * 8), state)
    torch.testing.assert_close(again, before[[7, 1, 3, 5]], atol=1e-12, rtol=0)


@settings(max_examples=100)
@given(st.lists(st.integers(0, 4), min_size=1, max_size=12))
def test_the_grid_of_a_fan_holds_every_row_once(owner):
    fan = BeamLayout.of(torch.tensor(owner), 5)
    rows = torch.arange(1, len(owner) + 1)
    grid = fan.spread(rows)
    assert torch.equal(fan.gather(grid), rows)
    for text in range(5):
        mine = [row + 1 for row, its in enumerate(owner) if its == text]
        assert sorted(x for x in grid[text].tolist() if x) == mine


# ---- limits and mistakes -------------------------------------------------------------------------------------


@pytest.mark.parametrize("beams", [1, 3])
def test_a_text_ends_where_the_positions_end(beams):
    """24 positions: a prompt of 20 has room for 5 more tokens, the last of which is never read."""
    writer = MaskWriter(tiny("gpt2"))
    found = generate(writer, [[1] * 20, [1] * 24, [1]], Decoding(max_new=8, beams=beams))
    assert [len(one.tokens) for [one] in found] == [5, 1, 8]
    with pytest.raises(UsageError, match="prompt 1 has 25 tokens: the model has no room"):
        generate(writer, [[1], [1] * 25], Decoding())


@pytest.mark.parametrize(
    "prompt, words",
    [([], "prompt 1 is empty"), ([1, 40], "prompt 1: token 40 is not in the vocabulary of 40"), ([-1], "token -1")],
)
def test_prompts_that_cannot_be_read_are_an_error(prompt, words):
    with pytest.raises(UsageError, match=words):
        generate(MaskWriter(tiny("bert")), [[1], prompt], Decoding())


def test_a_body_without_a_head_cannot_write():
    model = tiny("bert")
    model.lm_head = None
    with pytest.raises(UsageError, match="no lm_head"):
        generate(MaskWriter(model), [[1]], Decoding())


def test_a_token_the_text_should_have_seen_is_refused():
    """The cache of a branched text is checked like any other: order decides what may come later."""
    model = tiny("bert")
    _, state = MaskWriter(model).begin([[1, 2, 3]])
    sibling = replace(state.mask[:, :1], position=torch.tensor([[3]]))  # of order 0, as old as the text
    with pytest.raises(UsageError, match="no longer valid"):
        model.body.step(torch.tensor([[4]]), sibling, state)
