"""From gradients to a step of the optimizer.

AdamW with bias correction and decoupled decay (arXiv 1711.05101), or SGD with momentum, whose decay is part of the
gradient. Norms and biases are not decayed.

Layer-wise rates (arXiv 1801.06146, 1905.05583): heads and the last norm learn at the full rate, the last layer at
`layer_decay` of it, the layer below at `layer_decay` of that, and so on down to the embedding. An encoder and a decoder
each count from their own last layer; the embedding is below both.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from allmask.errors import UsageError
from allmask.model import Model
from allmask.options import Settings
from allmask.training.process_group import ProcessGroup, SingleProcess
from allmask.training.strategy import whole_of

_LAYER = re.compile(r"body\.(encoder\.|decoder\.|)(?:layers|bridges)\.(\d+)\.")  # a bridge is how a layer begins
_LOWEST = re.compile(r"body\.embedding\.|body\.(encoder\.|decoder\.|)relative\.")  # tokens, positions, distances


def optimizer_for(model: nn.Module, settings: Settings) -> torch.optim.Optimizer:
    return {"adamw": adamw, "sgd": sgd}[settings.optimizer](model, settings)


def adamw(model: nn.Module, settings: Settings) -> torch.optim.AdamW:
    fused = all(p.device.type in ("cpu", "cuda") for p in model.parameters() if p.requires_grad)
    how: dict[str, Any] = {"lr": settings.lr, "betas": settings.betas, "eps": settings.adam_eps, "fused": fused}
    optimizer = torch.optim.AdamW(_groups(model, settings), **how)
    _learn_by_layer(optimizer, settings)
    return optimizer


def sgd(model: nn.Module, settings: Settings) -> torch.optim.SGD:
    """v ← momentum · v + g + decay · w, w ← w − lr · v. What has no gradient yet has no v, so it is not fused."""
    optimizer = torch.optim.SGD(_groups(model, settings), lr=settings.lr, momentum=settings.momentum)
    _learn_by_layer(optimizer, settings)
    return optimizer


def _groups(model: nn.Module, settings: Settings) -> list[dict[str, Any]]:
    """Parameter groups: by share of the learning rate, and matrices, which are decayed, apart from vectors."""
    named = {name: p for name, p in model.named_parameters() if p.requires_grad}
    groups: list[dict[str, Any]] = []
    for share, names in _by_share(list(named), settings.layer_decay).items():
        parameters = [named[name] for name in names]
        groups += [
            {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": settings.weight_decay, "share": share},
            {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0, "share": share},
        ]
    return groups


# ---- layer-wise rates ----------------------------------------------------------------------------------------


def _by_share(names: list[str], decay: float | None) -> dict[float, list[str]]:
    """Names of parameters by their share of the learning rate."""
    if decay is None:
        return {1.0: names}
    layers: dict[str, int] = {}  # of each stack
    for found in filter(None, map(_LAYER.match, names)):
        layers[found[1]] = max(layers.get(found[1], 0), int(found[2]) + 1)
    if not layers:
        raise UsageError("layer_decay: no layer of this model is trained", "leave --layer-decay out")
    shares: dict[float, list[str]] = {}
    for name in names:
        shares.setdefault(decay ** _depth(name, layers), []).append(name)
    return shares


def _depth(name: str, layers: dict[str, int]) -> int:
    """Levels below the heads: 1 for a stack's last layer, its number of layers for the first, 1 more for embeddings."""
    if _LOWEST.match(name):
        return max(layers.values()) + 1
    found = _LAYER.match(name)
    return layers[found[1]] - int(found[2]) if found else 0


def _learn_by_layer(optimizer: torch.optim.Optimizer, settings: Settings) -> None:
    """Scale the rates of groups just while the optimizer steps: the loop sets one rate for all of them."""
    if settings.layer_decay is not None:
        optimizer.register_step_pre_hook(lambda used, *_: _scale(used, back=False))
        optimizer.register_step_post_hook(lambda used, *_: _scale(used, back=True))


def _scale(optimizer: torch.optim.Optimizer, back: bool) -> None:
    for group in optimizer.param_groups:
        if back:
            group["lr"] = group["whole"]
        else:
            group["whole"], group["lr"] = group["lr"], group["lr"] * group["share"]


# ---- gradients -----------------------------------------------------------------------------------------------


class RowGradient:
    """The gradient of an embedding that is only looked up: nonzero only in the few rows that a batch reads.

    Autograd would allocate a table of zeros for every batch, half as large as a small BERT. Here one table serves the
    whole run, and only the rows that were read are filled and cleared: the same sums, bit for bit.
    """

    def __init__(self, embedding: nn.Embedding):
        self.embedding = embedding
        self.table = torch.zeros_like(embedding.weight)
        self.read: list[Tensor] = []  # the nonzero rows, batch by batch

    @contextmanager
    def collecting(self) -> Iterator[None]:
        """Around forward and backward of each batch of a step; after it the weight has an ordinary gradient."""
        self.embedding.sparse, self.embedding.weight.grad = True, None
        try:
            yield
        finally:
            self.embedding.sparse = False
        if self.embedding.weight.grad is not None:
            self._add(self.embedding.weight.grad)
        self.embedding.weight.grad = self.table

    def _add(self, found: Tensor) -> None:
        """A batch's own sums first, in the order in which autograd adds them up."""
        rows, which = found._indices()[0].unique(return_inverse=True)
        sums = self.table.new_zeros(len(rows), self.table.shape[1]).index_add_(0, which, found._values())
        self.table.index_add_(0, rows, sums)
        self.read.append(rows)

    def clear(self) -> None:
        """Set the rows to zero again, once the optimizer has made its step."""
        while self.read:
            self.table.index_fill_(0, self.read.pop(), 0.0)


class WholeGradient:
    """The gradient of an embedding as autograd makes it."""

    @contextmanager
    def collecting(self) -> Iterator[None]:
        yield

    def clear(self) -> None:
        pass


def embedding_gradient(model: nn.Module, group: SingleProcess | ProcessGroup) -> RowGradient | WholeGradient:
    """By rows, where no language model head uses the table, too, and no other process waits for its gradient."""
    if not isinstance(model, Model):
        return WholeGradient()
    tokens = model.body.embedding.tokens
    alone = group.size == 1 and not group.sharded and tokens.weight.device.type == "cpu"
    if alone and model.lm_head is None and tokens.weight.requires_grad:
        return RowGradient(tokens)
    return WholeGradient()


def clip(model: nn.Module, most: float) -> float:
    """Scale all gradients together to a norm of at most `most`, if it is finite. Returns the norm before."""
    weights = [weight for weight in model.parameters() if weight.grad is not None]
    norm = torch.nn.utils.get_total_norm([weight.grad for weight in weights if weight.grad is not None])
    length = whole_of(norm).item()
    if math.isfinite(length) and length + 1e-6 >= most:  # below that torch would multiply by 1
        torch.nn.utils.clip_grads_with_norm_(weights, most, norm)
    return length
