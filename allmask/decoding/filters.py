"""Filters of the next token: functions of scores (R, V), logits or log-probabilities; -inf excludes a token."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def ban(scores: Tensor, tokens: Sequence[int]) -> Tensor:
    """Exclude tokens: ban([2 1 0], (1,)) is 2 -inf 0."""
    if not tokens:
        return scores
    return scores.index_fill(1, torch.tensor(tokens, device=scores.device), -torch.inf)


def no_repeat(scores: Tensor, histories: Sequence[Sequence[int]], size: int) -> Tensor:
    """Exclude tokens that would repeat an n-gram of `size` tokens: after 你 好 吗 你, size 2 excludes 好."""
    cells = [(row, token) for row, history in enumerate(histories) for token in _repeating(history, size)]
    if not cells:
        return scores
    rows, tokens = torch.tensor(cells, device=scores.device).unbind(1)
    return scores.index_put((rows, tokens), scores.new_tensor(-torch.inf))


def _repeating(history: Sequence[int], size: int) -> set[int]:
    """The tokens that followed earlier occurrences of the last `size - 1` tokens."""
    last = tuple(history[len(history) - size + 1 :])
    starts = range(len(history) - size + 1)
    return {history[start + size - 1] for start in starts if tuple(history[start : start + size - 1]) == last}


def temperature(scores: Tensor, value: float) -> Tensor:
    """Divide the scores: above 1 the distribution is flatter, below 1 sharper."""
    return scores if value == 1.0 else scores / value


def top_k(scores: Tensor, k: int) -> Tensor:
    """Keep the k highest scores of each row, and any that equal the lowest of them; k = 0 keeps all."""
    if not 0 < k < scores.shape[1]:
        return scores
    return scores.masked_fill(scores < scores.topk(k).values[:, -1:], -torch.inf)


def top_p(scores: Tensor, p: float) -> Tensor:
    """Keep the fewest, likeliest tokens that together have at least probability p; always at least one."""
    if p >= 1.0:
        return scores
    ordered, index = scores.sort(dim=1, descending=True, stable=True)
    share = ordered.softmax(1)
    dropped = share.cumsum(1) - share >= p  # the likelier tokens are enough; never true for the likeliest
    return scores.masked_fill(torch.zeros_like(dropped).scatter(1, index, dropped), -torch.inf)
