"""RMS norm, fused: one pass forward and one backward, where torch makes several on a CPU (rms_norm.c).

A norm of a few rows takes a microsecond, less than the Python around it. So there is little of that: few functions call
each other, arguments are packed into one struct, and what is the same for all calls is looked up once.
"""

from __future__ import annotations

import struct
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, empty_like, is_grad_enabled, nn
from torch._C import _are_functorch_transforms_active, _get_tracing_state
from torch.compiler import is_dynamo_compiling

from allmask.kernels import build

SOURCE = Path(__file__).with_suffix(".c")
PLAIN = (Tensor, nn.Parameter)  # not a subclass whose data lies elsewhere
FP32 = torch.float32
EPS = torch.finfo(FP32).eps  # torch's default
ELEMENTS = 1 << 17  # per thread, at least: starting a thread takes about as long
MANY = 2 * ELEMENTS
_pack = struct.Struct("PPPPPqqqd").pack  # the struct Call


@cache
def library() -> Any:
    """The compiled rms_norm.c; None if it cannot be compiled."""
    return build.library(SOURCE, build.AVX512, build.AVX2, build.NEON)


def rms_norm(x: Tensor, weight: Tensor | None, eps: float | None = None) -> Tensor:
    """x / sqrt(mean(x²) + eps) · weight, over the last dimension.

    The kernel takes contiguous fp32 tensors on a CPU, in a program that torch does not trace; torch computes the rest.
    """
    if (
        weight is None or type(x) not in PLAIN or type(weight) not in PLAIN or not (x.is_cpu and weight.is_cpu)
        or x.dtype is not FP32 or weight.dtype is not FP32 or not (x.is_contiguous() and weight.is_contiguous())
        or is_dynamo_compiling() or _get_tracing_state() is not None or _are_functorch_transforms_active()
        or weight.ndim != 1 or x.numel() == 0 or x.shape[-1] != weight.numel() or library() is None
    ):  # fmt: skip
        return F.rms_norm(x, x.shape[-1:], weight, eps)
    forward, with_gradients = _functions(EPS if eps is None else eps)
    if is_grad_enabled() and (x.requires_grad or weight.requires_grad):
        return with_gradients(x, weight)
    return forward(None, x, weight)


def _threads(size: int) -> int:
    return min(torch.get_num_threads(), size // ELEMENTS)


@cache
def _functions(eps: float) -> tuple[Any, Any]:
    """The norm without and with gradients for a fixed epsilon, as storing it in `ctx` is slower than a small norm."""
    run, run_backward = library().rms_norm, library().rms_norm_backward

    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        if ctx is not None:
            ctx.save_for_backward(x, weight)
        out, size, width = empty_like(x), x.numel(), weight.numel()
        threads = 1 if size < MANY else _threads(size)
        run(_pack(x.data_ptr(), weight.data_ptr(), 0, out.data_ptr(), 0, size // width, width, threads, eps))
        return out

    class RMSNorm(torch.autograd.Function):
        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
            x, weight = ctx.saved_tensors
            if is_grad_enabled():
                return _by_torch(x, weight, grad, eps)
            x_grad = empty_like(x)
            weight_grad, to = None, 0
            if weight.requires_grad:
                weight_grad = empty_like(weight)
                to = weight_grad.data_ptr()
            if not grad.is_contiguous():  # asking first is faster
                grad = grad.contiguous()
            size, width = x.numel(), weight.numel()
            if not run_backward(_pack(
                x.data_ptr(), weight.data_ptr(), grad.data_ptr(), x_grad.data_ptr(), to,
                size // width, width, 1 if size < MANY else _threads(size), eps,
            )):  # fmt: skip
                raise MemoryError("no memory for the gradient of a norm")
            return x_grad, weight_grad

    # torch wraps a Function in two layers of Python that are not needed here: support for functorch (excluded by
    # `rms_norm`), and checks of which methods are defined. They would take a tenth of the time of a small norm.
    RMSNorm.forward = staticmethod(forward)
    if hasattr(RMSNorm, "_backward_cls"):  # private to torch, so it may go
        RMSNorm._backward_cls.apply = RMSNorm.backward  # type: ignore[attr-defined]
    return forward, super(torch.autograd.Function, RMSNorm).apply  # type: ignore[misc]


def _by_torch(x: Tensor, weight: Tensor, grad: Tensor, eps: float) -> tuple[Tensor | None, ...]:
    """Gradients that can be differentiated again."""
    out = F.rms_norm(x, x.shape[-1:], weight, eps)
    wanted = [tensor for tensor in (x, weight) if tensor.requires_grad]
    grads = iter(torch.autograd.grad(out, wanted, grad, create_graph=True))
    return tuple(next(grads) if tensor.requires_grad else None for tensor in (x, weight))
