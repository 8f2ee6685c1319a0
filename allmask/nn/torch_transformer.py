"""An encoder–decoder shaped like `torch.nn.Transformer`, built from the layers of this package.

Same arguments, layouts and masks, same numbers; checkpoints pass both ways. A row whose keys are all blocked yields
zeros from attention and finite gradients. One thing differs, on purpose: padding tokens of the source are computed in
inference as in training. torch's fast path sets them to zero instead, so that its decoder, unless it is given
`memory_key_padding_mask` too, reads one memory in training and another in inference.

torch's polarity (True = blocked, or numbers added to the scores) ends in `_sight`, which turns it once.
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

# torch's name, ours; the first that a name begins with is used. The packed query, key and value are split before.
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
    """`torch.nn.Transformer` by another hand: `Transformer(d_model, nhead, …)(src, tgt, tgt_mask=…)`."""

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
        self.decoder = custom_decoder or Decoder(self.shape, num_decoder_layers, batch_first)
        _start(self, rng)
        self.to(device=device, dtype=dtype)
        self.register_load_state_dict_pre_hook(_accept_torch_names)

    def forward(
        self, src: Tensor, tgt: Tensor, src_mask: Tensor | None = None, tgt_mask: Tensor | None = None,
        memory_mask: Tensor | None = None, src_key_padding_mask: Tensor | None = None,
        tgt_key_padding_mask: Tensor | None = None, memory_key_padding_mask: Tensor | None = None,
        src_is_causal: bool | None = None, tgt_is_causal: bool | None = None, memory_is_causal: bool = False,
    ) -> Tensor:  # fmt: skip
        """src (S, B, W) and tgt (T, B, W), or (B, S, W) and (B, T, W) with batch_first, or (S, W) and (T, W).

        `*_mask`: (Q, K) or (B·heads, Q, K), booleans with True = blocked, or numbers added to the scores.
        `*_key_padding_mask`: (B, K), the same two kinds. `*_is_causal` blocks the future where no mask is given; where
        one is, the mask itself is read.
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
        """(sz, sz): 0 where a token may read, -inf in its future."""
        return torch.full((sz, sz), -torch.inf, device=device, dtype=dtype).triu(1)

    @classmethod
    def from_torch(cls, module: nn.Transformer) -> Transformer:
        """The same network with a copy of its weights."""
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
        """A `torch.nn.Transformer` with a copy of the weights."""
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
        """The weights under torch's names. `load_state_dict` takes them under either."""
        backwards = tuple((theirs, ours) for ours, theirs in NAMES)
        return join_qkv({_rename(name, backwards): tensor for name, tensor in self.state_dict().items()})


class Encoder(nn.Module):
    """`torch.nn.TransformerEncoder`: a stack of layers and the norm after it."""

    def __init__(self, shape: Shape, depth: int, batch_first: bool):
        super().__init__()
        self.layers = nn.ModuleList(shape.layer() for _ in range(depth))
        self.norm = shape.norm()
        self.heads = shape.nhead
        self.batch_first = batch_first

    def forward(
        self, src: Tensor, mask: Tensor | None = None, src_key_padding_mask: Tensor | None = None,
        is_causal: bool | None = None,
    ) -> Tensor:  # fmt: skip
        x = _rows_first(src, self.batch_first)  # (B, S, W)
        route, bias = _sight(x, None, self.heads, mask, src_key_padding_mask, is_causal)
        for layer in self.layers:
            x, _ = layer(x, route, bias=bias)
        return _as_given(self.norm(x), src, self.batch_first)


class Decoder(nn.Module):
    """`torch.nn.TransformerDecoder`: a stack of layers that also read `memory`, and the norm after it."""

    def __init__(self, shape: Shape, depth: int, batch_first: bool):
        super().__init__()
        self.layers = nn.ModuleList(shape.cross_layer() for _ in range(depth))
        self.norm = shape.norm()
        self.heads = shape.nhead
        self.batch_first = batch_first

    def forward(
        self, tgt: Tensor, memory: Tensor, tgt_mask: Tensor | None = None, memory_mask: Tensor | None = None,
        tgt_key_padding_mask: Tensor | None = None, memory_key_padding_mask: Tensor | None = None,
        tgt_is_causal: bool | None = None, memory_is_causal: bool = False,
    ) -> Tensor:  # fmt: skip
        x, read = _rows_first(tgt, self.batch_first), _rows_first(memory, self.batch_first)
        route, bias = _sight(x, None, self.heads, tgt_mask, tgt_key_padding_mask, tgt_is_causal)
        across, across_bias = _sight(x, read, self.heads, memory_mask, memory_key_padding_mask, memory_is_causal)
        for layer in cast(list[CrossLayer], self.layers):
            x, _ = layer(x, route, None, layer.cross.keys_values(read), across, bias, across_bias)
        return _as_given(self.norm(x), tgt, self.batch_first)


@dataclass(frozen=True)
class Shape:
    """What all layers of one network share, in torch's words, and the layers built from it."""

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

    def layer(self) -> Layer:
        activation = _activation(self.activation)
        feed_forward = FeedForward(self.d_model, self.dim_feedforward, activation, self.dropout, self.bias)
        norm_place = "pre" if self.norm_first else "post"
        return Layer(self.attention(), feed_forward, (self.norm(), self.norm()), norm_place, self.dropout)

    def cross_layer(self) -> CrossLayer:
        return CrossLayer(self.layer(), self.attention(), self.norm())


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
    """Our feed-forward parts beside torch's layers, because these may not have the activation they were built with.

    When torch copies a decoder layer whose activation is a module, the copy silently computes ReLU (torch 2.13).
    """
    encoder = zip((layer.feed_forward for layer in ours.encoder.layers), theirs.encoder.layers, strict=True)
    decoder = zip((layer.layer.feed_forward for layer in ours.decoder.layers), theirs.decoder.layers, strict=True)
    return [*encoder, *decoder]


@torch.no_grad()
def _start(module: nn.Module, rng: torch.Generator | None) -> None:
    """As torch starts: Xavier, with query, key and value drawn as the one (3W, W) matrix they are there."""
    for name, parameter in module.named_parameters():
        packed = re.search(r"\.(query|key|value)\.weight$", name) is not None
        if parameter.ndim > 1:
            xavier_uniform(parameter, rng, gain=0.5**0.5 if packed else 1.0)
    for part in module.modules():
        if isinstance(part, Attention) and part.output.bias is not None:
            for linear in (part.query, part.key, part.value, part.output):
                nn.init.zeros_(linear.bias)


# ---- masks: torch's polarity in, ours out ----------------------------------------------------------------------


def _sight(
    x: Tensor, read: Tensor | None, heads: int, mask: Tensor | None, padding: Tensor | None, causal: bool | None
) -> tuple[Route, Tensor | None]:
    """Who may look at whom as a route, and what does not fit one (per head, graded, no order) as a bias.

    x is (B, Q, W) and reads itself, or `read` (B, K, W). Padding tokens are hidden as keys but still look, as in torch.
    """
    rows, queries = x.shape[:2]
    keys = queries if read is None else read.shape[1]
    mask = _plain(mask, "mask", [(queries, keys), (rows * heads, queries, keys)])
    padding = _plain(padding, "key_padding_mask", [(rows, keys), (keys,)] if rows == 1 else [(rows, keys)])
    ordered = bool(causal) if mask is None else _is_causal(mask)
    bias = None
    if mask is not None and not ordered:
        bias = _as_bias(mask, x).view(-1, heads if mask.ndim == 3 else 1, queries, keys)
    valid = torch.ones(rows, keys, dtype=torch.bool, device=x.device)
    if padding is not None and padding.dtype == torch.bool:
        valid = ~padding.view(rows, keys)
    elif padding is not None:
        graded = _as_bias(padding, x).view(rows, 1, 1, keys)
        bias = graded if bias is None else bias + graded
    return _route(queries, valid, ordered, itself=read is None), bias


def _route(queries: int, valid: Tensor, ordered: bool, itself: bool) -> Route:
    make = Mask.causal if ordered else Mask.bidirectional
    if itself and bool(valid.all()):
        return Route.find(make(valid))  # one mask for both sides: its kernel may be causal, without a matrix
    looking = torch.ones(len(valid), queries, dtype=torch.bool, device=valid.device)
    return Route.find(make(looking), make(valid))


def _plain(mask: Tensor | None, name: str, shapes: list[tuple[int, ...]]) -> Tensor | None:
    """Booleans, True = blocked, also where they were written as 0 and -inf; other numbers as they are."""
    if mask is not None and tuple(mask.shape) not in shapes:
        raise UsageError(f"{name} is {tuple(mask.shape)}; expected {' or '.join(map(str, shapes))}")
    if mask is None or mask.dtype == torch.bool:
        return mask
    if not mask.is_floating_point():
        raise UsageError(f"{name} is {mask.dtype}; expected booleans (True = blocked) or numbers to add to the scores")
    blocked = torch.isneginf(mask)
    return mask if mask.requires_grad or bool((mask[~blocked] != 0).any()) else blocked


def _is_causal(mask: Tensor) -> bool:
    """Whether exactly the future is blocked, so that an order says it all."""
    if mask.dtype != torch.bool or mask.ndim != 2:
        return False
    return torch.equal(mask, torch.ones_like(mask).triu(1))


def _as_bias(mask: Tensor, like: Tensor) -> Tensor:
    if mask.dtype == torch.bool:
        return torch.zeros_like(mask, dtype=like.dtype).masked_fill(mask, -torch.inf)
    return mask.to(like.dtype)


# ---- layouts ---------------------------------------------------------------------------------------------------


def _rows_first(x: Tensor, batch_first: bool) -> Tensor:
    if x.ndim == 2:
        return x[None]
    return x if batch_first else x.transpose(0, 1)


def _as_given(x: Tensor, given: Tensor, batch_first: bool) -> Tensor:
    if given.ndim == 2:
        return x[0]
    return x if batch_first else x.transpose(0, 1)


def _check_inputs(src: Tensor, tgt: Tensor, width: int, batch_first: bool) -> None:
    if src.ndim != tgt.ndim or src.ndim not in (2, 3):
        raise UsageError(
            f"src is {tuple(src.shape)} and tgt {tuple(tgt.shape)}; both must have 3 dimensions, or both 2"
        )
    if src.shape[-1] != width or tgt.shape[-1] != width:
        raise UsageError(f"src is {src.shape[-1]} wide and tgt {tgt.shape[-1]}; both must be d_model, {width}")
    rows = 0 if batch_first else 1
    if src.ndim == 3 and src.shape[rows] != tgt.shape[rows]:
        layout = "(B, T, W)" if batch_first else "(T, B, W)"
        raise UsageError(f"src has {src.shape[rows]} rows and tgt {tgt.shape[rows]}", f"the layout is {layout}")


# ---- checkpoints: a rename, and the packed projections ----------------------------------------------------------


def _accept_torch_names(module: nn.Module, state: dict[str, Tensor], prefix: str, *_: Any) -> None:
    """Rewrites the part of `state` that belongs to this module, wherever in a larger model it stands."""
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
        if packed:
            split |= {
                f"{base}{part}.{kind}": t for part, t in zip(("query", "key", "value"), tensor.chunk(3), strict=True)
            }
        else:
            split[name] = tensor
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
