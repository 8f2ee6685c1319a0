"""Residual networks (arXiv 1512.03385): 18 to 152 layers for large images, 20 to 1202 for small ones.

A block computes relu(branch(x) + shortcut(x)). Its branch is one of

    basic         3×3, 3×3                        two layers of the same width
    bottleneck    1×1 down, 3×3, 1×1 up by four   three layers, for about the operations of two layers a quarter as wide

Where a block changes the shape of its input, the shortcut has to change it, too:

    A       take every second pixel and pad new channels with zeros
    B       a strided 1×1 convolution where the shape changes, the identity elsewhere
    C       a 1×1 convolution in every block
    none    a plain network: the same branches without shortcuts

Shapes: B images, C channels, H × W pixels.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Generator, Tensor, nn

from allmask.errors import CheckpointError, UsageError
from allmask.nn.init import he, normal

EXPANSION = 4  # output channels of a bottleneck / its inner channels
SHORTCUTS = ("A", "B", "C", "none")
STEMS = ("large", "small")
_LIMITS = {"stages": 8, "blocks": 1_000, "widths": 16_384, "channels": 1_024, "classes": 1_000_000}  # more is a mistake


@dataclass(frozen=True)
class ResNetConfig:
    """The shape of a residual network."""

    blocks: tuple[int, ...] = (2, 2, 2, 2)  # per stage; each stage after the first halves height and width
    widths: tuple[int, ...] = (64, 128, 256, 512)  # inner channels of each stage
    bottleneck: bool = False
    shortcut: str = "B"  # A, B, C or none
    stem: str = "large"  # 7×7 and max pooling, which reduce each side to a quarter; "small": 3×3, stride 1
    early_stride: bool = False  # stride in a bottleneck's first 1×1, as in the paper; torchvision: in its 3×3
    channels: int = 3
    classes: int = 1000

    def __post_init__(self):
        for name in ("blocks", "widths"):
            values = getattr(self, name)
            if not isinstance(values, tuple) or not all(_within(value, name) for value in values):
                raise CheckpointError(f"config: {name} is {values!r}; expected numbers from 1 to {_LIMITS[name]:,}")
        if not _within(len(self.blocks), "stages") or len(self.blocks) != len(self.widths):
            raise CheckpointError(
                f"config: {len(self.blocks)} stages of blocks, {len(self.widths)} of widths; expected 1 to 8 of both"
            )
        for name in ("channels", "classes"):
            if not _within(getattr(self, name), name):
                raise CheckpointError(
                    f"config: {name} is {getattr(self, name)!r}; expected a whole number from 1 to {_LIMITS[name]:,}"
                )
        for name, words in (("shortcut", SHORTCUTS), ("stem", STEMS)):
            if getattr(self, name) not in words:
                raise CheckpointError(f"config: {name} is {getattr(self, name)!r}; expected one of {', '.join(words)}")
        for name in ("bottleneck", "early_stride"):
            if not isinstance(getattr(self, name), bool):
                raise CheckpointError(f"config: {name} is {getattr(self, name)!r}; expected true or false")

    @property
    def depth(self) -> int:
        """Number of layers with weights on the longest path: first convolution, branches, output layer."""
        return 2 + (3 if self.bottleneck else 2) * sum(self.blocks)

    @property
    def features(self) -> int:
        """Inputs of the output layer."""
        return self.outputs_of(self.widths[-1])

    def outputs_of(self, width: int) -> int:
        """Output channels of a block with `width` inner channels."""
        return EXPANSION * width if self.bottleneck else width


def _within(value: object, name: str) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= _LIMITS[name]


# ---- presets ---------------------------------------------------------------------------------------------------


def resnet18() -> ResNetConfig:
    return ResNetConfig()


def resnet34() -> ResNetConfig:
    return replace(resnet18(), blocks=(3, 4, 6, 3))


def resnet50() -> ResNetConfig:
    return replace(resnet34(), bottleneck=True)


def resnet101() -> ResNetConfig:
    return replace(resnet50(), blocks=(3, 4, 23, 3))


def resnet152() -> ResNetConfig:
    return replace(resnet50(), blocks=(3, 8, 36, 3))


def small(depth: int) -> ResNetConfig:
    """The networks for CIFAR-10: three stages of n basic blocks, 6n + 2 layers, shortcuts without parameters."""
    if depth < 8 or depth % 6 != 2:
        raise UsageError(f"a small ResNet of {depth} layers: not 6n + 2", "take 20, 32, 44, 56, 110 or 1202")
    return ResNetConfig(((depth - 2) // 6,) * 3, (16, 32, 64), shortcut="A", stem="small", classes=10)


def plain(config: ResNetConfig) -> ResNetConfig:
    """The same layers without shortcuts."""
    return replace(config, shortcut="none")


def _presets() -> dict[str, Callable[[], ResNetConfig]]:
    presets = {make.__name__: make for make in (resnet18, resnet34, resnet50, resnet101, resnet152)}
    presets |= {f"resnet{depth}": partial(small, depth) for depth in (20, 32, 44, 56, 110, 1202)}
    without = {name.replace("resnet", "plain"): lambda make=make: plain(make()) for name, make in presets.items()}
    return presets | without


PRESETS = _presets()  # "resnet18", …, "resnet1202", and "plain18", … without shortcuts


# ---- parts -----------------------------------------------------------------------------------------------------


class Convolution(nn.Module):
    """A convolution and batch norm. The norm has a bias, so the convolution needs none."""

    def __init__(self, inputs: int, outputs: int, kernel: int, stride: int = 1):
        super().__init__()
        self.conv = nn.Conv2d(inputs, outputs, kernel, stride, padding=kernel // 2, bias=False)
        self.norm = nn.BatchNorm2d(outputs)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.conv(x))


class Branch(nn.ModuleList):
    """Convolutions with ReLU between them, and none after the last."""

    def forward(self, x: Tensor) -> Tensor:
        for number, step in enumerate(self):
            x = step(F.relu(x, inplace=True) if number else x)
        return x


class Padded(nn.Module):
    """Shortcut A: take every `stride`-th pixel and pad new channels with zeros."""

    def __init__(self, inputs: int, outputs: int, stride: int):
        super().__init__()
        self.extra, self.stride = outputs - inputs, stride

    def forward(self, x: Tensor) -> Tensor:
        return _SampleAndPad.apply(x, self.extra, self.stride)


class _SampleAndPad(torch.autograd.Function):
    """The operation of `Padded` with a backward in one pass; autograd's takes one for each slice and the padding."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, extra: int, stride: int) -> Tensor:
        ctx.save_for_backward(x)
        ctx.stride = stride
        return F.pad(x[..., ::stride, ::stride], (0, 0, 0, 0, 0, extra))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        (x,) = ctx.saved_tensors
        full = torch.zeros_like(x)  # keeps the memory layout of x
        full[..., :: ctx.stride, :: ctx.stride] = gradient[:, : x.shape[1]]
        return full, None, None


class Residual(nn.Module):
    def __init__(self, branch: Branch, shortcut: nn.Module):
        super().__init__()
        self.branch, self.shortcut = branch, shortcut

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.branch(x).add_(self.shortcut(x)), inplace=True)


class Plain(nn.Module):
    def __init__(self, branch: Branch):
        super().__init__()
        self.branch = branch

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.branch(x), inplace=True)


class Stage(nn.Module):
    """Blocks of the same width."""

    def __init__(self, blocks: list[nn.Module]):
        super().__init__()
        self.layers = nn.ModuleList(blocks)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def _branch(config: ResNetConfig, inputs: int, width: int, stride: int) -> Branch:
    if not config.bottleneck:
        return Branch([Convolution(inputs, width, 3, stride), Convolution(width, width, 3)])
    first, middle = (stride, 1) if config.early_stride else (1, stride)
    down, up = Convolution(inputs, width, 1, first), Convolution(width, config.outputs_of(width), 1)
    return Branch([down, Convolution(width, width, 3, middle), up])


def _shortcut(kind: str, inputs: int, outputs: int, stride: int) -> nn.Module:
    same = inputs == outputs and stride == 1
    if kind == "C" or (kind == "B" and not same):
        return Convolution(inputs, outputs, 1, stride)
    if kind == "A" and outputs < inputs:
        raise UsageError(f"shortcut A cannot turn {inputs} channels into {outputs}", "it only adds channels; take B")
    return nn.Identity() if same else Padded(inputs, outputs, stride)


def _stage(config: ResNetConfig, inputs: int, number: int) -> Stage:
    width, kind, blocks = config.widths[number], config.shortcut, []
    outputs = config.outputs_of(width)
    for block in range(config.blocks[number]):
        stride = 2 if number and not block else 1  # no stride in the first stage, which follows the stem
        branch = _branch(config, inputs, width, stride)
        blocks.append(Plain(branch) if kind == "none" else Residual(branch, _shortcut(kind, inputs, outputs, stride)))
        inputs = outputs
    return Stage(blocks)


# ---- the network -----------------------------------------------------------------------------------------------


class ResNet(nn.Module):
    """Normalized images (B, C, H, W) to logits (B, classes)."""

    def __init__(self, config: ResNetConfig):
        super().__init__()
        self.config = config
        large = config.stem == "large"
        first = config.widths[0]
        self.stem = Convolution(config.channels, first, 7, 2) if large else Convolution(config.channels, first, 3)
        self.pool = nn.MaxPool2d(3, 2, padding=1) if large else nn.Identity()
        self.stages = nn.ModuleDict()  # "1", "2", …
        for number, inputs in enumerate([first, *map(config.outputs_of, config.widths[:-1])]):
            self.stages[str(number + 1)] = _stage(config, inputs, number)
        self.head = nn.Linear(config.features, config.classes)

    def features(self, x: Tensor) -> Tensor:
        """Global average of the last feature maps, (B, F): the input of the output layer."""
        if x.ndim != 4 or x.shape[1] != self.config.channels:
            raise UsageError(f"images of shape {tuple(x.shape)}; expected (B, {self.config.channels}, H, W)")
        x = self.pool(F.relu(self.stem(x), inplace=True))
        for stage in self.stages.values():
            x = stage(x)
        return x.mean((2, 3))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.features(x))


def shape_of(config: ResNetConfig) -> ResNet:
    """A network on the meta device: it has shapes and no values, to be counted or filled from a file."""
    with torch.device("meta"):
        return ResNet(config)


def fresh(config: ResNetConfig, rng: Generator | None = None) -> ResNet:
    """A new network: He initialization of convolutions, and a small output layer, so all classes are equally likely.

    He's scale is by fan-out: norms fix the scale of the signal, so it is the gradient's scale that has to be kept.
    """
    model = shape_of(config).to_empty(device="cpu")
    for part in model.modules():
        if isinstance(part, nn.Conv2d):
            he(part.weight, rng, by="out")
        elif isinstance(part, nn.BatchNorm2d):
            part.reset_parameters()
    normal(model.head.weight, 0.01, rng)
    nn.init.zeros_(model.head.bias)
    return model


@torch.no_grad()
def multiply_adds(network: nn.Module, inputs: Tensor) -> int:
    """Count multiply-adds of convolutions and linear layers for one input (1, …), as papers do.

    On the meta device (`shape_of`) nothing is computed.
    """
    counts: list[int] = []

    def count(part: nn.Module, given: tuple[Tensor, ...], output: Tensor) -> None:
        if isinstance(part, nn.ConvTranspose2d):  # each input is multiplied by a kernel
            counts.append(given[0].numel() * part.weight[0].numel())
        elif isinstance(part, nn.Linear | nn.Conv2d):  # each output is a sum over a kernel
            counts.append(output.numel() * part.weight[0].numel())

    hooks = [part.register_forward_hook(count) for part in network.modules()]
    training = network.training
    try:
        network.eval()(inputs)
    finally:
        network.train(training)
        for hook in hooks:
            hook.remove()
    return sum(counts)
