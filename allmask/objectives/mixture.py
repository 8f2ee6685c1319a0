"""Objectives by name, and several of them in one run: `mlm:0.5,causal:0.25,permutation:0.25`, one for each batch.

Another package adds an objective, see `Objective`, by `OBJECTIVES.register("tail", Tail)`, or by an entry point; then
`allmask pretrain --objective tail` learns it:

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
from allmask.options import objective_weights
from allmask.registry import OBJECTIVES


@dataclass(frozen=True)
class Mixture:
    """The names of objectives and their shares, which sum to 1; `build` makes the objectives."""

    shares: Mapping[str, float]

    @classmethod
    def parse(cls, text: str) -> Mixture:
        """Names with weights, separated by commas; a weight left out is 1."""
        weights = objective_weights(text)
        for name in weights:
            _expect_objective(name)
        _expect_one_kind(weights)
        total = sum(weights.values())
        return cls({name: weight / total for name, weight in weights.items()})

    @property
    def heads(self) -> frozenset[str]:
        """The heads a model needs."""
        return frozenset(head for name in self.shares for head in OBJECTIVES[name].heads)

    @property
    def pairs(self) -> bool:
        """Whether they need an encoder–decoder."""
        return any(OBJECTIVES[name].pairs for name in self.shares)

    @property
    def frame(self) -> int:
        """How many tokens at most are put around a sample."""
        return max(OBJECTIVES[name].frame for name in self.shares)

    def build(self, vocabulary: Vocabulary, options: Mapping[str, Mapping[str, Any]] | None = None) -> Mixed:
        """`options` of objectives by name: {"mlm": {"whole_words": True}}."""
        options = {} if options is None else options
        unused = options.keys() - self.shares.keys()
        if unused:
            raise UsageError(f"options are given for {', '.join(sorted(unused))}, which is not among {self}")
        made = [OBJECTIVES[name](vocabulary, **options.get(name, {})) for name in self.shares]
        return Mixed(made, np.cumsum(list(self.shares.values())))

    def __str__(self) -> str:
        return ",".join(f"{name}:{share:g}" for name, share in self.shares.items())


@dataclass(frozen=True, eq=False)
class Mixed:
    """Objectives that take turns: which one a batch gets depends on its samples, the seed and the epoch alone."""

    objectives: list[Objective]
    bounds: np.ndarray  # (objectives,) cumulated shares

    def choose(self, draw: Draw) -> Objective:
        number = int(self.bounds.searchsorted(draw.batch("objective"), side="right"))
        return self.objectives[min(number, len(self.objectives) - 1)]  # rounding may leave the last bound below 1

    def batch(self, samples: Samples, draw: Draw) -> Batch:
        return self.choose(draw).batch(samples, draw)


def _expect_objective(name: str) -> None:
    """Refuse a class of another package that does not say what a model needs to learn it."""
    kind = OBJECTIVES[name]
    lacking = [one for one in ("frame", "heads", "pairs", "batch", "name") if not hasattr(kind, one)]
    if lacking:
        raise UsageError(f"objective {name}: its class has no {', '.join(lacking)}", "see Objective in objective.py")
    if kind.name != name:
        raise UsageError(f"objective {name}: the name of {kind!r} is {kind.name!r}", f'write name = "{name}" in it')


def _expect_one_kind(names: Mapping[str, float]) -> None:
    pairs = [name for name in names if OBJECTIVES[name].pairs]
    if pairs and len(pairs) < len(names):
        others = [name for name in names if name not in pairs]
        raise UsageError(
            f"{', '.join(pairs)} and {', '.join(others)} cannot be learnt by one model",
            f"{', '.join(pairs)}: for an encoder–decoder; {', '.join(others)}: for a single stack",
        )
