"""Gradients between the backward pass and the optimiser, with as few trips through memory as it takes."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from allmask.model import Model
from allmask.training.distributed import Alone, Crew
from allmask.training.stages import whole_of


class RowGradient:
    """The gradient of an embedding that is only looked up: a batch reads few of its rows, all others are zeros.

    Autograd would make a table of zeros for every batch, half as large as a small BERT. Here there is one for the whole
    run, and just the rows that were read are filled and cleared: the same sums, bit for bit.
    """

    def __init__(self, embedding: nn.Embedding):
        self.embedding = embedding
        self.table = torch.zeros_like(embedding.weight)
        self.read: list[Tensor] = []  # the rows that are not zero, batch by batch

    @contextmanager
    def collecting(self) -> Iterator[None]:
        """Around forward and backward of each batch of a step; after it the weight has a usual gradient."""
        self.embedding.sparse, self.embedding.weight.grad = True, None
        try:
            yield
        finally:
            self.embedding.sparse = False
        if self.embedding.weight.grad is not None:
            self._add(self.embedding.weight.grad)
        self.embedding.weight.grad = self.table

    def _add(self, found: Tensor) -> None:
        """A batch's own sums first, as autograd adds them up."""
        rows, which = found._indices()[0].unique(return_inverse=True)
        sums = self.table.new_zeros(len(rows), self.table.shape[1]).index_add_(0, which, found._values())
        self.table.index_add_(0, rows, sums)
        self.read.append(rows)

    def clear(self) -> None:
        """Once the optimiser has made its step."""
        while self.read:
            self.table.index_fill_(0, self.read.pop(), 0.0)


class WholeGradient:
    """As autograd makes it."""

    @contextmanager
    def collecting(self) -> Iterator[None]:
        yield

    def clear(self) -> None:
        pass


def embedding_gradient(model: nn.Module, crew: Alone | Crew) -> RowGradient | WholeGradient:
    """By rows where nothing else uses the table, as a language model does, and no other process waits for it."""
    if not isinstance(model, Model):
        return WholeGradient()
    tokens = model.body.embedding.tokens
    alone = crew.size == 1 and not crew.sharded and tokens.weight.device.type == "cpu"
    if alone and model.lm_head is None and tokens.weight.requires_grad:
        return RowGradient(tokens)
    return WholeGradient()


def clip(model: nn.Module, most: float) -> float:
    """The norm of all gradients together. If it is larger than `most`, and finite, they are scaled down to that."""
    weights = [weight for weight in model.parameters() if weight.grad is not None]
    norm = torch.nn.utils.get_total_norm([weight.grad for weight in weights if weight.grad is not None])
    length = whole_of(norm).item()
    if math.isfinite(length) and length + 1e-6 >= most:  # as torch has it, which multiplies by 1 below that
        torch.nn.utils.clip_grads_with_norm_(weights, most, norm)
    return length
