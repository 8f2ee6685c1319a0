"""Compare two samples of texts, numbers or images: the verdict, and the differences that were found."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from allmask.drift.features import (
    LENGTH,
    Features,
    Origin,
    count_grams,
    image_features,
    ngram_features,
    normal_scores,
    number_features,
    table_of,
    vector_features,
)
from allmask.drift.records import OnProgress, Pictures
from allmask.drift.two_sample import Balanced, Decision, balance, binomial_test, min_records, permutation_test
from allmask.errors import DataError, UsageError

MAX_COLUMNS = 4096  # of a table; a square matrix of this size is factored
TESTS = ("binomial", "permutation")
NAMES = ("the first sample", "the second sample")  # in messages, unless given
Represent = Callable[[list[str]], Any]  # texts to vectors (n, W)


@dataclass(frozen=True)
class Settings:
    alpha: float = 0.05  # significance level: the rate of false alarms
    test: str = "binomial"  # or permutation
    permutations: int = 999
    folds: int = 5  # of the permutation test
    repeats: str | None = None  # drop or keep; None: drop repeated texts and images, keep repeated rows of numbers
    seed: int = 0
    shown: int = 5  # differences, and examples, per file

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
                f"{self.permutations} permutations cannot give p ≤ {self.alpha:g}", f"take {least} or more"
            )


@dataclass(frozen=True)
class Difference:
    """Something in which the two files differ."""

    name: str  # an n-gram, a column
    more_in: int  # 0: the first file, 1: the second
    measure: str  # "share" of the texts that contain it, "median", "quartile range", "correlation"
    first: float  # the measure in the first file
    second: float
    weight: float | None = None  # of the discriminator, if this is one of its features


@dataclass(frozen=True)
class Example:
    """A held-out text whose file the discriminator predicts correctly, with high probability."""

    side: int
    number: int  # index in its sample
    certainty: float  # probability of its file
    text: str


@dataclass(frozen=True)
class Verdict:
    p: float
    accuracy: float  # on held-out records; chance is 0.5
    right: int  # correct predictions, out of `trials`
    trials: int  # predictions for records that are in one file only
    each: int  # records compared per file
    shared: int  # texts that are in both files
    repeats: tuple[int, int]  # records of each file that were dropped as repetitions
    settings: Settings
    differences: list[Difference]  # empty without a shift: they would be noise
    examples: list[Example]

    @property
    def shifted(self) -> bool:
        return self.p <= self.settings.alpha


def compare_texts(
    first: Sequence[str], second: Sequence[str], represent: Represent | None = None, settings: Settings | None = None,
    called: tuple[str, str] = NAMES, on_progress: OnProgress | None = None,
) -> Verdict:  # fmt: skip
    """Compare texts by n-grams, or by the vectors that `represent`, such as an `Embedder`, computes.

    `called` are the names of the two samples in messages.
    """
    settings = settings or Settings()
    rng = torch.Generator().manual_seed(settings.seed)
    records, is_train = _draw(first, second, settings, settings.repeats != "keep", rng, called, "texts")
    sides, numbers = records.side.tolist(), records.number.tolist()
    texts = [(first, second)[side][number] for side, number in zip(sides, numbers, strict=True)]
    if represent is not None:
        vectors = torch.as_tensor(represent(texts))
        if not vectors.isfinite().all():
            raise DataError("the vectors of some texts are not finite", "try another model, or --precision fp32")
        decision = _decide(vector_features(vectors, is_train), records, is_train, settings, rng, on_progress)
        found = _grams_by_share(*count_grams(texts), records) if decision.p <= settings.alpha else []
    else:
        counts, names = count_grams(texts, is_train)
        lengths = torch.tensor([len(text) for text in texts], dtype=torch.float64)
        features = ngram_features(counts, names, lengths, is_train)
        decision = _decide(features, records, is_train, settings, rng, on_progress)
        found = _grams_by_weight(counts, lengths, features, decision, records)
    return _verdict(decision, records, settings, found, texts)


def compare_numbers(
    first: np.ndarray, second: np.ndarray, names: Sequence[str] | None = None, settings: Settings | None = None,
    called: tuple[str, str] = NAMES, on_progress: OnProgress | None = None,
) -> Verdict:  # fmt: skip
    """Compare rows of numbers, (n, columns) or (n,)."""
    settings = settings or Settings()
    tables = [_table(values, name) for values, name in zip((first, second), called, strict=True)]
    if tables[0].shape[1] != tables[1].shape[1]:
        raise DataError(f"{called[1]}: {tables[1].shape[1]} columns; {called[0]} has {tables[0].shape[1]}")
    names = list(names or [f"column {number}" for number in range(1, tables[0].shape[1] + 1)])
    rng = torch.Generator().manual_seed(settings.seed)
    keys: list[Sequence[Hashable]] = [[row.tobytes() for row in table] for table in tables]
    records, is_train = _draw(keys[0], keys[1], settings, settings.repeats == "drop", rng, called, "rows")
    sides = [torch.from_numpy(table)[records.number[records.side == side]] for side, table in enumerate(tables)]
    features = number_features(torch.cat(sides), names, is_train)
    decision = _decide(features, records, is_train, settings, rng, on_progress)
    found = _columns_by_weight(features, decision, records, sides, settings)
    return _verdict(decision, records, settings, found, None)


def compare_images(
    first: Pictures, second: Pictures, settings: Settings | None = None,
    called: tuple[str, str] = NAMES, on_progress: OnProgress | None = None,
) -> Verdict:  # fmt: skip
    """Compare images by measures such as brightness and sharpness, by a small copy of each and by its edges."""
    settings = settings or Settings()
    rng = torch.Generator().manual_seed(settings.seed)
    keys = first.keys(), second.keys()
    records, is_train = _draw(*keys, settings, settings.repeats != "keep", rng, called, "images")
    chosen = [records.number[records.side == side] for side in (0, 1)]
    pixels = torch.cat([first.pixels[chosen[0]], second.pixels[chosen[1]]])
    sizes = torch.cat([first.sizes[chosen[0]], second.sizes[chosen[1]]])
    table, names = table_of(pixels, sizes)
    features = image_features(pixels, table, names, is_train)
    decision = _decide(features, records, is_train, settings, rng, on_progress)
    found = _columns_by_weight(features, decision, records, [table[records.side == side] for side in (0, 1)], settings)
    return _verdict(decision, records, settings, found, [f"{w} × {h} pixels" for w, h in sizes.tolist()])


def _table(values: np.ndarray, name: str) -> np.ndarray:
    table = np.asarray(values, dtype=np.float64)
    table = np.ascontiguousarray(table[:, None] if table.ndim == 1 else table) + 0.0  # -0.0 is 0.0
    if table.ndim != 2 or 0 in table.shape[1:]:
        raise DataError(f"{name}: an array of shape {np.shape(values)}; expected (rows, columns)")
    if table.shape[1] > MAX_COLUMNS:
        raise DataError(f"{name}: {table.shape[1]:,} columns; at most {MAX_COLUMNS:,} can be compared", "choose fewer")
    bad = np.argwhere(~np.isfinite(table))
    if len(bad):
        row, column = bad[0] + 1
        raise DataError(
            f"{name}: row {row}, column {column} is {table[tuple(bad[0])]}; expected a finite number",
            "fill in or remove missing values",
        )
    return table


def _draw(
    first: Sequence[Hashable], second: Sequence[Hashable], settings: Settings, distinct: bool, rng: torch.Generator,
    called: tuple[str, str], what: str,
) -> tuple[Balanced, Tensor]:  # fmt: skip
    """Choose the records to compare and those to train on: half of them, or all for the permutation test.

    Too few records for any verdict are an error.
    """
    records, both = balance(first, second, distinct, rng), f"{called[0]} and {called[1]}"
    least = max(min_records(settings.alpha), settings.folds if settings.test == "permutation" else 0)
    if records.each < least:
        raise DataError(
            f"{both}: {records.each} {'distinct ' * distinct}{what} of each can be compared; "
            f"p ≤ {settings.alpha:g} needs {least} or more of each",
            "give more records: a few hundred of each show differences that people would notice",
        )
    own = int((~records.shared).sum()) // 2
    if settings.test == "binomial":
        is_train = records.halves(rng)
        lowest_p = 0.5 ** int((~is_train & ~records.shared).sum())
    else:
        is_train = torch.ones(len(records.side), dtype=torch.bool)
        lowest_p = 1 / math.comb(2 * own, own)
    if lowest_p > settings.alpha and (own or Counter(first) != Counter(second)):  # the same file twice is no shift
        raise DataError(
            f"{both}: {records.each - own} {what} are in both, and {own} others of each are too few for a test",
            "compare how often each occurs: --repeats keep; or give more records",
        )
    return records, is_train


def _decide(
    features: Features, records: Balanced, is_train: Tensor, settings: Settings, rng: torch.Generator,
    on_progress: OnProgress | None,
) -> Decision:  # fmt: skip
    if settings.test == "binomial":
        return binomial_test(features.rows, records, is_train)
    return permutation_test(features.rows, records, rng, settings.permutations, settings.folds, on_progress)


def _verdict(
    decision: Decision, records: Balanced, settings: Settings, found: list[Difference], texts: list[str] | None
) -> Verdict:
    shifted, shown = decision.p <= settings.alpha, settings.shown
    best = [one for side in (0, 1) for one in [one for one in found if one.more_in == side][:shown]]
    return Verdict(
        decision.p, decision.accuracy, decision.right, decision.trials, records.each, int(records.shared.sum()) // 2,
        records.repeats, settings, best if shifted else [],
        _examples(decision, records, texts, shown) if shifted and texts is not None else [],
    )  # fmt: skip


# ---- differences and examples ----------------------------------------------------------------------------------


def _by_contribution(features: Features, decision: Decision, records: Balanced) -> list[tuple[int, float]]:
    """Features and their weights, sorted by their part in the difference of the files' mean log-odds."""
    distance = features.rows[records.side == 1].mean(0) - features.rows[records.side == 0].mean(0)
    contribution = decision.weights * distance
    order = contribution.argsort(descending=True, stable=True).tolist()
    return [(number, decision.weights[number].item()) for number in order if contribution[number] > 0]


def _shares(counts: Tensor, records: Balanced) -> tuple[Tensor, Tensor]:
    """The share of the texts in each file that contain each n-gram, (F,) each."""
    contains = (counts > 0).double()
    return contains[records.side == 0].mean(0), contains[records.side == 1].mean(0)


def _grams_by_share(counts: Tensor, names: list[str], records: Balanced) -> list[Difference]:
    """N-grams sorted by the difference of their shares, divided by its standard error."""
    first, second = _shares(counts, records)
    both = (first + second) / 2
    order = ((second - first).abs() / (both * (1 - both)).sqrt().clamp(min=1e-9)).argsort(descending=True, stable=True)
    rows = [(names[number], first[number].item(), second[number].item()) for number in order[:200].tolist()]
    return [Difference(name, int(b > a), "share", a, b) for name, a, b in rows if a != b]


def _grams_by_weight(
    counts: Tensor, lengths: Tensor, features: Features, decision: Decision, records: Balanced
) -> list[Difference]:
    """N-grams, and the length in characters, sorted by their contribution."""
    shares = _shares(counts, records)
    found = []
    for number, weight in _by_contribution(features, decision, records):
        name = features.names[number]
        if name == LENGTH:
            a, b = (lengths[records.side == side].median().item() for side in (0, 1))
        else:
            a, b = (share[number].item() for share in shares)
        found.append(Difference(name, int(weight > 0), "median" if name == LENGTH else "share", a, b, weight))
    return found


def _columns_by_weight(
    features: Features, decision: Decision, records: Balanced, tables: list[Tensor], settings: Settings
) -> list[Difference]:
    """The largest contributions of columns for each file, in the units of the tables; none without a shift."""
    if decision.p > settings.alpha:
        return []
    known = [
        (number, weight, origin)
        for number, weight in _by_contribution(features, decision, records)
        if (origin := features.origins[number]) is not None
    ]
    best = [[one for one in known if (one[1] > 0) == bool(side)][: settings.shown] for side in (0, 1)]
    found = []
    for number, weight, origin in best[0] + best[1]:
        a, b = (_measure(origin, table) for table in tables)
        found.append(Difference(features.names[number], int(weight > 0), origin.measure, a, b, weight))
    return found


def _measure(origin: Origin, table: Tensor) -> float:
    if origin.measure == "correlation":  # of ranks
        return torch.corrcoef(normal_scores(table[:, list(origin.columns)]).T)[0, 1].nan_to_num().item()
    column = table[:, origin.columns[0]]
    if origin.measure == "median":
        return column.median().item()
    low, high = column.quantile(torch.tensor([0.25, 0.75], dtype=column.dtype)).tolist()
    return high - low


def _examples(decision: Decision, records: Balanced, texts: list[str], shown: int) -> list[Example]:
    """For each file the texts it alone has that are predicted correctly with the highest probability."""
    found = []
    for side in (0, 1):
        odds = decision.log_odds * (1 if side else -1)
        order = odds.argsort(descending=True, stable=True).tolist()
        sure = [(int(decision.predicted[place]), odds[place].sigmoid().item()) for place in order]
        own = [(unit, p) for unit, p in sure if records.side[unit] == side and not records.shared[unit] and p > 0.5]
        found += [Example(side, int(records.number[unit]), p, texts[unit]) for unit, p in own[:shown]]
    return found
