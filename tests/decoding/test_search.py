"""Greedy, beam search and sampling over a model that is a table, against enumeration."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from allmask.decoding import Decoding, generate, stream
from allmask.decoding import filters as f
from allmask.decoding.search import _Beams
from allmask.errors import CheckpointError, UsageError
from tests.decoding.references import (
    TableWriter,
    all_texts,
    close,
    forbidden,
    log_probabilities,
    plain_beam_search,
    with_end,
)

PENALTIES = st.sampled_from([-1.0, 0.0, 0.5, 1.0, 2.0])
END = (0,)


@st.composite
def rules(draw, **fixed) -> Decoding:
    max_new = draw(st.integers(1, 4))
    chosen = {
        "end": END,
        "max_new": max_new,
        "min_new": draw(st.integers(0, max_new)),
        "banned": draw(st.sampled_from([(), (2,)])),
        "no_repeat_ngram": draw(st.sampled_from([0, 0, 1, 2])),
        "no_repeat_prompt": draw(st.booleans()),
        "length_penalty": draw(PENALTIES),
    }
    return Decoding(**{**chosen, **fixed})


def assert_same(found, expected, rules):
    assert [with_end(one, rules) for one in found] == [tokens for _, tokens in expected]
    assert all(close(one.score, score) for one, (score, _) in zip(found, expected, strict=True))


@settings(max_examples=120)
@given(rules(), st.integers(2, 5), st.integers(0, 10**6), st.integers(1, 4))
def test_a_beam_search_as_wide_as_the_space_finds_the_best_of_all(rules, vocabulary, seed, n_best):
    rules = replace(rules, max_new=min(rules.max_new, 3 if vocabulary > 3 else 4), min_new=min(rules.min_new, 2))
    writer, prompt = TableWriter(vocabulary, seed), (1, 2 % vocabulary, 1)
    rules = replace(
        rules, beams=max(n_best, vocabulary**rules.max_new), n_best=n_best, banned=rules.banned[: vocabulary > 2]
    )
    expected = all_texts(writer, prompt, rules)[:n_best]
    found = generate(writer, [prompt], rules)[0]
    if len(expected) == n_best:  # with fewer, rules that forbid everything leave texts cut short
        assert_same(found, expected, rules)


@settings(max_examples=150)
@given(rules(no_repeat_ngram=0), st.integers(3, 6), st.integers(0, 10**6), st.integers(2, 4), st.data())
def test_narrow_beams_equal_a_plain_beam_search_that_never_stops_early(rules, vocabulary, seed, beams, data):
    n_best = data.draw(st.integers(1, beams))
    rules = replace(rules, beams=beams, n_best=n_best, max_new=data.draw(st.integers(rules.max_new, 8)))
    writer = TableWriter(vocabulary, seed, spread=data.draw(st.sampled_from([1.0, 4.0])))
    prompts = [(1,), (2, 1), (1, 1, 2)]
    for prompt, found in zip(prompts, generate(writer, prompts, rules), strict=True):
        assert_same(found, plain_beam_search(writer, prompt, rules), rules)


@pytest.mark.parametrize("penalty", [-1.0, -0.5, 0.0, 0.5, 1.0, 2.0])
def test_stopping_early_changes_nothing(penalty):
    """A length in the bound that is too long or too short changes some of these texts, whatever the penalty's sign."""
    rules = Decoding(end=END, beams=4, n_best=3, length_penalty=penalty, max_new=12)
    for seed in range(40):
        stopping, tireless = TableWriter(5, seed, spread=3.0), TableWriter(5, seed, spread=3.0)
        found = generate(stopping, [(1,)], rules)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(_Beams, "_is_settled", lambda *_: False)
            assert generate(tireless, [(1,)], rules) == found
        assert len(stopping.batches) <= len(tireless.batches) == 12


def test_stopping_early_saves_steps():
    writers = [TableWriter(5, seed, spread=3.0) for seed in range(20)]
    for writer in writers:
        generate(writer, [(1,)], Decoding(end=END, beams=3, max_new=12, length_penalty=0.0))
    assert sum(len(writer.batches) for writer in writers) < 0.6 * 12 * 20


@settings(max_examples=120)
@given(rules(), st.integers(3, 6), st.integers(0, 10**6), st.sampled_from([0.0, 0.0, -1.5, 2.0]))
def test_greedy_takes_the_likeliest_token_each_time(rules, vocabulary, seed, end_bias):
    """A bias on the end token changes what is likeliest, but not the log-probability, which is the model's own."""
    rules = replace(rules, end_bias=end_bias)
    writer, prompt = TableWriter(vocabulary, seed), (1, 2, 1)
    tokens, total = (), 0.0
    while len(tokens) < rules.max_new and not (tokens and tokens[-1] in END):
        table = log_probabilities(writer, (*prompt, *tokens))
        able = [token for token in range(vocabulary) if not forbidden(token, prompt, tokens, rules)]
        if not able:
            break
        best = max(able, key=lambda token: table[token] + end_bias * (token in END))
        tokens, total = (*tokens, best), total + table[best]
    [[found]] = generate(writer, [prompt], rules)
    assert with_end(found, rules) == tokens
    assert found.finished == (bool(tokens) and tokens[-1] in END)
    assert close(found.log_probability, total)
    assert close(found.score, total / max(1, len(tokens)) ** rules.length_penalty)


MODES = {
    "greedy": Decoding(end=END, max_new=9),
    "beams": Decoding(end=END, max_new=9, beams=3, n_best=3, length_penalty=0.7),
    "samples": Decoding(end=END, max_new=9, sample=True, n_best=3, temperature=0.9, top_k=5, top_p=0.95, seed=4),
}


@pytest.mark.parametrize("mode", MODES)
def test_a_result_does_not_depend_on_its_neighbours(mode):
    writer = TableWriter(7, seed=3)
    prompts = [(1,), (2, 3), (4, 5, 6), (3,), (1, 1), (2, 3)]
    together = generate(writer, prompts, MODES[mode])
    assert [generate(writer, [prompt], MODES[mode])[0] for prompt in prompts] == together
    assert generate(writer, prompts[::-1], MODES[mode]) == together[::-1]
    assert together[1] == together[5]


@pytest.mark.parametrize("mode", MODES)
def test_rows_that_ended_leave_the_batch(mode):
    writer = TableWriter(5, seed=1, spread=3.0)
    prompts = [(1,), (2,), (3,), (4,)]
    found = generate(writer, prompts, MODES[mode])
    assert writer.batches[0] == len(prompts) and writer.batches[-1] < max(writer.batches)
    if mode == "greedy":
        lengths = [len(one.tokens) + one.finished for [one] in found]
        expected = [sum(length > step for length in lengths) for step in range(max(lengths))]
        assert writer.batches == expected


def test_room_limits_each_prompt_by_itself():
    class Narrow(TableWriter):
        def room(self, prompt):
            return 6 - len(prompt)

    rules = Decoding(max_new=50)
    for beams in (1, 3):
        found = generate(Narrow(5), [(1,), (1, 2, 3)], replace(rules, beams=beams))
        assert [len(one.tokens) for [one] in found] == [5, 3] and not found[0][0].finished
    with pytest.raises(UsageError, match="prompt 1 has 6 tokens: the model has no room"):
        generate(Narrow(5), [(1,), (1,) * 6], rules)


@pytest.mark.parametrize("search", [{}, {"beams": 2}, {"sample": True}], ids=str)
def test_where_nothing_is_allowed_a_text_ends_unfinished(search):
    rules = Decoding(end=END, max_new=9, no_repeat_ngram=1, min_new=9, **search)
    [[found]] = generate(TableWriter(3), [(1,)], rules)
    assert sorted(found.tokens) == [1, 2] and not found.finished
    [[found]] = generate(TableWriter(3), [(1,)], replace(rules, banned=(0, 1, 2)))
    assert found.tokens == () and found.log_probability == 0.0


@pytest.mark.parametrize("search", [{}, {"beams": 2}, {"sample": True}], ids=str)
@pytest.mark.parametrize("wrong", [float("nan"), float("inf")])
def test_nan_logits_are_an_error(search, wrong):
    class Damaged(TableWriter):
        def logits(self, history):
            return super().logits(history).index_fill(0, torch.tensor([2]), wrong if len(history) > 2 else 0.0)

    with pytest.raises(CheckpointError, match="logits of the model are NaN"):
        generate(Damaged(5), [(1,)], Decoding(**search))


@pytest.mark.parametrize("rules", [{"end": (5,)}, {"banned": (1, -1)}], ids=str)
def test_tokens_outside_the_vocabulary_are_an_error(rules):
    with pytest.raises(UsageError, match="is not in the vocabulary of 5"):
        generate(TableWriter(5), [(1,)], Decoding(**rules))


def test_no_prompts_no_results():
    assert generate(TableWriter(3), [], Decoding()) == []


# ---- sampling ------------------------------------------------------------------------------------------------


def assert_drawn_from(counts, probabilities, draws):
    """Five standard errors of each token's share; a token without probability is never drawn."""
    share = torch.bincount(torch.tensor(counts), minlength=len(probabilities)) / draws
    error = (probabilities * (1 - probabilities) / draws).sqrt()
    assert ((share - probabilities).abs() <= 5 * error + 1e-9).all()


@pytest.mark.parametrize(
    "rules",
    [
        {},
        {"temperature": 0.5},
        {"temperature": 2.0, "top_k": 4},
        {"top_p": 0.7},
        {"temperature": 1.5, "top_k": 6, "top_p": 0.8, "banned": (3,)},
    ],
    ids=str,
)
def test_samples_follow_the_filtered_distribution(rules):
    draws, writer = 4000, TableWriter(9, seed=2, spread=1.0)
    rules = Decoding(sample=True, n_best=draws, max_new=2, **rules)
    scores = f.temperature(f.ban(writer.logits((1,))[None], rules.banned), rules.temperature)
    expected = f.top_p(f.top_k(scores, rules.top_k), rules.top_p).softmax(1)[0]
    [found] = generate(writer, [(1,)], rules)
    assert_drawn_from([one.tokens[0] for one in found], expected, draws)
    first = int(expected.argmax())
    second = [one.tokens[1] for one in found if one.tokens[0] == first]
    scores = f.temperature(f.ban(writer.logits((1, first))[None], rules.banned), rules.temperature)
    expected = f.top_p(f.top_k(scores, rules.top_k), rules.top_p).softmax(1)[0]
    assert_drawn_from(second, expected, len(second))


def test_a_seed_is_a_result():
    writer, rules = TableWriter(20, spread=1.0), MODES["samples"]
    [found] = generate(writer, [(1, 2)], rules)
    assert generate(writer, [(1, 2)], rules) == [found]
    assert generate(writer, [(1, 2)], replace(rules, n_best=5))[0][:3] == found  # more samples, the first ones the same
    assert generate(writer, [(1, 2)], replace(rules, seed=5))[0] != found
    assert len({one.tokens for one in generate(writer, [(1, 2)], replace(rules, n_best=20))[0]}) > 10


def test_different_prompts_draw_different_samples():
    """If all tokens are equally likely, only the generators tell two prompts apart."""

    class Even(TableWriter):
        def logits(self, history):
            return torch.zeros(50)

    [[one], [other]] = generate(Even(50), [(1, 2), (12,)], Decoding(sample=True, max_new=8))
    assert one.tokens != other.tokens


def test_samples_have_the_log_probability_of_the_model():
    writer = TableWriter(6, seed=8)
    for one in generate(writer, [(1,)], replace(MODES["samples"], temperature=3.0))[0]:
        tokens = with_end(one, MODES["samples"])
        total = sum(log_probabilities(writer, (1, *tokens[:i]))[token] for i, token in enumerate(tokens))
        assert close(one.log_probability, total)


# ---- token by token ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sample", [False, True])
def test_streaming_gives_the_same_tokens_one_by_one(sample):
    rules = Decoding(end=END, max_new=9, sample=sample, seed=1)
    for prompt in [(1,), (2,), (3,), (4, 4)]:
        writer = TableWriter(6, seed=1)
        [[whole]] = generate(writer, [prompt], rules)
        assert tuple(stream(writer, prompt, rules)) == whole.tokens
    writer = TableWriter(6, seed=5)
    tokens = stream(writer, (1,), replace(rules, min_new=5))
    assert writer.batches == []  # nothing is done before it is asked for
    for step in range(3):
        next(tokens)
        assert len(writer.batches) == step + 1
        assert not torch.is_inference_mode_enabled()  # the caller's own work between two tokens is left alone


def test_on_token_is_called_for_every_prompt():
    writer, rules, heard = TableWriter(6, seed=1), Decoding(end=END, max_new=9), {0: [], 1: [], 2: []}
    found = generate(writer, [(1,), (2,), (3,)], rules, on_token=lambda prompt, token: heard[prompt].append(token))
    assert [tuple(heard[prompt]) for prompt in range(3)] == [one.tokens for [one] in found]


@pytest.mark.parametrize("rules", [Decoding(beams=2), Decoding(sample=True, n_best=2)])
def test_several_hypotheses_cannot_be_streamed(rules):
    with pytest.raises(UsageError, match="streamed only"):
        stream(TableWriter(3), (1,), rules)
    with pytest.raises(UsageError, match="streamed only"):
        generate(TableWriter(3), [(1,)], rules, on_token=print)


@pytest.mark.parametrize(
    "wrong, words",
    [
        ({"beams": 0}, "beams is 0; expected at least 1"),
        ({"max_new": 0}, "max_new is 0"),
        ({"top_k": -1}, "top_k is -1"),
        ({"temperature": 0.0}, "temperature is 0.0; expected more than 0"),
        ({"top_p": 0.0}, "top_p is 0.0"),
        ({"top_p": 1.1}, "top_p is 1.1"),
        ({"min_new": 9, "max_new": 8}, "min_new is 9, more than max_new, 8"),
        ({"sample": True, "beams": 2}, "exclude each other"),
        ({"n_best": 3, "beams": 2}, "n_best is 3 of 2 beams"),
    ],
    ids=lambda x: str(x),
)
def test_settings_that_make_no_sense_are_an_error(wrong, words):
    with pytest.raises(UsageError, match=words):
        Decoding(**wrong)
