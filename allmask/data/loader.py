"""Batches prepared in the background, so that a training step does not wait for the tokenizer.

Threads are enough: tokenizers and numpy release Python's global lock.
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
AHEAD = 2  # batches that each worker prepares in advance


class Loader(Generic[T]):
    """An iterator over `encode(numbers)` for each batch of a plan, from batch `start` on, in the order of the plan.

    Batches are prepared in advance by `workers` threads; with 0 workers, when they are requested. `encode` must depend
    on the numbers alone; what it raises is raised at the batch it belongs to. `waited` is how many seconds the caller
    has waited. The threads end after the last batch, on leaving the `with` block, or on `close()`.
    """

    def __init__(self, encode: Callable[[Any], T], plan: Iterable[Any], start: int = 0, workers: int = 1):
        if start < 0 or workers < 0:
            raise UsageError(f"Loader: start {start} and workers {workers} must not be negative")
        self.waited = 0.0
        self._encode = encode
        self._plan = islice(plan, start, None)
        self._pool = ThreadPoolExecutor(workers, "allmask-data") if workers else None
        self._ahead = AHEAD * workers
        self._pending: deque[Future[T]] = deque()

    def __iter__(self) -> Iterator[T]:
        return self

    def __next__(self) -> T:
        begin = time.perf_counter()
        try:
            if self._pool is None:
                return self._encode(next(self._plan))
            self._submit(self._pool)
            if not self._pending:
                raise StopIteration
            batch = self._pending.popleft().result()
            self._submit(self._pool)  # now, so that the next batch is made while the caller computes
            return batch
        except BaseException:  # also StopIteration: nothing follows
            self.close()
            raise
        finally:
            self.waited += time.perf_counter() - begin

    def _submit(self, pool: ThreadPoolExecutor) -> None:
        for numbers in islice(self._plan, self._ahead - len(self._pending)):
            self._pending.append(pool.submit(self._encode, numbers))

    def close(self) -> None:
        """Drop the prepared batches and wait for the threads to end. Iterating afterwards yields nothing."""
        self._plan = iter(())
        self._pending.clear()
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)

    def __enter__(self) -> Loader[T]:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
