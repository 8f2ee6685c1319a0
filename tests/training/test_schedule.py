"""Learning rates by hand-worked values, and settings that refuse nonsense."""

from __future__ import annotations

import pytest

from allmask.errors import UsageError
from allmask.options import FinetuneOptions, Settings
from allmask.runs.options import as_saved
from allmask.training.schedule import constant, cosine, inverse_root, linear, noam


def test_linear():
    assert [linear(step, 10, 2) for step in (0, 1, 2, 6, 9)] == [0.5, 1.0, 1.0, 0.5, 0.125]
    assert linear(0, 10, 0) == 1.0


def test_cosine_and_constant():
    assert [round(cosine(step, 10, 2), 6) for step in (1, 2, 6, 10)] == [1.0, 1.0, 0.5, 0.0]
    assert [constant(step, 10, 4) for step in (0, 1, 3, 9)] == [0.25, 0.5, 1.0, 1.0] and constant(0, 10, 0) == 1.0


def test_the_2017_schedule_peaks_at_the_end_of_its_warm_up():
    rates = [noam(step, 512) for step in range(8000)]
    assert rates.index(max(rates)) == 3999  # the 4000th step
    assert max(rates) == pytest.approx(512**-0.5 * 4000**-0.5)
    assert rates[0] == pytest.approx(512**-0.5 * 4000**-1.5)
    for step in (0, 100, 3999, 7999):
        assert inverse_root(step, 8000, 4000) == pytest.approx(rates[step] / max(rates))


def test_settings_come_back_from_plain_values():
    settings = Settings(lr=2e-3, epochs=5, betas=(0.9, 0.98))
    plain = as_saved(FinetuneOptions.flat_settings(settings), ())
    assert plain["betas"] == [0.9, 0.98] and Settings(**{**plain, "betas": tuple(plain["betas"])}) == settings


@pytest.mark.parametrize(
    "file, message",
    [
        ({"dropout": 1.0}, "dropout is 1.0"),
        ({"lr": -1}, "lr is -1"),
        ({"schedule": "wavy"}, "expected one of linear, cosine"),
        ({"precision": "fp8"}, "expected auto, fp32 or bf16"),
        ({"label_smoothing": 1.0}, "label_smoothing"),
        ({"steps": 0}, "steps is 0"),
    ],
)
def test_nonsense_is_refused(file, message):
    with pytest.raises(UsageError, match=message):
        Settings(**file)
