"""The activation of a feed-forward layer, dropout(f(x + bias)), and its gradients in one pass each (activation.c)."""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from allmask.kernels import build
from allmask.kernels.build import int64s, pointers, structure
from allmask.kernels.residual_norm import LANES, dropped, seed_of, threads_for

SOURCE = Path(__file__).with_suffix(".c")
KINDS = ("gelu", "gelu_tanh", "relu")  # in the order of the C code


@cache
def library() -> Any:
    """The compiled activation.c; None if it cannot be compiled."""
    return build.library(SOURCE, build.AVX512_BF16, build.AVX512, build.AVX2, build.NEON)


def activate(x: Tensor, bias: Tensor, kind: str, p: float = 0.0) -> Tensor:
    """dropout(f(x + bias)) of rows (N, W), in the dtype of x: fp32 or bf16. The bias is fp32.

    Call it only if `suits`. Dropout hashes one number from torch's generator.
    """
    return _Activation.apply(x.contiguous(), bias, _Options(KINDS.index(kind), dropped(p), seed_of(p)))  # type: ignore


def suits(device: torch.device, width: int) -> bool:
    """Whether the kernel is available and supports such rows: on a CPU, of a multiple of 16 numbers."""
    return device.type == "cpu" and not width % LANES and not build.is_traced() and library() is not None


class _Options(NamedTuple):
    kind: int
    dropped: int
    seed: int


_Call = structure(
    **pointers("x grad bias slope out partial bias_grad"), **int64s("rows width half kind threads"),
    seed=ctypes.c_uint64, dropped=ctypes.c_uint32,
)  # fmt: skip


def _call(options: _Options, out: Tensor, **tensors: Tensor) -> Any:
    return _Call(
        out=out.data_ptr(), **{name: tensor.data_ptr() for name, tensor in tensors.items()},
        rows=out.numel() // out.shape[-1], width=out.shape[-1], half=out.dtype == torch.bfloat16,
        threads=threads_for(out), **options._asdict(),
    )  # fmt: skip


class _Activation(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor, options: _Options) -> Tensor:
        out, slope = torch.empty_like(x), torch.empty_like(x)
        library().activate(ctypes.byref(_call(options, out, x=x, bias=bias, slope=slope)))
        ctx.save_for_backward(slope)
        ctx.options = options
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (slope,) = ctx.saved_tensors
        grad, x_grad = grad.contiguous(), torch.empty_like(slope)
        bias_grad = slope.new_empty(slope.shape[-1], dtype=torch.float32)
        if library().activate_backward(
            ctypes.byref(_call(ctx.options, x_grad, grad=grad, slope=slope, bias_grad=bias_grad))
        ):
            raise MemoryError("no memory for the gradient of an activation")
        return x_grad, bias_grad, None
