"""Do two samples come from one distribution? The verdict, and what gives a difference away."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from allmask.drift.deciding import Decision, Told, by_halves, by_relabelling, needed
from allmask.drift.features import (
    LENGTH,
    Features,
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
    called: tuple[str, str] = ("the first sample", "the second sample"), told: Told | None = None,
) -> Verdict:  # fmt: skip
    """By n-grams, or by the vectors that `represent`, such as an `Embedder`, makes of texts."""
    settings = settings or Settings()
    rng = torch.Generator().manual_seed(settings.seed)
    units = balance(first, second, settings.repeats != "keep", rng)
    _check_enough(units, settings, called, "distinct texts" if settings.repeats != "keep" else "texts")
    texts = [(first, second)[side][number] for side, number in zip(*_listed(units), strict=True)]
    if represent is not None:
        features = vector_features(_finite(torch.as_tensor(represent(texts))))
        decision = _decide(features, units, settings, rng, told)
        found = _by_share(*presence(texts), units) if decision.p <= settings.alpha else []
    else:
        counts, names = presence(texts)
        lengths = torch.tensor([len(text) for text in texts], dtype=torch.float64)
        features = ngram_features(counts, names, lengths)
        decision = _decide(features, units, settings, rng, told)
        found = _by_weight(counts, lengths, features, decision, units)
    return _verdict(decision, units, settings, found, texts)


def compare_numbers(
    first: np.ndarray, second: np.ndarray, names: Sequence[str] | None = None, settings: Settings | None = None,
    called: tuple[str, str] = ("the first sample", "the second sample"), told: Told | None = None,
) -> Verdict:  # fmt: skip
    """Rows of numbers, (n, columns) or (n,)."""
    settings = settings or Settings()
    tables = [_table(values, name) for values, name in zip((first, second), called, strict=True)]
    if tables[0].shape[1] != tables[1].shape[1]:
        raise DataError(f"{called[1]}: {tables[1].shape[1]} columns; {called[0]} has {tables[0].shape[1]}")
    names = list(names or [f"column {number}" for number in range(1, tables[0].shape[1] + 1)])
    rng = torch.Generator().manual_seed(settings.seed)
    keys: list[Sequence[Hashable]] = [[row.tobytes() for row in table] for table in tables]
    units = balance(keys[0], keys[1], settings.repeats == "drop", rng)
    _check_enough(units, settings, called, "distinct rows" if settings.repeats == "drop" else "rows")
    sides = [torch.from_numpy(table)[units.number[units.side == side]] for side, table in enumerate(tables)]
    features = number_features(torch.cat(sides), names)
    decision = _decide(features, units, settings, rng, told)
    found = []
    if decision.p <= settings.alpha:
        found = _of_columns(_weighty(features, decision, units), sides, names, settings.shown)
    return _verdict(decision, units, settings, found, None)


def compare_images(
    first: Pictures, second: Pictures, settings: Settings | None = None,
    called: tuple[str, str] = ("the first sample", "the second sample"), told: Told | None = None,
) -> Verdict:  # fmt: skip
    """By measures such as brightness and sharpness, by a small copy of each image and by its edges."""
    settings = settings or Settings()
    rng = torch.Generator().manual_seed(settings.seed)
    units = balance(first.keys(), second.keys(), settings.repeats != "keep", rng)
    _check_enough(units, settings, called, "distinct images" if settings.repeats != "keep" else "images")
    chosen = [units.number[units.side == side] for side in (0, 1)]
    pixels = torch.cat([first.pixels[chosen[0]], second.pixels[chosen[1]]])
    sizes = torch.cat([first.sizes[chosen[0]], second.sizes[chosen[1]]])
    table, names = table_of(pixels, sizes)
    features = image_features(pixels, table, names)
    decision = _decide(features, units, settings, rng, told)
    found = []
    if decision.p <= settings.alpha:
        sides = [table[units.side == side] for side in (0, 1)]
        found = _of_columns(_weighty(features, decision, units), sides, names, settings.shown)
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


def _check_enough(units: Units, settings: Settings, called: tuple[str, str], what: str) -> None:
    least = max(needed(settings.alpha), settings.folds if settings.test == "permutation" else 0)
    if units.each < least:
        raise DataError(
            f"{called[0]} and {called[1]}: {units.each} {what} of each can be compared; "
            f"p ≤ {settings.alpha:g} needs {least} or more of each",
            "give more records: a few hundred of each find what people would notice",
        )


def _decide(features: Features, units: Units, settings: Settings, rng: torch.Generator, told: Told | None) -> Decision:
    if settings.test == "binomial":
        return by_halves(features.rows, units, rng)
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


def _weighty(features: Features, decision: Decision, units: Units) -> list[tuple[str, float]]:
    """Features by how much of the distance between the files, as the discriminator sees it, is due to each."""
    apart = features.rows[units.side == 1].mean(0) - features.rows[units.side == 0].mean(0)
    due = decision.weights * apart
    order = due.argsort(descending=True, stable=True).tolist()
    return [(features.names[number], decision.weights[number].item()) for number in order if due[number] > 0]


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
    place = {name: number for number, name in enumerate(features.names[:-1])}
    found = []
    for name, weight in _weighty(features, decision, units):
        if name == LENGTH:
            a, b = (lengths[units.side == side].median().item() for side in (0, 1))
        else:
            a, b = (share[place[name]].item() for share in shares)
        found.append(Giveaway(name, int(weight > 0), "median" if name == LENGTH else "share", a, b, weight))
    return found


def _of_columns(
    weighty: list[tuple[str, float]], sides: list[Tensor], names: Sequence[str], shown: int
) -> list[Giveaway]:
    """The first few features of each file that are made of columns."""
    known = [one for one in weighty if any(own in names for own in (one[0], *_parts(one[0])))]
    few = [[one for one in known if (one[1] > 0) == bool(side)][:shown] for side in (0, 1)]
    return [_of_column(name, weight, sides, names) for name, weight in few[0] + few[1]]


def _parts(name: str) -> list[str]:
    return [name.removesuffix(" (spread)"), *name.split(" × ")]


def _of_column(name: str, weight: float, sides: list[Tensor], names: Sequence[str]) -> Giveaway:
    """A feature of numbers in their own unit."""
    place = {own: number for number, own in enumerate(names)}
    if name in place:
        measure, (a, b) = "median", [side[:, place[name]].median().item() for side in sides]
    elif name.endswith(" (spread)") and (own := name.removesuffix(" (spread)")) in place:
        measure, (a, b) = "quartile range", [_quartile_range(side[:, place[own]]) for side in sides]
    else:
        measure, pair = "correlation", [place[own] for own in name.split(" × ")]
        a, b = [_correlation(side[:, pair]) for side in sides]
    return Giveaway(name, int(weight > 0), measure, a, b, weight)


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
