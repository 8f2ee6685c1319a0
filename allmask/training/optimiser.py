"""AdamW with bias correction and decoupled decay (arXiv 1711.05101), or SGD with momentum, whose decay is a part of the
gradient; norms and biases are not decayed.

With layer-wise rates (arXiv 1801.06146, 1905.05583) what lies deeper learns more slowly: heads and the last norm at the
rate itself, the last layer at `layer_decay` of it, the one below at that of that, and so on to the embedding.
"""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import nn

from allmask.training.settings import Settings

_LAYER = re.compile(r"body\.layers\.(\d+)\.")


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
    depths = {name: _depth(name) for name in names}
    top = max((int(found[1]) for found in map(_LAYER.match, names) if found), default=-1) + 2
    shares: dict[float, list[str]] = {}
    for name, depth in depths.items():
        shares.setdefault(decay ** (top - min(depth, top)), []).append(name)
    return shares


def _depth(name: str) -> int:
    """0 for the embedding, then the layers, and more than any of them for what comes after."""
    if name.startswith("body.embedding."):
        return 0
    found = _LAYER.match(name)
    return int(found[1]) + 1 if found else 1 << 30


def _scale(optimiser: torch.optim.Optimizer, back: bool) -> None:
    for group in optimiser.param_groups:
        if back:
            group["lr"] = group["whole"]
        else:
            group["whole"], group["lr"] = group["lr"], group["lr"] * group["share"]
