"""The C kernels of ARM processors, cross-compiled and called in an emulator, in place of those of this machine."""

from __future__ import annotations

import ctypes
import hashlib
import os
import shutil
import struct
import subprocess
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from allmask.kernels import build, compiling

COMPILER, EMULATOR = "aarch64-linux-gnu-gcc", "qemu-aarch64"
SYSROOT = "/usr/aarch64-linux-gnu"
DRIVER = Path(__file__).with_name("arm_driver.c")
CPUS = {  # of the emulator, with the instruction sets that /proc/cpuinfo would name
    "cortex-a72": set(compiling.NEON),
    "neoverse-n1": set(compiling.NEON_DOT),
    "max": {*compiling.NEON_I8MM, *compiling.NEON_BF16},
}


def missing() -> str | None:
    """Why the kernels cannot be emulated here; None if they can."""
    lacking = [name for name in (COMPILER, EMULATOR) if shutil.which(name) is None]
    return f"no ARM tests: {' and '.join(lacking)} not installed" if lacking else None


def cross_compiled(source: Path, instructions: Sequence[str], folder: Path) -> Path:
    """Compile a kernel as allmask does, with a compiler for ARM, unless it is in the folder.

    What only differs from it by a few newer instructions is compiled with -O1, in half of the time.
    """
    path = folder / compiling.library_name(source, instructions)
    if not path.exists():
        quick = folder / "quick"
        if not quick.exists():
            _put(quick, f'#!/bin/sh\nexec {COMPILER} "$@" -O1\n'.encode(), 0o755)
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("CC", COMPILER if instructions == compiling.NEON else str(quick))
            _put(path, compiling.compiled(source, instructions, folder))
    return path


def driver(folder: Path) -> Path:
    path = folder / f"driver-{hashlib.sha256(DRIVER.read_bytes()).hexdigest()[:16]}"
    if not path.exists():
        made = folder / f"driver-{os.getpid()}"
        subprocess.run([COMPILER, "-O1", "-o", str(made), str(DRIVER), "-ldl"], check=True)
        made.replace(path)
    return path


def _put(path: Path, content: bytes, mode: int = 0o644) -> None:
    fresh = path.with_name(f"{path.name}.{os.getpid()}")
    fresh.write_bytes(content)
    fresh.chmod(mode)
    fresh.replace(path)


# ---- memory that C may read and write ------------------------------------------------------------------------------


class Region(NamedTuple):
    start: int
    size: int
    owner: Any  # returns None if the memory was freed
    has_pointers: bool


regions: dict[int, Region] = {}  # by start


def _record(start: int, size: int, owner: Any, has_pointers: bool) -> None:
    regions.pop(start, None)  # the newest is the last
    if size:  # the address of an empty tensor is NULL
        regions[start] = Region(start, size, owner, has_pointers)


@contextmanager
def recorded_memory() -> Iterator[None]:
    """Record what Python takes addresses of: tensors, arrays of structs, and the documents of packed attention."""
    from allmask.kernels import packed_attention

    data_ptr, cast, run = torch.Tensor.data_ptr, ctypes.cast, packed_attention._run

    def recording_data_ptr(x: torch.Tensor) -> int:
        storage = x.untyped_storage()
        _record(storage.data_ptr(), storage.nbytes(), weakref.ref(x), False)
        return data_ptr(x)

    def recording_cast(x: Any, kind: Any) -> Any:
        if isinstance(x, ctypes.Array):
            _record(ctypes.addressof(x), ctypes.sizeof(x), weakref.ref(x), True)
        return cast(x, kind)

    def recording_run(options: Any, *tensors: Any, **others: Any) -> None:
        for array in filter(lambda x: isinstance(x, np.ndarray), (options.documents, options.places)):
            _record(array.ctypes.data, array.nbytes, weakref.ref(array), False)
        run(options, *tensors, **others)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.Tensor, "data_ptr", recording_data_ptr)
        patch.setattr(ctypes, "cast", recording_cast)
        patch.setattr(packed_attention, "_run", recording_run)
        yield
    regions.clear()


# ---- calls -----------------------------------------------------------------------------------------------------------


class Emulated:
    """A library in a running emulator; its attributes are functions, as those of a `ctypes.CDLL`."""

    def __init__(self, path: Path, cpu: str, folder: Path):
        command = [EMULATOR, "-L", SYSROOT, "-cpu", cpu, str(driver(folder)), str(path)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    def __getattr__(self, name: str) -> Any:
        return partial(self._call, name)

    def close(self) -> None:
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.close()
        self.process.stdout.close()
        self.process.wait()

    def _call(self, name: str, *arguments: Any) -> int:
        message = _Message()
        words = [message.argument(each) for each in arguments]
        stdin, stdout = self.process.stdin, self.process.stdout
        assert stdin is not None and stdout is not None
        stdin.write(message.encoded(name, words))
        stdin.flush()
        result = stdout.read(8)
        assert len(result) == 8, f"{name} ended with {self.process.wait()}"  # as with an unknown instruction
        for size, region in message.found:
            content = stdout.read(size)
            if region is not None and not region.has_pointers:
                ctypes.memmove(region.start, content, size)
        return struct.unpack("<q", result)[0]


class _Message:
    """The regions that a call reaches, and where pointers to them are."""

    def __init__(self) -> None:
        self.contents: list[bytes] = []
        self.found: list[tuple[int, Region | None]] = []
        self.numbers: dict[int, int] = {}  # start of a region -> its number
        self.pointers: list[tuple[int, int, int, int]] = []
        self.live = [region for region in reversed(regions.values()) if region.owner() is not None]

    def argument(self, value: Any) -> tuple[int, int]:
        """A number as (0, number), a pointer as (1 + number of a region, offset)."""
        if value is None:
            return 0, 0
        if isinstance(value, bytes):
            return 1 + self._add(value, None, True), 0
        if hasattr(value, "_obj"):  # ctypes.byref
            return 1 + self._add(bytes(value._obj), None, True), 0
        if isinstance(value, ctypes.c_void_p):
            if not value.value:
                return 0, 0
            place = self._place(value.value)
            assert place is not None, "a pointer to unknown memory"
            return 1 + place[0], place[1]
        return 0, (value.value if isinstance(value, ctypes.c_int64) else value) % 2**64

    def _add(self, content: bytes, region: Region | None, has_pointers: bool) -> int:
        number = len(self.contents)
        self.contents.append(content)
        self.found.append((len(content), region))
        if region is not None:
            self.numbers[region.start] = number
        for index, (word,) in enumerate(struct.iter_unpack("<Q", content) if has_pointers else ()):
            place = self._place(word)
            if place is not None:
                self.pointers.append((number, 8 * index, *place))
            else:
                assert not 2**40 <= word < 2**47, (
                    "a pointer to unknown memory"
                )  # which no size and no double looks like
        return number

    def _place(self, address: int) -> tuple[int, int] | None:
        for region in self.live:
            if region.start <= address < region.start + region.size:
                if region.start not in self.numbers:
                    self._add(ctypes.string_at(region.start, region.size), region, region.has_pointers)
                return self.numbers[region.start], address - region.start
        return None

    def encoded(self, name: str, words: list[tuple[int, int]]) -> bytes:
        parts = [struct.pack("<Q", len(name)), name.encode(), struct.pack("<Q", len(self.contents))]
        for content in self.contents:
            parts += [struct.pack("<Q", len(content)), content]
        parts += [struct.pack("<Q", len(self.pointers)), *(struct.pack("<4Q", *each) for each in self.pointers)]
        parts += [struct.pack("<Q", len(words)), *(struct.pack("<2Q", *word) for word in words)]
        return b"".join(parts)


@contextmanager
def emulated(cpu: str, folder: Path) -> Iterator[dict[Path, tuple[str, ...]]]:
    """Replace all kernels by those of a processor; yields the instruction sets that were chosen, by C file.

    Each library has an emulator of its own, so none can call another: layers are computed one by one, not all at once.
    """
    from allmask.decoding.fast import engines
    from allmask.inference.compiled_layers import CompiledStack
    from allmask.kernels import activation, residual_norm, rms_norm

    started: dict[tuple[Path, tuple[str, ...]], Emulated] = {}
    chosen: dict[Path, tuple[str, ...]] = {}

    def library(source: Path, *choices: tuple[str, ...]) -> Emulated | None:
        instructions = next(filter(build.has, choices), None)
        if instructions is None:
            return None
        chosen[source] = instructions
        if (source, instructions) not in started:
            started[source, instructions] = Emulated(cross_compiled(source, instructions, folder), cpu, folder)
        return started[source, instructions]

    caches = (
        rms_norm.library, rms_norm._functions, engines._compiled_is_right, residual_norm.library, activation.library
    )  # fmt: skip
    for cache in caches:
        cache.cache_clear()
    try:
        with pytest.MonkeyPatch.context() as patch, recorded_memory():
            patch.setattr(build, "_cpu_flags", lambda: CPUS[cpu])
            patch.setattr(build, "library", library)
            patch.setattr(CompiledStack, "run", lambda *arguments: None)
            yield chosen
    finally:
        for each in started.values():
            each.close()
        for cache in caches:
            cache.cache_clear()
