"""Lines of progress, and the time that is left."""

from __future__ import annotations

import pytest

from allmask.training import progress


def test_a_slow_first_step_does_not_count(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    """Once a run of eight minutes began with "1:06:50 left": its first step had compiled kernels."""
    clock = [0.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: clock[0])
    bar = progress.Progress(117, "step")
    for step in range(1, 118):
        clock[0] += 35.0 if step == 1 else 4.0
        bar.update(step, "loss 1")
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "step 1/117 loss 1 0:35 so far"
    assert lines[1] == f"step 4/117 loss 1 {progress.clock(4 * 113)} left"
    assert lines[-1] == f"step 117/117 loss 1 {progress.clock(35 + 4 * 116)} in all"


def test_a_resumed_run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    clock = [0.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: clock[0])
    bar = progress.Progress(100, "step")
    for step in (91, 92):
        clock[0] += 20.0
        bar.update(step)
    assert capsys.readouterr().err.splitlines()[-1].endswith("2:40 left")
