"""`allmask claims`: run claims of the literature, and report whether they hold."""

from __future__ import annotations

import json
import os
import shutil
import signal
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from functools import partial
from multiprocessing import active_children, get_context, parent_process
from pathlib import Path
from typing import Annotated

from typer import Argument, Exit, Option

from allmask.claims.claim import (
    Claim,
    Result,
    Trial,
    all_claims,
    named,
    result_file,
    saved_result,
    saved_results,
    together,
)
from allmask.cli import AsJson, Quiet, emit, note
from allmask.cli._program import as_called
from allmask.devices import usable_cores
from allmask.errors import Interrupted, UsageError
from allmask.files import atomic_file

FAILED = 7  # the exit code if a claim does not hold

EXAMPLES = """
    allmask claims
    allmask claims C5 C14
    allmask claims --quick --report out
    allmask claims --full --report out
"""


def command(
    names: Annotated[list[str] | None, Argument(metavar="CLAIM", help="Claims to run, such as C5.")] = None,
    everything: Annotated[
        bool, Option("--all", help="Run all claims; so do --quick and --full without a name.")
    ] = False,
    full: Annotated[
        bool | None,
        Option(
            "--full/--quick",
            help="Three times as many repetitions, and the larger experiments that some claims have. On two cores, all "
            "take about 5 minutes with --quick and 40 minutes with --full.",
            show_default="quick",
        ),
    ] = None,
    report: Annotated[
        Path | None,
        Option(
            metavar="FOLDER",
            help="Write claims.html, claims.md and the numbers. If the run is stopped, the same command goes on: "
            "finished claims are not repeated.",
        ),
    ] = None,
    jobs: Annotated[
        int | None, Option(help="Claims to run at the same time.", min=1, show_default="2 if there are two cores")
    ] = None,
    again: Annotated[bool, Option("--again", help="With --report: repeat finished claims, too.")] = False,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Run claims of the literature, and report whether they hold here.

    Without a name, list them. The exit code is 0 if every claim that ran holds, otherwise 7.
    """
    if everything and names:
        raise UsageError("--all runs every claim", "leave out the names, or --all")
    if not (everything or names or full is not None):
        if report is not None or again:
            raise UsageError("no claim is named", "name some, or add --all")
        _list(as_json)
        return
    results = []
    claims = named(names) if names else all_claims()
    finished = {claim.name: _finished(claim, report, bool(full), again) for claim in claims}
    waiting = [claim for claim in claims if not finished[claim.name]]
    with _stoppable(report):
        found = _run_all(waiting, partial(_run, report=report, full=bool(full), quiet=quiet), jobs)
        for claim in claims:
            results.append((claim, finished[claim.name] or next(found)))
            if not as_json:
                _print(*results[-1])
    from allmask.claims.report import summary, write_report

    only = [result for _, result in results]
    if report is not None:
        write_report(report, saved_results(report) if names else results)
        note(f"wrote {report / 'claims.html'}")
    emit(as_json, [result.to_dict() for result in only], f"\n{summary(only)}")
    raise Exit(0 if all(result.held for result in only) else FAILED)


def _list(as_json: bool) -> None:
    claims = all_claims()
    rows = [{"name": c.name, "title": c.title, "statement": c.statement, "source": c.source} for c in claims]
    emit(as_json, rows, "\n".join(f"{claim.name:<4} {claim.title}" for claim in claims))
    note(as_called("run one: allmask claims C5; run all: allmask claims --all"))


@contextmanager
def _stoppable(report: Path | None) -> Iterator[None]:
    """Let Ctrl-C and SIGTERM end all processes at once. What is finished is in the folder of the report."""
    caught = [signal.SIGINT]

    def stop(number: int, frame: object) -> None:
        caught[0] = signal.Signals(number)
        raise KeyboardInterrupt  # not an Exception, which would be a result of the claim that runs

    before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    except KeyboardInterrupt:
        for child in active_children():
            child.terminate()
        raise Interrupted(
            f"stopped by {caught[0].name}",
            128 + caught[0],
            "with --report FOLDER, finished claims are kept" if report is None else "the same command goes on",
        ) from None
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _run_all(claims: Sequence[Claim], run: partial[Result], jobs: int | None) -> Iterator[Result]:
    """Yield the results in the order of the claims. Several run at the same time, in processes of their own."""
    cores, groups = usable_cores(), together(claims)
    jobs = min(jobs or min(2, cores), len(groups))
    if jobs < 2:
        yield from map(run, claims)
        return
    # spawn, not fork: torch may have threads by now
    pool = ProcessPoolExecutor(jobs, get_context("spawn"), _begin_process, (max(1, cores // jobs),))
    try:
        parts = [(group, pool.submit(_run_group, group, run)) for group in groups]
        for claim in claims:
            results = next(future for group, future in parts if claim in group).result()
            yield next(result for result in results if result.name == claim.name)
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def _begin_process(threads: int) -> None:
    """Leave Ctrl-C to the parent, and end with it, even if it is killed."""
    import torch

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = parent_process()
    assert parent is not None

    def follow() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=follow, daemon=True).start()
    torch.set_num_threads(threads)


def _run_group(claims: Sequence[Claim], run: partial[Result]) -> list[Result]:
    return list(map(run, claims))


def _run(claim: Claim, report: Path | None, full: bool, quiet: bool) -> Result:
    def say(message: str) -> None:
        if not quiet:
            note(f"{claim.name}: {message}")

    parts = None if report is None else report / "parts" / f"{claim.name}-{'full' if full else 'quick'}"
    result = claim.run(Trial(full, say, folder=parts))
    if report is not None and parts is not None:
        path = result_file(report, claim)
        path.parent.mkdir(parents=True, exist_ok=True)
        with atomic_file(path) as file:
            json.dump(result.to_dict(), file, indent=1)
        if result.verdict.level != "error":
            shutil.rmtree(parts, ignore_errors=True)
    return result


def _finished(claim: Claim, report: Path | None, full: bool, again: bool) -> Result | None:
    """The result of an earlier run of the same kind, if it is there and complete."""
    result = None if report is None or again else saved_result(report, claim)
    return result if result and result.full == full and result.verdict.level != "error" else None


def _print(claim: Claim, result: Result) -> None:
    print(
        f"{claim.name:<4} {claim.title}\n     {result.verdict.words}: {result.verdict.figure} ({result.seconds:.1f} s)"
    )
