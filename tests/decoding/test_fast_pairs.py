"""A fast decoder of two stacks writes what `PairWriter` writes, and what it writes without a cache."""

from __future__ import annotations

import statistics
from dataclasses import replace
from functools import cache

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from allmask import presets
from allmask.decoding import Decoding, PairWriter, generate, stream
from allmask.decoding.fast import engines
from allmask.decoding.fast.engines import FastPairWriter, TorchEngine, pair_writer_for
from allmask.errors import UsageError
from allmask.kernels import build
from allmask.mask import Mask
from allmask.model import Model
from tests.decoding.fast import AT_ONCE, ENGINES, LESS, RULES, assert_at_once_equals_step_by_step, frozen, with_engine
from tests.decoding.references import Histories, assert_same, scattered

SMALL = {
    "vocab_size": 70,
    "width": 32,
    "heads": 2,
    "ffn_width": 48,
    "layers": 2,
    "decoder_layers": 3,
    "max_positions": 80,
}
T5 = {**SMALL, "head_width": 32, "buckets": 8, "bucket_distance": 6}  # heads together wider than the hidden states
CONFIGS = {
    "2017": replace(presets.transformer_base(), **SMALL, start_token=2),
    "pre-norm": replace(presets.transformer_base(), **SMALL, start_token=2, norm_place="pre", activation="gelu"),
    "T5": replace(presets.t5_small(), **T5),
    "T5 v1.1": replace(presets.t5_v1_1_small(), **T5),
}
PROMPTS = [[2, 9, 7, 11, 3], [4, 3], [*range(4, 69), 6, 3], [2, 9, 7, 11, 3], [5]]


def tiny(name: str = "2017", seed: int = 0) -> Model:
    return scattered(CONFIGS[name], seed)


shared = cache(tiny)  # models that no test changes


def fast(model: Model, engine: str, precision: str = "fp32", start=None) -> FastPairWriter:
    slow = PairWriter(frozen(model), start)
    return with_engine(FastPairWriter, slow, model, engine, precision)


# ---- the same texts ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rules", RULES)
@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("engine", ENGINES)
def test_fp32_writes_what_the_pair_writer_writes(engine, name, rules):
    found = generate(fast(shared(name, 4), engine), PROMPTS, RULES[rules])
    assert_same(found, slowly_written(name, rules))


@cache
def slowly_written(name, rules):
    return generate(PairWriter(shared(name, 4)), PROMPTS, RULES[rules])


@pytest.mark.parametrize("rules", ["no pair twice", "beams"])
@pytest.mark.parametrize("name", CONFIGS)
def test_search_at_once_equals_step_by_step(name, rules, monkeypatch):
    writer = fast(shared(name, 4), "compiled", "int8", start=[1, 5])
    assert_at_once_equals_step_by_step(writer, AT_ONCE[rules], monkeypatch)


@torch.no_grad()
def read_again(model, start, rows):
    """The next logits of each (source, written), by one pass over the whole of it alone."""
    found = []
    for prompt, written in rows:
        ids = torch.tensor([[*prompt, *start, *written]])
        mask = Mask.encoder_decoder(torch.arange(ids.shape[1])[None] >= len(prompt))
        found.append(model(ids, mask).logits[0, -1])
    return torch.stack(found)


@pytest.mark.parametrize("engine", ENGINES)
@settings(max_examples=15, deadline=None)
@given(
    st.sampled_from(list(CONFIGS)),
    st.lists(st.lists(st.integers(0, 69), min_size=1, max_size=8), min_size=1, max_size=4),
    st.lists(st.integers(0, 69), min_size=1, max_size=3),
    st.data(),
)
def test_any_rows_at_any_time_equal_no_cache(engine, name, prompts, start, data):
    """Rows repeated, dropped and reordered at will, from any beginning."""
    model = shared(name)
    writer, histories = fast(model, engine, start=start), Histories(tuple((tuple(p), ()) for p in prompts))
    logits, state = writer.begin(prompts)
    for _ in range(3):
        torch.testing.assert_close(logits, read_again(model, start, histories.rows), atol=1e-4, rtol=1e-5)
        rows = torch.tensor(data.draw(st.lists(st.integers(0, len(logits) - 1), min_size=1, max_size=6)))
        tokens = data.draw(st.lists(st.integers(0, 69), min_size=len(rows), max_size=len(rows)))
        logits, state = writer.step(torch.tensor(tokens), state.select(rows))
        chosen = zip(histories.select(rows).rows, tokens, strict=True)
        histories = Histories(tuple((prompt, (*written, token)) for (prompt, written), token in chosen))
    torch.testing.assert_close(logits, read_again(model, start, histories.rows), atol=1e-4, rtol=1e-5)


def test_a_stream_is_the_greedy_text():
    writer = fast(tiny("T5"), "compiled")
    [[best]] = generate(writer, PROMPTS[:1], RULES["greedy"])
    assert tuple(stream(writer, PROMPTS[0], RULES["greedy"])) == best.tokens


# ---- less precision ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("precision", LESS)
@pytest.mark.parametrize("name", CONFIGS)
def test_less_precision_is_near_and_both_engines_agree(name, precision):
    model = shared(name)
    writers = fast(model, "compiled", precision), fast(model, "torch", precision), pair_writer_for(model, precision)
    begun = [writer.begin(PROMPTS) for writer in writers]
    plain = fast(model, "torch")
    exact, slow = plain.begin(PROMPTS)
    for token in range(4):
        logits = [logits.float() for logits, _ in begun]
        assert torch.cosine_similarity(logits[0], logits[1]).min() > 0.999
        assert all(torch.cosine_similarity(found, exact).min() > 0.98 for found in logits)
        tokens = torch.arange(5) + 10 * token
        begun = [writer.step(tokens, state) for writer, (_, state) in zip(writers, begun, strict=True)]
        exact, slow = plain.step(tokens, slow)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("name", CONFIGS)
def test_a_large_feature_of_a_norm_costs_the_others_few_of_their_bytes(engine, name, monkeypatch):
    even, uneven = [], []
    for seed in range(3):
        model = tiny(name, seed)
        with torch.no_grad():
            for module in model.body.modules():
                if isinstance(module, torch.nn.LayerNorm | torch.nn.RMSNorm):
                    module.weight[7] = 20.0
        exact = fast(model, "torch").begin(PROMPTS)[0]
        even.append((fast(model, engine, "int8").begin(PROMPTS)[0] - exact).abs().mean().item())
        with monkeypatch.context() as patch:
            patch.setattr(engines, "smoothing_scale", lambda norm, weight: None)
            patch.setattr(engines, "smoothing_scales", lambda body, norm_place: {})
            uneven.append((fast(model, engine, "int8").begin(PROMPTS)[0] - exact).abs().mean().item())
    assert statistics.median(even) < 0.8 * statistics.median(uneven)


@pytest.mark.parametrize("precision", ["fp32", *LESS])
@pytest.mark.parametrize("name", ["2017", "T5 v1.1"])
def test_no_row_depends_on_the_others(name, precision):
    """To the bit, in the compiled step: one row, and the same row among many."""
    writer = fast(shared(name), "compiled", precision)
    _, state = writer.begin([PROMPTS[2]])
    for rows in (1, 2, 5, 6, 7, 13):
        several = state.select(torch.zeros(rows, dtype=torch.long))
        alone, one = writer.step(torch.tensor([8]), state)
        together, many = writer.step(torch.arange(8, 8 + rows), several)
        assert torch.equal(together[0], alone[0])
        assert torch.equal(writer.step(torch.arange(rows), many)[0][0], writer.step(torch.tensor([0]), one)[0][0])


@pytest.mark.parametrize("precision", ["auto", "fp32", *LESS])
@pytest.mark.parametrize("name", ["2017", "T5 v1.1"])
def test_a_text_does_not_depend_on_its_batch(name, precision):
    writer = pair_writer_for(shared(name), precision)
    together = generate(writer, PROMPTS, RULES["beams"])
    alone = [generate(writer, [prompt], RULES["beams"])[0] for prompt in PROMPTS]
    assert_same(alone, together, tolerance=1e-4 if precision == "fp32" else 0.05)
    assert_same(generate(writer, PROMPTS[::-1], RULES["beams"]), together[::-1], 1e-4 if precision == "fp32" else 0.05)


# ---- what is shared ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("engine", ENGINES)
def test_sources_are_kept_once_and_nothing_moves(engine):
    writer = fast(tiny(), engine)
    _, state = writer.begin([PROMPTS[2], PROMPTS[0]])
    texts = state.texts
    _, state = writer.step(torch.arange(8), state.select(torch.tensor([0, 0, 0, 0, 1, 1, 1, 1])))
    buffer = state.own.buffer.data_ptr()
    for _ in range(3):
        _, state = writer.step(torch.arange(8), state.select(torch.tensor([1, 0, 0, 3, 7, 7, 4, 5])))
        assert state.texts is texts
        assert state.own.buffer.data_ptr() == buffer


@pytest.mark.parametrize("precision", ["fp32", *LESS])
@pytest.mark.parametrize("engine", ENGINES)
def test_the_model_may_be_trained_further(engine, precision):
    model = tiny()
    writer = fast(model, engine, precision)
    before = generate(writer, PROMPTS, RULES["greedy"])
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    assert_same(generate(writer, PROMPTS, RULES["greedy"]), before)


# ---- which engine --------------------------------------------------------------------------------------------


def test_without_the_compiled_step_torch_does_it(monkeypatch):
    monkeypatch.setattr(build, "library", lambda source, *choices: None)
    for precision in ("auto", "fp32", *LESS):
        writer = pair_writer_for(tiny(), precision)
        assert isinstance(writer.engine, TorchEngine)
        assert len(generate(writer, PROMPTS, RULES["greedy"])) == len(PROMPTS)


def test_recurrent_models_write_as_before(caplog):
    small = {"vocab_size": 70, "width": 32, "ffn_width": 32, "layers": 1, "decoder_layers": 1}
    model = Model.fresh(replace(presets.lstm(), **small), ["lm"], torch.Generator().manual_seed(0)).eval()
    for precision in ("auto", "fp32"):
        assert isinstance(pair_writer_for(model, precision), PairWriter)
    assert not caplog.text
    pair_writer_for(model, "int8")
    assert "int8 is for Transformers" in caplog.text


def test_wrong_arguments_raise_an_error():
    model = tiny()
    with pytest.raises(UsageError, match="precision is 'int4'; expected one of auto, fp32, bf16, int8"):
        pair_writer_for(model, "int4")
    with pytest.raises(UsageError, match="prompt 1 is empty"):
        generate(pair_writer_for(model), [[1], []], Decoding())
    with pytest.raises(UsageError, match="prompt 0: token 70 is not in the vocabulary"):
        generate(pair_writer_for(model), [[70]], Decoding())
    learned = scattered(replace(CONFIGS["2017"], position_kind="learned"), 0)
    with pytest.raises(UsageError, match="no room"):
        generate(pair_writer_for(learned), [[5] * 81], Decoding())
    assert generate(pair_writer_for(model), [[5] * 81], Decoding(max_new=2))  # sinusoids have no last position
    model.lm_head = None
    with pytest.raises(UsageError, match="no lm_head"):
        pair_writer_for(model)
