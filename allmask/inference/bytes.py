"""Layers whose weights and activations are bytes: a scale for each output, a scale for each token.

What a norm gives is evened out first, and the weights that read it are stretched the other way: see `stretch_of`.
The products are whole numbers, so no token's result depends on how many there are. `ByteLinear` and `ByteLayer` compute
them in C (encoder.c, with AVX-512 VNNI or AVX2), `Int8Linear` says in torch what they must compute, and takes
their place where C cannot be had.
"""

from __future__ import annotations

import ctypes
import logging
import math
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from allmask import native
from allmask.attention import Attention
from allmask.layers import ACTIVATIONS, CrossLayer, FeedForward, Layer, RelativePositions

log = logging.getLogger("allmask")

SOURCE = Path(__file__).with_name("encoder.c")
INSTRUCTIONS = ((*native.AVX512, "avx512vnni"), native.AVX2)  # either will do
KIND = {torch.uint8: 0, torch.bfloat16: 1, torch.float32: 2}
ACTIVATION = {"none": 0, "relu": 1, "gelu": 2, "gelu_tanh": 3}
OUTPUTS = 64  # of a block of weights
LANES = 16  # numbers that are computed at a time
SHARE = 64  # rows, at least, for each thread
SLOW = "int8: without a C compiler and AVX2 torch computes it, slower than bf16 or fp32"


def library() -> Any:
    """The compiled code, built if need be; None where it cannot be had."""
    return native.library(SOURCE, *INSTRUCTIONS)


# ---- in torch ------------------------------------------------------------------------------------------------


def quantise(x: Tensor) -> tuple[Tensor, Tensor]:
    """Rows (…, N) as bytes from -127 to 127 and the scale (…, 1) of each."""
    scale = x.abs().amax(-1, keepdim=True).float() / 127.0
    return (x / scale.clamp(min=1e-30)).round().to(torch.int8), scale


def stretch_of(norm: Any, weight: Tensor) -> Tensor | None:
    """(in,) by which to multiply the columns of a weight, and divide what a norm gives it: bytes lose least if neither
    has columns much larger than the others (arXiv 2211.10438, with the norm's own numbers in place of examples)."""
    if not isinstance(norm, nn.LayerNorm | nn.RMSNorm) or norm.weight is None:
        return None
    shift = getattr(norm, "bias", None)
    given = 3.0 * norm.weight.detach().float().abs() + (0.0 if shift is None else shift.detach().float().abs())
    taken = weight.detach().float().abs().amax(0)
    given, taken = (x.clamp(min=1e-3 * x.max().item() + 1e-30) for x in (given, taken))
    return (given / taken).sqrt()


def _stretched(weight: Tensor, stretch: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """A weight for inputs that are multiplied by the balance, and the balance."""
    return (weight, None) if stretch is None else (weight.detach().float() * stretch, 1.0 / stretch)


class Int8Linear(nn.Module):
    """A linear layer and the activation after it."""

    def __init__(self, weight: Tensor, bias: Tensor | None, activation: str = "none", stretch: Tensor | None = None):
        super().__init__()
        weight, self.balance = _stretched(weight, stretch)
        self.weight, scale = quantise(weight.detach().float())
        self.scale = scale[:, 0]
        self.bias = torch.zeros_like(self.scale) if bias is None else bias.detach().float().clone()
        self.activation = nn.Identity() if activation == "none" else ACTIVATIONS[activation]()

    def forward(self, x: Tensor) -> Tensor:
        x = x if self.balance is None else x * self.balance
        whole, scale = quantise(x.flatten(0, -2))
        product = torch.ops.aten._int_mm(whole, self.weight.T)
        return self.activation(torch.addcmul(self.bias, product, scale * self.scale)).unflatten(0, x.shape[:-1])


# ---- the structures of products.h and encoder.c ----------------------------------------------------------------


def structure(**fields: Any) -> type[ctypes.Structure]:
    return type("Structure", (ctypes.Structure,), {"_fields_": list(fields.items())})


def pointers(names: str) -> dict[str, Any]:
    return dict.fromkeys(names.split(), ctypes.c_void_p)


def numbers(names: str) -> dict[str, Any]:
    return dict.fromkeys(names.split(), ctypes.c_int64)


Linear = structure(**pointers("weight scale bias balance"), **numbers("inputs outputs kind"))
Norm = structure(**pointers("weight bias"))
Around = structure(norm=Norm, epsilon=ctypes.c_double, **numbers("pre"))
Feed = structure(expand=Linear, contract=Linear, **numbers("activation"))


def pack(weight: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
    """A weight (out, in) as products.h reads it: in blocks of 64 outputs, those of an input side by side.

    Bytes also have a scale for each output. They stand by four inputs, sixteen outputs, and are 128 too high, because
    the instruction takes one side without a sign.
    """
    outputs, inputs = weight.shape
    rows = F.pad(weight.detach().float(), (0, 0, 0, -outputs % OUTPUTS))
    if dtype != torch.uint8:
        return rows.to(dtype).view(-1, OUTPUTS, inputs).transpose(1, 2).contiguous(), None
    whole, scale = quantise(rows)
    blocks = whole.view(-1, 4, LANES, inputs // 4, 4).permute(0, 3, 1, 2, 4)
    return (blocks.to(torch.int16) + 128).to(torch.uint8).contiguous(), scale[:, 0].contiguous()


class PackedLinear(NamedTuple):
    """A linear layer as products.h reads it."""

    weight: Tensor
    scale: Tensor | None
    bias: Tensor | None
    balance: Tensor | None
    inputs: int
    outputs: int

    @classmethod
    def of(
        cls, weight: Tensor, bias: Tensor | None, dtype: torch.dtype = torch.uint8, stretch: Tensor | None = None
    ) -> PackedLinear:
        outputs, inputs = weight.shape
        bias = None if bias is None else bias.detach().float().clone()
        weight, balance = _stretched(weight, stretch)
        return cls(*pack(weight, dtype), bias, balance, inputs, outputs)

    @property
    def structure(self) -> ctypes.Structure:
        """Good as long as this lives."""
        tensors = map(_address, (self.weight, self.scale, self.bias, self.balance))
        return Linear(*tensors, self.inputs, self.outputs, KIND[self.weight.dtype])


def norm_structure(norm: nn.Module | None) -> ctypes.Structure:
    """Of a norm in fp32, good as long as it lives; empty of what is none."""
    return Norm(_address(getattr(norm, "weight", None)), _address(getattr(norm, "bias", None)))


def _address(x: Tensor | None) -> int | None:
    return None if x is None else x.data_ptr()


# ---- in C ------------------------------------------------------------------------------------------------------


class ByteLinear(nn.Module):
    """A linear layer; what it gives has the dtype `gives`."""

    def __init__(self, linear: nn.Linear, gives: torch.dtype = torch.float32, stretch: Tensor | None = None):
        super().__init__()
        self.packed = PackedLinear.of(linear.weight, linear.bias, stretch=stretch)
        self.gives = gives

    def forward(self, x: Tensor) -> Tensor:
        x, y = _solid(x), torch.empty(*x.shape[:-1], self.packed.outputs, dtype=self.gives)
        part = self.packed.structure

        def run(rows: int, x: Tensor, y: Tensor) -> int:
            return library().project(ctypes.byref(part), rows, *_typed(x), *_typed(y))

        _in_shares(run, x, y)
        return y


class ByteFeedForward(nn.Module):
    """A feed-forward layer: expand, activate, contract; and, if told how, the residual and the norm with it."""

    def __init__(self, expand: PackedLinear, contract: PackedLinear, activation: str):
        super().__init__()
        self.expand, self.contract = expand, contract
        self.activation = ACTIVATION[activation]

    def forward(self, x: Tensor, around: ctypes.Structure | None = None) -> Tensor:
        hidden = _solid(x, torch.float32)
        y = torch.empty_like(hidden)
        part = Feed(self.expand.structure, self.contract.structure, self.activation)
        rest = None if around is None else ctypes.byref(around)

        def run(rows: int, x: Tensor, y: Tensor) -> int:
            return library().feed(ctypes.byref(part), rest, rows, *map(_pointer, (x, y)))

        _in_shares(run, hidden, y)
        return y.to(x.dtype)


class ByteLayer(Layer):
    """A layer of two calls beside attention: what attention read joins the hidden states; they are fed forward."""

    def __init__(self, layer: Layer, activation: str, norm_place: str, stretches: Mapping[nn.Module, Tensor | None]):
        norms = (layer.attention_norm, layer.feed_forward_norm)
        super().__init__(layer.attention, layer.feed_forward, norms, norm_place, 0.0)
        feed: Any = layer.feed_forward
        self.output, expand, contract = (
            PackedLinear.of(linear.weight, linear.bias, stretch=stretches.get(linear))
            for linear in (layer.attention.output, feed.expand, feed.contract)
        )
        self.attention.add_module("output", nn.Identity())
        self.feed_forward: Any = ByteFeedForward(expand, contract, activation)
        self.pre = norm_place == "pre"

    def feed(self, x: Tensor) -> Tensor:
        return self.feed_forward(x, self._around(self.feed_forward_norm))

    def _join(self, x: Tensor, step: Tensor) -> Tensor:
        """`step` is what attention read, not yet what its output layer makes of it."""
        mixed, x, y = _solid(step), _solid(x, torch.float32), torch.empty_like(x, memory_format=torch.contiguous_format)
        part, around = self.output.structure, self._around(self.attention_norm)

        def run(rows: int, mixed: Tensor, x: Tensor, y: Tensor) -> int:
            what = ctypes.byref(part), ctypes.byref(around), rows
            return library().join(*what, *_typed(mixed), *map(_pointer, (x, y)))

        _in_shares(run, mixed, x, y)
        return y

    def _around(self, norm: Any) -> ctypes.Structure:
        return Around(norm_structure(norm), norm.eps or torch.finfo(torch.float32).eps, self.pre)


def _solid(x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    known = x.dtype if x.dtype in KIND else torch.float32
    return x.to(dtype or known).contiguous()


def _pointer(x: Tensor) -> ctypes.c_void_p:
    return ctypes.c_void_p(x.data_ptr())


def _typed(x: Tensor) -> tuple[ctypes.c_void_p, ctypes.c_int64]:
    return _pointer(x), ctypes.c_int64(KIND[x.dtype])


def _in_shares(run: Callable[..., int], *tensors: Tensor) -> None:
    """Call with some of the rows of all tensors (…, N), on as many threads as torch has."""
    flat = [x.view(-1, x.shape[-1]) for x in tensors]
    threads = max(1, min(torch.get_num_threads(), math.ceil(len(flat[0]) / SHARE)))
    shares = list(zip(*(x.tensor_split(threads) for x in flat), strict=True))

    def share(rows: tuple[Tensor, ...]) -> int:
        return run(ctypes.c_int64(len(rows[0])), *rows)

    if not all(map(share, shares) if threads == 1 else _threads(threads).map(share, shares)):
        raise MemoryError("no memory for the rows of a text")


@cache
def _threads(number: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(number)


# ---- a whole body ----------------------------------------------------------------------------------------------


def install(body: nn.Module, activation: str, norm_place: str, between: torch.dtype) -> None:
    """All linear layers of a body in fp32 become bytes; queries, keys and values have the dtype `between`."""
    if not available():
        between = torch.float32
    stretches = _stretches(body, norm_place)
    for parent in list(body.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, Layer) and _is_plain(child):
                setattr(parent, name, ByteLayer(child, activation, norm_place, stretches))
    for parent in list(body.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is nn.Linear:
                is_read = isinstance(parent, Attention) and name != "output"
                setattr(parent, name, _linear(child, between if is_read else torch.float32, stretches.get(child)))
    for module in body.modules():
        if isinstance(module, RelativePositions):
            module.table.to(between)  # added to scores of that dtype


def _stretches(body: Any, norm_place: str) -> dict[nn.Module, Tensor | None]:
    return {linear: stretch_of(norm, linear.weight) for linear, norm in norms_read(body, norm_place).items()}


def norms_read(body: Any, norm_place: str) -> dict[nn.Linear, nn.Module]:
    """For each linear layer that reads hidden states, of one stack or of two, the norm that gave them."""
    stacks, given = ([body.encoder, body.decoder] if hasattr(body, "decoder") else [body]), nn.Identity()
    found = {}
    for stack in stacks:
        before = body.embedding.norm
        for layer in stack.layers:
            steps = _steps(layer, before, given, norm_place == "pre")
            found |= {linear: norm for norm, linears in steps for linear in linears}
            before = getattr(layer, "layer", layer).feed_forward_norm
        given = stack.norm if norm_place == "pre" else before  # what a decoder reads of its source
    return found


def _steps(layer: Any, before: nn.Module, given: nn.Module, pre: bool) -> list[tuple[nn.Module, list[nn.Linear]]]:
    """A layer's norms, each with the linear layers that read what it gives."""
    cross, layer = (layer, layer.layer) if isinstance(layer, CrossLayer) else (None, layer)
    steps = [(layer.attention_norm, [layer.attention.query, layer.attention.key, layer.attention.value])]
    if cross is not None:
        steps.append((cross.cross_norm, [cross.cross.query]))
    inward = [child for name, child in layer.feed_forward.named_children() if name != "contract"]
    steps.append((layer.feed_forward_norm, [linear for linear in inward if isinstance(linear, nn.Linear)]))
    if not pre:  # a step reads what the norm of the one before it left
        norms = [before, *(norm for norm, _ in steps[:-1])]
        steps = [(norm, linears) for norm, (_, linears) in zip(norms, steps, strict=True)]
    return steps if cross is None else [*steps, (given, [cross.cross.key, cross.cross.value])]


def available() -> bool:
    """Whether C computes with bytes here; if not, that is said."""
    if library() is None:
        log.warning(SLOW)
    return library() is not None


def _is_plain(layer: Layer) -> bool:
    """Whether encoder.c knows all of it."""
    norm, feed = layer.attention_norm, layer.feed_forward
    known = isinstance(norm, nn.RMSNorm) or (isinstance(norm, nn.LayerNorm) and norm.bias is not None)
    if library() is None or type(feed) is not FeedForward or not known:
        return False
    inputs = (layer.attention.query, layer.attention.output, feed.expand, feed.contract)
    return not any(linear.in_features % LANES for linear in inputs)


def _linear(linear: nn.Linear, gives: torch.dtype, stretch: Tensor | None) -> nn.Module:
    if library() is None or linear.in_features % LANES:
        return Int8Linear(linear.weight, linear.bias, stretch=stretch)
    return ByteLinear(linear, gives, stretch)
