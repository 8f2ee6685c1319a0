"""A BERT training step on batches that are 40 % full: allmask without padding, transformers with it.

    python benchmarks/packed_step.py [--quick] [--json]

BERT-small (4 layers, 512 wide), 32 texts of up to 128 tokens, masked-language-model loss on 15 % of the real tokens,
forward and backward, dropout 0.1 on both sides, no optimizer. Both start from the same weights; their losses without
dropout are compared first. One thread, CPU time, interleaved, medians.
"""

from __future__ import annotations

import timing  # first: it sets the number of threads

# isort: split
import contextlib
import tempfile
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import BertConfig, BertForMaskedLM

import allmask
from allmask import Mask

ROWS, TOKENS, FILL, CHOSEN = 32, 128, 0.4, 0.15
SMALL = BertConfig(hidden_size=512, num_hidden_layers=4, num_attention_heads=8, intermediate_size=2048)
PRECISIONS = {"fp32": contextlib.nullcontext, "bf16": lambda: torch.autocast("cpu", torch.bfloat16)}


def main() -> None:
    options = timing.arguments(__doc__)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    theirs = BertForMaskedLM(SMALL)
    with tempfile.TemporaryDirectory() as folder:
        theirs.save_pretrained(folder)
        model = allmask.load(folder)
    ids, valid, labels = draw_batch(torch.Generator().manual_seed(0))
    losses = {
        "transformers, padded": (theirs, lambda: padded_loss(theirs, ids, valid, labels)),
        "allmask, no padding": (model, lambda: our_loss(model, ids, valid, labels)),
    }
    plain = [loss().item() for side, loss in losses.values() if side.eval()]
    cases = {
        f"{name}, {precision}": partial(step, side, loss, around)
        for precision, around in PRECISIONS.items()
        for name, (side, loss) in losses.items()
    }
    times = timing.medians(cases, rounds=1 if options.quick else 3)
    about = timing.versions("transformers") | {
        "non-padding tokens": f"{int(valid.sum()):,} of {valid.numel():,}",
        "losses without dropout": f"{plain[0]:.6f} and {plain[1]:.6f}",
    }
    timing.show("A training step of BERT-small", table(times, int(valid.sum())), about, options.json)


def draw_batch(rng: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """Random ids with padding, and labels at 15 % of the tokens (-100 elsewhere)."""
    mean = FILL * TOKENS
    lengths = (mean + (torch.rand(ROWS, generator=rng) * 2 - 1) * (mean - 8)).round().long()
    lengths[0] += round(mean * ROWS) - lengths.sum()  # 40 % exactly
    lengths[-1], lengths[1] = TOKENS, lengths[1] + lengths[-1] - TOKENS  # and one full row
    lengths = lengths.clamp(8, TOKENS)
    valid = torch.arange(TOKENS) < lengths[:, None]
    ids = torch.randint(1000, SMALL.vocab_size, valid.shape, generator=rng) * valid
    chosen = (torch.rand(valid.shape, generator=rng) < CHOSEN) & valid
    labels = torch.where(chosen, torch.randint(SMALL.vocab_size, valid.shape, generator=rng), -100)
    return ids, valid, labels


def padded_loss(model: nn.Module, ids: Tensor, valid: Tensor, labels: Tensor) -> Tensor:
    return model(input_ids=ids, attention_mask=valid.long(), labels=labels).loss


def our_loss(model: allmask.Model, ids: Tensor, valid: Tensor, labels: Tensor) -> Tensor:
    """Logits are computed at the labelled tokens only."""
    chosen = labels >= 0
    hidden = model(ids, Mask.bidirectional(valid)).hidden
    return F.cross_entropy(model.logits(hidden[chosen]).float(), labels[chosen])


def step(model: nn.Module, loss, around) -> None:
    model.train().zero_grad(set_to_none=True)
    with around():
        value = loss()
    value.backward()


def table(times: dict[str, float], tokens: int) -> list[dict[str, object]]:
    return [
        {
            "system": name,
            "seconds": f"{taken:.2f}",
            "non-padding tokens/s": f"{tokens / taken:,.0f}",
            "vs transformers, same precision": f"{times[f'transformers, padded, {name.split()[-1]}'] / taken:.2f}",
        }
        for name, taken in times.items()
    ]


if __name__ == "__main__":
    main()
