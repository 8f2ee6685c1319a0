"""Several objectives in one run: `mlm:0.5,causal:0.25,permutation:0.25`. Each batch gets one of them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

import numpy as np

from allmask.data import Batch
from allmask.errors import UsageError
from allmask.objectives.causal import Causal
from allmask.objectives.draws import Draw
from allmask.objectives.mass import Mass
from allmask.objectives.mlm import Mlm
from allmask.objectives.nsp import Nsp
from allmask.objectives.objective import Objective, Samples
from allmask.objectives.permutation import Permutation
from allmask.objectives.prefix import Prefix
from allmask.objectives.reverse import Reverse
from allmask.objectives.span import Span
from allmask.objectives.unilm import Unilm
from allmask.objectives.vocabulary import Vocabulary

OBJECTIVES: dict[str, type] = {
    kind.name: kind for kind in (Mlm, Nsp, Causal, Reverse, Permutation, Prefix, Unilm, Mass, Span)
}


@dataclass(frozen=True)
class Mixture:
    """The names of objectives and their shares, which sum to 1. `build` makes of it what makes batches."""

    shares: Mapping[str, float]

    @classmethod
    def parse(cls, text: str) -> Mixture:
        """Names with weights, separated by commas; a weight left out is 1."""
        weights: dict[str, float] = {}
        for entry in text.split(","):
            name, weight = _entry(entry.strip(), text)
            if name in weights:
                raise UsageError(f'objective "{text}": {name} is there twice', "name each once, with one weight")
            weights[name] = weight
        _expect_one_kind(weights)
        total = sum(weights.values())
        return cls({name: weight / total for name, weight in weights.items()})

    @property
    def heads(self) -> frozenset[str]:
        """The heads a model needs."""
        return frozenset(head for name in self.shares for head in OBJECTIVES[name].heads)

    @property
    def pairs(self) -> bool:
        """Whether it takes an encoder–decoder to learn them."""
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


def _entry(entry: str, text: str) -> tuple[str, float]:
    name, colon, weight = (part.strip() for part in entry.partition(":"))
    if name not in OBJECTIVES:
        close = get_close_matches(name.lower(), OBJECTIVES, 1, 0.5)
        known = f"there are: {', '.join(OBJECTIVES)}"
        raise UsageError(
            f'objective "{text}": there is no "{name}"', f"did you mean {close[0]}? {known}" if close else known
        )
    try:
        value = float(weight) if colon else 1.0
    except ValueError:
        value = math.nan
    if not 0.0 < value < math.inf:
        raise UsageError(
            f'objective "{text}": the weight of {name} is "{weight}"', f"write a positive number, such as {name}:0.5"
        )
    return name, value


def _expect_one_kind(names: Mapping[str, float]) -> None:
    pairs = [name for name in names if OBJECTIVES[name].pairs]
    if pairs and len(pairs) < len(names):
        others = [name for name in names if name not in pairs]
        raise UsageError(
            f"{', '.join(pairs)} and {', '.join(others)} cannot be learnt by one model",
            "mass and span are for an encoder–decoder, the others for a single stack",
        )
