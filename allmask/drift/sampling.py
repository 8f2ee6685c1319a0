"""Which records are compared: as many of each file, no text on both sides of a split, each text once a file."""

from __future__ import annotations

import random
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

import torch
from torch import Tensor

T = TypeVar("T")


@dataclass
class Reservoir(Generic[T]):
    """At most `size` of a stream of any length, each as likely as any other, in the order of the stream."""

    size: int
    seed: str
    seen: int = field(default=0, init=False)

    def __call__(self, stream: Iterable[T]) -> list[T]:
        rng, kept = random.Random(self.seed), []
        for self.seen, item in enumerate(stream, 1):
            if len(kept) < self.size:
                kept.append((self.seen, item))
            elif (place := rng.randrange(self.seen)) < self.size:
                kept[place] = (self.seen, item)
        return [item for _, item in sorted(kept, key=lambda one: one[0])]


@dataclass(frozen=True)
class Units:
    """The records that are compared, as many of each file."""

    number: Tensor  # (n,) in its file, from 0
    side: Tensor  # (n,) 0: first file, 1: second
    group: Tensor  # (n,) two records with the same text, one of each file, share it
    shared: Tensor  # (n,) whether that is so
    repeats: tuple[int, int] = (0, 0)  # records of each file that were left out, the text having been there before

    @property
    def each(self) -> int:
        return len(self.side) // 2

    def halves(self, rng: torch.Generator) -> Tensor:
        """(n,) True in one half: half of each file's own, and half of the shared texts with both their records."""
        teaches = torch.zeros(len(self.side), dtype=torch.bool)
        for side in (0, 1):
            own = _shuffled(((self.side == side) & ~self.shared).nonzero().flatten(), rng)
            teaches[own[: len(own) // 2]] = True
        both = _shuffled(self.group[self.shared].unique(), rng)
        return teaches | torch.isin(self.group, both[: len(both) // 2])

    def folds(self, count: int, rng: torch.Generator) -> Tensor:
        """(n,) the fold of each, drawn without a look at the labels: then exchanging these changes no fold."""
        groups, place = self.group.unique(return_inverse=True)
        return (torch.randperm(len(groups), generator=rng) % count)[place]

    def relabelled(self, times: int, rng: torch.Generator) -> Tensor:
        """(n, 1 + times) labels: the true ones, then these exchanged at random among texts of one file only."""
        alone = (~self.shared).nonzero().flatten()
        labels = self.side.to(torch.int8)[:, None].repeat(1, 1 + times)
        for column in range(1, 1 + times):
            labels[alone, column] = labels[_shuffled(alone, rng), 0]
        return labels


def balance(first: Sequence[Hashable], second: Sequence[Hashable], drop_repeats: bool, rng: torch.Generator) -> Units:
    """As many records of each. The larger file is drawn from before repeats are dropped, not after: what is frequent
    would be among the distinct texts of a large sample as of a small one, and thinned out in one of them only."""
    size = min(len(first), len(second))
    drawn = [torch.randperm(len(keys), generator=rng)[:size].sort().values.tolist() for keys in (first, second)]
    if not drop_repeats:
        number, side = torch.tensor(drawn[0] + drawn[1]), torch.arange(2).repeat_interleave(size)
        return Units(number, side, torch.arange(2 * size), torch.zeros(2 * size, dtype=torch.bool))
    places = [_first_of_each(keys, numbers) for keys, numbers in zip((first, second), drawn, strict=True)]
    both = [key for key in places[0] if key in places[1]]
    own = [[place for key, place in here.items() if key not in there] for here, there in (places, places[::-1])]
    least = min(map(len, own))
    own = [_shuffled(torch.tensor(numbers, dtype=torch.long), rng)[:least].sort().values.tolist() for numbers in own]
    columns = [[here[key] for key in both] + numbers for here, numbers in zip(places, own, strict=True)]
    return _distinct(columns, len(both), (size - len(places[0]), size - len(places[1])))


def _distinct(columns: list[list[int]], both: int, repeats: tuple[int, int]) -> Units:
    each = len(columns[0])
    shared = (torch.arange(each) < both).repeat(2)
    group = torch.arange(2 * each)
    group[each : each + both] = torch.arange(both)
    return Units(torch.tensor(columns[0] + columns[1]), torch.arange(2).repeat_interleave(each), group, shared, repeats)


def _first_of_each(keys: Sequence[Hashable], numbers: list[int]) -> dict[Hashable, int]:
    found: dict[Hashable, int] = {}
    for number in numbers:
        found.setdefault(keys[number], number)
    return found


def _shuffled(numbers: Tensor, rng: torch.Generator) -> Tensor:
    return numbers[torch.randperm(len(numbers), generator=rng)]
