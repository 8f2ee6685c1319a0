"""D13. A convolution becomes a language model by a mask on its kernel.

Statement: A recurrent network is a language model by nature. A convolution becomes one if the right half of its kernel
    is masked, as attention does under the causal mask: then no output depends on a later token.
Source: 苏剑林 on UniLM; van den Oord et al. 2016 (masked convolutions).
Criterion: The mask of the kernel is a row of `Mask.causal`. Over five seeds, outputs of a masked convolution change by
    exactly 0 when later tokens change; unmasked, by more than 0.01. Trained on chains of tokens, the masked convolution
    and a causal Transformer reach the entropy of the chain to 10 %; an unmasked convolution falls below half of it,
    since it sees the token that it predicts.
"""

from __future__ import annotations

from statistics import mean
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from allmask.claims.claim import Numbers, Trial, Verdict, judged
from allmask.claims.made_up import CHAIN_ENTROPY, CHAIN_TOKENS, chains, fit, next_token_loss, small_config
from allmask.mask import Mask
from allmask.model import Model

WIDTH, KERNEL, LAYERS, STEPS = 64, 5, 2, 80


class ConvolutionModel(nn.Module):
    """Tokens, residual convolutions whose kernel sees what the middle row of a mask shows, and an output layer."""

    support: Tensor
    kernels: Any  # of nn.Conv1d

    def __init__(self, mask: Mask):
        super().__init__()
        self.register_buffer("support", mask.visible()[0, KERNEL // 2].float())  # ■ ■ ■ · · for the causal mask
        self.embedding = nn.Embedding(CHAIN_TOKENS, WIDTH)
        self.kernels = nn.ModuleList(nn.Conv1d(WIDTH, WIDTH, KERNEL, padding=KERNEL // 2) for _ in range(LAYERS))
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(LAYERS))
        self.output = nn.Linear(WIDTH, CHAIN_TOKENS)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)  # (B, T, W)
        for kernel, norm in zip(self.kernels, self.norms, strict=True):
            seen = F.conv1d(norm(x).transpose(1, 2), kernel.weight * self.support, kernel.bias, padding=KERNEL // 2)
            x = x + F.gelu(seen.transpose(1, 2))
        return self.output(x)


def measure(trial: Trial, masked: bool = True) -> Numbers:
    """`masked`: otherwise the kernel sees both sides."""
    found: Numbers = {name: [] for name in ("change", "change, unmasked", "masked", "unmasked", "Transformer")}
    row = torch.ones(1, KERNEL, dtype=torch.bool)
    for seed in trial.seeds(5):
        follows = torch.randperm(CHAIN_TOKENS, generator=torch.Generator().manual_seed(seed))
        for name, mask in (("masked", Mask.causal(row)), ("unmasked", Mask.bidirectional(row))):
            torch.manual_seed(seed)
            network = ConvolutionModel(mask if masked else Mask.bidirectional(row))
            found["change" if name == "masked" else "change, unmasked"].append(change(network, follows))

            def loss(step: int, network: nn.Module = network, follows: Tensor = follows) -> Tensor:
                ids = chains(follows, step)
                return F.cross_entropy(network(ids)[:, :-1].flatten(0, 1), ids[:, 1:].flatten())

            fit(network.parameters(), loss, trial.steps(STEPS), lr=1e-2)
            found[name].append(mean(loss(step).item() for step in range(1000, 1010)))
        config = small_config(vocab_size=CHAIN_TOKENS, layers=LAYERS, norm_place="pre", own_mask="causal")
        model = Model.fresh(config, ["lm"], torch.Generator().manual_seed(seed))
        steps = trial.steps(STEPS)
        fit(model.parameters(), lambda step, m=model, f=follows: next_token_loss(m, chains(f, step)), steps, lr=1e-2)
        found["Transformer"].append(
            mean(next_token_loss(model, chains(follows, step)).item() for step in range(1000, 1010))
        )
    return found


@torch.no_grad()
def change(network: nn.Module, follows: Tensor) -> float:
    """How much the outputs of the first half change with the tokens of the second."""
    first, second = chains(follows, 0), chains(follows, 1)
    half = first.shape[1] // 2
    second[:, :half] = first[:, :half]
    return (network(first) - network(second))[:, :half].abs().max().item()


def judge(numbers: Numbers) -> Verdict:
    masked, unmasked, transformer = (mean(numbers[name]) for name in ("masked", "unmasked", "Transformer"))
    holds = max(numbers["change"]) == 0 and min(numbers["change, unmasked"]) > 0.01
    holds = holds and max(masked, transformer) < 1.1 * CHAIN_ENTROPY and unmasked < 0.5 * CHAIN_ENTROPY
    return judged(
        holds,
        f"later tokens change outputs by {max(numbers['change']):g}, unmasked {min(numbers['change, unmasked']):.1f}; "
        f"loss {masked:.2f}, Transformer {transformer:.2f}, unmasked {unmasked:.2f}, entropy {CHAIN_ENTROPY:.2f}",
    )


def draw(axes, numbers: Numbers) -> None:
    names = ("masked", "Transformer", "unmasked")
    for place, name in enumerate(names):
        axes.scatter([place] * len(numbers[name]), numbers[name])
    axes.axhline(CHAIN_ENTROPY, color="k", lw=0.8, ls=":", label="entropy")
    axes.set(
        ylabel="loss", xticks=range(3), xticklabels=["masked\nconvolution", "causal\nTransformer", "unmasked\nconv."]
    )
    axes.legend(frameon=False)
