"""Several processes as one run: who is there, what they agree on, and how the failure of one ends all, said once.

torchrun --nproc-per-node 8 -m allmask pretrain …     # a `Crew` of eight
allmask pretrain …                                    # `Alone`: nothing of torch.distributed is touched
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar
from uuid import uuid4

import torch

from allmask.errors import AllmaskError, ResourceError, UsageError

T = TypeVar("T")
STEP = timedelta(minutes=30)  # until a process that does not answer is given up, within a step
PATIENCE = timedelta(days=7)  # the same while the first one works alone: it may have a large text to read
MEETING = timedelta(minutes=10)  # until all have met
_LAUNCHED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


class Echo(AllmaskError):
    """The end of a process because another one failed, which has said why. Not to be said again."""

    def __init__(self, exit_code: int):
        super().__init__("another process of this run failed")
        self.exit_code = exit_code


@dataclass(frozen=True)
class Alone:
    """One process: it leads, and agrees with itself."""

    rank: int = 0
    size: int = 1
    restarts: int = 0
    sharded: bool = False

    @property
    def lead(self) -> bool:
        return True

    @property
    def device(self) -> torch.device:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")

    def first(self, do: Callable[[], T]) -> T | None:
        """Have the first process do something while the others wait for it; they get None."""
        return do()

    def shared(self, value: T) -> T:
        """The first process's value, for all."""
        return value

    def gathered(self, value: T) -> list[T]:
        """The values of all, for all."""
        return [value]

    def total(self, values: Sequence[float]) -> list[float]:
        """The sums over all processes."""
        return list(values)

    def most(self, value: int) -> int:
        """The largest of all processes' values."""
        return value


@dataclass(frozen=True, eq=False)
class Crew:
    """This process among those that torchrun started; see `Alone` for what the methods mean. All call them alike."""

    rank: int
    size: int
    restarts: int  # how often torchrun has started them again
    sharded: bool
    store: Any  # notes that all can read: torch's Store, under a name of this attempt's own
    patient: Any  # all processes again, with more time to answer

    @property
    def lead(self) -> bool:
        return self.rank == 0

    @property
    def device(self) -> torch.device:
        return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")

    def first(self, do: Callable[[], T]) -> T | None:
        from torch.distributed import barrier

        done = do() if self.lead else None
        waiting = barrier(self.patient, async_op=True)
        assert waiting is not None
        while not waiting.is_completed():  # not wait() at once: a signal is heard between two looks
            time.sleep(0.005)
        waiting.wait()
        return done

    def shared(self, value: T) -> T:
        from torch.distributed import broadcast_object_list

        box = [value]
        broadcast_object_list(box, 0, device=torch.device("cpu"))
        return box[0]

    def gathered(self, value: T) -> list[T]:
        from torch.distributed import all_gather_object

        values: list[Any] = [None] * self.size
        all_gather_object(values, value, self.patient)
        return values

    def total(self, values: Sequence[float]) -> list[float]:
        return self._reduced(torch.tensor(values, dtype=torch.float64), "SUM").tolist()

    def most(self, value: int) -> int:
        return int(self._reduced(torch.tensor(value), "MAX"))

    def _reduced(self, values: torch.Tensor, how: str) -> torch.Tensor:
        from torch.distributed import ReduceOp, all_reduce

        all_reduce(values, getattr(ReduceOp, how))
        return values

    # ---- the end ---------------------------------------------------------------------------------------------

    @contextmanager
    def ending(self) -> Iterator[None]:
        """The first process to fail says why; the others, which then cannot go on, end quietly with its exit code."""
        from torch.distributed import destroy_process_group

        try:
            yield
        except BaseException as error:
            known = _in_words(error)
            code = self._first_code(known)
            if code is not None:
                raise Echo(code) from None
            raise known from (None if known is error else error)
        destroy_process_group()

    def _first_code(self, error: BaseException) -> int | None:
        """The exit code of the process that failed first; None if it is this one."""
        try:
            if self.store.add("failures", 1) == 1:
                self.store.set("code", str(exit_code(error)))
                return None
            self.store.wait(["code"], timedelta(seconds=5))
            return int(self.store.get("code"))
        except Exception:  # the notes are gone with the process that kept them
            return None


def exit_code(error: BaseException) -> int:
    if isinstance(error, KeyboardInterrupt):
        return 130
    code = getattr(error, "exit_code", getattr(error, "code", 1))
    return code if isinstance(code, int) else 1


def _in_words(error: BaseException) -> BaseException:
    """What torch says when a process that was waited for is gone, in words; any other error as it is."""
    from torch.distributed import DistError

    lost = isinstance(error, DistError) or (isinstance(error, RuntimeError) and "gloo" in str(error))
    if not lost or isinstance(error, AllmaskError):
        return error
    summary = str(error).strip().splitlines()[0].split(". This is typically")[0]
    return ResourceError(
        f"the connection to another process of this run was lost: {summary.rpartition('] ')[2] or summary}",
        "torchrun names the one that ended; go on with the same command and --resume\n"
        "(torchrun --max-restarts 3 does it by itself)",
    )


# ---- the beginning -------------------------------------------------------------------------------------------


def launched() -> bool:
    """Whether torchrun, or something that sets the same variables, started this process."""
    return all(name in os.environ for name in _LAUNCHED)


def expect_alone() -> None:
    """Of what one process trains: that torchrun did not start several."""
    if launched() and os.environ["WORLD_SIZE"] != "1":
        raise UsageError("this is trained by one process", "start it without torchrun")


@contextmanager
def company(shard: bool = False) -> Iterator[Alone | Crew]:
    """Those who run this command. `shard`: each keeps a part of the weights, not all of them."""
    if not launched():
        if shard:
            raise UsageError("--shard needs several processes", "torchrun --nproc-per-node 8 -m allmask pretrain …")
        yield Alone()
        return
    crew = join(shard)
    with crew.ending():
        yield crew


def join(shard: bool) -> Crew:
    """Meet the other processes: gloo between CPUs, NCCL between GPUs."""
    from torch import distributed as dist
    from torch.distributed.distributed_c10d import PrefixStore
    from torch.distributed.rendezvous import rendezvous

    cuda = torch.cuda.is_available()
    if cuda:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
    shared, rank, size = next(iter(rendezvous("env://", timeout=MEETING)))
    store = PrefixStore(attempt(shared, rank, size), shared)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if cuda else "gloo", store=store, rank=rank, world_size=size, timeout=STEP
    )
    patient = dist.new_group(backend="gloo", timeout=PATIENCE)
    alone = Crew(rank, size, int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0)), shard, store, patient)
    # Of several hosts only the one where a process died counts a restart
    return Crew(rank, size, alone.most(alone.restarts), shard, store, patient)


def attempt(store: Any, rank: int, size: int, patience: timedelta = MEETING) -> str:
    """A name that all processes of this attempt share and none of an earlier one knew.

    The store outlives the processes, so an attempt that read the notes of the one before would wait for the dead. The
    number of restarts will not do as a name: hosts count them differently. Instead each process brings a word of its
    own. The first one collects the words of all, old ones perhaps among them, and says them aloud until everybody has
    heard its own word.
    """
    mine, deadline = uuid4().hex, time.monotonic() + patience.total_seconds()
    store.set(f"word/{rank}", mine)
    while time.monotonic() < deadline:
        if rank == 0:
            _say_words(store, size)
        words = json.loads(store.get("words")) if store.check(["words"]) else {}
        if words.get(str(rank)) == mine and len(words) == size:
            name = hashlib.sha256(repr(sorted(words.items())).encode()).hexdigest()[:16]
            store.set(f"{name}/{rank}", "heard")
            if store.check([f"{name}/{other}" for other in range(size)]):
                return name
        time.sleep(0.02 if size <= 16 else 0.2)
    raise ResourceError(
        f"process {rank} of {size} waited {patience} for the others",
        "see whether all hosts reach the first one, and whether all were started",
    )


def _say_words(store: Any, size: int) -> None:
    there = [rank for rank in range(size) if store.check([f"word/{rank}"])]
    store.set("words", json.dumps({str(rank): store.get(f"word/{rank}").decode() for rank in there}))
