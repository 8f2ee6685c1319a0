"""Transformer layers that compute in C, in int8 or fp32: modules that replace the linear layers of a model.

`CompiledLinear`, `CompiledFeedForward`, `CompiledLayer` and `CompiledStack` call kernels/int8.py, with int8 weights
(`quantize_layers`) or with fp32 ones (`pack_stacks`). `TorchInt8Linear` is the specification of int8 in torch, and
replaces them where C is not available.
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from allmask.kernels import build, int8, packed_attention
from allmask.kernels.int8 import PackedLinear, quantize, quantize_weight, smooth, smoothing_scale
from allmask.mask import Mask
from allmask.nn.attention import Attention, PassThrough, Route
from allmask.nn.layers import ACTIVATIONS, CrossLayer, FeedForward, Layer
from allmask.nn.relative_attention import NoPositionBias, RelativePositionBias
from allmask.nn.transformer import Stack

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


class CompiledLinear(nn.Module):
    """A linear layer; its result has the given dtype, fp32 or bf16."""

    def __init__(self, packed: PackedLinear, dtype: torch.dtype = torch.float32):
        super().__init__()
        self.packed, self.dtype = packed, dtype

    def forward(self, x: Tensor) -> Tensor:
        return int8.linear(self.packed, x, self.dtype)


class CompiledFeedForward(nn.Module):
    """Position-wise feed-forward."""

    def __init__(self, expand: PackedLinear, contract: PackedLinear, activation: str):
        super().__init__()
        self.expand, self.contract, self.activation = expand, contract, activation

    def forward(self, x: Tensor) -> Tensor:
        return int8.feed_forward(self.expand, self.contract, self.activation, x).to(x.dtype)


class CompiledLayer(Layer):
    """A layer of two calls besides attention: output projection, residual and norm; feed-forward, residual and norm."""

    def __init__(
        self, layer: Layer, activation: str, norm_place: str, smoothing: Mapping[nn.Module, Tensor | None],
        weights: torch.dtype = torch.uint8,
    ):  # fmt: skip
        norms = (layer.attention_norm, layer.feed_forward_norm)
        super().__init__(layer.attention, layer.feed_forward, norms, norm_place, 0.0)
        feed: Any = layer.feed_forward
        self.output, expand, contract = (
            PackedLinear.of(linear.weight, linear.bias, weights, smoothing.get(linear))
            for linear in (layer.attention.output, feed.expand, feed.contract)
        )
        self.attention.add_module("output", nn.Identity())
        self.feed_forward: Any = CompiledFeedForward(expand, contract, activation)
        self.pre = norm_place == "pre"
        if self.pre:
            self.enter = _normalize

    def feed(self, x: Tensor) -> Tensor:
        feed = self.feed_forward
        residual = int8.residual_structure(self.feed_forward_norm, self.pre)
        return int8.feed_forward(feed.expand, feed.contract, feed.activation, x, residual)

    def _join(self, x: Tensor, step: Tensor) -> Tensor:
        """Add the residual. `step` is the output of attention before its output projection, which is done here."""
        return int8.residual_linear(self.output, int8.residual_structure(self.attention_norm, self.pre), step, x)


def _normalize(norm: nn.Module, x: Tensor) -> Tensor:
    return int8.normalize(int8.residual_structure(norm, pre=True), x)


class CompiledStack:
    """All layers of a stack in one call, for packed rows and masks that the attention kernel supports."""

    def __init__(self, layers: Sequence[CompiledLayer], projections: Sequence[PackedLinear], dtype: torch.dtype):
        self.layers, self.projections, self.dtype = list(layers), list(projections), dtype
        self.heads = layers[0].attention.heads

    def run(self, x: Tensor, route: Route) -> Tensor | None:
        documents = self._documents(x, route)
        if documents is None:
            return None
        return int8.encode(self.structures, self.heads, self.dtype, x.flatten(0, 1), documents)[0].view(x.shape)

    def run_texts(self, x: Tensor, lengths: np.ndarray, causal: bool) -> Tensor:
        ends = lengths.cumsum()
        starts, sources = ends - lengths, np.zeros_like(lengths) if causal else lengths
        documents = np.stack([starts, lengths, sources, starts, lengths], axis=1)
        return int8.encode(self.structures, self.heads, self.dtype, x, documents)[0]

    def takes_texts(self, lengths: np.ndarray) -> bool:
        available = packed_attention.library(self.dtype) is not None and not build.is_traced()
        return available and int(lengths.max()) <= packed_attention.MAX_LENGTH

    def read(self, x: Tensor, route: Route, texts: Tensor) -> tuple[Tensor, Tensor, Tensor] | None:
        documents = self._documents(x, route)
        if documents is None:
            return None
        texts = texts[torch.from_numpy(documents[:, 0])]
        return int8.encode(self.structures, self.heads, self.dtype, x.flatten(0, 1), documents, texts)

    def _documents(self, x: Tensor, route: Route) -> np.ndarray | None:
        """The documents of packed_attention.py, if each is supported and they cover all tokens; else None."""
        if route.keys is not route.queries or x.shape[:2] != route.queries.shape or x.device.type != "cpu":
            return None
        if packed_attention.library(self.dtype) is None or build.is_traced() or not route.is_regular or not x.numel():
            return None
        documents = packed_attention.layout(route.blocks, *x.shape[:2])
        return documents if documents is not None and documents[:, 1].sum() == x[..., 0].numel() else None

    @cached_property
    def structures(self) -> ctypes.Array:
        def structure(layer: CompiledLayer, qkv: PackedLinear) -> ctypes.Structure:
            feed = layer.feed_forward
            parts = feed.expand.structure, feed.contract.structure, int8.ACTIVATION[feed.activation]
            residuals = (int8.residual_structure(x, layer.pre) for x in (layer.attention_norm, layer.feed_forward_norm))
            return int8.EncoderLayer(qkv.structure, layer.output.structure, int8.FeedForward(*parts), *residuals)

        found = map(structure, self.layers, self.projections)
        return (int8.EncoderLayer * len(self.layers))(*found)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "structures"}  # addresses


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
                setattr(parent, name, CompiledLayer(child, activation, norm_place, smoothing))
    projections = {
        module: _project(module, dtype, smoothing)
        for module in body.modules()
        if isinstance(module, Attention) and int8.library() is not None and not module.query.in_features % int8.LANES
    }
    for parent in list(body.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is nn.Linear:
                if int8.library() is None or child.in_features % int8.LANES:
                    quantized = TorchInt8Linear(child.weight, child.bias, smoothing=smoothing.get(child))
                else:
                    quantized = CompiledLinear(
                        PackedLinear.of(child.weight, child.bias, smoothing=smoothing.get(child))
                    )
                setattr(parent, name, quantized)
    for module in body.modules():
        if isinstance(module, RelativePositionBias):
            module.table.to(dtype)  # added to scores of that dtype
        if isinstance(module, Stack) and isinstance(module.relative, NoPositionBias):
            whole = [projections.get(layer.attention) for layer in module.layers if _is_plain(layer)]
            fused = [qkv for qkv in whole if qkv is not None]
            if len(fused) == len(module.layers):
                stack = CompiledStack(module.layers, fused, dtype)
                module.whole = stack if _is_right(stack, 1e-2) else None  # bytes that round otherwise


def pack_stacks(body: nn.Module, activation: str, norm_place: str) -> None:
    """Replace the layers of an fp32 body, in place, where C can compute a whole stack of them: in fp32, in one call.

    It is faster than a call of oneDNN for each linear layer, since hidden states stay in the cache.
    """
    for module in [module for module in body.modules() if isinstance(module, Stack)]:
        layers: Any = list(module.layers)
        plain = all(type(layer) is Layer and _is_supported(layer) and _has_plain_attention(layer) for layer in layers)
        if not layers or not plain or not isinstance(module.relative, NoPositionBias):
            continue
        made: dict[Layer, tuple[CompiledLayer, Any]] = {}
        for layer in dict.fromkeys(layers):  # an ALBERT has the same layer several times
            fast = CompiledLayer(layer, activation, norm_place, {}, torch.float32)
            made[layer] = fast, _project(fast.attention, torch.float32, {}, torch.float32)
        module.layers = nn.ModuleList(made[layer][0] for layer in layers)
        packed, projections = zip(*(made[layer] for layer in layers), strict=True)
        stack = CompiledStack(packed, projections, torch.float32)
        module.whole = stack if _is_right(stack, 1e-4) else None


def _is_right(stack: CompiledStack, tolerance: float) -> bool:
    """Self-check: whether the layers at once give what they give one by one, for two short documents."""
    lengths = torch.tensor([3, 18])
    valid = torch.ones(1, int(lengths.sum()), dtype=torch.bool)
    route = Route.find(Mask.packed(Mask.bidirectional(valid), torch.arange(2).repeat_interleave(lengths)[None]))
    width = stack.layers[0].output.outputs
    x = torch.randn(*valid.shape, width, generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        found, expected = stack.run(x, route), x
        if found is None:  # there is no kernel for attention
            return False
        for layer in stack.layers:
            expected, _ = layer(expected, route)
    if torch.allclose(found, expected, atol=tolerance, rtol=tolerance, equal_nan=True):
        return True
    log.warning("the layers in one call differ from those one by one on this machine; it is not used")
    return False


def _project(
    attention: Attention, dtype: torch.dtype, smoothing: Mapping[nn.Module, Tensor | None],
    weights: torch.dtype = torch.uint8,
) -> PackedLinear | None:  # fmt: skip
    """Pack the projections to queries, keys and values; return them as one layer if they read the same input."""
    linears: Any = {name: getattr(attention, name) for name in ("query", "key", "value")}
    scales, whole = [smoothing.get(linear) for linear in linears.values()], None
    if all(scale is scales[0] for scale in scales):
        weight = torch.cat([linear.weight.detach() for linear in linears.values()])
        bias = None if attention.query.bias is None else torch.cat([linear.bias for linear in linears.values()])
        whole = PackedLinear.of(weight, bias, weights, scales[0])
    start = 0
    for (name, linear), scale in zip(linears.items(), scales, strict=True):
        stop = start + linear.out_features
        part = None if whole is None else whole.part(start, stop)  # shares its memory
        packed = PackedLinear.of(linear.weight, linear.bias, weights, scale) if part is None else part
        setattr(attention, name, CompiledLinear(packed, dtype))
        start = stop
    return whole


def _is_plain(layer: nn.Module) -> bool:
    """Whether `CompiledStack` can compute this layer."""
    return isinstance(layer, CompiledLayer) and _has_plain_attention(layer)


def _has_plain_attention(layer: Any) -> bool:
    """Whether the attention of a layer is scaled, without relative positions, and its heads fill the kernel's lanes."""
    attention = layer.attention
    width = layer.output.inputs if isinstance(layer, CompiledLayer) else attention.output.in_features
    plain = isinstance(attention.relate, PassThrough) and isinstance(attention.query_scale, nn.Identity)
    return plain and not width // attention.heads % packed_attention.LANES


def _is_supported(layer: Layer) -> bool:
    """Whether `CompiledLayer` can replace this layer."""
    norm, feed = layer.attention_norm, layer.feed_forward
    known = isinstance(norm, nn.RMSNorm) or (isinstance(norm, nn.LayerNorm) and norm.bias is not None)
    if int8.library() is None or type(feed) is not FeedForward or not known:
        return False
    linears = (layer.attention.query, layer.attention.output, feed.expand, feed.contract)
    return not any(linear.in_features % int8.LANES for linear in linears)


def smoothing_scales(body: Any, norm_place: str) -> dict[nn.Module, Tensor | None]:
    """Return the smoothing scale of each linear layer that reads the output of a norm.

    If queries, keys and values are projected from the same norm, they share the scale of the values, so that their
    input is quantized once. Errors of values reach the output; those of scores are damped by the softmax. For MiniLM
    cosines to fp32 are as high as with a scale each; with one for all three weights the error is twice as large.
    """
    norms = input_norms(body, norm_place)
    same: dict[nn.Module, nn.Module] = {}  # linear layer -> the one whose scale it has
    for module in body.modules():
        if isinstance(module, Attention):
            readers = [module.query, module.key, module.value]
            if len({norms.get(linear) for linear in readers}) == 1 and module.value in norms:  # not in cross-attention
                same |= dict.fromkeys(readers, module.value)
    scales: dict[nn.Module, Tensor | None] = {
        x: smoothing_scale(norm, x.weight) for x, norm in norms.items() if same.get(x, x) is x
    }
    return {x: scales[same.get(x, x)] for x in norms}


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
