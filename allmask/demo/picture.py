"""The demo in one picture: how the loss falls, how ROUGE-L rises, and where it ends beside the first sentence."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from allmask.training.log import points, smoothed

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MODEL, BASELINE, QUIET = "#5B84D7", "#E39A57", "#8B93A1"
LABELS = {"rouge_1": "ROUGE-1", "rouge_2": "ROUGE-2", "rouge_l": "ROUGE-L"}


def draw_demo(path: Path, metrics: list[dict[str, Any]], scores: dict[str, dict[str, float]]) -> None:
    """Three panels as a PNG; `metrics` are the lines of metrics.jsonl, `scores` the model's and the baseline's."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure  # without pyplot: no window, no global state

    with rc_context({"axes.spines.top": False, "axes.spines.right": False, "axes.edgecolor": QUIET}):
        figure = Figure(figsize=(12, 3.6), dpi=120, layout="constrained")
        loss, rouge, bars = figure.subplots(1, 3)
        _loss(loss, metrics)
        _rouge(rouge, metrics)
        _bars(bars, scores)
        figure.savefig(path)


def _loss(axes: Axes, metrics: list[dict[str, Any]]) -> None:
    steps, losses = points(metrics, "loss")
    axes.plot(steps, losses, color=MODEL, alpha=0.25, linewidth=1)
    axes.plot(steps, smoothed(losses), color=MODEL, label="training")
    axes.plot(*points(metrics, "eval_loss"), color=BASELINE, marker="o", markersize=4, label="held out")
    axes.set(title="loss (nats a token)", xlabel="step")
    axes.legend(frameon=False)


def _rouge(axes: Axes, metrics: list[dict[str, Any]]) -> None:
    axes.plot(*points(metrics, "eval_rouge_l"), color=MODEL, marker="o", markersize=4, label="model")
    for height in points(metrics, "eval_lead_rouge_l")[1]:
        axes.axhline(height, color=BASELINE, linestyle="--", label="lead sentence")
    axes.set(title="ROUGE-L of what it writes, while it learns", xlabel="step")
    axes.set_ylim(bottom=0)
    axes.legend(frameon=False, loc="lower right")


def _bars(axes: Axes, scores: dict[str, dict[str, float]]) -> None:
    for place, (name, colour) in enumerate(zip(scores, (MODEL, BASELINE), strict=True)):
        values = [scores[name][key] for key in LABELS]
        drawn = axes.bar([0.4 * place + row for row in range(len(LABELS))], values, 0.38, color=colour, label=name)
        axes.bar_label(drawn, fmt="%.1f", fontsize=9)
    axes.set_xticks([0.2 + row for row in range(len(LABELS))], list(LABELS.values()))
    axes.set_title("held-out files")
    axes.margins(y=0.2)
    axes.legend(frameon=False)
