"""C28. Label smoothing hurts perplexity, and helps accuracy.

Statement: A model trained towards 0.9 for the right token and 0.1 for all others learns to be less sure: its
    perplexity is worse, its accuracy (and BLEU) better.
Source: Vaswani et al. 2017, section 5.4.
Criterion: Small language models are trained with and without label smoothing of 0.1. The held-out perplexity is
    higher with it in each of three seeds; the accuracy of the next token is higher in the mean. Weaker: it is lower by
    less than half a point, which three seeds cannot tell from equal.
At length: python quality/translate.py DATA
"""

from __future__ import annotations

from math import exp
from statistics import mean

from allmask.claims.claim import Numbers, Trial, Verdict, judged
from allmask.claims.learning import STEPS, language_model

SMOOTHING = 0.1


def measure(trial: Trial, smoothed: bool = True) -> Numbers:
    """`smoothed`: otherwise neither is."""
    found: Numbers = {}
    for name, smoothing in (("plain", 0.0), ("smoothed", SMOOTHING if smoothed else 0.0)):
        trial.say(name)
        runs = [language_model(seed, trial.steps(STEPS), smoothing=smoothing) for seed in trial.seeds(3)]
        found[name] = {"perplexity": [exp(run.loss) for run in runs], "accuracy": [run.accuracy for run in runs]}
    return found


def judge(numbers: Numbers) -> Verdict:
    plain, smoothed = numbers["plain"], numbers["smoothed"]
    hurts = all(a < b for a, b in zip(plain["perplexity"], smoothed["perplexity"], strict=True))
    gain = mean(smoothed["accuracy"]) - mean(plain["accuracy"])
    return judged(
        hurts and gain > 0,
        f"perplexity {mean(plain['perplexity']):.1f} → {mean(smoothed['perplexity']):.1f}, "
        f"accuracy {mean(plain['accuracy']):.1f} → {mean(smoothed['accuracy']):.1f} %",
        weaker=hurts and gain > -0.5,
    )


def draw(axes, numbers: Numbers) -> None:
    for name, found in numbers.items():
        axes.scatter(found["perplexity"], found["accuracy"], label=name)
    axes.set(xlabel="perplexity", ylabel="accuracy (%)")
    axes.legend(frameon=False)
