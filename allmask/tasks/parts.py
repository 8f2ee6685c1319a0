"""A batch of rows made by several processes: each makes the rows that it computes, as they are in the whole batch.

What chance decides about a row depends on that row alone, and what it decides about a batch on all its rows. So the
first is drawn for one's own rows, and the second for all of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from allmask.data import Batch
from allmask.model import Model
from allmask.objectives import Draw
from allmask.tasks.rows import RowWork
from allmask.training import Score, Share


@dataclass(frozen=True, eq=False)
class PartDraw(Draw):
    """What chance decides about some of the samples of a batch."""

    whole: Draw

    def batch(self, name: str) -> float:
        return self.whole.batch(name)


@dataclass(frozen=True, eq=False)
class PartWork:
    """Rows as work for a process among `size` of them."""

    work: RowWork
    rank: int
    size: int

    @property
    def lengths(self) -> np.ndarray:
        return self.work.lengths

    def evaluate(self, model: Model, step: int = 0) -> Score | None:
        return self.work.evaluate(model, step)

    def batch(self, numbers: Sequence[int], epoch: int) -> Share:
        mine, weight = dealt(numbers, self.rank, self.size)
        draw = PartDraw(self.work.seed, epoch, mine, Draw(self.work.seed, epoch, numbers))
        made = self.work.objective.batch(self.work.rows, draw)
        assert isinstance(made, Batch)
        return Share(made, weight)


def dealt(numbers: Sequence[int], rank: int, size: int) -> tuple[Sequence[int], float]:
    """The rows of a batch that a process gets, and the weight of what it makes of them.

    They are dealt one by one. A plan has them by length, so no process gets more tokens than another by as much as the
    longest has (twice that where two pools of the plan meet). With fewer rows than processes some work for nothing,
    with a weight of 0: all must take part when gradients are added.
    """
    if rank < len(numbers):
        return numbers[rank::size], 1.0
    return [numbers[rank % len(numbers)]], 0.0
