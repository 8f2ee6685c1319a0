"""What only Linux and macOS have is not needed: every module can be imported, and files can be written, without it."""

from __future__ import annotations

import errno
import fcntl
import os
import subprocess
import sys
from pathlib import Path

import pytest

from allmask import files
from allmask.cli import _output

ROOT = Path(__file__).parents[1]
MODULES = ("crypt", "fcntl", "grp", "posix", "pty", "pwd", "readline", "resource", "syslog", "termios", "tty")
# Other libraries import all of those as they please, so they are imported first and keep what they have.
IMPORTS = f"""
import os, signal, sys
from importlib import import_module
from pathlib import Path

names = [".".join(path.with_suffix("").parts).removesuffix(".__init__") for path in Path("allmask").rglob("*.py")]
names = sorted(set(names) - {{"allmask.__main__"}})
for name in names:
    import_module(name)
for name in [name for name in sys.modules if name.split(".")[0] == "allmask"]:
    del sys.modules[name]
for name in {MODULES}:
    sys.modules[name] = None
for name in "fork getuid geteuid getgid getpgid setsid sched_getaffinity getloadavg uname sysconf nice chown".split():
    delattr(os, name)
for name in "SIGALRM SIGCHLD SIGHUP SIGKILL SIGPIPE SIGQUIT SIGUSR1 SIGUSR2 setitimer alarm".split():
    delattr(signal, name)
for name in names:
    import_module(name)
from allmask.cli.main import main
sys.exit(main(["mask", "prefix", "--source", "你想吃啥", "--target", "白切鸡"]))
"""


def test_every_module_imports_and_a_command_runs_without_what_windows_lacks(python: str):
    ran = subprocess.run([python, "-c", IMPORTS], cwd=ROOT, capture_output=True, text=True)
    assert ran.returncode == 0 and "白" in ran.stdout, ran.stderr


def test_a_file_is_synced_where_only_writable_ones_can_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """As on Windows: neither a folder nor a file that is open for reading can be synced."""
    synced, opened = [], os.open

    def open_file(path: Path, flags: int) -> int:
        if Path(path).is_dir():
            raise PermissionError(errno.EACCES, "is a folder", str(path))
        return opened(path, flags)

    def fsync(handle: int) -> None:
        if fcntl.fcntl(handle, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY:
            raise OSError(errno.EBADF, "Bad file descriptor")
        synced.append(handle)

    monkeypatch.setattr(sys, "platform", "win32")
    monkeypatch.setattr(os, "open", open_file)
    monkeypatch.setattr(os, "fsync", fsync)
    files.write_atomically(tmp_path / "a.txt", "白切鸡")
    with files.new_folder(tmp_path / "new") as folder:
        (folder / "b.txt").write_text("b", encoding="utf-8")
    monkeypatch.undo()
    assert (tmp_path / "a.txt").read_text(encoding="utf-8") == "白切鸡" and (tmp_path / "new" / "b.txt").is_file()
    assert len(synced) == 2


def test_memory_is_not_trimmed_where_the_c_library_cannot(monkeypatch: pytest.MonkeyPatch):
    def no_library(name: None) -> None:
        raise TypeError("argument of type 'NoneType' is not iterable")  # what Windows says

    monkeypatch.setattr(_output.ctypes, "CDLL", no_library)
    assert _output._trim_memory() is None
