"""C20. A language model's loss beside the task's keeps what the body knew.

Statement: Fine-tuning with the auxiliary loss of a language model (λ = 0.5) keeps general abilities: less is forgotten.
Source: Radford et al. 2018 (GPT), section 3.2.
Criterion: A small body is pretrained on made-up stories, then fine-tuned to classify texts of another kind. In each of
    five seeds its masked language model loss on held-out stories rises with λ = 0.5 on stories (--lm-text) by at most
    half as much as without, and in the mean the accuracy is at most two points lower. Weaker: in the mean only.
    λ on the texts of the task, as in the paper, is measured beside. (First, at a rate of 1e-3 and with an easier task,
    hardly anything was forgotten: +0.06 without, +0.03 with the auxiliary loss.)
"""

from __future__ import annotations

from random import Random
from statistics import mean
from typing import Any

from allmask.claims.claim import Numbers, Trial, Verdict, judged
from allmask.claims.learning import (
    COMMON,
    PEOPLE,
    PRETRAINING,
    Rows,
    finetuned,
    loss_on,
    pretrained_story_model,
    stories,
    story_text,
)
from allmask.data import Record

STEPS, WEIGHT = 40, 0.5
NAMES = {"none": "no auxiliary loss", "task": "on the task's texts", "general": "on general text"}


def measure(trial: Trial, beside: bool = True) -> Numbers:
    """`beside`: otherwise no language model's loss is added."""
    test, unseen = Rows(story_text().part(True), "mlm"), notes(trial.examples(200), 1000)
    body = pretrained_story_model(1, trial.steps(PRETRAINING))
    general = [story.text for story in stories(trial.examples(300), 2)]
    found: Numbers = {"before": loss_on(body, test), "loss": {}, "accuracy": {}}
    for name in NAMES:
        trial.say(NAMES[name])
        how: dict[str, Any] = {"lr": 3e-3, "lm_weight": WEIGHT if beside and name != "none" else 0.0}
        how |= {"lm_text": general} if beside and name == "general" else {}
        seeds, steps, count = trial.seeds(5), trial.steps(STEPS), trial.examples(400)
        tuned = [finetuned(body, notes(count, seed), unseen, steps, seed, **how) for seed in seeds]
        found["loss"][name] = [loss_on(model, test) for model, _ in tuned]
        found["accuracy"][name] = [accuracy for _, accuracy in tuned]
    return found


def notes(count: int, seed: int) -> list[Record]:
    """Texts without stories: the label is the person who occurs more often."""
    rng = Random(seed)
    found = []
    for _ in range(count):
        first, second = PEOPLE[:2]
        winner = rng.choice((first, second))
        people = [winner] * 4 + [first if winner == second else second] * 3
        text = people + [rng.choice(COMMON) for _ in range(10)]
        rng.shuffle(text)
        found.append(Record({"text": "".join(text), "text_b": None, "label": winner}, ""))
    return found


def judge(numbers: Numbers) -> Verdict:
    forgot = {name: [loss - numbers["before"] for loss in numbers["loss"][name]] for name in NAMES}
    gained = mean(numbers["accuracy"]["general"]) - mean(numbers["accuracy"]["none"])
    each = all(a > 0 and b <= 0.5 * a for a, b in zip(forgot["none"], forgot["general"], strict=True))
    average = mean(forgot["none"]) > 0 and mean(forgot["general"]) <= 0.5 * mean(forgot["none"])
    shown = ", ".join(f"{mean(forgot[name]):+.2f} {NAMES[name]}" for name in NAMES)
    return judged(
        each and gained >= -2,
        f"the loss on stories changes by {shown}; accuracy {gained:+.1f}",
        weaker=average and gained >= -2,
    )


def draw(axes, numbers: Numbers) -> None:
    for number, name in enumerate(NAMES):
        axes.scatter([number] * len(numbers["loss"][name]), numbers["loss"][name])
    axes.axhline(numbers["before"], color="grey", lw=0.8, linestyle="--", label="before fine-tuning")
    axes.set(ylabel="held-out loss on stories", xticks=range(3), xticklabels=["λ = 0", "λ on the task", "λ on stories"])
    axes.legend(frameon=False)
