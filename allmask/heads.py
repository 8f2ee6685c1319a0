"""From hidden states to answers: what is read off a body."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Pooler(nn.Linear):
    """The first token's hidden state, through a tanh layer: BERT's summary of the text, (B, W)."""

    def __init__(self, width: int):
        super().__init__(width, width)

    def forward(self, hidden: Tensor) -> Tensor:
        return torch.tanh(super().forward(hidden[:, 0]))


class LanguageModelHead(nn.Module):
    """Hidden states to logits over the vocabulary, through the token embedding unless it has a matrix of its own."""

    output: nn.Linear | None

    def __init__(
        self, transform: nn.Module, activation: nn.Module, norm: nn.Module, output: nn.Linear | None, bias: int
    ):
        super().__init__()
        self.transform = transform
        self.activation = activation
        self.norm = norm
        self.output = output
        self.bias = nn.Parameter(torch.zeros(bias)) if bias else None

    def forward(self, hidden: Tensor, embedding: Tensor) -> Tensor:
        """Logits (…, V) of hidden states (…, W): pass only the positions that have a target."""
        weight = embedding if self.output is None else self.output.weight
        return columnwise_linear(self.norm(self.activation(self.transform(hidden))), weight, self.bias)


def columnwise_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """F.linear in which no output column's rounding depends on the others: a pruned vocabulary keeps its logits' bits.

    In fp32 that is oneDNN's kernel; the default one rounds by how many columns there are (and is no faster).
    """
    if x.device.type != "cpu" or x.dtype != torch.float32 or x.numel() == 0 or not torch.backends.mkldnn.is_available():
        return F.linear(x, weight, bias)
    return torch._C._nn.mkldnn_linear(x.to_mkldnn(), weight, bias).to_dense()  # pyright: ignore


def bert_head(width: int, vocabulary: int, activation: nn.Module, epsilon: float, tied: bool) -> LanguageModelHead:
    norm = nn.LayerNorm(width, eps=epsilon)
    return LanguageModelHead(nn.Linear(width, width), activation, norm, _own(width, vocabulary, tied), vocabulary)


def plain_head(width: int, vocabulary: int, tied: bool) -> LanguageModelHead:
    return LanguageModelHead(nn.Identity(), nn.Identity(), nn.Identity(), _own(width, vocabulary, tied), bias=0)


def _own(width: int, vocabulary: int, tied: bool) -> nn.Linear | None:
    return None if tied else nn.Linear(width, vocabulary, bias=False)
