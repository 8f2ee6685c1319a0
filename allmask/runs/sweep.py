"""Several runs instead of one, with other seeds (--seeds) or other settings (--search). The best one is kept.

runs/a/
  config.yaml, result.json, final/     as in a single run; final/ is that of the best run
  seed-1/ …  or  run-01/ …             the runs, without checkpoints

Small data makes fine-tuning unstable: the seed alone may cost several points (arXiv 2006.04884).

A search tries a grid around the plan's settings: the batch size times 1/2 and 1, the learning rate times 5/3, 1 and
2/3, the epochs times 1 and 4/3. For a BERT of base size that is batch 16 and 32, learning rate 5e-5, 3e-5 and 2e-5, 3
and 4 epochs. Bad runs are stopped early by successive halving (arXiv 1502.07943): each run is evaluated ten times;
after the third evaluation the better half continues, after the sixth the better half of those. Runs are compared by the
score of their best evaluation so far; of equal ones the earlier continues.
"""

from __future__ import annotations

import json
import logging
import math
import shutil
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from allmask.errors import CheckpointError, DivergedError
from allmask.files import replace_folder, write_atomically
from allmask.runs.folder import FINAL, START, finished_result, is_finished, write_result
from allmask.runs.plan import Plan
from allmask.training import Paused, Score, Workload, checkpoint
from allmask.training.log import read_metrics
from allmask.training.loop import why_better

log = logging.getLogger("allmask")
BATCHES, RATES, EPOCHS = (1 / 2, 1), (5 / 3, 1, 2 / 3), (1, 4 / 3)
EVALUATIONS = 10  # of each run of a search
RUNGS = (3, 6, None)  # evaluations after which half of the runs are stopped
SCORES, DIVERGED = "scores.json", "diverged"  # files in the folder of a run
Watched = Callable[[Workload], Workload]
One = Callable[[Plan, Path, Watched, int | None], dict[str, Any]]  # starts or continues a run in a folder -> its result


def run(plan: Plan, out: Path, one: One) -> dict[str, Any]:
    """Start or continue all runs, then copy the best one's model to final/."""
    single = replace(plan, job=replace(plan.job, seeds=1, search=False))  # type: ignore[call-arg]
    seeds = getattr(plan.job, "seeds", 1)
    more, best = _repeat(single, seeds, out, one) if seeds > 1 else _search(single, out, one)
    of_best = finished_result(best)
    assert of_best is not None
    shared = {name: of_best[name] for name in ("task", "examples", "skipped") if name in of_best}
    result = {"final": str(out / FINAL), **more, **shared}
    write_result(result, out)
    with replace_folder(out / FINAL) as folder:  # it is there already if result.json was damaged
        shutil.copytree(best / FINAL, folder, dirs_exist_ok=True)
    return result


def _remove_spent(folder: Path) -> None:
    """Remove the large files of a run that is finished or given up."""
    for name in ("checkpoints", START):
        shutil.rmtree(folder / name, ignore_errors=True)


# ---- seeds ---------------------------------------------------------------------------------------------------


def _repeat(plan: Plan, seeds: int, out: Path, one: One) -> tuple[dict[str, Any], Path]:
    results: dict[int, dict[str, Any]] = {}
    for seed in range(plan.settings.seed, plan.settings.seed + seeds):
        seeded = replace(plan, settings=replace(plan.settings, seed=seed))
        results[seed] = one(seeded, out / f"seed-{seed}", lambda work: work, None)
        _remove_spent(out / f"seed-{seed}")
        metrics = "  ".join(f"{name} {value:.4g}" for name, value in results[seed]["metrics"].items())
        log.info("seed %d: %s", seed, metrics)
    best = max(results, key=lambda seed: results[seed]["score"])  # the first of equal ones
    names = results[best]["metrics"]
    values = {name: [result["metrics"][name] for result in results.values()] for name in names}
    kept = ("score", "steps", "best_step", "metrics")
    return {
        "best_seed": best,
        "metrics": {name: mean(found) for name, found in values.items()},
        "deviation": {name: stdev(found) for name, found in values.items()},
        "seeds": [{"seed": seed, **{name: result[name] for name in kept}} for seed, result in results.items()],
        "seconds": round(sum(result["seconds"] for result in results.values()), 1),
    }, out / f"seed-{best}"


# ---- search --------------------------------------------------------------------------------------------------


def scores_in(folder: Path) -> list[Score]:
    """Return the evaluations of a run so far."""
    file = folder / SCORES
    if not file.is_file():
        return []
    try:
        return [Score(**values) for values in json.loads(file.read_text(encoding="utf-8"))]
    except (ValueError, TypeError, RecursionError):
        hint = f"remove {folder}: this run is then made again"
        raise CheckpointError(f"{file}: damaged: the scores of the run cannot be read", hint) from None


def best_of(scores: list[Score]) -> Score | None:
    """Return the evaluation that the training loop would keep."""
    best = None
    for score in scores:
        if best is None or why_better(score, best):
            best = score
    return best


@dataclass
class Trial:
    """One run of the grid, trained in stages: up to a number of evaluations, or to its end."""

    plan: Plan
    folder: Path

    @property
    def diverged(self) -> bool:
        return (self.folder / DIVERGED).exists()

    def score(self, evaluations: int | None = None) -> float:
        best = best_of(scores_in(self.folder)[:evaluations])
        return -math.inf if self.diverged or best is None else best.value

    def advance(self, one: One, evaluations: int | None) -> None:
        """Train up to a number of evaluations (None: to the end). Work done before an interruption is not repeated."""
        reached = evaluations is not None and len(scores_in(self.folder)) >= evaluations
        if reached or self.diverged or finished_result(self.folder) is not None:
            return
        try:
            with suppress(Paused):
                one(self.plan, self.folder, lambda work: _Recorder(work, self.folder, evaluations), EVALUATIONS)
        except DivergedError as error:
            log.info("%s: %s", self.folder.name, error.message)
            (self.folder / DIVERGED).touch()

    def row(self) -> dict[str, Any]:
        """Return its row in the table of results."""
        settings = self.plan.settings
        values = {"batch_tokens": settings.batch_tokens, "lr": settings.lr, "epochs": settings.epochs}
        done = len(scores_in(self.folder))
        how = "to the end" if is_finished(self.folder) else f"stopped after {done} of {EVALUATIONS} evaluations"
        how = "diverged" if self.diverged else how
        score = None if self.diverged or not done else self.score()
        return {"run": self.folder.name, **values, "score": score, "how": how}


class _Recorder:
    """A workload that records the scores of its evaluations in a file, and pauses the run when there are enough."""

    def __init__(self, work: Workload, folder: Path, enough: int | None):
        self.work, self.folder, self.enough = work, folder, enough
        self.lengths, self.batch = work.lengths, work.batch
        last = next(iter(checkpoint.history(folder).resumable), 0)
        lines = [line for line in read_metrics(folder) if any(name.startswith("eval_") for name in line)]
        self.scores = scores_in(folder)[: sum(line["step"] <= last for line in lines)]  # later ones are made again

    def evaluate(self, model: Any, step: int = 0) -> Score | None:
        score = self.work.evaluate(model, step)
        if score is None:
            return None
        self.scores.append(replace(score, samples=(), warnings=()))
        write_atomically(self.folder / SCORES, json.dumps([asdict(one) for one in self.scores]))
        return replace(score, pause=self.enough is not None and len(self.scores) >= self.enough)


def _search(plan: Plan, out: Path, one: One) -> tuple[dict[str, Any], Path]:
    trials = grid(plan, out)
    alive = trials
    for evaluations in RUNGS:
        alive = _rung(alive, one, evaluations)
        if evaluations is not None:
            log.info("%d of %d runs continue: %s", len(alive), len(trials), ", ".join(one.folder.name for one in alive))
    best = max(alive, key=lambda trial: trial.score())
    result = finished_result(best.folder)
    if result is None:
        raise DivergedError("all runs diverged", "start again with a lower --lr")
    for trial in alive:
        _remove_spent(trial.folder)
    kept = {name: result[name] for name in ("steps", "best_step", "score", "metrics")}
    tried = sorted(
        (trial.row() for trial in trials), key=lambda row: math.inf if row["score"] is None else -row["score"]
    )
    return {"best_run": best.folder.name, **kept, "tried": tried}, best.folder


def _rung(alive: list[Trial], one: One, evaluations: int | None) -> list[Trial]:
    """Train all to the next rung and return the better half. The others are given up as soon as possible, to free
    disk space."""
    most = len(alive) if evaluations is None else math.ceil(len(alive) / 2)
    ahead: list[Trial] = []
    for trial in alive:
        trial.advance(one, evaluations)
        row = trial.row()
        score = "no score" if row["score"] is None else f"score {row['score']:.4g}"
        log.info("%s: batch %s tokens  lr %.2g  epochs %g  %s", row["run"], f"{row['batch_tokens']:,}", row["lr"],
                 row["epochs"], score)  # fmt: skip
        ahead = sorted([*ahead, trial], key=lambda trial: -trial.score(evaluations))
        for given_up in ahead[most:]:
            _remove_spent(given_up.folder)
        ahead = ahead[:most]
    return [trial for trial in alive if trial in ahead]


def grid(plan: Plan, out: Path) -> list[Trial]:
    settings, made = plan.settings, []
    for number, (batch, rate, epochs) in enumerate(product(BATCHES, RATES, EPOCHS), 1):
        values = {
            "batch_tokens": max(1, round(settings.batch_tokens * batch)),
            "lr": float(f"{settings.lr * rate:.3g}"),
            "epochs": float(f"{settings.epochs * epochs:.3g}"),
            "eval_every": None,
            "save_every": None,
            "keep": 1,
        }
        made.append(Trial(replace(plan, settings=replace(settings, **values)), out / f"run-{number:02d}"))
    return made
