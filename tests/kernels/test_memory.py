"""Tensors moved to huge pages keep their values, whether or not the system has huge pages."""

from __future__ import annotations

import ctypes

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
