"""Attention (arXiv 1706.03762): the only place where a mask meets a kernel.

Shapes: B rows, T tokens, Q queries, K keys, H heads, D head width. Heads come after tokens, (B, T, H, D), so that
adjacent documents of equal length in a packed row can be viewed as a batch without copying.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cache, cached_property, partial
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from allmask.kernels.packed_attention import (
    Block,
    attend_documents,
    attend_partners,
    chosen,
    layout,
    partners,
    suits,
    suits_partners,
)
from allmask.mask import Mask, expect_mask
from allmask.nn.dropout import dropout_mask

SHORT_CELLS = 1 << 18  # 512 × 512: the scores of a head stay in the cache
DENSE_CELLS = 1 << 22  # boolean cells at a time (4 MB): long rows are masked in strips of queries
STRIP = 256  # queries, or the window if that is wider: a longer strip would read keys that few of its queries see

Bias = Tensor | tuple[Tensor, ...]  # see `attend`


@dataclass(frozen=True)
class Route:
    """How a mask is lowered to kernels: found once per batch, used by every layer."""

    queries: Mask
    keys: Mask
    strict: bool
    blocks: tuple[Block, ...]
    pairs: Pairs | None = None  # if each document of a row reads one document of another row
    segments: tuple[Tensor, Tensor] | None = None  # (B, Q) and (B, K), for attention that compares segments

    @classmethod
    def find(cls, queries: Mask, keys: Mask | None = None, strict: bool = False) -> Route:
        """Find the cheapest lowering: no mask, causal, prefix, per document, boolean."""
        expect_mask(queries)
        if keys is not None:
            expect_mask(keys)
        if strict:
            blocks = None
        elif keys is None:
            blocks = _documents(queries) if len(queries) == 1 else _uniform(queries)
        else:
            blocks = _all_seen(queries, keys)
        pairs = None if strict or blocks or keys is None else Pairs.find(queries, keys)
        keys = queries if keys is None else keys
        return cls(queries, keys, strict, blocks or (Block(0, queries.shape[1], "dense"),), pairs)

    @property
    def is_regular(self) -> bool:
        """Whether no block needs a matrix or is padding; otherwise `Mask.flatten` pays off."""
        return all(block.kind not in ("dense", "empty") for block in self.blocks)

    def cut(self, x: Tensor) -> tuple[Tensor, ...]:
        """Split x by blocks. A single block gets all of x, because its keys may be other tokens than its queries."""
        if len(self.blocks) == 1:
            return (x,)
        return x.split([block.stop - block.start for block in self.blocks], dim=1)

    def visible(self, start: int, stop: int, block: Block, among: slice = slice(None)) -> Tensor:
        """The boolean matrix (B, Q, K) of queries `start` to `stop` of a dense block and the keys `among` its own."""
        return self.queries[:, start:stop].visible(self._keys_of(block)[:, among], self.strict)

    def near(self, start: int, stop: int, block: Block) -> slice:
        """The keys of a dense block within the window of queries `start` to `stop`, found without a matrix."""
        position, window = self._keys_of(block).position, self.queries.window
        if window is None or start == stop:
            return slice(0, position.shape[1])
        own = self.queries.position[:, start:stop]
        return _span(((position > own.min() - window) & (position < own.max() + window)).any(0))

    @cached_property
    def flex_mask(self) -> Any:
        """The block mask of FlexAttention, built once for all layers that use this route."""
        from torch.nn.attention.flex_attention import create_block_mask

        queries, keys, strict = self.queries, self.keys, self.strict

        def may_read(b, h, i, j):
            older = keys.order[b, j] < queries.order[b, i] if strict else keys.order[b, j] <= queries.order[b, i]
            seen = older & (keys.group[b, j] == queries.group[b, i]) & (queries.group[b, i] >= 0)
            if queries.window is not None:
                seen = seen & ((queries.position[b, i] - keys.position[b, j]).abs() < queries.window)
            if queries.matrix is not None:
                seen = seen & queries.matrix[b, queries.position[b, i], keys.position[b, j]]
            return seen

        rows, tokens = queries.shape
        return create_block_mask(may_read, rows, None, tokens, keys.shape[1], device=queries.device.type)

    def _keys_of(self, block: Block) -> Mask:
        return self.keys if len(self.blocks) == 1 else self.keys[:, block.start : block.stop]


def attend(
    q: Tensor, k: Tensor, v: Tensor, mask: Mask | Route, dropout: float = 0.0, scale: float | None = None,
    bias: Bias | None = None,
) -> Tensor:  # fmt: skip
    """Softmax attention of q (B, Q, H, D) over the keys and values k, v (B, K, H, D) that the mask shows: (B, Q, H, D).

    `bias` is added to the scores: one tensor that broadcasts to (B, H, Q, K), or one per block of a route, which
    broadcasts to (documents, H, length, length) and is -inf where the mask forbids. A row that sees nothing is zeros.
    """
    route = mask if isinstance(mask, Route) else Route.find(mask)
    kernel = _Kernel(dropout, scale)
    if isinstance(bias, Tensor):  # for all queries and keys at once
        whole = Block(0, q.shape[1], "dense")
        return _dense(kernel, q, k, v, replace(route, blocks=(whole,)), whole, bias)
    if bias is None:
        if route.pairs is not None:
            return route.pairs.attend(kernel, q, k, v)
        if q.is_cuda and dropout == 0.0 and (len(route.blocks) > 1 or not route.is_regular):
            return flex_attend(q, k, v, route, scale)
        if suits(q, k, v, route.blocks, dropout):
            return attend_documents(q, k, v, route.blocks, dropout, scale)
    biases = bias or [None] * len(route.blocks)
    pieces = zip(route.cut(q), route.cut(k), route.cut(v), route.blocks, biases, strict=True)
    parts = [_attend_block(kernel, route, *piece) for piece in pieces]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)


def suits_chosen(x: Tensor, heads: int, head_width: int, route: Route) -> bool:
    """Whether `attend_chosen` supports hidden states x (B, T, W) with this route, in the dtype of products."""
    if x.device.type != "cpu":
        return False
    dtype = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else x.dtype
    q = torch.empty((), dtype=dtype, device=x.device).expand(*x.shape[:-1], heads, head_width)
    return route.pairs is None and route.queries is route.keys and not route.strict and suits(q, q, q, route.blocks)


def attend_chosen(q: Tensor, k: Tensor, v: Tensor, route: Route, where: Tensor, dropout: float = 0.0) -> Tensor:
    """`attend` for the queries q (M, H, D) of the tokens where `where` (B, T) is True; k, v are (B, T, H, D)."""
    documents = layout(route.blocks, *where.shape)
    assert documents is not None
    documents, places = chosen(documents, where.flatten().numpy())
    k, v = (x.flatten(0, 1)[None] for x in (k, v))
    return attend_partners(q[None], k, v, documents, dropout, places=places)[0]


def attention_weights(
    q: Tensor, k: Tensor, mask: Mask | Route, scale: float | None = None, bias: Tensor | None = None
) -> Tensor:
    """The attention weights (B, H, Q, K), for pictures. Exactly zero where the mask forbids."""
    route = mask if isinstance(mask, Route) else Route.find(mask)
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k) * (scale or 1.0 / math.sqrt(q.shape[-1]))
    scores = scores if bias is None else scores + bias
    visible = route.queries.visible(route.keys, route.strict)[:, None]
    weights = scores.masked_fill(~visible, -torch.inf).softmax(-1)
    return weights.masked_fill(~visible, 0.0)  # softmax of an empty row is NaN


def flex_attend(q: Tensor, k: Tensor, v: Tensor, route: Route, scale: float | None = None) -> Tensor:
    """Compute attention by FlexAttention, which compares order and group inside the kernel (CUDA)."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return _flex_kernel(q.is_cuda)(q, k, v, block_mask=route.flex_mask, scale=scale).transpose(1, 2)


@cache
def _flex_kernel(compiled: bool) -> Any:
    """FlexAttention, compiled once per process."""
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention) if compiled else flex_attention


# ---- modules -----------------------------------------------------------------------------------------------


class KeyValue(NamedTuple):
    """The keys and values of a layer, (B, K, H, D) each."""

    keys: Tensor
    values: Tensor

    def append(self, new: KeyValue) -> KeyValue:
        return KeyValue(torch.cat([self.keys, new.keys], dim=1), torch.cat([self.values, new.values], dim=1))

    def attend(self, q: Tensor, route: Route, dropout: float = 0.0, bias: Bias | None = None) -> Tensor:
        return attend(q, self.keys, self.values, route, dropout, bias=bias)

    def of_rows(self) -> KeyValue:
        return self


class Readable(Protocol):
    """Keys and values that attention can read: a `KeyValue` or a `BeamKeyValue`."""

    def attend(self, q: Tensor, route: Route, dropout: float = 0.0, bias: Bias | None = None) -> Tensor: ...

    def of_rows(self) -> KeyValue:
        """All keys and values of each row, for attention that cannot share those of a text."""
        ...


class Scaled(nn.Module):
    """Multiply by a constant."""

    def __init__(self, factor: float):
        super().__init__()
        self.factor = factor

    def forward(self, x: Tensor) -> Tensor:
        return x * self.factor


class PassThrough(nn.Module):
    """Return queries and bias unchanged, and keys too."""

    def forward(self, q: Tensor, route: Route, bias: Bias | None) -> tuple[Tensor, Bias | None]:
        return q, bias

    def keys(self, k: Tensor, bias: Bias | None) -> Tensor:
        return k


class Attention(nn.Module):
    """Multi-head attention of x over the keys and values in `read`: its own, those of a cache, or of another text.

    `head_width` is width / heads unless given. If not `scaled`, scores are not divided by sqrt(D): queries are
    multiplied by sqrt(D) first, since every kernel divides. `relate` applies relative positions, which a layer gets as
    its `bias`: it turns distance encodings into a bias per query, or rotates queries and keys (relative_attention.py).
    """

    def __init__(
        self, width: int, heads: int, dropout: float = 0.0, bias: bool = True, head_width: int = 0, scaled: bool = True,
        relate: nn.Module | None = None,
    ):  # fmt: skip
        super().__init__()
        self.heads = heads
        self.dropout = dropout
        inner = heads * head_width if head_width else width
        self.query = nn.Linear(width, inner, bias)
        self.key = nn.Linear(width, inner, bias)
        self.value = nn.Linear(width, inner, bias)
        self.output = nn.Linear(inner, width, bias)
        self.query_scale = nn.Identity() if scaled else Scaled(math.sqrt(inner // heads))
        self.relate: Any = PassThrough() if relate is None else relate

    @property
    def is_plain(self) -> bool:
        """Whether there are no relative positions, and scores are scaled."""
        return type(self.relate) is PassThrough and type(self.query_scale) is nn.Identity

    def reads_chosen(self, x: Tensor, route: Route) -> bool:
        """Whether some queries of hidden states x (B, T, W) can be computed without the others: `attend_chosen`."""
        if type(self) is not Attention or not self.is_plain or not isinstance(self.query, nn.Linear):
            return False
        return suits_chosen(x, self.heads, self.query.out_features // self.heads, route)

    def keys_values(self, x: Tensor, bias: Any = None) -> KeyValue:
        return KeyValue(self.relate.keys(self.split(self.key(x)), bias), self.split(self.value(x)))

    def forward(self, x: Tensor, read: Readable, route: Route, bias: Any = None) -> Tensor:
        q, bias = self._queries(x, route, bias)
        dropout = self.dropout if self.training else 0.0
        return self.output(read.attend(q, route, dropout, bias).flatten(-2))

    def attention_weights(self, x: Tensor, read: KeyValue, route: Route, bias: Any = None) -> Tensor:
        q, whole = self._queries(x, route, bias)
        assert not isinstance(whole, tuple)
        return attention_weights(q, read.keys, route, bias=whole)

    def _queries(self, x: Tensor, route: Route, bias: Any) -> tuple[Tensor, Bias | None]:
        """The queries (B, Q, H, D), and the bias of their scores."""
        return self.relate(self.query_scale(self.split(self.query(x))), route, bias)

    def split(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (self.heads, -1))  # (B, T, W) -> (B, T, H, D)


# ---- kernels -----------------------------------------------------------------------------------------------


class _Kernel(NamedTuple):
    dropout: float
    scale: float | None

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None = None) -> Tensor:
        """Attention with an additive bias, which may contain -inf but not a whole row of it."""
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))  # (B, H, T, D)
        bias = None if bias is None else bias.to(q.dtype)
        if self._by_hand(q, k):
            return self._weighted(q @ k.transpose(2, 3), v, bias).transpose(1, 2)
        return F.scaled_dot_product_attention(q, k, v, bias, self.dropout, scale=self.scale).transpose(1, 2)

    def masked(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        """Attention with a boolean mask or a bias that may forbid all keys of a query, whose result is then zeros."""
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return F.scaled_dot_product_attention(q, k, v, mask, self.dropout, scale=self.scale).transpose(1, 2)

    def causal(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Causal attention of the last Q of K tokens: each reads the keys up to its own."""
        queries, keys = q.shape[1], k.shape[1]
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        if queries == keys and not self._by_hand(q, k):
            out = F.scaled_dot_product_attention(q, k, v, None, self.dropout, True, scale=self.scale)
            return out.transpose(1, 2)
        visible = torch.ones(queries, keys, dtype=torch.bool, device=q.device).tril(keys - queries)
        if self._by_hand(q, k):
            return self._weighted((q @ k.transpose(2, 3)).masked_fill(~visible, -torch.inf), v).transpose(1, 2)
        return F.scaled_dot_product_attention(q, k, v, visible, self.dropout, scale=self.scale).transpose(1, 2)

    def _by_hand(self, q: Tensor, k: Tensor) -> bool:
        """Whether plain products beat the fused kernel: for short rows on a CPU, with dropout or training in bf16."""
        short = q.shape[2] * k.shape[2] <= SHORT_CELLS and q.device.type == "cpu"
        return short and (self.dropout > 0.0 or (q.dtype == torch.bfloat16 and q.requires_grad))

    def _weighted(self, scores: Tensor, v: Tensor, bias: Tensor | None = None) -> Tensor:
        scores = scores * (self.scale or v.shape[-1] ** -0.5)
        weights = (scores if bias is None else scores + bias).softmax(-1)
        if self.dropout:
            weights, v = weights * dropout_mask(weights, self.dropout), v * (1.0 / (1.0 - self.dropout))
        return weights @ v


def _attend_block(
    kernel: _Kernel, route: Route, q: Tensor, k: Tensor, v: Tensor, block: Block, bias: Tensor | None
) -> Tensor:
    """Attention within one block; a `bias` already contains the block's mask."""
    if block.kind == "dense":
        return _dense(kernel, q, k, v, route, block) if bias is None else kernel.masked(q, k, v, bias.to(q.dtype))
    if block.kind == "empty":
        return q.masked_fill(q.new_ones((), dtype=torch.bool), 0.0)  # zeros, with a gradient
    if bias is not None:
        run = partial(kernel, bias=bias)
    else:
        kinds = {"full": kernel, "causal": kernel.causal, "prefix": partial(_prefix, kernel, source=block.source)}
        run = kinds[block.kind]
    if block.documents == 1:
        return run(q, k, v)
    # documents of equal length as a batch: (1, n·L, H, D) -> (n, L, H, D), a view
    q, k, v = (x.unflatten(1, (block.documents, -1)).flatten(0, 1) for x in (q, k, v))
    return run(q, k, v).flatten(0, 1)[None]


def _prefix(kernel: _Kernel, q: Tensor, k: Tensor, v: Tensor, source: int) -> Tensor:
    """The source reads itself without a mask; the rows of the target are those of a causal mask."""
    first, rest = q.split([source, q.shape[1] - source], dim=1)
    head = kernel(first, k[:, :source], v[:, :source])
    if rest.shape[1] * q.shape[1] > DENSE_CELLS:  # long: causal attention of all rows costs less than a matrix
        return torch.cat([head, kernel.causal(q, k, v)[:, source:]], dim=1)
    return torch.cat([head, kernel.causal(rest, k, v)], dim=1)


def _dense(
    kernel: _Kernel, q: Tensor, k: Tensor, v: Tensor, route: Route, block: Block, bias: Tensor | None = None
) -> Tensor:
    """Attention with a boolean matrix, made for one strip of queries at a time so that memory stays O(T)."""
    strip, window = max(1, DENSE_CELLS // max(1, k.shape[0] * k.shape[1])), route.queries.window
    if window is not None:
        strip = min(strip, max(STRIP, window))
    parts = []
    for start in range(0, q.shape[1], strip):
        stop = min(start + strip, q.shape[1])
        first, last = block.start + start, block.start + stop
        if bias is not None:
            visible = route.visible(first, last, block)[:, None]  # (B, 1, Q, K)
            part = bias if bias.shape[-2] == 1 else bias[..., start:stop, :]
            parts.append(kernel.masked(q[:, start:stop], k, v, torch.where(visible, part, -torch.inf)))
            continue
        near = route.near(first, last, block)
        visible = route.visible(first, last, block, near)[:, None]
        read = _span(visible.flatten(0, -2).any(0))  # only these are kept for the backward pass
        keys, values = k[:, near][:, read], v[:, near][:, read]
        parts.append(kernel.masked(q[:, start:stop], keys, values, visible[..., read].clone()))
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)


def _span(chosen: Tensor) -> slice:
    """The slice from the first to the last True; of length 1 if there is none."""
    found = chosen.nonzero()[:, 0]
    return slice(int(found[0]), int(found[-1]) + 1) if len(found) else slice(0, 1)


# ---- cross-attention between packed rows ---------------------------------------------------------------------


@dataclass(frozen=True)
class Table:
    """A flat list of N items as a table of rows, shorter rows padded with zeros."""

    rows: int
    width: int
    cells: Tensor | None  # (N,) the cell of each item in the flattened table; None: items fill it in order

    @classmethod
    def of(cls, lengths: np.ndarray, device: torch.device) -> Table:
        """The table of rows of these lengths."""
        width = int(lengths.max())
        if (lengths == width).all():
            return cls(len(lengths), width, None)
        begins = np.arange(len(lengths)) * width - (lengths.cumsum() - lengths)
        cells = np.arange(lengths.sum()) + begins.repeat(lengths)
        return cls(len(lengths), width, torch.from_numpy(cells).to(device))

    @classmethod
    def by_row(cls, row: Tensor, rows: int) -> Table:
        """The table of items whose row is given, (N,); the items of a row are in order."""
        lengths = row.bincount(minlength=rows)
        width = max(1, int(lengths.max()))
        column = torch.arange(len(row), device=row.device) - (lengths.cumsum(0) - lengths)[row]
        return cls(rows, width, row * width + column)

    def spread(self, x: Tensor) -> Tensor:
        """(N, …) -> (rows, width, …)"""
        if self.cells is not None:
            x = x.new_zeros(self.rows * self.width, *x.shape[1:]).index_copy(0, self.cells, x)
        return x.unflatten(0, (self.rows, self.width))

    def gather(self, table: Tensor) -> Tensor:
        """(rows, width, …) -> (N, …)"""
        x = table.flatten(0, 1)
        return x if self.cells is None else x[self.cells]


@dataclass(frozen=True)
class Pairs:
    """Two packed rows of the same documents, a decoder's and an encoder's: a query reads all keys of its document."""

    documents: np.ndarray  # see `partners`
    queries: Table
    keys: Table
    hidden: Tensor | None  # (documents, 1, 1, width) -inf where there is no key; None if there is no padding

    @classmethod
    def find(cls, queries: Mask, keys: Mask) -> Pairs | None:
        """Return None if documents differ, are in pieces, or have a key that is younger than one of their queries."""
        if len(queries) != 1 or queries.window is not None or queries.matrix is not None or not queries.shape[1]:
            return None
        (names, starts, lengths), (others, key_starts, key_lengths) = _runs(queries), _runs(keys)
        if not np.array_equal(names, others) or len(np.unique(names)) < len(names) or names.min() < 0:
            return None
        oldest = np.minimum.reduceat(queries.order[0].cpu().numpy(), starts)
        if (oldest < np.maximum.reduceat(keys.order[0].cpu().numpy(), key_starts)).any():
            return None
        table = Table.of(key_lengths, queries.device)
        padding = torch.from_numpy(np.arange(table.width) >= key_lengths[:, None]).to(queries.device)
        hidden = torch.zeros(padding.shape, device=padding.device).masked_fill(padding, -torch.inf)[:, None, None]
        documents = partners(starts, lengths, key_starts, key_lengths)
        return cls(documents, Table.of(lengths, queries.device), table, None if table.cells is None else hidden)

    def attend(self, kernel: _Kernel, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if suits_partners(q, k, v, self.documents, kernel.dropout):
            return attend_partners(q, k, v, self.documents, *kernel)
        q, k, v = self.queries.spread(q[0]), self.keys.spread(k[0]), self.keys.spread(v[0])
        return self.queries.gather(kernel(q, k, v, self.hidden))[None]


def _runs(mask: Mask) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The group, start and length of each run of tokens of one group in a packed row."""
    group = mask.group[0].cpu().numpy()
    starts = np.flatnonzero(np.diff(group, prepend=group[:1] - 1))
    return group[starts], starts, np.diff(starts, append=len(group))


# ---- lowering ----------------------------------------------------------------------------------------------


def _uniform(mask: Mask) -> tuple[Block, ...] | None:
    """One block for the whole batch, if all rows have the same mask and no padding."""
    one_document = bool(((mask.group == mask.group[:, :1]) & mask.valid).all())
    if not one_document or mask.window is not None or mask.matrix is not None:
        return None
    steps = mask.order.diff(dim=1).sign()
    return _documents(mask[:1]) if bool((steps == steps[:1]).all()) else None


def _documents(mask: Mask) -> tuple[Block, ...] | None:
    """The documents of one packed row as blocks; adjacent documents of equal length and kind are one block."""
    if mask.matrix is not None:
        return None
    if mask.shape[1] == 0:
        return (Block(0, 0, "full"),)
    names, starts, lengths = _runs(mask)
    known = names[names >= 0].tolist()
    if len(set(known)) < len(known):  # np.unique would import numpy.ma first
        return None  # a document in several pieces
    stops = starts + lengths
    kinds, sources = _classify(mask.order[0].cpu().numpy(), starts, stops, names)
    if mask.window is not None:
        kinds = np.where(kinds == "empty", "empty", "dense")
    blocks: list[Block] = []
    for row in zip(starts.tolist(), stops.tolist(), kinds.tolist(), sources.tolist(), strict=True):
        block, last = Block(*row), blocks[-1] if blocks else None
        if last and block.kind != "dense" and last.length == block.length and last[2:4] == block[2:4]:
            blocks[-1] = last._replace(stop=block.stop, documents=last.documents + 1)
        else:
            blocks.append(block)
    return tuple(blocks)


def _classify(order: np.ndarray, starts: np.ndarray, stops: np.ndarray, names: np.ndarray):
    """The kind and source length of each document, from the steps of its order: all 0, all up, or 0 and then up."""
    step = np.diff(order, append=order[-1])  # step[i]: from token i to the next
    level = np.append(0, np.cumsum(step == 0))
    upward = np.append(0, np.cumsum(step > 0))
    levels, rises, steps = level[stops - 1] - level[starts], upward[stops - 1] - upward[starts], stops - starts - 1
    flat_first = level[starts + levels] - level[starts] == levels
    kinds = np.select(
        [names < 0, levels == steps, rises == steps, (levels + rises == steps) & flat_first],
        ["empty", "full", "causal", "prefix"],
        "dense",
    )
    return kinds, np.where(kinds == "prefix", levels + 1, 0)


def _all_seen(queries: Mask, keys: Mask) -> tuple[Block, ...] | None:
    """One full block, if every query sees every key, as in the decoding steps of a batch without padding."""
    if queries.window is not None or queries.matrix is not None or keys.shape[1] == 0:
        return None
    one_document = (keys.group == queries.group[:, :1]) & keys.valid
    known = queries.order.amin(1) >= keys.order.amax(1)
    whole = bool(one_document.all() & known.all() & (queries.group == queries.group[:, :1]).all())
    return (Block(0, queries.shape[1], "full"),) if whole else None
