"""D9. Sinusoidal positions reach beyond the trained length, learned ones do not.

Statement: Sinusoidal positions were chosen since they may let a model read longer texts than it was trained on. A
    table of learned positions has no trained rows there.
Source: Vaswani et al. 2017, section 3.5; Press et al. 2022 found that sinusoidal positions hardly extrapolate.
Criterion: Language models of one layer are trained for 200 steps on 24 tokens, each of which repeats the one 3 before
    with probability 0.9, over five seeds. Both learn that: their loss within the 24 is below 70 % of log 16. In texts
    of 48 tokens, the loss of the second half is within 10 % of that of the first for sinusoidal positions, and at
    least 30 % higher for learned ones. Weaker: it rises with both, but less with sinusoidal ones, in all seeds. (First
    two layers for 250 steps, and BERT's embeddings, of size 0.02, which sinusoids of size 0.7 drown: nothing was
    learnt. Now they are those of 2017, of size 1.)
"""

from __future__ import annotations

import math
from statistics import mean

import torch
from torch import Tensor

from allmask.claims.claim import Numbers, Trial, Verdict, judged
from allmask.claims.made_up import fit, next_token_loss, small_config
from allmask.model import Model

KINDS, TOKENS, BACK, SHORT, LONG, STEPS = ("learned", "sinusoidal", "rotary"), 16, 3, 24, 48, 200


def measure(trial: Trial, waves: bool = True) -> Numbers:
    """`waves`: otherwise all have learned positions."""
    found: Numbers = {kind: {"within": [], "beyond": []} for kind in KINDS}
    for seed in trial.seeds(5):
        for kind, losses in found.items():
            config = small_config(
                family="transformer", vocab_size=TOKENS, layers=1, max_positions=LONG, norm_place="pre",
                embedding_norm=False, embedding_scaled=True, own_mask="causal",
                position_kind=kind if waves else "learned",
            )  # fmt: skip
            model = Model.fresh(config, ["lm"], torch.Generator().manual_seed(seed))
            rng = torch.Generator().manual_seed(seed)

            def loss(step: int, model: Model = model, rng=rng) -> Tensor:
                return next_token_loss(model, texts(SHORT, 16, rng), BACK)

            fit(model.parameters(), loss, trial.steps(STEPS))
            ids = texts(LONG, 100, rng)
            with torch.inference_mode():
                losses["within"].append(next_token_loss(model.eval(), ids[:, :SHORT], BACK).item())
                losses["beyond"].append(next_token_loss(model, ids, SHORT).item())
        trial.say(f"seed {seed} of {len(trial.seeds(5))}")
    return found


def texts(length: int, count: int, rng: torch.Generator) -> Tensor:
    ids = torch.randint(TOKENS, (count, length), generator=rng)
    repeated = torch.rand(count, length, generator=rng) < 0.9
    for column in range(BACK, length):
        ids[:, column] = torch.where(repeated[:, column], ids[:, column - BACK], ids[:, column])
    return ids


def judge(numbers: Numbers) -> Verdict:
    within, beyond = ({kind: mean(losses[part]) for kind, losses in numbers.items()} for part in ("within", "beyond"))
    rise = {kind: beyond[kind] / within[kind] - 1 for kind in KINDS}
    learnt = max(within["learned"], within["sinusoidal"]) < 0.7 * math.log(TOKENS)
    pairs = zip(numbers["sinusoidal"]["beyond"], numbers["learned"]["beyond"], strict=True)
    said = ", ".join(f"{kind} {within[kind]:.2f} to {beyond[kind]:.2f}" for kind in KINDS)
    return judged(
        learnt and rise["sinusoidal"] < 0.1 and rise["learned"] > 0.3,
        f"loss within and beyond the trained length: {said}; rises by {100 * rise['learned']:.0f} % with learned and "
        f"by {100 * rise['sinusoidal']:.0f} % with sinusoidal positions",
        weaker=learnt and rise["learned"] > 0.3 and all(waves < table for waves, table in pairs),
    )


def draw(axes, numbers: Numbers) -> None:
    for place, (kind, losses) in enumerate(numbers.items()):
        axes.scatter([place - 0.1] * len(losses["within"]), losses["within"], color=f"C{place}", marker="o")
        axes.scatter([place + 0.1] * len(losses["beyond"]), losses["beyond"], color=f"C{place}", marker="x", label=kind)
    axes.axhline(math.log(TOKENS), color="k", lw=0.8, ls=":")
    axes.set(ylabel="loss: ○ within, × beyond", xticks=range(len(KINDS)), xticklabels=KINDS, ylim=(0, None))
