"""A chain of labels scored as a whole: the linear conditional random field (Lafferty et al., 2001).

score(labels | text) = first[y₁] + Σ scores[t, yₜ] + Σ follows[yₜ₋₁, yₜ] + last[yₙ]

The loss is minus the logarithm of the share of the right chain among all chains, whose sum the forward algorithm finds
in time linear in the length; Viterbi finds the best one. Chains of a batch stand one after another in a flat row.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

_STRETCH = 100.0  # Adam moves every number by about the learning rate, and a body's is too small for scores like these
_NEVER = -1e9  # finite, so that a chain in which all is forbidden still has a best path, and no NaN arises
_TOGETHER = 16384  # steps of all chains in one search, the padding among them


class CRF(nn.Module):
    """How well labels follow each other; L labels."""

    def __init__(self, labels: int):
        super().__init__()
        self.follows_bias = nn.Parameter(torch.zeros(labels * labels))  # from, to
        self.first_bias = nn.Parameter(torch.zeros(labels))
        self.last_bias = nn.Parameter(torch.zeros(labels))

    @property
    def follows(self) -> Tensor:
        """(L, L) from, to."""
        return _STRETCH * self.follows_bias.view(len(self.first_bias), -1)

    @property
    def first(self) -> Tensor:
        return _STRETCH * self.first_bias

    @property
    def last(self) -> Tensor:
        return _STRETCH * self.last_bias

    def loss(self, scores: Tensor, gold: Tensor, lengths: Tensor) -> Tensor:
        """The summed loss of chains of these lengths, whose scores (M, L) and labels (M,) stand one after another."""
        rows = pad_sequence([*scores.split(lengths.tolist())], batch_first=True)  # (C, T, L)
        right = pad_sequence([*gold.split(lengths.tolist())], batch_first=True)  # (C, T)
        there = torch.arange(rows.shape[1], device=rows.device) < lengths[:, None]
        return (self._all(rows, there) - self._one(rows, right, there, lengths)).sum()

    def _all(self, rows: Tensor, there: Tensor) -> Tensor:
        """(C,) the logarithm of the sum over all chains: the forward algorithm."""
        total, follows = self.first + rows[:, 0], self.follows  # (C, L)
        for step in range(1, rows.shape[1]):
            longer = (total[:, :, None] + follows).logsumexp(1) + rows[:, step]
            total = torch.where(there[:, step, None], longer, total)
        return (total + self.last).logsumexp(1)

    def _one(self, rows: Tensor, gold: Tensor, there: Tensor, lengths: Tensor) -> Tensor:
        """(C,) the score of one chain each."""
        each = rows.gather(2, gold[:, :, None])[:, :, 0] * there
        steps = self.follows[gold[:, :-1], gold[:, 1:]] * there[:, 1:]
        ends = self.last[gold.gather(1, lengths[:, None] - 1)[:, 0]]
        return self.first[gold[:, 0]] + each.sum(1) + steps.sum(1) + ends

    @torch.no_grad()
    def best(self, scores: Sequence[Tensor], starts: Tensor, allowed: Tensor) -> list[list[int]]:
        """The best labels of each chain (T, L), of those that begin with one of `starts` (L,) and only take steps that
        are `allowed` (L, L)."""
        found: list[list[int]] = [[] for _ in scores]
        for numbers in _groups([len(chain) for chain in scores]):
            paths = self._viterbi([scores[number] for number in numbers], starts, allowed)
            for number, path in zip(numbers, paths, strict=True):
                found[number] = path
        return found

    def _viterbi(self, scores: Sequence[Tensor], starts: Tensor, allowed: Tensor) -> list[list[int]]:
        rows, lengths = pad_sequence(list(scores), batch_first=True), [len(chain) for chain in scores]
        there = torch.arange(rows.shape[1]) < torch.tensor(lengths)[:, None]
        follows = self.follows.masked_fill(~allowed, _NEVER)
        total = self.first.masked_fill(~starts, _NEVER) + rows[:, 0]
        came = []  # (C, L) each: from which label the best way leads here
        for step in range(1, rows.shape[1]):
            longer, back = (total[:, :, None] + follows).max(1)
            came.append(back)
            total = torch.where(there[:, step, None], longer + rows[:, step], total)
        ends = (total + self.last).argmax(1).tolist()
        return [_walk_back(ends[row], came, row, length) for row, length in enumerate(lengths)]


def _groups(lengths: Sequence[int]) -> Iterator[list[int]]:
    """Numbers of chains of about one length that are searched together; empty ones are left out."""
    group: list[int] = []
    for number in sorted((n for n, length in enumerate(lengths) if length), key=lengths.__getitem__):
        if group and (len(group) + 1) * lengths[number] > _TOGETHER:
            yield group
            group = []
        group.append(number)
    if group:
        yield group


def _walk_back(last: int, came: Sequence[Tensor], row: int, length: int) -> list[int]:
    path = [last]
    for step in range(length - 1, 0, -1):
        path.append(int(came[step - 1][row, path[-1]]))
    return path[::-1]
