"""One process that serves, or several that share a socket and a parent.

The parent loads no model. It passes SIGTERM, SIGINT and SIGHUP on, and starts a worker anew that died.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
import socket
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import wait
from typing import Any

from allmask.devices import usable_cores
from allmask.errors import AllmaskError
from allmask.serve.settings import Settings, Source

log = logging.getLogger("allmask")
FOLDER = "PROMETHEUS_MULTIPROC_DIR"
FORWARDED = ("SIGTERM", "SIGINT", "SIGHUP")


@dataclass(frozen=True)
class Plan:
    """What a process serves; it can be sent to another process."""

    models: Sequence[str]
    settings: Settings
    tasks: Sequence[str] = ()
    precision: str = "auto"
    device: str = "auto"
    page: bool = False

    def serve(self, listener: socket.socket, ready: Callable[[], None]) -> None:
        """Load the models and serve until a signal ends it; call `ready` once requests are accepted."""
        from allmask.serve.app import make_app
        from allmask.serve.models import load_models
        from allmask.serve.server import serve

        models = load_models(self.models, self.settings, self.tasks, self.precision, self.device)
        app = make_app(models, self.settings, self.page)
        serve(app, self.settings, listener, ready)


def run(plan: Plan, listener: socket.socket, say: Callable[[str], None]) -> int:
    """Serve with as many processes as the settings say; return an exit code."""
    from allmask.serve.server import address

    names = ", ".join(source.name for source in Source.parse_all(plan.models))
    where = address(listener)
    docs = f"; {where}/play" if plan.page else ""

    def ready() -> None:
        say(f"serving {names} at {where} (what there is: {where}/docs{docs})")

    if plan.settings.workers == 1:
        plan.serve(listener, ready)
        return 0
    with tempfile.TemporaryDirectory(prefix="allmask-metrics-") as folder:
        os.environ[FOLDER] = folder  # before the workers import prometheus_client
        os.environ.setdefault("OMP_NUM_THREADS", str(max(1, usable_cores() // plan.settings.workers)))
        return Parent(plan, listener, ready).run()


class Parent:
    def __init__(self, plan: Plan, listener: socket.socket, ready: Callable[[], None]):
        self.plan, self.listener, self.ready = plan, listener, ready
        self.spawn = multiprocessing.get_context("spawn")
        self.started: Any = self.spawn.Semaphore(0)  # released by each worker that is ready
        self.workers: list[Any] = []
        self.stopping = False

    def run(self) -> int:
        for name in FORWARDED:
            if number := getattr(signal, name, None):
                signal.signal(number, self._forward)
        self.workers = [self._start() for _ in range(self.plan.settings.workers)]
        waiting, code = len(self.workers), 0
        while self.workers:
            while waiting and self.started.acquire(block=False):
                waiting -= 1
                if waiting == 0:
                    self.ready()
            wait([worker.sentinel for worker in self.workers], timeout=0.2)
            for worker in [one for one in self.workers if not one.is_alive()]:
                code = self._ended(worker, waiting > 0) or code
        return code

    def _start(self) -> Any:
        worker = self.spawn.Process(target=_work, args=(self.plan, self.listener, self.started))
        worker.start()
        return worker

    def _ended(self, worker: Any, starting: bool) -> int:
        """Replace a worker that ended unasked; if it could not even start, stop all and return its exit code."""
        from prometheus_client.multiprocess import mark_process_dead

        mark_process_dead(worker.pid, os.environ[FOLDER])
        self.workers.remove(worker)
        if self.stopping:
            return 0
        if starting:
            self._forward(signal.SIGTERM)
            return worker.exitcode if worker.exitcode > 0 else 1
        log.error("worker %s died (%s); another is started", worker.pid, worker.exitcode)
        self.workers.append(self._start())
        return 0

    def _forward(self, number: int, frame: Any = None) -> None:
        if number != getattr(signal, "SIGHUP", None):
            from allmask.serve.server import refuse_new

            self.stopping = True
            if self.listener.fileno() >= 0:  # else this is not the first signal
                refuse_new(self.listener)
            self.listener.close()  # the workers have their own
        for worker in self.workers:
            if worker.pid is not None and worker.is_alive():
                os.kill(worker.pid, number)


def _work(plan: Plan, listener: socket.socket, started: Any) -> None:
    """The whole life of a worker."""
    from allmask.cli import note, show_log

    show_log()
    try:
        plan.serve(listener, started.release)
    except AllmaskError as error:
        note(f"error[{error.kind}]: {error}", important=True)
        raise SystemExit(error.exit_code) from None
