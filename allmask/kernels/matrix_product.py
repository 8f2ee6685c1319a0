"""The matrix products of a linear layer in training, forward and backward, by an optional C kernel (matrix_product.c).

Under autocast, torch converts weights and gradients in passes of their own. Here weights are converted while they are
copied into the layout of the product, the gradient of a weight is fp32 at once, and that of the bias is summed on the
way. An activation is applied before results leave the cache, and so is its slope to gradients.
"""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from allmask.kernels import build
from allmask.kernels.activation import KINDS
from allmask.kernels.build import int64s, pointers, structure

SOURCE = Path(__file__).with_suffix(".c")
MULTIPLE = 32  # of which the widths of a weight must be multiples
THREADS = 4  # it was not measured with more
ROWS = 64  # fewer are left to torch: the weights are copied for each product


def library(dtype: torch.dtype) -> Any:
    """The compiled kernel; for bf16 only where the processor has bf16 products."""
    if dtype == torch.bfloat16:
        return build.library(SOURCE, build.AVX512_BF16)
    return build.library(SOURCE, build.AVX512, build.AVX2) if dtype == torch.float32 else None


def suits(x: Tensor, *weights: Tensor) -> bool:
    """Whether the kernel is available and supports these: rows of fp32 or bf16 on a CPU, and weights in fp32."""
    if (
        x.device.type != "cpu"
        or x.numel() < ROWS * x.shape[-1]
        or torch.get_num_threads() > THREADS
        or build.is_traced()
    ):
        return False
    fits = all(w.dtype == torch.float32 and not (w.shape[0] % MULTIPLE or w.shape[1] % MULTIPLE) for w in weights)
    return fits and library(x.dtype) is not None


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x @ weight.T + bias for x (N, in) and weight (out, in), in the dtype of x. Call it only if `suits`."""
    return _Linear.apply(x, weight, bias)  # type: ignore[return-value]


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        return forward(x, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (x, weight), (for_x, for_weight, for_bias) = ctx.saved_tensors, ctx.needs_input_grad
        x_grad = input_grad(grad, weight) if for_x else None
        bias_grad = weight.new_empty(len(weight)) if for_bias else None
        found = weight_grad(grad, x, bias_grad=bias_grad) if for_weight or for_bias else None
        return x_grad, found if for_weight else None, bias_grad


def forward(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x @ weight.T + bias, in the dtype of x; the weight and the bias are fp32."""
    out = x.new_empty(len(x), len(weight))
    product(x, weight, out, b_across=True, bias=bias)
    return out


def activated(x: Tensor, weight: Tensor, bias: Tensor, kind: str) -> tuple[Tensor, Tensor]:
    """f(x @ weight.T + bias) for an activation f of activation.py, and its slope there, in the dtype of x."""
    out, slope = (x.new_empty(len(x), len(weight)) for _ in range(2))
    product(x, weight, out, b_across=True, bias=bias, slope=slope, activation=1 + KINDS.index(kind))
    return out, slope


def input_grad(grad: Tensor, weight: Tensor, slope: Tensor | None = None) -> Tensor:
    """grad @ weight, times the slope if there is one, in the dtype of grad."""
    out = grad.new_empty(len(grad), weight.shape[1])
    product(grad, weight, out, slope=slope)
    return out


def weight_grad(grad: Tensor, x: Tensor, out: Tensor | None = None, bias_grad: Tensor | None = None) -> Tensor:
    """grad.T @ x in fp32, written to `out` if that is given. `bias_grad` becomes the sum of the rows of grad."""
    if out is None:
        out = grad.new_empty(grad.shape[1], x.shape[1], dtype=torch.float32)
    product(grad, x, out, a_across=True, sums=bias_grad)
    return out


_Call = structure(
    **pointers("a b bias c slope sums"),
    **int64s("rows columns depth a_row b_row c_row a_across b_across half exact low activation threads"),
)


def product(
    a: Tensor, b: Tensor, out: Tensor, a_across: bool = False, b_across: bool = False, bias: Tensor | None = None,
    sums: Tensor | None = None, slope: Tensor | None = None, activation: int = 0,
) -> None:  # fmt: skip
    """out = a @ b + bias; a and b are transposed if they are `across`. `sums` becomes the sum of the rows of a.

    With an activation, out is that of this, and `slope` becomes its slope. With a slope alone, out is multiplied by it.
    """
    a, b, half = _rows(a), _rows(b), a.dtype == torch.bfloat16
    bias = None if bias is None else bias.float().contiguous()
    others = {"bias": bias, "sums": sums, "slope": slope}
    call = _Call(
        a=a.data_ptr(), b=b.data_ptr(), c=out.data_ptr(),
        **{name: None if x is None else x.data_ptr() for name, x in others.items()},
        rows=out.shape[0], columns=out.shape[1], depth=a.shape[0 if a_across else 1],
        a_row=a.stride(0), b_row=b.stride(0), c_row=out.stride(0), a_across=a_across, b_across=b_across,
        half=half, exact=half and b.dtype == torch.float32, low=out.dtype == torch.bfloat16,
        activation=activation, threads=torch.get_num_threads(),
    )  # fmt: skip
    if library(a.dtype).matrix_product(ctypes.byref(call)):
        raise MemoryError("no memory for a matrix product")


def _rows(x: Tensor) -> Tensor:
    """x with contiguous rows; they may be apart, as the columns of a larger matrix are."""
    return x if x.stride(1) == 1 else x.contiguous()
