"""A generator and a discriminator, as one model for the training loop.

toy      numbers on a line, for the picture of the game: two small perceptrons
mlp      images as rows of pixels: perceptrons, the discriminator with dropout (arXiv 1406.2661)
dcgan    images as maps: strided convolutions, batch norm in both, no pools (arXiv 1511.06434)

Examples are between −1 and 1, but for toys; a discriminator gives log-odds that one is real.
Shapes: B examples, Z noise, C channels, H × W pixels.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from allmask.errors import CheckpointError, UsageError
from allmask.nn.dropout import Dropout
from allmask.nn.init import he, normal

LEAK = 0.2  # of a rectifier, so that a discriminator passes gradients on
SPREAD = 2.0  # of the numbers at which a toy's units bend
_MOST = 1 << 16  # of any number in a config; more is a mistake


@dataclass(frozen=True)
class GanConfig:
    kind: str  # toy, mlp, dcgan
    shape: tuple[int, ...]  # of an example: (1,), or channels, height, width
    noise: int = 64  # numbers an example is made of
    width: int = 64  # of the narrowest hidden layer, or maps
    dropout: float = 0.0  # in the discriminator of an mlp

    def __post_init__(self):
        if self.kind not in BUILDERS:
            raise CheckpointError(f"kind is {self.kind!r}; expected one of {', '.join(BUILDERS)}")
        numbers = (*self.shape, self.noise, self.width)
        if not all(isinstance(number, int) and 0 < number < _MOST for number in numbers):
            raise CheckpointError(
                f"shape {self.shape}, noise {self.noise}, width {self.width}: expected numbers from 1"
            )
        if len(self.shape) != (1 if self.kind == "toy" else 3):
            raise CheckpointError(f"a {self.kind} does not make examples of shape {list(self.shape)}")
        if self.kind == "dcgan" and any(side % 4 for side in self.shape[1:]):
            raise UsageError(
                f"images of {self.shape[2]} × {self.shape[1]} pixels; a dcgan doubles their sides twice",
                "take sides that 4 divides (--size 32), or --preset mlp",
            )
        if not 0.0 <= self.dropout < 1.0:
            raise CheckpointError(f"dropout is {self.dropout}; expected 0 <= dropout < 1")


PRESETS: dict[str, dict[str, Any]] = {
    "toy": {"noise": 1, "width": 32},
    "mlp": {"noise": 64, "width": 128, "dropout": 0.3},
    "dcgan": {"noise": 64, "width": 32},
}


class Gan(nn.Module):
    """Both networks: the loop has one model, one optimizer, one checkpoint."""

    def __init__(self, config: GanConfig):
        super().__init__()
        self.config = config
        self.generator, self.discriminator = BUILDERS[config.kind](config)

    def noise(self, count: int, rng: torch.Generator | None = None) -> Tensor:
        """(B, Z) of a normal distribution."""
        device = next(self.parameters()).device
        return torch.randn(count, self.config.noise, generator=rng, device=device)

    def sample(self, count: int, rng: torch.Generator | None = None) -> Tensor:
        """New examples."""
        return self.generator(self.noise(count, rng))

    def log_odds(self, examples: Tensor) -> Tensor:
        """(B,) that examples are real."""
        return self.discriminator(examples).flatten().float()


# ---- the three kinds -----------------------------------------------------------------------------------------


class Bent(nn.Module):
    """A straight line, and a bend that begins as nothing: what is made begins as the noise itself.

    One that began with folds would seldom lose them again, on a line where there is no way around.
    """

    def __init__(self, inputs: int, width: int, outputs: int):
        super().__init__()
        self.straight = nn.Linear(inputs, outputs)
        self.bend = nn.Sequential(nn.Linear(inputs, width), nn.Tanh(), nn.Linear(width, outputs))

    def forward(self, z: Tensor) -> Tensor:
        return self.straight(z) + self.bend(z)


def _toy(config: GanConfig) -> tuple[nn.Module, nn.Module]:
    """Smooth, as the curves that they are to draw."""
    w = config.width
    discriminator = nn.Sequential(
        nn.Linear(config.shape[0], w), nn.Tanh(), nn.Linear(w, w), nn.Tanh(), nn.Linear(w, 1)
    )  # fmt: skip
    return Bent(config.noise, max(1, w // 4), config.shape[0]), discriminator


def _mlp(config: GanConfig) -> tuple[nn.Module, nn.Module]:
    w, pixels = config.width, math.prod(config.shape)
    generator = nn.Sequential(
        nn.Linear(config.noise, w), nn.ReLU(), nn.Linear(w, 2 * w), nn.ReLU(),
        nn.Linear(2 * w, pixels), nn.Tanh(), nn.Unflatten(1, config.shape),
    )  # fmt: skip
    discriminator = nn.Sequential(
        nn.Flatten(), nn.Linear(pixels, 2 * w), nn.LeakyReLU(LEAK), Dropout(config.dropout),
        nn.Linear(2 * w, w), nn.LeakyReLU(LEAK), Dropout(config.dropout), nn.Linear(w, 1),
    )  # fmt: skip
    return generator, discriminator


def _dcgan(config: GanConfig) -> tuple[nn.Module, nn.Module]:
    """A quarter of each side, then twice as many pixels a side and half the maps, twice; and back."""
    w, (channels, height, width) = config.width, config.shape
    small = (2 * w, height // 4, width // 4)
    generator = nn.Sequential(
        nn.Linear(config.noise, math.prod(small), bias=False), nn.Unflatten(1, small), nn.BatchNorm2d(2 * w), nn.ReLU(),
        nn.ConvTranspose2d(2 * w, w, 4, 2, 1, bias=False), nn.BatchNorm2d(w), nn.ReLU(),
        nn.ConvTranspose2d(w, channels, 4, 2, 1), nn.Tanh(),
    )  # fmt: skip
    discriminator = nn.Sequential(
        nn.Conv2d(channels, w, 4, 2, 1), nn.LeakyReLU(LEAK),
        nn.Conv2d(w, 2 * w, 4, 2, 1, bias=False), nn.BatchNorm2d(2 * w), nn.LeakyReLU(LEAK),
        nn.Flatten(), nn.Linear(math.prod(small), 1),
    )  # fmt: skip
    return generator, discriminator


BUILDERS: dict[str, Callable[[GanConfig], tuple[nn.Module, nn.Module]]] = {
    "toy": _toy,
    "mlp": _mlp,
    "dcgan": _dcgan,
}


def fresh(config: GanConfig, rng: torch.Generator | None = None) -> Gan:
    """The two as they start: perceptrons by He's rule, convolutions with DCGAN's deviation of 0.02."""
    model = Gan(config)
    for part in model.modules():
        if isinstance(part, nn.Linear | nn.Conv2d | nn.ConvTranspose2d):
            normal(part.weight, 0.02, rng) if config.kind == "dcgan" else he(part.weight, rng)
            if part.bias is not None:
                nn.init.zeros_(part.bias)
    if isinstance(model.generator, Bent):
        nn.init.eye_(model.generator.straight.weight)
        nn.init.zeros_(model.generator.get_parameter("bend.2.weight"))
        # with biases of 0, all units of the discriminator that read a number would bend at the same one
        normal(model.discriminator.get_parameter("0.bias"), SPREAD, rng)
    return model


@torch.no_grad()
def multiply_adds(network: nn.Module, example: Tensor) -> int:
    """Of one example, shaped (1, …)."""
    counted: list[int] = []

    def count(part: nn.Module, read: tuple[Tensor, ...], made: Tensor) -> None:
        if isinstance(part, nn.ConvTranspose2d):  # each number it reads is spread over a kernel
            counted.append(read[0].numel() * part.weight[0].numel())
        elif isinstance(part, nn.Linear | nn.Conv2d):
            counted.append(made.numel() * part.weight[0].numel())

    hooks = [part.register_forward_hook(count) for part in network.modules()]
    training = network.training
    network.eval()(example)
    network.train(training)
    for hook in hooks:
        hook.remove()
    return sum(counted)
