"""Long text: truncate it to the length of a model, or cover it with sliding windows.

Head+tail comes from "How to Fine-Tune BERT for Text Classification?" (arXiv 1905.05583): the beginning and the end of a
text carry most of its information.
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
    """Return at most `limit` of `tokens` (ids or pieces, without special tokens), in their order.

    head       the first `limit`
    tail       the last `limit`
    head+tail  510: 128 + 382 of up to 800 tokens, 256 + 254 of more; any other limit L in the same proportions,
               rounded down: L·128/510 of up to L·800/510 tokens, L·256/510 of more, and the rest from the end
    """
    if rule not in RULES:
        raise UsageError(f"truncation rule is {rule!r}; expected one of {', '.join(RULES)}")
    if limit < 1:
        raise UsageError(f"truncation limit is {limit}; expected at least 1")
    if len(tokens) <= limit:
        return list(tokens)
    share = _HEAD if len(tokens) * _ROOM <= _LONG * limit else _HEAD_OF_LONG  # whole numbers, so that 510 is exact
    head = {"head": limit, "tail": 0, "head+tail": limit * share // _ROOM}[rule]
    return [*tokens[:head], *tokens[len(tokens) - (limit - head) :]]


def windows(tokens: Sized | int, size: int, stride: int) -> list[tuple[int, int]]:
    """Return (start, end) of windows of `size` tokens that together cover `tokens` (a sequence or its length).

    Each window starts `stride` tokens after the previous one, so neighbours share `size - stride` tokens. The last one
    is moved back so that it is full too, and has context. A text that fits is one window.
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
