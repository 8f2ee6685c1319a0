"""Objectives by name, and mixtures such as `mlm:0.5,causal:0.25,permutation:0.25`: one objective per batch.

Another package adds an objective (see `Objective`) with `OBJECTIVES.register("tail", Tail)` or with an entry point;
then `allmask pretrain --objective tail` trains it:

    [project.entry-points."allmask.objectives"]
    tail = "my_package.tail:Tail"
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from allmask.data import Batch
from allmask.errors import UsageError
from allmask.objectives.draws import Draw
from allmask.objectives.objective import Objective, Samples
from allmask.objectives.vocabulary import Vocabulary
from allmask.options import expect_one_model, objective_weights
from allmask.registry import OBJECTIVES


@dataclass(frozen=True)
class Mixture:
    """The names of objectives and their shares, which sum to 1; `build` creates the objectives."""

    shares: Mapping[str, float]

    @classmethod
    def parse(cls, text: str) -> Mixture:
        """Parse names with weights, separated by commas; the default weight is 1."""
        weights = objective_weights(text)
        for name in weights:
            _expect_objective(name)
        pairs = [name for name in weights if OBJECTIVES[name].pairs]
        expect_one_model(pairs, [name for name in weights if name not in pairs])
        total = sum(weights.values())
        return cls({name: weight / total for name, weight in weights.items()})

    @property
    def heads(self) -> frozenset[str]:
        """The heads that the model needs."""
        return frozenset(head for name in self.shares for head in OBJECTIVES[name].heads)

    @property
    def pairs(self) -> bool:
        """Whether the objectives need an encoder–decoder."""
        return any(OBJECTIVES[name].pairs for name in self.shares)

    @property
    def frame(self) -> int:
        """The most special tokens that are added to a sample."""
        return max(OBJECTIVES[name].frame for name in self.shares)

    def build(self, vocabulary: Vocabulary, options: Mapping[str, Mapping[str, Any]] | None = None) -> Mixed:
        """Create the objectives; `options` are given by name: {"mlm": {"whole_words": True}}."""
        options = {} if options is None else options
        unused = options.keys() - self.shares.keys()
        if unused:
            raise UsageError(f"options are given for {', '.join(sorted(unused))}, which is not part of {self}")
        made = [OBJECTIVES[name](vocabulary, **options.get(name, {})) for name in self.shares]
        return Mixed(made, np.cumsum(list(self.shares.values())))

    def __str__(self) -> str:
        return ",".join(f"{name}:{share:g}" for name, share in self.shares.items())


@dataclass(frozen=True, eq=False)
class Mixed:
    """A mixture of objectives. The choice for a batch depends only on its samples, the seed and the epoch."""

    objectives: list[Objective]
    bounds: np.ndarray  # (objectives,) cumulative shares

    def choose(self, draw: Draw) -> Objective:
        number = int(self.bounds.searchsorted(draw.batch("objective"), side="right"))
        return self.objectives[min(number, len(self.objectives) - 1)]  # rounding may leave the last bound below 1

    def batch(self, samples: Samples, draw: Draw) -> Batch:
        return self.choose(draw).batch(samples, draw)


def _expect_objective(name: str) -> None:
    """Refuse a class of another package that lacks a part of the protocol."""
    kind = OBJECTIVES[name]
    lacking = [part for part in ("frame", "heads", "pairs", "batch", "name") if not hasattr(kind, part)]
    if lacking:
        raise UsageError(f"objective {name}: its class has no {', '.join(lacking)}", "see Objective in objective.py")
    if kind.name != name:
        raise UsageError(f"objective {name}: the name of {kind!r} is {kind.name!r}", f'write name = "{name}" in it')
