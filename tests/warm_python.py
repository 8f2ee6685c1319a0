"""A Python that starts at once: a server has imported torch and the library, and each process is a fork of it.

    with warm_python(folder, "import torch") as python:  # the path of a program
        subprocess.run([python, "-m", "allmask", …])      # in place of sys.executable

The server runs that code when it is first asked for a process, so it costs next to nothing where no test asks.

The program passes its arguments, environment, folder and open files to the server, forwards signals to the process
forked for it, and ends as that does, by the same code or the same signal. A process is started anew, as by execution,
but for one thing: the imports are done. What must be a real start is tested by one (tests/test_startup.py).
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
from contextlib import contextmanager, suppress

FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
MOST = 64  # open files of a process
COUNTING = "PROMETHEUS_MULTIPROC_DIR"  # in the environment: what counts requests looks for it when it is imported
NETWORK = "WARM_PYTHON_NETWORK"  # in the environment: the network namespace to run in, which a server is not in


# ---- the program, which imports next to nothing ----------------------------------------------------------------


def ask(address: str, words: list[str]) -> None:
    """Have a process started, wait for it, and end as it did."""
    inherited = [0, 1, 2]
    for number in sorted(int(name) for name in os.listdir("/dev/fd")):
        with suppress(OSError):  # it listed the folder itself
            inherited += [number] if number > 2 and os.get_inheritable(number) else []
    with socket.socket(socket.AF_UNIX) as server:
        signal.pthread_sigmask(signal.SIG_BLOCK, FORWARDED)
        server.connect(address)
        asked = {"words": words, "environment": dict(os.environ), "folder": os.getcwd(), "files": inherited}
        request = json.dumps(asked).encode()
        socket.send_fds(server, [len(request).to_bytes(4, "big")], inherited)
        server.sendall(request)
        answers = server.makefile("rb")
        child = int(answers.readline())
        for number in FORWARDED:
            signal.signal(number, lambda number, _: os.kill(child, number))
        signal.pthread_sigmask(signal.SIG_UNBLOCK, FORWARDED)
        code = int(answers.readline() or -signal.SIGKILL)
    if code < 0:
        signal.signal(-code, signal.SIG_DFL) if -code != signal.SIGKILL else None
        os.kill(os.getpid(), -code)
    os._exit(code)


# ---- the server ------------------------------------------------------------------------------------------------


def serve(address: str, code: str) -> list[str]:
    """Fork for each request, until stdin ends. Returns only in a process that was asked for: the words it is to run.

    It tells the program of its process's end, and if the program listens no more, it ends that process.
    """
    import gc
    import select

    listener = socket.socket(socket.AF_UNIX)
    listener.bind(address)
    listener.listen(64)
    woken, wake = socket.socketpair()
    woken.setblocking(False)
    wake.setblocking(False)
    signal.set_wakeup_fd(wake.fileno(), warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    asked: dict[int, socket.socket] = {}  # by process; those that listen no more are left out
    print("ready", flush=True)
    while True:
        ready, _, _ = select.select([listener, sys.stdin, woken, *asked.values()], [], [])
        if sys.stdin in ready:
            os._exit(0)
        for child in [child for child, client in asked.items() if client in ready]:
            asked.pop(child).close()  # nothing is said after a request: this is its end
            os.kill(child, signal.SIGKILL)
        if woken in ready:
            woken.recv(4096)
            report_ends(asked)
        if listener not in ready:
            continue
        client, _ = listener.accept()
        if code:
            exec(code, {})
            code = ""
            gc.collect()
            gc.freeze()  # so that no fork walks through what all of them share, and thereby copies it
        size, files, _, _ = socket.recv_fds(client, 4, MOST)
        request = json.loads(client.makefile("rb").read(int.from_bytes(size, "big")))
        child = os.fork()
        if not child:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            for each in (listener, woken, wake, client, *asked.values()):
                each.close()
            return prepare(request, files)
        for file in files:
            os.close(file)
        asked[child] = client
        with suppress(OSError):  # nobody listens any more, which is seen next
            client.sendall(b"%d\n" % child)


def report_ends(asked: dict[int, socket.socket]) -> None:
    """Tell of the processes that have ended, and forget them."""
    with suppress(ChildProcessError):  # none is left
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            client = asked.pop(ended[0], None)
            if client is not None:
                with client, suppress(OSError):  # nobody listens any more
                    client.sendall(b"%d\n" % os.waitstatus_to_exitcode(ended[1]))


def prepare(request: dict, files: list[int]) -> list[str]:
    """Become the process that was asked for."""
    import fcntl

    high = [fcntl.fcntl(file, fcntl.F_DUPFD, 4 * MOST) for file in files]  # where no number is wanted
    for file in files:
        os.close(file)
    for number, file in zip(request["files"], high, strict=True):
        os.dup2(file, number)
        os.close(file)
    sys.stdin = open(0, closefd=False)  # noqa: SIM115
    sys.stdout = open(1, "w", 1 if request["words"][0] == "-u" or os.isatty(1) else -1, closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", 1, closefd=False, errors="backslashreplace")  # noqa: SIM115
    os.environ.clear()
    os.environ.update(request["environment"])
    os.chdir(request["folder"])
    paths = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    sys.path[1:1] = [path for path in paths if path and path not in sys.path]
    if COUNTING in os.environ:
        for name in [name for name in sys.modules if name.startswith(("prometheus_client", "allmask.serve"))]:
            del sys.modules[name]
    if NETWORK in os.environ:
        import ctypes

        with open(f"/run/netns/{os.environ[NETWORK]}") as namespace:
            assert ctypes.CDLL(None).setns(namespace.fileno(), 0) == 0
    return request["words"]


def execute(words: list[str]) -> None:
    """What an interpreter does with its arguments."""
    import runpy

    words = words[1:] if words[0] == "-u" else words
    if words[0] == "-c":
        sys.argv, sys.path[0] = ["-c", *words[2:]], ""
        exec(compile(words[1], "<string>", "exec"), {"__name__": "__main__"})
    elif words[0] == "-m":
        sys.argv = words[1:]
        sys.modules.pop(words[1], None)
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv, sys.path[0] = words, os.path.dirname(words[0])
        runpy.run_path(words[0], run_name="__main__")


def end(run, words: list[str]) -> None:
    """Run it and end as an interpreter does, except that modules are not taken apart: a fork would copy them first."""
    import atexit
    import threading

    try:
        run(words)
        code = 0
    except SystemExit as asked:
        if asked.code is not None and not isinstance(asked.code, int):
            raise
        code = asked.code or 0
    threading._shutdown()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code & 0xFF)


# ---- its users -------------------------------------------------------------------------------------------------


@contextmanager
def warm_python(folder, code):
    """A server in a process of its own, whose forks have run this code; yields the program."""
    import subprocess

    address, program = folder / "socket", folder / "python"
    program.write_text(f'#!/bin/sh\nexec "{sys.executable}" -ISu "{__file__}" ask "{address}" "$@"\n')
    program.chmod(0o755)
    command = [sys.executable, __file__, "serve", str(address), code]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as server:
        assert server.stdout.readline() == b"ready\n"
        yield str(program)
        server.stdin.close()


if __name__ == "__main__":
    if sys.argv[1] == "ask":
        ask(sys.argv[2], sys.argv[3:])
    end(execute, serve(sys.argv[2], sys.argv[3]))
