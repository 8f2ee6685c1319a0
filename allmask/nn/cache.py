"""Caches: keys and values of tokens already read, with the mask that says who may read them.

Cache        of plain rows
BeamCache    of several rows that continue one text, as in a beam search: the text is stored once
Memory       of a source, as the decoder of an encoder–decoder reads it
PairCache    of a source and the target so far
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from allmask.errors import UsageError
from allmask.mask import Mask
from allmask.nn.attention import KeyValue, Readable, Route
from allmask.nn.beam_cache import BeamKeyValue, select_beams


@dataclass(frozen=True)
class Cache:
    """The keys and values of the tokens read so far. Start with `Cache()`; each step returns the next cache."""

    mask: Mask | None = None
    layers: tuple[KeyValue, ...] = ()
    segments: Tensor | None = None  # (B, K), if attention compares segments

    def extend(self, new: Mask) -> Mask:
        """Return the mask of all keys, old and new. Refuse a new token that a token in the cache should have seen."""
        if self.mask is None:
            return new
        if not new.may_follow(self.mask):
            raise UsageError(
                "cache: a new token is visible to one already read, so the cached keys and values are no longer valid",
                "append tokens of a higher order than all before, or start again with Cache()",
            )
        return self.mask.append(new)

    def branch(self, mask: Mask, index: Tensor) -> BeamCache:
        """A cache with one row per text, from this cache of a flat row, made by `mask.flatten()` with this index."""
        layers = tuple(BeamKeyValue.begin(layer, mask.shape, index) for layer in self.layers)
        if self.segments is None:
            return BeamCache(mask, layers)
        segments = torch.zeros_like(mask.order).flatten().index_copy(0, index, self.segments[0])
        return BeamCache(mask, layers, segments.view(mask.shape))


@dataclass(frozen=True)
class BeamCache:
    """The cache of rows that continue texts, several rows per text as in a beam search; each text is stored once."""

    mask: Mask  # (R, K + T): a row's text, then its own tokens
    layers: tuple[BeamKeyValue, ...]
    segments: Tensor | None = None  # (R, K + T)

    def extend(self, new: Mask) -> Mask:
        return Cache(self.mask).extend(new)

    def select(self, rows: Tensor) -> BeamCache:
        """Select rows, in any order, repeated or dropped. Their texts are shared, not copied."""
        segments = None if self.segments is None else self.segments[rows]
        return BeamCache(self.mask[rows], select_beams(self.layers, rows), segments)


AnyCache = TypeVar("AnyCache", Cache, BeamCache)


@dataclass(frozen=True)
class Memory:
    """A source as the decoder reads it: keys and values for each decoder layer, and the mask of its tokens."""

    mask: Mask
    layers: tuple[Any, ...]  # of KeyValue, or of BeamKeyValue

    def seen_by(self, decoder: Mask) -> list[tuple[Readable, Route]]:
        """For each layer, the keys and values and the route of cross-attention, which is `decoder.visible(encoder)`.

        A window or matrix of the decoder applies to its own tokens only.
        """
        route = Route.find(replace(decoder, window=None, matrix=None), self.mask)
        return [(layer, route) for layer in self.layers]


@dataclass(frozen=True)
class PairCache:
    """The cache of an encoder–decoder: the source, read once, and the target so far."""

    memory: Memory
    own: Any  # the Cache or BeamCache of the decoder

    @property
    def mask(self) -> Mask:
        """The mask of the target."""
        return self.own.mask

    def branch(self) -> PairCache:
        """A cache whose rows can be selected and repeated, as in a beam search; sources and targets are stored once."""
        memory = Memory(self.memory.mask, tuple(BeamKeyValue.of(layer) for layer in self.memory.layers))
        return PairCache(memory, BeamCache(self.own.mask, tuple(BeamKeyValue.of(layer) for layer in self.own.layers)))

    def select(self, rows: Tensor) -> PairCache:
        memory = Memory(self.memory.mask[rows], select_beams(self.memory.layers, rows))
        return PairCache(memory, self.own.select(rows))
