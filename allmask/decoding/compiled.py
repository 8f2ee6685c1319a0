"""The compiled step: step.c, built once with the system's compiler, for processors with AVX-512 VNNI.

It is optional. Without a compiler or such a processor, or should its answers ever differ from torch's, the torch engine
takes its place; nothing else changes.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from allmask import native
from allmask.config import Config
from allmask.decoding.parts import LayerParts, Parts, quantise
from allmask.decoding.rows import Rows
from allmask.model import Model

SOURCE = Path(__file__).with_name("step.c")
INSTRUCTIONS = ("avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512vnni", "fma")
ACTIVATION = {"relu": 1, "gelu": 2, "gelu_tanh": 3}
KIND = {torch.int8: 0, torch.bfloat16: 1, torch.float32: 2}
OUTPUTS = 64  # of a block of weights
SHARE = 64  # rows, at least, for each thread that reads a text


def fits(model: Model) -> bool:
    """Whether the compiled step can take this model here."""
    config = model.config
    sizes = (config.width // config.heads, config.inner)
    on_cpu = model.body.embedding.tokens.weight.device.type == "cpu"
    return on_cpu and config.norm in ("layer", "rms") and not any(size % 16 for size in sizes) and library() is not None


def library() -> Any:
    """The compiled code, built if need be; None where it cannot be had."""
    return native.library(SOURCE, INSTRUCTIONS)


# ---- the structures of step.c ----------------------------------------------------------------------------------


def _structure(**fields: Any) -> type[ctypes.Structure]:
    return type("Structure", (ctypes.Structure,), {"_fields_": list(fields.items())})


def _pointers(names: str) -> dict[str, Any]:
    return dict.fromkeys(names.split(), ctypes.c_void_p)


def _numbers(names: str) -> dict[str, Any]:
    return dict.fromkeys(names.split(), ctypes.c_int64)


_Linear = _structure(**_pointers("weight scale bias"), **_numbers("inputs outputs kind"))
_Norm = _structure(**_pointers("weight bias"))
_Layer = _structure(qkv=_Linear, output=_Linear, expand=_Linear, contract=_Linear, attention=_Norm, feed=_Norm)
_Network = _structure(
    **_numbers("depth width heads inner pre activation"),
    epsilon=ctypes.c_double, head_epsilon=ctypes.c_double,
    layers=ctypes.c_void_p, last=_Norm, transform=_Linear, head_norm=_Norm, head=_Linear,
)  # fmt: skip
_Memory = _structure(
    **_pointers("keys values lengths owner path own"), **_numbers("kind texts padded rows slots room time")
)


def pack(weight: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
    """A weight (out, in) as step.c reads it: in blocks of 64 outputs, those of an input side by side.

    Bytes also have a scale for each output. They stand by four inputs, sixteen outputs, and are 128 too high, because
    the instruction takes one side without a sign.
    """
    outputs, inputs = weight.shape
    rows = F.pad(weight.detach().float(), (0, 0, 0, -outputs % OUTPUTS))
    if dtype != torch.int8:
        return rows.to(dtype).view(-1, OUTPUTS, inputs).transpose(1, 2).contiguous(), None
    whole, scale = quantise(rows)
    blocks = whole.view(-1, 4, 16, inputs // 4, 4).permute(0, 3, 1, 2, 4)
    return (blocks.to(torch.int16) + 128).to(torch.uint8).contiguous(), scale[:, 0].contiguous()


class CompiledEngine:
    """A step in one call."""

    dtype = torch.float32

    def __init__(self, model: Model, weights: torch.dtype):
        self.weights = weights
        self.text_dtype = torch.float32 if weights == torch.float32 else torch.bfloat16
        self.library: Any = library()
        self.kept: list[Tensor] = []  # tensors that the structures point to
        parts = Parts.of(model, lambda weight, bias, _: self._linear(weight, bias), torch.float32)
        self.network = self._network(parts, model.config)
        self.vocabulary = model.config.vocabulary

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

    def feed(self, layer: int, hidden: Tensor) -> Tensor:
        """One layer's feed-forward of hidden states (…, W), on as many threads as torch has."""
        flat = hidden.flatten(0, -2).float().contiguous()  # a copy if it was not fp32
        flat = flat.clone() if flat.data_ptr() == hidden.data_ptr() else flat

        def run(rows: Tensor) -> int:
            pointer = ctypes.c_void_p(rows.data_ptr())
            return self.library.feed(ctypes.byref(self.network), *map(ctypes.c_int64, (layer, len(rows))), pointer)

        shares = flat.tensor_split(min(torch.get_num_threads(), math.ceil(len(flat) / SHARE)))
        if not all(map(run, shares) if len(shares) == 1 else _threads().map(run, shares)):
            raise MemoryError("no memory to read a text")
        return flat.view(hidden.shape).to(hidden.dtype)

    def _run(self, function: Callable[..., int], what: Any, x: Tensor, logits: Tensor) -> None:
        """Both overwrite x."""
        pointers = ctypes.c_void_p(x.data_ptr()), ctypes.c_void_p(logits.data_ptr())
        if not function(ctypes.byref(self.network), what, *pointers):
            raise MemoryError("no memory for a decoding step")

    def _network(self, parts: Parts, config: Config) -> ctypes.Structure:
        layers = (_Layer * len(parts.layers))(*(self._layer(layer) for layer in parts.layers))
        self.layers = layers
        return _Network(
            len(parts.layers), config.width, config.heads, config.inner, config.norm_place == "pre",
            ACTIVATION[config.activation], config.epsilon, getattr(parts.head_norm, "eps", 0.0),
            ctypes.cast(layers, ctypes.c_void_p), self._norm(parts.last),
            parts.transform or _Linear(), self._norm(parts.head_norm), parts.head,
        )  # fmt: skip

    def _layer(self, part: LayerParts) -> ctypes.Structure:
        return _Layer(part.qkv, part.output, part.expand, part.contract, *map(self._norm, part.norms))

    def _linear(self, weight: Tensor, bias: Tensor | None) -> Any:
        outputs, inputs = weight.shape
        tensors = [*pack(weight, self.weights), None if bias is None else bias.float()]
        return _Linear(*self._pointers(tensors), inputs, outputs, KIND[self.weights])

    def _norm(self, norm: nn.Module) -> ctypes.Structure:
        return _Norm(*self._pointers([getattr(norm, "weight", None), getattr(norm, "bias", None)]))

    def _pointers(self, tensors: Sequence[Tensor | None]) -> list[int | None]:
        solid = [None if x is None else x.detach().contiguous() for x in tensors]
        self.kept += [x for x in solid if x is not None]
        return [None if x is None else x.data_ptr() for x in solid]


class ByteFeedForward(nn.Module):
    """The feed-forward layer of a model that reads texts, by the weights of an engine."""

    def __init__(self, engine: CompiledEngine, layer: int):
        super().__init__()
        self.engine, self.layer = engine, layer

    def forward(self, x: Tensor) -> Tensor:
        return self.engine.feed(self.layer, x)


@cache
def _threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(torch.get_num_threads())


def _memory(rows: Rows) -> tuple[ctypes.Structure, list[Tensor]]:
    """The rows as step.c sees them, and tensors that must live as long."""
    texts, own = rows.texts, rows.own.buffer
    tensors = [texts.keys, texts.values, texts.lengths, rows.fan.owner.int(), rows.path.contiguous(), own]
    kind = KIND[texts.keys.dtype]
    sizes = (kind, texts.keys.shape[1], texts.keys.shape[-1], len(rows.path), own.shape[3], own.shape[2], rows.time)
    return _Memory(*(x.data_ptr() for x in tensors), *sizes), tensors
