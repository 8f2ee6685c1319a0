"""Compile the C files of this package on first use, load them, and pass tensors to them.

Every kernel is optional: where there is no C compiler, or the processor lacks an instruction set, `library` returns
None and torch computes instead. Files that include lanes.h run with AVX-512 or AVX2, whichever the processor has.
Libraries are kept in the user's cache folder.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from allmask.files import put_in_place

log = logging.getLogger("allmask")

AVX2 = ("avx2", "fma")
AVX512 = ("avx512f", "avx512bw", "avx512dq", "avx512vl", "fma")
AVX512_VNNI = (*AVX512, "avx512vnni")
AVX512_BF16 = (*AVX512, "avx512bf16")
FLAGS = ("-O3", "-std=gnu11", "-fno-math-errno", "-fPIC", "-shared")


@cache
def library(source: Path, *choices: Sequence[str]) -> Any:
    """Load a C file as a library (a `ctypes.CDLL`), compiling it if needed; None where that is not possible.

    Each choice is a tuple of instruction sets to compile for, best first: the first that this processor has is taken.
    """
    try:
        instructions = next(filter(has, choices), None)
        if instructions is None:
            raise RuntimeError(f"this processor has no {', '.join(sorted(set(choices[-1]) - _cpu_flags()))}")
        return ctypes.CDLL(str(_compiled(source, (*FLAGS, *(f"-m{name}" for name in instructions)))))
    except (OSError, RuntimeError, AttributeError, subprocess.SubprocessError) as error:  # or no home, or Windows
        log.info("%s is not used, torch's own kernels are (%s)", source.name, error)
        return None


def has(instructions: Sequence[str]) -> bool:
    """Whether the processor has all of these: code with other instructions would kill the process."""
    return set(instructions) <= _cpu_flags()


@cache
def _cpu_flags() -> set[str]:
    """The instruction sets of this processor; empty where they are unknown."""
    try:
        return set(Path("/proc/cpuinfo").read_text().replace("_", "").split())
    except OSError:
        return set()


def _compiled(source: Path, flags: Sequence[str]) -> Path:
    """The shared library. A hash of sources and flags is part of its name, so that a stale one is never loaded."""
    folder = _cache_folder()
    name = hashlib.sha256(_with_headers(source) + repr(flags).encode()).hexdigest()[:16]
    path = folder / f"{source.stem}-{name}.so"
    if path.exists():
        return path
    compiler = shutil.which(os.environ.get("CC", "cc")) or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        raise FileNotFoundError("there is no C compiler")
    with tempfile.TemporaryDirectory(dir=folder) as inner:
        fresh = Path(inner, path.name)
        command = [compiler, *flags, "-o", str(fresh), str(source), "-lm"]
        subprocess.run(command, check=True, capture_output=True, timeout=60)
        put_in_place(fresh, path)  # atomic: another process may be compiling the same file
    return path


def _with_headers(source: Path) -> bytes:
    """The text of a file and, recursively, of the headers it includes from its own folder."""
    text = source.read_bytes()
    headers = re.findall(rb'^#include "(.+)"', text, re.MULTILINE)
    return b"".join([text, *(_with_headers(source.parent / header.decode()) for header in headers)])


def _cache_folder() -> Path:
    """The user's own cache folder. Code is loaded from it, so nobody else may be able to write there."""
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "allmask")
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    if folder.stat().st_uid != os.getuid() or folder.stat().st_mode & 0o022:
        raise PermissionError(f"{folder} can be written by somebody else")
    return folder


def is_traced() -> bool:
    """Whether torch records the program instead of running it: a call of C would not be part of the recording."""
    recording = torch._C._get_tracing_state() is not None or torch._C._are_functorch_transforms_active()
    return recording or torch.compiler.is_compiling()


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
