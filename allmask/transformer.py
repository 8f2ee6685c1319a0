"""The one stack. BERT, GPT-2 and the encoder–decoder of 2017 differ in what is built, not in how it runs."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from allmask.attention import Attention, KeyValue, Route
from allmask.branches import Branches, select_branches
from allmask.config import Config
from allmask.errors import UsageError
from allmask.layers import (
    ACTIVATIONS,
    NORMS,
    TOKENWISE,
    CrossLayer,
    Embedding,
    FeedForward,
    Layer,
    Nothing,
    Sinusoidal,
)
from allmask.masks import Mask


@dataclass(frozen=True)
class Cache:
    """What a stack remembers of the tokens it has read. `Cache()` is the beginning; each call returns the next."""

    mask: Mask | None = None
    layers: tuple[KeyValue, ...] = ()

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
        return BranchedCache(mask, tuple(Branches.begin(layer, mask.shape, index) for layer in self.layers))


@dataclass(frozen=True)
class BranchedCache:
    """The same of rows that go on from texts, several from one, as in a beam search; the texts are kept once."""

    mask: Mask  # (R, K + T): a row's text, then its own tokens
    layers: tuple[Branches, ...]

    def extend(self, new: Mask) -> Mask:
        return Cache(self.mask).extend(new)

    def select(self, rows: Tensor) -> BranchedCache:
        """Some of the rows, in any order, repeated or dropped. Their texts are shared, not copied."""
        return BranchedCache(self.mask[rows], select_branches(self.layers, rows))


AnyCache = TypeVar("AnyCache", Cache, BranchedCache)


class Transformer(nn.Module):
    """Embeddings and a stack of layers: ids and a mask in, hidden states out."""

    layers: Any  # a ModuleList of Layer, or of CrossLayer in a decoder
    recompute = False  # in training, remember what goes into a layer only; compute the rest again on the way back

    def __init__(self, config: Config, cross: bool = False):
        super().__init__()
        self.config = config
        self.tokenwise = config.norm in TOKENWISE
        self.embedding = _embedding(config)
        depth = config.decoder_layers if cross else config.layers
        self.layers = nn.ModuleList(_cross_layer(config) if cross else _layer(config) for _ in range(depth))
        self.norm = _norm(config) if config.norm_place == "pre" else nn.Identity()

    def forward(
        self, ids: Tensor, mask: Mask, positions: Tensor | None = None, segments: Tensor | None = None
    ) -> Tensor:
        """Hidden states (B, T, W). Padding is not computed: its rows are zeros."""
        route = Route.find(mask)
        if route.is_regular or mask.matrix is not None or not self.tokenwise:
            return self.run(self.embed(ids, mask, positions, segments), route)
        flat, index = mask.flatten()
        gathered = (None if x is None else x.expand(ids.shape).flatten()[index][None] for x in (positions, segments))
        hidden = self.run(self.embed(ids.flatten()[index][None], flat, *gathered), Route.find(flat))
        padded = hidden.new_zeros(ids.numel(), hidden.shape[-1]).index_copy(0, index, hidden[0])
        return padded.unflatten(0, ids.shape)

    def at(self, where: Tensor, ids: Tensor, mask: Mask, segments: Tensor | None = None) -> Tensor:
        """Hidden states (M, W) where `where` (B, T) is True; the last feed-forward is spent on no other position."""
        route = Route.find(mask)
        if not route.is_regular or not self.tokenwise:
            return self(ids, mask, segments=segments)[where]
        x = self.embed(ids, mask, None, segments)
        for layer in self.layers[:-1]:
            x = self._through(layer, x, route)
        x, _ = self.layers[-1].attend(x, route, None, None)
        return self.norm(self.layers[-1].feed(x[where]))

    def run(self, x: Tensor, route: Route) -> Tensor:
        for layer in self.layers:
            x = self._through(layer, x, route)
        return self.norm(x)

    def _through(self, layer: nn.Module, x: Tensor, route: Route) -> Tensor:
        if not (self.recompute and torch.is_grad_enabled()):
            return layer(x, route)[0]
        passed = checkpoint(lambda x: layer(x, route)[0], x, use_reentrant=False)
        assert isinstance(passed, Tensor)
        return passed

    def step(
        self, ids: Tensor, mask: Mask, cache: AnyCache, memory: Memory | None = None,
        positions: Tensor | None = None, segments: Tensor | None = None,
    ) -> tuple[Tensor, AnyCache]:  # fmt: skip
        """The hidden states of new tokens after those in the cache, and the cache that holds them too."""
        keys = cache.extend(mask)
        route = Route.find(mask) if cache.mask is None else Route.find(mask, keys)
        pasts = cache.layers or (None,) * len(self.layers)
        seen = [()] * len(self.layers) if memory is None else memory.seen_by(mask)
        x, reads = self.embed(ids, mask, positions, segments), []
        for layer, past, other in zip(self.layers, pasts, seen, strict=True):
            x, read = layer(x, route, past, *other)
            reads.append(read)
        return self.norm(x), replace(cache, mask=keys, layers=tuple(reads))

    def peek(
        self, ids: Tensor, mask: Mask, cache: Cache | BranchedCache,
        positions: Tensor | None = None, segments: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """The query stream (XLNet, arXiv 1906.08237): hidden states of tokens that read what is older in the cache.

        They never read themselves or each other and are not remembered, so what they embed gives no answer away: a
        [MASK] at the place to be guessed. `step` over the content and then `peek` is two-stream attention.
        """
        x = self.embed(ids, mask, positions, segments)
        route = Route.find(mask, mask[:, :0] if cache.mask is None else cache.mask, strict=True)
        nothing = (None,) * len(self.layers)
        for layer, past in zip(self.layers, cache.layers or nothing, strict=True):
            x = layer.peek(x, route, past)
        return self.norm(x)

    def weights(self, ids: Tensor, mask: Mask, positions: Tensor | None = None, segments: Tensor | None = None):
        """The attention weights of every layer, (B, H, T, T) each, for pictures."""
        x, route, weights = self.embed(ids, mask, positions, segments), Route.find(mask), []
        for layer in self.layers:
            weights.append(layer.weigh(x, route))
            x, _ = layer(x, route)
        return weights

    def embed(self, ids: Tensor, mask: Mask, positions: Tensor | None, segments: Tensor | None) -> Tensor:
        positions = mask.place if positions is None else positions
        segments = torch.zeros_like(ids) if segments is None else segments
        return self.embedding(ids, positions, segments)


@dataclass(frozen=True)
class Memory:
    """A text as a decoder sees it: keys and values for each of its layers, made once, and the mask of its tokens."""

    mask: Mask
    layers: tuple[KeyValue, ...]

    def seen_by(self, decoder: Mask) -> list[tuple[KeyValue, Route]]:
        """Cross-attention is `decoder.visible(encoder)`; a window or matrix speaks of the decoder's own text only."""
        route = Route.find(replace(decoder, window=None, matrix=None), self.mask)
        return [(layer, route) for layer in self.layers]


class EncoderDecoder(nn.Module):
    """Two stacks, one vocabulary (arXiv 1706.03762): the prefix order with two sets of weights."""

    def __init__(self, config: Config):
        super().__init__()
        self.config = config
        self.encoder = Transformer(config)
        self.decoder = Transformer(config, cross=True)
        self.decoder.embedding.tokens = self.encoder.embedding.tokens

    def forward(self, source: Tensor, target: Tensor, source_mask: Mask, target_mask: Mask) -> Tensor:
        """Logits (B, T, V) of the token after each target token."""
        hidden, _ = self.step(target, target_mask, self.encode(source, source_mask), Cache())
        return self.logits(hidden)

    def encode(self, source: Tensor, mask: Mask) -> Memory:
        hidden = self.encoder(source, mask)
        return Memory(mask, tuple(layer.cross.remember(hidden) for layer in self.decoder.layers))

    def step(self, ids: Tensor, mask: Mask, memory: Memory, cache: Cache) -> tuple[Tensor, Cache]:
        return self.decoder.step(ids, mask, cache, memory)

    def logits(self, hidden: Tensor) -> Tensor:
        return hidden @ self.encoder.embedding.tokens.weight.T


def _norm(config: Config) -> nn.Module:
    return NORMS[config.norm](config.width, eps=config.epsilon)


def _embedding(config: Config) -> Embedding:
    positions = {
        "learned": lambda: nn.Embedding(config.max_positions, config.width),
        "sinusoidal": lambda: Sinusoidal(config.max_positions, config.width),
        "none": Nothing,
    }[config.position_kind]()
    segments = nn.Embedding(config.segments, config.width) if config.segments else Nothing()
    norm = _norm(config) if config.embedding_norm else nn.Identity()
    scale = math.sqrt(config.width) if config.embedding_scaled else 1.0
    return Embedding(config.vocabulary, config.width, positions, segments, norm, config.dropout, scale)


def _layer(config: Config) -> Layer:
    attention = Attention(config.width, config.heads, config.attention_dropout)
    feed_forward = FeedForward(config.width, config.inner, ACTIVATIONS[config.activation]())
    return Layer(attention, feed_forward, (_norm(config), _norm(config)), config.norm_place, config.dropout)


def _cross_layer(config: Config) -> CrossLayer:
    cross = Attention(config.width, config.heads, config.attention_dropout)
    return CrossLayer(_layer(config), cross, _norm(config))
