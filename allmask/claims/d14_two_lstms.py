"""D14. Two LSTMs on top of a left-to-right model help, but a bidirectional one is better.

Statement: A model that reads from left to right knows nothing of what follows a word. Two LSTMs on top of it, one in
    each direction, repair part of that; a model whose every layer reads in both directions is better still.
Source: Devlin et al. 2019, table 5 (LTR & no NSP, + BiLSTM).
Criterion: Small models read a made-up language of ambiguous words, over five seeds: from left to right, or masked. Then
    they learn the classes of words from 64 sentences. With two LSTMs the left-to-right model is better than without,
    and the bidirectional one better than that, each by more than two standard errors of the difference. Weaker: only
    the first.
"""

from __future__ import annotations

from statistics import mean

import torch
from torch import Tensor, nn

from allmask.claims.claim import Numbers, Trial, Verdict, judged
from allmask.claims.d05_corruption import MIXED, READING, TUNING
from allmask.claims.made_up import reader, surely_above, tag_accuracy
from allmask.nn.recurrent import Encoder

KINDS = ("left to right", "with two LSTMs", "both ways")


class TwoLSTMs(nn.Module):
    """An LSTM in each direction, and what they read beside what they have made of it."""

    def __init__(self, width: int, seed: int):
        super().__init__()
        torch.manual_seed(seed)
        self.encoder = Encoder(layers=1, width=width, both_ways=True, dropout=0.0)

    def forward(self, x: Tensor) -> Tensor:
        lengths = torch.full((len(x),), x.shape[1])
        return x + self.encoder(x, lengths)[0]


def measure(trial: Trial, backwards: bool = True) -> Numbers:
    """`backwards`: otherwise all are the left-to-right model alone."""
    found: Numbers = {kind: [] for kind in KINDS}
    for seed in trial.seeds(5):
        left_to_right = reader(seed, trial.steps(READING), None)
        both_ways = reader(seed, trial.steps(READING), MIXED) if backwards else left_to_right
        above = TwoLSTMs(left_to_right.config.width, seed) if backwards else None
        for kind, body, top in zip(KINDS, (left_to_right, left_to_right, both_ways), (None, above, None), strict=True):
            found[kind].append(tag_accuracy(body, seed, trial.steps(TUNING), top))
        trial.say(f"seed {seed} of {len(trial.seeds(5))}")
    return found


def judge(numbers: Numbers) -> Verdict:
    alone, topped, both = (numbers[kind] for kind in KINDS)
    helped = surely_above([b - a for a, b in zip(alone, topped, strict=True)])
    better = surely_above([b - a for a, b in zip(topped, both, strict=True)])
    return judged(
        helped and better,
        f"accuracy {mean(alone):.1f} % from left to right, {mean(topped):.1f} % with two LSTMs, {mean(both):.1f} % "
        "with a bidirectional model",
        weaker=helped,
    )


def draw(axes, numbers: Numbers) -> None:
    for place, kind in enumerate(KINDS):
        axes.scatter([place] * len(numbers[kind]), numbers[kind])
    axes.set(ylabel="accuracy of tags (%)", xticks=range(3), xticklabels=KINDS, xlim=(-0.5, 2.5))
