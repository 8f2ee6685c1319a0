"""D8. One head reads one thing at a time, eight read several.

Statement: The weights of one head sum to 1, so that it cannot read several tokens at once and keep them apart. Eight
    heads, each an eighth as wide, can, at the same cost (C16).
Source: Vaswani et al. 2017, section 3.2.2 and table 3: one head loses 0.9 BLEU.
Criterion: Each of 15 tokens has a value, and must tell those of two partners, the first and the second. One layer, 64
    wide, is trained for 150 steps, over five seeds. With eight heads more than 90 % of the values are right, with one
    at least 15 points fewer. (First 250 steps, with the same verdict.)
"""

from __future__ import annotations

from statistics import mean

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from allmask.claims.claim import Numbers, Trial, Verdict, judged
from allmask.claims.made_up import Lookup, fit
from allmask.mask import Mask
from allmask.nn.attention import Attention, Route

HEADS, WIDTH, STEPS, RELATIONS = (1, 8), 64, 150, 2


class Reader(nn.Module):
    """One layer of attention over tokens with values, and a classifier for each relation."""

    def __init__(self, heads: int, tokens: int, values: int):
        super().__init__()
        self.tokens, self.values = nn.Embedding(tokens, WIDTH), nn.Embedding(values, WIDTH)
        self.attention = Attention(WIDTH, heads)
        self.output = nn.Linear(WIDTH, RELATIONS * values)

    def forward(self, tokens: Tensor, values: Tensor) -> Tensor:
        """Scores (B, T, relations, values)."""
        x = self.tokens(tokens) + self.values(values)
        route = Route.find(Mask.bidirectional(torch.ones_like(tokens, dtype=torch.bool)))
        return self.output(self.attention(x, self.attention.keys_values(x), route)).unflatten(-1, (RELATIONS, -1))


def measure(trial: Trial, several: bool = True) -> Numbers:
    """`several`: otherwise both have one head."""
    found: Numbers = {str(heads): [] for heads in HEADS}
    for seed in trial.seeds(5):
        task = Lookup.of(RELATIONS, seed)
        for heads in HEADS:
            torch.manual_seed(seed)
            network = Reader(heads if several else 1, task.partners.shape[1], task.values)
            rng = torch.Generator().manual_seed(seed)

            def loss(step: int, network: Reader = network, task: Lookup = task, rng=rng) -> Tensor:
                tokens, values, wanted = task.rows(32, rng)
                return F.cross_entropy(network(tokens, values).flatten(0, 2), wanted.flatten())

            fit(network.parameters(), loss, trial.steps(STEPS), lr=1e-2)
            tokens, values, wanted = task.rows(200, rng)
            with torch.inference_mode():
                right = network(tokens, values).argmax(-1) == wanted
            found[str(heads)].append(100 * right.double().mean().item())
    return found


def judge(numbers: Numbers) -> Verdict:
    one, eight = (mean(numbers[str(heads)]) for heads in HEADS)
    return judged(eight > 90 and one <= eight - 15, f"right values {one:.0f} % with one head, {eight:.0f} % with eight")


def draw(axes, numbers: Numbers) -> None:
    for place, heads in enumerate(HEADS):
        axes.scatter([place] * len(numbers[str(heads)]), numbers[str(heads)])
    axes.set(ylabel="right values (%)", ylim=(0, 105), xticks=range(2), xticklabels=["1 head", "8 heads"])
    axes.set_xlim(-0.5, 1.5)
