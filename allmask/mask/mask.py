"""The mask as a value: who may read whom is an order, not a matrix.

A token becomes known at some time, its `order`, and belongs to a document, its `group`. A query reads a key iff they
share a group and the key is not younger. `<=` is transitive, so no number of layers can leak. A token younger than all
before it changes no earlier row: that is when keys and values may be cached.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from allmask.errors import UsageError

if TYPE_CHECKING:
    from allmask.mask.grid import Drawing

_DRAWN_ROWS, _DRAWN_TOKENS = 4, 2048  # at most, in a picture


@dataclass(frozen=True, eq=False, repr=False)
class Mask:
    """Query q may read key k iff they share a group and order[k] <= order[q].

    Order is *when*, `position` is *where*: the index of the token within its document, padding not counted. A model
    embeds this position unless it is given others. `window` and `matrix` restrict the order further, to keys fewer than
    `window` positions away, or to the True cells of a matrix indexed by position. A position stays with its token when
    rows are sliced, joined or sorted, so a slice of a mask allows the same as before.
    """

    order: Tensor  # (B, T) when a token becomes known
    group: Tensor  # (B, T) which document it belongs to; -1 is padding
    position: Tensor = None  # type: ignore[assignment]  # (B, T) index within the document; counted if not given
    window: int | None = None  # read only keys fewer than this many positions away
    matrix: Tensor | None = None  # (B, P, P) True where a position may read another

    def __post_init__(self):
        for name in ("order", "group", "position"):
            object.__setattr__(self, name, self._checked(name))
        _check(self.window is None or self.window > 0, f"window is {self.window}; it must be positive")

    def _checked(self, name: str) -> Tensor:
        """Return a field as a (B, T) tensor of whole numbers; count the positions if they are not given."""
        given = getattr(self, name)
        if given is None and name == "position":
            return _count_within(self.group)
        tensor = _tensor(given, name)
        if tensor.ndim != 2:
            hint = f"add a batch dimension: {name}[None]" if tensor.ndim == 1 else None
            raise UsageError(f"mask: {name} is {tuple(tensor.shape)}; it must be (B, T)", hint)
        if tensor.shape != self.order.shape:
            shapes = f"{name} is {tuple(tensor.shape)}, order {tuple(self.order.shape)}"
            raise UsageError(f"mask: {shapes}; they must both be (B, T)")
        return tensor if tensor.dtype == torch.long else _integers(tensor, name)

    # ---- constructors --------------------------------------------------------------------------------------

    @classmethod
    def bidirectional(cls, valid: Tensor, window: int | None = None) -> Mask:
        """All tokens are known at once (BERT, encoders). `valid` is (B, T), False at padding.

           北 京 欢
        北  ■  ■  ■
        京  ■  ■  ■
        欢  ■  ■  ■
        """
        return cls(torch.zeros_like(_boolean(valid, "valid"), dtype=torch.long), _groups(valid, valid), window=window)

    @classmethod
    def causal(cls, valid: Tensor, window: int | None = None) -> Mask:
        """Each token sees itself and the tokens before it (GPT-2, decoders; the naive mask for seq2seq).

           北 京 欢
        北  ■  ·  ·
        京  ■  ■  ·
        欢  ■  ■  ■
        """
        return cls(_indices(_boolean(valid, "valid")), _groups(valid, valid), window=window)

    @classmethod
    def reverse(cls, valid: Tensor, window: int | None = None) -> Mask:
        """Each token sees itself and the tokens after it: a language model from right to left.

           北 京 欢
        北  ■  ■  ■
        京  ·  ■  ■
        欢  ·  ·  ■
        """
        last = _boolean(valid, "valid").shape[1] - 1
        return cls(last - _indices(valid), _groups(valid, valid), window=window)

    @classmethod
    def prefix(
        cls, is_target: Tensor, valid: Tensor | None = None, window: int | None = None, document: Tensor | None = None
    ) -> Mask:
        """Source tokens see the source; each target token sees the source and the target so far (UniLM).

           你 吃 白 鸡
        你  ■  ■  ·  ·
        吃  ■  ■  ·  ·
        白  ■  ■  ■  ·
        鸡  ■  ■  ■  ■

        A source after its target is refused: for question, answer, question, … use `turns`. If a row holds several
        documents, `document` (B, T) is the index of each token's document, as in `packed`.
        """
        is_target = _boolean(is_target, "is_target")
        is_target = is_target if valid is None else is_target & _boolean(valid, "valid")
        mask = cls(is_target.cumsum(-1), _groups(valid, is_target), window=window)
        mask = mask if document is None else cls.packed(mask, document)
        if bool((mask.valid & ~is_target & (mask.order > 0)).any()):
            _refuse_late_sources(mask, is_target)
        return mask

    @classmethod
    def turns(cls, is_target: Tensor, valid: Tensor | None = None, window: int | None = None) -> Mask:
        """Sources and targets alternate, as in a chat: each sees all turns before it.

        The tokens of a source see each other, each target token sees the target so far. The order is 0 0 1 2 3 3 4:

           你 吃 白 鸡 几 个 两
        你  ■  ■  ·  ·  ·  ·  ·
        吃  ■  ■  ·  ·  ·  ·  ·
        白  ■  ■  ■  ·  ·  ·  ·
        鸡  ■  ■  ■  ■  ·  ·  ·
        几  ■  ■  ■  ■  ■  ■  ·
        个  ■  ■  ■  ■  ■  ■  ·
        两  ■  ■  ■  ■  ■  ■  ■
        """
        group = _groups(valid, _boolean(is_target, "is_target"))
        real = torch.where(group >= 0, _indices(is_target), -1).cummax(1).values  # the last real token up to here
        before = torch.cat([torch.full_like(real[:, :1], -1), real[:, :-1]], 1)
        after_target = is_target.gather(1, before.clamp(min=0)) & (before >= 0)
        later = is_target | after_target  # each target token, and the first token of a source that follows a target
        return cls((later & (group >= 0)).cumsum(-1), group, window=window)

    @classmethod
    def encoder_decoder(cls, is_target: Tensor, valid: Tensor | None = None) -> Mask:
        """`prefix` for a model with one stack of layers for sources and another for targets.

        Each stack counts its own positions: 0 1 0 1 here, where the order is 0 0 1 2.

           你 吃 白 鸡
        你  ■  ■  ·  ·
        吃  ■  ■  ·  ·
        白  ■  ■  ■  ·
        鸡  ■  ■  ■  ■
        """
        whole = cls.prefix(is_target, valid)
        sources = cls.prefix(is_target, ~is_target if valid is None else valid & ~is_target).position
        targets = cls.prefix(is_target, is_target if valid is None else valid & is_target).position
        return replace(whole, position=torch.where(is_target, targets, sources))

    @classmethod
    def permutation(cls, rank: Tensor, valid: Tensor | None = None, window: int | None = None) -> Mask:
        """Tokens become known in the order of their rank (XLNet). Here 欢 is first, then 北, then 京: rank 1 2 0.

               北 京 欢
            北  ■  ·  ■
            京  ■  ■  ■
            欢  ·  ·  ■

        The query stream, which must not see the token that it predicts, is `visible(strict=True)`.
        """
        rank = _integers(_tensor(rank, "rank"), "rank")
        return cls(rank, _groups(valid, rank), window=window)

    @classmethod
    def packed(cls, mask: Mask, document: Tensor) -> Mask:
        """Several documents in one row that do not see each other; `document` (B, T) are their indices, here 0 0 1 1:

           北 京 你 好
        北  ■  ■  ·  ·
        京  ■  ■  ·  ·
        你  ·  ·  ■  ■
        好  ·  ·  ■  ■
        """
        document, shape = _tensor(document, "document"), expect_mask(mask).shape
        _check(document.shape == shape, f"document is {tuple(document.shape)}, the mask {shape}")
        _check(not document.is_floating_point(), f"document is {document.dtype}; expected whole numbers")
        group = torch.where(mask.group < 0, -1, document.long())
        return replace(mask, group=group, position=None if mask.matrix is None else mask.position)

    @classmethod
    def from_matrix(cls, visible: Tensor) -> Mask:
        """Any boolean matrix, (T, T) or (B, T, T), True = may read: for experiments. `prove()` analyses it."""
        visible = _boolean(visible, "visible", "(T, T) or (B, T, T)")
        matrix = visible[None] if visible.ndim == 2 else visible
        _check(matrix.ndim == 3 and matrix.shape[1] == matrix.shape[2], "visible must be (T, T) or (B, T, T)")
        zeros = torch.zeros(matrix.shape[:2], dtype=torch.long, device=matrix.device)
        return cls(zeros, zeros, matrix=matrix)

    # ---- queries -------------------------------------------------------------------------------------------

    def visible(self, keys: Mask | None = None, strict: bool = False) -> Tensor:
        """The (B, Q, K) matrix: True where a query may read a key; if `strict`, only keys known before the query.

        `decoder.visible(encoder)` is cross-attention; with a cache, `keys` is the mask of old and new tokens.
        """
        keys = self if keys is None else expect_mask(keys)
        query_order, key_order = self.order[:, :, None], keys.order[:, None, :]
        known = key_order < query_order if strict else key_order <= query_order
        seen = known & (self.group[:, :, None] == keys.group[:, None, :]) & (self.group >= 0)[:, :, None]
        if self.window is not None:
            seen &= (self.position[:, :, None] - keys.position[:, None, :]).abs() < self.window
        if self.matrix is not None:
            batch = torch.arange(self.matrix.shape[0], device=self.matrix.device)[:, None, None]
            seen = seen & self.matrix[batch, self.position[:, :, None], keys.position[:, None, :]]
        return seen

    @property
    def valid(self) -> Tensor:
        """(B, T), False at padding."""
        return self.group >= 0

    @property
    def document(self) -> Tensor:
        """(B, T), the index of each token's document, unique in the batch; -1 at padding."""
        rows = torch.arange(len(self), device=self.device)[:, None]
        return torch.where(self.valid, rows * (self.group.max().clamp(min=0) + 1) + self.group, -1)

    @property
    def first_known(self) -> Tensor:
        """(B, T), True at the tokens of a document that are known first: the source of an encoder–decoder."""
        return self.valid & (self.order == self.per_document(self.order, "amin"))

    def per_document(self, values: Tensor, reduce: str) -> Tensor:
        """(B, T), for each token the smallest ("amin") or largest ("amax") of the values (B, T) in its document."""
        index = self.document.flatten() + 1  # all padding counts as one document
        found = values.new_zeros(int(index.max()) + 1)
        found = found.scatter_reduce(0, index, values.flatten(), reduce, include_self=False)
        return found[index].view(self.shape)

    @property
    def shape(self) -> tuple[int, int]:
        return self.order.shape[0], self.order.shape[1]

    @property
    def device(self) -> torch.device:
        return self.order.device

    def may_follow(self, earlier: Mask) -> bool:
        """Whether a cache of `earlier` stays valid when these tokens are appended: no earlier token sees them."""
        return not bool(earlier.visible(self).any())

    # ---- compare, move, slice, join, sort ------------------------------------------------------------------

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

    def show(self, tokens: str | Sequence[str] | Sequence[Sequence[str]] | None = None, title: str = "") -> Drawing:
        """Return a picture that shows itself in a notebook, with the order beside the rows.

        `tokens` name the columns: a list of strings for one row, a list of lists for several; a text is split into
        words and Chinese characters. At most four rows are drawn; more than 64 tokens have no names.
        """
        from allmask.mask.grid import MAX_NAMED, Row, draw_rows

        names = _names(tokens, self.shape) or [None] * len(self)
        if 0 in self.shape:
            raise UsageError(f"mask: it is {self.shape}, so there is nothing to draw")
        step = -(-self.shape[1] // _DRAWN_TOKENS)
        rows = []
        for row in range(min(len(self), _DRAWN_ROWS if self.shape[1] <= MAX_NAMED else 1)):
            part = self[row : row + 1, ::step].to("cpu")
            fields = (part.visible()[0].numpy(), part.order[0].numpy(), part.group[0].numpy(), self.matrix is None)
            rows.append(Row(*fields, names[row], step, f"row {row}" if len(self) > 1 else title))
        notes = [f"{len(rows)} of {len(self)} rows"] if len(self) > len(rows) else []
        if self.shape[1] > MAX_NAMED:
            notes.append(f"{self.shape[1]:,} tokens" + (f", one of every {step} drawn" if step > 1 else ""))
        notes += [f"window {self.window}"] * (self.window is not None)
        return draw_rows(rows, "; ".join(notes))

    def _repr_svg_(self) -> str | None:
        return None if 0 in self.shape else self.show()._repr_svg_()

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, index) -> Mask:
        """Select rows and tokens: `mask[2:4]`, `mask[:, :10]`, `mask[[0, 2]]`. Both dimensions are kept."""
        rows, tokens = index if isinstance(index, tuple) else (index, slice(None))
        rows = slice(rows, rows + 1 or None) if isinstance(rows, int) else rows
        tokens = slice(tokens, tokens + 1 or None) if isinstance(tokens, int) else tokens
        cut = {name: tensor[rows][:, tokens] for name, tensor in self._tensors().items() if name != "matrix"}
        return replace(self, **cut, matrix=None if self.matrix is None else self.matrix[rows])

    def gather(self, index: Tensor) -> Mask:
        """Select tokens of each row by their indices (B, n)."""
        return replace(self, **{name: getattr(self, name).gather(1, index) for name in ("order", "group", "position")})

    def to(self, device: torch.device | str) -> Mask:
        return replace(self, **{name: tensor.to(device) for name, tensor in self._tensors().items()})

    def append(self, other: Mask) -> Mask:
        """Append the tokens of `other`, row by row."""
        return Mask.cat([self, other])

    @classmethod
    def cat(cls, masks: Iterable[Mask], dim: int = 1) -> Mask:
        """Join masks along tokens (dim 1) or rows (dim 0). Order, group and position do not change."""
        masks = list(masks)
        first = masks[0]
        alike = all(m.window == first.window and (m.matrix is None) == (first.matrix is None) for m in masks)
        _check(alike, "masks with different windows, or with and without a matrix, cannot be joined")
        same = dim == 0 or all(_same(m.matrix, first.matrix) for m in masks)
        _check(same, "masks made from different matrices cannot be joined: no cell says who sees whom")
        names = ["order", "group", "position"] + (["matrix"] if first.matrix is not None and dim == 0 else [])
        return replace(first, **{name: torch.cat([getattr(m, name) for m in masks], dim) for name in names})

    def _tensors(self) -> dict[str, Tensor]:
        named = {"order": self.order, "group": self.group, "position": self.position, "matrix": self.matrix}
        return {name: tensor for name, tensor in named.items() if tensor is not None}

    def flatten(self) -> tuple[Mask, Tensor]:
        """Return the same mask as one row without padding, (1, N), and the (N,) index into the flattened (B·T) tokens.

        Documents come one after another, shortest first, so that those of equal length are adjacent. Within a document,
        tokens are sorted by order, which makes every order a causal one (a permuted mask is a shuffled input).
        """
        _check(self.matrix is None, "a mask made from a matrix has no order to sort by")
        index = self.valid.flatten().nonzero()[:, 0]
        _, document, size = self.document.flatten()[index].unique(return_inverse=True, return_counts=True)
        by_order = self.order.flatten()[index].argsort(stable=True)
        by_length = (size[document] * (len(size) + 1) + document)[by_order].argsort(stable=True)
        chosen = by_order[by_length]
        index = index[chosen]
        order, position = self.order.flatten()[index], self.position.flatten()[index]
        return replace(self, order=order[None], group=document[chosen][None], position=position[None]), index


def _names(given: str | Sequence[Any] | None, shape: tuple[int, int]) -> Sequence[Sequence[str]] | None:
    """The names of the tokens of each row; raise an error if they do not fit a mask of this shape."""
    from allmask.mask.labels import split

    if given is None:
        return None
    given = split(given) if isinstance(given, str) else given
    names = [given] if shape[0] == 1 and all(isinstance(name, str) for name in given) else given
    if len(names) != shape[0] or any(isinstance(row, str) or len(row) != shape[1] for row in names):
        found = f"{len(given)} tokens" if names is not given else f"{len(given)} rows of tokens"
        raise UsageError(f"mask: {found} for a mask of shape {shape}", "a list of strings per row, one per token")
    return names


def _check(holds: bool, message: str) -> None:
    if not holds:
        raise UsageError(f"mask: {message}")


def expect_mask(given: object) -> Mask:
    """Return `given` if it is a Mask; otherwise raise an error that says how to make one from a tensor."""
    if isinstance(given, Mask):
        return given
    raise UsageError(
        f"the mask is {_kind(given)}; expected a Mask",
        "pass Mask.bidirectional(valid) or Mask.causal(valid), with valid = attention_mask.bool(), False at padding;"
        "\na matrix, True = may read: Mask.from_matrix(visible)",
    )


def _kind(given: object) -> str:
    if isinstance(given, Tensor):
        return f"a tensor, {tuple(given.shape)} of {given.dtype}"
    return f"{type(given).__module__}.{type(given).__name__}".removeprefix("builtins.")


def _refuse_late_sources(mask: Mask, is_target: Tensor) -> None:
    """Raise an error if a source token comes after a target token of its document."""
    index = _indices(is_target)
    first_target = mask.per_document(torch.where(is_target, index, is_target.shape[1]), "amin")
    late = (mask.valid & ~is_target & (index > first_target)).nonzero()
    if len(late):
        row, token = late[0].tolist()
        raise UsageError(
            f"mask: a source follows its target: in row {row}, token {int(first_target[row, token])} is of the target,"
            f" token {token} of the source",
            "several turns: Mask.turns(is_target); padding: pass valid; several documents in one row: pass document",
        )


def _tensor(given: object, name: str) -> Tensor:
    if not isinstance(given, Tensor):
        hint = "torch.ones(1, tokens, dtype=torch.bool) has no padding" if isinstance(given, int) else "torch.tensor(…)"
        raise UsageError(f"mask: {name} is {_kind(given)}; expected a tensor", f"make one, for example {hint}")
    return given


def _integers(tensor: Tensor, name: str) -> Tensor:
    whole = not tensor.is_floating_point() and tensor.dtype != torch.bool
    _check(whole, f"{name} is {tensor.dtype}; {name} must hold whole numbers")
    return tensor.long()


def _boolean(given: Tensor, name: str, shape: str = "(B, T)") -> Tensor:
    tensor = _tensor(given, name)
    if tensor.dtype != torch.bool:
        raise UsageError(
            f"mask: {name} is {tensor.dtype}; expected booleans", "True = may read, or a real token; pass x.bool()"
        )
    if shape == "(B, T)" and tensor.ndim != 2:
        raise UsageError(f"mask: {name} is {tuple(tensor.shape)}; expected {shape}", f"one row is {name}[None]")
    return tensor


def _same(a: Tensor | None, b: Tensor | None) -> bool:
    return a is b or (a is not None and b is not None and torch.equal(a, b))


def _indices(like: Tensor) -> Tensor:
    return torch.arange(like.shape[1], device=like.device).expand_as(like)


def _count_within(group: Tensor) -> Tensor:
    """The number of tokens of the same group before each token of its row: 0 0 1 1 1 -> 0 1 0 1 2."""
    by_group = group.argsort(dim=1, stable=True)
    runs, index = group.gather(1, by_group), _indices(group)
    begins = torch.ones_like(group, dtype=torch.bool)
    begins[:, 1:] = runs[:, 1:] != runs[:, :-1]
    start = torch.where(begins, index, 0).cummax(dim=1).values
    return torch.empty_like(group).scatter_(1, by_group, index - start)


def _groups(valid: Tensor | None, like: Tensor) -> Tensor:
    """Group 0, and -1 at padding, in the shape of `like`."""
    if valid is None:
        return torch.zeros_like(like, dtype=torch.long)
    group = torch.where(_boolean(valid, "valid"), 0, -1)
    _check(group.shape == like.shape, f"valid is {tuple(group.shape)}; expected {tuple(like.shape)}")
    return group
