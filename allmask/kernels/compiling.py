"""Compile the C files of this package. Only the standard library is needed: setup.py uses it to build a wheel."""

from __future__ import annotations

import hashlib
import os
import platform
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

AVX2 = ("avx2", "fma")
AVX_VNNI = (*AVX2, "avxvnni")
AVX512 = ("avx512f", "avx512bw", "avx512dq", "avx512vl", "fma")
AVX512_VNNI = (*AVX512, "avx512vnni")
AVX512_BF16 = (*AVX512, "avx512bf16")
NEON = ("asimd",)
ARMV8_2 = (*NEON, "atomics", "crc32", "asimdrdm")  # what compilers may use for -march=armv8.2-a
NEON_DOT = (*ARMV8_2, "asimddp")
NEON_I8MM = (*NEON_DOT, "i8mm")
NEON_BF16 = (*ARMV8_2, "bf16")
SETS = {
    "AVX2": AVX2, "AVX_VNNI": AVX_VNNI, "AVX512": AVX512, "AVX512_VNNI": AVX512_VNNI, "AVX512_BF16": AVX512_BF16,
    "NEON": NEON, "NEON_DOT": NEON_DOT, "NEON_I8MM": NEON_I8MM, "NEON_BF16": NEON_BF16,
}  # fmt: skip
NO_COMPILER = "there is no C compiler (cc, gcc or clang)"
ARM_EXTENSIONS = {"asimddp": "dotprod", "i8mm": "i8mm", "bf16": "bf16"}  # Linux's names, and those of compilers
FLAGS = ("-O3", "-std=gnu11", "-fno-math-errno", "-fPIC", "-shared")


def is_for(instructions: Sequence[str], machine: str) -> bool:
    """Whether these instruction sets are of the architecture of a machine, as `platform.machine` names it."""
    return not instructions or ("asimd" in instructions) == (machine in ("aarch64", "arm64"))


def baseline() -> tuple[str, ...]:
    """What every kernel needs on this architecture."""
    return NEON if is_for(NEON, platform.machine()) else AVX2


def variants(sources: Sequence[Path]) -> Iterator[tuple[Path, tuple[str, ...]]]:
    """Yield each source with each set of instructions that its Python binding names, as in `build.AVX2`; else all.

    Only sets of this machine's architecture: its compiler knows no others.
    """
    sets = {name: each for name, each in SETS.items() if is_for(each, platform.machine())}
    for source in sources:
        binding = source.with_suffix(".py")
        text = binding.read_text(encoding="utf-8") if binding.is_file() else ""
        named = set(re.findall(r"\bbuild\.([A-Z]\w*)", text)) & set(SETS)
        yield from ((source, each) for name, each in sets.items() if name in named or not named)


def compiler_flags(instructions: Sequence[str]) -> tuple[str, ...]:
    if "asimd" not in instructions:
        return (*FLAGS, *(f"-m{name}" for name in instructions))
    base = "armv8-a" if tuple(instructions) == NEON else "armv8.2-a"
    return (*FLAGS, "+".join([f"-march={base}", *(ARM_EXTENSIONS[x] for x in instructions if x in ARM_EXTENSIONS)]))


def library_name(source: Path, instructions: Sequence[str]) -> str:
    """Return the file name of the compiled library. It has a hash of the source, its headers and the flags."""
    content = _with_headers(source) + repr(compiler_flags(instructions)).encode()
    return f"{source.stem}-{hashlib.sha256(content).hexdigest()[:16]}.so"


def _with_headers(source: Path) -> bytes:
    """Return the text of a file and, recursively, of the headers it includes from its own folder."""
    text = source.read_bytes()
    headers = re.findall(rb'^#include "(.+)"', text, re.MULTILINE)
    return b"".join([text, *(_with_headers(source.parent / header.decode()) for header in headers)])


def compiler() -> str:
    """Return the path of the C compiler."""
    found = shutil.which(os.environ.get("CC", "cc")) or shutil.which("gcc") or shutil.which("clang")
    if found is None:
        raise FileNotFoundError(NO_COMPILER)
    return found


def compiled(source: Path, instructions: Sequence[str], folder: Path) -> bytes:
    """Compile a C file in a temporary folder inside `folder`, and return the shared library."""
    program = compiler()
    with tempfile.TemporaryDirectory(dir=folder) as inner:
        command = [program, *compiler_flags(instructions), "-o", f"{inner}/library.so", str(source), "-lm"]
        ran = subprocess.run(
            command, env={**os.environ, "TMPDIR": inner}, timeout=60,
            capture_output=True, encoding="utf-8", errors="replace",
        )  # fmt: skip
        if ran.returncode:
            reasons = [line for line in ran.stderr.splitlines() if "error" in line] or ran.stderr.splitlines() or ["?"]
            raise RuntimeError(f"{program} failed: {reasons[0]}")
        return Path(inner, "library.so").read_bytes()


def checksum(code: bytes) -> bytes:
    """Return the content of the `.sha256` file next to a library."""
    return hashlib.sha256(code).hexdigest().encode() + b"\n"
