"""RMS norm, fused: one pass forward and one backward, where torch makes several on a CPU (rms_norm.c)."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from allmask.kernels import build

SOURCE = Path(__file__).with_suffix(".c")
PLAIN = (Tensor, nn.Parameter)  # not a subclass whose data lies elsewhere
EPS = torch.finfo(torch.float32).eps  # torch's default
ELEMENTS = 1 << 17  # per thread, at least: starting a thread takes about as long
_POINTER, _INT = ctypes.c_void_p, ctypes.c_int64
_FORWARD = (_POINTER, _POINTER, _INT, _INT, ctypes.c_double, _INT, _POINTER)


def library() -> Any:
    """The compiled rms_norm.c; None if it cannot be compiled."""
    found = build.library(SOURCE, build.AVX512, build.AVX2)
    if found is not None and found.rms_norm.argtypes is None:  # with types, a call needs no objects for its arguments
        found.rms_norm.argtypes, found.rms_norm_backward.argtypes = _FORWARD, (*_FORWARD, _POINTER, _POINTER)
    return found


def rms_norm(x: Tensor, weight: Tensor | None, eps: float | None = None) -> Tensor:
    """x / sqrt(mean(x²) + eps) · weight, over the last dimension; computed by torch if the kernel does not suit."""
    if weight is None or not suits(x, weight):
        return F.rms_norm(x, x.shape[-1:], weight, eps)
    eps = EPS if eps is None else eps
    if torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad):
        return _RMSNorm.apply(x, weight, eps)  # type: ignore[return-value]
    return _forward(x, weight, eps)


def suits(x: Tensor, weight: Tensor) -> bool:
    """Whether the kernel supports these: contiguous fp32 tensors on a CPU, in a program that torch does not trace."""
    return (
        x.dtype == weight.dtype == torch.float32 and x.is_cpu and x.is_contiguous() and weight.is_contiguous()
        and x.numel() > 0 and weight.shape == x.shape[-1:] and type(x) in PLAIN and type(weight) in PLAIN
        and not build.is_traced() and library() is not None
    )  # fmt: skip


def _forward(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    out = torch.empty_like(x)
    library().rms_norm(*_arguments(x, weight, eps), out.data_ptr())
    return out


def _arguments(x: Tensor, weight: Tensor, eps: float) -> tuple[Any, ...]:
    size, width = x.numel(), weight.numel()
    threads = 1 if size < 2 * ELEMENTS else min(torch.get_num_threads(), size // ELEMENTS)
    return x.data_ptr(), weight.data_ptr(), size // width, width, eps, threads


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.eps = eps
        return _forward(x, weight, eps)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        if torch.is_grad_enabled():  # second derivatives: by torch
            out = F.rms_norm(x, x.shape[-1:], weight, ctx.eps)
            wanted = [tensor for tensor in (x, weight) if tensor.requires_grad]
            grads = iter(torch.autograd.grad(out, wanted, grad, create_graph=True))
            return *(next(grads) if tensor.requires_grad else None for tensor in (x, weight)), None
        grad, x_grad = grad.contiguous(), torch.empty_like(x)
        weight_grad = torch.empty_like(weight) if ctx.needs_input_grad[1] else None
        to = x_grad.data_ptr(), None if weight_grad is None else weight_grad.data_ptr()
        if not library().rms_norm_backward(*_arguments(x, weight, ctx.eps), grad.data_ptr(), *to):
            raise MemoryError("no memory for the gradient of a norm")
        return x_grad, weight_grad, None
