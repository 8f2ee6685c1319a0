"""The weights of a decoding step, extracted from a model once: fused projections, norms, the output layer.

For an encoder–decoder these are the decoder's; its encoder reads the source beforehand.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from allmask.inference.frozen import FUSED, Packed, can_pack
from allmask.inference.int8_layers import TorchInt8Linear, input_norms
from allmask.kernels.int8 import smoothing_scale
from allmask.model import Model
from allmask.nn.attention import Attention, Scaled
from allmask.nn.layers import ACTIVATIONS, CrossLayer, GatedFeedForward, Layer
from allmask.nn.relative_attention import RelativePositionBias

Map = Callable[[Tensor], Tensor]
# (weight (out, in), bias, activation after it, norm before it) -> the layer
MakeLinear = Callable[[Tensor, Tensor | None, str, nn.Module | None], Map]


@dataclass(frozen=True)
class CrossParts:
    """Cross-attention of a decoder's layer; keys and values of the source are computed beforehand."""

    query: Map  # with the 1 / sqrt(D) of the scores
    output: Map
    norm: nn.Module


@dataclass(frozen=True)
class LayerParts:
    """The linear layers and norms of a layer."""

    qkv: Map  # queries, with the 1 / sqrt(D) of the scores, keys and values: (…, W) -> (…, 3·H·D)
    output: Map
    cross: CrossParts | None
    expand: Map
    up: Map | None  # of a gated feed-forward: multiplied with what `expand` gives
    contract: Map
    norms: tuple[nn.Module, nn.Module]


@dataclass(frozen=True)
class Parts:
    """A whole model except its embeddings."""

    layers: tuple[LayerParts, ...]
    distance_bias: Tensor | None  # (H, distances), added to scores (T5); the last one is for all larger distances
    last_norm: nn.Module  # after the last layer; may be Identity
    transform: Map | None  # BERT's linear layer before the output
    head_norm: nn.Module
    head: Map

    @classmethod
    def of(cls, model: Model, make: MakeLinear, dtype: torch.dtype) -> Parts:
        """Copy the weights, so that the model may be trained further."""
        kind, stack = model.config.activation, writing_stack(model)
        head: Any = model.head("lm_head")
        weight = model.body.embedding.tokens.weight if head.output is None else head.output.weight
        if isinstance(head.transform, Scaled):  # the factor of the hidden states, moved into the matrix
            weight = weight.detach() * head.transform.factor
        before = head.transform if isinstance(head.transform, nn.Linear) else None
        norms = input_norms(model.body, model.config.norm_place)
        last = stack.norm if model.config.norm_place == "pre" else _plain(stack.layers[-1]).feed_forward_norm
        return cls(
            tuple(_layer_parts(layer, kind, make, dtype, norms) for layer in stack.layers),
            _distance_bias(stack.relative, dtype),
            _copied(stack.norm, dtype),
            None if before is None else make(before.weight, before.bias, kind, last),
            _copied(head.norm, dtype),
            make(weight, head.bias, "none", last if before is None else head.norm),
        )


def writing_stack(model: Model) -> Any:
    """The stack that computes new tokens."""
    return model.body.decoder if model.config.decoder_layers else model.body


def _plain(layer: Any) -> Layer:
    return layer.layer if isinstance(layer, CrossLayer) else layer


def _layer_parts(
    whole: Any, activation: str, make: MakeLinear, dtype: torch.dtype, norms: Mapping[nn.Linear, nn.Module]
) -> LayerParts:
    def plain(linear: nn.Linear, kind: str = "none") -> Map:
        return make(linear.weight, linear.bias, kind, norms.get(linear))

    cross, layer = None, _plain(whole)
    if isinstance(whole, CrossLayer):
        query = make(*_queries(whole.cross), "none", norms[whole.cross.query])
        cross = CrossParts(query, plain(whole.cross.output), _copied(whole.cross_norm, dtype))
    feed: Any = layer.feed_forward
    gated = isinstance(feed, GatedFeedForward)
    return LayerParts(
        make(*_fused(layer.attention), "none", norms[layer.attention.query]), plain(layer.attention.output), cross,
        plain(feed.gate if gated else feed.expand, activation), plain(feed.gated) if gated else None,
        plain(feed.contract), (_copied(layer.attention_norm, dtype), _copied(layer.feed_forward_norm, dtype)),
    )  # fmt: skip


def _distance_bias(relative: nn.Module, dtype: torch.dtype) -> Tensor | None:
    if not isinstance(relative, RelativePositionBias):
        return None
    return relative.table.weight.detach()[relative.bucket].T.to(dtype).contiguous()


def _copied(norm: nn.Module, dtype: torch.dtype) -> nn.Module:
    return copy.deepcopy(norm).to(dtype).requires_grad_(False)


def _queries(attention: Attention) -> tuple[Tensor, Tensor | None]:
    """Weight and bias of the query projection, times the scale of the scores."""
    linear = attention.query
    scale = (linear.weight.shape[0] // attention.heads) ** -0.5
    if isinstance(attention.query_scale, Scaled):
        scale *= attention.query_scale.factor
    return linear.weight.detach().float() * scale, None if linear.bias is None else linear.bias.detach().float() * scale


def _fused(attention: Attention) -> tuple[Tensor, Tensor | None]:
    """Weight and bias of one projection to queries, keys and values."""
    others = (attention.key, attention.value)
    weight, bias = _queries(attention)
    weight = torch.cat([weight, *(x.weight.detach().float() for x in others)])
    return weight, None if bias is None else torch.cat([bias, *(x.bias.detach().float() for x in others)])


# ---- linear layers in torch ----------------------------------------------------------------------------------


def int8_linear(weight: Tensor, bias: Tensor | None, activation: str, norm: nn.Module | None) -> Map:
    """In int8, smoothed against the norm before it."""
    return TorchInt8Linear(weight, bias, activation, smoothing_scale(norm, weight))


def packed_linear(dtype: torch.dtype) -> MakeLinear:
    """With its activation in one oneDNN call and with a packed weight, where torch can; else as usual."""

    def make(weight: Tensor, bias: Tensor | None, activation: str, _: nn.Module | None) -> Map:
        linear = nn.Linear(1, 1, bias=bias is not None)
        linear.weight = nn.Parameter(weight.detach().to(dtype, copy=True), requires_grad=False)
        if bias is not None:
            linear.bias = nn.Parameter(bias.detach().to(dtype, copy=True), requires_grad=False)
        if can_pack(dtype) and activation in FUSED:
            return Packed(linear, activation)
        return linear if activation == "none" else nn.Sequential(linear, ACTIVATIONS[activation]())

    return make
