"""RMS norm, fused: one pass forward and one backward, where torch makes several on a CPU (rms_norm.c).

A norm of a few rows takes a microsecond, less than the Python around it, so that is kept short: arguments are packed
into one struct, and the library is looked up once.
"""

from __future__ import annotations

import struct
from functools import cache
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
_pack = struct.Struct("PPPPPqqqd").pack  # the struct Call


@cache
def library() -> Any:
    """The compiled rms_norm.c; None if it cannot be compiled."""
    return build.library(SOURCE, build.AVX512, build.AVX2)


def rms_norm(x: Tensor, weight: Tensor | None, eps: float | None = None) -> Tensor:
    """x / sqrt(mean(x²) + eps) · weight, over the last dimension; computed by torch if the kernel does not suit."""
    if weight is None or not suits(x, weight):
        return F.rms_norm(x, x.shape[-1:], weight, eps)
    eps = EPS if eps is None else eps
    if torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad):
        return _apply(x, weight, eps)
    return _forward(x, weight, eps)


def suits(x: Tensor, weight: Tensor) -> bool:
    """Whether the kernel supports these: contiguous fp32 tensors on a CPU, in a program that torch does not trace."""
    return (
        x.dtype is weight.dtype is torch.float32 and x.is_cpu and x.is_contiguous() and weight.is_contiguous()
        and x.numel() > 0 and weight.shape == x.shape[-1:] and type(x) in PLAIN and type(weight) in PLAIN
        and not build.is_traced() and library() is not None
    )  # fmt: skip


def _forward(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    out, size, width = torch.empty_like(x), x.numel(), weight.numel()
    threads = 1 if size < 2 * ELEMENTS else _threads(size)
    call = _pack(x.data_ptr(), weight.data_ptr(), 0, out.data_ptr(), 0, size // width, width, threads, eps)
    library().rms_norm(call)
    return out


def _threads(size: int) -> int:
    return min(torch.get_num_threads(), size // ELEMENTS)


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
        x_grad, weight_grad = torch.empty_like(x), torch.empty_like(weight) if ctx.needs_input_grad[1] else None
        size, width, to = x.numel(), weight.numel(), 0 if weight_grad is None else weight_grad.data_ptr()
        threads = 1 if size < 2 * ELEMENTS else _threads(size)
        grad = grad if grad.is_contiguous() else grad.contiguous()  # asking first is faster
        pointers = x.data_ptr(), weight.data_ptr(), grad.data_ptr(), x_grad.data_ptr(), to
        if not library().rms_norm_backward(_pack(*pointers, size // width, width, threads, ctx.eps)):
            raise MemoryError("no memory for the gradient of a norm")
        return x_grad, weight_grad, None


# torch wraps a Function in two layers of Python that are not needed here: support for functorch (excluded by `suits`),
# and checks of which methods are defined. They would take a tenth of the time of a small norm.
_apply: Any = super(torch.autograd.Function, _RMSNorm).apply  # type: ignore[misc]
if hasattr(_RMSNorm, "_backward_cls"):  # private to torch, so it may go
    _RMSNorm._backward_cls.apply = _RMSNorm.backward  # type: ignore[attr-defined]
