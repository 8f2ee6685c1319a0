"""The cache of compiled kernels: nobody else's code is loaded, and no damaged code.

Each test puts something wrong where a library is expected, and then asks for it: what comes back is our own function,
or nothing with a line that says why.
"""

from __future__ import annotations

import errno
import os
import random
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from allmask import files
from allmask.kernels import build, compiling

pytestmark = pytest.mark.skipif(
    shutil.which("cc") is None or not sys.platform.startswith("linux"), reason="needs Linux and a C compiler"
)
needs_root = pytest.mark.skipif(not hasattr(os, "getuid") or os.getuid() != 0, reason="only root can give files away")
CODE = "int twice(int x) { return 2 * x; }\n"
EVIL = "int twice(int x) { return 666; }\n"
STRANGER = 4242  # the id of another user


@pytest.fixture(scope="module")
def libraries(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """Our library and a hostile one with the same function."""
    folder = tmp_path_factory.mktemp("compiled")
    for name, code in {"ours": CODE, "evil": EVIL}.items():
        (folder / f"{name}.c").write_text(code)
    return {name: compiling.compiled(folder / f"{name}.c", (), folder) for name in ("ours", "evil")}


class Place:
    """A C file, the place of its library in the cache, and how often it was compiled."""

    def __init__(self, folder: Path, libraries: dict[str, bytes]):
        self.source, self.folder, self.libraries, self.compilations = folder / "twice.c", folder, libraries, 0
        self.source.write_text(CODE)
        self.name = compiling.library_name(self.source, ())

    @property
    def cache(self) -> Path:
        return Path(os.environ["XDG_CACHE_HOME"], "allmask")

    @property
    def library(self) -> Path:
        return self.cache / self.name

    @property
    def checksum(self) -> Path:
        return self.cache / f"{self.name}.sha256"

    def put(self, code: bytes) -> None:
        """Write a library and its right checksum, as a build does."""
        self.cache.mkdir(parents=True, exist_ok=True)
        self.library.write_bytes(code)
        self.checksum.write_bytes(compiling.checksum(code))

    def compiled(self, *_: object) -> bytes:
        self.compilations += 1
        return self.libraries["ours"]

    def load(self) -> int | None:
        """Ask for the library in this process; return twice(21), or None if there is none."""
        build.library.cache_clear()
        build._warn_once.cache_clear()
        found = build.library(self.source, ())
        return None if found is None else found.twice(21)


@pytest.fixture
def place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, libraries: dict[str, bytes], caplog: pytest.LogCaptureFixture
) -> Iterator[Place]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("ALLMASK_KERNELS", raising=False)
    made = Place(tmp_path, libraries)
    monkeypatch.setattr(build, "compiled", made.compiled)
    caplog.set_level("INFO", logger="allmask")
    yield made
    build.library.cache_clear()
    build._warn_once.cache_clear()


# ---- damage --------------------------------------------------------------------------------------------------------


def test_a_whole_library_is_compiled_once(place: Place):
    assert [place.load() for _ in range(3)] == [42] * 3 and place.compilations == 1


@pytest.mark.parametrize("keep", [0, 1, 100, 4096, 8000, -1])
def test_a_truncated_library_is_compiled_again(place: Place, keep: int):
    """dlopen maps a file: reading beyond its end would end the process with SIGBUS."""
    place.put(place.libraries["ours"])
    place.library.write_bytes(place.libraries["ours"][:keep])
    assert place.load() == 42 and place.compilations == 1
    assert place.library.read_bytes() == place.libraries["ours"]
    assert place.load() == 42 and place.compilations == 1


def test_one_flipped_bit_anywhere_is_noticed(place: Place):
    good, rng = place.libraries["ours"], random.Random(0)
    place.put(good)
    handle = os.open(place.cache, os.O_RDONLY)
    for turn in range(1, 301):
        damaged, bit = bytearray(good), rng.randrange(8 * len(good))
        damaged[bit // 8] ^= 1 << bit % 8
        place.library.write_bytes(damaged)
        assert build._verified(place.cache, handle, place.name) is None
        if turn <= 20:
            assert place.load() == 42 and place.compilations == turn and place.library.read_bytes() == good
    os.close(handle)


@pytest.mark.parametrize("content", [b"", b"\n", b"0" * 64 + b"\n", None])
def test_a_missing_or_wrong_checksum(place: Place, content: bytes | None):
    place.put(place.libraries["ours"])
    place.checksum.unlink() if content is None else place.checksum.write_bytes(content)
    assert place.load() == 42 and place.compilations == 1


def test_a_library_of_another_system_is_compiled_again(place: Place):
    """Intact, but dlopen refuses it: a home folder may be shared by machines."""
    place.put(b"\x7fELF, for a computer that is not like this one")
    assert place.load() == 42 and place.compilations == 1


def test_a_library_without_its_checksum_is_nobodys(place: Place):
    place.put(place.libraries["evil"])
    place.checksum.unlink()
    assert place.load() == 42


def test_synced_before_it_has_its_name(place: Place, monkeypatch: pytest.MonkeyPatch):
    events: list[tuple[str, str]] = []
    replace = os.replace

    def recorded(source: Path, target: Path) -> None:
        events.append(("rename", target.name))
        replace(source, target)

    monkeypatch.setattr(files, "sync", lambda path: events.append(("sync", path.name)))
    monkeypatch.setattr(os, "replace", recorded)
    assert place.load() == 42
    both = (place.name, f"{place.name}.sha256")
    assert events == [step for file in both for step in (("sync", file), ("rename", file), ("sync", "allmask"))]


def test_a_change_after_the_check_has_no_effect(place: Place, monkeypatch: pytest.MonkeyPatch):
    """The bytes that were checked are loaded, not what has the name by then."""
    place.put(place.libraries["ours"])
    load = build._load_bytes

    def swapped(name: str, code: bytes):
        place.put(place.libraries["evil"])
        return load(name, code)

    monkeypatch.setattr(build, "_load_bytes", swapped)
    assert place.load() == 42


def test_several_libraries_are_not_confused(place: Place):
    """dlopen knows libraries by their path, and numbers of descriptors are used again."""
    ours, evil = (build._load_bytes("x.so", place.libraries[name]) for name in ("ours", "evil"))
    assert (ours.twice(1), evil.twice(1)) == (2, 666)


# ---- other users ---------------------------------------------------------------------------------------------------


def refused(place: Place, caplog: pytest.LogCaptureFixture, what: Path | str, why: str) -> None:
    assert place.load() is None
    (line,) = (record.getMessage() for record in caplog.records)
    assert line.endswith(f"{what} is not trusted with code: {why}") and "no C kernels" in line


WRITABLE, STRANGERS = "it can be written by somebody else", "it belongs to somebody else"


@pytest.mark.parametrize("mode", [0o777, 0o775, 0o707, 0o1777])
def test_a_folder_that_others_can_write(place: Place, caplog: pytest.LogCaptureFixture, mode: int):
    place.put(place.libraries["ours"])
    place.cache.chmod(mode)
    refused(place, caplog, place.cache, WRITABLE)


def test_a_parent_that_others_can_write(place: Place, caplog: pytest.LogCaptureFixture):
    place.put(place.libraries["ours"])
    place.folder.chmod(0o777)
    refused(place, caplog, place.folder, WRITABLE)


def test_a_sticky_parent_is_as_good_as_tmp(place: Place):
    place.put(place.libraries["ours"])
    place.folder.chmod(0o1777)
    assert place.load() == 42 and place.compilations == 0


@pytest.mark.parametrize("which", ["library", "checksum"])
def test_a_file_that_others_can_write(place: Place, caplog: pytest.LogCaptureFixture, which: str):
    place.put(place.libraries["ours"])
    file = getattr(place, which)
    file.chmod(0o666)
    refused(place, caplog, file, WRITABLE)


@needs_root
@pytest.mark.parametrize("which", ["library", "checksum", "cache", "folder"])
def test_what_belongs_to_somebody_else(place: Place, caplog: pytest.LogCaptureFixture, which: str):
    """Even if root runs, and even if the code is right: `folder` is two levels above the file."""
    place.put(place.libraries["ours"])
    os.chown(getattr(place, which), STRANGER, STRANGER)
    refused(place, caplog, getattr(place, which), STRANGERS)


@needs_root
def test_a_cache_below_a_strangers_folder_is_not_even_made(place: Place, caplog: pytest.LogCaptureFixture):
    os.chown(place.folder, STRANGER, STRANGER)
    refused(place, caplog, place.folder, STRANGERS)
    assert not place.cache.exists()


@needs_root
def test_libraries_of_root_serve_another_user(place: Place, monkeypatch: pytest.MonkeyPatch):
    place.put(place.libraries["ours"])
    monkeypatch.setattr(os, "getuid", lambda: STRANGER)
    assert place.load() == 42 and place.compilations == 0


@needs_root
def test_a_stranger_who_swaps_folders_all_the_time_never_wins(place: Place, libraries: dict[str, bytes]):
    """He renames a harmless folder and one with his library in turns; we ask for the library in the meantime."""
    for name in ("a", "b"):
        inner = place.folder / "his" / name / "allmask"
        inner.mkdir(parents=True)
        (inner / place.name).write_bytes(libraries["evil"])
        (inner / f"{place.name}.sha256").write_bytes(compiling.checksum(libraries["evil"]))
    for item in (place.folder / "his", *(place.folder / "his").rglob("*")):
        if item.relative_to(place.folder / "his").parts[:1] != ("a",):
            os.chown(item, STRANGER, STRANGER)
    place.folder.chmod(0o755)
    swap = "import os\nwhile 1:\n for x, y in (('a', 'c'), ('b', 'a'), ('c', 'b')): os.rename(x, y)"
    his = subprocess.Popen([sys.executable, "-c", swap], cwd=place.folder / "his")
    try:
        os.environ["XDG_CACHE_HOME"] = str(place.folder / "his" / "a")  # the fixture puts it back
        assert {place.load() for _ in range(300)} == {None}
        assert his.poll() is None
    finally:
        his.kill()
        his.wait()


# ---- links and paths -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("which", ["cache", "folder"])
def test_a_symbolic_link_on_the_way(place: Place, caplog: pytest.LogCaptureFixture, which: str):
    place.put(place.libraries["ours"])
    linked = place.cache if which == "cache" else place.cache.parent
    linked.rename(place.folder / "elsewhere")
    linked.symlink_to(place.folder / "elsewhere")
    refused(place, caplog, linked, "a symbolic link, or not a folder")


@pytest.mark.parametrize("which", ["library", "checksum"])
def test_a_file_that_is_a_link(place: Place, caplog: pytest.LogCaptureFixture, which: str):
    place.put(place.libraries["ours"])
    file = getattr(place, which)
    file.rename(place.folder / "elsewhere")
    file.symlink_to(place.folder / "elsewhere")
    refused(place, caplog, file, "a symbolic link")


def test_a_pipe_or_a_folder_instead_of_a_library(place: Place, caplog: pytest.LogCaptureFixture):
    place.cache.mkdir(parents=True)
    os.mkfifo(place.library)
    refused(place, caplog, place.library, "not a file")
    place.library.unlink()
    place.library.mkdir()
    caplog.clear()
    refused(place, caplog, place.library, "not a file")


def test_a_folder_that_cannot_be_made_is_named(place: Place, caplog: pytest.LogCaptureFixture, monkeypatch):
    """By its whole path: the system calls it by its last name, since its parent is open."""

    def forbidden(*args: object, **more: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", "cache")

    monkeypatch.setattr(os, "mkdir", forbidden)
    assert place.load() is None
    assert caplog.text.rstrip().endswith(f"{place.cache.parent} cannot be made: Permission denied")


def test_a_relative_path(place: Place, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(place.folder)
    place.put(place.libraries["ours"])
    monkeypatch.setenv("XDG_CACHE_HOME", "cache")
    refused(place, caplog, "cache/allmask", "not an absolute path")
    monkeypatch.setenv("ALLMASK_KERNELS", "cache/allmask")
    assert place.load() is None


def test_an_open_umask_does_not_open_the_cache(place: Place):
    before = os.umask(0)
    try:
        assert place.load() == 42 and place.load() == 42 and place.compilations == 1
    finally:
        os.umask(before)
    assert [path.stat().st_mode & 0o022 for path in (place.cache.parent, place.cache, place.library)] == [0, 0, 0]


# ---- prebuilt ------------------------------------------------------------------------------------------------------


def test_prebuilt_libraries_need_no_cache(place: Place, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(build, "PREBUILT", place.cache)
    place.put(place.libraries["ours"])
    monkeypatch.setenv("XDG_CACHE_HOME", "nowhere")
    assert place.load() == 42 and build.loaded[place.name].origin == "prebuilt" and place.compilations == 0


def test_a_damaged_prebuilt_library_is_compiled(
    place: Place, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.setattr(build, "PREBUILT", place.cache)
    place.put(place.libraries["ours"])
    place.library.write_bytes(place.libraries["evil"])
    monkeypatch.setenv("XDG_CACHE_HOME", str(place.folder / "other"))
    assert place.load() == 42 and build.loaded[place.name].origin == "compiled"
    assert "its SHA-256 is wrong" in caplog.text
