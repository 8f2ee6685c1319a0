"""Transformer layers in int8: modules that replace the linear layers of a model, see kernels/int8.py.

`Int8Linear`, `Int8FeedForward` and `Int8Layer` compute in C. `TorchInt8Linear` is their specification in torch, and
replaces them where C is not available.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from allmask.kernels import int8
from allmask.kernels.int8 import PackedLinear, quantize, quantize_weight, smooth, smoothing_scale
from allmask.nn.attention import Attention
from allmask.nn.layers import ACTIVATIONS, CrossLayer, FeedForward, Layer
from allmask.nn.relative_attention import RelativePositionBias

log = logging.getLogger("allmask")

SLOW = (
    "int8 is computed by torch, slower than bf16 or fp32, and rounds elsewhere than the C kernels: hidden states have "
    "a mean cosine of 0.998 to 0.999 to theirs, as both have to fp32; C needs a compiler, AVX2 or NEON, and widths "
    "that are multiples of 16"
)


class TorchInt8Linear(nn.Module):
    """A linear layer and the activation after it, in int8, by torch."""

    def __init__(self, weight: Tensor, bias: Tensor | None, activation: str = "none", smoothing: Tensor | None = None):
        super().__init__()
        weight, self.input_scale = smooth(weight, smoothing)
        self.weight, scale = quantize_weight(weight.detach().float())
        self.scale = scale[:, 0]
        self.bias = torch.zeros_like(self.scale) if bias is None else bias.detach().float().clone()
        self.activation = nn.Identity() if activation == "none" else ACTIVATIONS[activation]()

    def forward(self, x: Tensor) -> Tensor:
        x = x if self.input_scale is None else x * self.input_scale
        rows, scale = quantize(x.flatten(0, -2))
        sums = int8.product(rows, self.weight)
        return self.activation(torch.addcmul(self.bias, sums, scale * self.scale)).unflatten(0, x.shape[:-1])


class Int8Linear(nn.Module):
    """A linear layer; its result has the given dtype, fp32 or bf16."""

    def __init__(self, linear: nn.Linear, dtype: torch.dtype = torch.float32, smoothing: Tensor | None = None):
        super().__init__()
        self.packed = PackedLinear.of(linear.weight, linear.bias, smoothing=smoothing)
        self.dtype = dtype

    def forward(self, x: Tensor) -> Tensor:
        return int8.linear(self.packed, x, self.dtype)


class Int8FeedForward(nn.Module):
    """Position-wise feed-forward."""

    def __init__(self, expand: PackedLinear, contract: PackedLinear, activation: str):
        super().__init__()
        self.expand, self.contract, self.activation = expand, contract, activation

    def forward(self, x: Tensor) -> Tensor:
        return int8.feed_forward(self.expand, self.contract, self.activation, x).to(x.dtype)


class Int8Layer(Layer):
    """A layer of two calls besides attention: output projection, residual and norm; feed-forward, residual and norm."""

    def __init__(self, layer: Layer, activation: str, norm_place: str, smoothing: Mapping[nn.Module, Tensor | None]):
        norms = (layer.attention_norm, layer.feed_forward_norm)
        super().__init__(layer.attention, layer.feed_forward, norms, norm_place, 0.0)
        feed: Any = layer.feed_forward
        self.output, expand, contract = (
            PackedLinear.of(linear.weight, linear.bias, smoothing=smoothing.get(linear))
            for linear in (layer.attention.output, feed.expand, feed.contract)
        )
        self.attention.add_module("output", nn.Identity())
        self.feed_forward: Any = Int8FeedForward(expand, contract, activation)
        self.pre = norm_place == "pre"

    def feed(self, x: Tensor) -> Tensor:
        feed = self.feed_forward
        residual = int8.residual_structure(self.feed_forward_norm, self.pre)
        return int8.feed_forward(feed.expand, feed.contract, feed.activation, x, residual)

    def _join(self, x: Tensor, step: Tensor) -> Tensor:
        """Add the residual. `step` is the output of attention before its output projection, which is done here."""
        return int8.residual_linear(self.output, int8.residual_structure(self.attention_norm, self.pre), step, x)


# ---- a whole body ------------------------------------------------------------------------------------------------


def quantize_layers(body: nn.Module, activation: str, norm_place: str, dtype: torch.dtype) -> None:
    """Replace all linear layers of an fp32 body, in place; queries, keys and values get the given dtype."""
    if int8.library() is None:
        log.warning(SLOW)
        dtype = torch.float32
    smoothing = smoothing_scales(body, norm_place)
    for parent in list(body.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, Layer) and _is_supported(child):
                setattr(parent, name, Int8Layer(child, activation, norm_place, smoothing))
    for parent in list(body.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is nn.Linear:
                projected, scale = isinstance(parent, Attention) and name != "output", smoothing.get(child)
                if int8.library() is None or child.in_features % int8.LANES:
                    quantized = TorchInt8Linear(child.weight, child.bias, smoothing=scale)
                else:
                    quantized = Int8Linear(child, dtype if projected else torch.float32, scale)
                setattr(parent, name, quantized)
    for module in body.modules():
        if isinstance(module, RelativePositionBias):
            module.table.to(dtype)  # added to scores of that dtype


def _is_supported(layer: Layer) -> bool:
    """Whether `Int8Layer` can replace this layer."""
    norm, feed = layer.attention_norm, layer.feed_forward
    known = isinstance(norm, nn.RMSNorm) or (isinstance(norm, nn.LayerNorm) and norm.bias is not None)
    if int8.library() is None or type(feed) is not FeedForward or not known:
        return False
    linears = (layer.attention.query, layer.attention.output, feed.expand, feed.contract)
    return not any(linear.in_features % int8.LANES for linear in linears)


def smoothing_scales(body: Any, norm_place: str) -> dict[nn.Module, Tensor | None]:
    """Return the smoothing scale of each linear layer that reads the output of a norm."""
    return {linear: smoothing_scale(norm, linear.weight) for linear, norm in input_norms(body, norm_place).items()}


def input_norms(body: Any, norm_place: str) -> dict[nn.Linear, nn.Module]:
    """Map each linear layer that reads the output of a norm to that norm; for a stack or an encoder–decoder."""
    stacks, source = ([body.encoder, body.decoder] if hasattr(body, "decoder") else [body]), nn.Identity()
    found = {}
    for stack in stacks:
        before = body.embedding.norm if isinstance(body.embedding.project, nn.Identity) else nn.Identity()
        for layer in stack.layers:
            found |= {
                linear: norm
                for norm, linears in _norms_and_readers(layer, before, source, norm_place == "pre")
                for linear in linears
            }
            before = getattr(layer, "layer", layer).feed_forward_norm
        source = stack.norm if norm_place == "pre" else before  # of the encoder, for the decoder's cross-attention
    return found


def _norms_and_readers(
    layer: Any, before: nn.Module, source: nn.Module, pre: bool
) -> list[tuple[nn.Module, list[nn.Linear]]]:
    """Return norms, each with those linear layers of this layer that read its output."""
    cross, layer = (layer, layer.layer) if isinstance(layer, CrossLayer) else (None, layer)
    steps = [(layer.attention_norm, [layer.attention.query, layer.attention.key, layer.attention.value])]
    if cross is not None:
        steps.append((cross.cross_norm, [cross.cross.query]))
    inward = [child for name, child in layer.feed_forward.named_children() if name != "contract"]
    steps.append((layer.feed_forward_norm, [linear for linear in inward if isinstance(linear, nn.Linear)]))
    if not pre:  # a step reads the output of the norm that ended the step before it
        norms = [before, *(norm for norm, _ in steps[:-1])]
        steps = [(norm, linears) for norm, (_, linears) in zip(norms, steps, strict=True)]
    return steps if cross is None else [*steps, (source, [cross.cross.key, cross.cross.value])]
