"""Batches made ahead of time in the background, so that a training step does not wait for tokenizers.

Threads are enough: tokenizers and numpy work outside Python's lock.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice
from typing import Any, Generic, TypeVar

from allmask.errors import UsageError

T = TypeVar("T")
Encode = Callable[[Any], T]  # of whatever the plan holds, usually the numbers of examples
AHEAD = 2  # batches a worker makes before they are asked for


class Loader(Generic[T]):
    """An iterator over encoded batches, in the order of the plan whatever the number of workers.

    `waited` is how many seconds the caller has stood still for them. What `encode` raises is raised here, at the batch
    it belongs to. Leaving the `with`, or `close()`, ends the threads; so does the last batch.
    """

    def __init__(self, encode: Encode[T], plan: Iterable[Any], start: int = 0, workers: int = 1):
        if start < 0 or workers < 0:
            raise UsageError(f"batches: start {start} and workers {workers} must not be negative")
        self.waited = 0.0
        self._encode = encode
        self._plan = islice(plan, start, None)
        self._pool = ThreadPoolExecutor(workers, "allmask-data") if workers else None
        self._ahead = AHEAD * workers
        self._coming: deque[Future[T]] = deque()

    def __iter__(self) -> Iterator[T]:
        return self

    def __next__(self) -> T:
        begun = time.perf_counter()
        try:
            return self._take()
        except BaseException:  # StopIteration too: nothing comes after it
            self.close()
            raise
        finally:
            self.waited += time.perf_counter() - begun

    def _take(self) -> T:
        if self._pool is None:
            return self._encode(next(self._plan))
        self._order()
        if not self._coming:
            raise StopIteration
        made = self._coming.popleft().result()
        self._order()  # before the caller computes, so that the next is made meanwhile
        return made

    def _order(self) -> None:
        """Have as many batches under way as the workers may be ahead."""
        assert self._pool is not None
        for numbers in islice(self._plan, self._ahead - len(self._coming)):
            self._coming.append(self._pool.submit(self._encode, numbers))

    def close(self) -> None:
        """Drop what was made ahead and wait for the threads to end. Iterating afterwards yields nothing."""
        self._plan = iter(())
        self._coming.clear()
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)

    def __enter__(self) -> Loader[T]:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def batches(encode: Encode[T], plan: Iterable[Any], start: int = 0, workers: int = 1) -> Loader[T]:
    """`encode(numbers)` for each batch of the plan from number `start` on, made ahead by `workers` threads.

    With 0 workers they are made when they are asked for. `encode` must be a function of the numbers alone.
    """
    return Loader(encode, plan, start, workers)
