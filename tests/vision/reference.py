"""References: a ResNet as plain code over a state dict with torchvision's names, and VGG-19."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from allmask.vision.resnet import ResNetConfig, shape_of


def _bn(state, name, x):
    return F.batch_norm(
        x, state[f"{name}.running_mean"], state[f"{name}.running_var"], state[f"{name}.weight"], state[f"{name}.bias"],
        training=False, eps=1e-5,
    )  # fmt: skip


def _conv(state, name, x, stride):
    weight = state[f"{name}.weight"]
    return F.conv2d(x, weight, stride=stride, padding=(weight.shape[-1] - 1) // 2)


def _block(state, name, x, stride, shortcut, early):
    strides = (stride, 1)
    if f"{name}.conv3.weight" in state:
        strides = (stride, 1, 1) if early else (1, stride, 1)
    y = x
    for number, step in enumerate(strides, 1):
        y = _bn(state, f"{name}.bn{number}", _conv(state, f"{name}.conv{number}", y, step))
        if number < len(strides):
            y = torch.relu(y)
    if not shortcut:
        return torch.relu(y)
    if f"{name}.downsample.0.weight" in state:
        x = _bn(state, f"{name}.downsample.1", _conv(state, f"{name}.downsample.0", x, stride))
    elif x.shape != y.shape:
        wide = torch.zeros_like(y)
        for row in range(y.shape[2]):
            for column in range(y.shape[3]):
                wide[:, : x.shape[1], row, column] = x[:, :, stride * row, stride * column]
        x = wide
    return torch.relu(y + x)


def resnet(state, x, shortcut=True, early=False):
    """Logits of images."""
    large = state["conv1.weight"].shape[-1] == 7
    x = torch.relu(_bn(state, "bn1", _conv(state, "conv1", x, 2 if large else 1)))
    if large:
        x = F.max_pool2d(x, kernel_size=3, stride=2, padding=1)
    stage = 1
    while f"layer{stage}.0.conv1.weight" in state:
        block = 0
        while f"layer{stage}.{block}.conv1.weight" in state:
            stride = 2 if stage > 1 and block == 0 else 1
            x = _block(state, f"layer{stage}.{block}", x, stride, shortcut, early)
            block += 1
        stage += 1
    x = F.adaptive_avg_pool2d(x, 1).flatten(1)
    return F.linear(x, state["fc.weight"], state["fc.bias"])


def vgg19() -> nn.Sequential:
    """VGG-19 (arXiv 1409.1556, column E) on the meta device, for images of 224 × 224."""
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


def image(side: int = 224) -> Tensor:
    """An image without pixels, on the meta device."""
    return torch.empty(1, 3, side, side, device="meta")


def parameters(config: ResNetConfig) -> int:
    """Number of trainable parameters."""
    return sum(parameter.numel() for parameter in shape_of(config).parameters())
