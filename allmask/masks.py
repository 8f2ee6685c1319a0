"""The mask as a value: who may look at whom is an order, not a matrix.

A token becomes known at a time, its `order`; it belongs to a document, its `group`. A query reads a key iff
they share a group and the key is not younger. Comparing is transitive, so no depth of layers can leak, and a
token younger than all before it never changes an earlier row: that is when keys and values may be cached.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from allmask.errors import UsageError


@dataclass(frozen=True, eq=False, repr=False)
class Mask:
    """Query q may read key k iff they share a group and order[k] <= order[q].

    Order is *when*, `place` is *where*: the how-manieth token of its document this is, padding not counted. It is
    the position a model embeds unless told otherwise, and what `window` and `matrix` measure: they narrow the
    order to keys fewer than `window` places away, or to the cells of an arbitrary matrix. It travels with a token
    when rows are cut, joined or sorted, so a slice of a mask means what it meant before.
    """

    order: Tensor  # (B, T) when a token becomes known
    group: Tensor  # (B, T) which document it belongs to; -1 is padding
    place: Tensor = None  # type: ignore[assignment]  # (B, T) where it stands; counted if not given
    window: int | None = None  # read only keys fewer than this many places away
    matrix: Tensor | None = None  # (B, P, P) further restriction, indexed by place

    def __post_init__(self):
        _check(self.order.ndim == 2 and self.order.shape == self.group.shape, "order and group must both be (B, T)")
        _check(self.window is None or self.window > 0, f"window is {self.window}; it must be positive")
        if self.place is None:
            object.__setattr__(self, "place", _count_within(self.group))

    # ---- the cast ------------------------------------------------------------------------------------------

    @classmethod
    def bidirectional(cls, valid: Tensor, window: int | None = None) -> Mask:
        """Everything is known at once (BERT, encoders). `valid` is (B, T), False at padding.

           北 京 欢
        北  ■  ■  ■
        京  ■  ■  ■
        欢  ■  ■  ■
        """
        return cls(torch.zeros_like(_boolean(valid, "valid"), dtype=torch.long), _groups(valid), window=window)

    @classmethod
    def causal(cls, valid: Tensor, window: int | None = None) -> Mask:
        """Each token sees itself and what stands before it (GPT-2, decoders; the naive mask for seq2seq).

           北 京 欢
        北  ■  ·  ·
        京  ■  ■  ·
        欢  ■  ■  ■
        """
        return cls(_indices(_boolean(valid, "valid")), _groups(valid), window=window)

    @classmethod
    def reverse(cls, valid: Tensor, window: int | None = None) -> Mask:
        """Each token sees itself and what stands after it: a language model from right to left.

           北 京 欢
        北  ■  ■  ■
        京  ·  ■  ■
        欢  ·  ·  ■
        """
        last = _boolean(valid, "valid").shape[1] - 1
        return cls(last - _indices(valid), _groups(valid), window=window)

    @classmethod
    def prefix(cls, is_target: Tensor, valid: Tensor | None = None, window: int | None = None) -> Mask:
        """Source tokens see the source; each target token sees the source and the target so far (UniLM).

           你 吃 白 鸡
        你  ■  ■  ·  ·
        吃  ■  ■  ·  ·
        白  ■  ■  ■  ·
        鸡  ■  ■  ■  ■
        """
        return cls(_boolean(is_target, "is_target").cumsum(-1), _groups(valid, is_target), window=window)

    @classmethod
    def encoder_decoder(cls, is_target: Tensor, valid: Tensor | None = None) -> Mask:
        """The same for a model that reads sources with one stack of layers and writes targets with another.

        Each counts its own places: 0 1 0 1 here, where the order is 0 0 1 2.

           你 吃 白 鸡
        你  ■  ■  ·  ·
        吃  ■  ■  ·  ·
        白  ■  ■  ■  ·
        鸡  ■  ■  ■  ■
        """
        whole = cls.prefix(is_target, valid)
        sources = cls.prefix(is_target, ~is_target if valid is None else valid & ~is_target).place
        targets = cls.prefix(is_target, is_target if valid is None else valid & is_target).place
        return replace(whole, place=torch.where(is_target, targets, sources))

    @classmethod
    def permutation(cls, rank: Tensor, valid: Tensor | None = None, window: int | None = None) -> Mask:
        """Tokens become known in any drawn order (XLNet). Here 欢 is first, then 北, then 京: rank 1 2 0.

               北 京 欢
            北  ■  ·  ■
            京  ■  ■  ■
            欢  ·  ·  ■

        The query stream, which must not see the token it guesses, is `visible(strict=True)`.
        """
        _check(not rank.is_floating_point() and rank.dtype != torch.bool, "rank must hold whole numbers")
        return cls(rank.long(), _groups(valid, rank), window=window)

    @classmethod
    def packed(cls, mask: Mask, document: Tensor) -> Mask:
        """Several documents in one row that do not see each other. `document` is (B, T); documents 0 0 1 1:

           北 京 你 好
        北  ■  ■  ·  ·
        京  ■  ■  ·  ·
        你  ·  ·  ■  ■
        好  ·  ·  ■  ■
        """
        _check(document.shape == mask.order.shape, f"document is {tuple(document.shape)}, the mask {mask.shape}")
        group = torch.where(mask.group < 0, -1, document.long())
        return replace(mask, group=group, place=None if mask.matrix is None else mask.place)  # a matrix keeps its cells

    @classmethod
    def from_matrix(cls, visible: Tensor) -> Mask:
        """Any boolean matrix, (T, T) or (B, T, T), True = may read: for experiments. `prove()` says what it is."""
        visible = _boolean(visible, "visible")
        matrix = visible[None] if visible.ndim == 2 else visible
        _check(matrix.ndim == 3 and matrix.shape[1] == matrix.shape[2], "visible must be (T, T) or (B, T, T)")
        zeros = torch.zeros(matrix.shape[:2], dtype=torch.long, device=matrix.device)
        return cls(zeros, zeros, matrix=matrix)

    # ---- what it says --------------------------------------------------------------------------------------

    def visible(self, keys: Mask | None = None, strict: bool = False) -> Tensor:
        """The (B, Q, K) matrix: True where a query may read a key. `strict`: only keys known before it.

        `decoder.visible(encoder)` is cross-attention; `keys` may also be a longer mask, as with a cache.
        """
        keys = self if keys is None else keys
        query_order, key_order = self.order[:, :, None], keys.order[:, None, :]
        known = key_order < query_order if strict else key_order <= query_order
        seen = known & (self.group[:, :, None] == keys.group[:, None, :]) & (self.group >= 0)[:, :, None]
        if self.window is not None:
            seen &= (self.place[:, :, None] - keys.place[:, None, :]).abs() < self.window
        if self.matrix is not None:
            batch = torch.arange(self.matrix.shape[0], device=self.matrix.device)[:, None, None]
            seen = seen & self.matrix[batch, self.place[:, :, None], keys.place[:, None, :]]
        return seen

    @property
    def valid(self) -> Tensor:
        """(B, T), False at padding."""
        return self.group >= 0

    @property
    def document(self) -> Tensor:
        """(B, T), a number that tokens share if they are of one document of one row; -1 at padding."""
        rows = torch.arange(len(self), device=self.device)[:, None]
        return torch.where(self.valid, rows * (self.group.max().clamp(min=0) + 1) + self.group, -1)

    @property
    def first_known(self) -> Tensor:
        """(B, T), True at tokens that nothing of their document is known before: an encoder's."""
        return self.valid & (self.order == self.among(self.order, "amin"))

    def among(self, values: Tensor, most: str) -> Tensor:
        """(B, T), for each token the smallest ("amin") or largest ("amax") of the values in its document."""
        name = self.document.flatten() + 1  # padding is one by itself
        found = values.new_zeros(int(name.max()) + 1)
        found = found.scatter_reduce(0, name, values.flatten(), most, include_self=False)
        return found[name].view(self.shape)

    @property
    def shape(self) -> tuple[int, int]:
        return self.order.shape[0], self.order.shape[1]

    @property
    def device(self) -> torch.device:
        return self.order.device

    def may_follow(self, earlier: Mask) -> bool:
        """Whether these tokens, appended to `earlier`, leave its rows as they were, so that a cache of it is valid."""
        return not bool(earlier.visible(self).any())

    # ---- a value: compare, move, cut, join, sort -----------------------------------------------------------

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Mask) or self.window != other.window or self.shape != other.shape:
            return False
        if (self.matrix is None) != (other.matrix is None):
            return False
        pairs = zip(self._tensors().values(), other._tensors().values(), strict=True)
        return all(a.shape == b.shape and bool((a == b).all()) for a, b in pairs)

    def __hash__(self) -> int:
        return hash((self.shape, self.window))

    def __repr__(self) -> str:
        rows, tokens = self.shape
        extra = "" if self.window is None else f", window={self.window}"
        extra += "" if self.matrix is None else ", matrix"
        if rows > 4 or tokens > 32:
            return f"Mask({rows}×{tokens}{extra})"
        return f"Mask({'; '.join(self._row_text(row) for row in range(rows))}{extra})"

    def _row_text(self, row: int) -> str:
        """The order of one row, `·` for padding and `|` between documents: `0 0 1 2 | 0 0 1 ·`."""
        words, previous = [], None
        for order, group in zip(self.order[row].tolist(), self.group[row].tolist(), strict=True):
            if previous is not None and group >= 0 and group != previous:
                words.append("|")
            words.append("·" if group < 0 else str(order))
            previous = group if group >= 0 else previous
        return " ".join(words)

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, index) -> Mask:
        """Cut rows and tokens: `mask[2:4]`, `mask[:, :10]`, `mask[[0, 2]]`. Both dimensions stay."""
        rows, tokens = index if isinstance(index, tuple) else (index, slice(None))
        rows = slice(rows, rows + 1 or None) if isinstance(rows, int) else rows
        tokens = slice(tokens, tokens + 1 or None) if isinstance(tokens, int) else tokens
        cut = {name: tensor[rows][:, tokens] for name, tensor in self._tensors().items() if name != "matrix"}
        return replace(self, **cut, matrix=None if self.matrix is None else self.matrix[rows])

    def gather(self, index: Tensor) -> Mask:
        """Other tokens of each row: (B, n) which."""
        return replace(self, **{name: getattr(self, name).gather(1, index) for name in ("order", "group", "place")})

    def to(self, device: torch.device | str) -> Mask:
        return replace(self, **{name: tensor.to(device) for name, tensor in self._tensors().items()})

    def append(self, other: Mask) -> Mask:
        """The tokens of this mask, then those of `other`, row by row."""
        return Mask.cat([self, other])

    @classmethod
    def cat(cls, masks: Iterable[Mask], dim: int = 1) -> Mask:
        """Join masks along tokens (dim 1) or rows (dim 0). Order, group and place keep their numbers."""
        masks = list(masks)
        first = masks[0]
        alike = all(m.window == first.window and (m.matrix is None) == (first.matrix is None) for m in masks)
        _check(alike, "masks with different windows, or with and without a matrix, cannot be joined")
        same = dim == 0 or all(_same(m.matrix, first.matrix) for m in masks)
        _check(same, "masks made from different matrices cannot be joined: no cell says who sees whom")
        names = ["order", "group", "place"] + (["matrix"] if first.matrix is not None and dim == 0 else [])
        return replace(first, **{name: torch.cat([getattr(m, name) for m in masks], dim) for name in names})

    def _tensors(self) -> dict[str, Tensor]:
        named = {"order": self.order, "group": self.group, "place": self.place, "matrix": self.matrix}
        return {name: tensor for name, tensor in named.items() if tensor is not None}

    def flatten(self) -> tuple[Mask, Tensor]:
        """The same sight in one row without padding, and where each of its tokens came from.

        Returns a (1, N) mask and the (N,) index into the flattened (B·T) tokens. Documents stand one after
        another, shortest first, so that those of one length are neighbours; within a document tokens are
        sorted by order, which makes every order a causal one (a permuted mask is a shuffled input).
        """
        _check(self.matrix is None, "a mask made from a matrix has no order to sort by")
        index = self.valid.flatten().nonzero()[:, 0]
        _, document, size = self.document.flatten()[index].unique(return_inverse=True, return_counts=True)
        by_order = self.order.flatten()[index].argsort(stable=True)
        by_length = (size[document] * (len(size) + 1) + document)[by_order].argsort(stable=True)
        chosen = by_order[by_length]
        index = index[chosen]
        order, place = self.order.flatten()[index], self.place.flatten()[index]
        return replace(self, order=order[None], group=document[chosen][None], place=place[None]), index


def _check(holds: bool, message: str) -> None:
    if not holds:
        raise UsageError(f"mask: {message}")


def _boolean(tensor: Tensor, name: str) -> Tensor:
    if tensor.dtype != torch.bool:
        raise UsageError(
            f"mask: {name} is {tensor.dtype}; expected booleans", "True = may read, or a real token; pass x.bool()"
        )
    return tensor


def _same(a: Tensor | None, b: Tensor | None) -> bool:
    return a is b or (a is not None and b is not None and torch.equal(a, b))


def _indices(like: Tensor) -> Tensor:
    return torch.arange(like.shape[1], device=like.device).expand_as(like)


def _count_within(group: Tensor) -> Tensor:
    """How many tokens of the same group stand before each token of its row: 0 0 1 1 1 -> 0 1 0 1 2."""
    by_group = group.argsort(dim=1, stable=True)
    runs, index = group.gather(1, by_group), _indices(group)
    begins = torch.ones_like(group, dtype=torch.bool)
    begins[:, 1:] = runs[:, 1:] != runs[:, :-1]
    start = torch.where(begins, index, 0).cummax(dim=1).values
    return torch.empty_like(group).scatter_(1, by_group, index - start)


def _groups(valid: Tensor | None, like: Tensor | None = None) -> Tensor:
    if valid is None:
        assert like is not None
        return torch.zeros_like(like, dtype=torch.long)
    return torch.where(_boolean(valid, "valid"), 0, -1)
