"""Do deeper plain networks train worse, and do shortcuts prevent it? Plain and residual networks by depth (claim C24).

    python quality/depth.py --data cifar-10-batches-bin --minutes 40 --out quality-runs/depth    # or a folder of MNIST
    python quality/depth.py --minutes 10 --out quality-runs/digits    # without data: scikit-learn's digits

For each depth a plain and a residual network, with the same layers and the same number of parameters, start from the
same seed and see the same augmented batches, in the same training loop with the same learning rate. They take turns of
--every steps until the time is over, so all make the same number of steps, however fast the machine is. After each turn
the error is measured on a fixed sample of the training images, not augmented, and on held-out images. The same command
again continues for the same time.

Prints a table and writes depth.png and results.json. It shows degradation of training, which overfitting cannot
explain, for one seed, one optimizer, the given depths, and far fewer steps than the 64,000 of the paper (arXiv
1512.03385, figure 6).
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import common
import torch
from common import ENDLESS

from allmask.runs.plan import Plan
from allmask.training import Paused, Score, Settings, train
from allmask.training import checkpoint as runs
from allmask.training.log import read_metrics
from allmask.vision.resnet import ResNet, ResNetConfig, fresh, plain, small
from allmask.vision.training import ImageData, ImageEvaluator, ImageTraining, ImageWorkload

DEPTHS = (20, 32, 56)
KINDS = ("plain", "residual")
RATES = {"sgd": 0.1, "adamw": 1e-3}
SAMPLE = 1000  # training images, and held-out images, on which errors are measured
COLOURS = ("#5B84D7", "#E39A57", "#5BA886", "#B5609E", "#7A7A7A")
Errors = dict[int, dict[str, float]]  # by step: train_error, train_loss, test_error


@dataclass
class TurnEvaluator:
    """Measure errors on training and held-out images; then pause, as it is the next network's turn."""

    train: ImageEvaluator
    test: ImageEvaluator | None

    def __call__(self, model: ResNet) -> Score:
        loss, marks = self.train.marks(model)
        found = {"train_error": 1.0 - marks.scores["accuracy"], "train_loss": loss}
        if self.test is not None:
            found["test_error"] = 1.0 - self.test.marks(model)[1].scores["accuracy"]
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
        train = ImageEvaluator(self.data.train.subset(SAMPLE), self.data.preparation, self.settings.precision)
        test = None
        if self.data.held_out is not None:
            test = replace(train, images=self.data.held_out.subset(SAMPLE))
        return replace(self.job.work(self.data, model, self.settings), evaluator=TurnEvaluator(train, test))

    def turn(self, name: str, quiet: bool) -> None:
        """Train a network until its next evaluation."""
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
        """Train all networks in turns until the time is over; a round that would take too long is not started."""
        start = time.monotonic()
        longest = 0.0
        while not longest or time.monotonic() - start + longest <= 60 * minutes:
            before = time.monotonic()
            for name in self.names:
                if len(self.errors(name)) <= self.rounds:  # after an interruption some are ahead
                    self.turn(name, quiet)
            longest = max(longest, time.monotonic() - before)

    @property
    def rounds(self) -> int:
        """The number of turns that every network has had."""
        return min(len(self.errors(name)) for name in self.names)


def expect_same(experiment: Experiment) -> None:
    """Refuse to continue with another plan or other data: the curves could not be compared."""
    file, plan = experiment.out / "plan.json", Plan(experiment.job, experiment.settings).to_dict()
    plan["images"] = experiment.job.checksums(experiment.data)
    experiment.out.mkdir(parents=True, exist_ok=True)
    if not file.is_file():
        file.write_text(json.dumps(plan, indent=1))
    before = json.loads(file.read_text())
    other = [name for name in plan if plan[name] != before.get(name)]
    if other:
        raise SystemExit(f"{experiment.out}: was started with another {', '.join(other)}; name another --out")


# ---- table and plot ----------------------------------------------------------------------------------------------


def results(experiment: Experiment) -> dict[str, Any]:
    """The errors of each network by step, up to the last step that all have reached."""
    rounds = experiment.rounds
    curves = {name: dict(list(experiment.errors(name).items())[:rounds]) for name in experiment.names}
    steps = next(iter(curves.values()))
    size = len(experiment.data.train)
    last = max(steps)
    batch = experiment.settings.batch_tokens
    return {"data": experiment.job.data, "steps": last, "epochs": round(last * batch / size, 2), "curves": curves}


def table(found: dict[str, Any], depths: Sequence[int]) -> str:
    """Means of the last three evaluations, as single ones vary."""
    columns = [(part, kind) for part in ("train", "test") for kind in KINDS]
    head = [f"error after {found['steps']:,} steps", *(f"{kind}, {part}" for part, kind in columns)]
    rows = [
        [f"{depth} layers", *(_percent(found["curves"][f"{kind}{depth}"], f"{part}_error") for part, kind in columns)]
        for depth in depths
    ]
    return common.table(head, rows)


def _percent(curve: Errors, part: str) -> str:
    values = [errors[part] for errors in list(curve.values())[-3:] if part in errors]
    return f"{100 * sum(values) / len(values):.1f} %" if values else "–"


def plot(found: dict[str, Any], depths: Sequence[int], path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4.2), dpi=120, layout="constrained")
    for axes, kind in zip(figure.subplots(1, 2, sharey=True), KINDS, strict=True):
        for colour, depth in zip(COLOURS * len(depths), depths, strict=False):
            curve = found["curves"][f"{kind}{depth}"]
            for part, style, width in (("train_error", "-", 2.0), ("test_error", ":", 1.0)):
                values = [100 * errors[part] for errors in curve.values() if part in errors]
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
    figure.axes[0].set_ylabel("error in % (solid: train, dotted: test)")
    figure.savefig(path)


def main() -> None:
    parser = common.parser(__doc__)
    parser.add_argument("--data", default="digits", help="a data set, as allmask train --task image reads it")
    parser.add_argument("--depths", default=",".join(map(str, DEPTHS)), help="6n + 2 each, separated by commas")
    parser.add_argument("--minutes", type=float, default=40.0)
    parser.add_argument("--every", type=int, default=50, help="steps per turn")
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--optimizer", choices=RATES, default="sgd", help="sgd with momentum is that of the paper")
    parser.add_argument("--lr", type=float, help="[default: 0.1; adamw: 0.001]")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--quiet", action="store_true")
    args = parser.parse_args()
    depths = [int(word) for word in args.depths.split(",")]
    settings = Settings(
        steps=ENDLESS, batch_tokens=args.batch, optimizer=args.optimizer, lr=args.lr or RATES[args.optimizer],
        schedule="constant", warmup=100, weight_decay=1e-4, clip=1e9, seed=args.seed, eval_every=args.every, keep=1,
    )  # fmt: skip
    job = ImageTraining(args.data)
    data = job.images()
    experiment = Experiment(job.settled(data.train), settings, data, args.out, depths)
    expect_same(experiment)
    experiment.run(args.minutes, args.quiet)
    found = results(experiment)
    (args.out / "results.json").write_text(json.dumps(found, indent=1))
    plot(found, depths, args.out / "depth.png")
    print(table(found, depths))
    print(f"\n{found['data']}: {found['epochs']:g} epochs; plot: {args.out / 'depth.png'}")


if __name__ == "__main__":
    main()
