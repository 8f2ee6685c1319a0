"""How a run is trained: one frozen set of numbers, saved with the run."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from allmask.errors import UsageError
from allmask.training.schedule import SCHEDULES

OPTIMISERS = ("adamw", "sgd")


@dataclass(frozen=True)
class Settings:
    """Defaults that work untuned for fine-tuning a compact model."""

    epochs: float = 3.0
    steps: int | None = None  # overrides epochs
    batch_tokens: int = 4096  # tokens a step, all of them real
    accumulate: int = 1  # batches a step
    lr: float = 5e-4
    schedule: str = "linear"
    warmup: float = 0.1  # share of the steps, or a number of steps if above 1
    optimiser: str = "adamw"
    weight_decay: float = 0.01
    betas: tuple[float, float] = (0.9, 0.999)
    epsilon: float = 1e-8
    momentum: float = 0.9  # of SGD, which has no betas
    clip: float = 1.0
    label_smoothing: float = 0.0
    dropout: float | None = None  # None: the model's own; 0 learns faster where no example is seen twice
    seed: int = 1
    precision: str = "auto"  # fp32, bf16; auto is bf16 where the CPU has it
    eval_every: int | None = None  # steps; None: ten times a run
    save_every: int | None = None  # steps; None: with each evaluation
    keep: int = 2  # checkpoints kept, and the best besides
    patience: int | None = None  # evaluations without progress before stopping early
    max_bad_steps: int = 5  # steps in a row with a loss or gradient that is not finite
    ema: float | None = None  # decay of a running mean of the weights, which is then judged and kept
    recompute: bool = (
        False  # layers are computed again on the way back instead of remembered: less memory, a third slower
    )
    tensorboard: bool = False  # curves beside metrics.jsonl
    layer_decay: float | None = None  # the share of the learning rate that each layer has of the one above it

    def __post_init__(self):
        _positive(self, "epochs", "batch_tokens", "accumulate", "lr", "clip", "keep", "max_bad_steps", "epsilon")
        for name in ("steps", "eval_every", "save_every", "patience"):
            if getattr(self, name) is not None:
                _positive(self, name)
        if self.schedule not in SCHEDULES:
            raise UsageError(f"schedule is {self.schedule!r}; expected one of {', '.join(SCHEDULES)}")
        if self.optimiser not in OPTIMISERS:
            raise UsageError(f"optimiser is {self.optimiser!r}; expected {' or '.join(OPTIMISERS)}")
        if not 0.0 <= self.momentum < 1.0:
            raise UsageError(f"momentum is {self.momentum}; expected 0 <= momentum < 1")
        if self.precision not in ("auto", "fp32", "bf16"):
            raise UsageError(f"precision is {self.precision!r}; expected auto, fp32 or bf16")
        if self.dropout is not None and not 0.0 <= self.dropout < 1.0:
            raise UsageError(f"dropout is {self.dropout}; expected 0 <= dropout < 1")
        if not 0 <= self.seed < 2**63:
            raise UsageError(f"seed is {self.seed}; expected 0 to 2**63 - 1")
        if self.ema is not None and not 0.0 < self.ema < 1.0:
            raise UsageError(f"ema is {self.ema}; expected 0 < ema < 1, such as 0.999")
        if self.layer_decay is not None and not 0.0 < self.layer_decay <= 1.0:
            raise UsageError(f"layer_decay is {self.layer_decay}; expected 0 < layer_decay <= 1, such as 0.9")
        if not 0.0 <= self.label_smoothing < 1.0 or self.warmup < 0 or self.weight_decay < 0:
            raise UsageError("label_smoothing must be in [0, 1), warmup and weight_decay at least 0")

    def warmup_steps(self, steps: int) -> int:
        return int(self.warmup) if self.warmup > 1 else round(self.warmup * steps)


def _positive(settings: Settings, *names: str) -> None:
    for name in names:
        if not getattr(settings, name) > 0:
            raise UsageError(f"{name} is {getattr(settings, name)}; it must be positive")


def as_plain(settings: Settings) -> dict[str, Any]:
    return {name: list(value) if isinstance(value, tuple) else value for name, value in asdict(settings).items()}
