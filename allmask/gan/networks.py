"""A generator and a discriminator as one model for the training loop; load and save it.

toy      one-dimensional data, to draw the training: two small perceptrons
mlp      images as vectors: perceptrons, the discriminator with dropout (arXiv 1406.2661)
dcgan    strided convolutions, batch norm in both networks, no pooling (arXiv 1511.06434)

Images are scaled to −1…1. A discriminator returns the log-odds that an example is real.
Shapes: B examples, Z noise, C channels, H × W pixels.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from allmask.checkpoints.config_json import errors_in
from allmask.checkpoints.formats.weights import open_weights
from allmask.checkpoints.reader import compare
from allmask.checkpoints.writer import fill
from allmask.errors import CheckpointError, UsageError
from allmask.files import new_folder
from allmask.nn.dropout import Dropout
from allmask.nn.init import he, normal
from allmask.training import checkpoint
from allmask.vision.checkpoints import SETTINGS, WEIGHTS, config_fields, read_settings

MODEL_TYPE = "allmask-gan"
LEAK = 0.2  # slope of the leaky ReLU
SPREAD = 2.0  # standard deviation of the first biases of a toy's discriminator
_MAX = 1 << 16  # a larger number in a config is a mistake


@dataclass(frozen=True)
class GanConfig:
    kind: str  # toy, mlp, dcgan
    shape: tuple[int, ...]  # of an example: (1,), or (channels, height, width)
    noise: int = 64  # dimensions of the noise
    width: int = 64  # units or channels of the narrowest hidden layer
    dropout: float = 0.0  # in the discriminator of an mlp

    def __post_init__(self):
        if self.kind not in BUILDERS:
            raise CheckpointError(f"kind is {self.kind!r}; expected one of {', '.join(BUILDERS)}")
        if not isinstance(self.shape, tuple):
            raise CheckpointError(f"shape is {self.shape!r}; expected a list of numbers")
        numbers = (*self.shape, self.noise, self.width)
        if not all(isinstance(number, int) and 0 < number < _MAX for number in numbers):
            raise CheckpointError(
                f"shape {self.shape}, noise {self.noise}, width {self.width}: expected numbers from 1"
            )
        if len(self.shape) != (1 if self.kind == "toy" else 3):
            raise CheckpointError(f"a {self.kind} does not make examples of shape {list(self.shape)}")
        if self.kind == "dcgan" and any(side % 4 for side in self.shape[1:]):
            raise UsageError(
                f"images of {self.shape[2]} × {self.shape[1]} pixels; a dcgan needs multiples of 4",
                "scale them (--size 32), or take --preset mlp",
            )
        if not 0.0 <= self.dropout < 1.0:
            raise CheckpointError(f"dropout is {self.dropout}; expected 0 <= dropout < 1")


PRESETS: dict[str, dict[str, Any]] = {
    "toy": {"noise": 1, "width": 32},
    "mlp": {"noise": 64, "width": 128, "dropout": 0.3},
    "dcgan": {"noise": 64, "width": 32},
}


class Gan(nn.Module):
    """Both networks as one model, with one optimizer and one checkpoint."""

    def __init__(self, config: GanConfig):
        super().__init__()
        self.config = config
        self.generator, self.discriminator = BUILDERS[config.kind](config)

    def noise(self, count: int, rng: torch.Generator | None = None) -> Tensor:
        """(B, Z), standard normal."""
        device = next(self.parameters()).device
        return torch.randn(count, self.config.noise, generator=rng, device=device)

    def sample(self, count: int, rng: torch.Generator | None = None) -> Tensor:
        """Generate examples."""
        return self.generator(self.noise(count, rng))

    def log_odds(self, examples: Tensor) -> Tensor:
        """Log-odds (B,) that examples are real."""
        return self.discriminator(examples).flatten().float()


# ---- the three kinds -----------------------------------------------------------------------------------------


class ToyGenerator(nn.Module):
    """A linear map plus a perceptron that starts at zero, so that the generator starts as the identity.

    With random weights it could start with folds in the map, which are hard to undo in one dimension.
    """

    def __init__(self, inputs: int, width: int, outputs: int):
        super().__init__()
        self.straight = nn.Linear(inputs, outputs)
        self.bend = nn.Sequential(nn.Linear(inputs, width), nn.Tanh(), nn.Linear(width, outputs))

    def forward(self, z: Tensor) -> Tensor:
        return self.straight(z) + self.bend(z)


def _toy(config: GanConfig) -> tuple[nn.Module, nn.Module]:
    """Tanh in both: their curves are drawn, and should be smooth."""
    w = config.width
    discriminator = nn.Sequential(
        nn.Linear(config.shape[0], w), nn.Tanh(), nn.Linear(w, w), nn.Tanh(), nn.Linear(w, 1)
    )  # fmt: skip
    return ToyGenerator(config.noise, max(1, w // 4), config.shape[0]), discriminator


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
    """The generator starts at a quarter of the image size and doubles it twice; the discriminator halves it twice."""
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


BUILDERS: dict[str, Callable[[GanConfig], tuple[nn.Module, nn.Module]]] = {"toy": _toy, "mlp": _mlp, "dcgan": _dcgan}


def fresh(config: GanConfig, rng: torch.Generator | None = None) -> Gan:
    """New networks: He initialization for perceptrons, standard deviation 0.02 for dcgan, as in its paper."""
    model = Gan(config)
    for part in model.modules():
        if isinstance(part, nn.Linear | nn.Conv2d | nn.ConvTranspose2d):
            normal(part.weight, 0.02, rng) if config.kind == "dcgan" else he(part.weight, rng)
            if part.bias is not None:
                nn.init.zeros_(part.bias)
    if isinstance(model.generator, ToyGenerator):
        nn.init.eye_(model.generator.straight.weight)
        nn.init.zeros_(model.generator.get_parameter("bend.2.weight"))
        # with biases of 0, all units of the discriminator's first layer would bend at the same input
        normal(model.discriminator.get_parameter("0.bias"), SPREAD, rng)
    return model


# ---- load and save -------------------------------------------------------------------------------------------


def save(folder: Path, model: Gan) -> None:
    """Write a new model folder, signed for `allmask verify`; it appears only when it is complete."""
    with new_folder(folder) as unfinished:
        fill(unfinished, {"model_type": MODEL_TYPE, **asdict(model.config)}, _weights(model))
        checkpoint.sign(unfinished)


def load(folder: str | Path) -> Gan:
    """Load both networks, in eval mode. Tensors that do not fit are listed before anything is filled."""
    folder = Path(folder)
    settings = read_settings(folder, "give the final folder of a run of --task gan")
    with errors_in(folder / SETTINGS):
        model = Gan(GanConfig(**config_fields(GanConfig, settings, MODEL_TYPE)))
    store = open_weights(folder / WEIGHTS)
    compare(folder / WEIGHTS, _weights(model), store)
    model.load_state_dict({name: stored.load() for name, stored in store.items()}, strict=False)  # compared above
    return model.eval()


def _weights(model: Gan) -> dict[str, Tensor]:
    """All tensors except the batch counters of norms, on which no result depends."""
    return {name: tensor for name, tensor in model.state_dict().items() if tensor.is_floating_point()}
