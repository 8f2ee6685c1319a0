"""A step of AdamW in one pass over memory, by an optional C kernel (adamw.c), with the bits of torch's fused AdamW.

Torch makes a pass of its own to clip gradients. And of an embedding, often half of a small model, most rows are never
read: they have neither a gradient nor averages of it, and only decay.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim.adamw import adamw as torchs_adamw

from allmask.kernels import build
from allmask.kernels.build import int64s, pointers, structure

SOURCE = Path(__file__).with_suffix(".c")
LANES = 16
ELEMENTS = 1 << 17  # per thread, at least: starting a thread takes about as long


class Rates(NamedTuple):
    """The numbers of a step, as torch's AdamW calls them; `factor` is what gradients are multiplied by first."""

    lr: float
    betas: tuple[float, float]
    eps: float
    weight_decay: float
    factor: float = 1.0


class Moving(NamedTuple):
    """A weight with its gradient and the moving averages of that and of its square, which are changed in place."""

    weight: Tensor
    grad: Tensor
    mean: Tensor
    square: Tensor
    step: float  # how many steps it has made, this one included
    rows: Tensor | None = None  # uint8, of each row of a table: 0 if it never had a gradient other than zero


@cache
def library() -> Any:
    """The compiled adamw.c, if it computes what torch does; else None."""
    found = build.library(SOURCE, build.AVX512, build.AVX2)
    return found if found is not None and _is_right(found) else None


def suits(*tensors: Tensor) -> bool:
    """Whether the kernel is available and supports these: contiguous fp32 on a CPU, of a multiple of 16 numbers."""
    plain = all(
        x.device.type == "cpu" and x.dtype == torch.float32 and x.is_contiguous() and not x.numel() % LANES
        for x in tensors
    )
    return plain and library() is not None


def update(weights: Sequence[Moving], rates: Rates) -> None:
    """Make one step. Call it only if `suits`; rows of tables with flags are multiples of 16 wide."""
    _update(library(), weights, rates)


_Call = structure(
    **pointers("weights grads means squares rows sizes widths rates roots"), **int64s("count threads"),
    **dict.fromkeys(("factor", "decay", "first", "second", "keep", "epsilon"), ctypes.c_float),
)  # fmt: skip


def _update(kernel: Any, weights: Sequence[Moving], rates: Rates) -> None:
    first, second = rates.betas
    corrected: Mapping[float, tuple[float, float]] = {
        step: (rates.lr / (1 - first**step), (1 - second**step) ** 0.5) for step in {one.step for one in weights}
    }
    count, numbers = len(weights), sum(one.weight.numel() for one in weights)
    addresses, sizes, floats = ctypes.c_void_p * count, ctypes.c_int64 * count, ctypes.c_float * count
    arrays = {
        "weights": addresses(*(one.weight.data_ptr() for one in weights)),
        "grads": addresses(*(one.grad.data_ptr() for one in weights)),
        "means": addresses(*(one.mean.data_ptr() for one in weights)),
        "squares": addresses(*(one.square.data_ptr() for one in weights)),
        "rows": addresses(*(None if one.rows is None else one.rows.data_ptr() for one in weights)),
        "sizes": sizes(*(one.weight.numel() for one in weights)),
        "widths": sizes(*(one.weight.shape[-1] for one in weights)),
        "rates": floats(*(corrected[one.step][0] for one in weights)),
        "roots": floats(*(corrected[one.step][1] for one in weights)),
    }
    call = _Call(
        **{name: ctypes.cast(array, ctypes.c_void_p) for name, array in arrays.items()}, count=count,
        threads=max(1, min(torch.get_num_threads(), numbers // ELEMENTS)), factor=rates.factor,
        decay=1 - rates.lr * rates.weight_decay, first=1 - first, second=1 - second, keep=second, epsilon=rates.eps,
    )  # fmt: skip
    kernel.adamw(ctypes.byref(call))


def _is_right(kernel: Any) -> bool:
    """Self-check: whether a step has the numbers of torch's on this machine."""
    ours = [torch.linspace(-2, 2, 48).mul(factor).sin().view(3, 16) for factor in (3.0, 5.0, 7.0)]
    ours.append(ours[2].square())
    theirs, rates = [x.clone() for x in ours], {"lr": 0.1, "eps": 1e-8, "weight_decay": 0.1}
    _update(kernel, [Moving(*ours, step=3)], Rates(betas=(0.9, 0.99), **rates))
    how = {"fused": True, "amsgrad": False, "maximize": False, "beta1": 0.9, "beta2": 0.99}
    torchs_adamw(*([x] for x in theirs), [], [torch.tensor(2.0)], **how, **rates)  # type: ignore[arg-type]
    return all(torch.allclose(a, b, rtol=1e-5, atol=1e-6) for a, b in zip(ours, theirs, strict=True))
