"""Attention by relative positions: T5, XLNet, RoFormer and NEZHA.

`RelativePositionBias` adds a learned number per head and distance to the scores (arXiv 1910.10683).

`DistanceEncoder` and `RelativeScores` compute the score of query i and key j as

    (q_i + a)·k_j + (q_i + b)·W r(i-j) + (q_i + c)·s(i, j)

(Transformer-XL, arXiv 1901.02860; XLNet, 1906.08237): the content of the key, its distance (r is a sinusoidal encoding;
W and the biases are learned), and whether it belongs to the same segment. The kernel computes the first term; the other
two become a bias per query.

`RotaryEncoder` and `RotaryPositions` rotate queries and keys by angles that grow with their positions, so that the
score of two depends on their distance (RoFormer, arXiv 2104.09864).

`ClippedEncoder` and `ClippedAttention` add a sinusoidal encoding of the distance to keys and to values, with one
encoding for all distances beyond a limit (NEZHA, arXiv 1909.00204).

Shapes are those of attention.py; R distances, W width of the model.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from allmask.nn.attention import Attention, Bias, Block, Readable, Route
from allmask.nn.dropout import Dropout


class NoPositionBias(nn.Module):
    """Positions are embedded or absent: nothing is added to the scores."""

    def forward(self, route: Route) -> None:
        return None

    def whole(self, route: Route) -> None:
        return None


# ---- T5: a bias per distance -----------------------------------------------------------------------------------


class RelativePositionBias(nn.Module):
    """A bias per head and bucket of distances between query and key (T5, arXiv 1910.10683).

    Half of the buckets hold one distance each, the others ranges that grow up to `distance`; larger distances share the
    last bucket. With `both_ways`, keys after the query have buckets of their own; otherwise they count as distance 0:

        distance of a key        0  1  2  …  15  16  …  19  …  113  …  128  …     32 buckets, one way
        bucket                   0  1  2  …  15  16  …  17  …   31  …   31  …
    """

    bucket: Tensor

    def __init__(self, heads: int, buckets: int, distance: int, both_ways: bool):
        super().__init__()
        self.both_ways = both_ways
        self.table = nn.Embedding(buckets, heads)
        self.register_buffer("bucket", _buckets(buckets // 2 if both_ways else buckets, distance), persistent=False)

    def forward(self, route: Route) -> Bias:
        """The bias of each block, -inf where the mask forbids; if rows read other rows, one bias for all."""
        if route.keys is not route.queries:
            return self.whole(route)
        return tuple(self._of_block(route, block) for block in route.blocks)

    def whole(self, route: Route) -> Tensor:
        """The bias (B, H, Q, K) of all pairs, whatever the mask; B = 1 if all rows have the same distances."""
        return self._look_up(_deduplicated(route.keys.position[:, None, :] - route.queries.position[:, :, None]))

    def _of_block(self, route: Route, block: Block) -> Tensor:
        position, hidden = _as_rows(block, route.queries.position), _hidden_in(route, block)
        bias = self._look_up(_deduplicated(position[:, None, :] - position[:, :, None]))
        return bias if hidden is None else bias.masked_fill(hidden[:, None], -torch.inf)

    def _look_up(self, relative: Tensor) -> Tensor:
        """Position of the key minus that of the query (B, Q, K) -> (B, H, Q, K)"""
        distance = relative.abs() if self.both_ways else relative.neg().clamp(min=0)
        bucket = self.bucket[distance.clamp(max=self.bucket.shape[0] - 1)]
        if self.both_ways:
            bucket = bucket + (relative > 0) * (self.table.num_embeddings // 2)
        return self.table(bucket).movedim(-1, 1)


def _buckets(count: int, distance: int) -> Tensor:
    """The bucket of each distance up to `distance`; larger ones are in the last bucket, too."""
    exact = count // 2
    away = torch.arange(max(distance, exact) + 1, device="cpu")
    grown = (away.float() / exact).log() / math.log(distance / exact) * (count - exact)
    return torch.where(away < exact, away, (exact + grown.clamp(min=0).long()).clamp(max=count - 1))


# ---- XLNet: scores of distance encodings -------------------------------------------------------------------------


class BlockDistances(NamedTuple):
    """The distances between the queries and keys of a block; one row if all rows are equal."""

    shape: tuple[int, int]  # queries and keys
    first: int  # index of the first distance encoding used
    count: int
    index: Tensor | None  # (B, Q, K) which of those; None: positions are consecutive, and `shift` finds them
    differs: Tensor | None  # (B, Q, K) True where the segment of the key differs; None: nowhere
    hidden: Tensor | None  # (B, Q, K) True where the mask forbids; None: `attend` applies the mask


@dataclass(frozen=True)
class DistanceEncodings:
    """What all layers share of a route: an encoding per distance, the largest distance first, and which are used where.

    There is one `BlockDistances` per block, or a single one (`whole`) if queries read more than their own row.
    """

    encodings: Tensor  # (R, W)
    blocks: tuple[BlockDistances, ...]
    whole: bool


class Rotation(NamedTuple):
    """Sine and cosine (B, Q, 1, D/2) of the angles of each token of a route."""

    sine: Tensor
    cosine: Tensor

    def turn(self, x: Tensor) -> Tensor:
        """Rotate x (B, Q, H, D): its numbers 2i and 2i + 1 are a point in a plane."""
        sine, cosine = self.sine.to(x.dtype), self.cosine.to(x.dtype)
        first, second = x[..., 0::2], x[..., 1::2]
        return torch.stack([first * cosine - second * sine, second * cosine + first * sine], dim=-1).flatten(-2)


class ClippedBlock(NamedTuple):
    """The encodings between queries and keys of a block (B, Q, K), as rows of a table; one row if all are equal."""

    index: Tensor
    hidden: Tensor | None  # True where the mask forbids; None: nowhere


@dataclass(frozen=True)
class ClippedDistances:
    """What `ClippedEncoder` computes once per batch for all layers: the table of encodings and its rows per block."""

    table: Tensor  # (R, D)
    blocks: tuple[ClippedBlock, ...]
    whole: bool  # queries read more than their own row: one block for all


PositionBias = (
    Bias | DistanceEncodings | Rotation | ClippedDistances | None
)  # what a layer gets for the relative positions of a route


class DistanceEncoder(nn.Module):
    """Compute the distance encodings of a route. Distances beyond `clamp` count as `clamp`; 0: no limit."""

    def __init__(self, width: int, clamp: int = 0, dropout: float = 0.0):
        super().__init__()
        self.width = width
        self.clamp = clamp
        self.dropout = Dropout(dropout)

    def forward(self, route: Route) -> DistanceEncodings:
        if route.keys is not route.queries:
            return self.whole(route)
        return self._encode([_of_block(route, block) for block in route.blocks], whole=False)

    def whole(self, route: Route) -> DistanceEncodings:
        segments = route.segments or (None, None)
        return self._encode([_Positions(route.queries.position, route.keys.position, *segments)], whole=True)

    def _encode(self, blocks: list[_Positions], whole: bool) -> DistanceEncodings:
        high = max(block.range[0] for block in blocks)
        low = min(block.range[1] for block in blocks)
        encodings = _encodings(high, low, self.width, self.clamp).to(blocks[0].queries.device)
        return DistanceEncodings(self.dropout(encodings), tuple(block.distances(high) for block in blocks), whole)


@dataclass(frozen=True)
class _Positions:
    """Positions of queries (B, Q) and keys (B, K), their segments, and where the mask forbids (B, Q, K)."""

    queries: Tensor
    keys: Tensor
    segments: Tensor | None = None
    key_segments: Tensor | None = None
    hidden: Tensor | None = None

    def distances(self, high: int) -> BlockDistances:
        """For encodings that begin with the distance `high`."""
        index = None if self._away is None else self.range[0] - self._away
        count, differs = self.range[0] - self.range[1] + 1, None
        if self.segments is not None and self.key_segments is not None:
            differs = self.segments[:, :, None] != self.key_segments[:, None, :]
            differs = _deduplicated(differs) if bool(differs.any()) else None
        return BlockDistances(self._shape, high - self.range[0], count, index, differs, self.hidden)

    @cached_property
    def range(self) -> tuple[int, int]:
        """One more than the largest distance, as `shift` needs, and the smallest; negative if the key comes later."""
        if not min(self._shape):
            return sum(self._shape) - 1, 0
        if self._away is not None:
            return int(self._away.max()) + 1, int(self._away.min())
        offset = int(self.queries[0, 0]) - int(self.keys[0, 0])
        return offset + self._shape[0], offset - self._shape[1] + 1

    @cached_property
    def _away(self) -> Tensor | None:
        """(B, Q, K) distances; None if positions are consecutive, so that the first pair determines all others."""
        if not min(self._shape):
            return None
        offsets = self.queries[:, :1] - self.keys[:, :1]
        consecutive = all(bool((x.diff(dim=1) == 1).all()) for x in (self.queries, self.keys))
        if consecutive and bool((offsets == offsets[:1]).all()):
            return None
        return _deduplicated(self.queries[:, :, None] - self.keys[:, None, :])

    @property
    def _shape(self) -> tuple[int, int]:
        return self.queries.shape[1], self.keys.shape[1]


def _of_block(route: Route, block: Block) -> _Positions:
    position = _as_rows(block, route.queries.position)
    segment = None if route.segments is None else _as_rows(block, route.segments[0])
    return _Positions(position, position, segment, segment, _hidden_in(route, block))


def _hidden_in(route: Route, block: Block) -> Tensor | None:
    """(documents or 1, length, length) True where the mask forbids within a block; None: nowhere."""
    if block.kind in ("full", "empty"):
        return None
    if block.kind == "dense":
        return ~route.visible(block.start, block.stop, block)
    return ~route.queries[:1, block.start : block.start + block.length].visible()  # the same in all its documents


def _as_rows(block: Block, x: Tensor) -> Tensor:
    """The documents of a block as rows: (1, n·L, …) -> (n, L, …)."""
    return x[:, block.start : block.stop].unflatten(1, (block.documents, -1)).flatten(0, 1)


def _deduplicated(rows: Tensor) -> Tensor:
    """One row if all rows are equal."""
    return rows[:1] if bool((rows == rows[:1]).all()) else rows


def _encodings(high: int, low: int, width: int, clamp: int) -> Tensor:
    """(R, W), for the distances from `high` down to `low`."""
    largest = 1 << max(6, max(high, -low).bit_length())
    table = _table(largest, width)
    if not clamp:
        return table[largest - high : largest - low + 1]
    return table[largest - torch.arange(high, low - 1, -1, device="cpu").clamp(-clamp, clamp)]


@lru_cache(maxsize=4)
def _table(largest: int, width: int) -> Tensor:
    """(2·largest + 1, W): all sines of a distance, then all cosines, from the distance `largest` down to -`largest`."""
    numbers = {"dtype": torch.float64, "device": "cpu"}  # also where a model is built on the meta device
    frequency = 10000.0 ** (-torch.arange(0, width, 2, **numbers) / width)
    angle = torch.arange(largest, -largest - 1, -1, **numbers)[:, None] * frequency
    return torch.cat([angle.sin(), angle.cos()], dim=-1)[:, :width].float()


class RelativeScores(nn.Module):
    """Turn queries and distance encodings into the queries of the kernel and the bias of their scores."""

    def __init__(self, width: int, heads: int, head_width: int):
        super().__init__()
        self.scale = head_width**-0.5
        self.position = nn.Parameter(torch.empty(heads, head_width, width))
        self.segment = nn.Parameter(torch.empty(2, heads, head_width))  # same, different
        self.content_bias = nn.Parameter(torch.empty(heads, head_width))
        self.position_bias = nn.Parameter(torch.empty(heads, head_width))
        self.segment_bias = nn.Parameter(torch.empty(heads, head_width))

    def keys(self, k: Tensor, distances: DistanceEncodings) -> Tensor:
        return k

    def forward(self, q: Tensor, route: Route, distances: DistanceEncodings) -> tuple[Tensor, Bias]:
        """q (B, Q, H, D)"""
        biases = (self.content_bias, self.position_bias, self.segment_bias)
        for_content, for_position, for_segment = (q + x.to(q.dtype) for x in biases)
        for_position, position = for_position * self.scale, self.position.to(q.dtype)
        encodings = distances.encodings.to(q.dtype)
        # only the difference between the same segment and another matters to a softmax
        other = (self.segment[1] - self.segment[0]).to(q.dtype)
        if_differs = (for_segment * other).sum(-1, keepdim=True) * self.scale  # (B, Q, H, 1)
        if _project_queries(q, encodings):
            for_position = torch.einsum("bqhd,hdw->bqhw", for_position, position)
        else:
            encodings = torch.einsum("rw,hdw->rhd", encodings, position)
        if distances.whole:
            return for_content, _bias(for_position, if_differs, encodings, distances.blocks[0])
        pairs = zip(route.blocks, distances.blocks, strict=True)
        return for_content, tuple(
            _bias(_as_rows(block, for_position), _as_rows(block, if_differs), encodings, piece)
            for block, piece in pairs
        )


def _project_queries(q: Tensor, encodings: Tensor) -> bool:
    """Whether projecting the queries takes less work than projecting the encodings; so it does for few queries."""
    queries, (distances, width) = q.shape[0] * q.shape[1], encodings.shape
    return queries * (width + q.shape[2] * distances) < distances * (width + queries)


def _bias(for_position: Tensor, if_differs: Tensor, encodings: Tensor, piece: BlockDistances) -> Tensor:
    """(B, H, Q, K) from queries (B, Q, H, D) and encodings (R, H, D), or (B, Q, H, W) and (R, W)."""
    encodings = encodings[piece.first : piece.first + piece.count]
    scores = torch.einsum("bqhd,rhd->bhqr" if encodings.ndim == 3 else "bqhw,rw->bhqr", for_position, encodings)
    if piece.index is None:
        bias = shift(scores, piece.shape[1])
    else:
        bias = scores.gather(-1, piece.index[:, None].expand(*scores.shape[:3], -1))
    if piece.differs is not None:
        bias = bias + if_differs.transpose(1, 2) * piece.differs[:, None]
    return bias if piece.hidden is None else bias.masked_fill(piece.hidden[:, None], -torch.inf)


def shift(scores: Tensor, keys: int) -> Tensor:
    """Turn scores (…, Q, Q + K) by distance, the largest first, into scores (…, Q, K) by key.

    Each row begins one further to the left. Q = 2, K = 3; the first query is at the second key:

           3  2  1  0 -1               distance         1  0 -1
        a  a3 a2 a1 a0 a-1      ->     a                a1 a0 a-1
        b  b3 b2 b1 b0 b-1             b                b2 b1 b0
    """
    queries = scores.shape[-2]
    moved = scores.flatten(-2)[..., queries:]  # drop the first Q numbers; the rest are rows that are one shorter
    return moved.unflatten(-1, (queries, queries + keys - 1))[..., :keys]


def sinusoids(positions: Tensor | int, width: int) -> Tensor:
    """The encodings (N, width) of positions (N,), or of the first N."""
    numbers = {"dtype": torch.float64, "device": "cpu"}  # also where a model is built on the meta device
    positions = torch.arange(positions, device="cpu") if isinstance(positions, int) else positions
    frequency = torch.exp(torch.arange(0, width, 2, **numbers) * (-math.log(10000.0) / width))
    angle = positions.to(**numbers)[:, None] * frequency
    waves = torch.stack([angle.sin(), angle.cos()], dim=-1).flatten(1)  # (N, width rounded up to even)
    return waves[:, :width].float()


# ---- RoFormer: rotation ------------------------------------------------------------------------------------------


class RotaryEncoder(nn.Module):
    """Compute the rotation of the tokens of a route, from their positions; the same for all layers and heads."""

    def __init__(self, head_width: int):
        super().__init__()
        self.frequencies = head_width // 2

    def forward(self, route: Route) -> Rotation:
        position = route.queries.position
        numbers = {"dtype": torch.float64, "device": position.device}
        frequency = 10000.0 ** (-torch.arange(self.frequencies, **numbers) / self.frequencies)
        angle = position.to(torch.float64)[..., None, None] * frequency  # (B, Q, 1, D/2)
        return Rotation(angle.sin().float(), angle.cos().float())

    whole = forward


class RotaryPositions(nn.Module):
    """Rotate queries and keys. Keys are cached as rotated, since their positions do not change."""

    def forward(self, q: Tensor, route: Route, rotation: Rotation) -> tuple[Tensor, None]:
        return rotation.turn(q), None

    def keys(self, k: Tensor, rotation: Rotation | None) -> Tensor:
        return k if rotation is None else rotation.turn(k)


# ---- NEZHA: encodings of clipped distances, for keys and values --------------------------------------------------


class ClippedEncoder(nn.Module):
    """Find the distance encodings of a route. Distances beyond `clamp`, before or after, count as `clamp`."""

    table: Tensor

    def __init__(self, head_width: int, clamp: int):
        super().__init__()
        self.clamp = clamp
        self.register_buffer("table", sinusoids(2 * clamp + 1, head_width), persistent=False)

    def forward(self, route: Route) -> ClippedDistances:
        if route.keys is not route.queries:
            return self.whole(route)
        return ClippedDistances(self.table, tuple(self._of_block(route, block) for block in route.blocks), False)

    def whole(self, route: Route) -> ClippedDistances:
        hidden = ~route.queries.visible(route.keys, route.strict)
        block = ClippedBlock(self._index(route.queries.position, route.keys.position), hidden)
        return ClippedDistances(self.table, (block,), True)

    def _of_block(self, route: Route, block: Block) -> ClippedBlock:
        position = _as_rows(block, route.queries.position)
        hidden = _hidden_in(route, block)
        if block.kind == "empty":  # padding reads nothing
            hidden = torch.ones_like(position, dtype=torch.bool)[:, :, None].expand(-1, -1, position.shape[1])
        return ClippedBlock(self._index(position, position), hidden)

    def _index(self, queries: Tensor, keys: Tensor) -> Tensor:
        away = keys[:, None, :] - queries[:, :, None]
        return _deduplicated(away).clamp(-self.clamp, self.clamp) + self.clamp


class ClippedAttention(Attention):
    """The score of query i and key j is q_i·(k_j + r_ij), and what is read there is v_j + r_ij.

    No fused kernel has the second sum, so scores are computed document by document; rows that continue a text each
    have a copy of its keys and values.
    """

    def forward(self, x: Tensor, read: Readable, route: Route, bias: Any = None) -> Tensor:
        q, (k, v) = self.split(self.query(x)), read.of_rows()
        if bias.whole:
            return self.output(self._read(q, k, v, bias.table, bias.blocks[0]).flatten(-2))
        parts = []
        for block, piece in zip(route.blocks, bias.blocks, strict=True):
            own_q, own_k, own_v = (_as_rows(block, part) for part in (q, k, v))
            rows = self._read(own_q, own_k, own_v, bias.table, piece)
            parts.append(rows.unflatten(0, (-1, block.documents)).flatten(1, 2))
        return self.output(torch.cat(parts, dim=1).flatten(-2))

    def attention_weights(self, x: Tensor, read: Readable, route: Route, bias: Any = None) -> Tensor:
        q, (k, _) = self.split(self.query(x)), read.of_rows()
        return self._weights(q, k, bias.table.to(q.dtype), bias.blocks[0])

    def _read(self, q: Tensor, k: Tensor, v: Tensor, table: Tensor, piece: ClippedBlock) -> Tensor:
        table = table.to(q.dtype)
        weights = self._weights(q, k, table, piece)
        weights = F.dropout(weights, self.dropout, self.training)
        index = piece.index[:, None].expand_as(weights)
        by_distance = weights.new_zeros(*weights.shape[:3], len(table)).scatter_add(-1, index, weights)
        read = torch.einsum("bhqk,bkhd->bqhd", weights, v)
        return read + torch.einsum("bhqr,rd->bqhd", by_distance, table)

    def _weights(self, q: Tensor, k: Tensor, table: Tensor, piece: ClippedBlock) -> Tensor:
        """(B, H, Q, K)"""
        scores = torch.einsum("bqhd,bkhd->bhqk", q, k)
        by_distance = torch.einsum("bqhd,rd->bhqr", q, table)
        scores = scores + by_distance.gather(-1, piece.index[:, None].expand_as(scores))
        scores = scores * q.shape[-1] ** -0.5
        if piece.hidden is None:
            return scores.softmax(-1)
        hidden = piece.hidden[:, None]
        return scores.masked_fill(hidden, -torch.inf).softmax(-1).masked_fill(hidden, 0.0)  # an empty row is NaN
