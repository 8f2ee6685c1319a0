"""Algorithm 1 of arXiv 1406.2661, as work for the project's training loop.

A step of the loop is a step of one of the two networks: k of the discriminator, each with a batch of real examples and
as many new ones of the generator, then one of the generator, and again. Optimizers leave alone what has no gradient, so
one is two. Noise comes, as dropout does, from what the loop seeds by (seed, step): a resumed run goes on with the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from allmask.errors import UsageError
from allmask.gan.networks import Gan, multiply_adds
from allmask.options import GAN_LOSSES as LOSSES
from allmask.training import Score, StepSpec
from allmask.vision.learning import plan_images


@dataclass(frozen=True, eq=False)
class Turn:
    """What a step has: real examples for the discriminator, or none, for the generator."""

    real: Tensor | None
    count: int

    @property
    def tokens(self) -> int:
        return self.count

    @property
    def counts(self) -> dict[str, int]:
        return {"generator" if self.real is None else "discriminator": self.count}

    def to(self, device: torch.device | str) -> Turn:
        return self if self.real is None else Turn(self.real.to(device), self.count)


def discriminator_loss(real: Tensor, made: Tensor) -> Tensor:
    """−log D(x) − log(1 − D(G(z))), summed, of log-odds: the gradient it goes down is the one Algorithm 1 goes up."""
    return F.softplus(-real).sum() + F.softplus(made).sum()


def generator_loss(made: Tensor, kind: str) -> Tensor:
    """Of log-odds, summed. saturating: log(1 − D(G(z))), the game itself, whose gradient is that of D(G(z)), nothing
    where the discriminator is sure. non-saturating: −log D(G(z)), which has the same goal and pulls hardest there."""
    return F.softplus(-made).sum() if kind == "non-saturating" else -F.softplus(made).sum()


@contextmanager
def fixed(network: nn.Module) -> Iterator[None]:
    """Within it gradients pass through a network and leave none in it."""
    network.requires_grad_(False)
    try:
        yield
    finally:
        network.requires_grad_(True)


class GanWorkload:
    """What the loop asks for: real examples by number, whose turn it is, the losses, and a judge."""

    def __init__(
        self, examples: Tensor, k: int = 1, loss: str = LOSSES[0], batch: int = 64,
        judge: Callable[[Gan, int], Score | None] = lambda model, step: None,
        prepared: Callable[[Tensor], Tensor] = lambda examples: examples,
    ):  # fmt: skip
        if k < 1 or loss not in LOSSES:
            raise UsageError(f"k is {k}, loss is {loss!r}; expected k from 1 and {' or '.join(LOSSES)}")
        self.examples, self.k, self.loss, self.size, self.prepared = examples, k, loss, batch, prepared
        self.lengths = np.ones(len(examples), dtype=np.int64)
        self.judge = judge
        self.step_spec = StepSpec("examples", self.plan, self.losses, self.operations)
        self.costs: tuple[int, int] | None = None

    def plan(self, lengths: np.ndarray, most: int, seed: int, epoch: int) -> Sequence[list[int]]:
        """An epoch of the discriminator's batches; after each k of them, counted from the first epoch on, none."""
        batches = list(plan_images(lengths, most, seed, epoch))
        made: list[list[int]] = []
        for number, batch in enumerate(batches, epoch * len(batches) + 1):
            made += [batch] if number % self.k else [batch, []]
        return made

    def batch(self, numbers: Sequence[int], epoch: int) -> Turn:
        if not numbers:
            return Turn(None, self.size)
        return Turn(self.prepared(self.examples[torch.tensor(numbers)]), len(numbers))

    def evaluate(self, model: Gan, step: int = 0) -> Score | None:
        return self.judge(model, step)

    def losses(self, model: Gan, turn: Turn, smoothing: float = 0.0) -> dict[str, tuple[Tensor, int]]:
        loss = self._made(model, turn.count) if turn.real is None else _told(model, turn.real)
        return {name: (loss, count) for name, count in turn.counts.items()}

    def _made(self, model: Gan, count: int) -> Tensor:
        with fixed(model.discriminator):
            return generator_loss(model.log_odds(model.sample(count)), self.loss)

    def operations(self, model: Gan, turn: Turn) -> int:
        """Of a step: forward through both, and back through what learns, or to it."""
        if self.costs is None:
            noise = torch.zeros(1, model.config.noise)
            example = torch.zeros(1, *model.config.shape)
            self.costs = multiply_adds(model.generator, noise), multiply_adds(model.discriminator, example)
        generator, discriminator = self.costs
        each = 3 * generator + 2 * discriminator if turn.real is None else generator + 6 * discriminator
        return 2 * turn.count * each


def _told(model: Gan, real: Tensor) -> Tensor:
    with torch.no_grad():
        made = model.sample(len(real))
    return discriminator_loss(model.log_odds(real), model.log_odds(made))
