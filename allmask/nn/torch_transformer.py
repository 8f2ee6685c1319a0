"""Drop-in replacements of `torch.nn.Transformer` and its parts, built from the layers of this package.

    TransformerEncoderLayer, TransformerDecoderLayer     one layer
    TransformerEncoder, TransformerDecoder               (layer, num_layers, norm)
    Transformer                                          both stacks

Arguments, layouts, masks and results are the same; `load_state_dict` accepts torch's names, and `torch_state_dict`
returns them. A row whose keys are all blocked gets zeros from attention and finite gradients. One difference is
intended: padding of the source is computed in inference as in training. torch's fast path sets it to zero, so that its
decoder reads one memory in training and another in inference, unless it also gets `memory_key_padding_mask`.

A mask may also be a `Mask`. Masks in torch's polarity (True = blocked, or an additive bias) are converted once, by
`_route_and_bias`.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from copy import deepcopy
from dataclasses import asdict, dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from allmask.errors import UsageError
from allmask.mask import Mask
from allmask.nn.attention import Attention, Route
from allmask.nn.init import xavier_uniform
from allmask.nn.layers import ACTIVATIONS, CrossLayer, FeedForward, Layer

Activation = str | Callable[[Tensor], Tensor]

AnyMask = Tensor | Mask

# torch's names within a layer, and ours; the first matching prefix is used, after the packed query, key and value have
# been split
ENCODER_NAMES = (
    ("self_attn.out_proj.", "layer.attention.output."),
    ("self_attn.", "layer.attention."),
    ("linear1.", "layer.feed_forward.expand."),
    ("activation.", "layer.feed_forward.activation."),
    ("linear2.", "layer.feed_forward.contract."),
    ("norm1.", "layer.attention_norm."),
    ("norm2.", "layer.feed_forward_norm."),
)
DECODER_NAMES = (
    ("self_attn.out_proj.", "layer.layer.attention.output."),
    ("self_attn.", "layer.layer.attention."),
    ("multihead_attn.out_proj.", "layer.cross.output."),
    ("multihead_attn.", "layer.cross."),
    ("linear1.", "layer.layer.feed_forward.expand."),
    ("activation.", "layer.layer.feed_forward.activation."),
    ("linear2.", "layer.layer.feed_forward.contract."),
    ("norm1.", "layer.layer.attention_norm."),
    ("norm2.", "layer.cross_norm."),
    ("norm3.", "layer.layer.feed_forward_norm."),
)


@dataclass(frozen=True)
class Shape:
    """The settings of a layer, under torch's names, and the parts built from them."""

    d_model: int
    nhead: int
    dim_feedforward: int
    dropout: float
    activation: Activation
    layer_norm_eps: float
    norm_first: bool
    bias: bool

    def __post_init__(self):
        if self.nhead < 1 or self.d_model % self.nhead:
            raise UsageError(f"d_model {self.d_model} is not a multiple of nhead {self.nhead}")

    def norm(self) -> nn.Module:
        return nn.LayerNorm(self.d_model, eps=self.layer_norm_eps, bias=self.bias)

    def attention(self) -> Attention:
        return Attention(self.d_model, self.nhead, self.dropout, self.bias)

    def layer(self) -> Layer:
        activation = _activation(self.activation)
        feed_forward = FeedForward(self.d_model, self.dim_feedforward, activation, self.dropout, self.bias)
        norm_place = "pre" if self.norm_first else "post"
        return Layer(self.attention(), feed_forward, (self.norm(), self.norm()), norm_place, self.dropout)


# ---- layers --------------------------------------------------------------------------------------------------------


class TorchModule(nn.Module):
    """What the classes of this file share: torch's layouts, and torch's names of the weights."""

    d_model: int
    batch_first: bool

    def rows_first(self, name: str, x: Tensor) -> Tensor:
        """(B, T, W) of an input in one of torch's layouts."""
        if x.ndim not in (2, 3) or x.shape[-1] != self.d_model:
            layout = "(B, T, W)" if self.batch_first else "(T, B, W)"
            expected = f"expected {layout} or (T, W), where W is d_model, {self.d_model}"
            raise UsageError(f"{name} is {tuple(x.shape)}; {expected}")
        if x.ndim == 2:
            return x[None]
        return x if self.batch_first else x.transpose(0, 1)

    def both_rows_first(self, tgt: Tensor, memory: Tensor, source: str = "memory") -> tuple[Tensor, Tensor]:
        x, read = self.rows_first("tgt", tgt), self.rows_first(source, memory)
        if tgt.ndim != memory.ndim:
            shapes = f"{source} is {tuple(memory.shape)} and tgt {tuple(tgt.shape)}"
            raise UsageError(f"{shapes}; both must have 3 dimensions, or both 2")
        if len(x) != len(read):
            layout = "(B, T, W)" if self.batch_first else "(T, B, W)"
            raise UsageError(f"{source} has {len(read)} rows and tgt {len(x)}", f"the layout is {layout}")
        return x, read

    def as_given(self, x: Tensor, like: Tensor) -> Tensor:
        """x (B, T, W) in the layout of the input `like`."""
        if like.ndim == 2:
            return x[0]
        return x if self.batch_first else x.transpose(0, 1)

    def torch_state_dict(self) -> dict[str, Tensor]:
        """Return the weights under torch's names. `load_state_dict` accepts torch's names and ours."""
        state = self.state_dict()
        for path, part in self.named_modules():
            if isinstance(part, TorchLayer):
                prefix = f"{path}." if path else ""
                backwards = tuple((prefix + ours, prefix + theirs) for theirs, ours in part.names)
                state = {_rename(name, backwards): tensor for name, tensor in state.items()}
        return join_qkv(state)


class TorchLayer(TorchModule):
    """A layer with torch's arguments. Its `layer` is one of ours."""

    names: tuple[tuple[str, str], ...]

    def __init__(
        self, d_model: int, nhead: int, dim_feedforward: int = 2048, dropout: float = 0.1,
        activation: Activation = "relu", layer_norm_eps: float = 1e-5, batch_first: bool = False,
        norm_first: bool = False, bias: bool = True, device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ):  # fmt: skip
        super().__init__()
        self.d_model, self.nhead, self.batch_first = d_model, nhead, batch_first
        self.layer: Any = self.build(
            Shape(d_model, nhead, dim_feedforward, dropout, activation, layer_norm_eps, norm_first, bias)
        )
        for part in self.modules():
            if isinstance(part, Attention):
                _initialize_attention(part)
        self.to(device=device, dtype=dtype)
        self.register_load_state_dict_pre_hook(_accept_torch_names)

    def build(self, shape: Shape) -> nn.Module:
        raise NotImplementedError


class TransformerEncoderLayer(TorchLayer):
    """`torch.nn.TransformerEncoderLayer`: self-attention and feed-forward."""

    names = ENCODER_NAMES

    def build(self, shape: Shape) -> Layer:
        return shape.layer()

    def forward(
        self, src: Tensor, src_mask: AnyMask | None = None, src_key_padding_mask: Tensor | None = None,
        is_causal: bool = False,
    ) -> Tensor:  # fmt: skip
        """src (S, B, W), or (B, S, W) with batch_first, or (S, W); for the masks see `Transformer`."""
        x = self.rows_first("src", src)
        route, bias = _route_and_bias(x, None, self.nhead, src_mask, src_key_padding_mask, is_causal)
        return self.as_given(self.layer(x, route, bias=bias)[0], like=src)


class TransformerDecoderLayer(TorchLayer):
    """`torch.nn.TransformerDecoderLayer`: self-attention, attention to `memory`, and feed-forward."""

    names = DECODER_NAMES

    def build(self, shape: Shape) -> CrossLayer:
        return CrossLayer(shape.layer(), shape.attention(), shape.norm())

    def forward(
        self, tgt: Tensor, memory: Tensor, tgt_mask: AnyMask | None = None, memory_mask: AnyMask | None = None,
        tgt_key_padding_mask: Tensor | None = None, memory_key_padding_mask: Tensor | None = None,
        tgt_is_causal: bool = False, memory_is_causal: bool = False,
    ) -> Tensor:  # fmt: skip
        """tgt (T, B, W) and memory (S, B, W), or rows first, or without B; for the masks see `Transformer`."""
        x, read = self.both_rows_first(tgt, memory)
        route, bias = _route_and_bias(x, None, self.nhead, tgt_mask, tgt_key_padding_mask, tgt_is_causal)
        cross = _cross_route(x, read, self.nhead, tgt_mask, memory_mask, memory_key_padding_mask, memory_is_causal)
        return self.as_given(self.run(x, read, route, bias, *cross), like=tgt)

    def run(self, x: Tensor, read: Tensor, route: Route, bias: Any, memory_route: Route, memory_bias: Any) -> Tensor:
        """Return (B, T, W) of rows-first inputs."""
        layer: CrossLayer = self.layer
        return layer(x, route, None, layer.cross.keys_values(read), memory_route, bias, memory_bias)[0]


# ---- stacks --------------------------------------------------------------------------------------------------------


class TorchStack(TorchModule):
    """`num_layers` copies of a layer, with the same first weights, and a norm after them."""

    kind: type[TorchLayer]

    def __init__(self, layer: TorchLayer, num_layers: int, norm: nn.Module | None = None):
        super().__init__()
        if not isinstance(layer, self.kind):
            hint = "torch's own weights can be loaded into it: load_state_dict(theirs.state_dict())"
            raise UsageError(f"the layer is a {type(layer).__name__}; expected allmask's {self.kind.__name__}", hint)
        self.d_model, self.nhead, self.batch_first = layer.d_model, layer.nhead, layer.batch_first
        self.num_layers = num_layers
        self.layers = nn.ModuleList(deepcopy(layer) for _ in range(num_layers))
        self.norm = nn.Identity() if norm is None else norm


class TransformerEncoder(TorchStack):
    """`torch.nn.TransformerEncoder`. The last two arguments choose torch's kernels, and are not needed here."""

    kind = TransformerEncoderLayer

    def __init__(
        self, encoder_layer: TransformerEncoderLayer, num_layers: int, norm: nn.Module | None = None,
        enable_nested_tensor: bool = True, mask_check: bool = True,
    ):  # fmt: skip
        super().__init__(encoder_layer, num_layers, norm)

    def forward(
        self, src: Tensor, mask: AnyMask | None = None, src_key_padding_mask: Tensor | None = None,
        is_causal: bool | None = None,
    ) -> Tensor:  # fmt: skip
        """src (S, B, W), or (B, S, W) with batch_first, or (S, W); for the masks see `Transformer`."""
        x = self.rows_first("src", src)
        route, bias = _route_and_bias(x, None, self.nhead, mask, src_key_padding_mask, is_causal)
        for layer in cast(list[TransformerEncoderLayer], self.layers):
            x, _ = layer.layer(x, route, bias=bias)
        return self.as_given(self.norm(x), like=src)


class TransformerDecoder(TorchStack):
    """`torch.nn.TransformerDecoder`: its layers also read `memory`."""

    kind = TransformerDecoderLayer

    def __init__(self, decoder_layer: TransformerDecoderLayer, num_layers: int, norm: nn.Module | None = None):
        super().__init__(decoder_layer, num_layers, norm)

    def forward(
        self, tgt: Tensor, memory: Tensor, tgt_mask: AnyMask | None = None, memory_mask: AnyMask | None = None,
        tgt_key_padding_mask: Tensor | None = None, memory_key_padding_mask: Tensor | None = None,
        tgt_is_causal: bool | None = None, memory_is_causal: bool = False,
    ) -> Tensor:  # fmt: skip
        """tgt (T, B, W) and memory (S, B, W), or rows first, or without B; for the masks see `Transformer`."""
        x, read = self.both_rows_first(tgt, memory)
        route, bias = _route_and_bias(x, None, self.nhead, tgt_mask, tgt_key_padding_mask, tgt_is_causal)
        cross = _cross_route(x, read, self.nhead, tgt_mask, memory_mask, memory_key_padding_mask, memory_is_causal)
        for layer in cast(list[TransformerDecoderLayer], self.layers):
            x = layer.run(x, read, route, bias, *cross)
        return self.as_given(self.norm(x), like=tgt)


class Transformer(TorchModule):
    """The encoder–decoder, used like torch's: `Transformer(d_model, nhead, …)(src, tgt, tgt_mask=…)`."""

    def __init__(
        self, d_model: int = 512, nhead: int = 8, num_encoder_layers: int = 6, num_decoder_layers: int = 6,
        dim_feedforward: int = 2048, dropout: float = 0.1, activation: Activation = "relu",
        custom_encoder: nn.Module | None = None, custom_decoder: nn.Module | None = None,
        layer_norm_eps: float = 1e-5, batch_first: bool = False, norm_first: bool = False, bias: bool = True,
        device: torch.device | str | None = None, dtype: torch.dtype | None = None,
        *, rng: torch.Generator | None = None,
    ):  # fmt: skip
        super().__init__()
        self.d_model, self.nhead, self.batch_first = d_model, nhead, batch_first
        self.shape = Shape(d_model, nhead, dim_feedforward, dropout, activation, layer_norm_eps, norm_first, bias)
        layer = {**vars(self.shape), "batch_first": batch_first}
        self.encoder = custom_encoder or TransformerEncoder(
            TransformerEncoderLayer(**layer), num_encoder_layers, self.shape.norm()
        )
        self.decoder = custom_decoder or TransformerDecoder(
            TransformerDecoderLayer(**layer), num_decoder_layers, self.shape.norm()
        )
        _initialize(self, rng)
        self.to(device=device, dtype=dtype)

    def forward(
        self, src: Tensor, tgt: Tensor, src_mask: AnyMask | None = None, tgt_mask: AnyMask | None = None,
        memory_mask: AnyMask | None = None, src_key_padding_mask: Tensor | None = None,
        tgt_key_padding_mask: Tensor | None = None, memory_key_padding_mask: Tensor | None = None,
        src_is_causal: bool | None = None, tgt_is_causal: bool | None = None, memory_is_causal: bool = False,
    ) -> Tensor:  # fmt: skip
        """src (S, B, W) and tgt (T, B, W), or (B, S, W) and (B, T, W) with batch_first, or (S, W) and (T, W).

        `*_mask`: (Q, K) or (B·heads, Q, K), booleans with True = blocked, or an additive bias. `*_key_padding_mask`:
        (B, K), either kind. `*_is_causal` blocks the future if there is no mask; otherwise it is ignored. A mask may
        also be a `Mask` (B, K), or (1, K) for all rows, which knows its own padding; `memory_mask` is then the mask of
        the memory's tokens, and tgt_mask must be a `Mask`, too.
        """
        self.both_rows_first(tgt, src, "src")
        memory = self.encoder(src, src_mask, src_key_padding_mask, src_is_causal)
        return self.decoder(
            tgt, memory, tgt_mask, memory_mask, tgt_key_padding_mask, memory_key_padding_mask,
            tgt_is_causal, memory_is_causal,
        )  # fmt: skip

    @staticmethod
    def generate_square_subsequent_mask(
        sz: int, device: torch.device | str | None = None, dtype: torch.dtype | None = None
    ) -> Tensor:
        """Return (sz, sz): 0 where a token may read, -inf in its future."""
        return torch.full((sz, sz), -torch.inf, device=device, dtype=dtype).triu(1)

    @classmethod
    def from_torch(cls, module: nn.Transformer) -> Transformer:
        """Return the same network with a copy of its weights."""
        layer: Any = next(iter([*module.encoder.layers, *module.decoder.layers]))
        ours = cls(
            module.d_model, module.nhead, len(module.encoder.layers), len(module.decoder.layers),
            layer.linear1.out_features, layer.dropout.p, layer.activation, layer_norm_eps=layer.norm1.eps,
            batch_first=module.batch_first, norm_first=layer.norm_first, bias=layer.linear1.bias is not None,
        ).to(layer.linear1.weight)  # fmt: skip
        ours.load_state_dict(module.state_dict())
        for feed_forward, theirs in _pairs(ours, module):
            feed_forward.activation = _activation(theirs.activation)
        return ours.train(module.training)

    def to_torch(self) -> nn.Transformer:
        """Return a `torch.nn.Transformer` with a copy of the weights."""
        numbers: dict[str, Any] = asdict(self.shape) | {"batch_first": self.batch_first}
        for side in ("encoder", "decoder"):
            numbers[f"num_{side}_layers"] = len(getattr(self, side).layers)
        module = nn.Transformer(**numbers).to(next(self.parameters()))
        for feed_forward, theirs in _pairs(self, module):
            if isinstance(self.shape.activation, nn.Module) and not isinstance(feed_forward.activation, Apply):
                theirs.activation = deepcopy(feed_forward.activation)
        module.load_state_dict(self.torch_state_dict())
        return module.train(self.training)


class Apply(nn.Module):
    """A plain function as a module."""

    def __init__(self, function: Callable[[Tensor], Tensor]):
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


def _activation(given: Activation) -> nn.Module:
    if isinstance(given, str):
        if given not in ("relu", "gelu"):
            raise UsageError(f"activation is {given!r}; expected relu, gelu or a function")
        return ACTIVATIONS[given]()
    return deepcopy(given) if isinstance(given, nn.Module) else Apply(given)


def _pairs(ours: Any, theirs: nn.Transformer) -> list[tuple[FeedForward, Any]]:
    """Pair our feed-forward modules with torch's layers, to copy the activations that these really compute.

    When torch copies a decoder layer whose activation is a module, the copy silently computes ReLU (torch 2.13).
    """
    encoder = zip((part.layer.feed_forward for part in ours.encoder.layers), theirs.encoder.layers, strict=True)
    decoder = zip((part.layer.layer.feed_forward for part in ours.decoder.layers), theirs.decoder.layers, strict=True)
    return [*encoder, *decoder]


@torch.no_grad()
def _initialize(module: nn.Module, rng: torch.Generator | None) -> None:
    """Initialize as torch does: Xavier, where query, key and value count as one (3W, W) matrix."""
    for name, parameter in module.named_parameters():
        packed = re.search(r"\.(query|key|value)\.weight$", name) is not None
        if parameter.ndim > 1:
            xavier_uniform(parameter, rng, gain=0.5**0.5 if packed else 1.0)
    for part in module.modules():
        if isinstance(part, Attention):
            _zero_biases(part)


@torch.no_grad()
def _initialize_attention(attention: Attention) -> None:
    """Initialize as torch's `MultiheadAttention`, alone: only query, key and value by Xavier."""
    for linear in (attention.query, attention.key, attention.value):
        xavier_uniform(linear.weight, gain=0.5**0.5)
    _zero_biases(attention)


def _zero_biases(attention: Attention) -> None:
    for linear in (attention.query, attention.key, attention.value, attention.output):
        if linear.bias is not None:
            nn.init.zeros_(linear.bias)


# ---- masks: torch's polarity in, ours out ----------------------------------------------------------------------


def _route_and_bias(
    x: Tensor, read: Tensor | None, heads: int, mask: AnyMask | None, padding: Tensor | None, causal: bool | None
) -> tuple[Route, Tensor | None]:
    """Convert torch's masks: an order becomes a route, anything else (per head, additive, no order) a bias.

    x (B, Q, W) reads itself, or `read` (B, K, W). Padding is blocked as keys but has queries, as in torch.
    """
    if isinstance(mask, Mask):
        return Route.find(_of_rows(mask, x, "mask", padding)), None
    rows, queries = x.shape[:2]
    keys = queries if read is None else read.shape[1]
    mask = _plain(mask, "mask", [(queries, keys), (rows * heads, queries, keys)])
    padding = _plain(padding, "key_padding_mask", [(rows, keys), (keys,)] if rows == 1 else [(rows, keys)])
    ordered, bias = bool(causal), None
    if mask is not None:
        plain = mask.dtype == torch.bool and mask.ndim == 2
        ordered = plain and torch.equal(mask, torch.ones_like(mask).triu(1))
        bias = None if ordered else _as_bias(mask, x).view(-1, heads if mask.ndim == 3 else 1, queries, keys)
    valid = torch.ones(rows, keys, dtype=torch.bool, device=x.device)
    if padding is not None and padding.dtype == torch.bool:
        valid = ~padding.view(rows, keys)
    elif padding is not None:
        padding_bias = _as_bias(padding, x).view(rows, 1, 1, keys)
        bias = padding_bias if bias is None else bias + padding_bias
    make = Mask.causal if ordered else Mask.bidirectional
    if read is None and bool(valid.all()):
        return Route.find(make(valid)), bias  # one mask for queries and keys: its kernel may need no matrix
    return Route.find(make(valid.new_ones(rows, queries)), make(valid)), bias


def _cross_route(
    x: Tensor, read: Tensor, heads: int, own: AnyMask | None, mask: AnyMask | None, padding: Tensor | None, causal: bool
) -> tuple[Route, Tensor | None]:
    """How x (B, Q, W) reads the memory (B, K, W): as torch's masks say, or as `own.visible(mask)`, if both are ours."""
    if not isinstance(mask, Mask):
        return _route_and_bias(x, read, heads, mask, padding, causal)
    if not isinstance(own, Mask):
        raise UsageError("memory_mask is a Mask, but tgt_mask is not", "tokens of both are compared: give both as Mask")
    return Route.find(_of_rows(own, x, "tgt_mask"), _of_rows(mask, read, "memory_mask", padding)), None


def _of_rows(mask: Mask, x: Tensor, name: str, padding: Tensor | None = None) -> Mask:
    """The mask (B, T) of x (B, T, W); a mask of one row is that of all rows."""
    if padding is not None:
        raise UsageError(f"{name} is a Mask, which knows its padding", "leave the key_padding_mask out")
    rows, tokens = x.shape[:2]
    if mask.shape not in ((rows, tokens), (1, tokens)):
        raise UsageError(f"{name} is {tuple(mask.shape)}; expected {(rows, tokens)} or {(1, tokens)}")
    return mask if len(mask) == rows else mask[[0] * rows]


def _plain(mask: Tensor | None, name: str, shapes: list[tuple[int, ...]]) -> Tensor | None:
    """Turn a mask of 0 and -inf into booleans (True = blocked); return booleans and other numbers unchanged."""
    if mask is not None and tuple(mask.shape) not in shapes:
        raise UsageError(f"{name} is {tuple(mask.shape)}; expected {' or '.join(map(str, shapes))}")
    if mask is None or mask.dtype == torch.bool:
        return mask
    if not mask.is_floating_point():
        raise UsageError(f"{name} is {mask.dtype}; expected booleans (True = blocked) or numbers to add to the scores")
    blocked = torch.isneginf(mask)
    return mask if mask.requires_grad or bool((mask[~blocked] != 0).any()) else blocked


def _as_bias(mask: Tensor, like: Tensor) -> Tensor:
    if mask.dtype == torch.bool:
        return torch.zeros_like(mask, dtype=like.dtype).masked_fill(mask, -torch.inf)
    return mask.to(like.dtype)


# ---- checkpoints: names, and the packed projections ---------------------------------------------------------------


def _accept_torch_names(layer: nn.Module, state: dict[str, Tensor], prefix: str, *_: Any) -> None:
    """Rename the tensors of `state` that belong to this layer, which may be part of a larger model."""
    mine = {name.removeprefix(prefix): state.pop(name) for name in list(state) if name.startswith(prefix)}
    for name, tensor in split_qkv(mine).items():
        state[prefix + _rename(name, cast(TorchLayer, layer).names)] = tensor


def _rename(name: str, table: tuple[tuple[str, str], ...]) -> str:
    for old, new in table:
        if name.startswith(old):
            return new + name.removeprefix(old)
    return name


def split_qkv(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """`in_proj_weight` (3W, W) and `in_proj_bias` (3W) become query, key and value."""
    split: dict[str, Tensor] = {}
    for name, tensor in state.items():
        base, packed, kind = name.rpartition("in_proj_")
        if not packed:
            split[name] = tensor
            continue
        for part, rows in zip(("query", "key", "value"), tensor.chunk(3), strict=True):
            split[f"{base}{part}.{kind}"] = rows
    return split


def join_qkv(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Query, key and value become `in_proj_weight` and `in_proj_bias`."""
    joined: dict[str, Tensor] = {}
    for name, tensor in state.items():
        found = re.fullmatch(r"(.*\.)(query|key|value)\.(weight|bias)", name)
        if not found:
            joined[name] = tensor
        elif found[2] == "query":
            rest = [state[f"{found[1]}{part}.{found[3]}"] for part in ("key", "value")]
            joined[f"{found[1]}in_proj_{found[3]}"] = torch.cat([tensor, *rest])
    return joined
