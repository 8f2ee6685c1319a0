"""One text, several continuations: the keys and values of the text are kept once, however many rows go on from it.

A beam search has several rows on one source. Copying the source for each of them is what makes beams slow and large;
here the rows of a text are further queries of one batch entry. The scores over the text and those over a row's own
tokens are joined before one softmax, so the result is that of plain attention over both.

Shapes: S texts of K tokens, R rows of T tokens of their own, Q queries a row, H heads, D width of a head.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from allmask.nn.attention import Bias, KeyValue, Route


@dataclass(frozen=True)
class BeamLayout:
    """Which text each row continues, and the grid (S, width) in which the rows of a text stand side by side."""

    owner: Tensor  # (R,) the number of its text
    texts: int
    width: int  # the most rows of one text
    cell: Tensor | None  # (R,) where a row stands in the flattened grid; None: rows fill it, one after another

    @classmethod
    def of(cls, owner: Tensor, texts: int) -> BeamLayout:
        width = int(owner.bincount(minlength=texts).max())
        if texts * width == len(owner) and bool((owner.diff() >= 0).all()):
            return cls(owner, texts, width, None)
        by_owner = owner.argsort(stable=True)
        first = torch.searchsorted(owner[by_owner], torch.arange(texts, device=owner.device))
        rank = torch.empty_like(owner)
        rank[by_owner] = torch.arange(len(owner), device=owner.device) - first[owner[by_owner]]
        return cls(owner, texts, width, owner * width + rank)

    def spread(self, x: Tensor) -> Tensor:
        """(R, …) -> (S, width, …); cells without a row are zeros."""
        if self.cell is not None:
            x = x.new_zeros(self.texts * self.width, *x.shape[1:]).index_copy(0, self.cell, x)
        return x.unflatten(0, (self.texts, self.width))

    def gather(self, grid: Tensor) -> Tensor:
        """(S, width, …) -> (R, …)"""
        x = grid.flatten(0, 1)
        return x if self.cell is None else x[self.cell]

    def select(self, rows: Tensor) -> tuple[BeamLayout, Tensor | None]:
        """The fan of some of the rows, and the texts still kept (None: all).

        Texts without rows are let go once they are half of all: a copy at each end would cost more than it saves.
        """
        owner = self.owner[rows]
        alive, renumbered = owner.unique(return_inverse=True)
        if 2 * len(alive) > self.texts:
            return BeamLayout.of(owner, self.texts), None
        return BeamLayout.of(renumbered, len(alive)), alive


class BeamKeyValue(NamedTuple):
    """What a layer remembers of texts and of the rows that continue them."""

    text: KeyValue  # (S, H, K, D): heads first, so that each is one matrix without copying
    own: KeyValue  # (R, H, T, D)
    layout: BeamLayout

    @classmethod
    def begin(cls, flat: KeyValue, shape: tuple[int, int], index: Tensor) -> BeamKeyValue:
        """Each text of a flat row (1, N, H, D) with a row of its own; token n goes to cell index[n] of (S, K)."""
        return cls._with_rows(KeyValue(*(_padded(x[0], shape, index) for x in flat)))

    @classmethod
    def of(cls, texts: KeyValue) -> BeamKeyValue:
        """The same of texts that stand in rows, (S, K, H, D)."""
        return cls._with_rows(KeyValue(*(x.transpose(1, 2).contiguous() for x in texts)))

    @classmethod
    def _with_rows(cls, text: KeyValue) -> BeamKeyValue:
        owner = torch.arange(len(text.keys), device=text.keys.device)
        return cls(text, KeyValue(*(x[:, :, :0] for x in text)), BeamLayout.of(owner, len(owner)))

    def append(self, new: KeyValue) -> BeamKeyValue:
        """One token a row, or several: (R, Q, H, D)."""
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
        weights = _normalize(scores if bias is None else scores + bias, route)
        weights = F.dropout(weights, dropout) if dropout else weights
        on_text, on_own = weights.split(tokens, dim=-1)
        read = self._to_grid(on_text.transpose(1, 2)) @ self.text.values
        return (self._to_rows(read, q.shape[2]) + on_own @ self.own.values).transpose(1, 2)

    def _to_grid(self, x: Tensor) -> Tensor:
        """(R, Q, H, N) -> (S, H, width·Q, N): the rows of a text as queries of one batch entry."""
        return self.layout.spread(x).flatten(1, 2).transpose(1, 2)

    def _to_rows(self, grid: Tensor, queries: int) -> Tensor:
        """(S, H, width·Q, N) -> (R, H, Q, N)"""
        return self.layout.gather(grid.unflatten(2, (-1, queries)).transpose(1, 2))


def select_beams(layers: tuple[BeamKeyValue, ...], rows: Tensor) -> tuple[BeamKeyValue, ...]:
    """The rows that go on, repeated or dropped. Texts are not copied, except to let go of those that ended."""
    layout, kept = layers[0].layout.select(rows)
    return tuple(
        BeamKeyValue(
            layer.text if kept is None else KeyValue(*(x[kept] for x in layer.text)),
            KeyValue(*(x[rows] for x in layer.own)),
            layout,
        )
        for layer in layers
    )


def _padded(x: Tensor, shape: tuple[int, int], index: Tensor) -> Tensor:
    """(N, H, D) -> (S, H, K, D); padding is zeros, since zero weight times garbage could be NaN."""
    cells = x.new_zeros(shape[0] * shape[1], *x.shape[1:]).index_copy(0, index, x)
    return cells.unflatten(0, shape).transpose(1, 2).contiguous()


def _normalize(scores: Tensor, route: Route) -> Tensor:
    """Softmax over what the mask lets each query see; zeros for one that sees nothing."""
    if route.is_regular:
        return scores.softmax(-1)
    hidden = ~route.queries.visible(route.keys, route.strict)[:, None]  # (R, 1, Q, K + T)
    return scores.masked_fill(hidden, -torch.inf).softmax(-1).masked_fill(hidden, 0.0)
