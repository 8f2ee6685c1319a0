"""D3. A whole model with weights of size 1.

Statement: Not only a layer (C4), but a whole Transformer can have its scales in the forward pass: it computes the same
    at the start, and one learning rate means the same relative change in every matrix, whatever the width.
Source: Jacot et al. 2018; 苏剑林 on the parametrization of Transformers.
Criterion: Over five seeds, BERTs of 32, 64 and 128 units with `parametrization="ntk"` have the logits of the usual
    ones to 1e-4. One step of Adam with rate 0.01 changes each matrix of each layer by 1 %, to 0.1 %; in a usual BERT,
    whose weights have size 0.02, by more than 40 %, and in one of 2017, whose size is 1/√width, by amounts that differ
    by a factor of at least 1.9 between 32 and 128 units (√4 = 2 by the formula).
"""

from __future__ import annotations

from dataclasses import replace
from statistics import mean

import torch

from allmask.claims.claim import Numbers, Trial, Verdict, judged
from allmask.config import Config
from allmask.model import Model

WIDTHS, RATE, TOKENS = (32, 64, 128), 0.01, 100


def measure(trial: Trial, parametrized: bool = True) -> Numbers:
    """`parametrized`: otherwise all models are the usual ones."""
    found: Numbers = {"difference": []} | {name: {str(w): [] for w in WIDTHS} for name in ("ntk", "BERT", "2017")}
    for seed in trial.seeds(5):
        for width in WIDTHS:
            bert = Config(vocab_size=TOKENS, width=width, layers=2, heads=4, ffn_width=4 * width, max_positions=32)
            ntk = replace(bert, parametrization="ntk" if parametrized else "standard")
            xavier = replace(bert, family="transformer", embedding_scaled=True)
            ids = torch.randint(TOKENS, (8, 16), generator=torch.Generator().manual_seed(seed))
            models = [fresh(config, seed) for config in (ntk, bert, xavier)]
            logits = [model(ids).logits for model in models[:2]]
            found["difference"].append((logits[0] - logits[1]).abs().max().item())
            for name, model in zip(("ntk", "BERT", "2017"), models, strict=True):
                found[name][str(width)] += moved(model, ids)
    return found


def fresh(config: Config, seed: int) -> Model:
    return Model.fresh(config, ["lm"], torch.Generator().manual_seed(seed)).eval()


def moved(model: Model, ids: torch.Tensor) -> list[float]:
    """By how many percent each matrix of the layers changes in one step."""
    matrices = [weight for name, weight in model.named_parameters() if ".layers." in name and weight.ndim == 2]
    before = [weight.detach().clone() for weight in matrices]
    optimizer = torch.optim.Adam(matrices, RATE, eps=1e-15)
    model(ids).logits.log_softmax(-1)[..., 0].mean().neg().backward()
    optimizer.step()
    return [100 * ((new - old).norm() / old.norm()).item() for new, old in zip(matrices, before, strict=True)]


def judge(numbers: Numbers) -> Verdict:
    ntk, bert = ([value for values in numbers[name].values() for value in values] for name in ("ntk", "BERT"))
    differ = mean(numbers["2017"]["128"]) / mean(numbers["2017"]["32"])
    same = max(numbers["difference"])
    return judged(
        same < 1e-4 and all(abs(value - 1) < 0.1 for value in ntk) and min(bert) > 40 and differ >= 1.9,
        f"logits differ by {same:.0e}; a step changes matrices by {min(ntk):.2f} to {max(ntk):.2f} %, a BERT's by "
        f"{min(bert):.0f} to {max(bert):.0f} %, of 2017 × {differ:.1f} from 32 to 128 units",
    )


def draw(axes, numbers: Numbers) -> None:
    for name, marker in (("BERT", "o-"), ("2017", "^-"), ("ntk", "s-")):
        axes.plot(WIDTHS, [mean(numbers[name][str(width)]) for width in WIDTHS], marker, label=name)
    axes.set(xlabel="width", ylabel="change in one step (%)", xscale="log", yscale="log")
    axes.set_xticks(WIDTHS, [str(width) for width in WIDTHS])
    axes.minorticks_off()
    axes.legend(frameon=False)
