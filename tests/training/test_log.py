"""The picture of a run: the points are those of metrics.jsonl, and a run without evaluations has one, too."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from matplotlib.figure import Figure
from matplotlib.image import imread

from allmask.training.log import plot_run, points, smoothed

LINES = [
    {"step": 1, "loss": 4.0},
    {"step": 2, "loss": None},  # a bad step
    {"step": 2, "eval_loss": 3.0, "eval_rouge_l": 10.0},
    {"step": 3, "loss": 2.0},
]


def test_points():
    assert points(LINES, "loss") == ([1, 3], [4.0, 2.0])
    assert points(LINES, "eval_rouge_l") == ([2], [10.0])
    assert points([], "loss") == ([], [])


def test_smoothing_by_hand():
    assert smoothed([4.0, 2.0], weight=0.5) == pytest.approx([4.0, (0.25 * 4 + 0.5 * 2) / 0.75])
    assert smoothed([3.0] * 50) == pytest.approx([3.0] * 50)


def drawn(monkeypatch: pytest.MonkeyPatch, run: Path) -> list[str]:
    """The names of the curves in the picture."""
    figures: list[Figure] = []
    save = Figure.savefig
    monkeypatch.setattr(Figure, "savefig", lambda figure, *a, **k: (figures.append(figure), save(figure, *a, **k)))
    assert imread(plot_run(run)).shape[:2] == (480, 840)
    return [str(line.get_label()) for axes in figures[0].axes for line in axes.lines]


@pytest.mark.parametrize(
    ("lines", "names"),
    [
        (LINES, ["training loss, smoothed", "held-out loss", "ROUGE-L"]),
        (LINES[:1], ["training loss, smoothed"]),
        ([{"step": 2, "eval_macro_f1": 0.4, "eval_accuracy": 0.5}], ["training loss, smoothed", "accuracy"]),
        ([{"step": 2, "eval_macro_f1": 0.4}], ["training loss, smoothed", "macro F1"]),
        ([{"step": 2, "eval_pearson": -0.4}], ["training loss, smoothed", "Pearson"]),
        ([{"step": 2, "eval_f1": 0.4}], ["training loss, smoothed", "F1"]),
        ([], ["training loss, smoothed"]),
    ],
)
def test_curves(monkeypatch, tmp_path: Path, lines: list[dict], names: list[str]):
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert [name for name in drawn(monkeypatch, tmp_path) if not name.startswith("_")] == names
