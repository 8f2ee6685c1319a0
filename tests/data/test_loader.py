"""Batches made ahead: the same in the same order whatever the workers, errors where they belong, no thread left."""

from __future__ import annotations

import gc
import threading
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from allmask.data import Loader
from allmask.data.loader import AHEAD
from allmask.errors import DataError, UsageError

PLAN = [[number, number + 1] for number in range(0, 40, 2)]


def ours() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("allmask-data")]


@pytest.fixture(autouse=True)
def no_thread_is_left():
    yield
    assert ours() == []


@settings(max_examples=20)
@given(st.lists(st.lists(st.integers(), max_size=3), max_size=12), st.integers(0, 14), st.integers(0, 4), st.randoms())
def test_order_and_start(plan, start, workers, random):
    delays = {id(numbers): random.random() / 500 for numbers in plan}

    def encode(numbers):
        time.sleep(delays[id(numbers)])
        return tuple(numbers)

    assert list(Loader(encode, plan, start, workers)) == [tuple(numbers) for numbers in plan[start:]]


def test_a_plan_may_be_endless():
    def plan():
        number = 0
        while True:
            yield [number]
            number += 1

    with Loader(sum, plan(), start=5) as loader:
        assert [next(loader) for _ in range(3)] == [5, 6, 7]


@pytest.mark.parametrize("workers", [0, 1, 3])
def test_an_error_is_raised_at_its_batch(workers: int):
    def encode(numbers):
        if numbers == PLAN[4]:
            raise DataError("train.jsonl:9: too long", "shorten it")
        return numbers

    loader, seen = Loader(encode, PLAN, workers=workers), []
    with pytest.raises(DataError, match=r"train\.jsonl:9: too long") as caught:
        for batch in loader:
            seen.append(batch)
    assert seen == PLAN[:4]
    assert caught.value.hint == "shorten it"
    assert list(loader) == []  # nothing follows an error


def test_a_base_exception_is_raised_too():
    """A panic in the Rust tokenizers is a BaseException."""

    class Panic(BaseException):
        pass

    def encode(numbers):
        raise Panic("rust")

    with pytest.raises(Panic):
        next(Loader(encode, PLAN))


@pytest.mark.parametrize("workers", [1, 3])
def test_leaving_early_ends_the_threads(workers: int):
    with Loader(list, PLAN, workers=workers) as loader:
        next(loader)
        assert len(ours()) >= 1
    assert ours() == []
    assert list(loader) == []
    loader.close()  # twice does no harm


def test_a_loader_that_is_garbage_collected_ends_its_threads():
    loader = Loader(list, PLAN)
    next(loader)
    del loader
    gc.collect()
    deadline = time.monotonic() + 120
    while ours() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not ours()


@pytest.mark.parametrize("workers", [1, 2])
def test_batches_are_made_while_the_caller_computes_but_not_too_many(workers: int):
    made, enough = [], threading.Event()

    def encode(numbers):
        made.append(numbers)
        if len(made) == 1 + AHEAD * workers:
            enough.set()
        return numbers

    with Loader(encode, PLAN, workers=workers) as loader:
        assert next(loader) == PLAN[0]
        assert enough.wait(10)  # the caller does nothing; the workers go on
        time.sleep(0.02)
        assert len(made) == 1 + AHEAD * workers


def test_it_works_in_other_threads():
    here, there = threading.get_ident(), []
    assert list(Loader(lambda numbers: there.append(threading.get_ident()), PLAN, workers=0)) == [None] * len(PLAN)
    assert set(there) == {here}
    there.clear()
    list(Loader(lambda numbers: there.append(threading.get_ident()), PLAN))
    assert here not in there and len(set(there)) == 1


def test_waiting_is_measured():
    gate, second = threading.Event(), threading.Event()

    def slow(numbers):
        gate.wait(10)
        if numbers == PLAN[2]:
            second.set()
        return numbers

    with Loader(slow, PLAN) as loader:
        assert loader.waited == 0.0
        threading.Timer(0.1, gate.set).start()
        next(loader)
        waited = loader.waited
        assert 0.05 < waited < 10
        assert second.wait(10)
        time.sleep(0.5)  # the caller's own time does not count, and the next batch is there already
        next(loader)
        assert loader.waited - waited < 0.5


def test_misuse():
    for options in ({"start": -1}, {"workers": -1}):
        with pytest.raises(UsageError):
            Loader(list, PLAN, **options)
