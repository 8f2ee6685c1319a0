"""Find or compile the C files of this package, load them, and pass tensors to them.

Every kernel is optional: where it cannot be had safely, `library` returns None and torch computes instead, which is
logged once. A wheel contains compiled kernels for x86-64 or ARM. Where it has none that fits, a C file is compiled on
first use and kept in the user's cache folder, or in the folder that ALLMASK_KERNELS names; `ALLMASK_KERNELS=0` switches
all kernels off. `python -m allmask.kernels.build` compiles all of them for all processors of this architecture, for the
image of a machine that will have no compiler. `ALLMASK_ISA=avx2` computes as on a processor without AVX-512, to see
what others see.

A library in a cache is code that somebody may have put there, or that a disk may have damaged. So the file, its folder
and every parent must belong to this user or to root, and nobody else may be able to write to them. The SHA-256 of the
file must be the one in the `.sha256` file next to it; otherwise it is compiled again. The bytes that were checked are
the bytes that are loaded: they are copied to memory first.
"""

from __future__ import annotations

import ctypes
import errno
import logging
import os
import platform
import stat
import subprocess
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from itertools import count
from pathlib import Path
from typing import Any, Literal, NamedTuple

from torch import Tensor
from torch._C import _are_functorch_transforms_active, _get_tracing_state
from torch.compiler import is_compiling

from allmask.errors import UsageError
from allmask.files import put_in_place
from allmask.kernels.compiling import AVX2 as AVX2
from allmask.kernels.compiling import AVX512 as AVX512
from allmask.kernels.compiling import AVX512_BF16 as AVX512_BF16
from allmask.kernels.compiling import AVX512_VNNI as AVX512_VNNI
from allmask.kernels.compiling import AVX_VNNI as AVX_VNNI
from allmask.kernels.compiling import NEON as NEON
from allmask.kernels.compiling import NEON_BF16 as NEON_BF16
from allmask.kernels.compiling import NEON_DOT as NEON_DOT
from allmask.kernels.compiling import NEON_I8MM as NEON_I8MM
from allmask.kernels.compiling import baseline, checksum, compiled, compiler, is_for, library_name, variants

log = logging.getLogger("allmask")

PREBUILT = Path(__file__).with_name("prebuilt")  # in a wheel
HIDDEN = {"avx2": ("avx512", "avxvnni", "amx"), "avxvnni": ("avx512", "amx")}  # by ALLMASK_ISA
_MAX_BYTES = 64 << 20  # of a library
_numbers = count()


class Loaded(NamedTuple):
    """Where a library comes from, for `allmask doctor`."""

    path: Path
    instructions: tuple[str, ...]
    origin: Literal["prebuilt", "cached", "compiled"]


loaded: dict[str, Loaded] = {}  # by the name of the library
refused: dict[str, str] = {}  # name of the C file -> why it is not used


@cache
def library(source: Path, *choices: Sequence[str]) -> Any:
    """Load a C file as a library (a `ctypes.CDLL`), compiling it if needed; None where that is not possible.

    Each choice is a tuple of instruction sets to compile for, best first: the first that this processor has is taken.
    """
    if os.environ.get("ALLMASK_KERNELS") == "0":
        refused[source.name] = "switched off by ALLMASK_KERNELS=0"
        return None
    instructions = next(filter(has, choices), None)
    if instructions is None and has(baseline()):
        own = [choice for choice in choices if is_for(choice, platform.machine())]
        refused[source.name] = _lacking(own[-1]) if own else f"there is none for {platform.machine()}"
        log.info("%s is not used: %s", source.name, refused[source.name])
        return None
    try:
        if instructions is None:
            raise RuntimeError(_lacking(baseline()))
        return _load(source, tuple(instructions))
    except (OSError, RuntimeError, AttributeError, subprocess.SubprocessError) as error:  # or no home, or Windows
        refused[source.name] = str(error)
        _warn_once(str(error))
        return None


@cache
def _warn_once(reason: str) -> None:
    """Log what is slower if no kernel can be used; the reason is the same for all of them."""
    log.warning("no C kernels, so writing takes about twice as long, the rest a little longer: %s", reason)


@cache
def _say_once(program: str) -> None:
    """Log why a command takes longer the first time: each of its C files takes a few seconds."""
    log.info("compiling kernels for this processor with %s, once: that takes a few seconds …", program)


def _lacking(instructions: Sequence[str]) -> str:
    """Return in words why a kernel for these instruction sets cannot run here."""
    if not _cpu_flags():
        return f"they are for Linux, this is {platform.system()}"
    return f"this processor ({platform.machine()}) has no {', '.join(sorted(set(instructions) - _cpu_flags()))}"


def has(instructions: Sequence[str]) -> bool:
    """Whether the processor has all of these instruction sets: unknown instructions would kill the process."""
    return set(instructions) <= _cpu_flags()


@cache
def _cpu_flags() -> set[str]:
    """The instruction sets of this processor; empty if unknown."""
    try:
        flags = Path("/proc/cpuinfo").read_text(encoding="utf-8").replace("_", "").split()
    except OSError:
        return set()
    return {flag for flag in flags if not is_hidden(flag)}


def is_hidden(instruction: str) -> bool:
    """Whether ALLMASK_ISA forbids an instruction set, if the processor has it or not."""
    isa = os.environ.get("ALLMASK_ISA")
    if isa and isa not in HIDDEN:
        raise UsageError(f"ALLMASK_ISA is {isa!r}; expected {' or '.join(HIDDEN)}", "leave it out to use everything")
    return bool(isa) and instruction.startswith(HIDDEN[isa])


def _load(source: Path, instructions: tuple[str, ...]) -> ctypes.CDLL:
    """Load a library from the wheel, else from the cache, else compile it."""
    name = library_name(source, instructions)
    prebuilt = PREBUILT / name
    if prebuilt.is_file():
        try:
            # Whoever can write here can change this Python file as well, so only damage is looked for.
            if checksum(prebuilt.read_bytes()) == prebuilt.with_name(f"{name}.sha256").read_bytes():
                found = ctypes.CDLL(str(prebuilt))
                loaded[name] = Loaded(prebuilt, instructions, "prebuilt")
                return found
            raise OSError("its SHA-256 is wrong")
        except OSError as error:
            log.warning("%s: cannot be used, so it is compiled again: %s", prebuilt, error)
    with _opened_folder(*_cache_folder()) as (folder, handle):
        code = _verified(folder, handle, name)
        if code is not None:
            with suppress(OSError):  # compiled for another system that shares this folder: compiled again
                found = _load_bytes(name, code)
                loaded[name] = Loaded(folder / name, instructions, "cached")
                return found
        _say_once(compiler())
        found = _load_bytes(name, _compile_into(folder, source, instructions))
        loaded[name] = Loaded(folder / name, instructions, "compiled")
        return found


def _load_bytes(name: str, code: bytes) -> ctypes.CDLL:
    """Load a library from memory: from a file without a path, which nobody else can replace."""
    handle = os.memfd_create(name)
    try:
        with open(handle, "wb", closefd=False) as file:
            file.write(code)
        # A path that was never used: of a known path, dlopen returns the library that it has loaded before.
        return ctypes.CDLL(f"/proc/self/fd/{'./' * next(_numbers)}{handle}")
    finally:
        os.close(handle)


# ---- the cache -----------------------------------------------------------------------------------------------------


def _cache_folder() -> tuple[Path, int]:
    """Return the folder of compiled libraries, and the mode of folders to be made."""
    named = os.environ.get("ALLMASK_KERNELS")
    if named:
        return Path(named), 0o755
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "allmask"), 0o700


@contextmanager
def _opened_folder(folder: Path, mode: int) -> Iterator[tuple[Path, int]]:
    """Open a folder from the root downwards, making what is missing; refuse one that somebody else can change.

    Of a parent with the sticky bit, such as /tmp, others cannot rename or remove what is not theirs.
    """
    if not folder.is_absolute():
        raise PermissionError(f"{folder} is not trusted with code: not an absolute path")
    path, handle = Path("/"), os.open("/", os.O_PATH | os.O_DIRECTORY)
    try:
        for name in folder.parts[1:]:
            _check(os.fstat(handle), path, sticky=True)
            path /= name
            outer = handle
            handle = _open_inner(path, outer, mode)
            os.close(outer)
        _check(os.fstat(handle), path)
        yield folder, handle
    finally:
        os.close(handle)


def _open_inner(path: Path, outer: int, mode: int) -> int:
    """Open a folder in an opened one, making it if it is missing; a link is not followed."""
    flags = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW
    try:
        return os.open(path.name, flags, dir_fd=outer)
    except FileNotFoundError:
        try:
            os.mkdir(path.name, mode, dir_fd=outer)
        except FileExistsError:  # another process was faster
            pass
        except OSError as problem:
            raise OSError(f"{path} cannot be made: {problem.strerror}") from problem
        return os.open(path.name, flags, dir_fd=outer)
    except PermissionError as error:
        raise PermissionError(f"{path} cannot be opened: {error.strerror}") from error
    except NotADirectoryError as error:  # as Linux says of a link, too
        raise PermissionError(f"{path} is not trusted with code: a symbolic link, or not a folder") from error


def _check(found: os.stat_result, path: Path, sticky: bool = False) -> None:
    """Raise an error if somebody else than this user and root can change a file or folder."""
    if found.st_uid not in (0, os.getuid()):
        raise PermissionError(f"{path} is not trusted with code: it belongs to somebody else")
    if found.st_mode & 0o022 and not (sticky and found.st_mode & stat.S_ISVTX):
        raise PermissionError(f"{path} is not trusted with code: it can be written by somebody else")


def _verified(folder: Path, handle: int, name: str) -> bytes | None:
    """Return a library if its checksum is right; None if there is none, or it has been damaged."""
    code, expected = (_read(folder / file, handle) for file in (name, f"{name}.sha256"))
    if code is None or expected is None:
        return None
    if checksum(code) == expected:
        return code
    log.info("%s: its SHA-256 is wrong, so it is compiled again", folder / name)
    return None


def _read(path: Path, folder: int) -> bytes | None:
    """Read a file of an opened folder that nobody else can change; None if there is none."""
    try:  # O_NONBLOCK: a pipe would wait
        handle = os.open(path.name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=folder)
    except FileNotFoundError:
        return None
    except OSError as error:
        why = "a symbolic link" if error.errno == errno.ELOOP else error.strerror
        raise PermissionError(f"{path} is not trusted with code: {why}") from error
    try:
        found = os.fstat(handle)
        if not stat.S_ISREG(found.st_mode):
            raise PermissionError(f"{path} is not trusted with code: not a file")
        _check(found, path)
        with open(handle, "rb", closefd=False) as file:
            return file.read(_MAX_BYTES)
    finally:
        os.close(handle)


def _compile_into(folder: Path, source: Path, instructions: Sequence[str]) -> bytes:
    """Compile a C file, and keep it in a folder that was checked, so it can be used by its path."""
    code, name = compiled(source, instructions, folder), library_name(source, instructions)
    with tempfile.TemporaryDirectory(dir=folder) as inner:
        for file, content in ((name, code), (f"{name}.sha256", checksum(code))):
            fresh = Path(inner, file)
            fresh.write_bytes(content)
            fresh.chmod(0o644)  # whatever the umask is
            put_in_place(fresh, folder / file)  # atomic: another process may be compiling the same file
    return code


def compile_all(sources: Iterable[Path]) -> list[Path]:
    """Compile each source for each instruction set that it supports, and return the paths of the libraries."""
    made = []
    with _opened_folder(*_cache_folder()) as (folder, _):
        for source, instructions in variants(list(sources)):
            with suppress(RuntimeError):  # it uses instructions that are not in this set, or unknown to the compiler
                _compile_into(folder, source, instructions)
                made.append(folder / library_name(source, instructions))
    return made


def is_traced() -> bool:
    """Whether torch traces the program instead of running it: a trace would not contain the call of a C function."""
    return is_compiling() or _get_tracing_state() is not None or _are_functorch_transforms_active()


# ---- arguments ---------------------------------------------------------------------------------------------------


def pointer(x: Tensor | None) -> ctypes.c_void_p:
    """The address of a tensor's data, valid as long as the tensor lives; NULL for None."""
    return ctypes.c_void_p(None if x is None else x.data_ptr())


def structure(**fields: Any) -> type[ctypes.Structure]:
    """A C struct with these fields, in this order; see `pointers` and `int64s`."""
    return type("Structure", (ctypes.Structure,), {"_fields_": list(fields.items())})


def pointers(names: str) -> dict[str, Any]:
    return dict.fromkeys(names.split(), ctypes.c_void_p)


def int64s(names: str) -> dict[str, Any]:
    return dict.fromkeys(names.split(), ctypes.c_int64)


if __name__ == "__main__":
    print(*compile_all(sorted(Path(__file__).parent.glob("*.c"))), sep="\n")
