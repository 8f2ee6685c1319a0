"""Training, inference and recurrent layers agree on whether bf16 is native, on any device."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import allmask
from allmask.inference import freeze
from allmask.kernels.precision import native_bf16
from allmask.model import Model
from allmask.nn.recurrent import LSTMLayer
from allmask.presets import bert_tiny
from allmask.training import Settings, resolve_precision
from allmask.training.loop import Trainer

SMALL = replace(bert_tiny(), vocab_size=20, width=16, heads=1, ffn_width=16, layers=1, max_positions=8)
MACHINES = {  # CPU flags, GPU: none, without or with native bf16; on which devices bf16 is native
    "old CPU": ({}, None, set()),
    "AVX-512": ({"avx512_bf16": True}, None, {"cpu"}),
    "AMX": ({"amx_bf16": True}, None, {"cpu"}),
    "emulating GPU": ({}, False, set()),
    "emulating GPU beside AVX-512": ({"avx512_bf16": True}, False, {"cpu"}),
    "native GPU": ({}, True, {"cuda"}),
    "both": ({"avx512_bf16": True, "amx_bf16": True}, True, {"cpu", "cuda"}),
}


@pytest.fixture(params=MACHINES)
def native(request, monkeypatch) -> set[str]:
    flags, gpu, devices = MACHINES[request.param]
    monkeypatch.delenv("ALLMASK_ISA", raising=False)
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: flags)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu is not None)
    monkeypatch.setattr(
        torch.cuda, "is_bf16_supported",
        lambda including_emulation=True: gpu is not None and (including_emulation or gpu),
    )  # fmt: skip
    return devices


@pytest.mark.parametrize("device", ["cpu", "cuda", "mps"])
def test_one_answer(native, device):
    assert native_bf16(device) == native_bf16(torch.device(device)) == (device in native)


def test_no_other_module_asks_the_hardware():
    root = Path(allmask.__file__).parent
    asking = {
        str(path.relative_to(root))
        for path in root.rglob("*.py")
        if re.search(r"is_bf16_supported|(avx512|amx)_bf16", path.read_text(encoding="utf-8"))
    }
    assert asking == {"kernels/precision.py"}


def test_a_cpu_restricted_to_avx2_has_no_bf16(monkeypatch):
    monkeypatch.delenv("ALLMASK_ISA", raising=False)
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx512_bf16": True, "amx_bf16": True})
    assert native_bf16("cpu")
    monkeypatch.setenv("ALLMASK_ISA", "avx2")
    assert not native_bf16("cpu")


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_training_inference_and_recurrent_layers_agree(native, device, monkeypatch):
    expected = torch.bfloat16 if device in native else torch.float32
    assert resolve_precision("auto", device) == expected
    assert under_autocast(device, monkeypatch) == (device in native)
    if device == "cpu":  # there need not be a GPU to move a model to
        model = Model(SMALL, ["lm"])
        assert freeze(model).body.embedding.tokens.weight.dtype == expected
        assert Trainer(model, Nothing(), Settings(steps=1), Path("unused")).dtype == expected


def under_autocast(device: str, monkeypatch) -> bool:
    """Whether a recurrent layer computes in bf16 where autocast asks for it."""
    seen = []
    read = lambda self, x, *_: seen.append(torch.is_autocast_enabled(device))  # noqa: E731
    monkeypatch.setattr(LSTMLayer, "_run", read)
    x: Any = SimpleNamespace(device=torch.device(device), to=lambda dtype: x)
    with torch.autocast(device, torch.bfloat16):
        LSTMLayer(2, 2)(x, torch.tensor([1]))
    return seen == [True]


class Nothing:
    """A workload of one token, of which no batch is made."""

    lengths = (1,)

    def batch(self, numbers, epoch):
        raise NotImplementedError

    def evaluate(self, model, step):
        return None
