"""Files that are complete or absent, whatever fails while they are written; checksums; misspelt names."""

from __future__ import annotations

import ast
import errno
import hashlib
import os
import stat
import subprocess
import sys
import threading
from functools import cache
from pathlib import Path

import pytest

from allmask import files
from allmask.errors import ResourceError
from allmask.files import (
    atomic_file,
    closest,
    did_you_mean,
    is_leftover,
    new_folder,
    put_in_place,
    replace_folder,
    same_content,
    sha256,
    write_atomically,
)

DEAD = 2**22 + 1  # beyond the largest number of a process


def tree(folder: Path) -> dict[str, str]:
    """All files below a folder, hidden ones too, with what is in them; folders end in a slash."""
    found = {str(path.relative_to(folder)): path for path in folder.rglob("*")}
    return {
        name if path.is_file() else f"{name}/": path.read_text() if path.is_file() else ""
        for name, path in found.items()
    }


def a_folder(folder: Path, word: str) -> Path:
    (folder / "inner").mkdir(parents=True)
    (folder / "a.txt").write_text(word)
    (folder / "inner" / "b.txt").write_text(word)
    return folder


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is synced and renamed, in its order."""
    seen: list[str] = []
    real = {name: getattr(os, name) for name in ("fsync", "rename", "replace")}

    def fsync(handle: int) -> None:
        seen.append(f"sync {Path(os.readlink(f'/proc/self/fd/{handle}')).name}")
        real["fsync"](handle)

    def named(name: str):
        def move(source, target):
            seen.append(f"rename {Path(source).name} {Path(target).name}")
            real[name](source, target)

        return move

    monkeypatch.setattr(os, "fsync", fsync)
    for name in ("rename", "replace"):
        monkeypatch.setattr(os, name, named(name))
    return seen


def failing(monkeypatch: pytest.MonkeyPatch, name: str, number: int, code: int = errno.ENOSPC) -> None:
    """Have the call of `os.name` with this number fail, once."""
    real, count = getattr(os, name), iter(range(1000))

    def call(*args):
        if next(count) == number:
            raise OSError(code, os.strerror(code))
        return real(*args)

    monkeypatch.setattr(os, name, call)


# ---- one file --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("content", ["北京\nno \\r\\n", b"\x00\xff"])
def test_a_file_is_written_and_written_again(tmp_path: Path, content):
    for there in ("", "before"):
        if there:
            (tmp_path / "f").write_text(there)
        write_atomically(tmp_path / "f", content)
        assert (tmp_path / "f").read_bytes() == (content if isinstance(content, bytes) else content.encode())
        assert [path.name for path in tmp_path.iterdir()] == ["f"]


def test_a_file_is_synced_before_it_is_renamed_and_its_folder_after(tmp_path: Path, calls: list[str]):
    write_atomically(tmp_path / "f", "text")
    beside = f".f.{os.getpid()}.partial"
    assert calls == [f"sync {beside}", f"rename {beside} f", f"sync {tmp_path.name}"]


@pytest.mark.parametrize(("step", "number"), [("fsync", 0), ("replace", 0)])
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO])
def test_a_failure_leaves_the_file_that_was_there(tmp_path: Path, monkeypatch, step: str, number: int, code: int):
    (tmp_path / "f").write_text("before")
    failing(monkeypatch, step, number, code)
    with pytest.raises(ResourceError, match=f"f: cannot be written: {os.strerror(code)}"):
        write_atomically(tmp_path / "f", "after")
    assert tree(tmp_path) == {"f": "before"}


def test_a_full_disk_while_writing(tmp_path: Path):
    (tmp_path / "f").write_text("before")
    with pytest.raises(ResourceError, match="No space left"), atomic_file(tmp_path / "f") as stream:
        stream.write("half")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    assert tree(tmp_path) == {"f": "before"}
    with pytest.raises(ZeroDivisionError), atomic_file(tmp_path / "new") as stream:
        stream.write("half")
        raise ZeroDivisionError
    assert tree(tmp_path) == {"f": "before"}


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no device that is always full")
def test_a_device_is_written_to_and_says_that_it_is_full():
    with (
        pytest.raises(ResourceError, match="/dev/full: cannot be written: No space left"),
        atomic_file("/dev/full") as stream,
    ):
        stream.write("text")
    write_atomically("/dev/null", "text")
    assert Path("/dev/null").is_char_device()


def test_a_pipe_is_written_to_and_stays_one(tmp_path: Path):
    os.mkfifo(tmp_path / "pipe")
    got: list[str] = []
    reader = threading.Thread(target=lambda: got.append((tmp_path / "pipe").read_text()))
    reader.start()
    write_atomically(tmp_path / "pipe", "text")
    reader.join()
    assert got == ["text"] and (tmp_path / "pipe").is_fifo()


def test_a_reader_that_goes_away_is_no_full_disk(tmp_path: Path):
    with pytest.raises(BrokenPipeError), atomic_file(tmp_path / "f"):
        raise BrokenPipeError


def test_a_link_stays_a_link_and_permissions_stay(tmp_path: Path):
    (tmp_path / "real").write_text("before")
    (tmp_path / "real").chmod(0o600)
    (tmp_path / "link").symlink_to(tmp_path / "real")
    write_atomically(tmp_path / "link", "after")
    assert (tmp_path / "link").is_symlink() and (tmp_path / "real").read_text() == "after"
    assert stat.S_IMODE((tmp_path / "real").stat().st_mode) == 0o600


def test_where_nothing_can_be_written(tmp_path: Path):
    (tmp_path / "file").write_text("")
    for path in (tmp_path, tmp_path / "absent" / "f", tmp_path / "file" / "f"):
        with pytest.raises(ResourceError, match="cannot be written"):
            write_atomically(path, "text")
    assert tree(tmp_path) == {"file": ""}


# ---- a folder --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("there", ["nothing", "empty", "full"])
@pytest.mark.parametrize("make", [new_folder, replace_folder])
def test_a_folder_appears_whole(tmp_path: Path, make, there: str):
    path = tmp_path / "up" / "f"
    if there == "empty":
        path.mkdir(parents=True)
    if there == "full":
        a_folder(path, "before")
        if make is new_folder:
            with pytest.raises(ResourceError, match="already there"), make(path):
                raise AssertionError("no work is done")
            return
    with make(path) as beside:
        (beside / "a.txt").write_text("after")
        assert there == "full" or not (path / "a.txt").exists()
    assert tree(tmp_path) == {"up/": "", "up/f/": "", "up/f/a.txt": "after"}


@pytest.fixture
def no_exchange(monkeypatch: pytest.MonkeyPatch) -> None:
    """A system that cannot swap two names in one step."""
    monkeypatch.setattr(files, "_exchange", lambda one, other: False)


def test_a_folder_is_synced_before_it_is_renamed(tmp_path: Path, calls: list[str], no_exchange: None):
    path, beside, old = a_folder(tmp_path / "f", "before"), f".f.{os.getpid()}.partial", f".f.{os.getpid()}.old"
    with replace_folder(path) as folder:
        (folder / "inner").mkdir()
        (folder / "inner" / "b.txt").write_text("after")
    moved = calls.index(f"rename f {old}")
    assert sorted(calls[:moved]) == sorted([f"sync {beside}", "sync inner", "sync b.txt"])
    assert calls[moved + 1 :] == [f"rename {beside} f", f"sync {tmp_path.name}"]


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="only Linux swaps two names in one step")
def test_a_folder_is_replaced_in_one_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, calls: list[str]):
    """At no moment is there no folder: a process that is killed leaves the old one or the new one."""
    path, real, seen = a_folder(tmp_path / "f", "before"), files._exchange, []

    def exchange(one: Path, other: Path) -> bool:
        calls.append("exchange")
        return real(one, other)

    monkeypatch.setattr(files, "_exchange", exchange)
    monkeypatch.setattr(files, "sync", lambda item: (seen.append((path / "a.txt").read_text()), calls.append("sync")))
    with replace_folder(path) as folder:
        (folder / "a.txt").write_text("after")
    assert calls == ["sync", "sync", "exchange", "sync"] and seen == ["before", "before", "after"]
    assert tree(tmp_path) == {"f/": "", "f/a.txt": "after"}


FAILURES = [*(("fsync", n, True) for n in range(4)), ("fsync", 3, False), ("rename", 0, False), ("rename", 1, False)]


@pytest.mark.parametrize(("step", "number", "in_one"), FAILURES)
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO])
@pytest.mark.parametrize("there", [True, False])
def test_a_failure_leaves_the_folder_that_was_there(
    tmp_path: Path, monkeypatch, step: str, number: int, in_one: bool, code: int, there: bool
):
    if not in_one:
        monkeypatch.setattr(files, "_exchange", lambda one, other: False)
    if there:
        a_folder(tmp_path / "f", "before")
    before = tree(tmp_path)
    failing(monkeypatch, step, number if there or step == "fsync" else 0, code)
    with (
        pytest.raises(ResourceError, match=f"f: cannot be written: {os.strerror(code)}"),
        replace_folder(tmp_path / "f") as folder,
    ):
        (folder / "inner").mkdir()
        (folder / "inner" / "b.txt").write_text("after")
    assert tree(tmp_path) == before


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "No space"), KeyboardInterrupt()])
def test_an_error_while_it_is_filled(tmp_path: Path, error: BaseException):
    a_folder(tmp_path / "f", "before")
    before = tree(tmp_path)
    with pytest.raises((ResourceError, KeyboardInterrupt)), replace_folder(tmp_path / "f") as folder:
        (folder / "a.txt").write_text("half")
        raise error
    assert tree(tmp_path) == before


def test_a_file_system_that_cannot_sync_a_folder(tmp_path: Path, monkeypatch):
    real = os.fsync

    def fsync(handle: int) -> None:
        if stat.S_ISDIR(os.fstat(handle).st_mode):
            raise OSError(errno.EINVAL, "Invalid argument")
        real(handle)

    monkeypatch.setattr(os, "fsync", fsync)
    with new_folder(tmp_path / "f") as folder:
        (folder / "a.txt").write_text("after")
    write_atomically(tmp_path / "g", "after")
    assert tree(tmp_path) == {"f/": "", "f/a.txt": "after", "g": "after"}


def test_a_link_to_a_folder_stays_a_link(tmp_path: Path):
    a_folder(tmp_path / "real", "before")
    (tmp_path / "link").symlink_to(tmp_path / "real")
    with replace_folder(tmp_path / "link") as folder:
        (folder / "link to nowhere").symlink_to(tmp_path / "absent")
    assert (tmp_path / "link").is_symlink() and [p.name for p in (tmp_path / "real").iterdir()] == ["link to nowhere"]


# ---- what killed processes leave ----------------------------------------------------------------------------------


def test_what_a_killed_process_left_is_removed(tmp_path: Path):
    a_folder(tmp_path / f".f.{DEAD}.partial", "half")
    (tmp_path / f".g.{DEAD}.partial").write_text("half")
    a_folder(tmp_path / f".other.{DEAD}.partial", "not ours")
    with new_folder(tmp_path / "f"):
        pass
    write_atomically(tmp_path / "g", "text")
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([f".other.{DEAD}.partial", "f", "g"])


def test_what_another_process_is_writing_stays(tmp_path: Path):
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as other:
        a_folder(tmp_path / f".f.{other.pid}.partial", "half")
        with new_folder(tmp_path / "f"):
            pass
        assert (tmp_path / f".f.{other.pid}.partial" / "a.txt").read_text() == "half"


def test_a_folder_that_was_moved_aside_when_its_process_was_killed_comes_back(tmp_path: Path):
    a_folder(tmp_path / f".f.{DEAD}.old", "before")
    with pytest.raises(ZeroDivisionError), replace_folder(tmp_path / "f"):
        raise ZeroDivisionError
    assert sorted(tree(tmp_path)) == ["f/", "f/a.txt", "f/inner/", "f/inner/b.txt"]
    a_folder(tmp_path / f".f.{DEAD}.old", "older")  # killed before it could remove it
    with replace_folder(tmp_path / "f") as folder:
        (folder / "a.txt").write_text("after")
    assert tree(tmp_path) == {"f/": "", "f/a.txt": "after"}


def test_all_leftovers_of_a_folder_are_removed(tmp_path: Path):
    """Those of a model that was being written into a folder that was being written have two dots."""
    a_folder(tmp_path / f"..final.{DEAD}.partial.{DEAD}.partial", "half")
    a_folder(tmp_path / f".final.{DEAD}.partial", "half")
    a_folder(tmp_path / f".step-00000004.{DEAD}.old", "before")
    (tmp_path / f".config.yaml.{DEAD}.partial").write_text("half")
    (tmp_path / ".corpus.lock").write_text("")
    files.remove_all_leftovers(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == [".corpus.lock", "step-00000004"]


def test_a_folder_that_is_half_removed_has_lost_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    a_folder(tmp_path / "f", "before")
    with monkeypatch.context() as patch:  # killed at the first file
        patch.setattr(files.shutil, "rmtree", lambda *args, **more: None)
        files.remove_folder(tmp_path / "f")
    assert [path.name for path in tmp_path.iterdir()] == [f".f.{os.getpid()}.partial"]
    files.remove_all_leftovers(tmp_path)
    files.remove_folder(tmp_path / "absent")
    assert tree(tmp_path) == {}


# ---- one process at a time -------------------------------------------------------------------------------------------


def test_a_second_process_is_refused_and_told_who_works_there(tmp_path: Path):
    with (
        files.locked(tmp_path / "run"),
        pytest.raises(ResourceError, match=f"run: process {os.getpid()} on .* is working"),
        files.locked(tmp_path / "run"),
    ):
        raise AssertionError("two at once")
    assert tree(tmp_path) == {"run/": ""}


def test_the_lock_of_a_killed_process_is_free(tmp_path: Path):
    code = "import os, sys; from pathlib import Path; from allmask.files import locked\n"
    code += "with locked(Path(sys.argv[1])): os.kill(os.getpid(), 9)"
    assert subprocess.run([sys.executable, "-c", code, str(tmp_path)]).returncode == -9
    assert (tmp_path / ".lock").read_text().startswith("process ")
    with files.locked(tmp_path):
        assert str(os.getpid()) in (tmp_path / ".lock").read_text()
    assert tree(tmp_path) == {}


def test_a_lock_that_is_a_link_is_not_followed(tmp_path: Path):
    """Once the file that it led to was emptied, and the name of the process written into it."""
    (tmp_path / "precious").write_text("text")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / ".lock").symlink_to(tmp_path / "precious")
    with pytest.raises(ResourceError, match=r"\.lock: cannot be written"), files.locked(tmp_path / "run"):
        raise AssertionError("locked")
    assert (tmp_path / "precious").read_text() == "text"


def test_a_file_system_without_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    import fcntl

    def flock(*args: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", flock)
    with files.locked(tmp_path / "run"):
        assert (tmp_path / "run").is_dir()


def test_names_of_leftovers():
    assert is_leftover(".start.123.partial") and is_leftover(".corpus.1.old")
    assert not any(map(is_leftover, ("start", ".start.partial", ".corpus.lock", "x.1.partial", ".a.b.old")))


def test_a_file_is_put_in_place_in_one_step(tmp_path: Path, calls: list[str]):
    (tmp_path / "f").write_text("before")
    (tmp_path / "f").chmod(0o600)
    (tmp_path / "elsewhere").write_text("after")
    put_in_place(tmp_path / "elsewhere", tmp_path / "f")
    assert calls == ["sync elsewhere", "rename elsewhere f", f"sync {tmp_path.name}"]
    assert tree(tmp_path) == {"f": "after"} and stat.S_IMODE((tmp_path / "f").stat().st_mode) == 0o600


def test_a_folder_that_several_wrote_is_put_in_place(tmp_path: Path):
    a_folder(tmp_path / "f", "before")
    put_in_place(a_folder(tmp_path / "elsewhere", "after"), tmp_path / "f")
    assert tree(tmp_path) == {"f/": "", "f/a.txt": "after", "f/inner/": "", "f/inner/b.txt": "after"}


# ---- what is in them -------------------------------------------------------------------------------------------------


def test_checksums(tmp_path: Path):
    content = bytes(range(256)) * 10_000
    for name in ("a", "b"):
        (tmp_path / name).write_bytes(content)
    (tmp_path / "c").write_bytes(content[:-1] + b"x")
    (tmp_path / "link").symlink_to(tmp_path / "a")
    assert sha256(tmp_path / "a") == hashlib.sha256(content).hexdigest()
    assert same_content(tmp_path / "a", tmp_path / "b") and same_content(tmp_path / "link", tmp_path / "a")
    assert not same_content(tmp_path / "a", tmp_path / "c")


def test_files_of_other_sizes_are_not_read(tmp_path: Path, monkeypatch):
    (tmp_path / "a").write_text("1")
    (tmp_path / "b").write_text("22")
    monkeypatch.setattr(files, "sha256", lambda path: pytest.fail("read"))
    assert not same_content(tmp_path / "a", tmp_path / "b") and same_content(tmp_path / "a", tmp_path / "a")


def signed(folder: Path, **texts: str) -> Path:
    folder.mkdir()
    for name, text in texts.items():
        (folder / name.replace("__", ".")).write_text(text)
    files.write_manifest(folder, files.checksums(folder.iterdir()))
    return folder


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ("{}", "lists no files"), ("[1]", "expected an object"), ('{"a": 1}', "expected an object"),
        ("{", "no readable"), ("[" * 100_000, "no readable"), ('{"../a": "0"}', "not the name of a file"),
        ('{"/dev/zero": "0"}', "not the name of a file"), ('{"gone": "0"}', "gone is missing"),
    ],
)  # fmt: skip
def test_a_manifest_that_is_none(tmp_path: Path, content: str, problem: str):
    folder = signed(tmp_path / "f", config__json="1")
    assert files.verify(folder) is None
    (folder / "manifest.json").write_text(content)
    assert problem in (files.verify(folder) or "")


def test_a_pipe_in_place_of_a_file_is_refused_not_waited_for(tmp_path: Path):
    folder = signed(tmp_path / "f", config__json="1")
    for name in ("config.json", "manifest.json"):
        (folder / name).unlink()
        os.mkfifo(folder / name)
        assert files.verify(folder) is not None
    with pytest.raises(files.CheckpointError, match="a pipe, not a file"):
        files.read_json(folder / "config.json")


def test_weights_that_the_manifest_does_not_list(tmp_path: Path):
    folder = signed(tmp_path / "f", config__json="1")
    (folder / "README.md").write_text("mine")
    assert files.verify(folder) is None
    (folder / "average.safetensors").write_text("whose?")
    assert "average.safetensors is not in manifest.json" in (files.verify(folder) or "")


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (OSError(errno.ENOSPC, "x"), os.strerror(errno.ENOSPC)),
        (RuntimeError("Error while serializing: I/O error: No space left on device (os error 28)"), "No space left"),
        (OSError(errno.ENOENT, "x"), None), (ValueError("28"), None), (RuntimeError("(os error 2)"), None),
    ],
)  # fmt: skip
def test_what_a_full_disk_is(error: Exception, reason: str | None):
    found = files.disk_problem(error)
    assert (found is None) if reason is None else (found is not None and reason in found)


# ---- one implementation for the whole package ------------------------------------------------------------------------


@cache
def names_in_modules() -> dict[str, set[str]]:
    """The functions, methods and imports that occur in each module of the package."""
    root, found = Path(files.__file__).parent, {}
    for path in root.rglob("*.py"):
        names = found[str(path.relative_to(root))] = set()
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            owner = getattr(getattr(node, "value", None), "id", "")
            names |= {getattr(node, "attr", ""), getattr(node, "name", ""), f"{owner}.{getattr(node, 'attr', '')}"}
    return found


@pytest.mark.parametrize(
    ("names", "modules"),
    [
        (("os.rename", "os.replace", "os.link", "rename", "shutil.move"), {"files.py"}),
        (("fsync",), {"files.py", "data/corpus.py"}),  # the token store syncs the files it appends to
        (("get_close_matches", "SequenceMatcher"), {"files.py"}),
    ],
)
def test_only_these_modules_use(names: tuple[str, ...], modules: set[str]):
    assert {module for module, used in names_in_modules().items() if used & set(names)} == modules


@pytest.mark.parametrize(
    "name", ["write_atomically", "put_in_place", "closest", "rows_by_length", "varint", "find_files"]
)  # fmt: skip
def test_there_is_one_definition_of(name: str):
    sources = (path.read_text(encoding="utf-8") for path in Path(files.__file__).parent.rglob("*.py"))
    assert sum(source.count(f"def {name}(") for source in sources) == 1


@pytest.mark.parametrize(
    ("name", "found"),
    [("bert-bse", "bert-base"), ("GPT2", "gpt2"), ("llama", None), ("", None), ("Ünicode", "ünicode")],
)
def test_the_closest_name(name: str, found: str | None):
    assert closest(name, ["bert-base", "gpt2", "ünicode"]) == found


def test_the_hint_for_a_name():
    assert did_you_mean("gtp2", ["bert", "gpt2"]) == "did you mean gpt2? there are: bert, gpt2"
    assert did_you_mean("zzz", ["bert", "gpt2"]) == "there are: bert, gpt2"
