"""How often does `allmask drift` report a shift? False alarms without one, and the power by its size.

    python quality/drift.py --out quality-runs/drift                        # numbers: the mean shifts
    python quality/drift.py --texts usual.txt other.txt --out quality-runs/drift    # texts: a share is replaced

Prints a table and writes power.png.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from pathlib import Path

import common
import numpy as np
from scipy import stats

from allmask.data import read_records, text
from allmask.drift import Settings, compare_numbers, compare_texts

Draw = Callable[[float, int], dict[str, bool]]  # shift, seed -> whether each test rejects
SHIFTS, SHARES = (0.0, 0.1, 0.2, 0.3, 0.5, 0.8), (0.0, 0.05, 0.1, 0.2, 0.3, 0.5)


def power(draw: Draw, sizes: Sequence[float], repetitions: int) -> dict[str, list[float]]:
    """The rejection rate of each test, for each size of the shift."""
    curves: dict[str, list[float]] = {}
    for size in sizes:
        rows = [draw(size, seed) for seed in range(repetitions)]
        for name in rows[0]:
            curves.setdefault(name, []).append(sum(row[name] for row in rows) / repetitions)
    return curves


def ours(compare, first, second, seed: int, alpha: float) -> dict[str, bool]:
    halves = Settings(alpha, seed=seed, shown=0)
    folds = Settings(alpha, "permutation", 199, seed=seed, shown=0)
    return {
        "allmask drift, binomial": compare(first, second, settings=halves).shifted,
        "allmask drift, permutation": compare(first, second, settings=folds).shifted,
    }


def numbers(records: int, columns: int, alpha: float) -> Draw:
    """Normal columns; the first is shifted, in standard deviations. The classical tests see only that column."""

    def draw(shift: float, seed: int) -> dict[str, bool]:
        first, second = np.random.default_rng(seed).normal(size=(2, records, columns))
        second[:, 0] += shift
        column = first[:, 0], second[:, 0]
        classical = {"Kolmogorov–Smirnov": stats.ks_2samp(*column), "Mann–Whitney": stats.mannwhitneyu(*column)}
        found = ours(compare_numbers, first, second, seed, alpha)
        return found | {name: bool(result.pvalue <= alpha) for name, result in classical.items()}

    return draw


def mixed(usual: Sequence[str], other: Sequence[str], records: int, alpha: float) -> Draw:
    """Two samples of the usual texts, compared by n-grams; in the second, a share is replaced by other texts."""

    def draw(share: float, seed: int) -> dict[str, bool]:
        rng = random.Random(seed)
        texts, replaced = rng.sample(usual, 2 * records), round(share * records)
        second = texts[records : 2 * records - replaced] + rng.sample(other, replaced)
        return ours(compare_texts, texts[:records], second, seed, alpha)

    return draw


def plot(curves: dict[str, list[float]], sizes: Sequence[float], label: str, alpha: float, path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 4))
    axes = figure.subplots()
    for name, curve in curves.items():
        axes.plot(sizes, curve, marker="o", label=name)
    axes.axhline(alpha, color="grey", linestyle=":", label=f"alpha = {alpha:g}")
    axes.set(xlabel=label, ylabel="rejection rate", ylim=(-0.02, 1.02))
    axes.legend()
    figure.savefig(path, dpi=120, bbox_inches="tight")


def main() -> None:
    parser = common.parser(__doc__)
    parser.add_argument("--texts", nargs=2, type=Path, metavar=("USUAL", "OTHER"), help="txt, jsonl, csv or parquet")
    parser.add_argument("--field", default="text")
    parser.add_argument("--records", type=int, default=200, help="per sample")
    parser.add_argument("--columns", type=int, default=1)
    parser.add_argument("--repetitions", type=int, default=200)
    parser.add_argument("--alpha", type=float, default=0.05)
    parser.add_argument("--out", type=Path, default=Path("quality-runs/drift"))
    args = parser.parse_args()
    if args.texts:
        found = [[row.fields[args.field] for row in read_records(path, {args.field: text})] for path in args.texts]
        draw, sizes, label = mixed(found[0], found[1], args.records, args.alpha), SHARES, "share of other texts"
    else:
        draw, sizes, label = numbers(args.records, args.columns, args.alpha), SHIFTS, "shift (standard deviations)"
    curves = power(draw, sizes, args.repetitions)
    args.out.mkdir(parents=True, exist_ok=True)
    print(f"{args.records} records per sample, {args.repetitions} repetitions, alpha {args.alpha:g}\n")
    rows = [[name, *(f"{rate:.3f}" for rate in curve)] for name, curve in curves.items()]
    print(common.table([label, *(f"{size:g}" for size in sizes)], rows))
    plot(curves, sizes, label, args.alpha, args.out / "power.png")


if __name__ == "__main__":
    main()
