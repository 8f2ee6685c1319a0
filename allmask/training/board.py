"""The numbers of a run for TensorBoard, beside metrics.jsonl: an extra, `pip install allmask[tensorboard]`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from allmask.errors import UsageError

FOLDER = "tensorboard"


class Board:
    """Each number of a line of metrics becomes a point of a curve of its name."""

    def __init__(self, run: Path, step: int = 0):
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            raise UsageError(
                "TensorBoard is not installed", "pip install 'allmask[tensorboard]', or leave --tensorboard out"
            ) from None
        self.writer = SummaryWriter(str(run / FOLDER), purge_step=step + 1 if step else None)

    def add(self, step: int, values: dict[str, Any]) -> None:
        for name, value in values.items():
            if isinstance(value, int | float):
                self.writer.add_scalar(_curve(name), value, step)

    def close(self) -> None:
        self.writer.close()


def _curve(name: str) -> str:
    """Those of evaluations stand together."""
    return f"eval/{name.removeprefix('eval_')}" if name.startswith("eval_") else f"train/{name}"
