"""A board: the tokens of a source and a target, and a mask over them, as the page sends it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from allmask.errors import UsageError
from allmask.mask import Mask

MAX_TOKENS = 64  # of a board
MAX_LAYERS = 48
_MISSING = object()


@dataclass(frozen=True)
class Fields:
    """The fields of a request, each checked when it is read; what is wrong is said as on the command line."""

    given: Mapping[str, Any]

    def text(self, name: str, longest: int, default: Any = _MISSING) -> str:
        value = self.given.get(name, default)
        if not isinstance(value, str):
            raise UsageError(f"{name} is {_shown(value)}; expected a text")
        if len(value) > longest:
            raise UsageError(f"{name} has {len(value):,} characters", f"at most {longest:,}")
        try:
            value.encode()
        except UnicodeEncodeError:
            raise UsageError(f"{name} holds half of a surrogate pair", "send valid Unicode") from None
        return value

    def whole(self, name: str, least: int, most: int, default: Any = _MISSING) -> Any:
        value = self.given.get(name, default)
        if value is default and default is not _MISSING:
            return value
        if type(value) is not int or not least <= value <= most:
            raise UsageError(f"{name} is {_shown(value)}; expected a whole number from {least} to {most}")
        return value

    def one_of(self, name: str, allowed: tuple[str, ...], default: Any = _MISSING) -> str:
        value = self.given.get(name, default)
        if not isinstance(value, str) or value not in allowed:
            raise UsageError(f"{name} is {_shown(value)}; expected one of {', '.join(allowed)}")
        return value

    def wholes(self, name: str, least: int, most: int, longest: int, default: Any = _MISSING) -> list[int]:
        values = self.given.get(name, default)
        if not isinstance(values, list) or len(values) > longest:
            raise UsageError(f"{name} is {_shown(values)}; expected a list of at most {longest} numbers")
        for value in values:
            if type(value) is not int or not least <= value <= most:
                raise UsageError(f"{name} holds {_shown(value)}; expected whole numbers from {least} to {most}")
        return values

    def cells(self, name: str, tokens: int) -> list[tuple[int, int]]:
        """Pairs (row, column) of a square of this many tokens."""
        pairs = self.given.get(name, [])
        if not isinstance(pairs, list) or len(pairs) > tokens * tokens:
            raise UsageError(f"{name} is {_shown(pairs)}; expected a list of cells")
        for pair in pairs:
            inside = isinstance(pair, list) and len(pair) == 2 and all(type(x) is int and 0 <= x < tokens for x in pair)
            if not inside:
                raise UsageError(f"{name} holds {_shown(pair)}; expected [row, column], both below {tokens}")
        return [(row, column) for row, column in pairs]


def _shown(value: Any) -> str:
    if value is _MISSING:
        return "missing"
    text = repr(value)
    return text if len(text) <= 40 else text[:39] + "…"


@dataclass(frozen=True, eq=False)
class Board:
    """An order, documents and a window, and the cells that were clicked: each of those is the opposite of the rest."""

    order: Tensor  # (1, T)
    group: Tensor  # (1, T)
    window: int | None = None
    edits: tuple[tuple[int, int], ...] = ()

    @classmethod
    def of(cls, fields: Fields) -> Board:
        order = fields.wholes("order", -1000, 1000, MAX_TOKENS)
        if not order:
            raise UsageError("order is empty", "give a number for each token")
        group = fields.wholes("group", 0, MAX_TOKENS, MAX_TOKENS, default=[0] * len(order))
        if len(group) != len(order):
            raise UsageError(f"group has {len(group)} numbers, order {len(order)}")
        edits = tuple(sorted(set(fields.cells("edits", len(order)))))
        window = fields.whole("window", 1, MAX_TOKENS, default=None)
        return cls(torch.tensor([order]), torch.tensor([group]), window, edits)

    def __len__(self) -> int:
        return self.order.shape[1]

    @property
    def promised(self) -> Mask:
        """The mask without the clicked cells: an order, so nothing leaks."""
        return Mask(self.order, self.group, window=self.window)

    @property
    def mask(self) -> Mask:
        if not self.edits:
            return self.promised
        return Mask.from_matrix(self.visible)

    @property
    def visible(self) -> Tensor:
        """(T, T)"""
        visible = self.promised.visible()[0]
        for row, column in self.edits:
            visible[row, column] = ~visible[row, column]
        return visible

    def first(self, count: int) -> Board:
        """The board of the first tokens only."""
        edits = tuple(cell for cell in self.edits if max(cell) < count)
        return Board(self.order[:, :count], self.group[:, :count], self.window, edits)

    def longer(self, count: int) -> Board:
        """The board with new tokens at its end, each known after all before it, in the document of the last one."""
        new = torch.arange(1, count + 1)[None]
        order = torch.cat([self.order, self.order.max() + new], 1)
        group = torch.cat([self.group, self.group[:, -1:].expand_as(new)], 1)
        return Board(order, group, self.window, self.edits)
