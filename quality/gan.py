"""Adversarial networks at work: a toy game to its end, what starves a loss, and images of digits (C25).

    python quality/gan.py --out runs/quality-gan [--data mnist/] [--minutes 30] [--seeds 3]

1. The toy, several seeds: where it ends. The generator's density should be the data's (divergence 0), the
   discriminator say ½ (from_half 0), and the value of the game be −log 4.
2. How hard each loss pulls at a generator, by how many steps the discriminator is ahead: a sure one starves the
   saturating loss.
3. Images: each preset with each loss, for an equal share of the time that is left; what the judge says of them beside
   what it says of real images that were held out.

Every run is a folder under --out; report.md and starving.png are written there, too. Runs that are there are gone on
with.
"""

from __future__ import annotations

import argparse
import math
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from allmask.gan import judging, toy
from allmask.gan.learning import LOSSES, GanWorkload, fixed, generator_loss
from allmask.gan.networks import PRESETS, Gan, GanConfig, fresh
from allmask.gan.task import GanTraining
from allmask.runs.driver import resume, start
from allmask.runs.options import differences, saved_values
from allmask.runs.plan import Plan
from allmask.training import Score, Settings, train
from allmask.vision import files

AHEAD = (1, 3, 10, 30, 100, 300, 1000)  # steps of the discriminator
_METRICS = ("frechet", "classes", "covered")


def main() -> None:
    given = _arguments()
    began = time.monotonic()
    given.out.mkdir(parents=True, exist_ok=True)
    parts = [toys(given.out, given.seeds, given.quick), starving(given.out, AHEAD[:3] if given.quick else AHEAD)]
    left = given.minutes * 60.0 - (time.monotonic() - began)
    parts.append(images(given.out, given.data, max(0.0, left), given.quick))
    report = "\n\n".join(parts) + "\n"
    (given.out / "report.md").write_text(report, encoding="utf-8")
    print(report)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--data", default="digits", help="as of allmask train --task image")
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--seeds", type=int, default=3, help="of the toy")
    parser.add_argument("--quick", action="store_true", help="a few steps of each, to see that all of it runs")
    return parser.parse_args()


def table(head: list[str], rows: list[list[str]]) -> str:
    return "\n".join("| " + " | ".join(row) + " |" for row in [head, ["---"] * len(head), *rows])


def run(asked: dict[str, Any], out: Path) -> dict[str, Any]:
    """What a run tells at its end."""
    if (out / "config.yaml").is_file():
        other = differences(saved_values(out), {name: value for name, value in asked.items() if name != "epochs"})
        if other:
            raise SystemExit(f"{out}: was begun with another plan ({', '.join(other)}); name another --out")
        return resume(out, quiet=True)
    return start(Plan.from_dict({"task": "gan", **asked}), out, quiet=True)


# ---- 1 ---------------------------------------------------------------------------------------------------------


def toys(out: Path, seeds: int, quick: bool) -> str:
    rows = []
    for seed in range(1, (1 if quick else seeds) + 1):
        told = run({"preset": "toy", "seed": seed, **({"steps": 60} if quick else {})}, out / f"toy-{seed}")
        found = told["metrics"]
        rows.append([str(seed), str(told["best_step"])] + [f"{found[name]:.4f}" for name in _TOY])
    lowest = f"−log 4 is {-math.log(4.0):.4f}; without learning, divergence is at most log 2, {math.log(2.0):.4f}."
    return f"## The toy\n\n{table(['seed', 'step kept', *_TOY], rows)}\n\n{lowest}"


_TOY = ("divergence", "from_half", "value", "best_value")


# ---- 2 ---------------------------------------------------------------------------------------------------------


def starving(out: Path, ahead: tuple[int, ...]) -> str:
    """The size of the gradient at a generator that is far off, under a discriminator that had so many steps."""
    model = fresh(GanConfig("toy", (1,), **PRESETS["toy"]), torch.Generator().manual_seed(1))
    with torch.no_grad():
        list(model.generator.parameters())[-1].fill_(-1.0)  # far from the data
    rows: list[tuple[int, float, float, float]] = []

    def judge(now: Gan, step: int) -> Score | None:
        rows.append((ahead[len(rows)], _sure(now), _pull(now, LOSSES[0]), _pull(now, LOSSES[1])))
        return None

    for steps in ahead:  # a run for each, from the same start
        work = GanWorkload(toy.examples(torch.Generator().manual_seed(1)), k=steps, batch=256, judge=judge)
        settings = Settings(
            steps=steps, batch_tokens=256, lr=5e-3, schedule="constant", warmup=0, weight_decay=0.0, clip=1e9,
            precision="fp32", eval_every=steps,
        )  # fmt: skip
        other = fresh(model.config, torch.Generator().manual_seed(1))
        other.load_state_dict(model.state_dict())
        with TemporaryDirectory() as folder:
            train(other, work, settings, Path(folder), quiet=True)
    _draw(rows, out / "starving.png")
    told = [[str(steps), f"{sure:.4f}", f"{calm:.2e}", f"{full:.2e}"] for steps, sure, calm, full in rows]
    head = ["steps of D ahead", "D of what is made", *(f"gradient, {kind}" for kind in LOSSES)]
    return f"## A discriminator that is too good\n\n{table(head, told)}"


def _sure(model: Gan) -> float:
    return model.log_odds(model.sample(4096, torch.Generator().manual_seed(2))).sigmoid().mean().item()


def _pull(model: Gan, kind: str) -> float:
    with torch.enable_grad(), fixed(model.discriminator):
        made = model.sample(4096, torch.Generator().manual_seed(2))
        loss = generator_loss(model.log_odds(made), kind) / len(made)
        found = torch.autograd.grad(loss, list(model.generator.parameters()))
    return torch.cat([one.flatten() for one in found]).norm().item()


def _draw(rows: list[tuple[int, float, float, float]], path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 4), dpi=120, layout="constrained")
    axes = figure.subplots()
    for column, (kind, colour) in enumerate(zip(LOSSES, ("#5BA886", "#E39A57"), strict=True), 2):
        axes.loglog([row[0] for row in rows], [row[column] for row in rows], marker="o", color=colour, label=kind)
    axes.set_xlabel("steps of the discriminator ahead")
    axes.set_ylabel("gradient of the generator")
    axes.grid(alpha=0.2)
    axes.legend(frameon=False)
    figure.savefig(path)


# ---- 3 ---------------------------------------------------------------------------------------------------------


def images(out: Path, data: str, seconds: float, quick: bool) -> str:
    kinds = [("mlp", "non-saturating"), ("dcgan", "non-saturating"), ("mlp", "saturating"), ("dcgan", "saturating")]
    began = time.monotonic()
    run({"preset": "mlp", "data": data, "epochs": 1.0}, out / "first")  # and the judge of all others
    asked = {"data": data, "judge": str(out / "first" / "judge" / "final")}
    rows = [["real images, held out", "", "", *_real(data, out / "first" / "judge" / "final")]]
    for number, (preset, loss) in enumerate(kinds[:1] if quick else kinds):
        left = seconds - (time.monotonic() - began)
        epochs = (
            1.0
            if quick
            else _epochs(out / f"{preset}-first", {**asked, "preset": preset}, left / (len(kinds) - number))
        )
        told = run({**asked, "preset": preset, "loss": loss, "epochs": epochs}, out / f"{preset}-{loss}")
        rows.append([preset, loss, str(told["steps"])] + [f"{told['metrics'][name]:.3g}" for name in _METRICS])
    return f"## Images\n\n{table(['preset', 'loss', 'steps', *_METRICS], rows)}"


def _real(data: str, judge: Path) -> list[str]:
    """What the judge says of real images that it has not seen."""
    found = GanTraining(data).examples(seed=1)
    if found.images is None or found.images.held_out is None:
        return ["–"] * len(_METRICS)
    told = judging.Evaluator.of(files.load(judge), found.examples, judge)(found.images.held_out.pixels)
    return [f"{told[name]:.3g}" for name in _METRICS]


def _epochs(out: Path, asked: dict[str, Any], seconds: float) -> float:
    """As many as there is time for, by the speed of one: from 1 to 200."""
    spent = run({**asked, "epochs": 1.0}, out)["seconds"]
    return float(max(1, min(200, int(seconds / max(spent, 1e-3)))))


if __name__ == "__main__":
    main()
