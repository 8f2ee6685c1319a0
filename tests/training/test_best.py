"""Which weights are kept, and how many evaluations a run has."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from allmask.training import Score, Settings, train
from allmask.training.loop import Trainer, why_better
from tests.training.test_loop import FAST, Copying, model


def score(value: float, loss: float | None = None, stderr: float | None = None, metric: str = "rouge_l") -> Score:
    return Score(value, {}, loss=loss, stderr=stderr, metric=metric)


@pytest.mark.parametrize(
    ("new", "best", "because"),
    [
        # More than the standard error of the difference, √(3² + 4²): the metric decides, even against the loss
        (score(56.0, 2.0, 3.0), score(50.0, 1.0, 4.0), "rouge_l rose by 6 ± 5"),
        (score(44.0, 1.0, 3.0), score(50.0, 2.0, 4.0), None),
        # Less than that: the loss decides, even against the metric
        (score(46.0, 1.0, 3.0), score(50.0, 2.0, 4.0), "the held-out loss fell from 2 to 1 (rouge_l: -4 ± 5, which is"),
        (score(54.0, 2.0, 3.0), score(50.0, 1.0, 4.0), None),
        (score(54.0, 1.0, 3.0), score(50.0, 1.0, 4.0), None),
        # No standard error: the loss
        (score(10.0, 1.0), score(50.0, 2.0), "the held-out loss fell from 2 to 1"),
        (score(90.0, 2.0), score(50.0, 1.0), None),
        # Neither: the metric
        (score(51.0), score(50.0), "rouge_l rose from 50 to 51"),
        (score(50.0), score(50.0), None),
        (score(-1.0, metric="−frechet"), score(-2.0, metric="−frechet"), "frechet fell from 2 to 1"),
    ],
)
def test_which_evaluation_is_better(new: Score, best: Score, because: str | None):
    found = why_better(new, best)
    assert found is None if because is None else found is not None and found.startswith(because)


class Scored(Copying):
    """Evaluations with given scores."""

    def evaluate(self, model, step):
        assert self.scores is not None
        return next(self.scores)


def test_noise_of_the_metric_does_not_choose_the_weights(tmp_path: Path):
    """The best metric, at step 4, is luck: the lowest loss, at step 8, is kept; at step 12 it is higher again."""
    scores = [score(60.0, 3.0, 10.0), score(55.0, 1.0, 10.0), score(59.0, 2.0, 10.0)]
    result = train(model(), Scored(scores=scores), FAST, tmp_path / "run", quiet=True)
    assert result.best_step == 8 and result.kept_because.startswith("since step 4 the held-out loss fell from 3 to 1")


@pytest.mark.parametrize(
    ("steps", "held_out", "evaluations"),
    [
        (1, 0, 1),
        (13, 0, 1),
        (30, 0, 3),
        (95, 0, 9),
        (1000, 0, 10),
        (1000, 60 * 1000, 1),  # as many tokens as in training
        (1000, 60 * 200, 5),
        (1000, 60 * 5000, 1),
    ],
)
def test_evaluations_follow_the_length_of_the_run(tmp_path: Path, steps: int, held_out: int, evaluations: int):
    settings = Settings(steps=steps, batch_tokens=60)
    made = Trainer(model(), Copying(), settings, tmp_path, held_out=held_out)
    assert math.ceil(steps / made.eval_every) == evaluations
    assert made.save_every == made.eval_every


def test_the_number_of_evaluations_can_be_given(tmp_path: Path):
    assert Trainer(model(), Copying(), Settings(steps=30, eval_every=7), tmp_path, held_out=10**9).eval_every == 7
    assert Trainer(model(), Copying(), Settings(steps=30), tmp_path, evaluations=10).eval_every == 3
