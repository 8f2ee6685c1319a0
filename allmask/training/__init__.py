"""One training loop for every objective and task."""

from allmask.training.loop import Result, Score, Share, Work, loss_of, mean_loss, resolve_precision, train
from allmask.training.settings import Settings

__all__ = ["Result", "Score", "Settings", "Share", "Work", "loss_of", "mean_loss", "resolve_precision", "train"]
