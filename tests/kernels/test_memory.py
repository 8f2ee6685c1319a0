"""Tensors moved to huge pages keep their values, whether or not the system has them; memory of large blocks."""

from __future__ import annotations

import ctypes
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch

from allmask.kernels import memory


def some() -> list[torch.Tensor]:
    return [torch.arange(7, dtype=torch.uint8), torch.randn(3, 5), torch.randn(64, 9).bfloat16(), torch.empty(0)]


def test_values_are_kept_in_one_block():
    tensors = some()
    kept = [x.clone() for x in tensors]
    memory.to_huge_pages(tensors)
    assert all(torch.equal(x, y) and x.dtype == y.dtype for x, y in zip(tensors, kept, strict=True))
    assert tensors[0].data_ptr() % memory.HUGE_PAGE == 0 and all(
        x.data_ptr() % memory.CACHE_LINE == 0 for x in tensors[:3]
    )
    tensors[1].zero_()
    assert torch.equal(tensors[0], kept[0]) and torch.equal(tensors[2], kept[2])


def test_a_system_without_madvise(monkeypatch):
    monkeypatch.setattr(ctypes, "CDLL", lambda name: object())
    tensors = some()
    kept = [x.clone() for x in tensors]
    memory.to_huge_pages(tensors)
    assert all(torch.equal(x, y) for x, y in zip(tensors, kept, strict=True))


def test_large_blocks_come_from_the_heap_only_within():
    """What the C library is told, in order; and that a large tensor can be made and freed there."""
    told = []
    real = memory._mallopt()
    if real is None:
        pytest.skip("a C library without mallopt")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(memory, "_mallopt", lambda: lambda *what: told.append(what) or real(*what))
        with memory.large_blocks_from_the_heap():
            assert told == [(memory.M_MMAP_MAX, 0)]
            assert torch.ones(40 << 20, dtype=torch.uint8).sum() == 40 << 20
        with pytest.raises(ValueError), memory.large_blocks_from_the_heap():
            raise ValueError
    assert told == [(memory.M_MMAP_MAX, 0), (memory.M_MMAP_MAX, memory.MAPPED)] * 2


def test_the_next_blocks_of_the_heap_are_in_huge_pages():
    """In another process, whose heap is not yet fragmented; as far as the system gives any."""
    if memory._mallopt() is None or "[never]" in Path("/sys/kernel/mm/transparent_hugepage/enabled").read_text():
        pytest.skip("a C library without mallopt, or a system without huge pages")
    program = """
        import torch
        from allmask.kernels import memory

        def huge():
            with open("/proc/self/smaps_rollup") as lines:
                return sum(int(line.split()[1]) for line in lines if line.startswith("AnonHugePages")) >> 10

        memory.heap_in_huge_pages()
        before = huge()
        with memory.large_blocks_from_the_heap():
            kept = [torch.ones(16 << 20, dtype=torch.uint8) for _ in range(4)]
        print(before, huge() - before)
    """
    written = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True, check=True
    ).stdout
    before, after = map(int, written.split())
    assert before < 64 and after >= 48  # MB: nothing in advance, and then nearly all of it


def test_a_system_without_mallopt(monkeypatch):
    memory._mallopt.cache_clear()
    monkeypatch.setattr(ctypes, "CDLL", lambda name: object())
    with memory.large_blocks_from_the_heap():
        assert torch.ones(3).sum() == 3
    memory.heap_in_huge_pages()
    memory._mallopt.cache_clear()
