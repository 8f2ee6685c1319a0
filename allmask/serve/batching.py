"""The queue of a model, and the one thread that computes for it.

What waits together and asks for the same (task and options) is computed together. A request that finds the thread idle
is computed at once. After a batch, the thread waits for as many inputs as that had, but only for a small part of the
time that it took: clients that were just answered together ask again together, and otherwise the first of them would be
computed alone while the others wait for it. A result has the same bits alone and in a batch, so neither clients nor
tests can tell how requests were grouped. The unit is an input, not a request: a long list is computed in several
batches.
"""

from __future__ import annotations

import asyncio
import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from allmask.serve.problems import Problem

log = logging.getLogger("allmask")
Compute = Callable[[list[Any]], Iterable[Any]]  # inputs in, as many results out
LONGEST_RETRY = 60  # seconds
MEMORY = 0.9  # of the moving average of the time per input
PATIENCE = 0.05  # of the time that a batch took: so long the next one waits to be as large


class Abandoned(Exception):
    """Nobody waits for this batch any more."""


class Closed(Exception):
    """The model was replaced, or the server stops: this queue takes no more."""


@dataclass(eq=False)
class Job:
    """The inputs of one request."""

    key: Hashable  # jobs with the same key can be computed together
    inputs: Sequence[Any]
    tokens: Sequence[int]  # of each input, read and written
    compute: Compute
    future: asyncio.Future[list[Any]]
    results: dict[int, Any] = field(default_factory=dict)
    gone: bool = False  # nobody waits for it

    def cancel(self) -> None:
        self.gone = True
        self.future.cancel()

    def deliver(self, error: BaseException | None = None) -> None:
        """Deliver the results, or the error, to whoever waits. Called in the event loop."""
        if self.future.done():
            return
        if error is not None:
            self.future.set_exception(error)
        else:
            self.future.set_result([self.results[number] for number in range(len(self.inputs))])


def finish(jobs: Sequence[Job], error: BaseException | None = None) -> None:
    """Deliver results, or an error, to those who wait for them; called in the thread of the model.

    The event loop is woken up once for all of them.
    """
    loops: dict[asyncio.AbstractEventLoop, list[Job]] = {}
    for job in jobs:
        job.gone = job.gone or error is not None
        loops.setdefault(job.future.get_loop(), []).append(job)
    for loop, waiting in loops.items():
        with suppress(RuntimeError):  # the event loop is closed
            loop.call_soon_threadsafe(_deliver, waiting, error)


def _deliver(jobs: Sequence[Job], error: BaseException | None) -> None:
    for job in jobs:
        job.deliver(error)


class Batcher:
    """`observe(inputs in the batch, seconds)` is called after each batch, `waits(inputs)` when the queue changes."""

    def __init__(
        self, name: str, queue: int, batch: int, batch_tokens: int,
        observe: Callable[[int, float], None] = lambda inputs, seconds: None,
        waits: Callable[[int], None] = lambda inputs: None,
    ):  # fmt: skip
        self.limits = queue, batch, batch_tokens
        self.observe, self.waits = observe, waits
        self.waiting: deque[tuple[Job, int]] = deque()
        self.current: list[tuple[Job, int]] = []
        self.per_input = 0.0  # seconds
        self.changed, self.closed = threading.Condition(), False
        self.enough = 1  # inputs that must wait for the thread to be woken up
        self.thread = threading.Thread(target=self._run, name=f"model {name}", daemon=True)
        self.thread.start()

    def submit(self, key: Hashable, inputs: Sequence[Any], tokens: Sequence[int], compute: Compute) -> Job:
        """Put a request into the queue; called in the event loop, whose `Job.future` has the results."""
        job = Job(key, inputs, tokens, compute, asyncio.get_running_loop().create_future())
        with self.changed:
            if self.closed:
                raise Closed
            self._expect_room(len(inputs))
            self.waiting.extend((job, number) for number in range(len(inputs)))
            self.waits(len(self.waiting))
            if len(self.waiting) >= self.enough:
                self.changed.notify()
        return job

    def expect_room(self, inputs: int) -> None:
        """Refuse a request for which the queue has no room at the moment."""
        with self.changed:
            self._expect_room(inputs)

    def _expect_room(self, inputs: int) -> None:
        if len(self.waiting) + inputs > self.limits[0]:
            self._drop_gone()
        if len(self.waiting) + inputs > self.limits[0]:
            seconds = min(LONGEST_RETRY, max(1, math.ceil(self.per_input * len(self.waiting))))
            message = f"{len(self.waiting)} inputs wait already; the queue holds {self.limits[0]}"
            raise Problem(429, message, f"try again in {seconds} s", {"Retry-After": str(seconds)})

    def check(self) -> None:
        """Raise Abandoned if nobody waits for what is being computed; called by what computes, now and then."""
        if all(job.gone for job, _ in self.current):
            raise Abandoned

    def close(self, wait: bool = False) -> None:
        """Compute what is in the queue, then end the thread."""
        with self.changed:
            self.closed = True
            self.changed.notify()
        if wait:
            self.thread.join()

    # ---- the thread ----------------------------------------------------------------------------------------

    def _run(self) -> None:
        before, patience = 0, 0.0  # inputs of the last batch; seconds to wait for as many
        while True:
            with self.changed:
                if before > 1:
                    self.enough = before
                    self.changed.wait_for(lambda: self.closed or len(self.waiting) >= self.enough, patience)
                    self.enough = 1
                self.changed.wait_for(lambda: self.closed or self.waiting)
                if not self.waiting:
                    return
                self.current = self._take()
                self.waits(len(self.waiting))
            before, start = len(self.current), time.perf_counter()
            if self.current:
                self._compute(self.current)
            self.current, patience = [], PATIENCE * (time.perf_counter() - start)

    def _drop_gone(self) -> None:
        self.waiting = deque(entry for entry in self.waiting if not entry[0].gone)

    def _take(self) -> list[tuple[Job, int]]:
        """Remove the first input from the queue, and all that can be computed with it."""
        self._drop_gone()
        taken: list[tuple[Job, int]] = []
        kept: deque[tuple[Job, int]] = deque()
        _, most, room = self.limits
        for job, number in self.waiting:
            fits = not taken or (job.key == taken[0][0].key and len(taken) < most and job.tokens[number] <= room)
            if fits:
                taken.append((job, number))
                room -= job.tokens[number]
            else:
                kept.append((job, number))
        self.waiting = kept
        return taken

    def _compute(self, batch: list[tuple[Job, int]]) -> None:
        start = time.perf_counter()
        try:
            results = list(batch[0][0].compute([job.inputs[number] for job, number in batch]))
            assert len(results) == len(batch), "one result for each input"
        except Abandoned:
            return
        except BaseException as error:  # also a panic in the Rust tokenizers
            if len(batch) == 1:
                finish([batch[0][0]], error)
            else:  # one input is at fault, and the others must not suffer for it
                for entry in batch:
                    if not entry[0].gone:
                        self.current = [entry]
                        self._compute([entry])
            return
        seconds = time.perf_counter() - start
        self.per_input += (1 - MEMORY if self.per_input else 1.0) * (seconds / len(batch) - self.per_input)
        for (job, number), result in zip(batch, results, strict=True):
            job.results[number] = result
        finish([job for job in dict.fromkeys(job for job, _ in batch) if len(job.results) == len(job.inputs)])
        self.observe(len(batch), seconds)
