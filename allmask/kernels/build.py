"""Compile the C files of this package on first use, load them, and pass tensors to them.

Every kernel is optional: where there is no C compiler, or the processor lacks an instruction set, `library` returns
None and torch computes instead, which is logged once. Compiled libraries are kept in the user's cache folder, or in the
folder that ALLMASK_KERNELS names; `ALLMASK_KERNELS=0` switches all kernels off. `python -m allmask.kernels.build`
compiles all of them for all processors, for the image of a machine that will have no compiler. `ALLMASK_ISA=avx2`
computes as on a processor without AVX-512, to see what others see.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import platform
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterable, Sequence
from contextlib import suppress
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

from torch import Tensor
from torch._C import _are_functorch_transforms_active, _get_tracing_state
from torch.compiler import is_compiling

from allmask.errors import UsageError
from allmask.files import put_in_place

log = logging.getLogger("allmask")

AVX2 = ("avx2", "fma")
AVX_VNNI = (*AVX2, "avxvnni")
AVX512 = ("avx512f", "avx512bw", "avx512dq", "avx512vl", "fma")
AVX512_VNNI = (*AVX512, "avx512vnni")
AVX512_BF16 = (*AVX512, "avx512bf16")
HIDDEN = {"avx2": ("avx512", "avxvnni", "amx"), "avxvnni": ("avx512", "amx")}  # by ALLMASK_ISA
FLAGS = ("-O3", "-std=gnu11", "-fno-math-errno", "-fPIC", "-shared")


@cache
def library(source: Path, *choices: Sequence[str]) -> Any:
    """Load a C file as a library (a `ctypes.CDLL`), compiling it if needed; None where that is not possible.

    Each choice is a tuple of instruction sets to compile for, best first: the first that this processor has is taken.
    """
    if os.environ.get("ALLMASK_KERNELS") == "0":
        return None
    instructions = next(filter(has, choices), None)
    if instructions is None and has(AVX2):
        log.info("%s is not used: %s", source.name, _lacking(choices[-1]))
        return None
    try:
        if instructions is None:
            raise RuntimeError(_lacking(AVX2))
        return ctypes.CDLL(str(_compiled(source, _flags(instructions))))
    except (OSError, RuntimeError, AttributeError, subprocess.SubprocessError) as error:  # or no home, or Windows
        _warn_once(str(error))
        return None


@cache
def _warn_once(reason: str) -> None:
    """Log what is slower if no kernel can be used; the reason is the same for all of them."""
    log.warning("no C kernels, so writing takes about twice as long, the rest a little longer: %s", reason)


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


def _flags(instructions: Sequence[str]) -> tuple[str, ...]:
    return (*FLAGS, *(f"-m{name}" for name in instructions))


def _compiled(source: Path, flags: Sequence[str]) -> Path:
    """Return the path of the shared library, compiling it if needed. Its name has a hash of sources and flags."""
    folder = _cache_folder()
    name = hashlib.sha256(_with_headers(source) + repr(flags).encode()).hexdigest()[:16]
    path = folder / f"{source.stem}-{name}.so"
    if path.exists():
        return path
    compiler = shutil.which(os.environ.get("CC", "cc")) or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        raise FileNotFoundError("there is no C compiler (cc, gcc or clang)")
    with tempfile.TemporaryDirectory(dir=folder) as inner:
        fresh = Path(inner, path.name)
        command = [compiler, *flags, "-o", str(fresh), str(source), "-lm"]
        ran = subprocess.run(command, capture_output=True, encoding="utf-8", errors="replace", timeout=60)
        if ran.returncode:
            reasons = [line for line in ran.stderr.splitlines() if "error" in line] or ran.stderr.splitlines() or ["?"]
            raise RuntimeError(f"{compiler} failed: {reasons[0]}")
        put_in_place(fresh, path)  # atomic: another process may be compiling the same file
    return path


def _with_headers(source: Path) -> bytes:
    """Return the text of a file and, recursively, of the headers it includes from its own folder."""
    text = source.read_bytes()
    headers = re.findall(rb'^#include "(.+)"', text, re.MULTILINE)
    return b"".join([text, *(_with_headers(source.parent / header.decode()) for header in headers)])


def _cache_folder() -> Path:
    """Return the folder of compiled libraries; refuse one that others than root can write to: its code is run."""
    named = os.environ.get("ALLMASK_KERNELS")
    folder = Path(named or Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "allmask"))
    folder.mkdir(parents=True, exist_ok=True, mode=0o755 if named else 0o700)
    if folder.stat().st_uid not in (0, os.getuid()) or folder.stat().st_mode & 0o022:
        raise PermissionError(f"{folder} can be written by somebody else")
    return folder


def compile_all(sources: Iterable[Path]) -> list[Path]:
    """Compile each source for each instruction set that it supports, and return the paths of the libraries."""
    compiled = []
    for source, instructions in product(sources, (AVX2, AVX_VNNI, AVX512, AVX512_VNNI, AVX512_BF16)):
        with suppress(RuntimeError):  # it uses instructions that are not in this set
            compiled.append(_compiled(source, _flags(instructions)))
    return compiled


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
