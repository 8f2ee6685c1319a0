"""The one stack. BERT, GPT-2, XLNet, T5 and the model of 2017 differ in what is built, not in how it runs."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from allmask.attention import Attention, KeyValue, Readable, Route
from allmask.branches import Branches, select_branches
from allmask.config import Config
from allmask.distances import ByDistance, Distances
from allmask.dropout import Dropout
from allmask.errors import UsageError
from allmask.layers import (
    ACTIVATIONS,
    NORMS,
    TOKENWISE,
    CrossLayer,
    Embedding,
    FeedForward,
    GatedFeedForward,
    Layer,
    NoBias,
    Nothing,
    RelativePositions,
    Sinusoidal,
    Told,
)
from allmask.masks import Mask


@dataclass(frozen=True)
class Cache:
    """What a stack remembers of the tokens it has read. `Cache()` is the beginning; each call returns the next."""

    mask: Mask | None = None
    layers: tuple[KeyValue, ...] = ()
    segments: Tensor | None = None  # (B, K), where attention compares them

    def extend(self, new: Mask) -> Mask:
        """The mask of all keys, old and new. Tokens that an earlier row should have seen cannot come later."""
        if self.mask is None:
            return new
        if not new.may_follow(self.mask):
            raise UsageError(
                "cache: a new token is visible to one already read, so what was remembered is no longer true",
                "append tokens of a higher order than all before, or start again with Cache()",
            )
        return self.mask.append(new)

    def branch(self, mask: Mask, index: Tensor) -> BranchedCache:
        """Rows that go on from each text of the flat row read here; it was made by `mask.flatten()` with this index."""
        layers = tuple(Branches.begin(layer, mask.shape, index) for layer in self.layers)
        if self.segments is None:
            return BranchedCache(mask, layers)
        segments = torch.zeros_like(mask.order).flatten().index_copy(0, index, self.segments[0])
        return BranchedCache(mask, layers, segments.view(mask.shape))


@dataclass(frozen=True)
class BranchedCache:
    """The same of rows that go on from texts, several from one, as in a beam search; the texts are kept once."""

    mask: Mask  # (R, K + T): a row's text, then its own tokens
    layers: tuple[Branches, ...]
    segments: Tensor | None = None  # (R, K + T)

    def extend(self, new: Mask) -> Mask:
        return Cache(self.mask).extend(new)

    def select(self, rows: Tensor) -> BranchedCache:
        """Some of the rows, in any order, repeated or dropped. Their texts are shared, not copied."""
        segments = None if self.segments is None else self.segments[rows]
        return BranchedCache(self.mask[rows], select_branches(self.layers, rows), segments)


AnyCache = TypeVar("AnyCache", Cache, BranchedCache)
Seen = Sequence[tuple[()] | tuple[Readable, Route]]  # what each layer of a decoder reads besides its own row


class Stack(nn.Module):
    """Layers and the norm after them: embedded tokens and a mask in, hidden states out."""

    layers: Any  # a ModuleList of Layer, or of CrossLayer in a decoder
    recompute = False  # in training, remember what goes into a layer only; compute the rest again on the way back

    def __init__(self, config: Config, cross: bool = False, embedding: Embedding | None = None):
        super().__init__()
        self.config = config
        self.tokenwise = config.norm in TOKENWISE
        if embedding is not None:  # the first of its parts, as its parameters are the first
            self.embedding = embedding
        depth = config.decoder_layers if cross else config.layers
        self.layers = nn.ModuleList(_cross_layer(config) if cross else _layer(config) for _ in range(depth))
        self.norm = _last(config)
        self.relative = _relative(config, both_ways=not cross and config.own_mask == "bidirectional")

    def run(self, x: Tensor, route: Route, seen: Seen | None = None) -> Tensor:
        bias = self.relative(route)
        for layer, other in zip(self.layers, seen or self._nothing, strict=True):
            x = self._through(layer, x, route, bias, other)
        return self.norm(x)

    def run_at(self, where: Tensor, x: Tensor, route: Route, seen: Seen | None = None) -> Tensor:
        """Hidden states (M, W) where `where` (B, T) is True; the last feed-forward is spent on no other position."""
        bias, seen = self.relative(route), seen or self._nothing
        for layer, other in zip(self.layers[:-1], seen[:-1], strict=True):
            x = self._through(layer, x, route, bias, other)
        x, _ = self.layers[-1].attend(x, route, None, *seen[-1], bias=bias)
        return self.norm(self.layers[-1].feed(x[where]))

    def go_on(
        self, x: Tensor, mask: Mask, cache: AnyCache, memory: Memory | None = None, segments: Tensor | None = None
    ) -> tuple[Tensor, AnyCache]:
        """The hidden states of new tokens after those in the cache, and the cache that holds them too."""
        keys, kinds = cache.extend(mask), _joined(cache.segments, segments)
        route = _compared(Route.find(mask) if cache.mask is None else Route.find(mask, keys), segments, kinds)
        pasts = cache.layers or (None,) * len(self.layers)
        seen = self._nothing if memory is None else memory.seen_by(mask)
        bias, reads = self.relative(route), []
        for layer, past, other in zip(self.layers, pasts, seen, strict=True):
            x, read = layer(x, route, past, *other, bias=bias)
            reads.append(read)
        return self.norm(x), replace(cache, mask=keys, layers=tuple(reads), segments=kinds)

    @property
    def _nothing(self) -> Seen:
        return [()] * len(self.layers)

    def _through(
        self, layer: nn.Module, x: Tensor, route: Route, bias: Told, other: tuple[()] | tuple[Readable, Route]
    ) -> Tensor:
        if not (self.recompute and torch.is_grad_enabled()):
            return layer(x, route, None, *other, bias=bias)[0]
        passed = checkpoint(lambda x: layer(x, route, None, *other, bias=bias)[0], x, use_reentrant=False)
        assert isinstance(passed, Tensor)
        return passed


class Transformer(Stack):
    """Embeddings and a stack of layers: ids and a mask in, hidden states out."""

    @property
    def whole_layers(self) -> Sequence[nn.Module]:
        """Those that are always called as one; of the last, `at` feeds forward only some positions."""
        return self.layers[:-1]

    def __init__(self, config: Config):
        super().__init__(config, embedding=_embedding(config))

    def forward(
        self, ids: Tensor, mask: Mask, positions: Tensor | None = None, segments: Tensor | None = None
    ) -> Tensor:
        """Hidden states (B, T, W). Padding is not computed: its rows are zeros."""
        mask = _standing(mask, positions)
        route = self._route(ids, mask, segments)
        if route.is_regular or mask.matrix is not None or not self.tokenwise:
            return self.run(self.embed(ids, mask, positions, segments), route)
        flat, index = mask.flatten()
        row = _gathered(index, ids, flat, positions, segments)
        return _scattered(self.run(self.embed(*row), self._route(row[0], flat, row[3])), index, ids)

    def at(self, where: Tensor, ids: Tensor, mask: Mask, segments: Tensor | None = None) -> Tensor:
        """Hidden states (M, W) where `where` (B, T) is True; the last feed-forward is spent on no other position."""
        route = self._route(ids, mask, segments)
        if not route.is_regular or not self.tokenwise:
            return self(ids, mask, segments=segments)[where]
        return self.run_at(where, self.embed(ids, mask, None, segments), route)

    def step(
        self, ids: Tensor, mask: Mask, cache: AnyCache, positions: Tensor | None = None, segments: Tensor | None = None
    ) -> tuple[Tensor, AnyCache]:
        """The hidden states of new tokens after those in the cache, and the cache that holds them too."""
        x, kinds = self.embed(ids, mask, positions, segments), self._kinds(ids, segments)
        return self.go_on(x, _standing(mask, positions), cache, segments=kinds)

    def read(self, ids: Tensor, mask: Mask, segments: Tensor | None = None) -> tuple[Tensor, BranchedCache]:
        """Texts read without padding: hidden states (B, T, W), zeros at padding, and a cache to branch from."""
        flat, index = mask.flatten()
        row = _gathered(index, ids, flat, None, segments)
        hidden, cache = self.go_on(self.embed(*row), flat, Cache(), segments=self._kinds(row[0], row[3]))
        return _scattered(hidden, index, ids), cache.branch(mask, index)

    def peek(
        self, ids: Tensor, mask: Mask, cache: Cache | BranchedCache,
        positions: Tensor | None = None, segments: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """The query stream (XLNet, arXiv 1906.08237): hidden states of tokens that read what is older in the cache.

        They never read themselves or each other and are not remembered, so what they embed gives no answer away: a
        [MASK], or a vector learnt for that. `step` over the content and then `peek` is two-stream attention.
        """
        x = _embedded(self.embedding.ask, ids, mask, positions, segments)
        mask, kinds = _standing(mask, positions), self._kinds(ids, segments)
        route = Route.find(mask, mask[:, :0] if cache.mask is None else cache.mask, strict=True)
        route = _compared(route, kinds, _joined(cache.segments, None if kinds is None else kinds[:, :0]))
        nothing, bias = (None,) * len(self.layers), self.relative(route)
        for layer, past in zip(self.layers, cache.layers or nothing, strict=True):
            x = layer.peek(x, route, past, bias)
        return self.norm(x)

    def weights(self, ids: Tensor, mask: Mask, positions: Tensor | None = None, segments: Tensor | None = None):
        """The attention weights of every layer, (B, H, T, T) each, for pictures."""
        mask = _standing(mask, positions)
        x, route, weights = self.embed(ids, mask, positions, segments), self._route(ids, mask, segments), []
        bias, whole = self.relative(route), self.relative.whole(route)
        for layer in self.layers:
            weights.append(layer.weigh(x, route, whole))
            x, _ = layer(x, route, bias=bias)
        return weights

    def embed(self, ids: Tensor, mask: Mask, positions: Tensor | None, segments: Tensor | None) -> Tensor:
        return _embedded(self.embedding, ids, mask, positions, segments)

    def _route(self, ids: Tensor, mask: Mask, segments: Tensor | None) -> Route:
        kinds = self._kinds(ids, segments)
        return _compared(Route.find(mask), kinds, kinds)

    def _kinds(self, ids: Tensor, segments: Tensor | None) -> Tensor | None:
        """The segment of each token, where attention compares them: None elsewhere."""
        if not isinstance(self.relative, Distances):
            return None
        return torch.zeros_like(ids) if segments is None else segments.expand(ids.shape)


# ---- two stacks --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Memory:
    """A text as a decoder sees it: keys and values for each of its layers, made once, and the mask of its tokens."""

    mask: Mask
    layers: tuple[Any, ...]  # KeyValue each, or Branches

    def seen_by(self, decoder: Mask) -> list[tuple[Readable, Route]]:
        """Cross-attention is `decoder.visible(encoder)`; a window or matrix speaks of the decoder's own text only."""
        route = Route.find(replace(decoder, window=None, matrix=None), self.mask)
        return [(layer, route) for layer in self.layers]

    def branch(self) -> Memory:
        return Memory(self.mask, tuple(Branches.of(layer) for layer in self.layers))

    def select(self, rows: Tensor) -> Memory:
        return Memory(self.mask[rows], select_branches(self.layers, rows))


@dataclass(frozen=True)
class PairCache:
    """What an encoder–decoder remembers: the source, read once, as its decoder sees it, and the target so far."""

    memory: Memory
    own: Any  # Cache or BranchedCache, of the decoder

    @property
    def mask(self) -> Mask:
        """Of the target."""
        return self.own.mask

    def branch(self) -> PairCache:
        """For rows that go on, several from one text, as in a beam search; what is there is kept once."""
        own = BranchedCache(self.own.mask, tuple(Branches.of(layer) for layer in self.own.layers))
        return PairCache(self.memory.branch(), own)

    def select(self, rows: Tensor) -> PairCache:
        return PairCache(self.memory.select(rows), self.own.select(rows))


class EncoderDecoder(nn.Module):
    """Two stacks over one embedding (arXiv 1706.03762): the prefix order with two sets of weights.

    What is known first in a text, its source, is read by the encoder; all that comes later, its target, by the decoder,
    which sees the source through cross-attention, `decoder.visible(encoder)`:

               你   吃  </s>  <s>  白   鸡
        order   0    0    0     1   2    3
        place   0    1    2     0   1    2       see Mask.encoder_decoder

    So its rows are those of any model: padded, packed, cached. Hidden states are those of either stack.
    """

    def __init__(self, config: Config):
        super().__init__()
        self.config = config
        self.tokenwise = config.norm in TOKENWISE
        self.embedding = _embedding(config)
        self.encoder = Stack(config)
        self.decoder = Stack(config, cross=True)
        self.dropout = Dropout(config.inner_dropout)  # on what leaves a stack

    @property
    def whole_layers(self) -> Sequence[nn.Module]:
        """Those that are always called as one: the decoder's are asked first how they remember the source."""
        return self.encoder.layers

    @property
    def recompute(self) -> bool:
        return self.encoder.recompute

    @recompute.setter
    def recompute(self, on: bool) -> None:
        self.encoder.recompute = self.decoder.recompute = on

    def forward(
        self, ids: Tensor, mask: Mask, positions: Tensor | None = None, segments: Tensor | None = None
    ) -> Tensor:
        """Hidden states (B, T, W). Padding is not computed: its rows are zeros."""
        flat, index = _standing(mask, positions).flatten()
        row = _gathered(index, ids, flat, positions, segments)
        source = flat.first_known[0]
        x, memory = self._encode(row, source)
        written = flat[:, ~source]
        hidden = torch.empty_like(x)
        hidden[:, source] = memory
        if written.shape[1]:
            seen = self.remember(memory, flat[:, source]).seen_by(written)
            hidden[:, ~source] = self.dropout(self.decoder.run(x[:, ~source], Route.find(written), seen))
        return _scattered(hidden, index, ids)

    def at(self, where: Tensor, ids: Tensor, mask: Mask, segments: Tensor | None = None) -> Tensor:
        """Hidden states (M, W) where `where` (B, T) is True; the last feed-forward is spent on no other position."""
        source = mask.first_known
        is_flat = len(mask) == 1 and Route.find(mask).is_regular
        if not is_flat or bool(where[source].any()) or bool(source.all()):
            return self(ids, mask, segments=segments)[where]
        x, memory = self._encode((ids, mask, None, segments), source[0])
        target = ~source[0]
        written = mask[:, target]
        seen = self.remember(memory, mask[:, source[0]]).seen_by(written)
        return self.dropout(self.decoder.run_at(where[:, target], x[:, target], Route.find(written), seen))

    def _encode(self, row: Row, source: Tensor) -> tuple[Tensor, Tensor]:
        """All tokens (1, N) embedded, and the source as the encoder leaves it."""
        x = _embedded(self.embedding, *row)
        return x, self.dropout(self.encoder.run(x[:, source], Route.find(row[1][:, source])))

    def remember(self, hidden: Tensor, mask: Mask) -> Memory:
        """What the decoder reads in hidden states of the encoder."""
        return Memory(mask, tuple(layer.cross.remember(hidden) for layer in self.decoder.layers))

    def step(
        self, ids: Tensor, mask: Mask, cache: Cache | PairCache,
        positions: Tensor | None = None, segments: Tensor | None = None,
    ) -> tuple[Tensor, PairCache]:  # fmt: skip
        """Hidden states of new tokens, and the cache that holds them. The first call has the whole source; with
        `Cache()` it begins, and may have the first of the target. What comes later is of the target."""
        x, mask = _embedded(self.embedding, ids, mask, positions, segments), _standing(mask, positions)
        if isinstance(cache, PairCache):
            hidden, own = self.decoder.go_on(x, mask, cache.own, cache.memory)
            return self.dropout(hidden), PairCache(cache.memory, own)
        return self._begin(x, mask)

    def _begin(self, x: Tensor, mask: Mask) -> tuple[Tensor, PairCache]:
        source = mask.first_known
        read, written = _Side.of(mask, source), _Side.of(mask, mask.valid & ~source)
        states = self.dropout(self._without_padding(read.take(x), read.mask))
        memory = self.remember(states, read.mask)
        if not written.mask.shape[1]:
            return read.put(states, torch.zeros_like(x)), PairCache(memory, Cache())
        hidden, own = self.decoder.go_on(written.take(x), written.mask, Cache(), memory)
        return written.put(self.dropout(hidden), read.put(states, torch.zeros_like(x))), PairCache(memory, own)

    def _without_padding(self, x: Tensor, mask: Mask) -> Tensor:
        """What the encoder makes of embedded sources (B, S, W)."""
        if Route.find(mask).is_regular:
            return self.encoder.run(x, Route.find(mask))
        flat, index = mask.flatten()
        return _scattered(self.encoder.run(x.flatten(0, 1)[index][None], Route.find(flat)), index, mask.order)

    def read(self, ids: Tensor, mask: Mask, segments: Tensor | None = None) -> tuple[Tensor, PairCache]:
        """Sources, and the first of their targets: hidden states (B, T, W) and a cache to branch from."""
        hidden, cache = self.step(ids, mask, Cache(), segments=segments)
        return hidden, cache.branch()


@dataclass(frozen=True)
class _Side:
    """Some tokens of each row, moved to the left."""

    index: Tensor  # (B, n) where they stood
    mask: Mask  # (B, n)

    @classmethod
    def of(cls, mask: Mask, chosen: Tensor) -> _Side:
        counts = chosen.sum(1)
        index = (~chosen).long().argsort(dim=1, stable=True)[:, : int(counts.max())]
        there = torch.arange(index.shape[1], device=index.device) < counts[:, None]
        moved = mask.gather(index)
        return cls(index, replace(moved, group=moved.group.masked_fill(~there, -1)))

    def take(self, x: Tensor) -> Tensor:
        return x.gather(1, self.index[..., None].expand(-1, -1, x.shape[-1]))

    def put(self, part: Tensor, x: Tensor) -> Tensor:
        """Back to where they stood, in x (B, T, W)."""
        rows, columns = self.mask.valid.nonzero(as_tuple=True)
        return x.index_put((rows, self.index[rows, columns]), part[rows, columns])


# ---- rows --------------------------------------------------------------------------------------------------

Row = tuple[Tensor, Mask, Tensor | None, Tensor | None]  # ids, mask, positions, segments


def _gathered(index: Tensor, ids: Tensor, flat: Mask, positions: Tensor | None, segments: Tensor | None) -> Row:
    """The tokens of a flattened mask."""
    places, kinds = (None if x is None else x.expand(ids.shape).flatten()[index][None] for x in (positions, segments))
    return ids.flatten()[index][None], flat, places, kinds


def _scattered(hidden: Tensor, index: Tensor, like: Tensor) -> Tensor:
    """(1, N, W) back to where its tokens stood in `like` (B, T); zeros elsewhere."""
    padded = hidden.new_zeros(like.numel(), hidden.shape[-1]).index_copy(0, index, hidden[0])
    return padded.unflatten(0, like.shape)


def _standing(mask: Mask, positions: Tensor | None) -> Mask:
    """Positions that are given are where tokens stand; only a window or a matrix goes on measuring by the mask's."""
    if positions is None or mask.window is not None or mask.matrix is not None:
        return mask
    return replace(mask, place=positions.expand(mask.shape))


def _compared(route: Route, queries: Tensor | None, keys: Tensor | None) -> Route:
    """With the segments of its tokens."""
    return route if queries is None or keys is None else replace(route, segments=(queries, keys))


def _joined(old: Tensor | None, new: Tensor | None) -> Tensor | None:
    return new if old is None or new is None else torch.cat([old, new], dim=1)


def _embedded(
    embed: Callable[[Tensor, Tensor, Tensor], Tensor], ids: Tensor, mask: Mask, positions: Tensor | None,
    segments: Tensor | None,
) -> Tensor:  # fmt: skip
    positions = mask.place if positions is None else positions
    segments = torch.zeros_like(ids) if segments is None else segments
    return embed(ids, positions, segments)


# ---- building ----------------------------------------------------------------------------------------------


def _norm(config: Config) -> nn.Module:
    return NORMS[config.norm](config.width, eps=config.epsilon)


def _last(config: Config) -> nn.Module:
    if config.position_kind == "shifted":
        return Dropout(config.dropout)
    return _norm(config) if config.norm_place == "pre" else nn.Identity()


def _embedding(config: Config) -> Embedding:
    positions = {
        "learned": lambda: nn.Embedding(config.max_positions, config.width),
        "sinusoidal": lambda: Sinusoidal(config.max_positions, config.width),
        "relative": Nothing,
        "shifted": Nothing,
        "none": Nothing,
    }[config.position_kind]()
    asks = config.position_kind == "shifted"  # segments are compared, then, like places
    segments = nn.Embedding(config.segments, config.width) if config.segments and not asks else Nothing()
    norm = _norm(config) if config.embedding_norm else nn.Identity()
    scale = math.sqrt(config.width) if config.embedding_scaled else 1.0
    return Embedding(config.vocabulary, config.width, positions, segments, norm, config.dropout, scale, asks)


def _relative(config: Config, both_ways: bool) -> RelativePositions | Distances | NoBias:
    if config.position_kind == "shifted":
        return Distances(config.width, config.clamp, config.dropout)
    if config.position_kind != "relative":
        return NoBias()
    return RelativePositions(config.heads, config.buckets, config.bucket_distance, both_ways)


def _attention(config: Config) -> Attention:
    shifted = config.position_kind == "shifted"
    relate = ByDistance(config.width, config.heads, config.attention_width // config.heads) if shifted else None
    numbers = (config.attention_dropout, config.biased and not shifted, config.head_width, config.scores_scaled)
    return Attention(config.width, config.heads, *numbers, relate)


def _layer(config: Config) -> Layer:
    make = GatedFeedForward if config.gated else FeedForward
    activation = ACTIVATIONS[config.activation]()
    feed_forward = make(config.width, config.inner, activation, config.inner_dropout, config.biased)
    return Layer(_attention(config), feed_forward, (_norm(config), _norm(config)), config.norm_place, config.dropout)


def _cross_layer(config: Config) -> CrossLayer:
    return CrossLayer(_layer(config), _attention(config), _norm(config))
