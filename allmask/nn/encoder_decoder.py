"""The encoder–decoder (arXiv 1706.03762): two stacks with one embedding."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from allmask.config import Config
from allmask.mask import Mask, expect_mask
from allmask.nn import fused
from allmask.nn.attention import Attention, KeyValue, Route
from allmask.nn.cache import Cache, Memory, PairCache
from allmask.nn.dropout import Dropout
from allmask.nn.layers import TOKENWISE
from allmask.nn.transformer import Row, Stack, build_embedding, embed_tokens, gather_row, scatter_row, with_positions


class EncoderDecoder(nn.Module):
    """The prefix order with two sets of weights.

    The encoder reads the tokens of a text that are known first, its source; the decoder reads the others, its target,
    and the source through cross-attention, `decoder.visible(encoder)`:

                  你   吃  </s>  <s>  白   鸡
        order      0    0    0     1   2    3
        position   0    1    2     0   1    2       see Mask.encoder_decoder

    So its rows are those of any model: padded, packed, cached. The hidden state of a token is that of its stack.
    """

    def __init__(self, config: Config):
        super().__init__()
        self.config = config
        self.tokenwise = config.norm in TOKENWISE
        self.embedding = build_embedding(config)
        self.encoder = Stack(config)
        self.decoder = Stack(config, cross=True)
        self.dropout = Dropout(config.ffn_dropout)  # after each stack

    @property
    def whole_layers(self) -> Sequence[nn.Module]:
        """The layers that are always called as a whole; of the decoder's, `keys_values` is called before."""
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
        """Return hidden states (B, T, W). Padding is not computed: its hidden states are zeros."""
        flat, index = with_positions(expect_mask(mask), positions).flatten()
        row = gather_row(index, ids, flat, positions, segments)
        source = flat.first_known[0]
        x, memory = self._encode(row, source)
        target = flat[:, ~source]
        hidden = torch.empty_like(x)
        hidden[:, source] = memory
        if target.shape[1]:
            sources = self.keys_values(memory, flat[:, source]).seen_by(target)
            hidden[:, ~source] = self.dropout(self.decoder.run(x[:, ~source], Route.find(target), sources))
        return scatter_row(hidden, index, ids)

    def forward_at(self, where: Tensor, ids: Tensor, mask: Mask, segments: Tensor | None = None) -> Tensor:
        """Return the hidden states (M, W) where `where` (B, T) is True; the last feed-forward computes only those."""
        source = expect_mask(mask).first_known
        is_flat = len(mask) == 1 and Route.find(mask).is_regular
        if not is_flat or bool(where[source].any()) or bool(source.all()):
            return self(ids, mask, segments=segments)[where]
        x, memory = self._encode((ids, mask, None, segments), source[0])
        is_target = ~source[0]
        target = mask[:, is_target]
        sources = self.keys_values(memory, mask[:, source[0]]).seen_by(target)
        return self.dropout(self.decoder.run_at(where[:, is_target], x[:, is_target], Route.find(target), sources))

    def _encode(self, row: Row, source: Tensor) -> tuple[Tensor, Tensor]:
        """Return the embeddings of all tokens (1, N), and the hidden states of the source."""
        x = embed_tokens(self.embedding, *row)
        return x, self.dropout(self.encoder.run(x[:, source], Route.find(row[1][:, source])))

    def weights(self, ids: Tensor, mask: Mask, segments: Tensor | None = None) -> dict[str, list[Tensor]]:
        """Return the attention weights of every layer of one row without padding, for pictures.

        "encoder": (1, H, S, S) of the source, "decoder": (1, H, T, T) of the target, "cross": (1, H, T, S) of both.
        """
        row, source = (ids, mask, None, segments), expect_mask(mask).first_known[0]
        x, memory = self._encode(row, source)
        encoder, _ = self.encoder.run_weights(x[:, source], Route.find(mask[:, source]))
        target = mask[:, ~source]
        if not target.shape[1]:
            return {"encoder": encoder}
        sources = self.keys_values(memory, mask[:, source]).seen_by(target)
        decoder, cross = self.decoder.run_weights(x[:, ~source], Route.find(target), sources)
        return {"encoder": encoder, "decoder": decoder, "cross": cross}

    def keys_values(self, hidden: Tensor, mask: Mask) -> Memory:
        """Return the keys and values that the decoder's layers read in hidden states of the encoder."""
        crosses = [layer.cross for layer in self.decoder.layers]
        linears = [linear for cross in crosses for linear in (cross.key, cross.value)]
        plain = all(type(cross) is Attention and cross.is_plain for cross in crosses)
        if not (self.training and plain and fused.suits(hidden) and fused.suits_modules(*linears)):
            return Memory(mask, tuple(cross.keys_values(hidden) for cross in crosses))
        found = iter(fused.project(hidden.to(fused.product_dtype(hidden)), *linears))
        return Memory(mask, tuple(KeyValue(cross.split(next(found)), cross.split(next(found))) for cross in crosses))

    def step(
        self, ids: Tensor, mask: Mask, cache: Cache | PairCache,
        positions: Tensor | None = None, segments: Tensor | None = None,
    ) -> tuple[Tensor, PairCache]:  # fmt: skip
        """Return the hidden states of new tokens, and the extended cache.

        The first call, with `Cache()`, has the whole source and may have the first tokens of the target; later calls
        have only tokens of the target.
        """
        x, mask = embed_tokens(self.embedding, ids, mask, positions, segments), with_positions(mask, positions)
        if isinstance(cache, PairCache):
            hidden, own = self.decoder.extend(x, mask, cache.own, cache.memory)
            return self.dropout(hidden), PairCache(cache.memory, own)
        is_source = mask.first_known
        source, target = _Side.of(mask, is_source), _Side.of(mask, mask.valid & ~is_source)
        states = self.dropout(self._encode_padded(source.take(x), source.mask))
        memory = self.keys_values(states, source.mask)
        hidden = source.put(states, torch.zeros_like(x))
        if not target.mask.shape[1]:
            return hidden, PairCache(memory, Cache())
        written, own = self.decoder.extend(target.take(x), target.mask, Cache(), memory)
        return target.put(self.dropout(written), hidden), PairCache(memory, own)

    def _encode_padded(self, x: Tensor, mask: Mask) -> Tensor:
        """Return the hidden states of embedded sources (B, S, W), without computing their padding."""
        route = Route.find(mask)
        if route.is_regular:
            return self.encoder.run(x, route)
        flat, index = mask.flatten()
        return scatter_row(self.encoder.run(x.flatten(0, 1)[index][None], Route.find(flat)), index, mask.order)

    def read(self, ids: Tensor, mask: Mask, segments: Tensor | None = None) -> tuple[Tensor, PairCache]:
        """Return hidden states (B, T, W) of sources and first target tokens, and a cache whose rows can be selected."""
        hidden, cache = self.step(ids, mask, Cache(), segments=segments)
        return hidden, cache.branch()


@dataclass(frozen=True)
class _Side:
    """The sources or the targets of all rows, moved to the left."""

    index: Tensor  # (B, n) of their tokens
    mask: Mask  # (B, n)

    @classmethod
    def of(cls, mask: Mask, chosen: Tensor) -> _Side:
        counts = chosen.sum(1)
        index = (~chosen).long().argsort(dim=1, stable=True)[:, : int(counts.max())]
        padding = torch.arange(index.shape[1], device=index.device) >= counts[:, None]
        moved = mask.gather(index)
        return cls(index, replace(moved, group=moved.group.masked_fill(padding, -1)))

    def take(self, x: Tensor) -> Tensor:
        return x.gather(1, self.index[..., None].expand(-1, -1, x.shape[-1]))

    def put(self, part: Tensor, x: Tensor) -> Tensor:
        """Return x (B, T, W) with these tokens replaced by `part`."""
        rows, columns = self.mask.valid.nonzero(as_tuple=True)
        return x.index_put((rows, self.index[rows, columns]), part[rows, columns])
