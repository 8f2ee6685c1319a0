"""A drop-in replacement of `torch.nn.Transformer`, built from the layers of this package.

Arguments, layouts, masks and results are the same; checkpoints can be exchanged. A row whose keys are all blocked gets
zeros from attention and finite gradients. One difference is intended: padding of the source is computed in inference as
in training. torch's fast path sets it to zero, so that its decoder reads one memory in training and another in
inference, unless it also gets `memory_key_padding_mask`.

Masks in torch's polarity (True = blocked, or an additive bias) are converted once, by `_route_and_bias`.
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

# torch's name, ours; the first matching prefix is used, after the packed query, key and value have been split
NAMES = (
    ("encoder.layers.*.self_attn.out_proj.", "encoder.layers.*.attention.output."),
    ("encoder.layers.*.self_attn.", "encoder.layers.*.attention."),
    ("encoder.layers.*.linear1.", "encoder.layers.*.feed_forward.expand."),
    ("encoder.layers.*.activation.", "encoder.layers.*.feed_forward.activation."),
    ("encoder.layers.*.linear2.", "encoder.layers.*.feed_forward.contract."),
    ("encoder.layers.*.norm1.", "encoder.layers.*.attention_norm."),
    ("encoder.layers.*.norm2.", "encoder.layers.*.feed_forward_norm."),
    ("decoder.layers.*.self_attn.out_proj.", "decoder.layers.*.layer.attention.output."),
    ("decoder.layers.*.self_attn.", "decoder.layers.*.layer.attention."),
    ("decoder.layers.*.multihead_attn.out_proj.", "decoder.layers.*.cross.output."),
    ("decoder.layers.*.multihead_attn.", "decoder.layers.*.cross."),
    ("decoder.layers.*.linear1.", "decoder.layers.*.layer.feed_forward.expand."),
    ("decoder.layers.*.activation.", "decoder.layers.*.layer.feed_forward.activation."),
    ("decoder.layers.*.linear2.", "decoder.layers.*.layer.feed_forward.contract."),
    ("decoder.layers.*.norm1.", "decoder.layers.*.layer.attention_norm."),
    ("decoder.layers.*.norm2.", "decoder.layers.*.cross_norm."),
    ("decoder.layers.*.norm3.", "decoder.layers.*.layer.feed_forward_norm."),
)


class Transformer(nn.Module):
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
        if nhead < 1 or d_model % nhead:
            raise UsageError(f"d_model {d_model} is not a multiple of nhead {nhead}")
        self.d_model, self.nhead, self.batch_first = d_model, nhead, batch_first
        self.shape = Shape(d_model, nhead, dim_feedforward, dropout, activation, layer_norm_eps, norm_first, bias)
        self.encoder = custom_encoder or Encoder(self.shape, num_encoder_layers, batch_first)
        self.decoder = custom_decoder or Decoder(self.shape, num_decoder_layers, batch_first, cross=True)
        _initialize(self, rng)
        self.to(device=device, dtype=dtype)
        self.register_load_state_dict_pre_hook(_accept_torch_names)

    def forward(
        self, src: Tensor, tgt: Tensor, src_mask: Tensor | None = None, tgt_mask: Tensor | None = None,
        memory_mask: Tensor | None = None, src_key_padding_mask: Tensor | None = None,
        tgt_key_padding_mask: Tensor | None = None, memory_key_padding_mask: Tensor | None = None,
        src_is_causal: bool | None = None, tgt_is_causal: bool | None = None, memory_is_causal: bool = False,
    ) -> Tensor:  # fmt: skip
        """src (S, B, W) and tgt (T, B, W), or (B, S, W) and (B, T, W) with batch_first, or (S, W) and (T, W).

        `*_mask`: (Q, K) or (B·heads, Q, K), booleans with True = blocked, or an additive bias. `*_key_padding_mask`:
        (B, K), either kind. `*_is_causal` blocks the future if there is no mask; otherwise it is ignored.
        """
        _check_inputs(src, tgt, self.d_model, self.batch_first)
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

    def torch_state_dict(self) -> dict[str, Tensor]:
        """Return the weights under torch's names. `load_state_dict` accepts torch's names and ours."""
        backwards = tuple((theirs, ours) for ours, theirs in NAMES)
        return join_qkv({_rename(name, backwards): tensor for name, tensor in self.state_dict().items()})


class Stack(nn.Module):
    """Layers and the norm after them, in one of torch's layouts."""

    def __init__(self, shape: Shape, depth: int, batch_first: bool, cross: bool = False):
        super().__init__()
        self.layers = nn.ModuleList(shape.layer(cross) for _ in range(depth))
        self.norm = shape.norm()
        self.heads = shape.nhead
        self.batch_first = batch_first

    def rows_first(self, x: Tensor) -> Tensor:
        """(B, T, W) of an input in this stack's layout."""
        if x.ndim == 2:
            return x[None]
        return x if self.batch_first else x.transpose(0, 1)

    def output(self, x: Tensor, like: Tensor) -> Tensor:
        """Apply the norm to x (B, T, W), and return it in the layout of the input `like`."""
        x = self.norm(x)
        if like.ndim == 2:
            return x[0]
        return x if self.batch_first else x.transpose(0, 1)


class Encoder(Stack):
    """`torch.nn.TransformerEncoder`."""

    def forward(
        self, src: Tensor, mask: Tensor | None = None, src_key_padding_mask: Tensor | None = None,
        is_causal: bool | None = None,
    ) -> Tensor:  # fmt: skip
        x = self.rows_first(src)  # (B, S, W)
        route, bias = _route_and_bias(x, None, self.heads, mask, src_key_padding_mask, is_causal)
        for layer in self.layers:
            x, _ = layer(x, route, bias=bias)
        return self.output(x, like=src)


class Decoder(Stack):
    """`torch.nn.TransformerDecoder`: its layers also read `memory`."""

    def forward(
        self, tgt: Tensor, memory: Tensor, tgt_mask: Tensor | None = None, memory_mask: Tensor | None = None,
        tgt_key_padding_mask: Tensor | None = None, memory_key_padding_mask: Tensor | None = None,
        tgt_is_causal: bool | None = None, memory_is_causal: bool = False,
    ) -> Tensor:  # fmt: skip
        x, read = self.rows_first(tgt), self.rows_first(memory)
        route, bias = _route_and_bias(x, None, self.heads, tgt_mask, tgt_key_padding_mask, tgt_is_causal)
        cross = _route_and_bias(x, read, self.heads, memory_mask, memory_key_padding_mask, memory_is_causal)
        for layer in cast(list[CrossLayer], self.layers):
            x, _ = layer(x, route, None, layer.cross.keys_values(read), cross[0], bias, cross[1])
        return self.output(x, like=tgt)


@dataclass(frozen=True)
class Shape:
    """The settings that all layers share, under torch's names, and the layers built from them."""

    d_model: int
    nhead: int
    dim_feedforward: int
    dropout: float
    activation: Activation
    layer_norm_eps: float
    norm_first: bool
    bias: bool

    def norm(self) -> nn.Module:
        return nn.LayerNorm(self.d_model, eps=self.layer_norm_eps, bias=self.bias)

    def attention(self) -> Attention:
        return Attention(self.d_model, self.nhead, self.dropout, self.bias)

    def layer(self, cross: bool) -> Layer | CrossLayer:
        activation = _activation(self.activation)
        feed_forward = FeedForward(self.d_model, self.dim_feedforward, activation, self.dropout, self.bias)
        norm_place = "pre" if self.norm_first else "post"
        layer = Layer(self.attention(), feed_forward, (self.norm(), self.norm()), norm_place, self.dropout)
        return CrossLayer(layer, self.attention(), self.norm()) if cross else layer


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
    encoder = zip((layer.feed_forward for layer in ours.encoder.layers), theirs.encoder.layers, strict=True)
    decoder = zip((layer.layer.feed_forward for layer in ours.decoder.layers), theirs.decoder.layers, strict=True)
    return [*encoder, *decoder]


@torch.no_grad()
def _initialize(module: nn.Module, rng: torch.Generator | None) -> None:
    """Initialize as torch does: Xavier, where query, key and value count as one (3W, W) matrix."""
    for name, parameter in module.named_parameters():
        packed = re.search(r"\.(query|key|value)\.weight$", name) is not None
        if parameter.ndim > 1:
            xavier_uniform(parameter, rng, gain=0.5**0.5 if packed else 1.0)
    for part in module.modules():
        if isinstance(part, Attention) and part.output.bias is not None:
            for linear in (part.query, part.key, part.value, part.output):
                nn.init.zeros_(linear.bias)


# ---- masks: torch's polarity in, ours out ----------------------------------------------------------------------


def _route_and_bias(
    x: Tensor, read: Tensor | None, heads: int, mask: Tensor | None, padding: Tensor | None, causal: bool | None
) -> tuple[Route, Tensor | None]:
    """Convert torch's masks: an order becomes a route, anything else (per head, additive, no order) a bias.

    x (B, Q, W) reads itself, or `read` (B, K, W). Padding is blocked as keys but has queries, as in torch.
    """
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


def _check_inputs(src: Tensor, tgt: Tensor, width: int, batch_first: bool) -> None:
    if src.ndim != tgt.ndim or src.ndim not in (2, 3):
        shapes = f"src is {tuple(src.shape)} and tgt {tuple(tgt.shape)}"
        raise UsageError(f"{shapes}; both must have 3 dimensions, or both 2")
    if src.shape[-1] != width or tgt.shape[-1] != width:
        raise UsageError(f"src is {src.shape[-1]} wide and tgt {tgt.shape[-1]}; both must be d_model, {width}")
    rows = 0 if batch_first else 1
    if src.ndim == 3 and src.shape[rows] != tgt.shape[rows]:
        layout = "(B, T, W)" if batch_first else "(T, B, W)"
        raise UsageError(f"src has {src.shape[rows]} rows and tgt {tgt.shape[rows]}", f"the layout is {layout}")


# ---- checkpoints: names, and the packed projections ---------------------------------------------------------------


def _accept_torch_names(module: nn.Module, state: dict[str, Tensor], prefix: str, *_: Any) -> None:
    """Rename the tensors of `state` that belong to this module, which may be part of a larger model."""
    mine = {name.removeprefix(prefix): state.pop(name) for name in list(state) if name.startswith(prefix)}
    for name, tensor in split_qkv(mine).items():
        state[prefix + _rename(name, NAMES)] = tensor


def _rename(name: str, table: tuple[tuple[str, str], ...]) -> str:
    for old, new in table:
        found = re.match(re.escape(old).replace(r"\*", r"(\d+)"), name)
        if found:
            return new.replace("*", found[1]) + name[found.end() :]
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
