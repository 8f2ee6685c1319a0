"""The compiled step: step.c, built once with the system's compiler, for processors with AVX-512 VNNI or AVX2.

It is optional. Without a compiler or such a processor, or should its answers ever differ from torch's, the torch engine
takes its place; nothing else changes.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from allmask import native
from allmask.config import Config
from allmask.decoding.parts import Parts
from allmask.decoding.rows import Rows
from allmask.inference.bytes import (
    ACTIVATION,
    INSTRUCTIONS,
    KIND,
    ByteFeedForward,
    Linear,
    Norm,
    PackedLinear,
    norm_structure,
    numbers,
    pointers,
    stretch_of,
    structure,
)
from allmask.inference.pages import side_by_side
from allmask.model import Model

SOURCE = Path(__file__).with_name("step.c")


def fits(model: Model) -> bool:
    """Whether the compiled step can take this model here."""
    config = model.config
    sizes = (config.width, config.attention_width // config.heads, config.inner)
    on_cpu = model.body.embedding.tokens.weight.device.type == "cpu"
    return on_cpu and config.norm in ("layer", "rms") and not any(size % 16 for size in sizes) and library() is not None


def library() -> Any:
    """The compiled code, built if need be; None where it cannot be had."""
    return native.library(SOURCE, *INSTRUCTIONS)


# ---- the structures of step.c ----------------------------------------------------------------------------------


_LINEARS = ("qkv", "output", "ask", "answer", "expand", "gated", "contract")
_NORMS = ("attention", "cross", "feed")
_Layer = structure(**dict.fromkeys(_LINEARS, Linear), **dict.fromkeys(_NORMS, Norm))
_Network = structure(
    **numbers("depth width heads d inner pre activation reach"),
    epsilon=ctypes.c_double, head_epsilon=ctypes.c_double, near=ctypes.c_void_p,
    layers=ctypes.c_void_p, last=Norm, transform=Linear, head_norm=Norm, head=Linear,
)  # fmt: skip
_Memory = structure(
    **pointers("keys values lengths owner path own"), **numbers("kind texts padded rows slots room time")
)


class CompiledEngine:
    """A step in one call."""

    dtype = torch.float32

    def __init__(self, model: Model, weights: torch.dtype):
        """With uint8 as the dtype of the weights they are bytes."""

        weights_read: list[Tensor] = []

        def packed(weight: Tensor, bias: Tensor | None, _: str, norm: nn.Module | None) -> Any:
            stretch = stretch_of(norm, weight) if weights == torch.uint8 else None
            part = PackedLinear.of(weight, bias, weights, stretch)
            weights_read.append(part.weight)
            return part

        self.text_dtype = torch.float32 if weights == torch.float32 else torch.bfloat16
        self.library: Any = library()
        self.parts: Any = Parts.of(model, packed, torch.float32)  # the network points to what they hold
        side_by_side(weights_read)
        self.network = self._network(model.config)
        self.vocabulary = model.config.vocabulary
        self.activation = model.config.activation

    def step(self, x: Tensor, rows: Rows) -> Tensor:
        logits = torch.empty(len(x), self.vocabulary)
        memory, _kept = _memory(rows)
        x = x.contiguous()
        self._run(self.library.step, ctypes.byref(memory), x, logits)
        return logits

    def logits(self, hidden: Tensor) -> Tensor:
        logits = torch.empty(len(hidden), self.vocabulary)
        self._run(self.library.head, ctypes.c_int64(len(hidden)), hidden.clone(), logits)
        return logits

    def _run(self, function: Callable[..., int], what: Any, x: Tensor, logits: Tensor) -> None:
        """Both overwrite x."""
        pointers = ctypes.c_void_p(x.data_ptr()), ctypes.c_void_p(logits.data_ptr())
        if not function(ctypes.byref(self.network), what, *pointers):
            raise MemoryError("no memory for a decoding step")

    def feed_forward(self, layer: int) -> ByteFeedForward:
        """One layer's feed-forward of many rows at once: what a text is read with."""
        part = self.parts.layers[layer]
        return ByteFeedForward(part.expand, part.contract, self.activation)

    def _network(self, config: Config) -> ctypes.Structure:
        parts, near = self.parts, self.parts.near
        self.layers = (_Layer * len(parts.layers))(*map(_layer, parts.layers))
        return _Network(
            len(parts.layers), config.width, config.heads, config.attention_width // config.heads, config.inner,
            config.norm_place == "pre", ACTIVATION[config.activation], 0 if near is None else near.shape[1],
            config.epsilon, getattr(parts.head_norm, "eps", 0.0), None if near is None else near.data_ptr(),
            ctypes.cast(self.layers, ctypes.c_void_p), norm_structure(parts.last), _linear(parts.transform),
            norm_structure(parts.head_norm), _linear(parts.head),
        )  # fmt: skip


def _layer(part: Any) -> ctypes.Structure:
    cross = part.cross
    ask, answer, norm = (None, None, None) if cross is None else (cross.query, cross.output, cross.norm)
    linears = (part.qkv, part.output, ask, answer, part.expand, part.gated, part.contract)
    return _Layer(*map(_linear, linears), *map(norm_structure, (part.norms[0], norm, part.norms[1])))


def _linear(part: PackedLinear | None) -> ctypes.Structure:
    return Linear() if part is None else part.structure


def _memory(rows: Rows) -> tuple[ctypes.Structure, list[Tensor]]:
    """The rows as step.c sees them, and tensors that must live as long."""
    texts, own = rows.texts, rows.own.buffer
    tensors = [texts.keys, texts.values, texts.lengths, rows.fan.owner.int(), rows.path.contiguous(), own]
    kind = KIND[texts.keys.dtype]
    sizes = (kind, texts.keys.shape[1], texts.keys.shape[-1], len(rows.path), own.shape[3], own.shape[2], rows.time)
    return _Memory(*(x.data_ptr() for x in tensors), *sizes), tensors
