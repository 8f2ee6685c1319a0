"""The one stack of layers: BERT, GPT-2, XLNet, T5 and the Transformer of 2017 differ only in how it is built."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from allmask.config import Config
from allmask.mask import Mask, expect_mask
from allmask.nn.attention import Attention, Readable, Route
from allmask.nn.cache import AnyCache, BeamCache, Cache, Memory
from allmask.nn.dropout import Dropout
from allmask.nn.layers import (
    ACTIVATIONS,
    NORMS,
    TOKENWISE,
    CrossLayer,
    Embedding,
    FeedForward,
    GatedFeedForward,
    Layer,
    NoEmbedding,
    OffsetEmbedding,
    OneSegment,
    SegmentsOfTask,
    Sinusoidal,
)
from allmask.nn.relative_attention import (
    ClippedAttention,
    ClippedEncoder,
    DistanceEncoder,
    NoPositionBias,
    PositionBias,
    RelativePositionBias,
    RelativeScores,
    RotaryEncoder,
    RotaryPositions,
)


class WholeStack(Protocol):
    """Computes all layers of a stack at once, in inference."""

    def run(self, x: Tensor, route: Route) -> Tensor | None:
        """The hidden states (B, T, W) after the last layer; None if it cannot for this route."""
        ...

    def takes_texts(self, lengths: np.ndarray) -> bool:
        """Whether `run_texts` can compute texts of these lengths."""
        ...

    def run_texts(self, x: Tensor, lengths: np.ndarray, causal: bool) -> Tensor:
        """The hidden states (N, W) of texts one after another; a token reads all of its text, or all before it."""
        ...

    def read(self, x: Tensor, route: Route, texts: Tensor) -> tuple[Tensor, Tensor, Tensor] | None:
        """Of a packed row, see `int8.encode`: the hidden states of last tokens, and all keys and values.

        `texts` (T,) is the number of the text to which a token belongs; each is one document.
        """
        ...


Source = tuple[()] | tuple[Readable, Route]  # what a decoder layer reads by cross-attention; () in other stacks


class SharedLayers(nn.Module):
    """One layer, used `depth` times (ALBERT); behaves like a list of that many layers."""

    def __init__(self, layer: nn.Module, depth: int):
        super().__init__()
        self.add_module("0", layer)
        self.depth = depth

    def __len__(self) -> int:
        return self.depth

    def __iter__(self) -> Iterator[nn.Module]:
        return iter(self[:])

    def __getitem__(self, index: int | slice) -> Any:
        return ([self.get_submodule("0")] * self.depth)[index]


class Stack(nn.Module):
    """Layers and the norm after them: embedded tokens and a mask in, hidden states out."""

    layers: Any  # a ModuleList of Layer, or of CrossLayer in a decoder; or SharedLayers
    whole: WholeStack | None = None  # of a frozen model
    recompute = False  # activation checkpointing: save only the input of each layer, recompute the rest in the backward

    def __init__(self, config: Config, cross: bool = False, embedding: Embedding | None = None):
        super().__init__()
        self.config = config
        self.tokenwise = config.norm in TOKENWISE
        if embedding is not None:  # first, so that its parameters come first
            self.embedding = embedding
        depth = config.decoder_layers if cross else config.layers
        if config.shared_layers:
            self.layers = SharedLayers(_layer(config, cross), depth)
        else:
            self.layers = nn.ModuleList(_layer(config, cross) for _ in range(depth))
        self.norm = _norm(config) if config.norm_place == "pre" else nn.Identity()
        if config.position_kind == "shifted":  # XLNet
            self.norm = Dropout(config.dropout)
        self.relative = _relative(config, both_ways=not cross and config.own_mask == "bidirectional")

    def run(self, x: Tensor, route: Route, sources: Sequence[Source] | None = None) -> Tensor:
        """Return the hidden states (B, T, W) of embedded tokens; a decoder has one source per layer."""
        if self.whole is not None and (hidden := self.whole.run(x, route)) is not None:
            return self.norm(hidden)
        bias = self.relative(route)
        for layer, source in zip(self.layers, sources or self._no_sources, strict=True):
            x = self._run_layer(layer, x, route, bias, source)
        return self.norm(x)

    def run_at(self, where: Tensor, x: Tensor, route: Route, sources: Sequence[Source] | None = None) -> Tensor:
        """Return the hidden states (M, W) where `where` (B, T) is True; the last layer computes only those."""
        bias, sources = self.relative(route), sources or self._no_sources
        for layer, source in zip(self.layers[:-1], sources[:-1], strict=True):
            x = self._run_layer(layer, x, route, bias, source)
        return self.norm(self.layers[-1].forward_at(where, x, route, *sources[-1], bias=bias))

    def extend(
        self, x: Tensor, mask: Mask, cache: AnyCache, memory: Memory | None = None, segments: Tensor | None = None
    ) -> tuple[Tensor, AnyCache]:
        """Return the hidden states of embedded tokens that follow those in the cache, and the extended cache."""
        keys, key_segments = cache.extend(mask), _append(cache.segments, segments)
        route = Route.find(mask) if cache.mask is None else Route.find(mask, keys)
        route = _with_segments(route, segments, key_segments)
        pasts = cache.layers or (None,) * len(self.layers)
        sources = self._no_sources if memory is None else memory.seen_by(mask)
        bias, reads = self.relative(route), []
        for layer, past, source in zip(self.layers, pasts, sources, strict=True):
            x, read = layer(x, route, past, *source, bias=bias)
            reads.append(read)
        return self.norm(x), replace(cache, mask=keys, layers=tuple(reads), segments=key_segments)

    def run_weights(
        self, x: Tensor, route: Route, sources: Sequence[Source] | None = None
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Return the attention weights of every layer, for pictures: of its own tokens, and of a decoder's sources."""
        bias, whole = self.relative(route), self.relative.whole(route)
        own, cross = [], []
        for layer, source in zip(self.layers, sources or self._no_sources, strict=True):
            own.append(layer.attention_weights(x, route, whole))
            if source:
                cross.append(layer.cross_weights(x, route, *source, bias=bias))
            x, _ = layer(x, route, None, *source, bias=bias)
        return own, cross

    @property
    def _no_sources(self) -> Sequence[Source]:
        return [()] * len(self.layers)

    def _run_layer(self, layer: nn.Module, x: Tensor, route: Route, bias: PositionBias, source: Source) -> Tensor:
        def run(x: Tensor) -> Tensor:
            return layer(x, route, None, *source, bias=bias, keep=False)[0]

        if not (self.recompute and torch.is_grad_enabled()):
            return run(x)
        return checkpoint(run, x, use_reentrant=False)  # type: ignore[return-value]


class Transformer(Stack):
    """Embeddings and a stack of layers: ids and a mask in, hidden states out."""

    @property
    def whole_layers(self) -> Sequence[nn.Module]:
        """The layers that are always called as a whole; `forward_at` calls the parts of the last one."""
        return [] if self.config.shared_layers else self.layers[:-1]

    def __init__(self, config: Config):
        super().__init__(config, embedding=build_embedding(config))

    def forward(
        self, ids: Tensor, mask: Mask, positions: Tensor | None = None, segments: Tensor | None = None
    ) -> Tensor:
        """Return hidden states (B, T, W). Padding is not computed: its hidden states are zeros."""
        mask = with_positions(mask, positions)
        route = self._route(ids, mask, segments)
        if route.is_regular or mask.matrix is not None or not self.tokenwise:
            return self.run(self.embed(ids, mask, positions, segments), route)
        flat, index = mask.flatten()
        row = gather_row(index, ids, flat, positions, segments)
        return scatter_row(self.run(self.embed(*row), self._route(row[0], flat, row[3])), index, ids)

    def forward_texts(self, ids: Tensor, lengths: np.ndarray) -> Tensor | None:
        """Return the hidden states (N, W) of texts one after another, `ids` (N,), under the model's own mask.

        They have the same bits as those of a packed mask, which is not made here. None if the layers are not computed
        at once, or not for these lengths.
        """
        if self.whole is None or ids.device.type != "cpu" or not self.whole.takes_texts(lengths):
            return None
        positions = torch.from_numpy(np.arange(len(ids)) - (lengths.cumsum() - lengths).repeat(lengths))
        x = self.embedding(ids[None], positions[None], torch.zeros_like(ids)[None])[0]
        return self.norm(self.whole.run_texts(x, lengths, self.config.own_mask == "causal"))

    def forward_at(self, where: Tensor, ids: Tensor, mask: Mask, segments: Tensor | None = None) -> Tensor:
        """Return the hidden states (M, W) where `where` (B, T) is True; the last feed-forward computes only those."""
        route = self._route(ids, mask, segments)
        if not route.is_regular or not self.tokenwise:
            return self(ids, mask, segments=segments)[where]
        return self.run_at(where, self.embed(ids, mask, None, segments), route)

    def step(
        self, ids: Tensor, mask: Mask, cache: AnyCache, positions: Tensor | None = None, segments: Tensor | None = None
    ) -> tuple[Tensor, AnyCache]:
        """Return the hidden states of tokens that follow those in the cache, and the extended cache."""
        x = self.embed(ids, mask, positions, segments)
        return self.extend(x, with_positions(mask, positions), cache, segments=self._compared_segments(ids, segments))

    def read(self, ids: Tensor, mask: Mask, segments: Tensor | None = None) -> tuple[Tensor, BeamCache]:
        """Return the hidden states (B, T, W) of texts, zeros at padding, and a cache whose rows can be selected."""
        flat, index = expect_mask(mask).flatten()
        row = gather_row(index, ids, flat, None, segments)
        hidden, cache = self.extend(self.embed(*row), flat, Cache(), segments=self._compared_segments(row[0], row[3]))
        return scatter_row(hidden, index, ids), cache.branch(mask, index)

    def query_stream(
        self, ids: Tensor, mask: Mask, cache: Cache | BeamCache,
        positions: Tensor | None = None, segments: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """Return hidden states of the query stream (XLNet, arXiv 1906.08237), which reads older tokens in the cache.

        Its tokens never read themselves or each other and are not cached. Their embedding is a learned vector, or that
        of the ids, such as [MASK]. `step` over the content, then `query_stream`, is two-stream attention.
        """
        x = embed_tokens(self.embedding.embed_query, ids, mask, positions, segments)
        mask, own = with_positions(mask, positions), self._compared_segments(ids, segments)
        route = Route.find(mask, mask[:, :0] if cache.mask is None else cache.mask, strict=True)
        route = _with_segments(route, own, _append(cache.segments, None if own is None else own[:, :0]))
        bias = self.relative(route)
        for layer, past in zip(self.layers, cache.layers or [None] * len(self.layers), strict=True):
            x = layer.query_stream(x, route, past, bias)
        return self.norm(x)

    def weights(self, ids: Tensor, mask: Mask, positions: Tensor | None = None, segments: Tensor | None = None):
        """Return the attention weights of every layer, (B, H, T, T) each, for pictures."""
        mask = with_positions(mask, positions)
        return self.run_weights(self.embed(ids, mask, positions, segments), self._route(ids, mask, segments))[0]

    def embed(self, ids: Tensor, mask: Mask, positions: Tensor | None, segments: Tensor | None) -> Tensor:
        return embed_tokens(self.embedding, ids, mask, positions, segments)

    def _route(self, ids: Tensor, mask: Mask, segments: Tensor | None) -> Route:
        segments = self._compared_segments(ids, segments)
        return _with_segments(Route.find(mask), segments, segments)

    def _compared_segments(self, ids: Tensor, segments: Tensor | None) -> Tensor | None:
        """The segment of each token, if attention compares segments; else None."""
        if not isinstance(self.relative, DistanceEncoder):
            return None
        return torch.zeros_like(ids) if segments is None else segments.expand(ids.shape)


# ---- rows --------------------------------------------------------------------------------------------------

Row = tuple[Tensor, Mask, Tensor | None, Tensor | None]  # ids, mask, positions, segments


def gather_row(index: Tensor, ids: Tensor, flat: Mask, positions: Tensor | None, segments: Tensor | None) -> Row:
    """Gather the tokens of a flattened mask as one row without padding."""
    positions, segments = (
        None if x is None else x.expand(ids.shape).flatten()[index][None] for x in (positions, segments)
    )
    return ids.flatten()[index][None], flat, positions, segments


def scatter_row(hidden: Tensor, index: Tensor, like: Tensor) -> Tensor:
    """Scatter hidden states (1, N, W) to where their tokens were in `like` (B, T); zeros elsewhere."""
    padded = hidden.new_zeros(like.numel(), hidden.shape[-1]).index_copy(0, index, hidden[0])
    return padded.unflatten(0, like.shape)


def with_positions(mask: Mask, positions: Tensor | None) -> Mask:
    """The mask with these positions, unless it has a window or a matrix, which refer to its own positions."""
    if positions is None or expect_mask(mask).window is not None or mask.matrix is not None:
        return mask
    return replace(mask, position=positions.expand(mask.shape))


def _with_segments(route: Route, queries: Tensor | None, keys: Tensor | None) -> Route:
    return route if queries is None or keys is None else replace(route, segments=(queries, keys))


def _append(old: Tensor | None, new: Tensor | None) -> Tensor | None:
    return new if old is None or new is None else torch.cat([old, new], dim=1)


def embed_tokens(
    embed: Callable[[Tensor, Tensor, Tensor], Tensor], ids: Tensor, mask: Mask, positions: Tensor | None,
    segments: Tensor | None,
) -> Tensor:  # fmt: skip
    positions = expect_mask(mask).position if positions is None else positions
    segments = torch.zeros_like(ids) if segments is None else segments
    return embed(ids, positions, segments)


# ---- building ----------------------------------------------------------------------------------------------


def _norm(config: Config, width: int = 0) -> nn.Module:
    return NORMS[config.norm](width or config.width, eps=config.norm_eps)


def build_embedding(config: Config) -> Embedding:
    width = config.embedding_width or config.width
    if config.position_kind == "learned":
        offset, length = config.position_offset, config.max_positions
        positions = OffsetEmbedding(offset, length, width) if offset else nn.Embedding(length, width)
    elif config.position_kind == "sinusoidal":
        positions = Sinusoidal(config.max_positions, width)
    else:
        positions = NoEmbedding()
    norm = _norm(config, width) if config.embedding_norm else nn.Identity()
    scale = math.sqrt(width) if config.embedding_scaled else 1.0
    project = nn.Linear(width, config.width) if config.embedding_width else None
    shifted = config.position_kind == "shifted"
    return Embedding(
        config.vocab_size, width, positions, _segments(config, width), norm, config.dropout, scale, shifted, project
    )


def _segments(config: Config, width: int) -> nn.Module:
    if config.position_kind == "shifted" or not config.segments:  # shifted: attention compares segments
        return NoEmbedding()
    if config.task_types:
        return SegmentsOfTask(config.segments, width, config.task_types)
    return OneSegment(1, width) if config.segments == 1 else nn.Embedding(config.segments, width)


def _relative(config: Config, both_ways: bool) -> Any:
    head_width = config.attention_width // config.heads
    if config.position_kind == "rotary":
        return RotaryEncoder(head_width)
    if config.position_kind == "clipped":
        return ClippedEncoder(head_width, config.clamp)
    if config.position_kind == "shifted":
        return DistanceEncoder(config.width, config.clamp, config.dropout)
    if config.position_kind != "relative":
        return NoPositionBias()
    return RelativePositionBias(config.heads, config.buckets, config.bucket_distance, both_ways)


def _attention(config: Config) -> Attention:
    shifted, relate = config.position_kind == "shifted", None
    if shifted:
        relate = RelativeScores(config.width, config.heads, config.attention_width // config.heads)
    elif config.position_kind == "rotary":
        relate = RotaryPositions()
    numbers = (config.attention_dropout, config.bias and not shifted, config.head_width, config.scores_scaled)
    make = ClippedAttention if config.position_kind == "clipped" else Attention
    return make(config.width, config.heads, *numbers, relate)


def _layer(config: Config, cross: bool) -> Layer | CrossLayer:
    make = GatedFeedForward if config.gated else FeedForward
    activation = ACTIVATIONS[config.activation]()
    feed_forward = make(config.width, config.ffn_width, activation, config.ffn_dropout, config.bias)
    norms = (_norm(config), _norm(config))
    layer = Layer(_attention(config), feed_forward, norms, config.norm_place, config.dropout)
    return CrossLayer(layer, _attention(config), _norm(config)) if cross else layer
