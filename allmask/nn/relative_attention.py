"""Attention that knows how far apart tokens stand, and no places (Transformer-XL, arXiv 1901.02860; XLNet, 1906.08237).

The score of query i and key j is (q_i + a)·k_j + (q_i + b)·W r(i-j) + (q_i + c)·s(i, j): what the key says, how far it
stands (r are waves, W and the biases are learnt), and whether it is of the same segment of its text. Only the first can
be left to a kernel; the others are numbers added to its scores, another for each query.

Shapes are those of attention.py; R distances, W width of a model.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import NamedTuple

import torch
from torch import Tensor, nn

from allmask.nn.attention import Bias, Block, Route
from allmask.nn.dropout import Dropout


class BlockDistances(NamedTuple):
    """How queries stand to the keys they read; rows that are alike are one."""

    shape: tuple[int, int]  # queries and keys
    first: int  # which of the waves is the first that is looked at
    count: int
    index: Tensor | None  # (B, Q, K) which of those after it; None: places run on by one, and a shift will do
    differs: Tensor | None  # (B, Q, K) True where a key is of another segment; None: nowhere
    hidden: Tensor | None  # (B, Q, K) True where the mask forbids to read; None: left to whoever reads


@dataclass(frozen=True)
class DistanceEncodings:
    """What all layers are told of a route: waves for each distance, the longest first, and one piece for each block.

    Or one piece for all, where queries read more than their own row.
    """

    waves: Tensor  # (R, W)
    pieces: tuple[BlockDistances, ...]
    whole: bool


class DistanceEncoder(nn.Module):
    """From a route to its relations. Further away than `clamp` is as far as that; 0: there is no such limit."""

    def __init__(self, width: int, clamp: int = 0, dropout: float = 0.0):
        super().__init__()
        self.width = width
        self.clamp = clamp
        self.dropout = Dropout(dropout)

    def forward(self, route: Route) -> DistanceEncodings:
        if route.keys is not route.queries:
            return self.whole(route)
        return self._relations([_of_block(route, block) for block in route.blocks], whole=False)

    def whole(self, route: Route) -> DistanceEncodings:
        segments = route.segments or (None, None)
        return self._relations([_Positions(route.queries.position, route.keys.position, *segments)], whole=True)

    def _relations(self, places: list[_Positions], whole: bool) -> DistanceEncodings:
        high = max(block.reach[0] for block in places)
        low = min(block.reach[1] for block in places)
        waves = _waves(high, low, self.width, self.clamp).to(places[0].queries.device)
        return DistanceEncodings(self.dropout(waves), tuple(block.piece(high) for block in places), whole)


@dataclass(frozen=True)
class _Positions:
    """Where queries and keys stand, (B, Q) and (B, K), of which segments they are, and what is hidden (B, Q, K)."""

    queries: Tensor
    keys: Tensor
    segments: Tensor | None = None
    key_segments: Tensor | None = None
    hidden: Tensor | None = None

    def piece(self, high: int) -> BlockDistances:
        """Of waves that begin with the distance `high`."""
        index = None if self._away is None else self.reach[0] - self._away
        count = self.reach[0] - self.reach[1] + 1
        return BlockDistances(self._shape, high - self.reach[0], count, index, self._differs, self.hidden)

    @cached_property
    def reach(self) -> tuple[int, int]:
        """From how far before a query a key may stand, and one more for the shift, to how far after it."""
        if not min(self._shape):
            return sum(self._shape) - 1, 0
        if self._away is not None:
            return int(self._away.max()) + 1, int(self._away.min())
        first, begin = int(self.queries[0, 0]), int(self.keys[0, 0])
        return first - begin + self._shape[0], first - begin - self._shape[1] + 1

    @cached_property
    def _away(self) -> Tensor | None:
        """(B, Q, K) from key to query; None where places run on by one, and so the first tell of all others."""
        begins = self.queries[:, :1] - self.keys[:, :1] if min(self._shape) else self.queries[:, :0]
        runs = all(bool((x.diff(dim=1) == 1).all()) for x in (self.queries, self.keys))
        if not min(self._shape) or (runs and bool((begins == begins[:1]).all())):
            return None
        return _alike(self.queries[:, :, None] - self.keys[:, None, :])

    @property
    def _differs(self) -> Tensor | None:
        if self.segments is None or self.key_segments is None:
            return None
        differs = self.segments[:, :, None] != self.key_segments[:, None, :]
        return _alike(differs) if bool(differs.any()) else None

    @property
    def _shape(self) -> tuple[int, int]:
        return self.queries.shape[1], self.keys.shape[1]


def _of_block(route: Route, block: Block) -> _Positions:
    """The documents of a block as rows, which read themselves."""
    position = _rows(block, route.queries.position)
    segment = None if route.segments is None else _rows(block, route.segments[0])
    if block.kind in ("full", "empty"):
        hidden = None
    elif block.kind == "dense":
        hidden = ~route.visible(block.start, block.stop, block)
    else:  # documents of a block are alike
        hidden = ~route.queries[:1, block.start : block.start + block.length].visible()
    return _Positions(position, position, segment, segment, hidden)


def _rows(block: Block, x: Tensor) -> Tensor:
    """The documents of a block as rows: (1, n·L, …) -> (n, L, …)."""
    return x[:, block.start : block.stop].unflatten(1, (block.documents, -1)).flatten(0, 1)


def _alike(rows: Tensor) -> Tensor:
    """One row for all, if they are equal."""
    return rows[:1] if bool((rows == rows[:1]).all()) else rows


def _waves(high: int, low: int, width: int, clamp: int) -> Tensor:
    """(R, W), of the distances from `high` down to `low`."""
    reach = 1 << max(6, max(high, -low).bit_length())
    table = _table(reach, width)
    if not clamp:
        return table[reach - high : reach - low + 1]
    return table[reach - torch.arange(high, low - 1, -1, device="cpu").clamp(-clamp, clamp)]


@lru_cache(maxsize=4)
def _table(reach: int, width: int) -> Tensor:
    """(2·reach + 1, W): all sines of a distance, then all cosines, from the distance `reach` down to -`reach`."""
    numbers = {"dtype": torch.float64, "device": "cpu"}  # real ones, also where a model is built without memory
    frequency = 10000.0 ** (-torch.arange(0, width, 2, **numbers) / width)
    angle = torch.arange(reach, -reach - 1, -1, **numbers)[:, None] * frequency
    return torch.cat([angle.sin(), angle.cos()], dim=-1)[:, :width].float()


class RelativeScores(nn.Module):
    """What a layer makes of relations: queries for the kernel, and what is added to the scores they have there."""

    def __init__(self, width: int, heads: int, head_width: int):
        super().__init__()
        self.scale = head_width**-0.5
        self.position = nn.Parameter(torch.empty(heads, head_width, width))
        self.segment = nn.Parameter(torch.empty(2, heads, head_width))  # the same, another
        self.content_bias = nn.Parameter(torch.empty(heads, head_width))
        self.position_bias = nn.Parameter(torch.empty(heads, head_width))
        self.segment_bias = nn.Parameter(torch.empty(heads, head_width))

    def forward(self, q: Tensor, route: Route, relations: DistanceEncodings) -> tuple[Tensor, Bias]:
        """q (B, Q, H, D)"""
        content, places, kinds = (q + x.to(q.dtype) for x in (self.content_bias, self.position_bias, self.segment_bias))
        towards, position, waves = places * self.scale, self.position.to(q.dtype), relations.waves.to(q.dtype)
        # Of the same segment or of another: only the difference matters to a softmax
        other = (self.segment[1] - self.segment[0]).to(q.dtype)
        apart = (kinds * other).sum(-1, keepdim=True) * self.scale  # (B, Q, H, 1)
        if _few(q, waves):
            towards = torch.einsum("bqhd,hdw->bqhw", towards, position)
        else:
            waves = torch.einsum("rw,hdw->rhd", waves, position)
        if relations.whole:
            return content, _added(towards, apart, waves, relations.pieces[0])
        pairs = zip(route.blocks, relations.pieces, strict=True)
        added = (_added(_rows(block, towards), _rows(block, apart), waves, piece) for block, piece in pairs)
        return content, tuple(added)


def _few(q: Tensor, waves: Tensor) -> bool:
    """Whether it is less work to bring the queries to the waves than the waves to the queries."""
    queries, (distances, width) = q.shape[0] * q.shape[1], waves.shape
    return queries * (width + q.shape[2] * distances) < distances * (width + queries)


def _added(towards: Tensor, apart: Tensor, waves: Tensor, piece: BlockDistances) -> Tensor:
    """(B, H, Q, K) from queries (B, Q, H, D) and waves (R, H, D), or (B, Q, H, W) and (R, W)."""
    waves = waves[piece.first : piece.first + piece.count]
    scores = torch.einsum("bqhd,rhd->bhqr" if waves.ndim == 3 else "bqhw,rw->bhqr", towards, waves)
    if piece.index is None:
        added = shift(scores, piece.shape[1])
    else:
        added = scores.gather(-1, piece.index[:, None].expand(*scores.shape[:3], -1))
    if piece.differs is not None:
        added = added + apart.transpose(1, 2) * piece.differs[:, None]
    return added if piece.hidden is None else added.masked_fill(piece.hidden[:, None], -torch.inf)


def shift(scores: Tensor, keys: int) -> Tensor:
    """(…, Q, K) from scores (…, Q, Q + K) by distance, the longest first: each row begins one further to the left.

    Q = 2, K = 3: the first query stands one before the last key, the last beside it.

           3  2  1  0 -1               distance         1  0 -1
        a  a3 a2 a1 a0 a-1      ->     a                a1 a0 a-1
        b  b3 b2 b1 b0 b-1             b                b2 b1 b0
    """
    queries = scores.shape[-2]
    moved = scores.flatten(-2)[..., queries:]  # without its first Q numbers, and cut into rows that are one shorter
    return moved.unflatten(-1, (queries, queries + keys - 1))[..., :keys]
