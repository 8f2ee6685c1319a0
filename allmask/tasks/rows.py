"""Rows of a corpus as work for the training loop: batches by an objective, and a judge on rows that are held out."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch.nn.functional as F

from allmask.data import Batch, plan_epoch
from allmask.data.windows import Windows
from allmask.model import Model
from allmask.objectives import Draw, Mixed, Objective, losses_of
from allmask.training import Score

JUDGED_ROWS = 256
JUDGED_TOKENS = 2048  # a batch: small, so that an objective that draws by the batch is seen from all sides
COLLAPSED = 0.99  # a body whose hidden states are so much alike reads next to nothing


@dataclass(frozen=True, eq=False)
class RowWork:
    """What the training loop asks for. A batch is a pure function of seed, epoch and the numbers of its rows."""

    objective: Mixed
    rows: Windows
    seed: int
    frame: int  # special tokens around a row
    judge: Judge | None = None

    @property
    def lengths(self) -> np.ndarray:
        return self.rows.lengths + self.frame

    def batch(self, numbers: Sequence[int], epoch: int) -> Batch:
        made = self.objective.batch(self.rows, Draw(self.seed, epoch, numbers))
        assert isinstance(made, Batch)
        return made

    def evaluate(self, model: Model, step: int = 0) -> Score | None:
        return None if self.judge is None else self.judge(model)


@dataclass(frozen=True, eq=False)
class Judge:
    """The losses of each objective on the same held-out rows, corrupted in the same way every time."""

    shares: Mapping[str, float]
    batches: Mapping[str, Sequence[Batch]]  # of each objective

    @classmethod
    def of(cls, shares: Mapping[str, float], objective: Mixed, rows: Windows, seed: int) -> Judge:
        chosen = np.unique(np.linspace(0, len(rows) - 1, JUDGED_ROWS).astype(np.int64))
        plan = [chosen[numbers] for numbers in plan_epoch(rows.lengths[chosen], JUDGED_TOKENS, seed, 0)]
        draws = [Draw(seed, 0, numbers) for numbers in plan]
        return cls(shares, {one.name: _batches(one, rows, draws) for one in objective.objectives})

    def __call__(self, model: Model) -> Score:
        """`loss` is what training minimises, each objective by its share; it chooses the best checkpoint."""
        sums: dict[str, float] = {}
        counts: Counter[str] = Counter()
        whole = 0.0
        for name, share in self.shares.items():
            found, targets = _added(model, self.batches[name])
            whole += share * sum(found[loss] / max(1, targets[loss]) for loss in found)
            sums |= {loss: sums.get(loss, 0.0) + value for loss, value in found.items()}
            counts.update(targets)
        means = {name: sums[name] / max(1, counts[name]) for name in sums}
        told = {"loss": whole, **{f"loss_{name}": mean for name, mean in means.items()}, **self._more(model, means)}
        return Score(-whole, told, _warnings(told["alike"]))

    def _more(self, model: Model, means: Mapping[str, float]) -> dict[str, float]:
        """Perplexity of text from left to right, the share of right answers of nsp, and how alike tokens are read."""
        told = {"alike": alike(model, next(iter(self.batches.values()))[0])}
        if "causal" in means:
            told["perplexity_causal"] = math.exp(min(means["causal"], 700.0))
        if "nsp" in self.batches:
            asked = self.batches["nsp"]
            told["accuracy_nsp"] = sum(_right(model, batch) for batch in asked) / sum(_texts(batch) for batch in asked)
        return told


def alike(model: Model, batch: Batch) -> float:
    """The mean cosine of the hidden states of two tokens: 1 where the body tells none from another."""
    hidden = model.body.at(batch.mask.valid, batch.ids, batch.mask, batch.segments)
    return float(F.normalize(hidden.float(), dim=-1).mean(0).square().sum())


def _warnings(alike: float) -> list[str]:
    if alike < COLLAPSED:
        return []
    told = f"warning: the body no longer tells tokens apart (the mean cosine of their hidden states is {alike:.3f})"
    return [told, "  if it stays so, begin again with a smaller --lr or a longer --warmup"]


def _batches(objective: Objective, rows: Windows, draws: Sequence[Draw]) -> list[Batch]:
    made = [objective.batch(rows, draw) for draw in draws]
    return [batch for batch in made if isinstance(batch, Batch)]


def _added(model: Model, batches: Sequence[Batch]) -> tuple[dict[str, float], Counter[str]]:
    """Summed losses by name, and over how many targets."""
    sums: dict[str, float] = {}
    counts: Counter[str] = Counter()
    for batch in batches:
        for name, (loss, targets) in losses_of(model, batch).items():
            sums[name] = sums.get(name, 0.0) + loss.item()
            counts[name] += targets
    return sums, counts


def _texts(batch: Batch) -> int:
    assert batch.relations is not None
    return len(batch.relations)


def _right(model: Model, batch: Batch) -> int:
    """How many texts are rightly said to go on, or not."""
    assert batch.relations is not None
    first = batch.mask.place == 0
    hidden = model.body.at(first, batch.ids, batch.mask, batch.segments)
    answers = model.head("nsp_head")(model.head("pooler")(hidden[:, None])).argmax(-1)
    return int((answers == batch.relations[batch.mask.group[first]]).sum())
