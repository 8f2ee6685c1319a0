"""C8. A shuffled mask is a shuffled text under the causal mask.

Statement: Reading a text in a random order through the mask equals writing the tokens in that order, with their
    positions, and reading from left to right. So XLNet needs no shuffled input, and every mask runs on a causal
    kernel.
Source: Yang et al. 2019 (XLNet), section 2.2; 苏剑林 2019 on the masks of UniLM and XLNet.
Criterion: Over five orders, hidden states of a six-layer BERT agree to 1e-5. The mask is given as an unsorted matrix,
    so that nothing is sorted inside.
"""

from __future__ import annotations

import torch

from allmask.claims.claim import Numbers, Trial, Verdict, judged
from allmask.config import Config
from allmask.mask import Mask
from allmask.model import Model

TOKENS = 48


def measure(trial: Trial, same: bool = True) -> Numbers:
    """`same`: otherwise the mask has another order than the text."""
    found: Numbers = {"difference": []}
    for seed in trial.seeds(5):
        rng = torch.Generator().manual_seed(seed)
        config = Config(vocab_size=1000, width=128, layers=6, heads=4, ffn_width=512, max_positions=64)
        model = Model.fresh(config, rng=rng).eval()
        ids = torch.randint(1000, (1, TOKENS), generator=rng)
        turn = torch.randperm(TOKENS, generator=rng)  # the token that becomes known first, second, …
        rank = turn.argsort()[None]  # when each token becomes known
        visible = rank[:, None, :] <= (rank if same else rank.flip(1))[:, :, None]
        with torch.inference_mode():
            masked = model(ids, mask=Mask.from_matrix(visible)).hidden[:, turn]
            everything = torch.ones(1, TOKENS, dtype=torch.bool)
            shuffled = model(ids[:, turn], mask=Mask.causal(everything), positions=turn[None]).hidden
        found["difference"].append((masked - shuffled).abs().max().item())
    found["visible"] = visible[0].int().tolist()
    return found


def judge(numbers: Numbers) -> Verdict:
    worst = max(numbers["difference"])
    return judged(worst < 1e-5, f"hidden states differ by at most {worst:.1e}")


def draw(axes, numbers: Numbers) -> None:
    axes.imshow(numbers["visible"], cmap="Blues", vmin=0, vmax=1.6)
    axes.set(xlabel="is read", ylabel="reads", xticks=[], yticks=[], title="one of the masks")
