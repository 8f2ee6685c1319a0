"""Several processes that train one model: how they join, what they exchange, and how a failure of one ends all.

torchrun --nproc-per-node 8 -m allmask pretrain …     # a `ProcessGroup` of eight
allmask pretrain …                                    # `SingleProcess`: torch.distributed is not used
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any, TypeVar
from uuid import uuid4

import torch

from allmask.devices import find_device
from allmask.errors import AllmaskError, ResourceError, UsageError

T = TypeVar("T")
MEETING = timedelta(minutes=10)  # until all processes have joined
STORE = 5  # seconds in which the store, if it is there, answers
_LAUNCHED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


class PeerFailed(AllmaskError):
    """Ends a process because another one failed and has reported why: nothing more should be printed."""

    def __init__(self, exit_code: int):
        super().__init__("another process of this run failed")
        self.exit_code = exit_code


@dataclass(frozen=True)
class SingleProcess:
    """The only process of a run, with the methods of a group."""

    rank: int = 0
    size: int = 1
    restarts: int = 0  # how often torchrun has restarted the processes
    sharded: bool = False
    on: str = "auto"  # --device

    @property
    def lead(self) -> bool:
        return self.rank == 0

    @property
    def device(self) -> torch.device:
        return find_device(self.on)

    def first(self, do: Callable[[], T], alone: bool = False) -> T | None:
        """Call a function in the first process while the others wait; they get None. `alone`: it may take long."""
        return do()

    def shared(self, value: T) -> T:
        """Broadcast the first process's value to all."""
        return value

    def gathered(self, value: T) -> list[T]:
        """Gather the values of all processes in all of them."""
        return [value]

    def total(self, values: Sequence[float]) -> list[float]:
        """Return the sums over all processes."""
        return list(values)

    def most(self, value: int) -> int:
        """Return the largest value of all processes."""
        return value


@dataclass(frozen=True, eq=False)
class ProcessGroup(SingleProcess):
    """One of the processes that torchrun started: the methods of `SingleProcess` are collective here."""

    store: Any = None  # torch's Store, shared by all processes, with a prefix for this attempt
    cpus: Any = None  # the same processes as a group that exchanges by gloo
    patient: Any = None  # the same with a longer timeout, for what the first one does alone

    def first(self, do: Callable[[], T], alone: bool = False) -> T | None:
        from torch.distributed import barrier

        done = do() if self.lead else None
        waiting = barrier(self.patient if alone else self.cpus, async_op=True)
        assert waiting is not None
        while not waiting.is_completed():  # not wait() at once: signals are handled meanwhile
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
        all_gather_object(values, value, self.cpus)
        return values

    def total(self, values: Sequence[float]) -> list[float]:
        from torch.distributed import all_reduce

        sums = torch.tensor(values, dtype=torch.float64)
        all_reduce(sums)
        return sums.tolist()

    def most(self, value: int) -> int:
        from torch.distributed import ReduceOp, all_reduce

        largest = torch.tensor(value)
        all_reduce(largest, ReduceOp.MAX)
        return int(largest)

    # ---- failures --------------------------------------------------------------------------------------------

    @contextmanager
    def ending(self) -> Iterator[None]:
        """Let the first process that fails report why; the others end silently with its exit code."""
        from torch.distributed import destroy_process_group

        try:
            yield
        except BaseException as error:
            known = _in_words(error)
            code = self._first_code(known)
            if code is not None:
                raise PeerFailed(code) from None
            raise known from (None if known is error else error)
        destroy_process_group()

    def _first_code(self, error: BaseException) -> int | None:
        """Return the exit code of the process that failed first; None if it is this one.

        Also None if the store does not answer: it may be kept by a process that is gone, or stopped. It is asked in a
        thread, because a request to a stopped process has no timeout.
        """
        found: list[int] = []

        def ask() -> None:
            with suppress(Exception):
                if self.store.add("failures", 1) == 1:
                    self.store.set("code", str(exit_code(error)))
                else:
                    self.store.wait(["code"], timedelta(seconds=STORE))
                    found.append(int(self.store.get("code")))

        thread = threading.Thread(target=ask, daemon=True)
        thread.start()
        thread.join(STORE + 1)
        return found[0] if found else None


Group = SingleProcess | ProcessGroup


def exit_code(error: BaseException) -> int:
    if isinstance(error, KeyboardInterrupt):
        return 130
    code = getattr(error, "exit_code", getattr(error, "code", 1))
    return code if isinstance(code, int) else 1


def _in_words(error: BaseException) -> BaseException:
    """Return a readable error instead of torch's for a lost process; return any other error unchanged."""
    from torch.distributed import DistError

    lost = isinstance(error, DistError) or (isinstance(error, RuntimeError) and "gloo" in str(error))
    if not lost or isinstance(error, AllmaskError):
        return error
    summary = str(error).strip().splitlines()[0].split(". This is typically")[0]
    found = re.search(r"[Tt]imed out (?:after )?waiting (?:for )?(\d+) ?ms", str(error))
    if found is not None:
        return ResourceError(
            f"another process of this run has not answered for {int(found[1]) / 1000:g} s",
            "it may be stopped, or wait for a disk or a network; end it, and continue with the same command and\n"
            "--resume. --timeout and --timeout-alone say how long to wait",
        )
    return ResourceError(
        f"the connection to another process of this run was lost: {summary.rpartition('] ')[2] or summary}",
        "torchrun names the process that ended; continue with the same command and --resume\n"
        "(torchrun --max-restarts 3 does so by itself)",
    )


# ---- joining -------------------------------------------------------------------------------------------------


def launched() -> bool:
    """Whether torchrun, or another launcher that sets the same variables, started this process."""
    return all(name in os.environ for name in _LAUNCHED)


def expect_alone() -> None:
    """Refuse to run under torchrun with several processes."""
    if launched() and os.environ["WORLD_SIZE"] != "1":
        raise UsageError("this training runs in one process", "start it without torchrun")


@contextmanager
def join_processes(
    shard: bool = False, device: str = "auto", timeout: float = 30, timeout_alone: float = 1440
) -> Iterator[Group]:
    """Join the processes that run this command. `shard`: each keeps a part of the weights instead of all.

    A process that does not answer for `timeout` minutes ends all; `timeout_alone` counts while the first one works and
    the others wait for it.
    """
    if not launched():
        yield SingleProcess(on=device)
        return
    group = join(shard, device, timedelta(minutes=timeout), timedelta(minutes=timeout_alone))
    with group.ending():
        yield group


def join(shard: bool, device: str, timeout: timedelta, timeout_alone: timedelta) -> ProcessGroup:
    """Connect to the other processes: by gloo between CPUs, by NCCL between GPUs."""
    from torch import distributed as dist
    from torch.distributed.distributed_c10d import PrefixStore
    from torch.distributed.rendezvous import rendezvous

    if device == "mps":
        raise UsageError("several processes share a CPU or CUDA GPUs, not an Apple GPU", "leave out --device mps")
    cuda = find_device(device).type == "cuda"
    if cuda:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
    shared, rank, size = next(iter(rendezvous("env://", timeout=MEETING)))
    store = PrefixStore(attempt(shared, rank, size), shared)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if cuda else "gloo", store=store, rank=rank, world_size=size, timeout=timeout
    )
    cpus = dist.new_group(backend="gloo", timeout=timeout)
    patient = dist.new_group(backend="gloo", timeout=timeout_alone)
    count = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0))
    alone = ProcessGroup(rank, size, count, shard, device, store, cpus, patient)
    # Only the host where a process died counts a restart, so take the largest count
    return replace(alone, restarts=alone.most(alone.restarts))


def attempt(store: Any, rank: int, size: int, patience: timedelta = MEETING) -> str:
    """Agree on a name for this attempt that all its processes share and no earlier attempt used.

    The store outlives the processes: with the entries of an earlier attempt a process would wait for others that are
    gone. The number of restarts cannot be the name, because hosts count them differently. Instead each process writes a
    random word. The first process publishes the words of all, repeatedly, since some may be old, until every process
    has found its own.
    """
    mine, deadline = uuid4().hex, time.monotonic() + patience.total_seconds()
    store.set(f"word/{rank}", mine)
    while time.monotonic() < deadline:
        if rank == 0:
            written = [other for other in range(size) if store.check([f"word/{other}"])]
            store.set("words", json.dumps({str(other): store.get(f"word/{other}").decode() for other in written}))
        words = json.loads(store.get("words")) if store.check(["words"]) else {}
        if words.get(str(rank)) == mine and len(words) == size:
            name = hashlib.sha256(repr(sorted(words.items())).encode()).hexdigest()[:16]
            store.set(f"{name}/{rank}", "heard")
            if store.check([f"{name}/{other}" for other in range(size)]):
                return name
        time.sleep(0.02 if size <= 16 else 0.2)
    raise ResourceError(
        f"process {rank} of {size} waited {patience} for the others",
        "check that all hosts can reach the first one, and that all were started",
    )
