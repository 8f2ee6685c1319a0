"""A model frozen for inference: weights packed for oneDNN, activations fused."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from functools import cache
from typing import TypeVar

import torch
from torch import Tensor, nn

from allmask.errors import UsageError
from allmask.inference.int8_layers import Int8Linear, TorchInt8Linear, quantize_layers
from allmask.kernels.memory import keep_freed_memory
from allmask.kernels.precision import PRECISIONS, resolve_precision
from allmask.model import Model
from allmask.nn.attention import Attention
from allmask.nn.dropout import Dropout
from allmask.nn.layers import FeedForward

log = logging.getLogger("allmask")
Kind = TypeVar("Kind", bound=nn.Module)

CHOICES = ("auto", *PRECISIONS, "int8")
USUAL_TOKENS = 1024  # the number of rows oneDNN chooses a layout for; any other works too
FUSED = {"none": ("none", ""), "gelu": ("gelu", "none"), "gelu_tanh": ("gelu", "tanh"), "relu": ("relu", "")}


class Packed(nn.Module):
    """A linear layer and the activation after it in one oneDNN call, its weight laid out beforehand for the kernel."""

    def __init__(self, linear: nn.Linear, activation: str = "none"):
        super().__init__()
        self.weight = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach(), USUAL_TOKENS)
        self.bias = linear.bias
        self.after, self.formula = FUSED[activation]

    def forward(self, x: Tensor) -> Tensor:
        return torch.ops.mkldnn._linear_pointwise(x, self.weight, self.bias, self.after, [], self.formula)


def freeze(model: Model, precision: str = "auto") -> Model:
    """A copy for inference, called like the model itself: no gradients, no dropout, weights packed for this CPU.

    `auto` is bf16 where the processor computes in it, otherwise fp32. Where weights cannot be packed they stay as they
    are. With `int8` the weights of the body are bytes with a scale for each output, and what goes into its products
    bytes with a scale for each token; hidden states stay fp32. The copy cannot be trained or saved.
    """
    if precision not in CHOICES:
        raise UsageError(f"precision is {precision!r}; expected one of {', '.join(CHOICES)}")
    if any(isinstance(module, Packed | Int8Linear | TorchInt8Linear) for module in model.modules()):
        raise UsageError("this model is frozen already", "freeze the model it was made from")
    device = model.body.embedding.tokens.weight.device
    if precision == "int8" and device.type != "cpu":
        log.warning("int8 is for CPUs; this model is on %s", device.type)
        precision = "auto"
    if precision == "int8" and model.config.family in ("lstm", "elmo"):
        log.warning("int8 is for Transformers; this model is computed as with auto")
        precision = "auto"
    hidden = torch.float32 if precision == "int8" else resolve_precision(precision, device)
    frozen = copy.deepcopy(model).to(hidden).requires_grad_(False).eval()
    _drop_dropout(frozen)
    if device.type == "cpu":
        keep_freed_memory()
        _lay_out(frozen, precision, device)
    frozen.register_state_dict_pre_hook(_refuse_saving)
    return frozen


def _lay_out(frozen: Model, precision: str, device: torch.device) -> None:
    config = frozen.config
    if precision == "int8":
        quantize_layers(frozen.body, config.activation, config.norm_place, resolve_precision("auto", device))
    elif can_pack(frozen.body.embedding.tokens.weight.dtype):
        _pack(frozen.body, config.activation)


@cache
def can_pack(dtype: torch.dtype) -> bool:
    """Tried, not looked up: builds of torch differ in which of these operators they have."""
    linear = nn.Linear(32, 32, dtype=dtype).requires_grad_(False)
    x = torch.ones(8, 32, dtype=dtype)
    try:
        return torch.allclose(Packed(linear)(x), linear(x), atol=1e-2)
    except (AttributeError, RuntimeError):
        return False


def _pack(body: nn.Module, activation: str) -> None:
    for module in list(body.modules()):
        if isinstance(module, FeedForward):
            module.add_module("expand", Packed(module.expand, activation))
            module.activation = nn.Identity()
    _replace(body, nn.Linear, Packed)


def _drop_dropout(model: Model) -> None:
    """Taken out, so that not even `train()` brings it back."""
    _replace(model, Dropout, lambda _: nn.Identity())
    for module in model.modules():
        if isinstance(module, Attention):
            module.dropout = 0.0


def _replace(root: nn.Module, kind: type[Kind], make: Callable[[Kind], nn.Module]) -> None:
    for parent in list(root.modules()):
        for name, child in parent.named_children():
            if type(child) is kind:
                setattr(parent, name, make(child))


def _refuse_saving(model: nn.Module, *_) -> None:
    raise UsageError("a frozen model cannot be saved: its weights are laid out for this CPU", "save the one it is from")
