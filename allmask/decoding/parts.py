"""What a decoding step multiplies by, taken out of a model once: fused projections, norms, the output layer."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from allmask.attention import Attention
from allmask.inference.frozen import FUSED, Packed, can_pack
from allmask.layers import ACTIVATIONS, Layer
from allmask.model import Model

Map = Callable[[Tensor], Tensor]
MakeLinear = Callable[[Tensor, Tensor | None, str], Map]  # weight (out, in), bias, the activation after it


@dataclass(frozen=True)
class LayerParts:
    """A layer's four products and two norms."""

    qkv: Map  # queries, already divided by sqrt(D), then keys and values: (…, W) -> (…, 3·W)
    output: Map
    expand: Map
    contract: Map
    norms: tuple[nn.Module, nn.Module]


@dataclass(frozen=True)
class Parts:
    """A whole model but for its embeddings."""

    layers: tuple[LayerParts, ...]
    last: nn.Module  # the norm after the last layer, or nothing
    transform: Map | None  # BERT's extra layer before the output
    head_norm: nn.Module
    head: Map

    @classmethod
    def of(cls, model: Model, make: MakeLinear, dtype: torch.dtype) -> Parts:
        """Copies, so that the model may go on learning."""
        kind, layers = model.config.activation, cast(list[Layer], list(model.body.layers))
        head: Any = model.head("lm_head")
        weight = model.body.embedding.tokens.weight if head.output is None else head.output.weight
        has_transform = isinstance(head.transform, nn.Linear)
        return cls(
            tuple(_layer_parts(layer, kind, make, dtype) for layer in layers),
            _copied(model.body.norm, dtype),
            make(head.transform.weight, head.transform.bias, kind) if has_transform else None,
            _copied(head.norm, dtype),
            make(weight, head.bias, "none"),
        )


def _layer_parts(layer: Layer, activation: str, make: MakeLinear, dtype: torch.dtype) -> LayerParts:
    def plain(linear: nn.Linear, kind: str = "none") -> Map:
        return make(linear.weight, linear.bias, kind)

    weight, bias = _fused(layer.attention)
    feed: Any = layer.feed_forward
    norms = (_copied(layer.attention_norm, dtype), _copied(layer.feed_forward_norm, dtype))
    return LayerParts(
        make(weight, bias, "none"), plain(layer.attention.output), plain(feed.expand, activation), plain(feed.contract),
        norms,
    )  # fmt: skip


def _copied(norm: nn.Module, dtype: torch.dtype) -> nn.Module:
    return copy.deepcopy(norm).to(dtype).requires_grad_(False)


def _fused(attention: Attention) -> tuple[Tensor, Tensor]:
    """One matrix for queries, keys and values; the scale of the scores is in the queries already."""
    linears = (attention.query, attention.key, attention.value)
    weights, biases = [x.weight.float() for x in linears], [x.bias.float() for x in linears]
    scale = (weights[0].shape[0] // attention.heads) ** -0.5
    weights[0], biases[0] = weights[0] * scale, biases[0] * scale
    return torch.cat(weights), torch.cat(biases)


# ---- linear layers in torch ----------------------------------------------------------------------------------


def packed_linear(dtype: torch.dtype) -> MakeLinear:
    """In one oneDNN call with its activation, the weight laid out beforehand; plainly where that cannot be."""

    def make(weight: Tensor, bias: Tensor | None, activation: str) -> Map:
        linear = nn.Linear(1, 1, bias=bias is not None)
        linear.weight = nn.Parameter(weight.detach().to(dtype), requires_grad=False)
        if bias is not None:
            linear.bias = nn.Parameter(bias.detach().to(dtype), requires_grad=False)
        if can_pack(dtype) and activation in FUSED:
            return Packed(linear, activation)
        return linear if activation == "none" else nn.Sequential(linear, ACTIVATIONS[activation]())

    return make
