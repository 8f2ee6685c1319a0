"""C28. Label smoothing hurts perplexity, and helps accuracy.

Statement: A model trained towards 0.9 for the right token and 0.1 for all others learns to be less sure: its
    perplexity is worse, its accuracy (and BLEU) better.
Source: Vaswani et al. 2017, section 5.4.
Criterion: A small model learns to write titles of made-up stories with and without label smoothing of 0.1. The held-out
    perplexity is higher with it in each of five seeds; the accuracy is higher in the mean. Weaker: it is lower by less
    than half a point. (First tried with language models after 120 steps, which are sure of nothing yet: perplexity
    172.3 → 171.5, accuracy 13.7 → 14.0 %. The claim is about models that have learnt their task.)
At length: python quality/translate.py DATA
"""

from __future__ import annotations

from math import exp
from statistics import mean

from allmask.claims.claim import Numbers, Trial, Verdict, judged
from allmask.claims.learning import accuracy_on, loss_on, small_model, story_tokenizer, title_work, train_on

SMOOTHING, STEPS = 0.1, 120


def measure(trial: Trial, smoothed: bool = True) -> Numbers:
    """`smoothed`: otherwise neither is."""
    found: Numbers = {name: {"perplexity": [], "accuracy": []} for name in ("plain", "smoothed")}
    for seed in trial.seeds(5):
        for name, values in found.items():
            trial.say(f"{name}, seed {seed}")
            model = small_model(story_tokenizer(), seed)
            smoothing = SMOOTHING if smoothed and name == "smoothed" else 0.0
            train_on(
                model,
                title_work(model, trial.examples(2000), seed),
                trial.steps(STEPS),
                seed,
                label_smoothing=smoothing,
            )
            test = title_work(model, trial.examples(500), 1000)
            values["perplexity"].append(exp(loss_on(model, test)))
            values["accuracy"].append(accuracy_on(model, test))
    return found


def judge(numbers: Numbers) -> Verdict:
    plain, smoothed = numbers["plain"], numbers["smoothed"]
    hurts = all(a < b for a, b in zip(plain["perplexity"], smoothed["perplexity"], strict=True))
    gain = mean(smoothed["accuracy"]) - mean(plain["accuracy"])
    return judged(
        hurts and gain > 0,
        f"perplexity {mean(plain['perplexity']):.2f} → {mean(smoothed['perplexity']):.2f}, "
        f"accuracy {mean(plain['accuracy']):.1f} → {mean(smoothed['accuracy']):.1f} %",
        weaker=hurts and gain > -0.5,
    )


def draw(axes, numbers: Numbers) -> None:
    for name, found in numbers.items():
        axes.scatter(found["perplexity"], found["accuracy"], label=name)
    axes.set(xlabel="perplexity", ylabel="accuracy (%)")
    axes.legend(frameon=False)
