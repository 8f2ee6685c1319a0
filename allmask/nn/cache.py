"""Caches: keys and values of tokens already read, with the mask that says who may read them.

Cache        one row after another, as it is read
BeamCache    several rows that continue one text, as in a beam search: the text is stored once
Memory       a source as the decoder of an encoder–decoder reads it
PairCache    a source and the target so far
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

    def branch(self, mask: Mask, index: Tensor) -> BeamCache:
        """Rows that go on from each text of the flat row read here; it was made by `mask.flatten()` with this index."""
        layers = tuple(BeamKeyValue.begin(layer, mask.shape, index) for layer in self.layers)
        if self.segments is None:
            return BeamCache(mask, layers)
        segments = torch.zeros_like(mask.order).flatten().index_copy(0, index, self.segments[0])
        return BeamCache(mask, layers, segments.view(mask.shape))


@dataclass(frozen=True)
class BeamCache:
    """The same of rows that go on from texts, several from one, as in a beam search; the texts are kept once."""

    mask: Mask  # (R, K + T): a row's text, then its own tokens
    layers: tuple[BeamKeyValue, ...]
    segments: Tensor | None = None  # (R, K + T)

    def extend(self, new: Mask) -> Mask:
        return Cache(self.mask).extend(new)

    def select(self, rows: Tensor) -> BeamCache:
        """Some of the rows, in any order, repeated or dropped. Their texts are shared, not copied."""
        segments = None if self.segments is None else self.segments[rows]
        return BeamCache(self.mask[rows], select_beams(self.layers, rows), segments)


AnyCache = TypeVar("AnyCache", Cache, BeamCache)


@dataclass(frozen=True)
class Memory:
    """A text as a decoder sees it: keys and values for each of its layers, made once, and the mask of its tokens."""

    mask: Mask
    layers: tuple[Any, ...]  # KeyValue each, or BeamKeyValue

    def seen_by(self, decoder: Mask) -> list[tuple[Readable, Route]]:
        """Cross-attention is `decoder.visible(encoder)`; a window or matrix speaks of the decoder's own text only."""
        route = Route.find(replace(decoder, window=None, matrix=None), self.mask)
        return [(layer, route) for layer in self.layers]

    def branch(self) -> Memory:
        return Memory(self.mask, tuple(BeamKeyValue.of(layer) for layer in self.layers))

    def select(self, rows: Tensor) -> Memory:
        return Memory(self.mask[rows], select_beams(self.layers, rows))


@dataclass(frozen=True)
class PairCache:
    """What an encoder–decoder remembers: the source, read once, as its decoder sees it, and the target so far."""

    memory: Memory
    own: Any  # Cache or BeamCache, of the decoder

    @property
    def mask(self) -> Mask:
        """Of the target."""
        return self.own.mask

    def branch(self) -> PairCache:
        """For rows that go on, several from one text, as in a beam search; what is there is kept once."""
        own = BeamCache(self.own.mask, tuple(BeamKeyValue.of(layer) for layer in self.own.layers))
        return PairCache(self.memory.branch(), own)

    def select(self, rows: Tensor) -> PairCache:
        return PairCache(self.memory.select(rows), self.own.select(rows))
