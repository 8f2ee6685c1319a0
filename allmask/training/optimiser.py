"""AdamW with bias correction and decoupled decay (arXiv 1711.05101), or SGD with momentum, whose decay is a part of the
gradient; norms and biases are not decayed.

With layer-wise rates (arXiv 1801.06146, 1905.05583) what lies deeper learns more slowly: heads and the last norm at the
rate itself, the last layer at `layer_decay` of it, the one below at that of that, and so on to the embedding. Of two
stacks, an encoder and a decoder, each counts from its own last layer, and the embedding is below both.
"""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import nn

from allmask.errors import UsageError
from allmask.training.settings import Settings

_LAYER = re.compile(r"body\.(encoder\.|decoder\.|)(?:layers|bridges)\.(\d+)\.")  # a bridge is how a layer begins
_LOWEST = re.compile(r"body\.embedding\.|body\.(encoder\.|decoder\.|)relative\.")  # tokens, places, distances


def optimiser_of(model: nn.Module, settings: Settings) -> torch.optim.Optimizer:
    return {"adamw": adamw, "sgd": sgd}[settings.optimiser](model, settings)


def adamw(model: nn.Module, settings: Settings) -> torch.optim.AdamW:
    fused = all(p.device.type in ("cpu", "cuda") for p in model.parameters() if p.requires_grad)
    how: dict[str, Any] = {"lr": settings.lr, "betas": settings.betas, "eps": settings.epsilon, "fused": fused}
    optimiser = torch.optim.AdamW(_groups(model, settings), **how)
    _learn_by_layer(optimiser, settings)
    return optimiser


def sgd(model: nn.Module, settings: Settings) -> torch.optim.SGD:
    """v ← momentum · v + g + decay · w, w ← w − lr · v. What has no gradient yet has no v, so it is not fused."""
    optimiser = torch.optim.SGD(_groups(model, settings), lr=settings.lr, momentum=settings.momentum)
    _learn_by_layer(optimiser, settings)
    return optimiser


def _groups(model: nn.Module, settings: Settings) -> list[dict[str, Any]]:
    named = {name: p for name, p in model.named_parameters() if p.requires_grad}
    groups: list[dict[str, Any]] = []
    for share, names in _by_share(list(named), settings.layer_decay).items():
        parameters = [named[name] for name in names]
        groups += [
            {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": settings.weight_decay, "share": share},
            {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0, "share": share},
        ]
    return groups


def _learn_by_layer(optimiser: torch.optim.Optimizer, settings: Settings) -> None:
    if settings.layer_decay is not None:
        # whoever sets the rate of a step sets one for all: each group takes its share just while it steps
        optimiser.register_step_pre_hook(lambda used, *_: _scale(used, back=False))
        optimiser.register_step_post_hook(lambda used, *_: _scale(used, back=True))


def _by_share(names: list[str], decay: float | None) -> dict[float, list[str]]:
    """Names of parameters by their share of the learning rate."""
    if decay is None:
        return {1.0: names}
    layers: dict[str, int] = {}  # how many, of each stack
    for found in filter(None, map(_LAYER.match, names)):
        layers[found[1]] = max(layers.get(found[1], 0), int(found[2]) + 1)
    if not layers:
        raise UsageError("layer_decay: no layer of this model learns", "leave --layer-decay out")
    shares: dict[float, list[str]] = {}
    for name in names:
        shares.setdefault(decay ** _below(name, layers), []).append(name)
    return shares


def _below(name: str, layers: dict[str, int]) -> int:
    """How many steps below the heads: a stack's last layer 1, its first as many as it has, the embedding one more."""
    if _LOWEST.match(name):
        return max(layers.values()) + 1
    found = _LAYER.match(name)
    return layers[found[1]] - int(found[2]) if found else 0


def _scale(optimiser: torch.optim.Optimizer, back: bool) -> None:
    for group in optimiser.param_groups:
        if back:
            group["lr"] = group["whole"]
        else:
            group["whole"], group["lr"] = group["lr"], group["lr"] * group["share"]
