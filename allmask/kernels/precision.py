"""Precisions, and which of them is fast on a device."""

from __future__ import annotations

import torch

from allmask.kernels.build import is_hidden

PRECISIONS = {"fp32": torch.float32, "bf16": torch.bfloat16}


def native_bf16(device: torch.device | str) -> bool:
    """Whether the device has bf16 products in hardware; emulated bf16 is slower than fp32."""
    kind = torch.device(device).type
    if kind == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    flags = torch.cpu.get_capabilities() if kind == "cpu" else {}
    return any(flags.get(name) and not is_hidden(name) for name in ("avx512_bf16", "amx_bf16"))


def resolve_precision(precision: str, device: torch.device | str = "cpu") -> torch.dtype:
    """Return the dtype of "fp32", "bf16" or "auto": bf16 where it is native, else fp32."""
    if precision == "auto":
        precision = "bf16" if native_bf16(device) else "fp32"
    return PRECISIONS[precision]
