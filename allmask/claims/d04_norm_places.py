"""D4. Norms before the residual steps make warm-up unnecessary.

Statement: With the norm after each residual step (post, 2017), gradients at the start are largest near the output, and
    a deep Transformer needs a warm-up of the learning rate. With the norm before it (pre, GPT-2) gradients are even,
    and it learns without.
Source: Xiong et al. 2020; Wang et al. 2019.
Criterion: Transformers of 8 layers, 64 wide, initialized as in 2017, over three seeds. At the start, the gradient of
    the last feed-forward layer is more than twice that of the first for post, and not for pre. Trained for 30 steps
    without warm-up at rates 1e-3, 3e-3 and 1e-2, the largest rate at which the loss falls below half of its first value
    in all seeds is at least 3 times larger for pre. Weaker: at 1e-2 the loss of pre is lower in all seeds. (First
    12 layers and 40 steps, with nearly the same figures; these take half of the time.)
"""

from __future__ import annotations

from dataclasses import replace
from statistics import mean

import torch
from torch import Tensor

from allmask.claims.claim import Numbers, Trial, Verdict, judged
from allmask.claims.made_up import CHAIN_TOKENS, chains, fit, next_token_loss, small_config
from allmask.model import Model

RATES, LAYERS, STEPS = (1e-3, 3e-3, 1e-2), 8, 30


def measure(trial: Trial, moved: bool = True) -> Numbers:
    """`moved`: otherwise the norms of both stay behind the residual steps."""
    found: Numbers = {name: {"gradients": [], "losses": []} for name in ("post", "pre")}
    for seed in trial.seeds(3):
        follows = torch.randperm(CHAIN_TOKENS, generator=torch.Generator().manual_seed(seed))
        for name, values in found.items():
            values["gradients"].append(gradients(fresh(name, seed, moved), chains(follows, 0)))
            values["losses"].append([])
            for rate in RATES:
                model = fresh(name, seed, moved)

                def loss(step: int, model: Model = model, follows: Tensor = follows) -> Tensor:
                    return next_token_loss(model, chains(follows, step))

                losses = fit(model.parameters(), loss, trial.steps(STEPS), rate, warmup=0, decay=False)
                values["losses"][-1].append(mean(losses[-5:]) / losses[0])
    return found


def fresh(name: str, seed: int, moved: bool) -> Model:
    config = small_config(family="transformer", layers=LAYERS, vocab_size=CHAIN_TOKENS, embedding_norm=False)
    config = replace(config, norm_place=name if moved else "post", norm_eps=1e-5, own_mask="causal")
    return Model.fresh(config, ["lm"], torch.Generator().manual_seed(seed))


def gradients(model: Model, ids: torch.Tensor) -> list[float]:
    """The norm of the gradient of each feed-forward layer at the start."""
    next_token_loss(model, ids).backward()
    return [layer.feed_forward.contract.weight.grad.norm().item() for layer in model.body.layers]


def judge(numbers: Numbers) -> Verdict:
    ratios = {name: mean(run[-1] / run[0] for run in values["gradients"]) for name, values in numbers.items()}
    rates = {}
    for name, values in numbers.items():
        fit_ones = [rate for n, rate in enumerate(RATES) if all(run[n] < 0.5 for run in values["losses"])]
        rates[name] = max(fit_ones, default=0.0)
    last = {name: [run[-1] for run in values["losses"]] for name, values in numbers.items()}
    even = ratios["post"] > 2 >= ratios["pre"]
    lower = all(pre < post for pre, post in zip(last["pre"], last["post"], strict=True))
    return judged(
        even and rates["pre"] > 0 and rates["pre"] >= 3 * rates["post"],
        f"gradient of the last layer / the first: {ratios['post']:.1f} post, {ratios['pre']:.1f} pre; largest rate "
        f"without warm-up {rates['post']:g} post, {rates['pre']:g} pre",
        weaker=lower,
    )


def draw(axes, numbers: Numbers) -> None:
    for name, values in numbers.items():
        axes.plot(range(1, LAYERS + 1), [mean(run) for run in zip(*values["gradients"], strict=True)], "o-", label=name)
    axes.set(xlabel="layer", ylabel="gradient at the start", yscale="log")
    axes.legend(frameon=False)
