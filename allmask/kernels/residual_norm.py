"""The end of a residual step, norm(x + dropout(step + bias)), and its gradients in one pass each (residual_norm.c).

Torch makes about ten passes: it draws, compares, multiplies, adds, normalizes, and converts between bf16 and fp32.
"""

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

SOURCE = Path(__file__).with_suffix(".c")
LANES = 16
ELEMENTS = 1 << 17  # per thread, at least: starting a thread takes about as long


@cache
def library() -> Any:
    """The compiled residual_norm.c; None if it cannot be compiled."""
    return build.library(SOURCE, build.AVX512_BF16, build.AVX512, build.AVX2, build.NEON)


def residual_norm(
    x: Tensor, step: Tensor, bias: Tensor, weight: Tensor, shift: Tensor, eps: float, p: float = 0.0, low: bool = False
) -> tuple[Tensor, Tensor]:
    """y = layer_norm(x + dropout(step + bias)) of rows (N, W), twice: in fp32 and, if `low`, in bf16; else y itself.

    x, the bias and the norm's weight and shift are fp32, `step` is fp32 or bf16. Call it only if `suits`. Dropout
    hashes one number from torch's generator.
    """
    options = _Options(eps, dropped(p), seed_of(p), low)
    found = _ResidualNorm.apply(x.contiguous(), step.contiguous(), bias, weight, shift, options)
    return found if low else (found, found)  # type: ignore[return-value]


def suits(x: Tensor, width: int) -> bool:
    """Whether the kernel is available and supports such rows: fp32 on a CPU, of a multiple of 16 numbers."""
    plain = x.device.type == "cpu" and x.dtype == torch.float32 and x.numel() > 0 and not width % LANES
    return plain and not build.is_traced() and library() is not None


def dropped(p: float) -> int:
    """A dropout probability as the kernels take it."""
    return min(round(p * 2**32), 2**32 - 1)


def seed_of(p: float) -> int:
    return int(torch.empty((), dtype=torch.int64, device="cpu").random_()) if p else 0


def threads_for(x: Tensor) -> int:
    return max(1, min(torch.get_num_threads(), x.numel() // ELEMENTS))


class _Options(NamedTuple):
    eps: float
    dropped: int
    seed: int
    low: bool


_Call = structure(
    **pointers(
        "x bias weight shift step sums means scales y low grad low_grad x_grad step_grad partial "
        "weight_grad shift_grad bias_grad"
    ),
    **int64s("rows width half threads"),
    seed=ctypes.c_uint64, dropped=ctypes.c_uint32, epsilon=ctypes.c_float,
)  # fmt: skip


def _call(options: _Options, sums: Tensor, half: bool, **tensors: Tensor | None) -> Any:
    return _Call(
        sums=sums.data_ptr(), **{name: x.data_ptr() for name, x in tensors.items() if x is not None},
        rows=sums.numel() // sums.shape[-1], width=sums.shape[-1], half=half, threads=threads_for(sums),
        seed=options.seed, dropped=options.dropped, epsilon=options.eps,
    )  # fmt: skip


class _ResidualNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, step: Tensor, bias: Tensor, weight: Tensor, shift: Tensor, options: _Options
    ) -> Any:
        sums, y = torch.empty_like(x), torch.empty_like(x)
        low = torch.empty_like(x, dtype=torch.bfloat16) if options.low else None
        means, scales = x.new_empty(2, x.numel() // x.shape[-1])
        library().residual_norm(ctypes.byref(_call(
            options, sums, step.dtype == torch.bfloat16, x=x, step=step, bias=bias, weight=weight, shift=shift,
            means=means, scales=scales, y=y, low=low,
        )))  # fmt: skip
        ctx.save_for_backward(sums, means, scales, weight)
        ctx.options, ctx.dtype = options, step.dtype
        ctx.set_materialize_grads(False)
        return y if low is None else (y, low)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor | None, low_grad: Tensor | None = None) -> tuple[Tensor | None, ...]:
        sums, means, scales, weight = ctx.saved_tensors
        if grad is None and low_grad is None:
            return (None,) * 6
        grad, low_grad = (None if g is None else g.contiguous() for g in (grad, low_grad))
        x_grad, step_grad = torch.empty_like(sums), torch.empty_like(sums, dtype=ctx.dtype)
        bias_grad, weight_grad, shift_grad = weight.new_empty(3, len(weight))
        if library().residual_norm_backward(ctypes.byref(_call(
            ctx.options, sums, ctx.dtype == torch.bfloat16, weight=weight, means=means, scales=scales, grad=grad,
            low_grad=low_grad, x_grad=x_grad, step_grad=step_grad, weight_grad=weight_grad, shift_grad=shift_grad,
            bias_grad=bias_grad,
        ))):  # fmt: skip
            raise MemoryError("no memory for the gradient of a norm")
        return x_grad, step_grad, bias_grad, weight_grad, shift_grad, None
