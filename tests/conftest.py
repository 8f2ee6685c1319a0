"""What all tests share: one thread, no network, no deadlines, and the command line run in this process."""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch: small tensors lose time to threads
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("MPLBACKEND", "agg")
os.environ.pop("ALLMASK_DEBUG", None)

import pytest
from hypothesis import settings

settings.register_profile("allmask", deadline=None, print_blob=True)  # a busy machine is not a bug
settings.load_profile("allmask")
os.fsync = lambda handle: None  # waiting for the disk shows nothing here: tests/test_files.py checks that it is called


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Start with the tests that take longest, so that no worker is left with them at the end."""
    items.sort(key=lambda item: "test_process_group" not in item.nodeid)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say aloud that no browser or no ARM processor was there: a count of skipped tests does not tell."""
    reasons = {str(report.longrepr[-1]) for report in terminalreporter.stats.get("skipped", [])}
    for reason in sorted(reason for reason in reasons if "browser tests" in reason or "ARM tests" in reason):
        terminalreporter.write_line(reason.removeprefix("Skipped: "), yellow=True)


@pytest.fixture(scope="session", autouse=True)
def one_plot(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Draw loss.png for one run only, and copy it for the others; tests/training/test_log.py looks at what is drawn."""
    from allmask.runs import plan

    drawn: list[Path] = []

    def plot(run: Path) -> Path:
        if not drawn:
            drawn.append(Path(shutil.copy(draw(run), tmp_path_factory.mktemp("plot") / "loss.png")))
        return Path(shutil.copy(drawn[0], run / "loss.png"))

    draw, plan.plot_run = plan.plot_run, plot
    yield
    plan.plot_run = draw


class Ran(NamedTuple):
    code: int
    out: str
    err: str


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str]) -> Iterator[Callable[..., Ran]]:
    """`cli("mask", "prefix", …)` runs the command line here and returns its exit code, stdout and stderr."""
    from allmask.cli.main import main

    logger = logging.getLogger("allmask")  # a command takes its messages for itself
    before = logger.handlers, logger.level, logger.propagate

    def run(*words: object) -> Ran:
        capsys.readouterr()
        code = main([str(word) for word in words])
        return Ran(code, *capsys.readouterr())

    yield run
    logger.handlers, logger.level, logger.propagate = before
