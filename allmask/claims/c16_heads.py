"""C16. Many heads cost what one wide head costs.

Statement: Attention with h heads of width d/h costs about as much as with one head of width d.
Source: Vaswani et al. 2017, section 3.2.2.
Criterion: A layer of attention, 512 wide, over two texts of 128 tokens, takes at most 1.5 times as long with any of
    1, 2, 4, 8 and 16 heads as with the fastest of them; the number of parameters is the same. Medians of processor
    time in interleaved rounds.
"""

from __future__ import annotations

import time
from statistics import median

import torch

from allmask.claims.claim import Numbers, Trial, Verdict, judged
from allmask.mask import Mask
from allmask.nn.attention import Attention, Route

HEADS, WIDTH, TEXTS, TOKENS = (1, 2, 4, 8, 16), 512, 2, 128


def measure(trial: Trial, divided: bool = True) -> Numbers:
    """`divided`: heads of width d/h; otherwise each has the full width, and 16 cost 16 times as much."""
    layers = {}
    for heads in HEADS:
        layers[heads] = Attention(WIDTH, heads, head_width=WIDTH // heads if divided else WIDTH).eval()
    x = torch.randn(TEXTS, TOKENS, WIDTH, generator=torch.Generator().manual_seed(1))
    route = Route.find(Mask.bidirectional(torch.ones(TEXTS, TOKENS, dtype=torch.bool)))
    seconds: dict[int, list[float]] = {heads: [] for heads in HEADS}
    with torch.inference_mode():
        for _ in range(60 if trial.full else 3 if trial.brief else 9):
            for heads, layer in layers.items():
                started = time.process_time()
                layer(x, layer.keys_values(x), route)
                seconds[heads].append(time.process_time() - started)
    return {
        "milliseconds": {str(heads): 1000 * median(found) for heads, found in seconds.items()},
        "parameters": {str(heads): sum(w.numel() for w in layer.parameters()) for heads, layer in layers.items()},
    }


def judge(numbers: Numbers) -> Verdict:
    taken = numbers["milliseconds"].values()
    same = len(set(numbers["parameters"].values())) == 1
    return judged(same and max(taken) <= 1.5 * min(taken), f"{min(taken):.1f} to {max(taken):.1f} ms for 1 to 16 heads")


def draw(axes, numbers: Numbers) -> None:
    axes.bar(numbers["milliseconds"].keys(), numbers["milliseconds"].values())
    axes.set(xlabel="heads", ylabel="milliseconds")
