"""What all tests share: one thread, no network, no deadlines, and the command line run in this process."""

from __future__ import annotations

import gc
import logging
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch: small tensors lose time to threads
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("MPLBACKEND", "agg")
os.environ.pop("ALLMASK_DEBUG", None)

import pytest
from hypothesis import HealthCheck, settings

from tests.warm_python import warm_python

MEMORY = Path("/dev/shm")  # files that are kept in memory, in Linux
ROOM = 3 << 30  # bytes; all files of a run are less than half of that
# A busy machine is not a bug: neither a slow example nor slow drawing is.
settings.register_profile("allmask", deadline=None, print_blob=True, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("allmask")
WARM = """
import torch._dynamo, torch.distributed.fsdp, torch.distributed.run
import allmask.cli.finetune, allmask.cli.pretrain, allmask.cli.serve
import allmask.runs.finetuning, allmask.runs.pretraining, allmask.tasks.classify, allmask.tasks.seq2seq
import allmask.tasks.continuation, allmask.tasks.fill, allmask.decoding.fast.engines
import allmask.serve.app, allmask.serve.server, allmask.serve.models
import rouge_score.rouge_scorer, sacrebleu
from allmask.training.flops import measured_peak
measured_peak(torch.float32)
import ipykernel.ipkernel, ipykernel.zmqshell, matplotlib_inline.backend_inline
from torch.distributed.elastic.rendezvous import dynamic_rendezvous
dynamic_rendezvous.get_method_name = lambda depth=2: ""  # for torchrun's log: it looks at all modules, for a second
"""  # done by processes that tests start, and therefore only once
PYTHON = pytest.StashKey[str]()
gc.disable()  # until all tests are collected: modules and tests stay
os.fsync = lambda handle: None  # waiting for the disk shows nothing here: tests/test_files.py checks that it is called


def pytest_configure(config: pytest.Config) -> None:
    """Have one folder for temporary files and one warm Python, which the process that starts the workers passes on.

    With TMPDIR set, temporary files are there, and those of tests that failed are kept.
    """
    if hasattr(config, "workerinput"):
        config.stash[PYTHON] = config.workerinput["python"]
        return
    stack = ExitStack()
    config.add_cleanup(stack.close)
    if "TMPDIR" not in os.environ and _has_room(MEMORY):
        tempfile.tempdir = stack.enter_context(TemporaryDirectory(prefix="allmask-", dir=MEMORY))
        os.environ["TMPDIR"] = tempfile.tempdir
    folder = stack.enter_context(TemporaryDirectory(prefix="python-"))
    config.stash[PYTHON] = stack.enter_context(warm_python(Path(folder), WARM))


def _has_room(folder: Path) -> bool:
    """Whether temporary files can be there. Tests delete thousands, and some disks take milliseconds for each."""
    try:
        found = os.statvfs(folder)
    except OSError:
        return False
    return os.access(folder, os.W_OK) and not found.f_flag & os.ST_NOEXEC and found.f_bavail * found.f_frsize > ROOM


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    node.workerinput["python"] = node.config.stash[PYTHON]


def pytest_sessionstart(session: pytest.Session) -> None:
    """Let every second worker import the tests from the last one on, so that each compiles half of them."""
    worker = os.environ.get("PYTEST_XDIST_WORKER", "gw0")
    if int(worker.removeprefix("gw")) % 2 and session.config.args_source == pytest.Config.ArgsSource.TESTPATHS:
        here = Path(__file__).parent
        for path in sorted(here.rglob("test_*.py"), reverse=True):
            with suppress(Exception, pytest.skip.Exception):  # raised once more when it is collected
                import_module(".".join(path.relative_to(here.parent).with_suffix("").parts))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Start with the tests that take longest, so that no worker is left with them at the end.

    Those that start processes are among them; as one worker gets the first tests, it alone has a server for them.
    Those that fork this process do so while it is still small.
    """
    longest = re.compile(
        "test_process_group|test_packaging|test_guard|test_notebooks|test_pages|quality/|runs/test_faults|test_bombs"
    )
    items.sort(key=lambda item: not longest.search(item.nodeid) and "python" not in getattr(item, "fixturenames", ()))


def pytest_collection_finish() -> None:
    """Keep the garbage collector from walking through what all tests share: modules, and thousands of tests."""
    gc.collect()
    gc.freeze()
    gc.enable()
    gc.set_threshold(100_000, 20, 20)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say aloud that no browser or no ARM processor was there: a count of skipped tests does not tell."""
    reasons = {str(report.longrepr[-1]) for report in terminalreporter.stats.get("skipped", [])}
    for reason in sorted(reason for reason in reasons if "browser tests" in reason or "ARM tests" in reason):
        terminalreporter.write_line(reason.removeprefix("Skipped: "), yellow=True)


@pytest.fixture(scope="session", autouse=True)
def one_plot(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Draw loss.png and confusion.png for one run only, and copy them for the others.

    What is drawn is looked at in tests/training/test_log.py and tests/tasks/test_classify.py.
    """
    from allmask.runs import plan
    from allmask.tasks import classify
    from allmask.vision import training as vision

    drawn: dict[str, Path] = {}

    def once(draw: Callable[..., Any], path: Path, *what: Any) -> Path:
        if path.name in drawn:
            return Path(shutil.copy(drawn[path.name], path))
        draw(*what)
        drawn[path.name] = Path(shutil.copy(path, tmp_path_factory.mktemp("plot")))
        return path

    plot, confusion = plan.plot_run, classify.draw_confusion
    plan.plot_run = lambda run: once(plot, run / "loss.png", run)
    classify.draw_confusion = vision.draw_confusion = lambda *what: once(confusion, what[-1], *what)
    yield
    plan.plot_run, classify.draw_confusion, vision.draw_confusion = plot, confusion, confusion


@pytest.fixture(scope="session", autouse=True)
def commands_built_once() -> Iterator[None]:
    """Build each command once: typer takes 10 to 30 ms to prepare its options, and tests call a thousand commands.

    It is built anew for --help and --config, for a shell that completes words, and where commands or tasks are added.
    """
    from allmask.cli import main
    from allmask.cli._run import _task_in
    from allmask.registry import TASKS

    build, own, made = main.built, main.COMMANDS, dict[tuple[str, ...], Any]()

    def once(argv: list[str]) -> Any:
        other = {"--help", "-h"} & {*argv} or any(word.startswith("--config") for word in argv)
        if other or main.COMMANDS is not own or main._COMPLETE in os.environ or TASKS.registered:
            return build(argv)
        key = (*(name for name in own if name in argv), _task_in(argv))
        if key not in made:
            made[key] = build(argv)
        return made[key]

    main.built = once
    yield
    main.built = build


@pytest.fixture(scope="session")
def python(pytestconfig: pytest.Config) -> str:
    """A program to start in place of sys.executable where a process matters and its imports do not."""
    return pytestconfig.stash[PYTHON]


@pytest.fixture(scope="session")
def kept_kernels(pytestconfig: pytest.Config) -> Path:
    """Where kernels that only tests compile are kept, for the next run of any clone; their names have a hash."""
    from allmask.kernels.build import _cache_folder

    folder = _cache_folder()[0].with_name("allmask-tests")
    try:
        folder.mkdir(0o700, parents=True, exist_ok=True)
    except OSError:
        return pytestconfig.cache.mkdir("kernels")
    return folder if os.access(folder, os.W_OK) else pytestconfig.cache.mkdir("kernels")


@pytest.fixture
def warm_spawn(python: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let multiprocessing start that program, too."""
    from multiprocessing import resource_tracker, spawn

    resource_tracker.ensure_running()  # which outlives the test
    monkeypatch.setattr(spawn, "_python_exe", os.fsencode(python))


class Ran(NamedTuple):
    code: int
    out: str
    err: str


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str]) -> Callable[..., Ran]:
    """`cli("mask", "prefix", …)` runs the command line here and returns its exit code, stdout and stderr."""
    from allmask.cli.main import main

    logger = logging.getLogger("allmask")

    def run(*words: object) -> Ran:
        before = logger.handlers, logger.level, logger.propagate  # a command takes its messages for itself
        capsys.readouterr()
        try:
            code = main([str(word) for word in words])
        finally:
            logger.handlers, logger.level, logger.propagate = before
        return Ran(code, *capsys.readouterr())

    return run
