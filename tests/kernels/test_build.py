"""Building C: once, whole, in a folder of one's own; None, with one line that says so, where it cannot be had."""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

from allmask.errors import UsageError
from allmask.kernels import build, compiling, decode_step, int8, packed_attention

CODE = "int twice(int x) { return 2 * x; }\n"


@pytest.fixture
def source(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("ALLMASK_KERNELS", raising=False)
    build.library.cache_clear()
    build._warn_once.cache_clear()
    build._say_once.cache_clear()
    path = tmp_path / "twice.c"
    path.write_text(CODE)
    yield path
    build.library.cache_clear()
    build._warn_once.cache_clear()
    build._say_once.cache_clear()


@pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler")
def test_built_once_and_again_when_the_source_changes(source, tmp_path):
    library = build.library(source, ())
    assert isinstance(library, ctypes.CDLL) and library.twice(21) == 42
    built, digest = sorted((tmp_path / "cache" / "allmask").iterdir())
    assert digest.read_text() == f"{hashlib.sha256(built.read_bytes()).hexdigest()}\n"
    when = built.stat().st_mtime_ns
    build.library.cache_clear()
    assert build.library(source, ()).twice(2) == 4 and built.stat().st_mtime_ns == when
    source.write_text(CODE.replace("2 * x", "3 * x"))
    build.library.cache_clear()
    assert build.library(source, ()).twice(2) == 6


@pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler")
def test_that_it_takes_longer_the_first_time_is_said_once(source, caplog):
    other = source.with_name("other.c")
    other.write_text(CODE)
    with caplog.at_level("INFO", logger="allmask"):
        assert build.library(source, ()) and build.library(other, ())
        (record,) = caplog.records
        assert re.fullmatch("compiling kernels for this processor with .*cc, once: .*", record.getMessage())
        build.library.cache_clear()
        build._say_once.cache_clear()
        assert build.library(source, ()) and len(caplog.records) == 1  # compiled before


@pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler")
def test_built_again_when_a_header_changes(source):
    source.write_text(f'#include "inner/factor.h"\n{CODE.replace("2 * x", "FACTOR * x")}')
    inner = source.parent / "inner"
    inner.mkdir()
    (inner / "factor.h").write_text('#include "number.h"\n#define FACTOR NUMBER\n')
    for number in (5, 7):
        (inner / "number.h").write_text(f"#define NUMBER {number}\n")
        build.library.cache_clear()
        assert build.library(source, ()).twice(2) == 2 * number


def test_a_missing_header(source):
    source.write_text('#include "nowhere.h"\n')
    assert build.library(source, ()) is None


SLOWER = "no C kernels, so writing takes about twice as long, the rest a little longer: "


def none_and_why(source, caplog, *before: str) -> str:
    """Try to build two libraries, which gives one line in the end; return what it says after `SLOWER`."""
    other = source.with_name("other.c")
    other.write_text(CODE)
    with caplog.at_level("INFO", logger="allmask"):
        assert build.library(source, build.AVX512, build.AVX2, build.NEON) is None
        assert build.library(other, build.AVX2, build.NEON) is None
    *others, line = (record.getMessage() for record in caplog.records)
    assert others == [*before]
    assert line.startswith(SLOWER) and "\n" not in line
    return line.removeprefix(SLOWER)


@pytest.fixture
def avx2(monkeypatch):
    """A processor that has AVX2."""
    monkeypatch.setattr(build, "_cpu_flags", lambda: {"avx2", "fma"})


def test_no_compiler(source, tmp_path, monkeypatch, caplog, avx2):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert none_and_why(source, caplog) == "there is no C compiler (cc, gcc or clang)"


def test_a_compiler_that_fails(source, tmp_path, monkeypatch, caplog, avx2):
    compiler = tmp_path / "cc"
    compiler.write_text("#!/bin/sh\necho cc: note: well >&2\necho error: no stdio.h >&2\nexit 1\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("CC", str(compiler))
    said = f"compiling kernels for this processor with {compiler}, once: that takes a few seconds …"
    assert none_and_why(source, caplog, said) == f"{compiler} failed: error: no stdio.h"


@pytest.fixture
def arm(monkeypatch):
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")


# As Linux describes a Raspberry Pi 4, a Neoverse N1 and a Neoverse V1, and how GCC is told to compile for each.
OLD = "fp asimd evtstrm crc32 cpuid"
DOT = "fp asimd evtstrm aes pmull sha1 sha2 crc32 atomics fphp asimdhp cpuid asimdrdm lrcpc dcpop asimddp ssbs"
NEW = f"{DOT} sha3 asimdfhm dit uscat ilrcpc flagm sve i8mm svebf16 bf16 dgh rng"
ARM = {
    OLD: ("-march=armv8-a", "-march=armv8-a", None),
    DOT: ("-march=armv8.2-a+dotprod", "-march=armv8-a", None),
    NEW: ("-march=armv8.2-a+dotprod+i8mm", "-march=armv8-a", "-march=armv8.2-a+bf16"),
}


@pytest.mark.parametrize("features", ARM)
def test_what_is_compiled_on_arm(features, arm, monkeypatch):
    """For int8 products, for attention in fp32 and in bf16: the best that the processor has, and nothing else."""
    monkeypatch.setattr(Path, "read_text", lambda *_, **__: f"processor : 0\nFeatures\t: {features}\n")
    monkeypatch.setattr(build, "_cpu_flags", build._cpu_flags.__wrapped__)
    asked: list[str | None] = []

    def library(source, *choices):
        chosen = next(filter(build.has, choices), None)
        asked.append(chosen and compiling.compiler_flags(chosen)[-1])

    monkeypatch.setattr(build, "library", library)
    for binding in (int8, decode_step):
        binding.library()
    for dtype in (torch.float32, torch.bfloat16):
        packed_attention.library(dtype)
    products, attention, half = ARM[features]
    assert asked == [products, products, attention, half]


def test_an_arm_processor_without_neon(source, arm, monkeypatch, caplog):
    monkeypatch.setattr(build, "_cpu_flags", lambda: {"Features", ":", "fp"})
    assert none_and_why(source, caplog) == "this processor (aarch64) has no asimd"


def test_a_kernel_that_this_arm_processor_cannot_run(source, arm, monkeypatch, caplog):
    """One line for those who ask for details: the other kernels run."""
    monkeypatch.setattr(build, "_cpu_flags", lambda: set(OLD.split()))
    with caplog.at_level("INFO", logger="allmask"):
        assert build.library(source, build.AVX512_BF16, build.NEON_BF16) is None
    (record,) = caplog.records
    assert record.levelname == "INFO"
    assert record.getMessage().endswith("this processor (aarch64) has no asimdrdm, atomics, bf16")
    build.library.cache_clear()
    assert build.library(source, build.AVX512_BF16) is None
    assert build.refused["twice.c"] == "there is none for aarch64"


def test_arm_without_a_compiler(source, arm, tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(build, "_cpu_flags", lambda: set(NEW.split()))
    monkeypatch.setenv("PATH", str(tmp_path))
    assert none_and_why(source, caplog) == "there is no C compiler (cc, gcc or clang)"


def test_only_kernels_of_the_own_architecture_are_compiled_in_advance(source, arm, monkeypatch):
    arms = [build.NEON, build.NEON_DOT, build.NEON_I8MM, build.NEON_BF16]
    assert [each for _, each in compiling.variants([source])] == arms
    assert [each for _, each in compiling.variants([packed_attention.SOURCE])] == [build.NEON, build.NEON_BF16]
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    assert not set(arms) & {each for _, each in compiling.variants([source, int8.SOURCE])}


def test_an_old_processor(source, monkeypatch, caplog):
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(build, "_cpu_flags", lambda: {"sse4", "avx", "fma"})
    assert none_and_why(source, caplog) == "this processor (x86_64) has no avx2"


def test_a_system_that_does_not_say_what_its_processor_has(source, monkeypatch, caplog):
    monkeypatch.setattr(platform, "system", lambda: "Windows")
    monkeypatch.setattr(build, "_cpu_flags", set)
    assert none_and_why(source, caplog) == "they are for Linux, this is Windows"


def test_switched_off(source, monkeypatch, caplog, avx2):
    monkeypatch.setenv("ALLMASK_KERNELS", "0")
    with caplog.at_level("INFO", logger="allmask"):
        assert build.library(source, build.AVX2) is None and not caplog.records  # who asks for it knows it


def test_a_command_without_a_compiler_says_so_in_one_line_and_works(cli, python, tmp_path):
    """A whole command in a new process, with no compiler and no cache: the same words, and the one line."""
    root = Path(__file__).parents[2]
    plain = {name: os.environ[name] for name in os.environ.keys() - {"XDG_CACHE_HOME", "ALLMASK_KERNELS", "CC"}}
    plain |= {"HOME": str(tmp_path), "PATH": str(tmp_path), "PYTHONPATH": str(root)}
    text = "This package provides a simple tool to convert images from one format to another. It is fast and small."
    words = ["generate", "allmask-en", "--text", text, "--precision", "fp32", "--beams", "2", "--max-new", "6"]
    started = [python, "-m", "allmask", *words]
    ran = subprocess.run(started, env=plain, capture_output=True, text=True, check=True)
    if build.has(build.AVX2):
        assert ran.stderr == f"{SLOWER}there is no C compiler (cc, gcc or clang)\n"
    assert ran.stdout == cli(*words).out and len(ran.stdout.split()) > 2


def test_code_that_does_not_compile_leaves_nothing(source, tmp_path):
    source.write_text("not C")
    assert build.library(source, ()) is None
    assert list((tmp_path / "cache" / "allmask").iterdir()) == []


def test_a_processor_without_the_instructions_of_one_kernel(source, caplog, avx2):
    with caplog.at_level("INFO", logger="allmask"):
        assert build.library(source, ("avx9000",)) is None
    (record,) = caplog.records
    assert record.levelname == "INFO" and record.getMessage().endswith("has no avx9000")
    assert record.getMessage().startswith("twice.c is not used: this processor (")


@pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler")
def test_ahead_of_time(source, tmp_path, monkeypatch, avx2):
    """Root compiles for every processor; another user, without a compiler, uses what fits this one."""
    folder = tmp_path / "kernels"
    monkeypatch.setenv("ALLMASK_KERNELS", str(folder))
    wide = tmp_path / "wide.c"
    wide.write_text(f"#ifndef __AVX512F__\n#error AVX-512 only\n#endif\n{CODE}")
    made = build.compile_all([source, wide])
    names = [path.name.split("-")[0] for path in made]  # AVX-VNNI only where the compiler knows it
    assert names[-3:] == ["wide"] * 3 and names[:4] == ["twice"] * 4 and set(names) == {"twice", "wide"}
    assert sorted(folder.iterdir()) == sorted([*made, *(path.with_name(f"{path.name}.sha256") for path in made)])
    monkeypatch.setenv("PATH", "")
    assert build.library(source, build.AVX512, build.AVX2).twice(21) == 42
    assert build.library(wide, build.AVX2) is None


def test_the_first_set_that_the_processor_has(source, monkeypatch):
    asked = []
    monkeypatch.setattr(build, "has", lambda instructions: asked.append(instructions) or not instructions)
    assert build.library(source, ("avx9000",), (), ("avx2",)).twice(2) == 4
    assert asked == [("avx9000",), ()]


def test_restricted_instruction_sets(monkeypatch):
    """ALLMASK_ISA hides what a processor has beyond it, and refuses other names."""
    monkeypatch.setattr(Path, "read_text", lambda *_, **__: "flags : avx2 fma avx_vnni avx512f avx512_vnni amx_int8")
    expected = {"avx2": {"avx2", "fma"}, "avxvnni": {"avx2", "fma", "avxvnni"}}
    for isa, flags in expected.items():
        monkeypatch.setenv("ALLMASK_ISA", isa)
        assert build._cpu_flags.__wrapped__() == {"flags", ":", *flags}
    monkeypatch.setenv("ALLMASK_ISA", "avx1")
    with pytest.raises(UsageError, match="avx2 or avxvnni"):
        build._cpu_flags.__wrapped__()
