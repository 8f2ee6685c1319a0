"""C18. Layer norm does not mind padding, batch norm does.

Statement: A norm over the features of each token gives the same result however far a batch is padded. Norms over the
    tokens of a batch or of a row do not: the same sentences come out differently beside longer ones.
Source: Ba et al. 2016 (layer norm); Vaswani et al. 2017 use it for that reason.
Criterion: Over five seeds, padding the same sentences from 16 to 64 tokens changes the output of layer norm and RMS
    norm by exactly 0, that of batch norm (in training) and instance norm by more than 0.1.
"""

from __future__ import annotations

import torch

from allmask.claims.claim import Numbers, Trial, Verdict, judged
from allmask.nn.layers import NORMS, TOKENWISE

WIDTH, TEXTS, TOKENS, PADDED = 64, 8, 16, (16, 24, 32, 48, 64)


def measure(trial: Trial, tokenwise: bool = True) -> Numbers:
    """`tokenwise`: otherwise batch norm in place of both."""
    return {name: changes(name if tokenwise or name not in TOKENWISE else "batch", trial) for name in NORMS}


def changes(name: str, trial: Trial) -> list[float]:
    """The largest change of a sentence's tokens, for each padded length; padding is a vector of its own."""
    found = [0.0] * len(PADDED)
    for seed in trial.seeds(5):
        rng = torch.Generator().manual_seed(seed)
        norm = NORMS[name](WIDTH)
        sentences, padding = torch.randn(TEXTS, TOKENS, WIDTH, generator=rng), torch.randn(WIDTH, generator=rng)
        with torch.no_grad():
            alone = norm(sentences)
            for number, length in enumerate(PADDED):
                padded = torch.cat([sentences, padding.expand(TEXTS, length - TOKENS, WIDTH)], 1)
                found[number] = max(found[number], (norm(padded)[:, :TOKENS] - alone).abs().max().item())
    return found


def judge(numbers: Numbers) -> Verdict:
    moved = {name: values[-1] for name, values in numbers.items()}
    holds = all(moved[name] == 0 if name in TOKENWISE else moved[name] > 0.1 for name in moved)
    return judged(holds, "changed by " + ", ".join(f"{value:.2f} ({name})" for name, value in moved.items()))


def draw(axes, numbers: Numbers) -> None:
    for name, values in numbers.items():
        axes.plot(PADDED, values, "o-", label=name)
    axes.set(xlabel="padded to", ylabel="largest change")
    axes.legend(frameon=False)
