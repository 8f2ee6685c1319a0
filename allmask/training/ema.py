"""An exponential moving average of the weights, often better than the weights themselves (Polyak averaging)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn


class Average:
    """The moving average. Its decay at step n is at most (1 + n) / (10 + n), to forget the initial weights."""

    def __init__(self, model: nn.Module, decay: float):
        self.decay = decay
        self.names, self.weights = zip(*model.named_parameters(), strict=True)
        self.means = [weight.detach().clone() for weight in self.weights]

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Add the weights after `step` steps."""
        share = 1.0 - min(self.decay, (1 + step) / (10 + step))
        for weight, mean in zip(self.weights, self.means, strict=True):
            mean.lerp_(weight, share)

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Give the model the averaged weights, within this context."""
        self._swap()
        try:
            yield
        finally:
            self._swap()

    @torch.no_grad()
    def _swap(self) -> None:
        for weight, mean in zip(self.weights, self.means, strict=True):
            kept = weight.clone()
            weight.copy_(mean)
            mean.copy_(kept)

    def tensors(self) -> dict[str, Tensor]:
        return dict(zip(self.names, self.means, strict=True))

    @torch.no_grad()
    def restore(self, tensors: dict[str, Tensor]) -> None:
        for name, mean in zip(self.names, self.means, strict=True):
            mean.copy_(tensors[name])
