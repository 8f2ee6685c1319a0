"""Quantized linear layers: packing and quantization of weights, and calls of int8.c (VNNI, AVX2 or NEON).

Weights have one scale per output, activations one per token. Sums of int8 products are exact, so the result of a token
does not depend on the number of tokens. `PackedLinear` also holds bf16 and fp32 weights, for decode_step.c.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from allmask.kernels import build
from allmask.kernels.build import int64s, pointer, pointers, structure
from allmask.kernels.packed_attention import library as attention_library

SOURCE = Path(__file__).with_suffix(".c")
KIND = {torch.uint8: 0, torch.bfloat16: 1, torch.float32: 2}  # as in products.h
FORMATS = ("unsigned", "limited", "signed")  # of int8 weights, as in products.h
ACTIVATION = {"none": 0, "relu": 1, "gelu": 2, "gelu_tanh": 3}
OUTPUTS = 64  # per block of packed weights
LANES = 16  # numbers per vector; the inputs of a layer must be a multiple
KEYS = 64  # the length of prompts is padded to a multiple, as decode_step.c requires
MIN_ROWS = 64  # per thread
MANY_ROWS = 1024  # of a weight
MAX_THREADS = 256  # as in threads.h
EXACT_INPUTS = 1024  # 127 · 127 · 1024 < 2^24: fp32 holds any sum of so many products


def library() -> Any:
    """The compiled int8.c; None if it cannot be compiled."""
    return build.library(
        SOURCE, build.AVX512_VNNI, build.AVX_VNNI, build.AVX2, build.NEON_I8MM, build.NEON_DOT, build.NEON
    )


# ---- quantization ------------------------------------------------------------------------------------------------


def quantize(x: Tensor) -> tuple[Tensor, Tensor]:
    """Quantize rows (…, N) symmetrically to int8, -127 to 127, with a scale (…, 1) per row."""
    scale = x.abs().amax(-1, keepdim=True).float() / 127.0
    return (x / scale.clamp(min=1e-30)).round().to(torch.int8), scale


def quantize_weight(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Quantize a weight (out, in) to int8 for the instructions of this processor, with a scale (out, 1) per output."""
    packable = not weight.shape[1] % LANES  # otherwise torch computes it
    return limited(weight) if packable and weight_format() == "limited" else quantize(weight)


def weight_format() -> str:
    """The format of packed int8 weights on this processor."""
    return FORMATS[0 if library() is None else library().weight_format()]


def limited(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Quantize a weight (out, in) so that AVX2's sums in 16 bits cannot overflow, with a scale (out, 1) per output.

    It adds the products of four weights with unsigned bytes, for inputs 0, 1, 4, 5 and 2, 3, 6, 7 of each eight. So
    the positive ones of these four may add up to 128, as 255 · 128 < 2^15, and so may the negative ones. The scale
    makes the largest such sum 126; rounding adds at most 2. Weights then have 6 to 8 bits, typically 7.
    """
    rows = weight.detach().float()
    eights = rows.clamp(min=0).view(len(rows), -1, 8), rows.clamp(max=0).neg_().view(len(rows), -1, 8)
    fours = [x[..., i] + x[..., i + 1] + x[..., i + 4] + x[..., i + 5] for x in eights for i in (0, 2)]
    scale = torch.stack([x.amax(1) for x in fours]).amax(0)[:, None] / 126.0
    return (rows / scale.clamp(min=1e-30)).round_().to(torch.int8), scale


def product(rows: Tensor, weight: Tensor) -> Tensor:
    """Return rows (R, in) times weight (out, in), both int8, as exact int32 sums (R, out), by torch."""
    if _int_mm_is_exact():
        return torch.ops.aten._int_mm(rows, weight.T)
    pairs = zip(rows.split(EXACT_INPUTS, 1), weight.split(EXACT_INPUTS, 1), strict=True)
    return torch.stack([(a.float() @ b.float().T).int() for a, b in pairs]).sum(0, dtype=torch.int32)


@cache
def _int_mm_is_exact() -> bool:
    """Whether torch multiplies int8 exactly: without VNNI, oneDNN adds two products in 16 bits, which saturate."""
    largest = torch.full((32, 32), 127, dtype=torch.int8)
    return bool((torch.ops.aten._int_mm(largest, -largest) == -32 * 127 * 127).all())


def smoothing_scale(norm: Any, weight: Tensor) -> Tensor | None:
    """Return the SmoothQuant scale (in,) between a norm and the weight (out, in) after it; None without a norm.

    The scale multiplies the columns of the weight and divides the output of the norm, so that neither has outlier
    channels, which would cost the other channels precision. As in arXiv 2211.10438, but computed from the parameters of
    the norm instead of calibration data, and from the mean size of a column's weights instead of the largest of them.
    For MiniLM that saves a fifth of the error.
    """
    if not isinstance(norm, nn.LayerNorm | nn.RMSNorm) or norm.weight is None:
        return None
    bias = getattr(norm, "bias", None)
    activation = 3.0 * norm.weight.detach().float().abs() + (0.0 if bias is None else bias.detach().float().abs())
    columns = _mean_sizes(weight.detach().float())
    activation, columns = (x.clamp(min=1e-3 * x.max().item() + 1e-30) for x in (activation, columns))
    return (activation / columns).sqrt()


def _mean_sizes(weight: Tensor) -> Tensor:
    """weight.abs().mean(0); of very many rows, a vocabulary, some at a time: a second matrix of its size is slow."""
    if len(weight) <= MANY_ROWS:
        return weight.abs().mean(0)
    return torch.stack([part.abs().sum(0) for part in weight.split(MANY_ROWS)]).sum(0) / len(weight)


def smooth(weight: Tensor, smoothing: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Return the weight times the smoothing scale, and the factor (in,) for its inputs."""
    return (weight, None) if smoothing is None else (weight.detach().float() * smoothing, 1.0 / smoothing)


# ---- packed weights ----------------------------------------------------------------------------------------------

Linear = structure(**pointers("weight offset scale bias input_scale"), **int64s("inputs outputs kind"))
Norm = structure(**pointers("weight bias"))
Residual = structure(norm=Norm, epsilon=ctypes.c_double, **int64s("pre"))
FeedForward = structure(expand=Linear, contract=Linear, **int64s("activation"))
EncoderLayer = structure(qkv=Linear, output=Linear, feed=FeedForward, attention_step=Residual, feed_step=Residual)
Encoder = structure(**pointers("layers attend"), **int64s("depth heads head_width kind threads"))
Prompts = structure(**pointers("keys values last text"), **int64s("texts padded"))


def pack(weight: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Pack a weight (out, in) for products.h: 16 outputs after another, each input by input; `out` is padded to 64.

    For int8 (`dtype` is uint8), also return an offset and a scale per output.
    """
    outputs, inputs = weight.shape
    rows = F.pad(weight.detach().float(), (0, 0, 0, -outputs % OUTPUTS))
    if dtype != torch.uint8:
        return rows.to(dtype).view(-1, OUTPUTS // LANES, LANES, inputs).transpose(2, 3).contiguous(), None, None
    quantized, scale = quantize_weight(rows)
    return *pack_int8(quantized, weight_format()), scale[:, 0].contiguous()


def pack_int8(quantized: Tensor, format: str) -> tuple[Tensor, Tensor | None]:
    """Pack int8 weights (out, in), where `out` is a multiple of 64, and return them with an offset per output.

    Blocks interleave 4 inputs of 16 outputs. On x86 one operand of the products is unsigned: the weights, to which 128
    is added, or the inputs ("limited"), whose added 128 the offset takes away again.
    """
    blocks = quantized.view(-1, 4, LANES, quantized.shape[1] // 4, 4).permute(0, 3, 1, 2, 4).contiguous()
    if format == "unsigned":
        return blocks.view(torch.uint8) ^ 128, None
    return blocks.view(torch.uint8), -128 * quantized.sum(1, dtype=torch.int32) if format == "limited" else None


def _packed_in_c(weight: Tensor, smoothing: Tensor | None) -> tuple[Tensor, Tensor | None, Tensor] | None:
    """What `pack` returns for int8 and the smoothed weight, in one pass in C; None if C cannot."""
    if library() is None:
        return None
    (outputs, inputs), weight = weight.shape, weight.detach().float().contiguous()
    blocks = -(-outputs // OUTPUTS)
    packed = torch.empty(blocks, inputs // 4, 4, LANES, 4, dtype=torch.uint8)
    scale = torch.empty(blocks * OUTPUTS)
    offset = torch.empty(len(scale), dtype=torch.int32) if weight_format() == "limited" else None
    sizes = ctypes.c_int64(outputs), ctypes.c_int64(inputs)
    smoothing = None if smoothing is None else smoothing.contiguous()
    done = library().pack_weight(*sizes, *map(pointer, (weight, smoothing, packed, scale, offset)))
    return (packed, offset, scale) if done else None


class PackedLinear(NamedTuple):
    """A linear layer in the layout of products.h."""

    weight: Tensor
    offset: Tensor | None
    scale: Tensor | None
    bias: Tensor | None
    input_scale: Tensor | None  # see `smooth`
    inputs: int
    outputs: int

    @classmethod
    def of(
        cls, weight: Tensor, bias: Tensor | None, dtype: torch.dtype = torch.uint8, smoothing: Tensor | None = None
    ) -> PackedLinear:
        outputs, inputs = weight.shape
        bias = None if bias is None else bias.detach().float().clone()
        packed = _packed_in_c(weight, smoothing) if dtype == torch.uint8 and not inputs % LANES else None
        if packed is not None:
            return cls(*packed, bias, None if smoothing is None else 1.0 / smoothing, inputs, outputs)
        weight, input_scale = smooth(weight, smoothing)
        return cls(*pack(weight, dtype), bias, input_scale, inputs, outputs)

    def part(self, start: int, stop: int) -> PackedLinear | None:
        """The layer with these outputs only, sharing their memory; None if they do not begin and end with a block."""
        if start % OUTPUTS or stop % OUTPUTS:
            return None
        offset, scale, bias = (None if x is None else x[start:stop] for x in (self.offset, self.scale, self.bias))
        weight = self.weight[start // OUTPUTS : stop // OUTPUTS]
        return PackedLinear(weight, offset, scale, bias, self.input_scale, self.inputs, stop - start)

    @property
    def structure(self) -> ctypes.Structure:
        """The C struct, valid as long as this object lives."""
        tensors = map(pointer, (self.weight, self.offset, self.scale, self.bias, self.input_scale))
        return Linear(*tensors, self.inputs, self.outputs, KIND[self.weight.dtype])


def norm_structure(norm: nn.Module | None) -> ctypes.Structure:
    """The parameters of an fp32 layer or RMS norm, valid as long as it lives; NULL for any other module."""
    return Norm(pointer(getattr(norm, "weight", None)), pointer(getattr(norm, "bias", None)))


def residual_structure(norm: Any, pre: bool) -> ctypes.Structure:
    """A residual step whose norm is applied before (`pre`) or after it."""
    return Residual(norm_structure(norm), norm.eps or torch.finfo(torch.float32).eps, pre)


# ---- calls -------------------------------------------------------------------------------------------------------


def linear(packed: PackedLinear, x: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Apply an int8 layer to x (…, in); the result (…, out) is fp32 or bf16."""
    x, y = _contiguous(x), torch.empty(*x.shape[:-1], packed.outputs, dtype=dtype)
    layer = packed.structure

    def run(rows: int, x: Tensor, y: Tensor) -> int:
        return library().apply_linear(ctypes.byref(layer), None, rows, *_typed(x), None, *_typed(y))

    _on_threads(run, x, y)
    return y


def residual_linear(packed: PackedLinear, residual: ctypes.Structure, h: Tensor, x: Tensor) -> Tensor:
    """x + linear(h) in fp32, then the norm if it comes after: the end of an attention step."""
    h, x = _contiguous(h), x.float().contiguous()
    y, layer = torch.empty_like(x), packed.structure

    def run(rows: int, h: Tensor, x: Tensor, y: Tensor) -> int:
        arguments = *_typed(h), pointer(x), *_typed(y)
        return library().apply_linear(ctypes.byref(layer), ctypes.byref(residual), rows, *arguments)

    _on_threads(run, h, x, y)
    return y


def normalize(residual: ctypes.Structure, x: Tensor) -> Tensor:
    """The norm of a residual step in fp32, with the same bits as inside the other calls."""
    x = x.float().contiguous()
    y, width = torch.empty_like(x), ctypes.c_int64(x.shape[-1])

    def run(rows: int, x: Tensor, y: Tensor) -> int:
        return library().normalize_rows(ctypes.byref(residual), rows, width, pointer(x), pointer(y))

    _on_threads(run, x, y)
    return y


def feed_forward(
    expand: PackedLinear, contract: PackedLinear, activation: str, x: Tensor, residual: ctypes.Structure | None = None
) -> Tensor:
    """contract(activation(expand(x))) in fp32; with a `residual`, also its norm and the addition of x."""
    x = x.float().contiguous()
    y = torch.empty_like(x)
    layers = FeedForward(expand.structure, contract.structure, ACTIVATION[activation])
    around = None if residual is None else ctypes.byref(residual)

    def run(rows: int, x: Tensor, y: Tensor) -> int:
        return library().feed_forward(ctypes.byref(layers), around, rows, pointer(x), pointer(y))

    _on_threads(run, x, y)
    return y


def encode(
    layers: ctypes.Array, heads: int, dtype: torch.dtype, x: Tensor, documents: np.ndarray, texts: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute all layers of an encoder, an array of `EncoderLayer`, for documents one after another, (N, W).

    `documents` are those of packed_attention.py, which computes attention in `dtype`. Return the hidden states (N, W).
    If the documents are the prompts `texts` (S,), a permutation, return only the hidden states (S, W) of their last
    tokens, but also the keys (L, S, H, D, K) of all tokens, in bf16 and padded to a multiple of 64, and their values
    (L, S, H, K, D).
    """
    x, width = x.float().clone(memory_format=torch.contiguous_format), layers[0].output.inputs // heads
    attend = ctypes.cast(attention_library(dtype).attend_documents, ctypes.c_void_p)
    pointers = ctypes.addressof(layers), attend
    encoder = Encoder(*pointers, len(layers), heads, width, KIND[dtype], min(_threads(len(x)), MAX_THREADS))
    count, keys, values = len(documents), torch.empty(0), torch.empty(0)
    hidden, prompts = x, None
    if texts is not None:
        padded = -(-int(documents[:, 1].max()) // KEYS) * KEYS
        keys = torch.zeros(len(layers), count, heads, width, padded, dtype=torch.bfloat16)
        values, hidden = torch.zeros_like(keys).view(*keys.shape[:3], padded, width), torch.empty(count, x.shape[1])
        prompts = ctypes.byref(Prompts(*map(pointer, (keys, values, hidden, texts)), count, padded))
    where = ctypes.c_void_p(documents.ctypes.data)
    if not library().encode(ctypes.byref(encoder), where, ctypes.c_int64(count), pointer(x), prompts):
        raise MemoryError("no memory for the layers of an encoder")
    return hidden if texts is None else torch.empty_like(hidden).index_copy_(0, texts, hidden), keys, values


def _contiguous(x: Tensor) -> Tensor:
    return x.to(x.dtype if x.dtype in KIND else torch.float32).contiguous()


def _typed(x: Tensor) -> tuple[ctypes.c_void_p, ctypes.c_int64]:
    return pointer(x), ctypes.c_int64(KIND[x.dtype])


def _threads(rows: int) -> int:
    """Return how many threads to use for so many rows: to start one costs as much as a few dozen rows."""
    return max(1, min(torch.get_num_threads(), math.ceil(rows / MIN_ROWS)))


def _on_threads(run: Callable[..., int], *tensors: Tensor) -> None:
    """Split the rows of all tensors (…, N) between threads, at most as many as torch has."""
    flat = [x.view(-1, x.shape[-1]) for x in tensors]
    threads = _threads(len(flat[0]))
    parts = list(zip(*(x.tensor_split(threads) for x in flat), strict=True))

    def run_part(rows: tuple[Tensor, ...]) -> int:
        return run(ctypes.c_int64(len(rows[0])), *rows)

    if not all(map(run_part, parts) if threads == 1 else _pool(threads).map(run_part, parts)):
        raise MemoryError("no memory for an int8 layer")


@cache
def _pool(threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(threads)
