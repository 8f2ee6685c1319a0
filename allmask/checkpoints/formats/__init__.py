"""Formats of weight files. All are read without running any code they contain."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor


class Stored(NamedTuple):
    """One tensor in a file that is open but not yet loaded."""

    shape: tuple[int, ...]
    dtype: str  # as torch names it: "float32"
    load: Callable[[], Tensor]


Store = dict[str, Stored]  # by the name in the file
