"""A function in a forked process: where memory is measured or limited, which must not concern the other tests.

    megabytes = peak_of(lambda: load(folder))
    words = forked(lambda: said_of(...))          # its result, as JSON

Needs Linux.
"""

from __future__ import annotations

import ctypes
import json
import os
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any


def forked(do: Callable[[], Any]) -> Any:
    """Call a function in a fork of this process and return its result, which must be plain JSON."""
    (answer, to) = os.pipe()
    pid = os.fork()
    if not pid:
        try:
            try:
                said = {"result": do()}
            except BaseException:
                said = {"error": traceback.format_exc()}
            with os.fdopen(to, "w") as stream:
                json.dump(said, stream)
        finally:
            os._exit(0)
    os.close(to)
    with os.fdopen(answer) as stream:
        text = stream.read()
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    said = json.loads(text) if text else {"error": f"the process ended with {status}"}
    assert "result" in said, said["error"]
    return said["result"]


def peak_of(do: Callable[[], object]) -> float:
    """Return the megabytes that a function takes at most, in a process of its own."""

    def measured() -> float:
        ctypes.CDLL(None).malloc_trim(0)  # memory that earlier tests freed would be used again, uncounted
        before = megabytes("VmRSS")
        reset_peak()
        do()
        return megabytes("VmHWM") - before

    return forked(measured)


def megabytes(name: str) -> float:
    """The size of this process that has this name in /proc: VmRSS now, VmHWM at most."""
    return int(Path("/proc/self/status").read_text().split(f"{name}:")[1].split()[0]) / 1024


def reset_peak() -> None:
    """Let VmHWM count from here."""
    Path("/proc/self/clear_refs").write_text("5")


def limit_memory(more: int) -> None:
    """Let this process take at most so many more bytes of addresses, for good."""
    import resource  # which Windows lacks

    size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (size + more,) * 2)
