"""Fast writers write what `MaskWriter` writes: every engine, every search, any rows at any time; nothing is copied."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace
from functools import cache, partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from allmask import presets
from allmask.decoding import Decoding, MaskWriter, generate
from allmask.decoding.fast import engines
from allmask.decoding.fast.engines import FastWriter, TorchEngine, writer_for
from allmask.errors import CheckpointError, UsageError
from allmask.inference.compiled_layers import CompiledFeedForward
from allmask.kernels import build
from allmask.kernels.int8 import quantize, quantize_weight, smoothing_scale
from allmask.mask import Mask
from allmask.model import Model
from allmask.nn.cache import BeamCache
from tests.decoding.fast import AT_ONCE, ENGINES, LESS, RULES, assert_at_once_equals_step_by_step, frozen, with_engine
from tests.decoding.references import assert_same, assert_same_at_any_time, scattered
from tests.relatives import relatives

SMALL = {"vocab_size": 70, "width": 32, "heads": 2, "ffn_width": 48, "layers": 3, "max_positions": 200}
CONFIGS = {
    "bert": replace(presets.bert_base(), **SMALL),
    "gpt2": replace(presets.gpt2(), **SMALL),
    "rms": replace(presets.gpt2(), **SMALL, norm="rms", activation="relu", position_kind="sinusoidal", tied=False),
    **relatives(SMALL, "roberta", "albert"),
}
PROMPTS = [[2, 9, 7, 11, 3], [2, 4, 3], [*range(4, 69), 6, 3], [2, 9, 7, 11, 3], [5]]


def tiny(family: str = "bert", seed: int = 0) -> Model:
    return scattered(CONFIGS[family], seed)


shared = cache(tiny)  # models that no test changes


def fast(model: Model, engine: str, precision: str = "fp32", mask=None) -> FastWriter:
    slow = MaskWriter(frozen(model), mask)
    return with_engine(FastWriter, slow, model, engine, precision)


# ---- the same texts ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rules", RULES)
@pytest.mark.parametrize("family", CONFIGS)
@pytest.mark.parametrize("engine", ENGINES)
def test_fp32_writes_what_the_mask_writer_writes(engine, family, rules):
    found = generate(fast(shared(family, 4), engine), PROMPTS, RULES[rules])
    assert_same(found, slowly_written(family, rules))


@cache
def slowly_written(family, rules, mask=None):
    """By a model whose beams are further apart than fp32 rounds."""
    return generate(MaskWriter(shared(family, 4), mask), PROMPTS, RULES[rules])


@pytest.mark.parametrize("rules", AT_ONCE)
@pytest.mark.parametrize("family", CONFIGS)
def test_search_at_once_equals_step_by_step(family, rules, monkeypatch):
    writer = fast(shared(family, 4), "compiled", "int8")
    assert_at_once_equals_step_by_step(writer, AT_ONCE[rules], monkeypatch)


@pytest.mark.parametrize("rules", ["plain", "beams"])
def test_search_at_once_with_damaged_weights(rules):
    writer = fast(tiny(), "compiled", "int8")
    writer.engine.parts.head.scale.fill_(torch.nan)
    with pytest.raises(CheckpointError, match="NaN"):
        generate(writer, PROMPTS, AT_ONCE[rules])


@pytest.mark.parametrize("family", CONFIGS)
def test_embedding_in_c_is_that_of_torch(family):
    writer, tokens = fast(shared(family), "compiled", "int8"), torch.tensor([4, 69, 0])
    positions = torch.tensor([0, 7, 199])
    expected = writer.body.embedding(tokens, positions, torch.full_like(tokens, writer.slow.segments[1]))
    torch.testing.assert_close(writer.embedding(tokens, positions), expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("mask", [Mask.causal, Mask.bidirectional, Mask.reverse])
@pytest.mark.parametrize("engine", ENGINES)
def test_prompts_under_other_masks(engine, mask):
    found = generate(fast(shared("bert", 4), engine, mask=mask), PROMPTS, RULES["beams"])
    assert_same(found, slowly_written("bert", "beams", mask))


@pytest.mark.parametrize("engine", ENGINES)
@settings(max_examples=15)
@given(
    st.sampled_from(list(CONFIGS)),
    st.lists(st.lists(st.integers(0, 69), min_size=1, max_size=8), min_size=1, max_size=4),
    st.data(),
)
def test_any_rows_at_any_time(engine, family, prompts, data):
    """Rows repeated, dropped and reordered at will."""
    model = shared(family)
    writer, slow = fast(model, engine), MaskWriter(model)
    assert_same_at_any_time(writer, slow, prompts, data, steps=4, vocabulary=70, atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize("precision", ["fp32", *LESS])
@pytest.mark.parametrize("engine", ENGINES)
def test_a_state_may_be_continued_twice(engine, precision):
    writer = fast(tiny(), engine, precision)
    _, state = writer.begin(PROMPTS[:2])
    _, state = writer.step(torch.tensor([8, 9]), state)
    _, one = writer.step(torch.tensor([10, 11]), state)
    expected, _ = writer.step(torch.tensor([20, 21]), one)
    _, one = writer.step(torch.tensor([10, 11]), state)
    writer.step(torch.tensor([60, 61]), state)
    again, _ = writer.step(torch.tensor([20, 21]), one)
    assert torch.equal(again, expected)


# ---- less precision ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("precision", LESS)
@pytest.mark.parametrize("family", CONFIGS)
def test_the_compiled_step_computes_what_torch_computes(family, precision):
    model = shared(family)
    ours, theirs = fast(model, "compiled", precision), fast(model, "torch", precision)
    (a, mine), (b, other) = ours.begin(PROMPTS), theirs.begin(PROMPTS)
    for token in range(4):
        assert torch.cosine_similarity(a, b.float()).min() > 0.999
        tokens = torch.arange(5) + 10 * token
        (a, mine), (b, other) = ours.step(tokens, mine), theirs.step(tokens, other)


@pytest.mark.parametrize("precision", ["fp32", *LESS])
@pytest.mark.parametrize("family", ["bert", "gpt2"])
def test_no_row_depends_on_the_others(family, precision):
    """To the bit, in the compiled step: one row, and the same row among many."""
    writer = fast(shared(family), "compiled", precision)
    _, state = writer.begin([PROMPTS[2]])
    for rows in (1, 2, 5, 6, 7, 13):
        several = state.select(torch.zeros(rows, dtype=torch.long))
        alone, one = writer.step(torch.tensor([8]), state)
        together, many = writer.step(torch.arange(8, 8 + rows), several)
        assert torch.equal(together[0], alone[0])
        assert torch.equal(writer.step(torch.arange(rows), many)[0][0], writer.step(torch.tensor([0]), one)[0][0])


@pytest.mark.parametrize("precision", ["auto", "fp32", *LESS])
def test_a_text_does_not_depend_on_its_batch(precision):
    writer = writer_for(tiny(), precision)
    together = generate(writer, PROMPTS, RULES["beams"])
    alone = [generate(writer, [prompt], RULES["beams"])[0] for prompt in PROMPTS]
    assert_same(alone, together, tolerance=1e-4 if precision == "fp32" else 0.05)


@pytest.mark.parametrize("engine", ENGINES)
def test_int8_by_whole_numbers(engine):
    """GPT-2's output layer alone: bytes by the definition, products in Python's whole numbers."""
    model = tiny("gpt2")
    hidden = torch.randn(3, 32, generator=torch.Generator().manual_seed(0))
    weight = model.body.embedding.tokens.weight.detach()
    smoothing = smoothing_scale(model.body.norm, weight)  # evens out what the norm before it gives
    whole_weight, scale = quantize_weight(weight * smoothing)
    expected = torch.empty(3, 70)
    for row in range(3):
        for token in range(70):
            (x, by), (w, times) = quantize(hidden[row] * (1.0 / smoothing)), (whole_weight[token], scale[token])
            whole = sum(a * b for a, b in zip(x.tolist(), w.tolist(), strict=True))
            expected[row, token] = whole * by.item() * times.item()
    torch.testing.assert_close(fast(model, engine, "int8").engine.logits(hidden), expected, atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize("engine", ENGINES)
def test_queries_and_keys_do_not_change_the_bytes_of_values(engine):
    """Queries, keys and values read the same bytes, whose smoothing scale is that of the values."""
    model = tiny("gpt2")
    before = fast(model, engine, "int8").engine.parts.layers[0].qkv
    with torch.no_grad():
        model.body.layers[0].attention.query.weight[:, 3] *= 50.0
        model.body.layers[0].attention.key.weight[:, 5] *= 50.0
    after = fast(model, engine, "int8").engine.parts.layers[0].qkv
    assert torch.equal(after.input_scale, before.input_scale)
    assert torch.equal(after.scale[64:96], before.scale[64:96]) and not torch.equal(after.scale[:64], before.scale[:64])


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("family", CONFIGS)
def test_texts_are_fed_forward_as_rows_are(family, threads):
    """300 tokens at once, on some threads: for each what torch makes of it, and the argument is left alone."""
    model, before = tiny(family), torch.get_num_threads()
    packed = fast(model, "compiled", "int8").engine.parts.layers[1]
    feed = CompiledFeedForward(packed.expand, packed.contract, model.config.activation)
    part = TorchEngine(model, "int8").parts.layers[1]
    x = torch.randn(3, 100, 32, generator=torch.Generator().manual_seed(0))
    kept = x.clone()
    try:
        torch.set_num_threads(threads)
        found = feed(x)
    finally:
        torch.set_num_threads(before)
    assert torch.equal(x, kept)
    expected = part.contract(part.expand(x.flatten(0, 1))).view_as(x)
    assert torch.cosine_similarity(found, expected, dim=-1).min() > 0.9995
    assert torch.equal(feed(x[1, 7:8]), found[1, 7:8])


def test_bytes_of_a_row():
    whole, scale = quantize(torch.tensor([[0.5, -1.27, 0.006], [0.0, 0.0, 0.0]]))
    assert whole.tolist() == [[50, -127, 1], [0, 0, 0]]
    assert scale[:, 0].tolist() == pytest.approx([0.01, 0.0])


# ---- what is shared, what is let go --------------------------------------------------------------------------


@pytest.mark.parametrize("engine", ENGINES)
def test_beams_share_texts_and_move_nothing(engine):
    writer = fast(tiny(), engine)
    _, state = writer.begin([PROMPTS[2], PROMPTS[0]])
    texts = state.texts
    state = state.select(torch.tensor([0, 0, 0, 0, 1, 1, 1, 1]))
    _, state = writer.step(torch.arange(8), state)
    buffer = state.own.buffer.data_ptr()
    for _ in range(3):
        _, state = writer.step(torch.arange(8), state.select(torch.tensor([1, 0, 0, 3, 7, 7, 4, 5])))
        assert state.texts is texts
        assert state.own.buffer.data_ptr() == buffer
    assert state.path[0].tolist() == [1, 0, 1, 0]  # row 0 goes on from row 1, that from row 0, that from row 1


@pytest.mark.parametrize("engine", ENGINES)
def test_texts_that_ended_are_let_go_when_they_are_half(engine):
    writer = fast(tiny("gpt2"), engine)
    _, state = writer.begin([[1, 2], [3]] * 4)
    assert state.select(torch.arange(5)).texts is state.texts
    four = state.select(torch.tensor([7, 1, 4, 5]))
    assert len(four.texts.lengths) == 4
    again, _ = writer.step(torch.tensor([4, 4, 4, 4]), four)
    before, _ = writer.step(torch.tensor([4] * 8), state)
    torch.testing.assert_close(again, before[[7, 1, 4, 5]], atol=1e-5, rtol=0)


# ---- which engine --------------------------------------------------------------------------------------------


def test_a_window_is_written_by_the_mask_writer():
    model, mask = tiny("gpt2"), partial(Mask.causal, window=3)
    writer = writer_for(model, "fp32", mask)
    assert isinstance(writer.begin([[1, 2]])[1], BeamCache)
    assert_same(generate(writer, PROMPTS, RULES["beams"]), generate(MaskWriter(model, mask), PROMPTS, RULES["beams"]))


def test_a_norm_over_the_batch_is_not_for_engines():
    config = replace(CONFIGS["bert"], norm="batch")
    assert isinstance(writer_for(Model.fresh(config, ["lm"]).eval(), "fp32"), MaskWriter)


@pytest.mark.parametrize("precision", ["fp32", *LESS])
@pytest.mark.parametrize("family", relatives(SMALL))
def test_every_relative_of_bert_writes_in_every_precision(family, precision):
    """With an engine that computes it right, or without one."""
    model = scattered(relatives(SMALL)[family])
    writer, slow = writer_for(model, precision), MaskWriter(model)
    (a, mine), (b, other) = writer.begin(PROMPTS), slow.begin(PROMPTS)
    for token in range(3):
        assert torch.cosine_similarity(a.float(), b).min() > (0.99999 if precision == "fp32" else 0.99)
        tokens = torch.arange(5) + 10 * token
        (a, mine), (b, other) = writer.step(tokens, mine), slow.step(tokens, other)
    assert isinstance(writer, MaskWriter) == (family in ("roformer", "nezha"))


def test_without_the_compiled_step_torch_does_it(monkeypatch):
    monkeypatch.setattr(build, "library", lambda source, *choices: None)
    model = tiny()
    for precision in ("auto", "fp32", *LESS):
        writer = writer_for(model, precision)
        assert isinstance(writer.engine, TorchEngine)
        assert len(generate(writer, PROMPTS, RULES["greedy"])) == len(PROMPTS)


@pytest.mark.parametrize("able", [True, False])
def test_auto_is_bf16_only_where_it_is_native(monkeypatch, able):
    monkeypatch.setattr(build, "library", lambda source, *choices: None)
    monkeypatch.delenv("ALLMASK_ISA", raising=False)
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx512_bf16": able})
    writer, dtype = writer_for(tiny()), torch.bfloat16 if able else torch.float32
    assert writer.engine.dtype == dtype == writer.body.embedding.tokens.weight.dtype


def test_a_compiled_step_that_is_wrong_is_not_used(monkeypatch, caplog):
    model = tiny()
    if not engines.fits(model):
        pytest.skip("no compiled step on this machine")
    right = engines.CompiledEngine.step
    monkeypatch.setattr(engines.CompiledEngine, "step", lambda *args: right(*args).roll(1, 1))
    monkeypatch.setattr(engines, "_compiled_is_right", engines._compiled_is_right.__wrapped__)
    assert isinstance(writer_for(model).engine, TorchEngine)
    assert "differs from torch's" in caplog.text


@pytest.mark.parametrize("stacks", [1, 2])
def test_the_self_check_sees_attention(monkeypatch, caplog, stacks):
    """A step that computes all queries as zeros, in models with one stack or with two, is found out."""
    if not engines.fits(tiny()):
        pytest.skip("no compiled step on this machine")

    class Blind(engines.CompiledEngine):
        def __init__(self, model: Model, precision: str):
            model = deepcopy(model)
            for name, parameter in model.named_parameters():
                if "query" in name and bool(model.config.decoder_layers) == (stacks == 2):
                    torch.nn.init.zeros_(parameter)
            super().__init__(model, precision)

    monkeypatch.setattr(engines, "CompiledEngine", Blind)
    assert not engines._compiled_is_right.__wrapped__("fp32", stacks == 2)
    assert "in fp32 differs from torch's" in caplog.text


@pytest.mark.parametrize("width, heads", [(24, 2), (40, 1)])
def test_sizes_that_do_not_fill_registers(width, heads):
    model = Model.fresh(replace(CONFIGS["bert"], width=width, heads=heads), ["lm"], torch.Generator().manual_seed(0))
    assert isinstance(writer_for(model.eval(), "int8").engine, TorchEngine)


def test_wrong_arguments_raise_an_error():
    model = tiny()
    with pytest.raises(UsageError, match="precision is 'int4'; expected one of auto, fp32, bf16, int8"):
        writer_for(model, "int4")
    with pytest.raises(UsageError, match="prompt 1 is empty"):
        generate(writer_for(model), [[1], []], Decoding())
    model.lm_head = None
    with pytest.raises(UsageError, match="no lm_head"):
        writer_for(model)
