"""C15. One masked pass trains what writing computes step by step.

Statement: With the right mask, one pass over a whole target gives, at every position, what step-by-step writing with
    a cache computes there. So a target is trained in parallel, and written token by token.
Source: Vaswani et al. 2017, section 3.2.3; Dong et al. 2019 (UniLM).
Criterion: Over five seeds, hidden states under the causal and the prefix mask agree to 1e-5 with those of steps that
    see only the past, and under the bidirectional mask they do not (above 0.01): there the past would have to read
    the future.
"""

from __future__ import annotations

import torch

from allmask.claims.claim import Numbers, Trial, Verdict, judged
from allmask.config import Config
from allmask.mask import Mask
from allmask.model import Model
from allmask.nn.cache import Cache

SOURCE, TARGET = 10, 12


def measure(trial: Trial, masked: bool = True) -> Numbers:
    """`masked`: otherwise the pass in parallel reads in both directions."""
    found: Numbers = {"causal": [], "prefix": [], "bidirectional": []}
    for seed in trial.seeds(5):
        rng = torch.Generator().manual_seed(seed)
        config = Config(vocab_size=500, width=96, layers=4, heads=4, ffn_width=384, max_positions=64)
        model = Model.fresh(config, rng=rng).eval()
        ids = torch.randint(500, (1, SOURCE + TARGET), generator=rng)
        everything = torch.ones_like(ids, dtype=torch.bool)
        both = Mask.bidirectional(everything)
        target = torch.arange(SOURCE + TARGET)[None] >= SOURCE
        for name, mask in (("causal", Mask.causal(everything)), ("prefix", Mask.prefix(target))):
            found[name].append(difference(model, ids, mask if masked else both, mask))
        found["bidirectional"].append(difference(model, ids, both, Mask.causal(everything)))
    return found


@torch.inference_mode()
def difference(model: Model, ids: torch.Tensor, at_once: Mask, by_steps: Mask) -> float:
    """Of the target's hidden states: all at once, and one by one after the source."""
    parallel = model(ids, mask=at_once).hidden[:, SOURCE:]
    cache, steps = Cache(), []
    for start, stop in [(0, SOURCE), *((one, one + 1) for one in range(SOURCE, SOURCE + TARGET))]:
        out = model(ids[:, start:stop], mask=by_steps[:, start:stop], cache=cache)
        cache = out.cache
        steps.append(out.hidden)
    return (parallel - torch.cat(steps[1:], 1)).abs().max().item()


def judge(numbers: Numbers) -> Verdict:
    worst = max(*numbers["causal"], *numbers["prefix"])
    other = min(numbers["bidirectional"])
    return judged(
        worst < 1e-5 and other > 0.01, f"causal and prefix differ by at most {worst:.1e}; bidirectional by {other:.2f}"
    )


def draw(axes, numbers: Numbers) -> None:
    for number, (name, values) in enumerate(numbers.items()):
        axes.scatter([number] * len(values), values, label=name)
    axes.set(yscale="log", ylabel="|at once - by steps|", xticks=range(len(numbers)), xticklabels=list(numbers))
