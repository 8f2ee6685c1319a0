"""Optimizers, layer-wise learning rates, and gradients.

AdamW with bias correction and decoupled weight decay (arXiv 1711.05101), or SGD with momentum, where weight decay is
part of the gradient. Norms and biases are not decayed.

Layer-wise rates (arXiv 1801.06146, 1905.05583): heads and the last norm have the full learning rate, the last layer has
`layer_decay` of it, the layer below `layer_decay` of that, and so on down to the embedding. An encoder and a decoder
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
from torch.optim.adamw import adamw as torchs_adamw

from allmask.errors import UsageError
from allmask.kernels import adamw as kernel
from allmask.model import Model
from allmask.options import Settings
from allmask.training.process_group import Group
from allmask.training.strategy import whole_of

_LAYER = re.compile(r"body\.(encoder\.|decoder\.|)(?:layers|bridges)\.(\d+)\.")  # a bridge is a part of a layer
_LOWEST = re.compile(r"body\.embedding\.|body\.(encoder\.|decoder\.|)relative\.")  # tokens, positions, distances


def optimizer_for(model: nn.Module, settings: Settings) -> torch.optim.Optimizer:
    optimizer = {"adamw": adamw, "sgd": sgd}[settings.optimizer](model, settings)
    if settings.layer_decay is not None:  # the loop sets one rate for all groups; it is scaled just while stepping
        optimizer.register_step_pre_hook(lambda used, *_: _scale(used, back=False))
        optimizer.register_step_post_hook(lambda used, *_: _scale(used, back=True))
    return optimizer


def _scale(optimizer: torch.optim.Optimizer, back: bool) -> None:
    for group in optimizer.param_groups:
        if back:
            group["lr"] = group["whole"]
        else:
            group["whole"], group["lr"] = group["lr"], group["lr"] * group["share"]


def adamw(model: nn.Module, settings: Settings) -> torch.optim.AdamW:
    trained = [p for p in model.parameters() if p.requires_grad]
    fused = all(p.device.type in ("cpu", "cuda") for p in trained)
    how: dict[str, Any] = {"lr": settings.lr, "betas": settings.betas, "eps": settings.adam_eps, "fused": fused}
    whole = all(p.device.type == "cpu" and type(p.data) is Tensor for p in trained)  # not sharded
    return (ClippingAdamW if whole and kernel.library() is not None else torch.optim.AdamW)(
        _groups(model, settings), **how
    )


class ClippingAdamW(torch.optim.AdamW):
    """torch's fused AdamW, which also clips, and knows which rows of an embedding were ever read; the same bits.

    Clipping sets `factor`, by which the next step multiplies gradients. `table` may be the embedding's `RowGradient`.
    """

    factor = 1.0
    table: RowGradient | None = None
    _read: Tensor | None = None  # uint8: whether each row of the table ever had a gradient

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            lists: tuple[list[Tensor], ...] = ([], [], [], [], [], [])
            self._init_group(group, *lists)  # type: ignore[call-arg]
            ours, theirs = [], []
            for weight, grad, mean, square, step in zip(*lists[:4], lists[5], strict=True):
                if kernel.suits(weight, grad):  # the averages are like the weight
                    count = step.add_(1).item()
                    ours.append(kernel.Moving(weight, grad, mean, square, count, self._rows_of(weight)))
                else:  # of a size that is no multiple of 16
                    theirs.append((weight, grad.mul_(self.factor), mean, square, step))
            first, second = group["betas"]
            rates = {"lr": group["lr"], "eps": group["eps"], "weight_decay": group["weight_decay"]}
            if ours:
                kernel.update(ours, kernel.Rates(betas=(first, second), factor=self.factor, **rates))
            if theirs:
                weights, grads, means, squares, steps = map(list, zip(*theirs, strict=True))
                how = {"fused": True, "amsgrad": False, "maximize": False, "beta1": first, "beta2": second}
                torchs_adamw(weights, grads, means, squares, [], steps, **how, **rates)
        self.factor = 1.0

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self._read = None

    def _rows_of(self, weight: Tensor) -> Tensor | None:
        """Return which rows of the table ever had a gradient, this step's included; None for other weights."""
        if self.table is None or weight is not self.table.embedding.weight or weight.shape[1] % kernel.LANES:
            return None
        read = self._read
        if read is None:  # the first step, or the first one with a loaded state
            state = self.state[weight]
            self._read = read = (state["exp_avg"].any(1) | state["exp_avg_sq"].any(1)).to(torch.uint8)
        for rows in self.table.read:
            read.index_fill_(0, rows, 1)
        return read


def sgd(model: nn.Module, settings: Settings) -> torch.optim.SGD:
    """v ← momentum · v + g + decay · w, w ← w − lr · v. Not fused: a weight without a gradient so far has no v."""
    return torch.optim.SGD(_groups(model, settings), lr=settings.lr, momentum=settings.momentum)


def _groups(model: nn.Module, settings: Settings) -> list[dict[str, Any]]:
    """Make parameter groups: by share of the learning rate, and matrices, which are decayed, apart from vectors."""
    named = {name: p for name, p in model.named_parameters() if p.requires_grad}
    groups: list[dict[str, Any]] = []
    for share, names in _by_share(list(named), settings.layer_decay).items():
        parameters = [named[name] for name in names]
        groups += [
            {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": settings.weight_decay, "share": share},
            {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0, "share": share},
        ]
    return groups


def _by_share(names: list[str], decay: float | None) -> dict[float, list[str]]:
    """Group the names of parameters by their share of the learning rate."""
    if decay is None:
        return {1.0: names}
    layers: dict[str, int] = {}  # number of layers of each stack
    for found in filter(None, map(_LAYER.match, names)):
        layers[found[1]] = max(layers.get(found[1], 0), int(found[2]) + 1)
    if not layers:
        raise UsageError("layer_decay: no layer of this model is trained", "leave --layer-decay out")
    shares: dict[float, list[str]] = {}
    for name in names:
        found = _LAYER.match(name)
        depth = layers[found[1]] - int(found[2]) if found else 0  # below the heads: 1 for the last layer of a stack
        if _LOWEST.match(name):
            depth = max(layers.values()) + 1
        shares.setdefault(decay**depth, []).append(name)
    return shares


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
        """Use this around forward and backward of each batch; after it the weight has an ordinary gradient."""
        self.embedding.sparse, self.embedding.weight.grad = True, None
        try:
            yield
        finally:
            self.embedding.sparse = False
        found: Tensor | None = self.embedding.weight.grad
        if found is not None:  # sum within the batch first, as autograd does
            rows, which = found._indices()[0].unique(return_inverse=True)
            sums = self.table.new_zeros(len(rows), self.table.shape[1]).index_add_(0, which, found._values())
            self.table.index_add_(0, rows, sums)
            self.read.append(rows)
        self.embedding.weight.grad = self.table

    def nonzero(self) -> Tensor:
        """Return the rows that were read. Their norm has the bits of the table's: zeros add nothing to sums."""
        return self.table[torch.cat(self.read).unique()] if self.read else self.table[:0]

    def clear(self) -> None:
        """Set the rows to zero again, after the optimizer's step."""
        while self.read:
            self.table.index_fill_(0, self.read.pop(), 0.0)


class TiedGradient:
    """The gradient of an embedding that is also the output matrix of a language model, whose gradient is dense.

    Autograd would add a table of zeros to that, with the few rows that a batch reads. Here just those rows are added.
    """

    def __init__(self, embedding: nn.Embedding):
        self.embedding = embedding

    @contextmanager
    def collecting(self) -> Iterator[None]:
        """Use this around forward and backward of each batch; after it the weight has an ordinary gradient."""
        self.embedding.sparse = True
        try:
            yield
        finally:
            self.embedding.sparse = False
        found: Tensor | None = self.embedding.weight.grad
        if found is not None and found.is_sparse:  # this batch had no loss of the language model
            self.embedding.weight.grad = found.to_dense()

    def clear(self) -> None:
        pass


class WholeGradient:
    """The gradient of an embedding as autograd computes it."""

    @contextmanager
    def collecting(self) -> Iterator[None]:
        yield

    def clear(self) -> None:
        pass


def embedding_gradient(model: nn.Module, group: Group) -> RowGradient | TiedGradient | WholeGradient:
    """Choose gradients by rows if no other process needs the gradient of the table.

    With NTK parametrization the whole table is multiplied by its scale: it is no leaf, and its gradient is dense.
    """
    if not isinstance(model, Model):
        return WholeGradient()
    tokens = model.body.embedding.tokens
    alone = group.size == 1 and not group.sharded and tokens.weight.device.type == "cpu"
    if alone and tokens.weight.requires_grad and tokens.weight.is_leaf:
        return RowGradient(tokens) if model.lm_head is None else TiedGradient(tokens)
    return WholeGradient()


def clip(model: nn.Module, most: float, optimizer: torch.optim.Optimizer | None = None) -> float:
    """Scale all gradients together to a norm of at most `most`, if it is finite. Return the norm before.

    A `ClippingAdamW` is told to scale them in its step.
    """
    clipping = optimizer if isinstance(optimizer, ClippingAdamW) else None
    table = None if clipping is None else clipping.table
    weights = [weight for weight in model.parameters() if weight.grad is not None]
    grads = [weight.grad for weight in weights if weight.grad is not None]
    if clipping is not None:
        clipping.factor = 1.0
        grads = [grad if table is None or grad is not table.table else table.nonzero() for grad in grads]
    norm = torch.nn.utils.get_total_norm(grads)
    length = whole_of(norm).item()
    if math.isfinite(length) and length + 1e-6 >= most:  # below that torch would multiply by 1
        if clipping is None:
            torch.nn.utils.clip_grads_with_norm_(weights, most, norm)
        else:
            clipping.factor = (most / (norm + 1e-6)).clamp(max=1.0).item()
    return length
