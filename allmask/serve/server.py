"""The process that serves: it listens, reloads on SIGHUP, and drains on SIGTERM.

Draining: /ready answers 503 and each answer closes its connection; the server stops listening, answers all that it
has accepted, and ends. Whoever has not been answered after --grace seconds is cut off.
"""

from __future__ import annotations

import asyncio
import ctypes
import logging
import signal
import socket
import struct
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import uvicorn
from starlette.applications import Starlette
from uvicorn.protocols.http.h11_impl import H11Protocol

from allmask.errors import ResourceError
from allmask.serve.settings import Settings

log = logging.getLogger("allmask")
HEADER_SECONDS = 10.0  # for the head of a request to arrive; then the connection is closed
SETTLE = 0.1  # seconds until a connection that was just accepted is among the open ones
LINGER = 1.0  # seconds after the last answer in which a request may still arrive on an open connection
BACKLOG = 2048
ATTACH_FILTER, RETURN = 26, 6  # SO_ATTACH_FILTER and BPF_RET of Linux


class JoinedWrites:
    """A transport that keeps what is written until the next write, or the next turn of the event loop.

    The head and the body of an answer are then one call of the system, and the client wakes up once.
    """

    def __init__(self, transport: Any, loop: asyncio.AbstractEventLoop):
        self.transport, self.loop = transport, loop
        self.kept = b""

    def __getattr__(self, name: str) -> Any:
        return getattr(self.transport, name)

    def write(self, data: bytes) -> None:
        if self.kept:
            data, self.kept = self.kept + data, b""
            self.transport.write(data)
        elif data:
            self.kept = data
            self.loop.call_soon(self.flush)

    def flush(self) -> None:
        if self.kept:
            data, self.kept = self.kept, b""
            self.transport.write(data)

    def close(self) -> None:
        self.flush()
        self.transport.close()


class Protocol(H11Protocol):
    """HTTP/1.1 with a limit to how long a client may take to send the head of a request."""

    head_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(JoinedWrites(transport, self.loop))  # type: ignore[arg-type]
        self._time_head()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._time_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        super().connection_lost(exc)

    def _time_head(self) -> None:
        if self.is_busy:
            self._stop_timer()
        elif self.head_timer is None:
            self.head_timer = self.loop.call_later(HEADER_SECONDS, self.transport.close)

    def _stop_timer(self) -> None:
        if self.head_timer is not None:
            self.head_timer.cancel()
            self.head_timer = None

    @property
    def is_busy(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete


class Server(uvicorn.Server):
    """A server that drains before it stops."""

    def __init__(self, config: uvicorn.Config, app: Starlette, settings: Settings, ready: Callable[[], None]):
        super().__init__(config)
        self.app, self.grace, self.ready = app, settings.grace, ready
        self.alone = settings.workers == 1  # nobody else listens to the same socket

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Let SIGTERM and SIGINT end the server; unlike uvicorn's own, it then returns, so the exit code is 0."""
        handled = (signal.SIGTERM, signal.SIGINT) if threading.current_thread() is threading.main_thread() else ()
        before = {number: signal.signal(number, self.handle_exit) for number in handled}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if hasattr(signal, "SIGHUP") and threading.current_thread() is threading.main_thread():
            loop, models = asyncio.get_running_loop(), self.app.state.models
            loop.add_signal_handler(signal.SIGHUP, lambda: loop.run_in_executor(None, models.reload))
        self.ready()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self.app.state.draining = True
        await self._stop_listening(sockets or [])
        loop = asyncio.get_running_loop()
        end, last = loop.time() + self.grace, loop.time()
        while loop.time() < end and not self.force_exit:
            connections = self.server_state.connections
            if any(getattr(connection, "is_busy", False) for connection in connections):
                last = loop.time()
            elif loop.time() - last > (LINGER if connections else SETTLE):
                break
            await asyncio.sleep(0.02)
        await super().shutdown(sockets)
        self.app.state.models.close()

    async def _stop_listening(self, sockets: list[socket.socket]) -> None:
        """Stop to listen; connections that were made, but not accepted yet, are accepted first, not reset."""
        loop, waiting = asyncio.get_running_loop(), []
        for listener in sockets:
            if self.alone:
                refuse_new(listener)
            with suppress(BlockingIOError, NotImplementedError):  # the second: Windows
                loop.remove_reader(listener.fileno())
                while True:
                    waiting.append(listener.accept()[0])
        for server in self.servers:
            server.close()
        config, state = self.config, self.server_state
        for connection in waiting:
            connection.setblocking(False)
            await loop.connect_accepted_socket(lambda: Protocol(config, state, self.lifespan.state, loop), connection)


def bind(settings: Settings) -> socket.socket:
    """Return a socket bound to the address, or an error that says why it cannot be had."""
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    found = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)  # named, or asyncio sets no TCP_NODELAY
    found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        found.bind((settings.host, settings.port))
    except OSError as error:
        found.close()
        where = f"{settings.host}:{settings.port}"
        raise ResourceError(f"{where}: {error.strerror or error}", "choose another --port or --host") from None
    return found


def refuse_new(listener: socket.socket) -> None:
    """Drop what arrives for a socket that listens (Linux), also for other processes that have it.

    Closing it resets connections that wait to be accepted. Those can be accepted first, but more may be made meanwhile.
    """
    if sys.platform != "linux":
        return
    program = ctypes.create_string_buffer(struct.pack("HBBI", RETURN, 0, 0, 0))  # of a packet, 0 bytes are kept
    with suppress(OSError):
        listener.setsockopt(socket.SOL_SOCKET, ATTACH_FILTER, struct.pack("HP", 1, ctypes.addressof(program)))


def address(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def serve(
    app: Starlette, settings: Settings, listener: socket.socket, ready: Callable[[], None] = lambda: None
) -> None:
    """Serve until a signal ends it; call `ready` once requests are accepted."""
    logging.getLogger("uvicorn").setLevel(logging.ERROR)  # what is not HTTP is answered with 400, not logged
    config = uvicorn.Config(
        app, http=Protocol, ws="none", lifespan="off", log_config=None, access_log=False, backlog=BACKLOG,
        timeout_graceful_shutdown=max(1, int(settings.grace)), timeout_keep_alive=30, server_header=False,
    )  # fmt: skip
    Server(config, app, settings, ready).run([listener])
