"""Several runs instead of one: the same with other seeds, or with other settings, of which the best is kept.

runs/a/
  config.yaml, result.json, final/     as of a single run; final is the best
  seed-1/ …  or  run-01/ …             the runs, without the checkpoints they no longer need

Small data makes fine-tuning unstable: the seed alone may cost several points (arXiv 2006.04884).

A search tries a grid around the plan's settings: batches of half the size and of the whole, the learning rate times
5/3, 1 and 2/3, the epochs times 1 and 4/3; for a BERT of base size that is batch 16 and 32, rate 5e-5, 3e-5 and 2e-5,
3 and 4 epochs. Bad runs are stopped early by successive halving (arXiv 1502.07943): each run is evaluated ten times;
after the third the better half goes on, after the sixth the better half of these, the rest to the end. What counts is
the best score so far on the held-out records; of equal ones the earlier goes on.
"""

from __future__ import annotations

import json
import logging
import math
import shutil
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from allmask.errors import DivergedError
from allmask.model import Model
from allmask.tasks import finetuning
from allmask.tasks.finetuning import Data
from allmask.tasks.folders import CHECKSUMS, CONFIG, finished_result, is_finished, made_beside, write_result
from allmask.tasks.plan import Plan
from allmask.tasks.values import as_yaml
from allmask.training import Paused, Score, runs
from allmask.training.loop import Lot, Share, Work

log = logging.getLogger("allmask")
BATCHES, RATES, EPOCHS = (1 / 2, 1), (5 / 3, 1, 2 / 3), (1, 4 / 3)
RUNGS = (3, 6, None)  # evaluations, of ten, after which half of the runs is stopped
SCORES, DIVERGED = "scores.json", "diverged"  # files in the folder of a run
_SPENT = ("checkpoints", "start")  # what a run that goes no further does not need


def begin(plan: Plan, data: Data, out: Path) -> Plan:
    """Make the folder of the runs, and settle what all have in common."""
    plan = replace(plan, task=data.task).settled(finetuning.first_model(plan, data), data.train)
    with made_beside(out) as folder:
        config = plan.to_dict() | {CHECKSUMS: finetuning.checksums(plan)}
        (folder / CONFIG).write_text(as_yaml(config), encoding="utf-8")
    return plan


def go_on(plan: Plan, data: Data, out: Path, quiet: bool) -> dict[str, Any]:
    """All runs to their end, from wherever they are; then the best becomes the final one."""
    told, best = (_search if plan.search else _repeat)(plan, data, out, quiet)
    told = {"final": str(out / "final"), **told, "task": plan.to_dict()["task"]}
    told |= {"examples": len(data.train), "skipped": dict(data.skipped)}
    write_result(told, out)
    with made_beside(out / "final") as folder:
        shutil.copytree(best / "final", folder, dirs_exist_ok=True)
    return told


# ---- seeds ---------------------------------------------------------------------------------------------------


def _repeat(plan: Plan, data: Data, out: Path, quiet: bool) -> tuple[dict[str, Any], Path]:
    results: dict[int, dict[str, Any]] = {}
    for seed in range(plan.settings.seed, plan.settings.seed + plan.seeds):
        one = replace(plan, seeds=1, settings=replace(plan.settings, seed=seed))
        results[seed] = _run(one, data, out / f"seed-{seed}", quiet)
        log.info("seed %d: %s", seed, _metrics(results[seed]["metrics"]))
    best = max(results, key=lambda seed: results[seed]["score"])  # the first of equal ones
    names = results[best]["metrics"]
    values = {name: [result["metrics"][name] for result in results.values()] for name in names}
    kept = ("score", "steps", "best_step", "metrics")
    return {
        "best_seed": best,
        "metrics": {name: mean(of) for name, of in values.items()},
        "deviation": {name: stdev(of) for name, of in values.items()},
        "seeds": [{"seed": seed, **{name: result[name] for name in kept}} for seed, result in results.items()],
        "seconds": round(sum(result["seconds"] for result in results.values()), 1),
    }, out / f"seed-{best}"


def _run(plan: Plan, data: Data, folder: Path, quiet: bool) -> dict[str, Any]:
    """One run, from wherever it is to its end."""
    told = finished_result(folder)
    if told is None:
        told = finetuning.go_on(_begun(plan, data, folder), data, folder, quiet)
    _remove(folder, _SPENT)
    return told


def _begun(plan: Plan, data: Data, folder: Path) -> Plan:
    return finetuning.saved_plan(folder) if (folder / CONFIG).is_file() else finetuning.begin(plan, data, folder)


def _remove(folder: Path, names: Sequence[str]) -> None:
    for name in names:
        shutil.rmtree(folder / name, ignore_errors=True)


def _metrics(metrics: dict[str, float]) -> str:
    return "  ".join(f"{name} {value:.4g}" for name, value in metrics.items())


# ---- searching -----------------------------------------------------------------------------------------------


def scores_in(folder: Path) -> list[float]:
    """Of the evaluations of a run so far."""
    file = folder / SCORES
    return json.loads(file.read_text(encoding="utf-8")) if file.is_file() else []


@dataclass
class Trial:
    """One of the grid's runs, which goes on in steps: to a number of evaluations, or to its end."""

    plan: Plan
    folder: Path

    @property
    def scores(self) -> list[float]:
        return scores_in(self.folder)

    @property
    def diverged(self) -> bool:
        return (self.folder / DIVERGED).exists()

    def best(self, evaluations: int | None = None) -> float:
        return -math.inf if self.diverged else max(self.scores[:evaluations], default=-math.inf)

    def advance(self, data: Data, evaluations: int | None, quiet: bool) -> None:
        """What is done already is not done again; so the same happens after an interruption."""
        reached = evaluations is not None and len(self.scores) >= evaluations
        if reached or is_finished(self.folder) or self.diverged:
            return
        plan = _begun(self.plan, data, self.folder)
        watch = _Watch(self.folder, evaluations)
        try:
            with suppress(Paused):
                finetuning.go_on(plan, data, self.folder, quiet, watch.over)
        except DivergedError as error:
            log.info("%s: %s", self.folder.name, error.message)
            (self.folder / DIVERGED).touch()

    def told(self, total: int = 10) -> dict[str, Any]:
        settings = self.plan.settings
        values = {"batch_tokens": settings.batch_tokens, "lr": settings.lr, "epochs": settings.epochs}
        done = len(self.scores)
        how = "to the end" if is_finished(self.folder) else f"stopped after {done} of {total} evaluations"
        how = "diverged" if self.diverged else how
        score = None if self.diverged or not done else self.best()
        return {"run": self.folder.name, **values, "score": score, "how": how}


@dataclass
class _Watch:
    """Writes down the scores of a run and asks the loop for a pause when there are enough."""

    folder: Path
    enough: int | None
    scores: list[float] = field(default_factory=list)

    def over(self, work: Work) -> Work:
        made = runs.checkpoints(self.folder)
        last = int(made[0].name.removeprefix("step-")) if made else 0
        lines = [line for line in runs.read_metrics(self.folder) if any(name.startswith("eval_") for name in line)]
        seen = sum(line["step"] <= last for line in lines)  # later ones are made again
        self.scores = scores_in(self.folder)[:seen]
        return _Watched(work, self)

    def noted(self, score: Score) -> Score:
        self.scores.append(score.value)
        (self.folder / SCORES).write_text(json.dumps(self.scores), encoding="utf-8")
        return replace(score, pause=self.enough is not None and len(self.scores) >= self.enough)


@dataclass
class _Watched:
    work: Work
    watch: _Watch

    @property
    def lengths(self) -> Any:
        return self.work.lengths

    def batch(self, numbers: Sequence[int], epoch: int) -> Lot | Share:
        return self.work.batch(numbers, epoch)

    def evaluate(self, model: Model, step: int = 0) -> Score | None:
        score = self.work.evaluate(model, step)
        return None if score is None else self.watch.noted(score)


def _search(plan: Plan, data: Data, out: Path, quiet: bool) -> tuple[dict[str, Any], Path]:
    trials = grid(plan, out)
    alive = trials
    for evaluations in RUNGS:
        alive = _rung(alive, data, evaluations, quiet)
        if evaluations is not None:
            log.info("%d of %d runs go on: %s", len(alive), len(trials), ", ".join(one.folder.name for one in alive))
    best = max(alive, key=lambda trial: trial.best())
    told = finished_result(best.folder)
    if told is None:
        raise DivergedError("no run came to its end", "start again with a lower --lr")
    for trial in alive:
        _remove(trial.folder, _SPENT)
    kept = {name: told[name] for name in ("steps", "best_step", "score", "metrics")}
    tried = sorted(
        (trial.told() for trial in trials), key=lambda row: math.inf if row["score"] is None else -row["score"]
    )
    return {"best_run": best.folder.name, **kept, "tried": tried}, best.folder


def _rung(alive: list[Trial], data: Data, evaluations: int | None, quiet: bool) -> list[Trial]:
    """Those that go on. One that cannot be among them any more is given up at once: so much room on the disk."""
    most = len(alive) if evaluations is None else math.ceil(len(alive) / 2)
    ahead: list[Trial] = []
    for trial in alive:
        trial.advance(data, evaluations, quiet)
        log.info("%s: %s", trial.folder.name, _words(trial))
        ahead = sorted([*ahead, trial], key=lambda one: -one.best(evaluations))
        for given_up in ahead[most:]:
            _remove(given_up.folder, _SPENT)
        ahead = ahead[:most]
    return [trial for trial in alive if trial in ahead]


def _words(trial: Trial) -> str:
    told = trial.told()
    score = "no score" if told["score"] is None else f"score {told['score']:.4g}"
    return f"batch {told['batch_tokens']:,} tokens  lr {told['lr']:.2g}  epochs {told['epochs']:g}  {score}"


def grid(plan: Plan, out: Path) -> list[Trial]:
    settings, made = plan.settings, []
    for number, (batch, rate, epochs) in enumerate(product(BATCHES, RATES, EPOCHS), 1):
        values = {
            "batch_tokens": max(1, round(settings.batch_tokens * batch)),
            "lr": float(f"{settings.lr * rate:.3g}"),
        }
        values |= {
            "epochs": float(f"{settings.epochs * epochs:.3g}"),
            "eval_every": None,
            "save_every": None,
            "keep": 1,
        }
        made.append(Trial(replace(plan, search=False, settings=replace(settings, **values)), out / f"run-{number:02d}"))
    return made
