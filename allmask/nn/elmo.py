"""Two language models, one from each end of a text, and a mix of what they say for other tasks (arXiv 1802.05365)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from allmask.config import Config
from allmask.errors import UsageError
from allmask.mask import Mask
from allmask.nn.cache import Cache
from allmask.nn.dropout import Dropout
from allmask.nn.recurrent import (
    Lines,
    LSTMLayer,
    RecurrentCache,
    State,
    embedded,
    embedding_of,
    flipped,
    latest_of,
    readable,
    rows_of,
    texts_in,
)


class BidirectionalLayer(nn.Module):
    """A layer of each of two language models: from left to right, and from right to left."""

    def __init__(self, width: int):
        super().__init__()
        self.right = LSTMLayer(width, width)
        self.left = LSTMLayer(width, width)

    def forward(
        self, x: Tensor, lengths: Tensor, left: bool, state: State | None = None, keep: bool = False
    ) -> tuple[Tensor, State | None]:
        """Lines stand as they are read, also those that are read from their end."""
        return (self.left if left else self.right)(x, lengths, state, keep)


class Elmo(nn.Module):
    """Two language models that share embedding and output, and know nothing else of each other.

    The mask says which of them reads. Under `Mask.causal` hidden states are those of the last layer from left to right,
    under `Mask.reverse` from right to left, (B, T, W): each is trained to tell the next token. Under
    `Mask.bidirectional` both read, and hidden states are features for other models, (B, T, 2W·(layers + 1)): of the
    embedding, twice, and of each layer in both ways, for a `Mix`. A text of one token is read both ways.
    """

    recompute = False
    tokenwise = False

    def __init__(self, config: Config):
        super().__init__()
        self.config = config
        self.embedding = embedding_of(config)
        self.layers = nn.ModuleList(BidirectionalLayer(config.width) for _ in range(config.layers))
        self.dropout = Dropout(config.dropout)

    def forward(
        self, ids: Tensor, mask: Mask, positions: Tensor | None = None, segments: Tensor | None = None
    ) -> Tensor:
        """Hidden states (B, T, W) or (B, T, 2W·(layers + 1)), zeros at padding."""
        mask = readable(mask, positions)
        lines, x = Lines.of(mask, *texts_in(mask), mask.valid), embedded(self.embedding, ids)
        table, way = lines.spread(x), _way(mask, lines)
        if way == "both":
            out = self._features(table, lines.lengths)
        else:
            out = self._climb(table, lines.lengths, way == "left")[0][-1]
        return lines.put(out, x.new_zeros(len(x), out.shape[-1])).unflatten(0, ids.shape)

    def forward_at(self, where: Tensor, ids: Tensor, mask: Mask, segments: Tensor | None = None) -> Tensor:
        """Hidden states where `where` (B, T) is True."""
        return self(ids, mask)[where]

    def _features(self, x: Tensor, lengths: Tensor) -> Tensor:
        rightwards, _ = self._climb(x, lengths, left=False)
        leftwards, _ = self._climb(flipped(x, lengths), lengths, left=True)
        ways = zip(rightwards, [flipped(out, lengths) for out in leftwards], strict=True)
        return torch.cat([x, x, *(side for both in ways for side in both)], -1)

    def _climb(
        self, x: Tensor, lengths: Tensor, left: bool, states: list[State] | None = None, keep: bool = False
    ) -> tuple[list[Tensor], list[Any]]:
        """What each layer says, and the states they end with; from the second on a layer adds to what it was told."""
        outs: list[Tensor] = []
        after = []
        for number, layer in enumerate(self.layers):
            out, ended = layer(self.dropout(x) if number else x, lengths, left, states and states[number], keep)
            x = out + x if number else out
            outs.append(x)
            after.append(ended)
        return [*outs[:-1], self.dropout(outs[-1])], after

    def step(
        self, ids: Tensor, mask: Mask, cache: Cache | RecurrentCache,
        positions: Tensor | None = None, segments: Tensor | None = None,
    ) -> tuple[Tensor, RecurrentCache]:  # fmt: skip
        """Hidden states (B, T, W) of new tokens in one direction, and the cache that holds them."""
        mask = readable(mask, positions)
        lines, x = Lines.of(mask, *rows_of(mask), mask.valid), embedded(self.embedding, ids)
        if isinstance(cache, RecurrentCache):
            latest, left, states = cache.extend(mask), _one_way(mask, lines, cache), cache.states
        else:
            latest, left, states = latest_of(mask), _one_way(mask, lines), None
        outs, after = self._climb(lines.spread(x), lines.lengths, bool(left), states, keep=True)
        hidden = lines.put(outs[-1], torch.zeros_like(x)).unflatten(0, ids.shape)
        return hidden, RecurrentCache(latest, after, left=left)

    def read(self, ids: Tensor, mask: Mask, segments: Tensor | None = None) -> tuple[Tensor, RecurrentCache]:
        """Texts in one direction: hidden states (B, T, W) and a cache to branch from."""
        return self.step(ids, mask, Cache())


def _way(mask: Mask, lines: Lines) -> str:
    """Which way texts are read, by the order in which their tokens become known: "right", "left" or "both"."""
    order, position = (part.flatten()[lines.index].diff() for part in (mask.order, mask.position))
    inside = lines.cells.diff() == 1  # of one line; the last cell of a full one has a neighbour, too
    inside &= lines.cells[1:] % lines.width != 0
    later, onwards = order[inside] > 0, position[inside] > 0
    if not bool(later.any()):
        return "both"
    if bool(later.all()) and bool((onwards == onwards[0]).all()):
        return "right" if bool(onwards[0]) else "left"
    raise UsageError(
        "two language models read a text from left to right, from right to left, or both ways",
        "give Mask.causal, Mask.reverse or Mask.bidirectional, one for all texts; for other orders take a Transformer",
    )


def _one_way(mask: Mask, lines: Lines, cache: RecurrentCache | None = None) -> bool | None:
    """Whether texts are read from right to left, where more tokens may come.

    None while there is one token only, which is read as in a text from left to right.
    """
    way = _way(mask, lines)
    if way == "both" and lines.width > 1:
        raise UsageError("nothing can follow a text that is read both ways", "read it under Mask.causal")
    if cache is None:
        return None if way == "both" else way == "left"
    turned = cache.left is None and bool((mask.position < cache.mask.position)[mask.valid].any())
    if turned or (way != "both" and (way == "left") != bool(cache.left)):
        raise UsageError("cache: the new tokens are read in the other direction", "start again with Cache()")
    return bool(cache.left)


class ScalarMix(nn.Module):
    """What a task reads of features: the mean of all layers by learnt weights, times a learnt gain."""

    def __init__(self, layers: int):
        super().__init__()
        self.layers_bias = nn.Parameter(torch.zeros(layers))  # equal at first: all layers weigh the same
        self.gain = nn.Parameter(torch.ones(1))

    def forward(self, features: Tensor) -> Tensor:
        """(…, 2W) of features (…, 2W·layers)."""
        shares = self.layers_bias.softmax(0).to(features.dtype)
        return self.gain * (shares @ features.unflatten(-1, (len(shares), -1)))
