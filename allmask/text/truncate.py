"""Long text: the ways to cut it to what a model can hold, and windows that slide over all of it.

Head+tail comes from "How to Fine-Tune BERT for Text Classification?" (arXiv 1905.05583): the beginning and the end of a
text say most of what it is about.
"""

from __future__ import annotations

from collections.abc import Sequence, Sized
from typing import TypeVar

from allmask.errors import UsageError

T = TypeVar("T")

RULES = ("head", "tail", "head+tail")

# BERT reads 512 tokens, two of them special. Of those 510, a text of at most 800 tokens keeps its first 128 and its
# last 382; a longer one its first 256 and its last 254. Other limits keep these proportions.
_ROOM, _LONG, _HEAD, _HEAD_OF_LONG = 510, 800, 128, 256


def truncate_tokens(tokens: Sequence[T], limit: int = _ROOM, rule: str = "head") -> list[T]:
    """At most `limit` of `tokens` (ids or pieces, without special tokens), in their order.

    head       the first `limit`
    tail       the last `limit`
    head+tail  510: 128 + 382 of up to 800 tokens, 256 + 254 of more; any other limit L in the same proportions,
               rounded down: L·128/510 of up to L·800/510 tokens, L·256/510 of more, and the rest from the end
    """
    if rule not in RULES:
        raise UsageError(f"truncation rule is {rule!r}; expected one of {', '.join(RULES)}")
    if limit < 1:
        raise UsageError(f"truncation limit is {limit}; expected at least 1")
    head = {"head": limit, "tail": 0, "head+tail": _head(len(tokens), limit)}[rule]
    if len(tokens) <= limit:
        return list(tokens)
    return [*tokens[:head], *tokens[len(tokens) - (limit - head) :]]


def _head(length: int, limit: int) -> int:
    """How many of the `limit` tokens come from the beginning (whole numbers only, so 510 is exact)."""
    share = _HEAD if length * _ROOM <= _LONG * limit else _HEAD_OF_LONG
    return limit * share // _ROOM


def windows(tokens: Sized | int, size: int, stride: int) -> list[tuple[int, int]]:
    """(start, end) of windows of `size` tokens that together cover all of `tokens` (or that many tokens).

    Each window starts `stride` tokens after the one before, so neighbours share `size - stride` tokens; the last is
    moved back to be full as well, rather than left with a few tokens and no context. A text that fits is one window.
    """
    length = tokens if isinstance(tokens, int) else len(tokens)
    if size < 1 or not 1 <= stride <= size:
        raise UsageError(
            f"windows of {size} tokens with stride {stride}; expected 1 <= stride <= size",
            "the stride is the distance between the starts of two windows: beyond the size it would skip tokens",
        )
    last = max(length - size, 0)
    starts = [*range(0, last, stride), last]
    return [(start, min(start + size, length)) for start in starts]
