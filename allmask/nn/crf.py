"""The linear-chain conditional random field (Lafferty et al., 2001): a sequence of labels is scored as a whole.

score(labels | text) = first[y₁] + Σ scores[t, yₜ] + Σ follows[yₜ₋₁, yₜ] + last[yₙ]

The loss is minus the log-probability of the correct sequence among all sequences, whose sum the forward algorithm
computes in linear time; the Viterbi algorithm finds the best sequence. The sequences of a batch are concatenated.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

_SCALE = 100.0  # Adam moves each parameter by about the learning rate, and a body's is too small for scores
_FORBIDDEN = -1e9  # finite, so that a sequence without any allowed path still has a best one, and no NaN arises
_MAX_STEPS = 16384  # of all sequences in one search, padding included


class CRF(nn.Module):
    """Scores of L labels at the start, at the end and after one another."""

    def __init__(self, labels: int):
        super().__init__()
        self.follows_bias = nn.Parameter(torch.zeros(labels * labels))  # from, to
        self.first_bias = nn.Parameter(torch.zeros(labels))
        self.last_bias = nn.Parameter(torch.zeros(labels))

    @property
    def follows(self) -> Tensor:
        """Scores (L, L) of each label, the row, being followed by each label, the column."""
        return _SCALE * self.follows_bias.view(len(self.first_bias), -1)

    @property
    def first(self) -> Tensor:
        return _SCALE * self.first_bias

    @property
    def last(self) -> Tensor:
        return _SCALE * self.last_bias

    def loss(self, scores: Tensor, labels: Tensor, lengths: Tensor) -> Tensor:
        """Return the summed loss of sequences of these lengths; scores (M, L) and labels (M,) are concatenated."""
        rows = pad_sequence([*scores.split(lengths.tolist())], batch_first=True)  # (C, T, L)
        labels = pad_sequence([*labels.split(lengths.tolist())], batch_first=True)  # (C, T)
        valid = torch.arange(rows.shape[1], device=rows.device) < lengths[:, None]
        total, follows = self.first + rows[:, 0], self.follows  # (C, L): the forward algorithm
        for step in range(1, rows.shape[1]):
            longer = (total[:, :, None] + follows).logsumexp(1) + rows[:, step]
            total = torch.where(valid[:, step, None], longer, total)
        normalizer = (total + self.last).logsumexp(1)
        each = rows.gather(2, labels[:, :, None])[:, :, 0] * valid
        steps = self.follows[labels[:, :-1], labels[:, 1:]] * valid[:, 1:]
        ends = self.last[labels.gather(1, lengths[:, None] - 1)[:, 0]]
        score = self.first[labels[:, 0]] + each.sum(1) + steps.sum(1) + ends  # (C,) of the correct sequences
        return (normalizer - score).sum()

    @torch.no_grad()
    def best(self, scores: Sequence[Tensor], starts: Tensor, allowed: Tensor) -> list[list[int]]:
        """Return the best labels for each sequence of scores (T, L).

        Only those are considered that begin with one of `starts` (L,) and whose transitions are `allowed` (L, L). The
        search runs on the CPU, where the arguments are.
        """
        found: list[list[int]] = [[] for _ in scores]
        for indices in _groups([len(sequence) for sequence in scores]):
            paths = self._viterbi([scores[index] for index in indices], starts, allowed)
            for index, path in zip(indices, paths, strict=True):
                found[index] = path
        return found

    def _viterbi(self, scores: Sequence[Tensor], starts: Tensor, allowed: Tensor) -> list[list[int]]:
        rows, lengths = pad_sequence(list(scores), batch_first=True), [len(sequence) for sequence in scores]
        valid = torch.arange(rows.shape[1]) < torch.tensor(lengths)[:, None]
        follows = self.follows.cpu().masked_fill(~allowed, _FORBIDDEN)
        total = self.first.cpu().masked_fill(~starts, _FORBIDDEN) + rows[:, 0]
        previous = []  # (C, L) each: the label before, on the best path to each label
        for step in range(1, rows.shape[1]):
            longer, back = (total[:, :, None] + follows).max(1)
            previous.append(back)
            total = torch.where(valid[:, step, None], longer + rows[:, step], total)
        paths = []
        for row, label in enumerate((total + self.last.cpu()).argmax(1).tolist()):
            path = [label]
            for step in range(lengths[row] - 1, 0, -1):
                path.append(int(previous[step - 1][row, path[-1]]))
            paths.append(path[::-1])
        return paths


def _groups(lengths: Sequence[int]) -> Iterator[list[int]]:
    """Group the indices of sequences of similar lengths, to be searched together; empty ones are left out."""
    group: list[int] = []
    for index in sorted((n for n, length in enumerate(lengths) if length), key=lengths.__getitem__):
        if group and (len(group) + 1) * lengths[index] > _MAX_STEPS:
            yield group
            group = []
        group.append(index)
    if group:
        yield group
