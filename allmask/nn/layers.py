"""The parts of a Transformer layer: embeddings, norms, feed-forward, the residual layer. They take plain numbers."""

from __future__ import annotations

import math
from functools import partial

import torch
from torch import Tensor, nn

from allmask.kernels.rms_norm import rms_norm
from allmask.nn.attention import Attention, Bias, Block, KeyValue, Readable, Route
from allmask.nn.dropout import Dropout
from allmask.nn.relative_attention import DistanceEncodings

PositionBias = Bias | DistanceEncodings | None  # what layers are told of distances
ACTIVATIONS = {
    "gelu": nn.GELU,
    "gelu_tanh": partial(nn.GELU, approximate="tanh"),
    "relu": nn.ReLU,
}


class BatchNorm(nn.Module):
    """Each feature normalized over all tokens of the batch: in training a token depends on all the others."""

    def __init__(self, width: int, eps: float = 1e-5):
        super().__init__()
        self.inner = nn.BatchNorm1d(width, eps)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x.flatten(0, 1)).view_as(x)


class InstanceNorm(nn.Module):
    """Each feature normalized over its row, padding and the future included: no causal model can use it."""

    def __init__(self, width: int, eps: float = 1e-5):
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(width))
        self.bias = nn.Parameter(torch.zeros(width))

    def forward(self, x: Tensor) -> Tensor:
        variance, mean = torch.var_mean(x, dim=1, keepdim=True, correction=0)
        return (x - mean) * torch.rsqrt(variance + self.eps) * self.weight + self.bias


class RMSNorm(nn.RMSNorm):
    """torch's RMS norm (arXiv 1910.07467), computed by a fused kernel on CPUs."""

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps)


NORMS = {"layer": nn.LayerNorm, "rms": RMSNorm, "batch": BatchNorm, "instance": InstanceNorm}
TOKENWISE = ("layer", "rms")  # the norms that look at one token alone, as a mask promises


class NoEmbedding(nn.Module):
    """An absent embedding: adds nothing."""

    def forward(self, ids: Tensor) -> float:
        return 0.0


class Sinusoidal(nn.Module):
    """Fixed waves as positions: sin and cos of pos / 10000^(2i/width), interleaved (arXiv 1706.03762).

    The first `length` positions are kept in a table. It grows as texts go on beyond it; a position far beyond it is
    computed each time, so that memory follows the positions in use, not the largest of them.
    """

    weight: Tensor

    def __init__(self, length: int, width: int):
        super().__init__()
        self.register_buffer("weight", sinusoids(length, width), persistent=False)

    def forward(self, positions: Tensor) -> Tensor:
        last = int(positions.max()) if positions.numel() else -1
        if last >= len(self.weight) and last < 2 * (len(self.weight) + positions.numel()):
            self._grow(last + 1)
        if last < len(self.weight):
            return self.weight[positions]
        beyond = positions >= len(self.weight)
        found = self.weight[positions.masked_fill(beyond, 0)]
        found[beyond] = _waves(positions[beyond], found.shape[-1]).to(found)
        return found

    @torch.inference_mode(False)
    def _grow(self, length: int) -> None:
        more = torch.arange(len(self.weight), max(length, len(self.weight) * 3 // 2), device="cpu")
        self.weight = torch.cat([self.weight, _waves(more, self.weight.shape[1]).to(self.weight)])


def sinusoids(length: int, width: int) -> Tensor:
    """(length, width) waves; position p + k is a rotation of position p, the same for every p."""
    return _waves(torch.arange(length, device="cpu"), width)


def _waves(positions: Tensor, width: int) -> Tensor:
    """(N, width) of positions (N,)."""
    numbers = {"dtype": torch.float64, "device": "cpu"}  # real ones, also where a model is built without memory
    frequency = torch.exp(torch.arange(0, width, 2, **numbers) * (-math.log(10000.0) / width))
    angle = positions.to(**numbers)[:, None] * frequency
    waves = torch.stack([angle.sin(), angle.cos()], dim=-1).flatten(1)  # (N, width rounded up to even)
    return waves[:, :width].float()


class NoPositionBias(nn.Module):
    """Places are embedded, not compared: nothing is added to scores."""

    def forward(self, route: Route) -> None:
        return None

    def whole(self, route: Route) -> None:
        return None


class RelativePositionBias(nn.Module):
    """A number added to each head's scores for how far a key stands from its query (T5, arXiv 1910.10683).

    Half of the buckets are for one distance each, the others for ranges that grow up to `distance`, beyond which all
    share one. With `both_ways`, keys after the query have buckets of their own; otherwise they count as distance 0:

        distance of a key        0  1  2  …  15  16  …  19  …  113  …  128  …     32 buckets, one way
        bucket                   0  1  2  …  15  16  …  17  …   31  …   31  …
    """

    bucket: Tensor

    def __init__(self, heads: int, buckets: int, distance: int, both_ways: bool):
        super().__init__()
        self.both_ways = both_ways
        self.table = nn.Embedding(buckets, heads)
        self.register_buffer("bucket", _buckets(buckets // 2 if both_ways else buckets, distance), persistent=False)

    def forward(self, route: Route) -> Bias:
        """For each block of a row that reads itself, with -inf where it may not; of other routes as a whole."""
        if route.keys is not route.queries:
            return self.whole(route)
        return tuple(self._of_block(route, block) for block in route.blocks)

    def whole(self, route: Route) -> Tensor:
        """(B, H, Q, K), or B = 1 where rows are alike; sight is not looked at."""
        return self._look_up(_alike(route.keys.position[:, None, :] - route.queries.position[:, :, None]))

    def _of_block(self, route: Route, block: Block) -> Tensor:
        position = route.queries.position[:, block.start : block.stop].unflatten(1, (block.documents, -1)).flatten(0, 1)
        added = self._look_up(_alike(position[:, None, :] - position[:, :, None]))
        if block.kind in ("full", "empty"):
            return added
        if block.kind == "dense":
            visible = route.visible(block.start, block.stop, block)
        else:  # documents of a block are alike
            visible = route.queries[:1, block.start : block.start + block.length].visible()
        return added.masked_fill(~visible[:, None], -torch.inf)

    def _look_up(self, relative: Tensor) -> Tensor:
        """(B, Q, K) places from query to key -> (B, H, Q, K)"""
        nearest = self.bucket.shape[0] - 1
        away = relative.abs() if self.both_ways else relative.neg().clamp(min=0)
        bucket = self.bucket[away.clamp(max=nearest)]
        if self.both_ways:
            bucket = bucket + (relative > 0) * (self.table.num_embeddings // 2)
        return self.table(bucket).movedim(-1, 1)


def _alike(rows: Tensor) -> Tensor:
    """One row for all, if they are equal."""
    return rows[:1] if bool((rows == rows[:1]).all()) else rows


def _buckets(count: int, distance: int) -> Tensor:
    """The bucket of each distance up to the last; further away is as far as that."""
    exact = count // 2
    away = torch.arange(max(distance, exact) + 1, device="cpu")
    grown = (away.float() / exact).log() / math.log(distance / exact) * (count - exact)
    return torch.where(away < exact, away, (exact + grown.clamp(min=0).long()).clamp(max=count - 1))


class Embedding(nn.Module):
    """Token + position + segment, normalized and dropped out. `asks`: it has a vector for what is unknown, too."""

    def __init__(
        self, vocab_size: int, width: int, positions: nn.Module, segments: nn.Module, norm: nn.Module,
        dropout: float, scale: float = 1.0, asks: bool = False,
    ):  # fmt: skip
        super().__init__()
        self.tokens = nn.Embedding(vocab_size, width)
        self.positions = positions
        self.segments = segments
        self.norm = norm
        self.dropout = Dropout(dropout)
        self.scale = scale
        self.question = nn.Parameter(torch.zeros(1, width)) if asks else None

    def forward(self, ids: Tensor, positions: Tensor, segments: Tensor) -> Tensor:
        x = self.tokens(ids) * self.scale + self.positions(positions) + self.segments(segments)
        return self.dropout(self.norm(x))

    def ask(self, ids: Tensor, positions: Tensor, segments: Tensor) -> Tensor:
        """What stands where a token is to be guessed: a vector learnt for that, or a token such as [MASK]."""
        if self.question is None:
            return self(ids, positions, segments)
        return self.dropout(self.question.expand(*ids.shape, -1))


class FeedForward(nn.Module):
    """Expand, bend, contract: each token alone."""

    def __init__(self, width: int, ffn_width: int, activation: nn.Module, dropout: float = 0.0, bias: bool = True):
        super().__init__()
        self.expand = nn.Linear(width, ffn_width, bias)
        self.activation = activation
        self.dropout = Dropout(dropout)
        self.contract = nn.Linear(ffn_width, width, bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.contract(self.dropout(self.activation(self.expand(x))))


class GatedFeedForward(nn.Module):
    """What is bent decides how much passes of what is not (arXiv 2002.05202)."""

    def __init__(self, width: int, ffn_width: int, activation: nn.Module, dropout: float = 0.0, bias: bool = True):
        super().__init__()
        self.gate = nn.Linear(width, ffn_width, bias)
        self.activation = activation
        self.gated = nn.Linear(width, ffn_width, bias)
        self.dropout = Dropout(dropout)
        self.contract = nn.Linear(ffn_width, width, bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.contract(self.dropout(self.activation(self.gate(x)) * self.gated(x)))


def _apply(norm: nn.Module, x: Tensor) -> Tensor:
    return norm(x)


def _skip(norm: nn.Module, x: Tensor) -> Tensor:
    return x


NORM_PLACES = {"pre": (_apply, _skip), "post": (_skip, _apply)}  # what happens on entering and on leaving a step


class Layer(nn.Module):
    """Attention, then feed-forward; each a residual step normalized on entering (GPT-2) or on leaving (BERT)."""

    def __init__(
        self, attention: Attention, feed_forward: FeedForward | GatedFeedForward,
        norms: tuple[nn.Module, nn.Module], norm_place: str, dropout: float,
    ):  # fmt: skip
        super().__init__()
        self.attention = attention
        self.attention_norm, self.feed_forward_norm = norms
        self.feed_forward = feed_forward
        self.dropout = Dropout(dropout)
        self.enter, self.leave = NORM_PLACES[norm_place]

    def forward(
        self, x: Tensor, route: Route, past: KeyValue | None = None, bias: PositionBias = None
    ) -> tuple[Tensor, KeyValue]:
        """Hidden states (B, T, W) one layer on, and the keys and values read, those of the past first."""
        x, read = self.attend(x, route, past, bias)
        return self.feed(x), read

    def attend(
        self, x: Tensor, route: Route, past: KeyValue | None = None, bias: PositionBias = None
    ) -> tuple[Tensor, KeyValue]:
        h = self.enter(self.attention_norm, x)
        new = self.attention.keys_values(h)
        read = new if past is None else past.append(new)
        return self._join(x, self.attention(h, read, route, bias)), read

    def query_stream(self, x: Tensor, route: Route, past: Readable | None, bias: PositionBias = None) -> Tensor:
        """One layer on for tokens that read only the past, never themselves or each other, and leave no trace in it."""
        h = self.enter(self.attention_norm, x)
        past = self.attention.keys_values(h[:, :0]) if past is None else past  # nothing to read
        return self.feed(self._join(x, self.attention(h, past, route, bias)))

    def _join(self, x: Tensor, step: Tensor) -> Tensor:
        return self.leave(self.attention_norm, x + self.dropout(step))

    def feed(self, x: Tensor) -> Tensor:
        h = self.enter(self.feed_forward_norm, x)
        return self.leave(self.feed_forward_norm, x + self.dropout(self.feed_forward(h)))

    def attention_weights(self, x: Tensor, route: Route, bias: PositionBias = None) -> Tensor:
        """The attention weights (B, H, T, T) this layer gives to x, for pictures."""
        h = self.enter(self.attention_norm, x)
        return self.attention.attention_weights(h, self.attention.keys_values(h), route, bias)


class CrossLayer(nn.Module):
    """A decoder's layer: between its two steps it reads another text, whose keys and values are given."""

    def __init__(self, layer: Layer, cross: Attention, norm: nn.Module):
        super().__init__()
        self.layer = layer
        self.cross = cross
        self.cross_norm = norm

    def forward(
        self, x: Tensor, route: Route, past: KeyValue | None, memory: Readable, memory_route: Route,
        bias: PositionBias = None, memory_bias: Tensor | None = None,
    ) -> tuple[Tensor, KeyValue]:  # fmt: skip
        x, read = self.attend(x, route, past, memory, memory_route, bias, memory_bias)
        return self.feed(x), read

    def attend(
        self, x: Tensor, route: Route, past: KeyValue | None, memory: Readable, memory_route: Route,
        bias: PositionBias = None, memory_bias: Tensor | None = None,
    ) -> tuple[Tensor, KeyValue]:  # fmt: skip
        x, read = self.layer.attend(x, route, past, bias)
        h = self.layer.enter(self.cross_norm, x)
        step = self.cross(h, memory, memory_route, memory_bias)
        return self.layer.leave(self.cross_norm, x + self.layer.dropout(step)), read

    def feed(self, x: Tensor) -> Tensor:
        return self.layer.feed(x)
