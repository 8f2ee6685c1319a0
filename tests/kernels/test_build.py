"""Building C: once, whole, in a folder of one's own; and None wherever it cannot be had."""

from __future__ import annotations

import ctypes
import shutil

import pytest

from allmask.kernels import build

CODE = "int twice(int x) { return 2 * x; }\n"


@pytest.fixture
def source(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    build.library.cache_clear()
    path = tmp_path / "twice.c"
    path.write_text(CODE)
    yield path
    build.library.cache_clear()


@pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler")
def test_built_once_and_again_when_the_source_changes(source, tmp_path):
    library = build.library(source, ())
    assert isinstance(library, ctypes.CDLL) and library.twice(21) == 42
    (built,) = (tmp_path / "cache" / "allmask").iterdir()
    when = built.stat().st_mtime_ns
    build.library.cache_clear()
    assert build.library(source, ()).twice(2) == 4 and built.stat().st_mtime_ns == when
    source.write_text(CODE.replace("2 * x", "3 * x"))
    build.library.cache_clear()
    assert build.library(source, ()).twice(2) == 6


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


def test_no_compiler(source, tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert build.library(source, ()) is None


def test_code_that_does_not_compile_leaves_nothing(source, tmp_path):
    source.write_text("not C")
    assert build.library(source, ()) is None
    assert list((tmp_path / "cache" / "allmask").iterdir()) == []


def test_a_processor_without_the_instructions(source, caplog):
    with caplog.at_level("INFO", logger="allmask"):
        assert build.library(source, ("avx9000",)) is None
    assert "this processor has no avx9000" in caplog.text


def test_a_cache_others_can_write_is_not_trusted(source, tmp_path):
    folder = tmp_path / "cache" / "allmask"
    folder.mkdir(parents=True)
    folder.chmod(0o777)
    assert build.library(source, ()) is None


def test_the_first_set_that_the_processor_has(source, monkeypatch):
    asked = []
    monkeypatch.setattr(build, "has", lambda instructions: asked.append(instructions) or not instructions)
    assert build.library(source, ("avx9000",), (), ("avx2",)).twice(2) == 4
    assert asked == [("avx9000",), ()]
