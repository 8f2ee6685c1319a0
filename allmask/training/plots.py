"""The picture of a run: loss by step and, where there was an evaluation, what it found."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from allmask.training.runs import read_metrics

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_BLUE, _ORANGE, _GREEN = "#5B84D7", "#E39A57", "#5BA886"
Points = tuple[list[int], list[float]]
SCORES = {  # of an evaluation, the first that is there is drawn
    "rouge_l": "ROUGE-L", "accuracy": "accuracy", "f1": "F1", "macro_f1": "macro F1", "pearson": "Pearson",
}  # fmt: skip


def plot_run(run: Path) -> Path:
    """Draw loss.png from metrics.jsonl."""
    from matplotlib.figure import Figure  # without pyplot: no window, no global state

    lines = read_metrics(run)
    figure = Figure(figsize=(7, 4), dpi=120, layout="constrained")
    axes = figure.subplots()
    _losses(axes, lines)
    _score(axes, lines)
    path = run / "loss.png"
    figure.savefig(path)
    return path


def points(lines: list[dict[str, Any]], name: str) -> Points:
    """The steps at which a value was written down, and the values; steps without a finite one are left out."""
    found = [(line["step"], line[name]) for line in lines if line.get(name) is not None]
    return [step for step, _ in found], [value for _, value in found]


def smoothed(values: list[float], weight: float = 0.9) -> list[float]:
    """A running mean that forgets: what a loss does beneath the noise of its batches."""
    result: list[float] = []
    total = share = 0.0
    for value in values:
        total, share = weight * total + (1 - weight) * value, weight * share + (1 - weight)
        result.append(total / share)
    return result


def _losses(axes: Axes, lines: list[dict[str, Any]]) -> None:
    steps, losses = points(lines, "loss")
    axes.plot(steps, losses, color=_BLUE, alpha=0.25, linewidth=1)
    axes.plot(steps, smoothed(losses), color=_BLUE, label="training loss, smoothed")
    steps, losses = points(lines, "eval_loss")
    if steps:
        axes.plot(steps, losses, color=_ORANGE, marker="o", markersize=3, label="held-out loss")
    axes.set_xlabel("step")
    axes.set_ylabel("loss (nats)")
    axes.grid(alpha=0.2)
    axes.legend(loc="upper right", frameon=False)


def _score(axes: Axes, lines: list[dict[str, Any]]) -> None:
    """What the task is judged by, on an axis of its own from 0 on (a correlation may be below)."""
    name = next((name for name in SCORES if points(lines, f"eval_{name}")[0]), None)
    if name is None:
        return
    steps, values = points(lines, f"eval_{name}")
    other = axes.twinx()
    other.plot(steps, values, color=_GREEN, marker="s", markersize=3, label=SCORES[name])
    other.set_ylabel(SCORES[name])
    other.set_ylim(bottom=min(0.0, *values))
    other.legend(loc="lower right", frameon=False)
