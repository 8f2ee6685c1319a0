"""One training loop for every objective and task."""

from allmask.options import Settings
from allmask.training.loop import (
    Paused,
    Result,
    Score,
    StepSpec,
    Workload,
    loss_of,
    mean_loss,
    resolve_precision,
    standard_error,
    train,
)

__all__ = [
    "Paused", "Result", "Score", "Settings", "StepSpec", "Workload", "loss_of", "mean_loss", "resolve_precision",
    "standard_error", "train",
]  # fmt: skip
