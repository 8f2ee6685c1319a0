"""The encoder–decoder (arXiv 1706.03762): two stacks over one embedding."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from allmask.config import Config
from allmask.mask import Mask, expect_mask
from allmask.nn.attention import Route
from allmask.nn.cache import Cache, Memory, PairCache
from allmask.nn.dropout import Dropout
from allmask.nn.layers import TOKENWISE
from allmask.nn.transformer import Row, Stack, build_embedding, embed_tokens, gather_row, scatter_row, with_positions


class EncoderDecoder(nn.Module):
    """Two stacks over one embedding (arXiv 1706.03762): the prefix order with two sets of weights.

    What is known first in a text, its source, is read by the encoder; all that comes later, its target, by the decoder,
    which sees the source through cross-attention, `decoder.visible(encoder)`:

               你   吃  </s>  <s>  白   鸡
        order   0    0    0     1   2    3
        position   0    1    2     0   1    2       see Mask.encoder_decoder

    So its rows are those of any model: padded, packed, cached. Hidden states are those of either stack.
    """

    def __init__(self, config: Config):
        super().__init__()
        self.config = config
        self.tokenwise = config.norm in TOKENWISE
        self.embedding = build_embedding(config)
        self.encoder = Stack(config)
        self.decoder = Stack(config, cross=True)
        self.dropout = Dropout(config.ffn_dropout)  # on what leaves a stack

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
        flat, index = with_positions(expect_mask(mask), positions).flatten()
        row = gather_row(index, ids, flat, positions, segments)
        source = flat.first_known[0]
        x, memory = self._encode(row, source)
        written = flat[:, ~source]
        hidden = torch.empty_like(x)
        hidden[:, source] = memory
        if written.shape[1]:
            seen = self.keys_values(memory, flat[:, source]).seen_by(written)
            hidden[:, ~source] = self.dropout(self.decoder.run(x[:, ~source], Route.find(written), seen))
        return scatter_row(hidden, index, ids)

    def forward_at(self, where: Tensor, ids: Tensor, mask: Mask, segments: Tensor | None = None) -> Tensor:
        """Hidden states (M, W) where `where` (B, T) is True; the last feed-forward is spent on no other position."""
        source = expect_mask(mask).first_known
        is_flat = len(mask) == 1 and Route.find(mask).is_regular
        if not is_flat or bool(where[source].any()) or bool(source.all()):
            return self(ids, mask, segments=segments)[where]
        x, memory = self._encode((ids, mask, None, segments), source[0])
        target = ~source[0]
        written = mask[:, target]
        seen = self.keys_values(memory, mask[:, source[0]]).seen_by(written)
        return self.dropout(self.decoder.run_at(where[:, target], x[:, target], Route.find(written), seen))

    def _encode(self, row: Row, source: Tensor) -> tuple[Tensor, Tensor]:
        """All tokens (1, N) embedded, and the source as the encoder leaves it."""
        x = embed_tokens(self.embedding, *row)
        return x, self.dropout(self.encoder.run(x[:, source], Route.find(row[1][:, source])))

    def keys_values(self, hidden: Tensor, mask: Mask) -> Memory:
        """What the decoder reads in hidden states of the encoder."""
        return Memory(mask, tuple(layer.cross.keys_values(hidden) for layer in self.decoder.layers))

    def step(
        self, ids: Tensor, mask: Mask, cache: Cache | PairCache,
        positions: Tensor | None = None, segments: Tensor | None = None,
    ) -> tuple[Tensor, PairCache]:  # fmt: skip
        """Hidden states of new tokens, and the cache that holds them. The first call has the whole source; with
        `Cache()` it begins, and may have the first of the target. What comes later is of the target."""
        x, mask = embed_tokens(self.embedding, ids, mask, positions, segments), with_positions(mask, positions)
        if isinstance(cache, PairCache):
            hidden, own = self.decoder.extend(x, mask, cache.own, cache.memory)
            return self.dropout(hidden), PairCache(cache.memory, own)
        return self._begin(x, mask)

    def _begin(self, x: Tensor, mask: Mask) -> tuple[Tensor, PairCache]:
        source = mask.first_known
        read, written = _Side.of(mask, source), _Side.of(mask, mask.valid & ~source)
        states = self.dropout(self._without_padding(read.take(x), read.mask))
        memory = self.keys_values(states, read.mask)
        if not written.mask.shape[1]:
            return read.put(states, torch.zeros_like(x)), PairCache(memory, Cache())
        hidden, own = self.decoder.extend(written.take(x), written.mask, Cache(), memory)
        return written.put(self.dropout(hidden), read.put(states, torch.zeros_like(x))), PairCache(memory, own)

    def _without_padding(self, x: Tensor, mask: Mask) -> Tensor:
        """What the encoder makes of embedded sources (B, S, W)."""
        if Route.find(mask).is_regular:
            return self.encoder.run(x, Route.find(mask))
        flat, index = mask.flatten()
        return scatter_row(self.encoder.run(x.flatten(0, 1)[index][None], Route.find(flat)), index, mask.order)

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
