"""Random masks and matrices for property tests: every shape that an order, documents, padding and a window can take."""

from __future__ import annotations

import torch
from hypothesis import strategies as st
from torch import Tensor

from allmask.mask import Mask


@st.composite
def booleans(draw, rows: int, columns: int) -> Tensor:
    """A (rows, columns) boolean matrix; its bits are drawn as one number, which shrinks towards all False."""
    bits = draw(st.integers(0, 2 ** (rows * columns) - 1))
    cells = [bool(bits >> place & 1) for place in range(rows * columns)]
    return torch.tensor(cells, dtype=torch.bool).view(rows, columns)


@st.composite
def matrices(draw, max_tokens: int = 8) -> Tensor:
    """Any boolean (T, T) matrix."""
    tokens = draw(st.integers(1, max_tokens))
    return draw(booleans(tokens, tokens))


@st.composite
def masks(
    draw, max_rows: int = 3, max_tokens: int = 8, documents: int = 3, padding: bool = True, windows: bool = True
) -> Mask:
    """Any (order, group, window): ties, gaps and negative numbers in the order, documents in any arrangement."""
    rows, tokens = draw(st.integers(1, max_rows)), draw(st.integers(1, max_tokens))
    order = st.lists(st.integers(-2, tokens), min_size=tokens, max_size=tokens)
    group = st.lists(st.integers(-1 if padding else 0, documents - 1), min_size=tokens, max_size=tokens)
    return Mask(
        torch.tensor([draw(order) for _ in range(rows)]),
        torch.tensor([draw(group) for _ in range(rows)]),
        window=draw(st.none() | st.integers(1, tokens)) if windows else None,
    )
