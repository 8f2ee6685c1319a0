"""Freeze a model for inference: weights packed for oneDNN, fused activations, or int8."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from functools import cache
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from allmask.errors import UsageError
from allmask.inference.compiled_layers import CompiledLinear, TorchInt8Linear, pack_stacks, quantize_layers
from allmask.kernels.memory import keep_freed_memory
from allmask.kernels.precision import PRECISIONS, resolve_precision
from allmask.model import Model
from allmask.nn.attention import Attention
from allmask.nn.dropout import Dropout
from allmask.nn.layers import FeedForward

log = logging.getLogger("allmask")
Kind = TypeVar("Kind", bound=nn.Module)

CHOICES = ("auto", *PRECISIONS, "int8")
NOT_ON_CPU = "int8 is for CPUs; this model is on %s"
USUAL_TOKENS = 1024  # number of rows for which oneDNN chooses the layout; others work, too
FUSED = {"none": ("none", ""), "gelu": ("gelu", "none"), "gelu_tanh": ("gelu", "tanh"), "relu": ("relu", "")}


class Packed(nn.Module):
    """A linear layer and its activation in one oneDNN call, with the weight packed for the kernel."""

    def __init__(self, linear: nn.Linear, activation: str = "none"):
        super().__init__()
        self.weight = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach(), USUAL_TOKENS)
        self.bias = linear.bias
        self.after, self.formula = FUSED[activation]

    def forward(self, x: Tensor) -> Tensor:
        return torch.ops.mkldnn._linear_pointwise(x, self.weight, self.bias, self.after, [], self.formula)


def freeze(model: Model, precision: str = "auto") -> Model:
    """Return a copy for inference: without gradients and dropout, with weights packed for this CPU if possible.

    `auto` is bf16 if the processor has it in hardware, otherwise fp32. With `int8`, the weights of the body are int8
    with a scale per output, the inputs of its linear layers int8 with a scale per token, and hidden states fp32. The
    copy is called like the model, but cannot be trained or saved.
    """
    if precision not in CHOICES:
        raise UsageError(f"precision is {precision!r}; expected one of {', '.join(CHOICES)}")
    if any(isinstance(module, Packed | CompiledLinear | TorchInt8Linear) for module in model.modules()):
        raise UsageError("this model is frozen already", "freeze the original model")
    model = model.standard()
    device = model.device
    if precision == "int8" and device.type != "cpu":
        log.warning(NOT_ON_CPU, device.type)
        precision = "auto"
    if precision == "int8" and model.config.family in ("lstm", "elmo"):
        log.warning("int8 is for Transformers; this model is computed in bf16 or fp32")
        precision = "auto"
    hidden = torch.float32 if precision == "int8" else resolve_precision(precision, device)
    shared: dict[int, Any] = {id(model.tokenizer): model.tokenizer}  # immutable, and slow to copy
    if precision == "int8":  # their weights are packed, which copies them
        linears = (module for module in model.body.modules() if type(module) is nn.Linear)
        shared |= {id(x.weight): nn.Parameter(x.weight.detach(), requires_grad=False) for x in linears}
    frozen = copy.deepcopy(model, shared).to(hidden).requires_grad_(False).eval()
    _replace(frozen, Dropout, lambda _: nn.Identity())  # so that `train()` does not turn it on again
    for module in frozen.modules():
        if isinstance(module, Attention):
            module.dropout = 0.0
    config = frozen.config
    if device.type == "cpu":
        keep_freed_memory()
        if precision == "int8":
            quantize_layers(frozen.body, config.activation, config.norm_place, resolve_precision("auto", device))
        elif hidden == torch.float32:
            pack_stacks(frozen.body, config.activation, config.norm_place)
        if precision != "int8" and can_pack(hidden):
            for module in list(frozen.body.modules()):
                if isinstance(module, FeedForward):
                    module.add_module("expand", Packed(module.expand, config.activation))
                    module.activation = nn.Identity()
            _replace(frozen.body, nn.Linear, Packed)
    frozen.register_state_dict_pre_hook(_refuse_saving)
    return frozen


def precision_of(model: Model) -> str:
    """Return the precision in which a model computes: fp32, bf16 or int8."""
    for module in model.body.modules():
        if isinstance(module, TorchInt8Linear) or (
            isinstance(module, CompiledLinear) and module.packed.scale is not None
        ):
            return "int8"  # without a scale, weights are fp32
    dtype = next(model.body.parameters()).dtype
    return next((name for name, one in PRECISIONS.items() if one == dtype), str(dtype).removeprefix("torch."))


@cache
def can_pack(dtype: torch.dtype) -> bool:
    """Whether weights can be packed. Builds of torch differ in their operators, so this is tried."""
    linear = nn.Linear(32, 32, dtype=dtype).requires_grad_(False)
    x = torch.ones(8, 32, dtype=dtype)
    try:
        return torch.allclose(Packed(linear)(x), linear(x), atol=1e-2)
    except (AttributeError, RuntimeError):
        return False


def _replace(root: nn.Module, kind: type[Kind], make: Callable[[Kind], nn.Module]) -> None:
    for parent in list(root.modules()):
        for name, child in parent.named_children():
            if type(child) is kind:
                setattr(parent, name, make(child))


def _refuse_saving(model: nn.Module, *_) -> None:
    raise UsageError("a frozen model cannot be saved: its weights are packed for this CPU", "save the original model")
