"""Residual networks (arXiv 1512.03385): 18 to 152 layers for large images, 20 to 1202 for small ones.

A block is a short branch of convolutions beside a shortcut, and what leaves it is relu(branch(x) + shortcut(x)):

    basic         3×3, 3×3                        two layers of one width
    bottleneck    1×1 down, 3×3, 1×1 up by four   three layers, about as many operations as two of a quarter the width

Where a block changes the size of its input, the shortcut must, too, and there are three ways to do that. A: take every
second pixel and fill new channels with zeros. B: a strided 1×1 convolution there, nothing elsewhere. C: a convolution
in every block. The plain twin of a network has the same branches and no shortcuts.

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

EXPANSION = 4  # of what a bottleneck gives, to what it computes with
SHORTCUTS = ("A", "B", "C", "none")
STEMS = ("large", "small")
_MOST = {"stages": 8, "blocks": 1_000, "widths": 16_384, "channels": 1_024, "classes": 1_000_000}  # more is a mistake


@dataclass(frozen=True)
class ResNetConfig:
    """What a residual network is made of."""

    blocks: tuple[int, ...] = (2, 2, 2, 2)  # in each stage; from one stage to the next, sides are halved
    widths: tuple[int, ...] = (64, 128, 256, 512)  # channels that a stage computes with
    bottleneck: bool = False
    shortcut: str = "B"  # "none": the plain twin
    stem: str = "large"  # 7×7 and a pool, a quarter of each side; "small": 3×3, every pixel is kept
    early_stride: bool = False  # a bottleneck halves in its first 1×1, as in the paper; torchvision does in its 3×3
    channels: int = 3
    classes: int = 1000

    def __post_init__(self):
        for name in ("blocks", "widths"):
            values = getattr(self, name)
            if not isinstance(values, tuple) or not all(_within(value, name) for value in values):
                raise CheckpointError(f"config: {name} is {values!r}; expected numbers from 1 to {_MOST[name]:,}")
        if not _within(len(self.blocks), "stages") or len(self.blocks) != len(self.widths):
            raise CheckpointError(
                f"config: {len(self.blocks)} stages of blocks, {len(self.widths)} of widths; expected as many, 1 to 8"
            )
        for name in ("channels", "classes"):
            if not _within(getattr(self, name), name):
                raise CheckpointError(
                    f"config: {name} is {getattr(self, name)!r}; expected a whole number from 1 to {_MOST[name]:,}"
                )
        for name, words in (("shortcut", SHORTCUTS), ("stem", STEMS)):
            if getattr(self, name) not in words:
                raise CheckpointError(f"config: {name} is {getattr(self, name)!r}; expected one of {', '.join(words)}")
        for name in ("bottleneck", "early_stride"):
            if not isinstance(getattr(self, name), bool):
                raise CheckpointError(f"config: {name} is {getattr(self, name)!r}; expected true or false")

    @property
    def depth(self) -> int:
        """Layers with weights on the longest way: the first convolution, those of the branches, the output."""
        return 2 + (3 if self.bottleneck else 2) * sum(self.blocks)

    @property
    def features(self) -> int:
        """How many numbers the output layer reads."""
        return self.given_by(self.widths[-1])

    def given_by(self, width: int) -> int:
        """How many channels leave a block that computes with so many."""
        return EXPANSION * width if self.bottleneck else width


def _within(value: object, name: str) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= _MOST[name]


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
    """The family for CIFAR-10: three stages of n basic blocks, 6n + 2 layers, shortcuts without parameters."""
    if depth < 8 or depth % 6 != 2:
        raise UsageError(f"a small ResNet of {depth} layers: not 6n + 2", "take 20, 32, 44, 56, 110 or 1202")
    return ResNetConfig(((depth - 2) // 6,) * 3, (16, 32, 64), shortcut="A", stem="small", classes=10)


def plain(config: ResNetConfig) -> ResNetConfig:
    """The same layers without shortcuts."""
    return replace(config, shortcut="none")


def _presets() -> dict[str, Callable[[], ResNetConfig]]:
    made = {make.__name__: make for make in (resnet18, resnet34, resnet50, resnet101, resnet152)}
    made |= {f"resnet{depth}": partial(small, depth) for depth in (20, 32, 44, 56, 110, 1202)}
    twins = {name.replace("resnet", "plain"): partial(_plain_of, make) for name, make in made.items()}
    return made | twins


def _plain_of(make: Callable[[], ResNetConfig]) -> ResNetConfig:
    return plain(make())


PRESETS = _presets()  # "resnet18", …, "resnet1202", and "plain18", … without shortcuts


# ---- parts -----------------------------------------------------------------------------------------------------


class Convolution(nn.Module):
    """A convolution and its batch norm, which makes a bias needless."""

    def __init__(self, inputs: int, outputs: int, kernel: int, stride: int = 1):
        super().__init__()
        self.conv = nn.Conv2d(inputs, outputs, kernel, stride, padding=kernel // 2, bias=False)
        self.norm = nn.BatchNorm2d(outputs)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.conv(x))


class Branch(nn.ModuleList):
    """Convolutions with a ReLU between each two; what follows the last is up to the block."""

    def forward(self, x: Tensor) -> Tensor:
        for number, step in enumerate(self):
            x = step(F.relu(x, inplace=True) if number else x)
        return x


class Padded(nn.Module):
    """Shortcut A: every `stride`-th pixel, and zeros for the channels that are new."""

    def __init__(self, inputs: int, outputs: int, stride: int):
        super().__init__()
        self.extra, self.stride = outputs - inputs, stride

    def forward(self, x: Tensor) -> Tensor:
        return _Sampled.apply(x, self.extra, self.stride)


class _Sampled(torch.autograd.Function):
    """What a padded shortcut does, with a way back in one pass; autograd's own takes each slice and the pad apart."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, extra: int, stride: int) -> Tensor:
        ctx.save_for_backward(x)
        ctx.stride = stride
        return F.pad(x[..., ::stride, ::stride], (0, 0, 0, 0, 0, extra))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        (x,) = ctx.saved_tensors
        made = torch.zeros_like(x)  # laid out as x is
        made[..., :: ctx.stride, :: ctx.stride] = gradient[:, : x.shape[1]]
        return made, None, None


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
    """Blocks of one width."""

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
    down, up = Convolution(inputs, width, 1, first), Convolution(width, config.given_by(width), 1)
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
    outputs = config.given_by(width)
    for block in range(config.blocks[number]):
        stride = 2 if number and not block else 1  # the stem has halved for the first stage
        branch = _branch(config, inputs, width, stride)
        blocks.append(Plain(branch) if kind == "none" else Residual(branch, _shortcut(kind, inputs, outputs, stride)))
        inputs = outputs
    return Stage(blocks)


# ---- the network -----------------------------------------------------------------------------------------------


class ResNet(nn.Module):
    """Images (B, C, H, W), of mean 0 and size 1, to a score for each class."""

    def __init__(self, config: ResNetConfig):
        super().__init__()
        self.config = config
        large = config.stem == "large"
        first = config.widths[0]
        self.stem = Convolution(config.channels, first, 7, 2) if large else Convolution(config.channels, first, 3)
        self.pool = nn.MaxPool2d(3, 2, padding=1) if large else nn.Identity()
        self.stages = nn.ModuleDict()  # "1", "2", …
        for number, inputs in enumerate([first, *map(config.given_by, config.widths[:-1])]):
            self.stages[str(number + 1)] = _stage(config, inputs, number)
        self.head = nn.Linear(config.features, config.classes)

    def features(self, x: Tensor) -> Tensor:
        """What the output layer reads: the mean of the last maps, (B, F)."""
        if x.ndim != 4 or x.shape[1] != self.config.channels:
            raise UsageError(f"images of shape {tuple(x.shape)}; expected (B, {self.config.channels}, H, W)")
        x = self.pool(F.relu(self.stem(x), inplace=True))
        for stage in self.stages.values():
            x = stage(x)
        return x.mean((2, 3))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.features(x))  # (B, classes)


def shape_of(config: ResNetConfig) -> ResNet:
    """A network without numbers in it, on the meta device: to count, or to be filled from a file."""
    with torch.device("meta"):
        return ResNet(config)


def fresh(config: ResNetConfig, rng: Generator | None = None) -> ResNet:
    """A network as it starts."""
    return initialize(shape_of(config).to_empty(device="cpu"), rng)


def initialize(model: ResNet, rng: Generator | None = None) -> ResNet:
    """Convolutions by He, norms that change nothing, and an output layer so small that all classes start alike.

    He's scale is by outputs: a norm sees to the size of the signal, so it is the gradient's that is to be kept.
    """
    for part in model.modules():
        if isinstance(part, nn.Conv2d):
            he(part.weight, rng, by="out")
        elif isinstance(part, nn.BatchNorm2d):
            part.reset_parameters()
    normal(model.head.weight, 0.01, rng)
    nn.init.zeros_(model.head.bias)
    return model


def parameters(config: ResNetConfig) -> int:
    """How many numbers are learnt; running statistics are not."""
    return sum(parameter.numel() for parameter in shape_of(config).parameters())
