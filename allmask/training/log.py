"""The metrics of a run: metrics.jsonl, the same numbers for TensorBoard, and a plot of them, loss.png."""

from __future__ import annotations

import hashlib
import json
import logging
from pathlib import Path
from typing import Any

from allmask.errors import UsageError
from allmask.files import Seal, beginning_problem, explain_os_errors, write_atomically

log = logging.getLogger("allmask")
METRICS, BOARD = "metrics.jsonl", "tensorboard"
_BLUE, _ORANGE, _GREEN = "#5B84D7", "#E39A57", "#5BA886"
Points = tuple[list[int], list[float]]
SCORES = {  # metrics of evaluations; the first one found is plotted
    "rouge_l": "ROUGE-L", "accuracy": "accuracy", "f1": "F1", "macro_f1": "macro F1", "pearson": "Pearson",
}  # fmt: skip


class Metrics:
    """Writes metrics.jsonl: a JSON object per line, for each step and each evaluation.

    A resumed run drops the lines after its checkpoint. A checkpoint has the `seal` of the lines before it: if they are
    no longer the same, a warning says so. Of several processes only the first one writes. `tensorboard` writes a curve
    per metric, too; it is an extra: `pip install tensorboard`.
    """

    def __init__(
        self, run: Path, step: int = 0, tensorboard: bool = False, write: bool = True, sealed: Seal | None = None,
    ):  # fmt: skip
        self.path, self.write = run / METRICS, write
        self.board: Any = None
        self.size, self.hash = 0, hashlib.sha256()
        if not write:
            return
        problem = None if sealed is None else beginning_problem(self.path, sealed)
        if problem is not None:
            what = "lines that cannot be read are dropped, and the curve may be wrong. The weights do not depend on it"
            log.warning("%s: %s; %s", self.path, problem, what)
        kept = "".join(json.dumps(line) + "\n" for line in read_metrics(run) if line["step"] <= step)
        write_atomically(self.path, kept)
        self._count(kept)
        if tensorboard:
            try:
                from torch.utils.tensorboard import SummaryWriter
            except ImportError:
                raise UsageError(
                    "TensorBoard is not installed", "pip install tensorboard, or leave --tensorboard out"
                ) from None
            self.board = SummaryWriter(str(run / BOARD), purge_step=step + 1 if step else None)

    def add(self, **values: Any) -> None:
        if not self.write:
            return
        hint = "the checkpoints are untouched; free some space and run again with --resume"
        line = json.dumps(values) + "\n"
        with explain_os_errors(self.path, hint), self.path.open("a", encoding="utf-8") as file:
            file.write(line)
        self._count(line)
        if self.board is None:
            return
        for name, value in values.items():
            if name != "step" and isinstance(value, int | float):
                curve = f"eval/{name.removeprefix('eval_')}" if name.startswith("eval_") else f"train/{name}"
                self.board.add_scalar(curve, value, values["step"])

    def _count(self, text: str) -> None:
        self.size += len(text.encode())
        self.hash.update(text.encode())

    @property
    def seal(self) -> Seal | None:
        """Size and SHA-256 of the lines so far, for the checkpoint; None if another process writes them."""
        return {"bytes": self.size, "sha256": self.hash.hexdigest()} if self.write else None

    def close(self) -> None:
        if self.board is not None:
            self.board.close()


def read_metrics(run: Path) -> list[dict[str, Any]]:
    """Return the lines of metrics.jsonl, without those that are damaged or were cut off by a crash."""
    path = run / METRICS
    if not path.is_file():
        return []
    lines = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            found = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(found, dict) and isinstance(found.get("step"), int):
            lines.append(found)
    return lines


# ---- loss.png ------------------------------------------------------------------------------------------------


def plot_run(run: Path) -> Path:
    """Draw loss.png from metrics.jsonl: losses by step, and the main metric of the evaluations."""
    from matplotlib.figure import Figure  # without pyplot: no window, no global state

    lines = read_metrics(run)
    figure = Figure(figsize=(7, 4), dpi=120, layout="constrained")
    axes = figure.subplots()
    steps, losses = points(lines, "loss")
    axes.plot(steps, losses, color=_BLUE, alpha=0.25, linewidth=1)
    axes.plot(steps, smoothed(losses), color=_BLUE, label="training loss, smoothed")
    steps, losses = points(lines, "eval_loss")
    if steps:
        axes.plot(steps, losses, color=_ORANGE, marker="o", markersize=3, label="held-out loss")
    axes.set_xlabel("step")
    axes.set_ylabel("loss (nats)")
    axes.grid(alpha=0.2)
    name = next((name for name in SCORES if points(lines, f"eval_{name}")[0]), None)
    if name is not None:
        steps, values = points(lines, f"eval_{name}")
        right = axes.twinx()
        right.plot(steps, values, color=_GREEN, marker="s", markersize=3, label=SCORES[name])
        right.set_ylabel(SCORES[name])
        right.set_ylim(bottom=min(0.0, *values))  # a correlation may be negative
    figure.legend(loc="outside upper center", ncols=3, frameon=False)  # above the curves, which may run anywhere
    path = run / "loss.png"
    figure.savefig(path)
    return path


def points(lines: list[dict[str, Any]], name: str) -> Points:
    """Return the steps at which a metric was recorded and its values, without those that are not finite."""
    found = [(line["step"], line[name]) for line in lines if isinstance(line.get(name), int | float)]
    return [step for step, _ in found], [value for _, value in found]


def smoothed(values: list[float], weight: float = 0.9) -> list[float]:
    """Return the exponential moving average of values, with bias correction."""
    result: list[float] = []
    total = share = 0.0
    for value in values:
        total, share = weight * total + (1 - weight) * value, weight * share + (1 - weight)
        result.append(total / share)
    return result
