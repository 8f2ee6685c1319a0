"""Analyse a mask: which positions influence which, label leaks, whether it is an order, how it can be cached.

Everything follows from one boolean matrix, `visible` (True = the row may read the column). By attention, a position
depends on what it reads; by the residual connection, on itself. So after L layers it depends on what L steps of
`visible | identity` reach.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from allmask.errors import UsageError
from allmask.mask import Mask, expect_mask

_RANKS_SHOWN = 24
_SHOWN = 8  # how many items a sentence lists before it says "and 17 more"
Pairs = tuple[tuple[int, int], ...]
Name = Callable[[int], str]


@dataclass(frozen=True)
class Witness:
    """The smallest reason why a matrix is no order: the broken law (`kind`) and the positions that break it."""

    kind: str  # "reflexive", "transitive" or "total"
    positions: tuple[int, ...]

    def text(self, name: Name = str) -> str:
        a, *rest = (name(position) for position in self.positions)
        if self.kind == "reflexive":
            return f"{a} does not read itself"
        b, c = rest
        if self.kind == "transitive":
            return f"{a} reads {b}, {b} reads {c}, but {a} does not read {c}: after two layers it does"
        return f"neither of {a} and {b} reads the other, yet {c} ties them to one document"

    def __str__(self) -> str:
        return self.text()


@dataclass(frozen=True, eq=False)
class Proof:
    """The result of `prove` for T tokens. `print(proof)` shows it in words, `to_dict()` returns plain data."""

    visible: Tensor  # (T, T) row reads column, in one layer
    layers: int | None  # None: any depth
    influence: Tensor  # (T, T) row may depend on column after `layers` layers
    reachable: Tensor  # (T, T) the same at any depth
    is_order: bool  # visible is exactly: same group, and not younger
    order: Tensor  # (T,) that order, or one that contains the matrix
    group: Tensor  # (T,) its documents; -1 is padding
    witness: Witness | None  # why it is no order
    empty_rows: tuple[int, ...]  # positions that read nothing
    shifted_leaks: Pairs  # (position, the next token in the order, which it predicts and yet sees)
    masked_leaks: Pairs  # (position, its own token, which it predicts though the input shows it)
    two_stream_leaks: Pairs  # (position, its own token, which its query stream can see)
    scored: Tensor  # (T,) the positions that bear loss
    cache_blocks: list[list[int]]  # positions that must be added together, in the order of adding

    @property
    def cacheable(self) -> bool:
        """Whether keys and values can be kept when the next block of tokens is added."""
        return len(self.cache_blocks) > 1

    def text(self, tokens: Sequence[str] | None = None) -> str:
        """Return short lines of English; positions are named `3`, or `3:迎` if `tokens` are given."""
        named = {} if tokens is None else {i: f"{i}:{token}" for i, token in enumerate(tokens) if token != str(i)}

        def name(position: int) -> str:
            return named.get(position, str(position))

        lines = {
            "order": _order_text(self, name),
            "influence": _influence_text(self, name),
            "empty rows": _empty_text(self, name),
            "shifted targets": _leak_text(self, self.shifted_leaks, "the next token", name),
            "masked targets": _masked_text(self, name),
            "two streams": _leak_text(self, self.two_stream_leaks, "its own token", name),
            "cache": _cache_text(self.cache_blocks, name),
        }
        return "\n".join(f"{label:<16} {line}" for label, line in lines.items())

    def __str__(self) -> str:
        return self.text()

    def to_dict(self) -> dict:
        """Return numbers, lists and strings, ready for JSON."""
        why = None
        if self.witness is not None:
            why = {"kind": self.witness.kind, "positions": list(self.witness.positions), "text": str(self.witness)}
        return {
            "layers": self.layers,
            "is_order": self.is_order,
            "order": self.order.tolist(),
            "group": self.group.tolist(),
            "witness": why,
            "empty_rows": list(self.empty_rows),
            "scored": _indices(self.scored),
            "influence": self.influence.int().tolist(),
            "reachable": self.reachable.int().tolist(),
            "leaks": {
                "shifted": [list(pair) for pair in self.shifted_leaks],
                "masked": [list(pair) for pair in self.masked_leaks],
                "two_stream": [list(pair) for pair in self.two_stream_leaks],
            },
            "cache": {
                "valid": self.cacheable,
                "blocks": self.cache_blocks,
                "text": _cache_text(self.cache_blocks, str),
            },
        }


def prove(
    mask: Mask | Tensor, layers: int | None = None, scored: Tensor | None = None, hidden: Tensor | None = None
) -> Proof:
    """Analyse what a mask, or a boolean (T, T) matrix, lets through `layers` layers (None: any depth).

    `scored` (T,) are the positions that bear loss, which are checked for label leaks; `hidden` (T,) are those whose
    input token was replaced by [MASK]. By default every position is scored and none is hidden.
    """
    visible = _matrix(mask)
    _check(layers is None or layers > 0, f"layers is {layers}; it must be at least 1, or None for any depth")
    reachable = influence(visible)
    blocks = cache_blocks(visible)
    is_order, order, group, positions = _arrangement(mask, visible, blocks)
    through = influence(visible, layers)
    scored_positions = _flags(scored, visible, "scored", default=True) & (group >= 0)
    shown = ~_flags(hidden, visible, "hidden", default=False)
    return Proof(
        visible=visible,
        layers=layers,
        influence=through,
        reachable=reachable,
        is_order=is_order,
        order=order,
        group=group,
        witness=None if is_order else find_witness(visible),
        empty_rows=tuple(_indices(~visible.any(-1))),
        shifted_leaks=tuple(
            (position, label)
            for position, label in next_tokens(order, group, positions)
            if scored_positions[position] and through[position, label]
        ),
        masked_leaks=tuple((i, i) for i in _indices(scored_positions & shown)),
        two_stream_leaks=tuple((i, i) for i in _indices(scored_positions & query_stream(visible, layers).diagonal())),
        scored=scored_positions,
        cache_blocks=blocks,
    )


def prove_rows(
    mask: Mask, layers: int | None = None, scored: Tensor | None = None, hidden: Tensor | None = None
) -> list[Proof]:
    """`prove` every row of a batch; `scored` and `hidden` are (B, T)."""
    expect_mask(mask)
    flags = [[None if given is None else given[row] for given in (scored, hidden)] for row in range(len(mask))]
    return [prove(mask[row], layers, *flags[row]) for row in range(len(mask))]


# ---- influence ----------------------------------------------------------------------------------------------


def influence(visible: Tensor, layers: int | None = None) -> Tensor:
    """(…, T, T): which positions each row may depend on after `layers` layers with residual connections; None: any."""
    tokens = visible.shape[-1]
    base = visible | torch.eye(tokens, dtype=torch.bool, device=visible.device)
    # a shortest path visits no position twice, so more than T-1 steps reach nothing new
    steps = max(tokens - 1, 1) if layers is None else min(layers, max(tokens - 1, 1))
    power = base
    for bit in f"{steps:b}"[1:]:  # square and multiply, from the highest bit down
        squared = _product(power, power)
        if torch.equal(squared, power):  # closed: nothing new at any depth; an order stops here at once
            return power
        power = _product(squared, base) if bit == "1" else squared
    return power


def query_stream(visible: Tensor, layers: int | None = None) -> Tensor:
    """(T, T): the tokens on which the query stream of each row may depend (XLNet); it does not contain its own token.

    It reads content that is strictly older; that content depends on what the layers below have read.
    """
    strict = visible & ~visible.mT
    if layers == 1:
        return strict
    return _product(strict, influence(visible, None if layers is None else layers - 1))


def _product(a: Tensor, b: Tensor) -> Tensor:
    return (a.float() @ b.float()) > 0


# ---- order --------------------------------------------------------------------------------------------------


def recover_order(visible: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return whether each of (…, T, T) matrices is an order (…), and its order and group, both (…, T).

    A position that neither reads nor is read is padding: group -1, order 0. Ranks are 0, 1, 2, … in every group, and
    groups are numbered as they appear. If the matrix is no order, order and group are meaningless.
    """
    padding = _padding(visible)
    group, same = _components(visible, padding)
    either = visible | visible.mT
    reflexive = (visible.diagonal(dim1=-2, dim2=-1) | padding).all(-1)
    transitive = (~_product(visible, visible) | visible).flatten(-2).all(-1)
    total = (~same | either).flatten(-2).all(-1)
    first = _first_of_class(visible & visible.mT)
    order = ((visible & ~visible.mT) & first[..., None, :]).sum(-1)
    return reflexive & transitive & total, order, group


def find_witness(visible: Tensor) -> Witness | None:
    """Return the smallest reason why a (T, T) matrix is no order; None if it is one."""
    padding = _padding(visible)
    alone = (~visible.diagonal() & ~padding).nonzero()
    if len(alone):
        return Witness("reflexive", (int(alone[0]),))
    gaps = (_product(visible, visible) & ~visible).nonzero()
    if len(gaps):
        reader, key = gaps[0].tolist()
        between = int((visible[reader] & visible[:, key]).nonzero()[0])
        return Witness("transitive", (reader, between, key))
    tied = visible | visible.mT
    apart = (_product(tied, tied) & ~tied).nonzero()
    if len(apart):
        one, other = apart[0].tolist()
        return Witness("total", (one, other, int((tied[one] & tied[other]).nonzero()[0])))
    return None


def _padding(visible: Tensor) -> Tensor:
    return ~visible.any(-1) & ~visible.any(-2)


def _components(visible: Tensor, padding: Tensor) -> tuple[Tensor, Tensor]:
    """The index of each token's document (…, T), -1 for padding, and whether two tokens share a document (…, T, T)."""
    same = influence(visible | visible.mT) & ~padding[..., None] & ~padding[..., None, :]
    head = same.int().argmax(-1)  # the first token of the document
    number = (_first_of_class(same) & ~padding).cumsum(-1) - 1
    return torch.where(padding, -1, number.gather(-1, head)), same


def _first_of_class(same: Tensor) -> Tensor:
    """(…, T): True for the leftmost member of each equivalence class."""
    return same.int().argmax(-1) == torch.arange(same.shape[-1], device=same.device)


def _arrangement(mask: Mask | Tensor, visible: Tensor, blocks: list[list[int]]) -> tuple[bool, Tensor, Tensor, Tensor]:
    """Whether the matrix is an order; then order, group and positions: the mask's own, recovered, or enclosing."""
    exact, order, group = recover_order(visible)
    positions = torch.arange(visible.shape[0], device=visible.device)
    if isinstance(mask, Mask) and mask.matrix is None:
        return bool(exact), mask.order[0], mask.group[0], mask.position[0]
    if not exact:  # an order that contains the matrix: block after block, in a single document
        order, group = torch.zeros_like(order), torch.where(_padding(visible), -1, 0)
        for time, block in enumerate(blocks):
            order[block] = time
    return bool(exact), order, group, positions


# ---- labels -------------------------------------------------------------------------------------------------


def next_tokens(order: Tensor, group: Tensor, positions: Tensor | None = None) -> list[tuple[int, int]]:
    """(position, label) of shifted targets: each position predicts the next token of its document in the order.

    Tokens known at the same time are ordered by position. The last token predicts nothing.
    """
    positions = torch.arange(len(order)) if positions is None else positions
    keys = list(zip(group.tolist(), order.tolist(), positions.tolist(), range(len(order)), strict=True))
    line = sorted(key for key in keys if key[0] >= 0)
    return [(a[-1], b[-1]) for a, b in pairwise(line) if a[0] == b[0]]


def prediction_rows(mask: Mask | Tensor) -> Tensor:
    """(T, T): which tokens may be read to *predict* the token of each row, as in figures with shifted rows.

    The row of a token is the row of `visible` of the position just before it in the order. If all orders differ, those
    are all older tokens: `visible(strict=True)`. The row of a token that no position predicts is empty.
    """
    visible = _matrix(mask)
    _, order, group, positions = _arrangement(mask, visible, cache_blocks(visible))
    rows = torch.zeros_like(visible)
    for position, label in next_tokens(order, group, positions):
        rows[label] = visible[position]
    return rows


# ---- cache --------------------------------------------------------------------------------------------------


def cache_blocks(visible: Tensor) -> list[list[int]]:
    """The finest blocks that can be added one after another without changing the rows before.

    Tokens that reach each other are in one block. Of the blocks that can come next, the leftmost is taken, so the order
    is left to right whenever that is valid. Padding is in no block.
    """
    reach = influence(visible)
    first = _first_of_class(reach & reach.mT) & ~_padding(visible)
    heads = _indices(first)
    depends = reach[first][:, first]
    waiting = (depends.sum(-1) - 1).tolist()
    ready = [block for block, count in enumerate(waiting) if count == 0]
    blocks = []
    while ready:
        block = heapq.heappop(ready)
        blocks.append(_indices(reach[heads[block]] & reach[:, heads[block]]))
        for reader in _indices(depends[:, block]):
            waiting[reader] -= 1
            if waiting[reader] == 0 and reader != block:
                heapq.heappush(ready, reader)
    return blocks


# ---- texts --------------------------------------------------------------------------------------------------


def _order_text(proof: Proof, name: Name) -> str:
    ranks = _ranks_text(proof.order, proof.group)
    if proof.is_order:
        return f"yes: {ranks}"
    assert proof.witness is not None
    return f"no, only part of {ranks}: {proof.witness.text(name)}"


def _ranks_text(order: Tensor, group: Tensor) -> str:
    if bool((group < 0).all()):
        return "nothing but padding"
    first = Mask(order[None, :_RANKS_SHOWN], group[None, :_RANKS_SHOWN])
    more = f" … ({len(order)} tokens)" if len(order) > _RANKS_SHOWN else ""
    return repr(first).removeprefix("Mask(").removesuffix(")") + more


def _influence_text(proof: Proof, name: Name) -> str:
    direct = influence(proof.visible, 1)
    beyond = proof.influence & ~direct
    depth = "any number of layers" if proof.layers is None else _count(proof.layers, "layer")
    if beyond.any():
        pairs = beyond.nonzero()
        shown = _some([f"{name(q)} from {name(k)}" for q, k in pairs[:_SHOWN].tolist()], len(pairs))
        return f"{depth} carry {_count(len(pairs), 'pair')} beyond what one layer reads: {shown}"
    if (proof.reachable & ~direct).any():
        return f"{depth}: exactly what a position reads, and itself; deeper, more"
    return f"exactly what a position reads, and itself, through {depth}"


def _empty_text(proof: Proof, name: Name) -> str:
    padding = set(_indices(_padding(proof.visible)))
    blind = [name(i) for i in proof.empty_rows if i not in padding]
    words = [f"{_some(blind)} read nothing, yet are read"] if blind else []
    words += [f"{_count(len(padding), 'position')} of padding"] if padding else []
    return "; ".join(words) or "none"


def _leak_text(proof: Proof, leaks: Pairs, label: str, name: Name) -> str:
    checked = _count(int(proof.scored.sum()), "position")
    if not leaks:
        return f"no leak: none of {checked} sees {label}, which it predicts"
    pairs = [name(q) if q == k else f"{name(q)} sees {name(k)}" for q, k in leaks]
    return f"LEAK at {len(leaks)} of {checked}, which should predict {label}: {_some(pairs)}"


def _masked_text(proof: Proof, name: Name) -> str:
    if not proof.masked_leaks:
        return "no leak: whatever is predicted is hidden"
    if len(proof.masked_leaks) == int(proof.scored.sum()):
        return "a position sees its own token unless [MASK] hides it; none is hidden here"
    shown = _some([name(i) for i, _ in proof.masked_leaks])
    return f"LEAK at {_count(len(proof.masked_leaks), 'position')}, which should predict a token not hidden: {shown}"


def _cache_text(blocks: list[list[int]], name: Name) -> str:
    if not blocks:
        return "nothing to keep"
    if len(blocks) == 1:
        return f"no: {_count(len(blocks[0]), 'token')} in one block, computed together"
    line = [position for block in blocks for position in block]
    singles = all(len(block) == 1 for block in blocks)
    way = _some([name(i) for i in line])
    if singles and line == sorted(line):
        return f"valid, token by token, left to right: {way}"
    if singles and line == sorted(line, reverse=True):
        return f"valid, token by token, right to left: {way}"
    if singles:
        return f"valid, token by token, in the order {way}"
    if all(len(block) == 1 for block in blocks[1:]):
        rest = _some([name(block[0]) for block in blocks[1:]])
        return f"valid: prefill {len(blocks[0])} tokens ({_span(blocks[0])}), then one by one: {rest}"
    return f"valid, block by block: {_some([_span(block) for block in blocks])}"


def _span(block: list[int]) -> str:
    """`0–3` for consecutive positions, otherwise `0+2+5`."""
    if len(block) > 2 and block[-1] - block[0] == len(block) - 1:
        return f"{block[0]}–{block[-1]}"
    return "+".join(str(i) for i in block)


def _some(items: Sequence[str], total: int | None = None) -> str:
    rest = (len(items) if total is None else total) - _SHOWN
    return ", ".join(items[:_SHOWN]) + (f" and {rest} more" if rest > 0 else "")


def _count(number: int, word: str) -> str:
    return f"{number} {word}" if number == 1 else f"{number} {word}s"


# ---- arguments ----------------------------------------------------------------------------------------------


def _matrix(mask: Mask | Tensor) -> Tensor:
    if not isinstance(mask, Tensor):
        rows = len(expect_mask(mask))
        _check(rows == 1, f"the mask has {rows} rows", "prove one with prove(mask[0]), all with prove_rows(mask)")
        return mask.visible()[0]
    _check(mask.dtype == torch.bool, f"the matrix is {mask.dtype}; expected booleans", "True = may read")
    _check(mask.ndim == 2 and mask.shape[0] == mask.shape[1], f"the matrix is {tuple(mask.shape)}; expected (T, T)")
    return mask


def _flags(given: Tensor | None, visible: Tensor, what: str, default: bool) -> Tensor:
    tokens = visible.shape[0]
    if given is None:
        return torch.full((tokens,), default, device=visible.device)
    flags = given[0] if given.ndim == 2 and given.shape[0] == 1 else given
    _check(flags.shape == (tokens,) and flags.dtype == torch.bool, f"{what} must be {tokens} booleans")
    return flags.to(visible.device)


def _check(holds: bool, message: str, hint: str | None = None) -> None:
    if not holds:
        raise UsageError(f"prove: {message}", hint)


def _indices(flags: Tensor) -> list[int]:
    return flags.nonzero()[:, 0].tolist()
