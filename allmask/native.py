"""C files of this package as libraries: built once with the system's compiler, kept in the user's cache.

They are optional everywhere. Where there is no compiler, or the processor lacks an instruction, `library` is None and
torch does the work. Files that include lanes.h take AVX-512 or AVX2, whichever the processor has.
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

log = logging.getLogger("allmask")
AVX512 = ("avx512f", "avx512bw", "avx512dq", "avx512vl", "fma")
AVX2 = ("avx2", "fma")
FLAGS = ("-O3", "-std=gnu11", "-fno-math-errno", "-fPIC", "-shared")


@cache
def library(source: Path, *choices: Sequence[str]) -> ctypes.CDLL | None:
    """The compiled file, built if need be; None where it cannot be had.

    Each choice is a set of instructions to build it with, best first: the first that this processor has is taken.
    """
    try:
        instructions = next(filter(has, choices), None)
        if instructions is None:
            raise RuntimeError(f"this processor has no {', '.join(sorted(set(choices[-1]) - _flags()))}")
        return ctypes.CDLL(str(_built(source, (*FLAGS, *(f"-m{name}" for name in instructions)))))
    except (OSError, RuntimeError, AttributeError, subprocess.SubprocessError) as error:  # or no home, or Windows
        log.info("%s is not used, torch's own kernels are (%s)", source.name, error)
        return None


def has(instructions: Sequence[str]) -> bool:
    """All of them, by the processor's own word: code that it cannot run would end the process."""
    return set(instructions) <= _flags()


@cache
def _flags() -> set[str]:
    """Of this processor; none where that is not known."""
    try:
        return set(Path("/proc/cpuinfo").read_text().replace("_", "").split())
    except OSError:
        return set()


def _built(source: Path, flags: Sequence[str]) -> Path:
    """The shared library, named by what it was built from, so that no old one is ever taken."""
    folder = _cache_folder()
    name = hashlib.sha256(_text(source) + repr(flags).encode()).hexdigest()[:16]
    path = folder / f"{source.stem}-{name}.so"
    if path.exists():
        return path
    compiler = shutil.which(os.environ.get("CC", "cc")) or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        raise FileNotFoundError("there is no C compiler")
    with tempfile.TemporaryDirectory(dir=folder) as inner:
        fresh = Path(inner, path.name)
        subprocess.run(
            [compiler, *flags, "-o", str(fresh), str(source), "-lm"], check=True, capture_output=True, timeout=60
        )
        os.replace(fresh, path)  # whole or not at all, whoever else builds it
    return path


def _text(source: Path) -> bytes:
    """A file and the headers it includes from beside it."""
    text = source.read_bytes()
    headers = re.findall(rb'^#include "(.+)"', text, re.MULTILINE)
    return b"".join([text, *(_text(source.parent / header.decode()) for header in headers)])


def _cache_folder() -> Path:
    """The user's own: code is loaded from it, so nobody else may write there."""
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "allmask")
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    if folder.stat().st_uid != os.getuid() or folder.stat().st_mode & 0o022:
        raise PermissionError(f"{folder} can be written by somebody else")
    return folder


def keep_freed_memory() -> None:
    """Have the C library reuse what is freed, instead of handing it back and getting it zeroed again, page by page.

    glibc hands back what is unused beyond twice the largest block it ever saw freed; this is the largest it counts.
    """
    import torch

    torch.empty((32 << 20) - (1 << 16), dtype=torch.uint8)
