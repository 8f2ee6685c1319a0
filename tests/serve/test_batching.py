"""The queue: what is computed together, what is refused, and what happens to the others if one input is wrong."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from allmask.errors import UsageError
from allmask.serve.batching import Batcher, Closed
from allmask.serve.problems import Problem


class Slow:
    """Computes squares, once it may; notes what was computed together. 13 is an input that it refuses."""

    def __init__(self) -> None:
        self.batches: list[list[int]] = []
        self.may = threading.Event()
        self.busy = threading.Event()

    def __call__(self, inputs: list[int]) -> list[int]:
        self.busy.set()
        assert self.may.wait(20)
        self.batches.append(inputs)
        if 13 in inputs:
            raise UsageError("13 brings bad luck")
        return [one * one for one in inputs]


def trial(body: Callable[[Batcher, Slow], Any], **limits: int) -> Slow:
    """Run a coroutine with a batcher that waits until `may` is set."""
    slow = Slow()

    async def run() -> None:
        batcher = Batcher("test", **{"queue": 8, "batch": 4, "batch_tokens": 100, **limits})
        first = batcher.submit("first", [0], [1], slow)
        await asyncio.to_thread(slow.busy.wait, 20)  # what follows waits together
        try:
            await body(batcher, slow)
        finally:
            slow.may.set()
            batcher.close(wait=True)
        assert await first.future == [0]

    asyncio.run(run())
    return slow


def test_what_waits_together_and_asks_the_same_is_computed_together():
    async def body(batcher: Batcher, slow: Slow) -> None:
        jobs = [batcher.submit(key, inputs, [1] * len(inputs), slow)
                for key, inputs in (("a", [1, 2]), ("b", [3]), ("a", [4]), ("b", [5]))]  # fmt: skip
        slow.may.set()
        assert [await job.future for job in jobs] == [[1, 4], [9], [16], [25]]

    assert trial(body).batches[1:] == [[1, 2, 4], [3, 5]]


def test_a_long_list_is_computed_in_several_batches_and_a_batch_has_few_tokens():
    async def body(batcher: Batcher, slow: Slow) -> None:
        long = batcher.submit("a", [1, 2, 3, 4, 5], [1] * 5, slow)
        heavy = batcher.submit("b", [6, 7, 8], [60, 30, 60], slow)
        slow.may.set()
        assert await long.future == [1, 4, 9, 16, 25] and await heavy.future == [36, 49, 64]

    assert trial(body).batches[1:] == [[1, 2, 3, 4], [5], [6, 7], [8]]


def test_one_wrong_input_does_not_hurt_the_others():
    async def body(batcher: Batcher, slow: Slow) -> None:
        good, bad, other = (batcher.submit("a", inputs, [1] * len(inputs), slow) for inputs in ([1], [2, 13], [3]))
        slow.may.set()
        assert await good.future == [1] and await other.future == [9]
        with pytest.raises(UsageError, match="bad luck"):
            await bad.future

    trial(body)


def test_a_full_queue_refuses_and_those_who_left_make_room():
    async def body(batcher: Batcher, slow: Slow) -> None:
        jobs = [batcher.submit("a", [1, 2, 3, 4], [1] * 4, slow) for _ in range(2)]
        with pytest.raises(Problem, match="8 inputs wait already") as refused:
            batcher.submit("a", [5], [1], slow)
        assert refused.value.status == 429 and int(refused.value.headers["Retry-After"]) >= 1  # type: ignore[index]
        jobs[0].cancel()
        job = batcher.submit("a", [6], [1], slow)
        slow.may.set()
        assert await job.future == [36]

    assert [1, 2, 3, 4] in trial(body).batches


def test_nothing_is_computed_for_those_who_left():
    async def body(batcher: Batcher, slow: Slow) -> None:
        for number in range(4):
            batcher.submit("a", [number], [1], slow).cancel()
        slow.may.set()

    assert trial(body).batches == [[0]]


def test_a_closed_queue_finishes_what_it_has():
    async def body(batcher: Batcher, slow: Slow) -> None:
        job = batcher.submit("a", [3], [1], slow)
        batcher.close()
        with pytest.raises(Closed):
            batcher.submit("a", [4], [1], slow)
        slow.may.set()
        assert await job.future == [9]

    trial(body)


@settings(max_examples=40)
@given(
    st.lists(st.tuples(st.sampled_from("ab"), st.lists(st.integers(0, 12), min_size=1, max_size=4)), max_size=6),
    st.integers(1, 5),
)
def test_every_request_gets_its_own_results(requests: list[tuple[str, list[int]]], batch: int):
    async def body(batcher: Batcher, slow: Slow) -> None:
        jobs = [batcher.submit(key, inputs, [1] * len(inputs), slow) for key, inputs in requests]
        slow.may.set()
        for job, (_, inputs) in zip(jobs, requests, strict=True):
            assert await job.future == [one * one for one in inputs]

    found = trial(body, queue=100, batch=batch)
    assert all(len(inputs) <= batch for inputs in found.batches)


def test_clients_that_were_answered_together_are_computed_together_again(monkeypatch: pytest.MonkeyPatch):
    """Each of three clients asks four times, and each at another moment; the first request after a batch waits."""
    from allmask.serve import batching

    monkeypatch.setattr(batching, "PATIENCE", 1e6)

    async def body(batcher: Batcher, slow: Slow) -> None:
        async def client(number: int) -> None:
            for _ in range(4):
                await batcher.submit("a", [number], [1], slow).future
                await asyncio.sleep(0.01 * number)

        clients = asyncio.gather(*map(client, (1, 2, 3)))
        await asyncio.sleep(0)  # they have asked
        slow.may.set()
        await clients

    assert [sorted(batch) for batch in trial(body).batches] == [[0], *[[1, 2, 3]] * 4]


def test_the_event_loop_is_woken_up_once_for_a_batch(monkeypatch: pytest.MonkeyPatch):
    async def body(batcher: Batcher, slow: Slow) -> None:
        loop, woken = asyncio.get_running_loop(), []
        wake = loop.call_soon_threadsafe
        jobs = [batcher.submit("a", [number], [1], slow) for number in (1, 2, 3)]
        monkeypatch.setattr(loop, "call_soon_threadsafe", lambda *given: woken.append(given) or wake(*given))
        slow.may.set()
        assert [await job.future for job in jobs] == [[1], [4], [9]]
        assert len(woken) == 2  # for the first, which was computed already, and for these three

    assert trial(body).batches == [[0], [1, 2, 3]]
