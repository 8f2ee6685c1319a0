"""How many multiplications, each with its addition, an image costs, as papers count: convolutions and matrices."""

from __future__ import annotations

import torch
from torch import Tensor, nn


def multiply_adds(model: nn.Module, channels: int = 3, side: int = 224, width: int | None = None) -> int:
    """Of one image, which is square unless its width is given.

    A model on the meta device (`shape_of`) is counted without computing anything.
    """
    counted: list[int] = []

    def count(part: nn.Conv2d | nn.Linear, _: tuple, made: Tensor) -> None:
        counted.append(made.numel() * part.weight[0].numel())  # each number made is a sum over one kernel

    hooks = [part.register_forward_hook(count) for part in model.modules() if isinstance(part, nn.Conv2d | nn.Linear)]
    training, device = model.training, next(model.parameters()).device
    try:
        with torch.no_grad():
            model.eval()(torch.zeros(1, channels, side, width or side, device=device))
    finally:
        model.train(training)
        for hook in hooks:
            hook.remove()
    return sum(counted)


def vgg19() -> nn.Sequential:
    """What ResNet-34 is measured by (arXiv 1409.1556, column E), without numbers in it; for images of 224 × 224."""
    layers: list[nn.Module] = []
    inputs = 3
    with torch.device("meta"):
        for width, depth in ((64, 2), (128, 2), (256, 4), (512, 4), (512, 4)):
            for _ in range(depth):
                layers += [nn.Conv2d(inputs, width, 3, padding=1), nn.ReLU()]
                inputs = width
            layers.append(nn.MaxPool2d(2))
        dense = [nn.Linear(512 * 7 * 7, 4096), nn.ReLU(), nn.Linear(4096, 4096), nn.ReLU(), nn.Linear(4096, 1000)]
        return nn.Sequential(*layers, nn.Flatten(), *dense)
