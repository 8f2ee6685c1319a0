"""D6. Queries and keys must differ; keys and values need not.

Statement: If queries are keys (Q = K), scores are symmetric: a reads b as much as b reads a, so that a relation with a
    direction cannot be read. If keys are values (K = V), little is lost, as long as a vector has room for both.
Source: textbooks, on why attention has three projections; Kitaev et al. 2020 share Q and K, and mask the token itself.
Criterion: Each of 15 tokens has a value, and must tell that of its partner; the partners form cycles of three, so no
    relation is mutual. One layer with one head, 64 wide, is trained for 100 steps, over five seeds. With three
    projections the accuracy is above 95 %, with Q = K at least 20 points lower, with K = V at most 5 points lower.
    Weaker: with K = V it loses more. (First all tokens formed one cycle. There Q = K reaches 90 %: scores that grow
    along the cycle are symmetric, and wrong at one token only. In a cycle of three they are wrong at every third. And
    first it was 150 steps.)
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

KINDS, WIDTH, STEPS = ("three", "Q = K", "K = V"), 64, 100


class Reader(nn.Module):
    """One layer of attention over tokens with values; with Q = K or K = V two projections are one module."""

    def __init__(self, kind: str, tokens: int, values: int):
        super().__init__()
        self.tokens, self.values = nn.Embedding(tokens, WIDTH), nn.Embedding(values, WIDTH)
        self.attention = Attention(WIDTH, heads=1)
        if kind == "Q = K":
            self.attention.query = self.attention.key
        if kind == "K = V":
            self.attention.value = self.attention.key
        self.output = nn.Linear(WIDTH, values)

    def forward(self, tokens: Tensor, values: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.values(values)
        route = Route.find(Mask.bidirectional(torch.ones_like(tokens, dtype=torch.bool)))
        return self.output(self.attention(x, self.attention.keys_values(x), route))


def measure(trial: Trial, separate: bool = True) -> Numbers:
    """Return the accuracy of each kind of network for each seed; without `separate`, all kinds have Q = K."""
    found: Numbers = {kind: [] for kind in KINDS}
    for seed in trial.seeds(5):
        task = Lookup.of(relations=1, seed=seed)
        for kind in KINDS:
            torch.manual_seed(seed)
            network = Reader(kind if separate else "Q = K", task.partners.shape[1], task.values)
            rng = torch.Generator().manual_seed(seed)

            def loss(step: int, network: Reader = network, task: Lookup = task, rng=rng) -> Tensor:
                tokens, values, wanted = task.rows(32, rng)
                return F.cross_entropy(network(tokens, values).flatten(0, 1), wanted.flatten())

            fit(network.parameters(), loss, trial.steps(STEPS), lr=1e-2)
            tokens, values, wanted = task.rows(200, rng)
            with torch.inference_mode():
                right = network(tokens, values).argmax(-1) == wanted[..., 0]
            found[kind].append(100 * right.double().mean().item())
    return found


def judge(numbers: Numbers) -> Verdict:
    three, queries, values = (mean(numbers[kind]) for kind in KINDS)
    directed = three > 95 and queries <= three - 20
    return judged(
        directed and values >= three - 5,
        f"accuracy {three:.0f} % with three projections, {queries:.0f} % with Q = K, {values:.0f} % with K = V",
        weaker=directed,
    )


def draw(axes, numbers: Numbers) -> None:
    for place, kind in enumerate(KINDS):
        axes.scatter([place] * len(numbers[kind]), numbers[kind])
    axes.set(ylabel="accuracy (%)", ylim=(0, 105), xticks=range(3), xticklabels=KINDS, xlim=(-0.5, 2.5))
