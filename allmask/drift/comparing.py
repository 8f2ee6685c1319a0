"""Do two samples come from one distribution? The verdict, and what gives a difference away."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from allmask.drift.deciding import Decision, OnProgress, by_halves, by_relabelling, needed
from allmask.drift.features import (
    LENGTH,
    Features,
    Made,
    ngram_features,
    normal_scores,
    number_features,
    presence,
    vector_features,
)
from allmask.drift.images import Pictures, image_features, table_of
from allmask.drift.sampling import Units, balance
from allmask.errors import DataError, UsageError

WIDEST = 4096  # columns of a table; a matrix of this size squared is inverted
TESTS = ("binomial", "permutation")
Represent = Callable[[list[str]], Any]  # texts to vectors (n, W)


@dataclass(frozen=True)
class Settings:
    alpha: float = 0.05  # how often two samples of one distribution may be called shifted
    test: str = "binomial"  # or permutation
    permutations: int = 999
    folds: int = 5  # of the permutation test
    repeats: str | None = None  # drop or keep; None: drop repeated texts, keep repeated rows of numbers
    seed: int = 0
    shown: int = 5  # n-grams or columns, and as many texts, of each file

    def __post_init__(self):
        if not 0 <= self.seed < 2**63:
            raise UsageError(f"seed is {self.seed}; expected 0 to 2**63 - 1")
        if not 0 < self.alpha <= 0.5:
            raise UsageError(f"alpha is {self.alpha}; expected more than 0 and at most 0.5")
        if self.test not in TESTS:
            raise UsageError(f"test is {self.test!r}; expected one of {', '.join(TESTS)}")
        if self.repeats not in (None, "drop", "keep"):
            raise UsageError(f"repeats is {self.repeats!r}; expected drop or keep")
        if self.folds < 2:
            raise UsageError(f"folds is {self.folds}; expected 2 or more")
        if self.test == "permutation" and (self.permutations + 1) * self.alpha < 1:
            least = int(np.ceil(1 / self.alpha)) - 1
            raise UsageError(
                f"{self.permutations} permutations cannot give p ≤ {self.alpha:g}", f"ask for {least} or more"
            )


@dataclass(frozen=True)
class Giveaway:
    """Something the two files differ in."""

    name: str  # an n-gram, a column
    more_in: int  # 0: the first file, 1: the second
    measure: str  # of both: "share" of the texts that have it, "median", "quartile range", "correlation"
    first: float
    second: float
    weight: float | None = None  # in the discriminator, where it sees this very thing


@dataclass(frozen=True)
class Example:
    """A text that was not learnt from, and is most certainly of its file."""

    side: int
    number: int  # in what was given
    certainty: float
    text: str


@dataclass(frozen=True)
class Verdict:
    p: float
    accuracy: float  # of guesses about records that were not learnt from; chance is a half
    right: int  # guesses, out of
    trials: int  # those about records whose text stands in one file only
    each: int  # records compared of each file
    shared: int  # texts among them that stand in both
    repeats: tuple[int, int]  # records of each file left out, their text having been there before
    settings: Settings
    giveaways: list[Giveaway]  # none where there is no shift: they would be noise
    examples: list[Example]

    @property
    def shifted(self) -> bool:
        return self.p <= self.settings.alpha


def compare_texts(
    first: Sequence[str], second: Sequence[str], represent: Represent | None = None, settings: Settings | None = None,
    called: tuple[str, str] = ("the first sample", "the second sample"), told: OnProgress | None = None,
) -> Verdict:  # fmt: skip
    """By n-grams, or by the vectors that `represent`, such as an `Embedder`, makes of texts."""
    settings = settings or Settings()
    rng = torch.Generator().manual_seed(settings.seed)
    units, teaches = _drawn(first, second, settings, settings.repeats != "keep", rng, called, "texts")
    texts = [(first, second)[side][number] for side, number in zip(*_listed(units), strict=True)]
    if represent is not None:
        features = vector_features(_finite(torch.as_tensor(represent(texts))), teaches)
        decision = _decide(features, units, teaches, settings, rng, told)
        found = _by_share(*presence(texts), units) if decision.p <= settings.alpha else []
    else:
        counts, names = presence(texts, teaches)
        lengths = torch.tensor([len(text) for text in texts], dtype=torch.float64)
        features = ngram_features(counts, names, lengths, teaches)
        decision = _decide(features, units, teaches, settings, rng, told)
        found = _by_weight(counts, lengths, features, decision, units)
    return _verdict(decision, units, settings, found, texts)


def compare_numbers(
    first: np.ndarray, second: np.ndarray, names: Sequence[str] | None = None, settings: Settings | None = None,
    called: tuple[str, str] = ("the first sample", "the second sample"), told: OnProgress | None = None,
) -> Verdict:  # fmt: skip
    """Rows of numbers, (n, columns) or (n,)."""
    settings = settings or Settings()
    tables = [_table(values, name) for values, name in zip((first, second), called, strict=True)]
    if tables[0].shape[1] != tables[1].shape[1]:
        raise DataError(f"{called[1]}: {tables[1].shape[1]} columns; {called[0]} has {tables[0].shape[1]}")
    names = list(names or [f"column {number}" for number in range(1, tables[0].shape[1] + 1)])
    rng = torch.Generator().manual_seed(settings.seed)
    keys: list[Sequence[Hashable]] = [[row.tobytes() for row in table] for table in tables]
    units, teaches = _drawn(keys[0], keys[1], settings, settings.repeats == "drop", rng, called, "rows")
    sides = [torch.from_numpy(table)[units.number[units.side == side]] for side, table in enumerate(tables)]
    features = number_features(torch.cat(sides), names, teaches)
    decision = _decide(features, units, teaches, settings, rng, told)
    found = _of_columns(features, decision, units, sides, settings.shown) if decision.p <= settings.alpha else []
    return _verdict(decision, units, settings, found, None)


def compare_images(
    first: Pictures, second: Pictures, settings: Settings | None = None,
    called: tuple[str, str] = ("the first sample", "the second sample"), told: OnProgress | None = None,
) -> Verdict:  # fmt: skip
    """By measures such as brightness and sharpness, by a small copy of each image and by its edges."""
    settings = settings or Settings()
    rng = torch.Generator().manual_seed(settings.seed)
    units, teaches = _drawn(first.keys(), second.keys(), settings, settings.repeats != "keep", rng, called, "images")
    chosen = [units.number[units.side == side] for side in (0, 1)]
    pixels = torch.cat([first.pixels[chosen[0]], second.pixels[chosen[1]]])
    sizes = torch.cat([first.sizes[chosen[0]], second.sizes[chosen[1]]])
    table, names = table_of(pixels, sizes)
    features = image_features(pixels, table, names, teaches)
    decision = _decide(features, units, teaches, settings, rng, told)
    sides = [table[units.side == side] for side in (0, 1)]
    found = _of_columns(features, decision, units, sides, settings.shown) if decision.p <= settings.alpha else []
    return _verdict(decision, units, settings, found, [f"{w} × {h} pixels" for w, h in sizes.tolist()])


def _table(values: np.ndarray, name: str) -> np.ndarray:
    table = np.asarray(values, dtype=np.float64)
    table = np.ascontiguousarray(table[:, None] if table.ndim == 1 else table) + 0.0  # -0.0 is 0.0
    if table.ndim != 2 or 0 in table.shape[1:]:
        raise DataError(f"{name}: an array of shape {np.shape(values)}; expected (rows, columns)")
    if table.shape[1] > WIDEST:
        raise DataError(f"{name}: {table.shape[1]:,} columns; at most {WIDEST:,} can be compared", "choose some")
    bad = np.argwhere(~np.isfinite(table))
    if len(bad):
        row, column = bad[0] + 1
        raise DataError(
            f"{name}: row {row}, column {column} is {table[tuple(bad[0])]}; expected a finite number",
            "fill in, or leave out, what is missing",
        )
    return table


def _finite(vectors: Tensor) -> Tensor:
    if not vectors.isfinite().all():
        raise DataError("the vectors of some texts are not finite", "try another model, or --precision fp32")
    return vectors


def _drawn(
    first: Sequence[Hashable], second: Sequence[Hashable], settings: Settings, distinct: bool, rng: torch.Generator,
    called: tuple[str, str], what: str,
) -> tuple[Units, Tensor]:  # fmt: skip
    """What is compared, and (n,) who teaches: half of it, and by folds all. Too few for any verdict is an error."""
    units, both = balance(first, second, distinct, rng), f"{called[0]} and {called[1]}"
    least = max(needed(settings.alpha), settings.folds if settings.test == "permutation" else 0)
    if units.each < least:
        raise DataError(
            f"{both}: {units.each} {'distinct ' * distinct}{what} of each can be compared; "
            f"p ≤ {settings.alpha:g} needs {least} or more of each",
            "give more records: a few hundred of each find what people would notice",
        )
    own = int((~units.shared).sum()) // 2
    if settings.test == "binomial":
        teaches = units.halves(rng)
        surest = 0.5 ** int((~teaches & ~units.shared).sum())
    else:
        teaches = torch.ones(len(units.side), dtype=torch.bool)
        surest = 1 / math.comb(2 * own, own)
    if surest > settings.alpha and (own or Counter(first) != Counter(second)):  # the same file twice is no shift
        raise DataError(
            f"{both}: {units.each - own} {what} stand in both, and {own} others of each are too few to tell by",
            "count how often each is there: --repeats keep; or give more records",
        )
    return units, teaches


def _decide(
    features: Features, units: Units, teaches: Tensor, settings: Settings, rng: torch.Generator, told: OnProgress | None
) -> Decision:
    if settings.test == "binomial":
        return by_halves(features.rows, units, teaches)
    return by_relabelling(features.rows, units, rng, settings.permutations, settings.folds, told)


def _listed(units: Units) -> tuple[list[int], list[int]]:
    return units.side.tolist(), units.number.tolist()


def _verdict(
    decision: Decision, units: Units, settings: Settings, found: list[Giveaway], texts: list[str] | None
) -> Verdict:
    shifted = decision.p <= settings.alpha
    return Verdict(
        decision.p, decision.accuracy, decision.right, decision.trials, units.each, int(units.shared.sum()) // 2,
        units.repeats, settings, _best(found, settings.shown) if shifted else [],
        _certain(decision, units, texts, settings.shown) if shifted and texts is not None else [],
    )  # fmt: skip


# ---- what gives it away --------------------------------------------------------------------------------------


def _best(found: list[Giveaway], shown: int) -> list[Giveaway]:
    """The first few of each file."""
    return [one for side in (0, 1) for one in [one for one in found if one.more_in == side][:shown]]


def _weighty(features: Features, decision: Decision, units: Units) -> list[tuple[int, float]]:
    """Features by how much of the distance between the files, as the discriminator sees it, is due to each."""
    apart = features.rows[units.side == 1].mean(0) - features.rows[units.side == 0].mean(0)
    due = decision.weights * apart
    order = due.argsort(descending=True, stable=True).tolist()
    return [(number, decision.weights[number].item()) for number in order if due[number] > 0]


def _shares(counts: Tensor, units: Units) -> tuple[Tensor, Tensor]:
    has = (counts > 0).double()
    return has[units.side == 0].mean(0), has[units.side == 1].mean(0)


def _by_share(counts: Tensor, names: list[str], units: Units) -> list[Giveaway]:
    """N-grams by how surely the shares of texts that have them differ: the difference over its deviation."""
    first, second = _shares(counts, units)
    both = (first + second) / 2
    order = ((second - first).abs() / (both * (1 - both)).sqrt().clamp(min=1e-9)).argsort(descending=True, stable=True)
    rows = [(names[number], first[number].item(), second[number].item()) for number in order[:200].tolist()]
    return [Giveaway(name, int(b > a), "share", a, b) for name, a, b in rows if a != b]


def _by_weight(counts: Tensor, lengths: Tensor, features: Features, decision: Decision, units: Units) -> list[Giveaway]:
    """N-grams, and the length in characters, by what they do in the discriminator."""
    shares = _shares(counts, units)
    found = []
    for number, weight in _weighty(features, decision, units):
        name = features.names[number]
        if name == LENGTH:
            a, b = (lengths[units.side == side].median().item() for side in (0, 1))
        else:
            a, b = (share[number].item() for share in shares)
        found.append(Giveaway(name, int(weight > 0), "median" if name == LENGTH else "share", a, b, weight))
    return found


def _of_columns(
    features: Features, decision: Decision, units: Units, sides: list[Tensor], shown: int
) -> list[Giveaway]:
    """The first few features of each file that are made of columns, in the columns' own units."""
    known = [
        (number, weight, made)
        for number, weight in _weighty(features, decision, units)
        if (made := features.made_of[number]) is not None
    ]
    few = [[one for one in known if (one[1] > 0) == bool(side)][:shown] for side in (0, 1)]
    found = []
    for number, weight, made in few[0] + few[1]:
        a, b = (_measured(made, side) for side in sides)
        found.append(Giveaway(features.names[number], int(weight > 0), made.measure, a, b, weight))
    return found


def _measured(made: Made, table: Tensor) -> float:
    if made.measure == "correlation":
        return _correlation(table[:, list(made.columns)])
    column = table[:, made.columns[0]]
    return column.median().item() if made.measure == "median" else _quartile_range(column)


def _quartile_range(column: Tensor) -> float:
    low, high = column.quantile(torch.tensor([0.25, 0.75], dtype=column.dtype)).tolist()
    return high - low


def _correlation(pair: Tensor) -> float:
    """Of ranks."""
    ranks = normal_scores(pair).T
    return torch.corrcoef(ranks)[0, 1].nan_to_num().item()


def _certain(decision: Decision, units: Units, texts: list[str], shown: int) -> list[Example]:
    """Of each file, the texts it alone has of which the discriminator is surest, and right."""
    found = []
    for side in (0, 1):
        toward = decision.log_odds * (1 if side else -1)
        order = toward.argsort(descending=True, stable=True)
        sure = [(int(decision.guessed[place]), toward[place].sigmoid().item()) for place in order.tolist()]
        own = [(unit, p) for unit, p in sure if units.side[unit] == side and not units.shared[unit] and p > 0.5]
        found += [Example(side, int(units.number[unit]), p, texts[unit]) for unit, p in own[:shown]]
    return found
