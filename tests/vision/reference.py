"""A ResNet as plain code over a state dict with torchvision's names: what the module is compared with."""

from __future__ import annotations

import torch
import torch.nn.functional as F


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
