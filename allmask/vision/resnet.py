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

from collections import OrderedDict
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
            fits = isinstance(values, tuple) and all(_within(value, name) for value in values)
            self._expect(name, fits, f"numbers from 1 to {_LIMITS[name]:,}")
        if not _within(len(self.blocks), "stages") or len(self.blocks) != len(self.widths):
            raise CheckpointError(
                f"config: {len(self.blocks)} stages of blocks, {len(self.widths)} of widths; expected 1 to 8 of both"
            )
        for name in ("channels", "classes"):
            self._expect(name, _within(getattr(self, name), name), f"a whole number from 1 to {_LIMITS[name]:,}")
        for name, words in (("shortcut", SHORTCUTS), ("stem", STEMS)):
            self._expect(name, getattr(self, name) in words, f"one of {', '.join(words)}")
        for name in ("bottleneck", "early_stride"):
            self._expect(name, isinstance(getattr(self, name), bool), "true or false")

    def _expect(self, name: str, fits: bool, expected: str) -> None:
        if not fits:
            raise CheckpointError(f"config: {name} is {getattr(self, name)!r}; expected {expected}")

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


def small(depth: int) -> ResNetConfig:
    """The networks for CIFAR-10: three stages of n basic blocks, 6n + 2 layers, shortcuts without parameters."""
    if depth < 8 or depth % 6 != 2:
        raise UsageError(f"a small ResNet of {depth} layers: not 6n + 2", "take 20, 32, 44, 56, 110 or 1202")
    return ResNetConfig(((depth - 2) // 6,) * 3, (16, 32, 64), shortcut="A", stem="small", classes=10)


def plain(config: ResNetConfig) -> ResNetConfig:
    """The same layers without shortcuts."""
    return replace(config, shortcut="none")


_CONFIGS = {
    "resnet18": ResNetConfig(),
    "resnet34": ResNetConfig((3, 4, 6, 3)),
    "resnet50": ResNetConfig((3, 4, 6, 3), bottleneck=True),
    "resnet101": ResNetConfig((3, 4, 23, 3), bottleneck=True),
    "resnet152": ResNetConfig((3, 8, 36, 3), bottleneck=True),
    **{f"resnet{depth}": small(depth) for depth in (20, 32, 44, 56, 110, 1202)},
}
_CONFIGS |= {name.replace("resnet", "plain"): plain(config) for name, config in _CONFIGS.items()}
PRESETS = {name: partial(replace, config) for name, config in _CONFIGS.items()}  # functions, as all presets are


# ---- parts -----------------------------------------------------------------------------------------------------


def _named(**parts: nn.Module) -> nn.Sequential:
    """Modules in sequence; the names are those of the weights in our files."""
    return nn.Sequential(OrderedDict(parts))


def _convolution(inputs: int, outputs: int, kernel: int, stride: int = 1) -> nn.Sequential:
    """A convolution and batch norm. The norm has a bias, so the convolution needs none."""
    conv = nn.Conv2d(inputs, outputs, kernel, stride, padding=kernel // 2, bias=False)
    return _named(conv=conv, norm=nn.BatchNorm2d(outputs))


class Chain(nn.ModuleList):
    """Modules in sequence, as the list of layers that `signal_report` looks for."""

    def forward(self, x: Tensor) -> Tensor:
        for part in self:
            x = part(x)
        return x


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


def _branch(config: ResNetConfig, inputs: int, width: int, stride: int) -> Branch:
    if not config.bottleneck:
        return Branch([_convolution(inputs, width, 3, stride), _convolution(width, width, 3)])
    first, middle = (stride, 1) if config.early_stride else (1, stride)
    down, up = _convolution(inputs, width, 1, first), _convolution(width, config.outputs_of(width), 1)
    return Branch([down, _convolution(width, width, 3, middle), up])


def _shortcut(kind: str, inputs: int, outputs: int, stride: int) -> nn.Module:
    same = inputs == outputs and stride == 1
    if kind == "C" or (kind == "B" and not same):
        return _convolution(inputs, outputs, 1, stride)
    if kind == "A" and outputs < inputs:
        raise UsageError(f"shortcut A cannot turn {inputs} channels into {outputs}", "it only adds channels; take B")
    return nn.Identity() if same else Padded(inputs, outputs, stride)


def _stage(config: ResNetConfig, inputs: int, number: int) -> nn.Sequential:
    """Blocks of the same width."""
    width, kind, blocks = config.widths[number], config.shortcut, []
    outputs = config.outputs_of(width)
    for block in range(config.blocks[number]):
        stride = 2 if number and not block else 1  # no stride in the first stage, which follows the stem
        branch = _branch(config, inputs, width, stride)
        if kind == "none":
            blocks.append(_named(branch=branch, relu=nn.ReLU(inplace=True)))
        else:
            blocks.append(Residual(branch, _shortcut(kind, inputs, outputs, stride)))
        inputs = outputs
    return _named(layers=Chain(blocks))


# ---- the network -----------------------------------------------------------------------------------------------


class ResNet(nn.Module):
    """Normalized images (B, C, H, W) to logits (B, classes)."""

    def __init__(self, config: ResNetConfig):
        super().__init__()
        self.config = config
        large = config.stem == "large"
        first = config.widths[0]
        self.stem = _convolution(config.channels, first, 7, 2) if large else _convolution(config.channels, first, 3)
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
    from torch.utils.flop_counter import FlopCounterMode

    training = network.training
    try:
        with FlopCounterMode(display=False) as counter:
            network.eval()(inputs)
    finally:
        network.train(training)
    return counter.get_total_flops() // 2
