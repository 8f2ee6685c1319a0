"""What a decoding step multiplies by, taken out of a model once: fused projections, norms, the output layer.

Of an encoder–decoder it is the decoder; its encoder reads the source beforehand.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from allmask.attention import Attention, Scaled
from allmask.inference.bytes import Int8Linear, norms_read, stretch_of
from allmask.inference.frozen import FUSED, Packed, can_pack
from allmask.layers import ACTIVATIONS, CrossLayer, GatedFeedForward, Layer, RelativePositions
from allmask.model import Model

Map = Callable[[Tensor], Tensor]
# weight (out, in), bias, the activation after it, the norm before it
MakeLinear = Callable[[Tensor, Tensor | None, str, nn.Module | None], Map]


@dataclass(frozen=True)
class CrossParts:
    """How a decoder's layer reads the source, whose keys and values are there already."""

    query: Map  # already divided by sqrt(D)
    output: Map
    norm: nn.Module


@dataclass(frozen=True)
class LayerParts:
    """A layer's products and norms."""

    qkv: Map  # queries, already divided by sqrt(D), then keys and values: (…, W) -> (…, 3·H·D)
    output: Map
    cross: CrossParts | None
    expand: Map
    gated: Map | None  # what is expanded is multiplied by
    contract: Map
    norms: tuple[nn.Module, nn.Module]


@dataclass(frozen=True)
class Parts:
    """A whole model but for its embeddings."""

    layers: tuple[LayerParts, ...]
    near: (
        Tensor | None
    )  # (H, distances), added to scores by how long ago a token was written; the last is for all beyond
    last: nn.Module  # the norm after the last layer, or nothing
    transform: Map | None  # BERT's extra layer before the output
    head_norm: nn.Module
    head: Map

    @classmethod
    def of(cls, model: Model, make: MakeLinear, dtype: torch.dtype) -> Parts:
        """Copies, so that the model may go on learning."""
        kind, stack = model.config.activation, writing_stack(model)
        head: Any = model.head("lm_head")
        weight = model.body.embedding.tokens.weight if head.output is None else head.output.weight
        if isinstance(head.transform, Scaled):  # hidden states may as well be scaled by the matrix
            weight = weight.detach() * head.transform.factor
        before = head.transform if isinstance(head.transform, nn.Linear) else None
        norms = norms_read(model.body, model.config.norm_place)
        last = stack.norm if model.config.norm_place == "pre" else _plain(stack.layers[-1]).feed_forward_norm
        return cls(
            tuple(_layer_parts(layer, kind, make, dtype, norms) for layer in stack.layers),
            _near(stack.relative, dtype),
            _copied(stack.norm, dtype),
            None if before is None else make(before.weight, before.bias, kind, last),
            _copied(head.norm, dtype),
            make(weight, head.bias, "none", last if before is None else head.norm),
        )


def writing_stack(model: Model) -> Any:
    """The stack that new tokens go through."""
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
        asked = make(*_queries(whole.cross), "none", norms[whole.cross.query])
        cross = CrossParts(asked, plain(whole.cross.output), _copied(whole.cross_norm, dtype))
    feed: Any = layer.feed_forward
    gated = isinstance(feed, GatedFeedForward)
    return LayerParts(
        make(*_fused(layer.attention), "none", norms[layer.attention.query]), plain(layer.attention.output), cross,
        plain(feed.gate if gated else feed.expand, activation), plain(feed.gated) if gated else None,
        plain(feed.contract), (_copied(layer.attention_norm, dtype), _copied(layer.feed_forward_norm, dtype)),
    )  # fmt: skip


def _near(relative: nn.Module, dtype: torch.dtype) -> Tensor | None:
    if not isinstance(relative, RelativePositions):
        return None
    return relative.table.weight.detach()[relative.bucket].T.to(dtype).contiguous()


def _copied(norm: nn.Module, dtype: torch.dtype) -> nn.Module:
    return copy.deepcopy(norm).to(dtype).requires_grad_(False)


def _queries(attention: Attention) -> tuple[Tensor, Tensor | None]:
    """The weight and bias of queries, with the scale of the scores."""
    linear = attention.query
    scale = (linear.weight.shape[0] // attention.heads) ** -0.5
    if isinstance(attention.stretch, Scaled):
        scale *= attention.stretch.factor
    return linear.weight.detach().float() * scale, None if linear.bias is None else linear.bias.detach().float() * scale


def _fused(attention: Attention) -> tuple[Tensor, Tensor | None]:
    """One matrix for queries, keys and values."""
    others = (attention.key, attention.value)
    weight, bias = _queries(attention)
    weight = torch.cat([weight, *(x.weight.detach().float() for x in others)])
    return weight, None if bias is None else torch.cat([bias, *(x.bias.detach().float() for x in others)])


# ---- linear layers in torch ----------------------------------------------------------------------------------


def byte_linear(weight: Tensor, bias: Tensor | None, activation: str, norm: nn.Module | None) -> Map:
    """In whole numbers, evened out by the norm before it."""
    return Int8Linear(weight, bias, activation, stretch_of(norm, weight))


def packed_linear(dtype: torch.dtype) -> MakeLinear:
    """In one oneDNN call with its activation, the weight laid out beforehand; plainly where that cannot be."""

    def make(weight: Tensor, bias: Tensor | None, activation: str, _: nn.Module | None) -> Map:
        linear = nn.Linear(1, 1, bias=bias is not None)
        linear.weight = nn.Parameter(weight.detach().to(dtype, copy=True), requires_grad=False)
        if bias is not None:
            linear.bias = nn.Parameter(bias.detach().to(dtype, copy=True), requires_grad=False)
        if can_pack(dtype) and activation in FUSED:
            return Packed(linear, activation)
        return linear if activation == "none" else nn.Sequential(linear, ACTIVATIONS[activation]())

    return make
