"""Do deeper networks learn less, and do shortcuts mend it? Plain against residual ones at growing depth (claim C24).

    python quality/depth.py --data cifar-10-batches-bin --minutes 40 --out quality-runs/depth    # or a folder of MNIST
    python quality/depth.py --minutes 10 --out quality-runs/digits    # without data: scikit-learn's digits

A plain network of each depth and its residual twin, which has the same layers and the same number of parameters, start
from the same seed and see the same batches of changed images, by the same training loop with the same rate. They take
turns, so many steps each, until the minutes are over: all have made as many steps, however fast the machine is. After
each turn the error is measured on a fixed sample of the images they learn from, unchanged, and on held-out ones. The
same command again goes on for as many minutes.

Prints a table and writes depth.png and results.json. What it shows is degradation of training, which overfitting cannot
explain; of one seed, one optimizer, the depths that were asked for, and as many steps as the table says, far fewer than
the 64,000 of the paper (arXiv 1512.03385, figure 6).
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from allmask.runs.plan import Plan
from allmask.training import Paused, Score, Settings, train
from allmask.training import checkpoint as runs
from allmask.training.log import read_metrics
from allmask.vision.resnet import ResNet, ResNetConfig, fresh, plain, small
from allmask.vision.training import ImageData, ImageEvaluator, ImageTraining, ImageWorkload

DEPTHS = (20, 32, 56)
KINDS = ("plain", "residual")
ENDLESS = 1_000_000  # steps: minutes end a run
RATES = {"sgd": 0.1, "adamw": 1e-3}
SAMPLE = 1000  # images, of either kind, on which errors are measured
COLOURS = ("#5B84D7", "#E39A57", "#5BA886", "#B5609E", "#7A7A7A")
Errors = dict[int, dict[str, float]]  # by step: those of training and test


@dataclass
class Examiner:
    """Errors on images that were learnt from and on others; then it is the next network's turn."""

    learnt: ImageEvaluator
    others: ImageEvaluator | None

    def __call__(self, model: ResNet) -> Score:
        loss, marks = self.learnt.marks(model)
        found = {"train_error": 1.0 - marks.scores["accuracy"], "train_loss": loss}
        if self.others is not None:
            found["test_error"] = 1.0 - self.others.marks(model)[1].scores["accuracy"]
        return Score(-found["train_error"], found, pause=True)


@dataclass(frozen=True)
class Experiment:
    job: ImageTraining
    settings: Settings
    data: ImageData
    out: Path
    depths: Sequence[int] = DEPTHS

    @property
    def names(self) -> list[str]:
        return [f"{kind}{depth}" for depth in self.depths for kind in KINDS]

    def config(self, name: str) -> ResNetConfig:
        shape = small(int("".join(filter(str.isdigit, name))))
        shape = replace(shape, channels=self.data.preparation.channels, classes=len(self.data.train.names))
        return plain(shape) if name.startswith("plain") else shape

    def work(self, model: ResNet) -> ImageWorkload:
        learnt = ImageEvaluator(self.data.train.subset(SAMPLE), self.data.preparation, self.settings.precision)
        others = None
        if self.data.held_out is not None:
            others = replace(learnt, images=self.data.held_out.subset(SAMPLE))
        return replace(self.job.work(self.data, model, self.settings), evaluator=Examiner(learnt, others))

    def turn(self, name: str, quiet: bool) -> None:
        """As many steps as there are between two evaluations."""
        model = fresh(self.config(name), torch.Generator().manual_seed(self.settings.seed))
        run = self.out / name
        try:
            train(model, self.work(model), self.settings, run, resume=bool(runs.checkpoints(run)), quiet=quiet)
        except Paused:
            return

    def errors(self, name: str) -> Errors:
        lines = [line for line in read_metrics(self.out / name) if "eval_train_error" in line]
        return {
            line["step"]: {key.removeprefix("eval_"): line[key] for key in line if key.startswith("eval_")}
            for line in lines
        }

    def run(self, minutes: float, quiet: bool = False) -> None:
        """Rounds of turns until the time is over; none is begun that would take too long."""
        began = time.monotonic()
        longest = 0.0
        while not longest or time.monotonic() - began + longest <= 60 * minutes:
            started = time.monotonic()
            for name in self.names:
                if len(self.errors(name)) <= self.rounds:  # after an interruption some are ahead
                    self.turn(name, quiet)
            longest = max(longest, time.monotonic() - started)

    @property
    def rounds(self) -> int:
        """How many turns all have had."""
        return min(len(self.errors(name)) for name in self.names)


def expect_same(experiment: Experiment) -> None:
    """A run goes on as it was begun, or not at all: curves of two plans in one picture would say nothing."""
    file, plan = experiment.out / "plan.json", Plan(experiment.job, experiment.settings).to_dict()
    plan["images"] = experiment.data.checksums()
    experiment.out.mkdir(parents=True, exist_ok=True)
    if not file.is_file():
        file.write_text(json.dumps(plan, indent=1))
    then = json.loads(file.read_text())
    other = [name for name in plan if plan[name] != then.get(name)]
    if other:
        raise SystemExit(f"{experiment.out}: was begun with another {', '.join(other)}; name another --out")


# ---- what is told ------------------------------------------------------------------------------------------------


def results(experiment: Experiment) -> dict[str, Any]:
    """The errors of each network by step, as far as all have come."""
    rounds = experiment.rounds
    curves = {name: dict(list(experiment.errors(name).items())[:rounds]) for name in experiment.names}
    steps = next(iter(curves.values()))
    size = len(experiment.data.train)
    last = max(steps)
    batch = experiment.settings.batch_tokens
    return {"data": experiment.job.data, "steps": last, "epochs": round(last * batch / size, 2), "curves": curves}


def table(told: dict[str, Any], depths: Sequence[int]) -> str:
    """The mean of the last three evaluations: single ones jump."""
    columns = [f"{kind}, {part}" for part in ("training", "test") for kind in KINDS]
    lines = [f"| error after {told['steps']:,} steps | {' | '.join(columns)} |", "|---" * (1 + len(columns)) + "|"]
    for depth in depths:
        cells = []
        for part in ("train_error", "test_error"):
            cells += [_percent(told["curves"][f"{kind}{depth}"], part) for kind in KINDS]
        lines.append(f"| {depth} layers | {' | '.join(cells)} |")
    return "\n".join(lines)


def _percent(curve: Errors, part: str) -> str:
    values = [found[part] for found in list(curve.values())[-3:] if part in found]
    return f"{100 * sum(values) / len(values):.1f} %" if values else "–"


def picture(told: dict[str, Any], depths: Sequence[int], path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4.2), dpi=120, layout="constrained")
    for axes, kind in zip(figure.subplots(1, 2, sharey=True), KINDS, strict=True):
        for colour, depth in zip(COLOURS * len(depths), depths, strict=False):
            curve = told["curves"][f"{kind}{depth}"]
            for part, style, width in (("train_error", "-", 2.0), ("test_error", ":", 1.0)):
                values = [100 * found[part] for found in curve.values() if part in found]
                label = f"{depth} layers" if part == "train_error" else None
                axes.plot(
                    list(curve)[: len(values)], values, style, color=colour, linewidth=width, label=label, marker=".",
                    markersize=2 * width,
                )  # fmt: skip
        axes.set_title(f"{kind} networks")
        axes.set_xlabel("step")
        axes.grid(alpha=0.2)
        axes.legend(frameon=False)
    figure.axes[0].set_ylim(bottom=0)
    figure.axes[0].set_ylabel("error in % (training; dotted: test)")
    figure.savefig(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", default="digits", help="a data set, as allmask train --task image reads it")
    parser.add_argument("--depths", default=",".join(map(str, DEPTHS)), help="6n + 2 each, with commas between")
    parser.add_argument("--minutes", type=float, default=40.0)
    parser.add_argument("--every", type=int, default=50, help="steps of a turn")
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--optimizer", choices=RATES, default="sgd", help="the paper's is sgd, with momentum")
    parser.add_argument("--lr", type=float, help="[default: 0.1, of adamw 0.001]")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--quiet", action="store_true")
    asked = parser.parse_args()
    depths = [int(word) for word in asked.depths.split(",")]
    settings = Settings(
        steps=ENDLESS, batch_tokens=asked.batch, optimizer=asked.optimizer, lr=asked.lr or RATES[asked.optimizer],
        schedule="constant", warmup=100, weight_decay=1e-4, clip=1e9, seed=asked.seed, eval_every=asked.every, keep=1,
    )  # fmt: skip
    job = ImageTraining(asked.data)
    data = job.images()
    experiment = Experiment(job.settled(data.train), settings, data, asked.out, depths)
    expect_same(experiment)
    experiment.run(asked.minutes, asked.quiet)
    told = results(experiment)
    (asked.out / "results.json").write_text(json.dumps(told, indent=1))
    picture(told, depths, asked.out / "depth.png")
    print(table(told, depths))
    print(f"\n{told['data']}: {told['epochs']:g} epochs; the picture is {asked.out / 'depth.png'}")


if __name__ == "__main__":
    main()
