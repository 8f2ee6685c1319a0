"""The parts of a Transformer: embeddings, norms, feed-forward, residual layers. They take numbers, not a config."""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from allmask.kernels.rms_norm import rms_norm
from allmask.nn import fused
from allmask.nn.attention import Attention, KeyValue, Readable, Route, attend, attend_chosen
from allmask.nn.dropout import Dropout
from allmask.nn.relative_attention import PositionBias, sinusoids

LANES = 16  # widths that the compiled kernels take are multiples of this
_MAX_TABLE = 1 << 20  # numbers of a table of sinusoids before it grows
ACTIVATIONS = {"gelu": nn.GELU, "gelu_tanh": partial(nn.GELU, approximate="tanh"), "relu": nn.ReLU}


class BatchNorm(nn.Module):
    """Normalize each feature over all tokens of the batch: in training, a token depends on all others."""

    running_mean: Tensor
    running_var: Tensor

    def __init__(self, width: int, eps: float = 1e-5):
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(width))
        self.bias = nn.Parameter(torch.zeros(width))
        self.register_buffer("running_mean", torch.zeros(width))
        self.register_buffer("running_var", torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        statistics = self.running_mean, self.running_var
        flat = F.batch_norm(x.flatten(0, -2), *statistics, self.weight, self.bias, self.training, eps=self.eps)
        return flat.view_as(x)


class InstanceNorm(nn.Module):
    """Normalize each feature over its row, including padding and the future: unusable in a causal model."""

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
        weight = self._parameters.get("weight")  # faster than self.weight
        return rms_norm(x, self.weight if weight is None else weight, self.eps)


NORMS = {"layer": nn.LayerNorm, "rms": RMSNorm, "batch": BatchNorm, "instance": InstanceNorm}
TOKENWISE = ("layer", "rms")  # norms of each token alone, which cannot break a mask


class NoEmbedding(nn.Module):
    """An absent embedding: adds nothing."""

    def forward(self, ids: Tensor) -> float:
        return 0.0


class Sinusoidal(nn.Module):
    """Sinusoidal positions: sin and cos of pos / 10000^(2i/width), interleaved (arXiv 1706.03762).

    A table holds the first `length` positions, of very many only some, and grows when texts are longer. Positions far
    beyond it are computed each time, so that memory depends on the positions in use, not on the largest of them.
    """

    weight: Tensor

    def __init__(self, length: int, width: int):
        super().__init__()
        length = min(length, max(1, _MAX_TABLE // width))
        self.register_buffer("weight", sinusoids(length, width), persistent=False)

    def forward(self, positions: Tensor) -> Tensor:
        last = int(positions.max()) if positions.numel() else -1
        if last >= len(self.weight) and last < 2 * (len(self.weight) + positions.numel()):
            self._grow(last + 1)
        if last < len(self.weight):
            return self.weight[positions]
        beyond = positions >= len(self.weight)
        found = self.weight[positions.masked_fill(beyond, 0)]
        found[beyond] = sinusoids(positions[beyond], found.shape[-1]).to(found)
        return found

    @torch.inference_mode(False)
    def _grow(self, length: int) -> None:
        more = torch.arange(len(self.weight), max(length, len(self.weight) * 3 // 2), device="cpu")
        self.weight = torch.cat([self.weight, sinusoids(more, self.weight.shape[1]).to(self.weight)])


class OffsetEmbedding(nn.Embedding):
    """Learned positions in a table whose first `offset` rows are not used (RoBERTa)."""

    def __init__(self, offset: int, length: int, width: int):
        super().__init__(offset + length, width)
        self.offset = offset

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input + self.offset)


class OneSegment(nn.Embedding):
    """The segment of a model that has only one, whatever the segments of a text are."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(torch.zeros_like(input))


class SegmentsOfTask(nn.Embedding):
    """Segments, and a table of pretraining tasks, of which the first is added to all tokens (ERNIE 2.0 and 3.0)."""

    def __init__(self, segments: int, width: int, tasks: int):
        super().__init__(segments, width)
        self.tasks = nn.Embedding(tasks, width)

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) + self.tasks(torch.zeros_like(input))


class Embedding(nn.Module):
    """Token + position + segment, then norm, dropout and a projection, if the embedding is narrower than the model.

    With `query_vector`, also a vector for tokens to predict.
    """

    def __init__(
        self, vocab_size: int, width: int, positions: nn.Module, segments: nn.Module, norm: nn.Module,
        dropout: float, scale: float = 1.0, query_vector: bool = False, project: nn.Module | None = None,
    ):  # fmt: skip
        super().__init__()
        self.tokens = nn.Embedding(vocab_size, width)
        self.positions = positions
        self.segments = segments
        self.norm = norm
        self.dropout = Dropout(dropout)
        self.scale = scale
        self.question = nn.Parameter(torch.zeros(1, width)) if query_vector else None
        self.project = nn.Identity() if project is None else project

    def forward(self, ids: Tensor, positions: Tensor, segments: Tensor) -> Tensor:
        x = self.tokens(ids) * self.scale + self.positions(positions) + self.segments(segments)
        return self.project(self.dropout(self.norm(x)))

    def embed_query(self, ids: Tensor, positions: Tensor, segments: Tensor) -> Tensor:
        """The input of the query stream where a token is to be predicted: a learned vector, or ids such as [MASK]."""
        if self.question is None:
            return self(ids, positions, segments)
        return self.dropout(self.question.expand(*ids.shape, -1))


class FeedForward(nn.Module):
    """Position-wise feed-forward."""

    def __init__(self, width: int, ffn_width: int, activation: nn.Module, dropout: float = 0.0, bias: bool = True):
        super().__init__()
        self.expand = nn.Linear(width, ffn_width, bias)
        self.activation = activation
        self.dropout = Dropout(dropout)
        self.contract = nn.Linear(ffn_width, width, bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.contract(self.dropout(self.activation(self.expand(x))))


class GatedFeedForward(nn.Module):
    """Gated feed-forward (GLU, arXiv 2002.05202): act(gate(x)) * gated(x)."""

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


NORM_PLACES = {"pre": (_apply, _skip), "post": (_skip, _apply)}  # before and after a residual step


class Layer(nn.Module):
    """Attention, then feed-forward; each a residual step with a norm before (pre, GPT-2) or after it (post, BERT)."""

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
        self, x: Tensor, route: Route, past: KeyValue | None = None, bias: PositionBias = None, keep: bool = True
    ) -> tuple[Tensor, KeyValue | None]:
        """Return the hidden states (B, T, W) after this layer, and all keys and values read, past ones first.

        In training these are not needed: with keep=False they may be None.
        """
        if not keep and past is None and self.is_fused(x, bias):
            return self.feed_fused(*self.attend_fused(x, route)), None
        x, read = self.attend(x, route, past, bias)
        return self.feed(x), read

    def forward_at(self, where: Tensor, x: Tensor, route: Route, bias: PositionBias = None) -> Tensor:
        """Return the hidden states (M, W) where `where` (B, T) is True; as far as possible only those are computed."""
        if self.is_fused(x, bias):
            return self.feed_fused(*self.attend_fused(x, route, where))
        attention = self.attention
        if bias is not None or not attention.reads_chosen(x, route):
            return self.feed(self.attend(x, route, None, bias)[0][where])
        h = self.enter(self.attention_norm, x)
        q, (k, v) = attention.split(attention.query(h[where])), attention.keys_values(h)
        read = attend_chosen(q, k, v, route, where, attention.dropout if self.training else 0.0)
        return self.feed(self._join(x[where], attention.output(read.flatten(-2))))

    def attend(
        self, x: Tensor, route: Route, past: KeyValue | None = None, bias: PositionBias = None
    ) -> tuple[Tensor, KeyValue]:
        h = self.enter(self.attention_norm, x)
        new = self.attention.keys_values(h, bias)
        read = new if past is None else past.append(new)
        return self._join(x, self.attention(h, read, route, bias)), read

    def query_stream(self, x: Tensor, route: Route, past: Readable | None, bias: PositionBias = None) -> Tensor:
        """Return hidden states of tokens that read only the past, never themselves or each other."""
        h = self.enter(self.attention_norm, x)
        past = self.attention.keys_values(h[:, :0]) if past is None else past  # nothing to read
        return self.feed(self._join(x, self.attention(h, past, route, bias)))

    def _join(self, x: Tensor, step: Tensor) -> Tensor:
        return self.leave(self.attention_norm, x + self.dropout(step))

    def feed(self, x: Tensor) -> Tensor:
        h = self.enter(self.feed_forward_norm, x)
        return self.leave(self.feed_forward_norm, x + self.dropout(self.feed_forward(h)))

    # ---- in training, with compiled kernels: see fused.py ------------------------------------------------------

    def is_fused(self, x: Tensor, bias: PositionBias) -> bool:
        """Whether these hidden states are computed by fused.py: a post-norm layer without relative positions."""
        attention, feed = self.attention, self.feed_forward
        if not self.training or bias is not None or self.leave is not _apply or not fused.suits(x):
            return False
        if type(attention) is not Attention or not attention.is_plain or type(feed) is not FeedForward:
            return False
        return not feed.expand.out_features % LANES and fused.suits_modules(
            attention.query, attention.key, attention.value, attention.output, feed.expand, feed.activation,
            feed.contract, self.attention_norm, self.feed_forward_norm,
        )  # fmt: skip

    def attend_fused(self, x: Tensor, route: Route, where: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """`attend`: the hidden states in fp32 and in the dtype of products. With `where`, only those, (M, W)."""
        attention, p = self.attention, self.attention.dropout
        h = x.to(fused.product_dtype(x))
        if where is None or not attention.reads_chosen(x, route):
            q, k, v = map(attention.split, fused.project(h, attention.query, attention.key, attention.value))
            read = attend(q, k, v, route, p).flatten(-2)
            if where is not None:
                x, read = x[where], read[where]
        else:
            tokens = where.flatten().nonzero()[:, 0]
            x, chosen = (rows.flatten(0, 1).index_select(0, tokens) for rows in (x, h))
            (q,) = map(attention.split, fused.project(chosen, attention.query))
            k, v = map(attention.split, fused.project(h, attention.key, attention.value))
            read = attend_chosen(q, k, v, route, where, p).flatten(-2)
        return self.join_fused(x, read, attention.output, self.attention_norm)

    def join_fused(self, x: Tensor, read: Tensor, output: nn.Linear, norm: nn.Module) -> tuple[Tensor, Tensor]:
        """The residual step of what attention has read."""
        assert isinstance(norm, nn.LayerNorm)
        return fused.join(x, fused.linear(read, output.weight), output.bias, norm, self.dropout.p)

    def feed_fused(self, x: Tensor, h: Tensor) -> Tensor:
        feed, norm = self.feed_forward, self.feed_forward_norm
        assert isinstance(feed, FeedForward) and isinstance(norm, nn.LayerNorm)
        step = fused.feed_forward(h, feed.expand, feed.activation, feed.contract, feed.dropout.p)
        return fused.join(x, step, feed.contract.bias, norm, self.dropout.p)[0]

    def attention_weights(self, x: Tensor, route: Route, bias: PositionBias = None) -> Tensor:
        """The attention weights (B, H, T, T) this layer gives to x, for pictures."""
        h = self.enter(self.attention_norm, x)
        return self.attention.attention_weights(h, self.attention.keys_values(h, bias), route, bias)


class CrossLayer(nn.Module):
    """A decoder layer: between its two steps, cross-attention over the keys and values in `memory`."""

    def __init__(self, layer: Layer, cross: Attention, norm: nn.Module):
        super().__init__()
        self.layer = layer
        self.cross = cross
        self.cross_norm = norm

    def forward(
        self, x: Tensor, route: Route, past: KeyValue | None, memory: Readable, memory_route: Route,
        bias: PositionBias = None, memory_bias: Tensor | None = None, keep: bool = True,
    ) -> tuple[Tensor, KeyValue | None]:  # fmt: skip
        if not keep and past is None and self.is_fused(x, bias):
            return self._run_fused(x, route, memory, memory_route, memory_bias), None
        x, read = self.attend(x, route, past, memory, memory_route, bias, memory_bias)
        return self.feed(x), read

    def forward_at(
        self, where: Tensor, x: Tensor, route: Route, memory: Readable, memory_route: Route, bias: PositionBias = None
    ) -> Tensor:
        """Return the hidden states (M, W) where `where` (B, T) is True; the feed-forward computes only those."""
        if self.is_fused(x, bias) and bool(where.all()):
            return self._run_fused(x, route, memory, memory_route)[where]
        return self.feed(self.attend(x, route, None, memory, memory_route, bias)[0][where])

    def is_fused(self, x: Tensor, bias: PositionBias) -> bool:
        cross = self.cross
        plain = type(cross) is Attention and cross.is_plain
        return (
            plain and self.layer.is_fused(x, bias) and fused.suits_modules(cross.query, cross.output, self.cross_norm)
        )

    def _run_fused(
        self, x: Tensor, route: Route, memory: Readable, memory_route: Route, memory_bias: Tensor | None = None
    ) -> Tensor:
        x, h = self.layer.attend_fused(x, route)
        (q,) = map(self.cross.split, fused.project(h, self.cross.query))
        read = memory.attend(q, memory_route, self.cross.dropout, memory_bias).flatten(-2)
        return self.layer.feed_fused(*self.layer.join_fused(x, read, self.cross.output, self.cross_norm))

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

    def attention_weights(self, x: Tensor, route: Route, bias: PositionBias = None) -> Tensor:
        """The attention weights (B, H, T, T) of x among its own tokens, for pictures."""
        return self.layer.attention_weights(x, route, bias)

    def cross_weights(
        self, x: Tensor, route: Route, memory: KeyValue, memory_route: Route, bias: PositionBias = None
    ) -> Tensor:
        """The attention weights (B, H, T, S) that x gives to the source, for pictures."""
        x, _ = self.layer.attend(x, route, None, bias)
        return self.cross.attention_weights(self.layer.enter(self.cross_norm, x), memory, memory_route)
