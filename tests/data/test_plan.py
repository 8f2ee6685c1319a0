"""The plan of an epoch: every example once, within the budget, and a function of its arguments alone."""

from __future__ import annotations

import random
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from allmask.data import plan_epoch
from allmask.data.plan import POOL_BATCHES
from allmask.errors import UsageError

LENGTHS = st.lists(st.integers(1, 60), max_size=200)
SEEDS = st.integers(0, 2**40)


@given(LENGTHS, st.integers(1, 100), SEEDS, st.integers(0, 50))
def test_each_example_once_within_the_budget(lengths, batch_tokens, seed, epoch):
    plan = plan_epoch(lengths, batch_tokens, seed, epoch)
    assert sorted(number for batch in plan for number in batch) == list(range(len(lengths)))
    for batch in plan:
        assert len(batch) == 1 or sum(lengths[number] for number in batch) <= batch_tokens
    assert all(batch for batch in plan)


@given(LENGTHS, st.integers(1, 100), SEEDS, st.integers(0, 50))
def test_batches_are_full(lengths, batch_tokens, seed, epoch):
    """No greedy cutter makes more than twice the least number of batches, and one."""
    plan = plan_epoch(lengths, batch_tokens, seed, epoch)
    least = -(-sum(min(length, batch_tokens) for length in lengths) // batch_tokens)
    assert len(plan) <= 2 * least + 1


@given(LENGTHS, st.integers(1, 100), SEEDS, st.integers(0, 50))
def test_the_plan_depends_on_the_arguments_alone(lengths, batch_tokens, seed, epoch):
    plan = plan_epoch(lengths, batch_tokens, seed, epoch)
    random.random(), np.random.random(), torch.rand(1)
    plan_epoch(lengths, batch_tokens, seed + 1, epoch + 1)
    assert plan == plan_epoch(np.array(lengths, dtype=np.int32), batch_tokens, seed, epoch)
    assert all(type(number) is int for batch in plan for number in batch)


def plan_plainly(lengths, batch_tokens, seed, epoch):
    """The same in plain Python: sort by random keys, sort pools by length, cut, sort the batches by random keys."""
    bits = np.random.PCG64(np.random.SeedSequence([seed, epoch]))
    keys = [bits.random_raw() for _ in lengths]
    order, pools, tokens = sorted(range(len(lengths)), key=keys.__getitem__), {}, 0
    for number in order:
        tokens += lengths[number]
        pools.setdefault((tokens - 1) // (POOL_BATCHES * batch_tokens), []).append(number)
    batches, room = [], 0
    for number in (number for pool in pools.values() for number in sorted(pool, key=lengths.__getitem__)):
        if room < lengths[number]:
            batches.append([])
            room = batch_tokens
        batches[-1].append(number)
        room -= lengths[number]
    keys = [bits.random_raw() for _ in batches]
    return [batches[batch] for batch in sorted(range(len(batches)), key=keys.__getitem__)]


@given(st.lists(st.integers(1, 9), max_size=200), st.integers(1, 20), SEEDS, st.integers(0, 50))
def test_the_plan_equals_one_in_plain_python(lengths, batch_tokens, seed, epoch):
    assert plan_epoch(lengths, batch_tokens, seed, epoch) == plan_plainly(lengths, batch_tokens, seed, epoch)


def test_the_plan_does_not_change_between_versions():
    """Written down once, so that a run started before an upgrade resumes after it."""
    assert plan_epoch([5, 3, 9, 2, 7, 20], 12, seed=3, epoch=2) == [[2], [5], [4], [3, 1, 0]]


def test_a_batch_may_be_full_to_the_last_token():
    assert [len(batch) for batch in plan_epoch([4] * 6, 8, seed=0, epoch=0)] == [2, 2, 2]


def test_epochs_and_seeds_differ():
    lengths = [10] * 300
    plans = [plan_epoch(lengths, 100, seed, epoch) for seed in range(4) for epoch in range(4)]
    assert len({str(plan) for plan in plans}) == 16
    members = [{frozenset(batch) for batch in plan} for plan in plans]
    assert all(not a & b for a, b in pairwise(members))  # not only the order of the batches, but who is with whom


def test_neighbours_have_similar_lengths_and_batches_come_in_any_order():
    lengths = np.random.default_rng(0).integers(10, 500, 5000)
    plan = plan_epoch(lengths, 4000, seed=1, epoch=0)
    spread = np.mean([np.ptp(lengths[batch]) for batch in plan])
    means = np.array([lengths[batch].mean() for batch in plan])
    assert spread < 50  # of 490
    assert abs(np.corrcoef(means[:-1], means[1:])[0, 1]) < 0.2


def test_every_position_of_the_epoch_is_equally_likely():
    """Where example 0 of 8 comes, over 4000 seeds: each place 500 times, within five standard deviations."""
    places = [plan_epoch([1] * 8, 1, seed, 0).index([0]) for seed in range(4000)]
    assert np.abs(np.bincount(places, minlength=8) - 500).max() < 5 * np.sqrt(4000 * 1 / 8 * 7 / 8)


def test_a_plan_of_many_pools_equals_one_in_plain_python():
    lengths = np.random.default_rng(0).integers(1, 30, 5000).tolist()
    assert sum(lengths) > 10 * POOL_BATCHES * 60
    assert plan_epoch(lengths, 60, seed=5, epoch=1) == plan_plainly(lengths, 60, seed=5, epoch=1)


@pytest.mark.parametrize(
    "arguments", [([1, 0], 10, 0, 0), ([[1]], 10, 0, 0), ([1], 0, 0, 0), ([1], 10, -1, 0), ([1], 10, 0, -1)]
)
def test_misuse(arguments):
    with pytest.raises(UsageError):
        plan_epoch(*arguments)
