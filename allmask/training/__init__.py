"""One training loop for every objective and task."""

from allmask.training.loop import Paused, Result, Score, Share, Way, Work, loss_of, mean_loss, resolve_precision, train
from allmask.training.settings import Settings

__all__ = [
    "Paused",
    "Result",
    "Score",
    "Settings",
    "Share",
    "Way",
    "Work",
    "loss_of",
    "mean_loss",
    "resolve_precision",
    "train",
]
