"""Keys and values of texts that several rows continue, as in a beam search: each text is stored once.

Copying the text for every beam is what makes beams slow and large. Here the rows of a text are further queries of one
batch entry. The scores over the text and over a row's own tokens are joined before one softmax, so the result equals
plain attention over both.

Shapes: S texts of K tokens, R rows of T tokens of their own, Q queries per row, H heads, D head width.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from allmask.nn.attention import Bias, KeyValue, Route, Table


@dataclass(frozen=True)
class BeamLayout(Table):
    """Which text each row continues. The table has a row per text, with one cell for each row that continues it."""

    owner: Tensor  # (R,) the index of its text

    @classmethod
    def of(cls, owner: Tensor, texts: int) -> BeamLayout:  # pyright: ignore[reportIncompatibleMethodOverride]
        width = int(owner.bincount(minlength=texts).max())
        if texts * width == len(owner) and bool((owner.diff() >= 0).all()):
            return cls(texts, width, None, owner)
        by_owner = owner.argsort(stable=True)
        first = torch.searchsorted(owner[by_owner], torch.arange(texts, device=owner.device))
        rank = torch.empty_like(owner)
        rank[by_owner] = torch.arange(len(owner), device=owner.device) - first[owner[by_owner]]
        return cls(texts, width, owner * width + rank, owner)

    def select(self, rows: Tensor) -> tuple[BeamLayout, Tensor | None]:
        """Return the layout of some of the rows, and the texts that are kept (None: all).

        Texts without rows are dropped only once they are half of all: a copy each time one ends would cost more.
        """
        owner = self.owner[rows]
        alive, renumbered = owner.unique(return_inverse=True)
        if 2 * len(alive) > self.rows:
            return BeamLayout.of(owner, self.rows), None
        return BeamLayout.of(renumbered, len(alive)), alive


class BeamKeyValue(NamedTuple):
    """The keys and values of a layer, for texts and for the rows that continue them."""

    text: KeyValue  # (S, H, K, D): heads first, so that each is one matrix without copying
    own: KeyValue  # (R, H, T, D)
    layout: BeamLayout

    @classmethod
    def begin(cls, flat: KeyValue, shape: tuple[int, int], index: Tensor) -> BeamKeyValue:
        """One row per text of a flat row (1, N, H, D); token n goes to cell index[n] of the texts (S, K)."""

        def padded(x: Tensor) -> Tensor:  # with zeros, since zero weight times garbage could be NaN
            return x.new_zeros(shape[0] * shape[1], *x.shape[1:]).index_copy(0, index, x).unflatten(0, shape)

        return cls.of(KeyValue(*(padded(x[0]) for x in flat)))

    @classmethod
    def of(cls, texts: KeyValue) -> BeamKeyValue:
        """One row per text of (S, K, H, D)."""
        text = KeyValue(*(x.transpose(1, 2).contiguous() for x in texts))
        owner = torch.arange(len(text.keys), device=text.keys.device)
        return cls(text, KeyValue(*(x[:, :, :0] for x in text)), BeamLayout.of(owner, len(owner)))

    def append(self, new: KeyValue) -> BeamKeyValue:
        """Append the keys and values of new tokens (R, Q, H, D)."""
        own = (torch.cat([old, x.transpose(1, 2)], dim=2) for old, x in zip(self.own, new, strict=True))
        return self._replace(own=KeyValue(*own))

    def attend(self, q: Tensor, route: Route, dropout: float = 0.0, bias: Bias | None = None) -> Tensor:
        """Attention of q (R, Q, H, D) over a row's text and its own tokens, in that order: (R, Q, H, D)."""
        assert not isinstance(bias, tuple)  # a row that reads more than itself is one block
        grid = self._to_grid(q)  # (S, H, width·Q, D)
        q = q.transpose(1, 2)  # (R, H, Q, D)
        tokens = self.text.keys.shape[2], self.own.keys.shape[2]
        over_text = self._to_rows(grid @ self.text.keys.transpose(2, 3), q.shape[2])  # (R, H, Q, K)
        scores = torch.cat([over_text, q @ self.own.keys.transpose(2, 3)], dim=-1) / math.sqrt(q.shape[-1])
        weights = _masked_softmax(scores if bias is None else scores + bias, route)
        weights = F.dropout(weights, dropout) if dropout else weights
        on_text, on_own = weights.split(tokens, dim=-1)
        read = self._to_grid(on_text.transpose(1, 2)) @ self.text.values
        return (self._to_rows(read, q.shape[2]) + on_own @ self.own.values).transpose(1, 2)

    def of_rows(self) -> KeyValue:
        owner, pairs = self.layout.owner, zip(self.text, self.own, strict=True)
        return KeyValue(*(torch.cat([text[owner], own], dim=2).transpose(1, 2) for text, own in pairs))

    def _to_grid(self, x: Tensor) -> Tensor:
        """(R, Q, H, N) -> (S, H, width·Q, N): the rows of a text as queries of one batch entry."""
        return self.layout.spread(x).flatten(1, 2).transpose(1, 2)

    def _to_rows(self, grid: Tensor, queries: int) -> Tensor:
        """(S, H, width·Q, N) -> (R, H, Q, N)"""
        return self.layout.gather(grid.unflatten(2, (-1, queries)).transpose(1, 2))


def select_beams(layers: tuple[BeamKeyValue, ...], rows: Tensor) -> tuple[BeamKeyValue, ...]:
    """Select rows, in any order, repeated or dropped. Texts are not copied, except to drop those without rows."""
    layout, kept = layers[0].layout.select(rows)
    return tuple(
        BeamKeyValue(
            layer.text if kept is None else KeyValue(*(x[kept] for x in layer.text)),
            KeyValue(*(x[rows] for x in layer.own)),
            layout,
        )
        for layer in layers
    )


def _masked_softmax(scores: Tensor, route: Route) -> Tensor:
    """Softmax over the keys that the mask shows; zeros for a query that sees none."""
    if route.is_regular:
        return scores.softmax(-1)
    hidden = ~route.queries.visible(route.keys, route.strict)[:, None]  # (R, 1, Q, K + T)
    return scores.masked_fill(hidden, -torch.inf).softmax(-1).masked_fill(hidden, 0.0)
