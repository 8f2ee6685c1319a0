"""Attention (arXiv 1706.03762): the only place where a mask meets a kernel.

Shapes: B rows, T tokens, Q queries, K keys, H heads, D width of a head. Heads stand behind tokens, (B, T, H, D), so
that documents of one length, side by side in a packed row, are a batch without copying.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from allmask.masks import Mask

DENSE_CELLS = 1 << 22  # boolean cells made at a time (4 MB): a long row is masked in strips of queries


class Block(NamedTuple):
    """A stretch of tokens whose sight has a name, so that its kernel needs no matrix, or at most a small one.

    `full`: every query reads every key. `causal`: each reads those up to itself. `prefix`: the first `source` tokens
    read each other, the rest is causal. `dense`: a boolean matrix. `empty`: padding, which reads nothing.
    """

    start: int
    stop: int
    kind: str
    source: int = 0
    documents: int = 1  # of equal length, side by side


@dataclass(frozen=True)
class Route:
    """How a mask is lowered to kernels: found once for a batch, used by every layer."""

    queries: Mask
    keys: Mask
    strict: bool
    blocks: tuple[Block, ...]

    @classmethod
    def find(cls, queries: Mask, keys: Mask | None = None, strict: bool = False) -> Route:
        """The cheapest lowering: no mask, causal, prefix, per document, boolean."""
        if strict:
            blocks = None
        elif keys is None:
            blocks = _documents(queries) if len(queries) == 1 else _uniform(queries)
        else:
            blocks = _all_seen(queries, keys)
        keys = queries if keys is None else keys
        return cls(queries, keys, strict, blocks or (Block(0, queries.shape[1], "dense"),))

    @property
    def is_regular(self) -> bool:
        """Whether no block needs a matrix and none is padding; otherwise `Mask.flatten` pays."""
        return all(block.kind not in ("dense", "empty") for block in self.blocks)

    def visible(self, start: int, stop: int, block: Block) -> Tensor:
        """The boolean matrix of some queries of a dense block, (B, Q, K)."""
        return self.queries[:, start:stop].visible(self._keys_of(block), self.strict)

    def _keys_of(self, block: Block) -> Mask:
        return self.keys if len(self.blocks) == 1 else self.keys[:, block.start : block.stop]


def attend(
    q: Tensor, k: Tensor, v: Tensor, mask: Mask | Route, dropout: float = 0.0, scale: float | None = None,
    bias: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Softmax attention of q (B, Q, H, D) over k, v (B, K, H, D) as far as the mask lets it see: (B, Q, H, D).

    `bias`, if given, is added to the scores and broadcasts to (B, H, Q, K). A row that sees nothing yields zeros.
    """
    route = mask if isinstance(mask, Route) else Route.find(mask)
    kernel = _Kernel(dropout, scale)
    if bias is not None:
        return _dense(kernel, q, k, v, route, Block(0, q.shape[1], "dense"), bias)
    if q.is_cuda and dropout == 0.0 and (len(route.blocks) > 1 or not route.is_regular):
        return flex_attend(q, k, v, route, scale)
    parts = [_attend_block(kernel, q, k, v, route, block) for block in route.blocks]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)


def weigh(q: Tensor, k: Tensor, mask: Mask | Route, scale: float | None = None, bias: Tensor | None = None) -> Tensor:
    """The attention weights themselves, (B, H, Q, K), for pictures. Exactly zero where the mask forbids."""
    route = mask if isinstance(mask, Route) else Route.find(mask)
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k) * (scale or 1.0 / math.sqrt(q.shape[-1]))
    scores = scores if bias is None else scores + bias
    visible = route.queries.visible(route.keys, route.strict)[:, None]
    weights = scores.masked_fill(~visible, -torch.inf).softmax(-1)
    return weights.masked_fill(~visible, 0.0)  # softmax of an empty row is NaN


def flex_attend(q: Tensor, k: Tensor, v: Tensor, route: Route, scale: float | None = None) -> Tensor:
    """The mask as a FlexAttention program: order and group are compared inside the kernel (CUDA)."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    queries, keys, strict = route.queries, route.keys, route.strict

    def may_read(b, h, i, j):
        older = keys.order[b, j] < queries.order[b, i] if strict else keys.order[b, j] <= queries.order[b, i]
        seen = older & (keys.group[b, j] == queries.group[b, i]) & (queries.group[b, i] >= 0)
        if queries.window is not None:
            seen = seen & ((queries.place[b, i] - keys.place[b, j]).abs() < queries.window)
        if queries.matrix is not None:
            seen = seen & queries.matrix[b, queries.place[b, i], keys.place[b, j]]
        return seen

    shape = (q.shape[0], None, q.shape[1], k.shape[1])
    blocks = create_block_mask(may_read, *shape, device=q.device.type)
    kernel = torch.compile(flex_attention) if q.is_cuda else flex_attention
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return kernel(q, k, v, block_mask=blocks, scale=scale).transpose(1, 2)


# ---- modules -----------------------------------------------------------------------------------------------


class KeyValue(NamedTuple):
    """What a layer remembers of tokens it has read: keys and values, (B, K, H, D) each."""

    keys: Tensor
    values: Tensor

    def append(self, new: KeyValue) -> KeyValue:
        return KeyValue(torch.cat([self.keys, new.keys], dim=1), torch.cat([self.values, new.values], dim=1))

    def attend(self, q: Tensor, route: Route, dropout: float = 0.0, bias: Tensor | None = None) -> Tensor:
        return attend(q, self.keys, self.values, route, dropout, bias=bias)


class Readable(Protocol):
    """What attention reads: a `KeyValue`, or anything else that keeps keys and values in its own way."""

    def attend(self, q: Tensor, route: Route, dropout: float = 0.0, bias: Tensor | None = None) -> Tensor: ...


class Attention(nn.Module):
    """Multi-head attention; over oneself, over a longer past or over another text, by what it is given to read."""

    def __init__(self, width: int, heads: int, dropout: float = 0.0, bias: bool = True):
        super().__init__()
        self.heads = heads
        self.dropout = dropout
        self.query = nn.Linear(width, width, bias)
        self.key = nn.Linear(width, width, bias)
        self.value = nn.Linear(width, width, bias)
        self.output = nn.Linear(width, width, bias)

    def remember(self, x: Tensor) -> KeyValue:
        return KeyValue(self._split(self.key(x)), self._split(self.value(x)))

    def forward(self, x: Tensor, read: Readable, route: Route, bias: Tensor | None = None) -> Tensor:
        q = self._split(self.query(x))  # (B, Q, H, D)
        dropout = self.dropout if self.training else 0.0
        return self.output(read.attend(q, route, dropout, bias).flatten(-2))

    def weigh(self, x: Tensor, read: KeyValue, route: Route) -> Tensor:
        return weigh(self._split(self.query(x)), read.keys, route)

    def _split(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (self.heads, -1))  # (B, T, W) -> (B, T, H, D)


class AdditiveAttention(nn.Module):
    """Scores by a small network, v·tanh(Wq + Uk), instead of a product (Bahdanau, arXiv 1409.0473)."""

    def __init__(self, query_width: int, key_width: int, width: int):
        super().__init__()
        self.query = nn.Linear(query_width, width, bias=False)
        self.key = nn.Linear(key_width, width)
        self.score = nn.Linear(width, 1, bias=False)

    def weigh(self, queries: Tensor, keys: Tensor, visible: Tensor) -> Tensor:
        """(B, Q, K) weights of queries (B, Q, Wq) over keys (B, K, Wk)."""
        mixed = torch.tanh(self.query(queries)[:, :, None] + self.key(keys)[:, None])  # (B, Q, K, W)
        scores = self.score(mixed)[..., 0].masked_fill(~visible, -torch.inf)
        return torch.where(visible.any(-1, keepdim=True), scores, 0.0).softmax(-1).masked_fill(~visible, 0.0)

    def forward(self, queries: Tensor, keys: Tensor, values: Tensor, visible: Tensor) -> Tensor:
        return self.weigh(queries, keys, visible) @ values


# ---- kernels -----------------------------------------------------------------------------------------------


class _Kernel(NamedTuple):
    dropout: float
    scale: float | None

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, visible: Tensor | None = None, causal: bool = False) -> Tensor:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))  # (B, H, T, D)
        out = F.scaled_dot_product_attention(q, k, v, visible, self.dropout, causal, scale=self.scale)
        return out.transpose(1, 2)


def _attend_block(kernel: _Kernel, q: Tensor, k: Tensor, v: Tensor, route: Route, block: Block) -> Tensor:
    if block.kind == "dense":
        return _dense(kernel, q, k, v, route, block)
    q = _side_by_side(q, block)
    if block.kind == "empty":
        return q.masked_fill(q.new_ones((), dtype=torch.bool), 0.0).flatten(0, 1)[None]  # zeros, with a gradient
    if len(route.blocks) > 1 or block.documents > 1:
        k, v = _side_by_side(k, block), _side_by_side(v, block)
    out = (
        _prefix(kernel, q, k, v, block.source)
        if block.kind == "prefix"
        else kernel(q, k, v, causal=block.kind == "causal")
    )
    return out.flatten(0, 1)[None] if block.documents > 1 else out


def _side_by_side(x: Tensor, block: Block) -> Tensor:
    """Documents of one length as a batch: (1, n·L, H, D) -> (n, L, H, D), a view."""
    x = x[:, block.start : block.stop]
    return x.unflatten(1, (block.documents, -1)).flatten(0, 1) if block.documents > 1 else x


def _prefix(kernel: _Kernel, q: Tensor, k: Tensor, v: Tensor, source: int) -> Tensor:
    """The source reads itself without a mask; target rows are those of a causal mask, aligned lower right."""
    length = q.shape[1]
    head = kernel(q[:, :source], k[:, :source], v[:, :source])
    if (length - source) * length > DENSE_CELLS:  # long: whole causal rows cost less than a matrix
        return torch.cat([head, kernel(q, k, v, causal=True)[:, source:]], dim=1)
    visible = torch.ones(length - source, length, dtype=torch.bool, device=q.device).tril(source)
    return torch.cat([head, kernel(q[:, source:], k, v, visible)], dim=1)


def _dense(
    kernel: _Kernel, q: Tensor, k: Tensor, v: Tensor, route: Route, block: Block, bias: Tensor | None = None
) -> Tensor:
    """A boolean matrix, made for a strip of queries at a time so that memory stays O(T)."""
    if len(route.blocks) > 1 and bias is None:
        k, v = k[:, block.start : block.stop], v[:, block.start : block.stop]
    if bias is not None:
        route = replace(route, blocks=(block,))
    strip = max(1, DENSE_CELLS // max(1, k.shape[0] * k.shape[1]))
    parts = []
    for start in range(block.start, block.stop, strip):
        stop = min(start + strip, block.stop)
        visible = route.visible(start, stop, block)[:, None]  # (B, 1, Q, K)
        if bias is not None:
            part = bias if bias.shape[-2] == 1 else bias[..., start:stop, :]
            visible = torch.where(visible, part, -torch.inf)
        parts.append(kernel(q[:, start:stop], k, v, visible))
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)


# ---- lowering ----------------------------------------------------------------------------------------------


def _uniform(mask: Mask) -> tuple[Block, ...] | None:
    """One named block for the whole batch, if all its rows have one pattern and no padding."""
    one_document = bool(((mask.group == mask.group[:, :1]) & mask.valid).all())
    if not one_document or mask.window is not None or mask.matrix is not None:
        return None
    steps = mask.order.diff(dim=1).sign()
    return _documents(mask[:1]) if bool((steps == steps[:1]).all()) else None


def _documents(mask: Mask) -> tuple[Block, ...] | None:
    """The documents of one packed row, each by its kind; neighbours of one shape are joined."""
    if mask.matrix is not None:
        return None
    if mask.shape[1] == 0:
        return (Block(0, 0, "full"),)
    group, order = mask.group[0].cpu().numpy(), mask.order[0].cpu().numpy()
    starts = np.flatnonzero(np.diff(group, prepend=group[0] - 1))
    names = group[starts]
    if len(np.unique(names[names >= 0])) < (names >= 0).sum():
        return None  # a document in several pieces
    stops = np.append(starts[1:], len(group))
    kinds, sources = _classify(order, starts, stops, names)
    if mask.window is not None:
        kinds = np.where(kinds == "empty", "empty", "dense")
    return _join(
        Block(*row) for row in zip(starts.tolist(), stops.tolist(), kinds.tolist(), sources.tolist(), strict=True)
    )


def _classify(order: np.ndarray, starts: np.ndarray, stops: np.ndarray, names: np.ndarray):
    """The kind of each document from the steps of its order: none, all upwards, or none and then all upwards."""
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


def _join(blocks) -> tuple[Block, ...]:
    """Neighbouring documents of one length and kind become one block."""
    joined: list[Block] = []
    for block in blocks:
        last = joined[-1] if joined else None
        if last and block.kind != "dense" and _length(last) == _length(block) and last[2:4] == block[2:4]:
            joined[-1] = last._replace(stop=block.stop, documents=last.documents + 1)
        else:
            joined.append(block)
    return tuple(joined)


def _length(block: Block) -> int:
    return (block.stop - block.start) // block.documents


def _all_seen(queries: Mask, keys: Mask) -> tuple[Block, ...] | None:
    """A full block if every query sees every key, as in the steps of a decoder without padding."""
    if queries.window is not None or queries.matrix is not None or keys.shape[1] == 0:
        return None
    one_document = (keys.group == queries.group[:, :1]) & keys.valid
    known = queries.order.amin(1) >= keys.order.amax(1)
    whole = bool(one_document.all() & known.all() & (queries.group == queries.group[:, :1]).all())
    return (Block(0, queries.shape[1], "full"),) if whole else None
