"""Recurrent bodies against loops written by hand; and they keep the promises that every body keeps."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import allmask
from allmask import presets
from allmask.data import Example, pack
from allmask.decoding import Decoding, PairWriter, generate
from allmask.errors import CheckpointError, UsageError
from allmask.inference import freeze
from allmask.kernels.precision import native_bf16
from allmask.mask import Mask
from allmask.mask.audit import audit, our_subject
from allmask.model import Model
from allmask.nn.cache import Cache
from allmask.nn.recurrent import AdditiveAttention, NoAttention, flipped
from allmask.objectives import losses_of
from allmask.presets import PRESETS
from allmask.training import Score, Settings, train
from allmask.training.flops import operations
from tests.nn.encoder_decoders import (
    LENGTHS,
    assert_cached_equals_full,
    assert_gradients_equal_differences,
    assert_packed_equals_padded_equals_one_by_one,
    draw_ids,
    pairs,
)

SMALL = {"vocab_size": 50, "width": 12, "ffn_width": 10, "layers": 2, "decoder_layers": 3}
PAIRS = {
    "attention": replace(presets.lstm(), **SMALL),
    "plain": replace(presets.lstm_plain(), **SMALL),
    "forward": replace(presets.lstm(), **SMALL, both_ways=False),
    "shallow": replace(presets.lstm(), **SMALL | {"layers": 3, "decoder_layers": 1}),
}
ELMO = replace(presets.elmo_tiny(), vocab_size=50, width=8, layers=3)


def model_of(config):
    model = Model.fresh(config, ["lm"]).double().eval()
    rng = torch.Generator().manual_seed(0)
    for parameter in model.parameters():  # large weights: dependence must show above rounding
        nn.init.normal_(parameter, std=0.4, generator=rng)
    return model


# ---- by hand -----------------------------------------------------------------------------------------------


def cell_of(recurrence):
    lstm = recurrence.lstm
    cell = nn.LSTMCell(lstm.input_size, lstm.hidden_size).to(lstm.weight_ih_l0.dtype)
    for name in ("weight_ih", "weight_hh", "bias_ih", "bias_hh"):
        getattr(cell, name).data = getattr(lstm, f"{name}_l0").data
    return cell


def walk(cell, xs, state=None):
    """One line, token by token: what was said each time."""
    zeros = xs[0].new_zeros(cell.hidden_size)
    h, c = (zeros, zeros) if state is None else state
    said = []
    for x in xs:
        h, c = cell(x, (h, c))
        said.append(h)
    return said


def encode_by_hand(encoder, xs):
    """States of a source, and the last ones of each layer."""
    ends = []
    for layer in encoder.layers:
        right = walk(cell_of(layer.right), xs)
        if layer.left is None:
            xs, end = right, right[-1]
        else:
            left = walk(cell_of(layer.left), xs[::-1])
            xs, end = (
                [torch.cat(both) for both in zip(right, left[::-1], strict=True)],
                torch.cat([right[-1], left[-1]]),
            )
        ends.append(end)
    return xs, ends


def attend_by_hand(attention, query, states):
    scores = []
    for state in states:
        inside = attention.query.weight @ query + attention.query.bias + attention.key.weight @ state
        scores.append(attention.score.weight[0] @ inside.tanh())
    exponents = [score.exp() for score in scores]
    return sum(e / sum(exponents) * state for e, state in zip(exponents, states, strict=True))


def decode_by_hand(decoder, xs, states, ends):
    """Hidden states of a target, one token after another through all layers."""
    memory = []
    for number, bridge in enumerate(decoder.bridges):
        both = bridge.weight @ ends[min(number, len(ends) - 1)] + bridge.bias
        memory.append((both[: len(both) // 2].tanh(), both[len(both) // 2 :]))
    cells, hidden = [cell_of(layer) for layer in decoder.layers], []
    for x in xs:
        context = None
        for number, cell in enumerate(cells):
            memory[number] = cell(x if context is None else torch.cat([x, context]), memory[number])
            x = memory[number][0]
            if context is None:
                empty = isinstance(decoder.attention, NoAttention)
                context = x[:0] if empty else attend_by_hand(decoder.attention, x, states)
        if len(context):
            linear = decoder.output[0]
            x = (linear.weight @ torch.cat([x, context]) + linear.bias).tanh()
        hidden.append(x)
    return hidden


def test_additive_attention_is_a_loop_over_states():
    torch.manual_seed(0)
    attention = AdditiveAttention(6, 5).double()
    states, queries = torch.randn(2, 4, 6).double(), torch.randn(2, 3, 6).double()
    lengths = torch.tensor([4, 2])
    found = attention(queries, attention.keys_values(states, lengths))
    for row, step in product(range(2), range(3)):
        expected = attend_by_hand(attention, queries[row, step], states[row, : lengths[row]])
        torch.testing.assert_close(found[row, step], expected, atol=1e-12, rtol=0)


def test_rows_look_at_the_sources_they_were_selected_from():
    torch.manual_seed(0)
    attention = AdditiveAttention(6, 5).double()
    source = attention.keys_values(torch.randn(3, 4, 6).double(), torch.tensor([4, 1, 3]))
    rows, queries = torch.tensor([2, 0, 2, 1]), torch.randn(4, 1, 6).double()
    whole = attention(queries[:3], source)
    chosen = source.select(rows).select(torch.tensor([1, 3, 0]))
    assert chosen.states is source.states and chosen.text.tolist() == [0, 1, 2]
    torch.testing.assert_close(attention(queries[:3], chosen), whole, atol=1e-12, rtol=0)


@pytest.mark.parametrize("name", PAIRS)
def test_the_whole_is_a_loop_over_tokens(name):
    model, mask = model_of(PAIRS[name]), pairs([4, 2], [3, 5])
    ids, body = draw_ids(*mask.shape), model.body
    hidden = model(ids, mask).hidden
    for row, (s, t) in enumerate([(4, 3), (2, 5)]):
        xs = list(body.embedding.tokens.weight[ids[row]] * body.config.width**0.5)
        states, ends = encode_by_hand(body.encoder, xs[:s])
        written = decode_by_hand(body.decoder, xs[s : s + t], states, ends)
        torch.testing.assert_close(hidden[row, : s + t], torch.stack([*states, *written]), atol=1e-10, rtol=0)


@pytest.mark.parametrize("name", PAIRS)
def test_single_precision_takes_another_kernel_to_the_same_numbers(name):
    mask = pairs([6, 3, 1], [4, 2, 5])
    ids, exact = draw_ids(*mask.shape), model_of(PAIRS[name])
    model = model_of(PAIRS[name]).float()
    torch.testing.assert_close(model(ids, mask).hidden.double(), exact(ids, mask).hidden, atol=2e-5, rtol=0)


def test_lines_are_turned_around_within_their_lengths():
    x = torch.arange(8.0).view(2, 4, 1)
    assert flipped(x, torch.tensor([4, 2]))[..., 0].tolist() == [[3, 2, 1, 0], [5, 4, 6, 7]]


# ---- promises ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", PAIRS)
@pytest.mark.parametrize("sizes", [(4, 3), (1, 4), (5, 1), (6, 0)])
def test_dependence_is_what_the_mask_says(name, sizes):
    mask = pairs([sizes[0]], [sizes[1]])
    found = audit(our_subject(model_of(PAIRS[name])), mask, torch.Generator().manual_seed(0))
    expected = mask.visible()[0]
    if name == "forward":  # reads less than it may
        expected = expected & torch.ones_like(expected).tril()
    assert found.holds or name == "forward"
    assert torch.equal(found.depends, expected)


@settings(max_examples=20, deadline=None)
@given(st.sampled_from(list(PAIRS)), LENGTHS, st.integers(0, 2))
def test_packed_equals_padded_equals_one_by_one(name, lengths, extra):
    model = model_of(PAIRS[name])
    row, joined, alone = assert_packed_equals_padded_equals_one_by_one(model, lengths, extra)
    where = (torch.arange(row.shape[1]) % 2 == 0)[None]
    torch.testing.assert_close(model.body.forward_at(where, row, joined), alone[where[0]], atol=1e-10, rtol=0)


def test_a_shuffled_row_is_read_in_its_order_and_by_its_places():
    model, mask = model_of(PAIRS["attention"]), pairs([4], [3])
    ids, shuffle = draw_ids(1, 7), torch.tensor([5, 2, 0, 6, 1, 4, 3])
    torch.testing.assert_close(
        model(ids[:, shuffle], mask[:, shuffle]).hidden, model(ids, mask).hidden[:, shuffle], atol=1e-12, rtol=0
    )


@settings(max_examples=20, deadline=None)
@given(st.sampled_from(list(PAIRS)), LENGTHS, st.data())
def test_cached_equals_full(name, lengths, data):
    assert_cached_equals_full(model_of(PAIRS[name]), lengths, data)


@pytest.mark.parametrize("name", PAIRS)
def test_gradients_by_differences(name):
    assert_gradients_equal_differences(model_of(PAIRS[name]))


def test_masks_that_no_recurrence_can_follow_are_refused():
    model, ids = model_of(PAIRS["attention"]), draw_ids(1, 4)
    for mask in (
        Mask.bidirectional(torch.ones(1, 4, dtype=torch.bool), window=2),
        Mask.from_matrix(torch.ones(4, 4, dtype=torch.bool)),
    ):
        with pytest.raises(UsageError, match="no window and no matrix"):
            model(ids, mask)
    with pytest.raises(UsageError, match="one text per row"):
        model(ids, Mask(torch.tensor([[0, 1, 0, 1]]), torch.tensor([[0, 0, 1, 1]])), cache=Cache())
    cache = model(ids, pairs([3], [1]), cache=Cache()).cache
    for order, group in ((1, 0), (0, 0), (2, 1)):
        with pytest.raises(UsageError, match="not later than all"):
            model(ids[:, :1], Mask(torch.tensor([[order]]), torch.tensor([[group]])), cache=cache)


def test_a_row_of_padding_changes_no_other_row():
    model, mask = model_of(PAIRS["attention"]), pairs([3, 3], [2, 2])
    ids = draw_ids(2, 5)
    mask = replace(mask, group=torch.tensor([[0], [-1]]).expand(2, 5))
    alone = model(ids[:1], mask[:1]).hidden
    for hidden in (model(ids, mask).hidden, model(ids, mask, cache=Cache()).hidden):
        torch.testing.assert_close(hidden[:1], alone, atol=1e-12, rtol=0)
        assert hidden[1].abs().sum() == 0


@pytest.mark.parametrize("precision, near", [("fp32", 1e-5), ("bf16", 3e-2), ("int8", 3e-2)])
def test_frozen_models(precision, near):
    for config in (PAIRS["attention"], PAIRS["plain"], ELMO):
        model = Model.fresh(config, ["lm"], torch.Generator().manual_seed(0)).eval()
        mask = pairs([4, 2], [3, 3]) if config.decoder_layers else Mask.causal(torch.ones(2, 7, dtype=torch.bool))
        ids = draw_ids(*mask.shape)
        frozen = freeze(model, precision)
        torch.testing.assert_close(frozen(ids, mask).hidden.float(), model(ids, mask).hidden, atol=near, rtol=0)
        cached = frozen(ids, mask, cache=Cache()).hidden
        torch.testing.assert_close(cached.float(), model(ids, mask).hidden, atol=near, rtol=0)


# ---- learning ----------------------------------------------------------------------------------------------


def copies(count, seed):
    """Texts of a few letters to be written again; 2 begins and 3 ends them."""
    rng = torch.Generator().manual_seed(seed)
    lengths = torch.randint(2, 6, (count,), generator=rng).tolist()
    texts = [torch.randint(4, 12, (n,), generator=rng).tolist() for n in lengths]
    return [Example.pair([*text, 3], [2, *text], [*text, 3]) for text in texts]


class Copying:
    def __init__(self):
        self.examples, self.held_out = copies(512, 0), pack(copies(32, 1))
        self.lengths = [len(example) for example in self.examples]

    def batch(self, numbers, epoch):
        return pack([self.examples[number] for number in numbers])

    def evaluate(self, model, step):
        loss, count = losses_of(model, self.held_out)["lm"]
        return Score(-loss.item() / count, {"loss": loss.item() / count})


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_copying_is_learnt_by_the_one_loop(tmp_path, precision):
    if precision == "bf16" and not native_bf16("cpu"):
        pytest.skip("bf16 is emulated here, and takes half a minute")
    config = replace(
        presets.lstm_small(), vocab_size=12, width=32, ffn_width=32, layers=1, decoder_layers=1, dropout=0.0
    )
    model = Model.fresh(replace(config, start_token=2), ["lm"], torch.Generator().manual_seed(0))
    rules = Settings(lr=2e-2, steps=160, batch_tokens=200, warmup=0.1, precision=precision, eval_every=80)
    result = train(model, Copying(), rules, tmp_path / "run", quiet=True)
    assert result.best.metrics["loss"] < 0.5 < 2.0 < F.cross_entropy(torch.zeros(1, 12), torch.zeros(1).long())
    sources = [example.ids[example.order == 0].tolist() for example in copies(20, 2)]
    found = generate(PairWriter(model.eval()), sources, Decoding(end=(3,), max_new=8, beams=2))
    assert sum(list(best[0].tokens) == source[:-1] for best, source in zip(found, sources, strict=True)) >= 15


def test_a_loss_of_packed_pairs_is_that_of_each_alone():
    model, examples = model_of(PAIRS["attention"]), copies(6, 0)
    together = losses_of(model, pack(examples), smoothing=0.1)["lm"]
    alone = [losses_of(model, pack([example]), smoothing=0.1)["lm"] for example in examples]
    assert together[1] == sum(count for _, count in alone)
    assert together[0].item() == pytest.approx(sum(loss.item() for loss, _ in alone), abs=1e-9)


@pytest.mark.parametrize("name", PAIRS)
def test_hidden_states_are_dropped_once(name):
    model, mask = Model.fresh(replace(PAIRS[name], width=64, dropout=0.3)).train(), pairs([20] * 8, [20] * 8)
    zeros = model(draw_ids(*mask.shape), mask).hidden == 0
    for part in (zeros[:, :20], zeros[:, 20:]):
        assert part.float().mean().item() == pytest.approx(0.3, abs=0.03)
    model.eval()
    assert not (model(draw_ids(*mask.shape), mask).hidden == 0).any()


def test_fresh_weights():
    model = Model.fresh(replace(presets.lstm_small(), vocab_size=50), ["lm"], torch.Generator().manual_seed(0))
    again = Model.fresh(replace(presets.lstm_small(), vocab_size=50), ["lm"], torch.Generator().manual_seed(0))
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True))
    lstm = model.body.decoder.layers[1].lstm
    for gate in lstm.weight_hh_l0.chunk(4):
        torch.testing.assert_close(gate @ gate.T, torch.eye(384), atol=1e-5, rtol=0)
    for gate in lstm.weight_ih_l0.chunk(4):
        assert gate.std().item() == pytest.approx((2 / (384 + 768)) ** 0.5, rel=0.02)
    forget = lstm.bias_ih_l0 + lstm.bias_hh_l0
    assert forget.tolist() == [0.0] * 384 + [1.0] * 384 + [0.0] * 768
    hidden = model(draw_ids(4, 12), pairs([6] * 4, [6] * 4)).hidden
    assert 0.05 < hidden.std().item() < 1.0


# ---- folders and sizes -------------------------------------------------------------------------------------


@pytest.mark.parametrize("config", [*PAIRS.values(), ELMO], ids=[*PAIRS, "elmo"])
def test_saved_equals_loaded(tmp_path, config):
    model = Model.fresh(config, ["lm"], torch.Generator().manual_seed(0)).eval()
    model.save(tmp_path / "a")
    loaded = allmask.load(tmp_path / "a")
    assert loaded.config == config and loaded.heads == model.heads
    mask = pairs([4, 2], [3, 3]) if config.decoder_layers else Mask.causal(torch.ones(2, 7, dtype=torch.bool))
    ids = draw_ids(*mask.shape)
    assert torch.equal(loaded(ids, mask).logits, model(ids, mask).logits)
    (tmp_path / "a" / "config.json").write_text(
        (tmp_path / "a" / "config.json").read_text().replace('"layers": ', '"layers": 1')
    )
    with pytest.raises(CheckpointError, match="missing"):
        allmask.load(tmp_path / "a")


def test_a_pruned_vocabulary_keeps_its_logits():
    model, mask, kept = model_of(replace(PAIRS["attention"], start_token=2)), pairs([4], [3]), [0, 2, *range(20, 50)]
    ids = torch.tensor([[20, 31, 40, 25, 2, 28, 49]])
    small = model.keep_tokens(kept)
    assert small.config.start_token == 1
    found = small(torch.tensor([[kept.index(id) for id in ids[0].tolist()]]), mask).logits
    torch.testing.assert_close(found, model(ids, mask).logits[..., kept], atol=1e-12, rtol=0)


def test_invalid_configs_are_refused():
    for changes, told in (
        ({"decoder_layers": 0}, "more in an lstm"),
        ({"width": 15}, "half of it"),
        ({"source_attention": 1}, "true or false"),
        ({"family": "elmo"}, "0 in an elmo"),
    ):
        with pytest.raises(CheckpointError, match=told):
            replace(PAIRS["attention"], **changes)


def lstm_numbers(inputs, width):
    return 4 * width * (inputs + width) + 2 * 4 * width


@pytest.mark.parametrize("preset", [name for name, make in PRESETS.items() if make().family in ("lstm", "elmo")])
def test_parameters_counted_by_hand(preset):
    c = PRESETS[preset]()
    with torch.device("meta"):
        model = Model(c, ["lm"])
    w, total = c.width, c.vocab_size * c.width
    if c.family == "elmo":
        total += 2 * c.layers * lstm_numbers(w, w)
    else:
        context = w if c.source_attention else 0
        total += c.layers * 2 * lstm_numbers(w, w // 2)
        total += lstm_numbers(w, w) + (c.decoder_layers - 1) * lstm_numbers(w + context, w)
        total += c.decoder_layers * (2 * w * w + 2 * w)
        if c.source_attention:
            total += (w * c.ffn_width + c.ffn_width) + w * c.ffn_width + c.ffn_width + (2 * w * w + w)
    assert sum(p.numel() for p in model.parameters()) == total


def test_twins_have_about_the_same_size():
    def size(preset):
        with torch.device("meta"):
            body = Model(replace(PRESETS[preset](), vocab_size=8000), ["lm"])
        return sum(p.numel() for p in body.parameters()) - 8000 * PRESETS[preset]().width

    assert size("lstm") == pytest.approx(size("transformer-base"), rel=0.1)
    assert size("lstm-small") == pytest.approx(size("transformer-small"), rel=0.1)


@pytest.mark.parametrize("name", PAIRS)
def test_products_of_a_step_are_those_that_torch_counts(name):
    """In double precision, where it counts them; nothing flows back to the zeros that recurrences begin with."""
    model = model_of(replace(PAIRS[name], width=64, ffn_width=48))
    batch = pack([Example.pair(range(10, 30), range(20), range(1, 21)) for _ in range(4)])
    with FlopCounterMode(display=False) as counter:
        losses_of(model, batch)["lm"][0].backward()
    assert operations(model.config, batch) == pytest.approx(counter.get_total_flops(), rel=0.02)
