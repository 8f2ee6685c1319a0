"""C22. Fine-tuning beats frozen features, larger bodies are better, small data is unstable.

Statement: Fine-tuning the whole body is better than a head on frozen features. Larger bodies are better even if the
    task has few examples. With few examples the result depends on the seed; Adam with bias correction and more epochs
    make it steadier.
Source: Devlin et al. 2019, sections 5.2 and 5.3; Mosbach et al. 2021; Zhang et al. 2021.
Criterion: Bodies 16, 32 and 64 wide are pretrained on made-up stories; 20 labelled stories are the task. Over five
    seeds: the fine-tuned body is at least five points better than a head on its frozen features; accuracy grows from 16
    to 32 to 64; the standard deviation between seeds is smaller with bias correction and 20 epochs than without it and
    3 epochs. Weaker: the first and one of the others. (First there were 60 examples, with which all were at 97 to
    100 %: the deviation fell from 0.2 to 0.0, and 32 was not better than 16.)
At length: python quality/tasks.py DATA
"""

from __future__ import annotations

from statistics import mean, pstdev
from typing import Any

import torch

from allmask.claims.claim import Numbers, Trial, Verdict, judged
from allmask.claims.learning import PRETRAINING, TOPICS, finetuned, pretrained_story_model, stories
from allmask.data import Record
from allmask.model import Model
from allmask.options import Settings

EXAMPLES, STEPS, EPOCHS, TOKENS, SEEDS = 20, 60, 20, 100, 5  # STEPS are those of 20 epochs
WIDTHS = (16, 32, 64)


def measure(trial: Trial, tuned: bool = True) -> Numbers:
    """`tuned`: otherwise every body stays frozen."""
    bodies = {width: pretrained_story_model(1, trial.steps(PRETRAINING), **shape(width)) for width in WIDTHS}
    largest, steps, few = bodies[64], trial.steps(STEPS), trial.steps(STEPS * 3 // EPOCHS)
    found: Numbers = {"frozen": runs(trial, largest, steps, freeze=True)}
    for width, body in bodies.items():
        trial.say(f"{width} wide")
        found[str(width)] = runs(trial, body, steps, freeze=not tuned)
    found["uncorrected, 3 epochs"] = runs(trial, largest, few, freeze=not tuned, optimizer=Uncorrected)
    return found


def shape(width: int) -> dict[str, Any]:
    return {} if width == 64 else {"width": width, "ffn_width": 4 * width}  # 64 is the body of other claims


def runs(trial: Trial, body: Model, steps: int, **how) -> list[float]:
    test = labelled(trial.examples(200), 1000)
    return [
        finetuned(body, labelled(EXAMPLES, seed), test, steps, seed, batch_tokens=TOKENS, betas=(0.9, 0.999), **how)[1]
        for seed in trial.seeds(SEEDS)
    ]


def labelled(count: int, seed: int) -> list[Record]:
    """Stories of two sentences; the label is one of two groups of topics."""
    names = list(TOPICS)
    return [
        Record({"text": story.text, "text_b": None, "label": "ab"[names.index(story.topic) % 2]}, "")
        for story in stories(count, 50 + seed, 2)
    ]


class Uncorrected(torch.optim.Optimizer):
    """Adam without bias correction, as in the first BERT."""

    def __init__(self, model: Model, settings: Settings):
        super().__init__(model.parameters(), {"lr": settings.lr})
        self.betas, self.eps = settings.betas, settings.adam_eps

    @torch.no_grad()
    def step(self, closure=None) -> None:
        for group in self.param_groups:
            for weight in filter(lambda weight: weight.grad is not None, group["params"]):
                first, second = self.state[weight].setdefault("moments", (weight * 0, weight * 0))
                first.lerp_(weight.grad, 1 - self.betas[0])
                second.lerp_(weight.grad**2, 1 - self.betas[1])
                weight -= group["lr"] * first / (second.sqrt() + self.eps)


def judge(numbers: Numbers) -> Verdict:
    frozen, *by_width = (mean(numbers[name]) for name in ("frozen", *map(str, WIDTHS)))
    spread, steady = (pstdev(numbers[name]) for name in ("uncorrected, 3 epochs", "64"))
    better, larger, steadier = by_width[-1] >= frozen + 5, sorted(set(by_width)) == by_width, steady < spread
    widths = ", ".join(f"{accuracy:.1f}" for accuracy in by_width)
    return judged(
        better and larger and steadier,
        f"frozen {frozen:.1f} %, fine-tuned {by_width[-1]:.1f} %; {widths} % by width; deviation {spread:.1f} → "
        f"{steady:.1f} with bias correction and more epochs",
        weaker=better and (larger or steadier),
    )


def draw(axes, numbers: Numbers) -> None:
    for number, values in enumerate(numbers.values()):
        axes.scatter([number] * len(values), values)
    labels = ["frozen", *(f"{width} wide" for width in WIDTHS), "64, unsteady"]
    axes.set(ylabel="accuracy (%)", xticks=range(len(labels)), xticklabels=labels)
