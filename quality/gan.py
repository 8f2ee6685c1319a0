"""GAN experiments: the toy game to its end, vanishing gradients, and images of digits (C25).

    python quality/gan.py --out runs/quality-gan [--data mnist/] [--minutes 30] [--seeds 3]

1. The toy with several seeds: where it ends. The generator's density should equal that of the data (divergence 0), the
   discriminator be ½ (from_half 0), and the value of the game be −log 4.
2. The generator's gradient for each loss, by the number of steps that the discriminator was trained before: a certain
   discriminator makes the gradient of the saturating loss vanish.
3. Images: each preset with each loss, for an equal share of the time that is left; the metrics of generated images, and
   of held-out real ones.

Every run is a folder in --out; report.md and starving.png are written there, too. Existing runs are resumed.
"""

from __future__ import annotations

import argparse
import math
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from common import parser, table

from allmask.gan import metrics, toy
from allmask.gan.networks import PRESETS, Gan, GanConfig, fresh
from allmask.gan.training import LOSSES, GanTraining, GanWorkload, frozen, generator_loss
from allmask.runs.driver import resume, start
from allmask.runs.options import differences, saved_values
from allmask.runs.plan import Plan
from allmask.training import Score, Settings, train
from allmask.vision import checkpoints

AHEAD = (1, 3, 10, 30, 100, 300, 1000)  # steps of the discriminator before the generator
_TOY = ("divergence", "from_half", "value", "best_value")
_METRICS = ("frechet", "classes", "covered")


def main() -> None:
    given = _arguments()
    before = time.monotonic()
    given.out.mkdir(parents=True, exist_ok=True)
    parts = [toys(given.out, given.seeds, given.quick), starving(given.out, AHEAD[:3] if given.quick else AHEAD)]
    left = given.minutes * 60.0 - (time.monotonic() - before)
    parts.append(images(given.out, given.data, max(0.0, left), given.quick))
    report = "\n\n".join(parts) + "\n"
    (given.out / "report.md").write_text(report, encoding="utf-8")
    print(report)


def _arguments() -> argparse.Namespace:
    options = parser(__doc__)
    options.add_argument("--out", type=Path, required=True)
    options.add_argument("--data", default="digits", help="as for allmask train --task image")
    options.add_argument("--minutes", type=float, default=30.0)
    options.add_argument("--seeds", type=int, default=3, help="of the toy")
    options.add_argument("--quick", action="store_true", help="a few steps of each, to check that everything runs")
    return options.parse_args()


def run(values: dict[str, Any], out: Path) -> dict[str, Any]:
    """Start or resume a run; return its result."""
    if (out / "config.yaml").is_file():
        other = differences(saved_values(out), {name: value for name, value in values.items() if name != "epochs"})
        if other:
            raise SystemExit(f"{out}: was started with another plan ({', '.join(other)}); name another --out")
        return resume(out, quiet=True)
    return start(Plan.from_dict({"task": "gan", **values}), out, quiet=True)


# ---- 1. the toy --------------------------------------------------------------------------------------------------


def toys(out: Path, seeds: int, quick: bool) -> str:
    rows = []
    for seed in range(1, (1 if quick else seeds) + 1):
        result = run({"preset": "toy", "seed": seed, **({"steps": 60} if quick else {})}, out / f"toy-{seed}")
        found = result["metrics"]
        rows.append([str(seed), str(result["best_step"])] + [f"{found[name]:.4f}" for name in _TOY])
    bounds = f"−log 4 is {-math.log(4.0):.4f}; the largest possible divergence is log 2, {math.log(2.0):.4f}."
    return f"## The toy\n\n{table(['seed', 'best step', *_TOY], rows)}\n\n{bounds}"


# ---- 2. vanishing gradients --------------------------------------------------------------------------------------


def starving(out: Path, ahead: tuple[int, ...]) -> str:
    """The gradient norm of a generator far from the data, by the steps of the discriminator alone."""
    model = fresh(GanConfig("toy", (1,), **PRESETS["toy"]), torch.Generator().manual_seed(1))
    with torch.no_grad():
        list(model.generator.parameters())[-1].fill_(-1.0)  # far from the data
    rows: list[tuple[int, float, float, float]] = []

    def evaluate(now: Gan, step: int) -> Score | None:
        norms = (gradient_norm(now, LOSSES[0]), gradient_norm(now, LOSSES[1]))
        rows.append((ahead[len(rows)], _mean_probability(now), *norms))
        return None

    for steps in ahead:  # a run for each, from the same start
        work = GanWorkload(toy.examples(torch.Generator().manual_seed(1)), k=steps, batch=256, evaluator=evaluate)
        settings = Settings(
            steps=steps, batch_tokens=256, lr=5e-3, schedule="constant", warmup=0, weight_decay=0.0, clip=1e9,
            precision="fp32", eval_every=steps,
        )  # fmt: skip
        other = fresh(model.config, torch.Generator().manual_seed(1))
        other.load_state_dict(model.state_dict())
        with TemporaryDirectory() as folder:
            train(other, work, settings, Path(folder), quiet=True)
    _draw(rows, out / "starving.png")
    cells = [[str(steps), f"{mean:.4f}", f"{first:.2e}", f"{second:.2e}"] for steps, mean, first, second in rows]
    head = ["discriminator steps", "mean D(G(z))", *(f"gradient norm, {kind}" for kind in LOSSES)]
    return f"## Vanishing gradients\n\n{table(head, cells)}"


def _mean_probability(model: Gan) -> float:
    return model.log_odds(model.sample(4096, torch.Generator().manual_seed(2))).sigmoid().mean().item()


def gradient_norm(model: Gan, kind: str) -> float:
    """The norm of the generator's gradient, for one of the losses."""
    with torch.enable_grad(), frozen(model.discriminator):
        made = model.sample(4096, torch.Generator().manual_seed(2))
        loss = generator_loss(model.log_odds(made), kind) / len(made)
        gradients = torch.autograd.grad(loss, list(model.generator.parameters()))
    return torch.cat([gradient.flatten() for gradient in gradients]).norm().item()


def _draw(rows: list[tuple[int, float, float, float]], path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 4), dpi=120, layout="constrained")
    axes = figure.subplots()
    for column, (kind, colour) in enumerate(zip(LOSSES, ("#5BA886", "#E39A57"), strict=True), 2):
        axes.loglog([row[0] for row in rows], [row[column] for row in rows], marker="o", color=colour, label=kind)
    axes.set_xlabel("discriminator steps before the generator's first")
    axes.set_ylabel("gradient norm of the generator")
    axes.grid(alpha=0.2)
    axes.legend(frameon=False)
    figure.savefig(path)


# ---- 3. images ---------------------------------------------------------------------------------------------------


def images(out: Path, data: str, seconds: float, quick: bool) -> str:
    kinds = [("mlp", "non-saturating"), ("dcgan", "non-saturating"), ("mlp", "saturating"), ("dcgan", "saturating")]
    before = time.monotonic()
    run({"preset": "mlp", "data": data, "epochs": 1.0}, out / "first")  # trains the classifier for all others
    values = {"data": data, "judge": str(out / "first" / "judge" / "final")}
    rows = [["real images, held out", "", "", *_real(data, out / "first" / "judge" / "final")]]
    for number, (preset, loss) in enumerate(kinds[:1] if quick else kinds):
        epochs = 1.0
        if not quick:
            share = (seconds - (time.monotonic() - before)) / (len(kinds) - number)
            epochs = _epochs(out / f"{preset}-first", {**values, "preset": preset}, share)
        result = run({**values, "preset": preset, "loss": loss, "epochs": epochs}, out / f"{preset}-{loss}")
        rows.append([preset, loss, str(result["steps"])] + [f"{result['metrics'][name]:.3g}" for name in _METRICS])
    return f"## Images\n\n{table(['preset', 'loss', 'steps', *_METRICS], rows)}"


def _real(data: str, judge: Path) -> list[str]:
    """The metrics of held-out real images."""
    found = GanTraining(data).examples(seed=1)
    if found.images is None or found.images.held_out is None:
        return ["–"] * len(_METRICS)
    scores = metrics.Evaluator.of(checkpoints.load(judge), found.examples, judge)(found.images.held_out.pixels)
    return [f"{scores[name]:.3g}" for name in _METRICS]


def _epochs(out: Path, values: dict[str, Any], seconds: float) -> float:
    """How many epochs fit in the time, from 1 to 200, measured by a run of one epoch."""
    spent = run({**values, "epochs": 1.0}, out)["seconds"]
    return float(max(1, min(200, int(seconds / max(spent, 1e-3)))))


if __name__ == "__main__":
    main()
