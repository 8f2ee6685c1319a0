"""AdamW with bias correction and decoupled decay (arXiv 1711.05101); norms and biases are not decayed."""

from __future__ import annotations

import torch
from torch import nn

from allmask.training.settings import Settings


def adamw(model: nn.Module, settings: Settings) -> torch.optim.AdamW:
    parameters = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": settings.weight_decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    fused = all(p.device.type in ("cpu", "cuda") for p in parameters)
    return torch.optim.AdamW(groups, lr=settings.lr, betas=settings.betas, eps=settings.epsilon, fused=fused)
