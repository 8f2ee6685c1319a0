"""`allmask claims`: run claims of the literature, and report whether they hold."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
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
)
from allmask.cli import AsJson, Quiet, emit, note
from allmask.errors import UsageError
from allmask.files import atomic_file

FAILED = 7  # the exit code if a claim does not hold

EXAMPLES = """
    allmask claims
    allmask claims C5 C14
    allmask claims --all --report out
    allmask claims --all --full --report out
"""


def command(
    names: Annotated[list[str] | None, Argument(metavar="CLAIM", help="Claims to run, such as C5.")] = None,
    everything: Annotated[bool, Option("--all", help="Run all claims.")] = False,
    full: Annotated[
        bool, Option("--full/--quick", help="Three times as many repetitions, or not.", show_default="quick")
    ] = False,
    report: Annotated[
        Path | None,
        Option(
            metavar="FOLDER", help="Write claims.html, claims.md and the numbers; finished claims are not repeated."
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
    if not everything and not names:
        if report is not None or full or again:
            raise UsageError("no claim is named", "name some, or add --all")
        _list(as_json)
        return
    results = []
    claims = all_claims() if everything else named(names or ())
    finished = {claim.name: _finished(claim, report, full, again) for claim in claims}
    found = _run_all([claim for claim in claims if not finished[claim.name]], report, full, quiet, jobs)
    for claim in claims:
        results.append((claim, finished[claim.name] or next(found)))
        if not as_json:
            _print(*results[-1])
    from allmask.claims.report import summary, write_report

    only = [result for _, result in results]
    if report is not None:
        write_report(report, results if everything else saved_results(report))
        note(f"wrote {report / 'claims.html'}")
    emit(as_json, [result.to_dict() for result in only], f"\n{summary(only)}")
    raise Exit(0 if all(result.held for result in only) else FAILED)


def _list(as_json: bool) -> None:
    claims = all_claims()
    rows = [{"name": c.name, "title": c.title, "statement": c.statement, "source": c.source} for c in claims]
    emit(as_json, rows, "\n".join(f"{claim.name:<4} {claim.title}" for claim in claims))


def _run_all(
    claims: Sequence[Claim], report: Path | None, full: bool, quiet: bool, jobs: int | None
) -> Iterator[Result]:
    """Yield the results in the order of the claims. Several run at the same time, each in a process of its own."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    jobs = min(jobs or min(2, cores), len(claims))
    run = partial(_run, report=report, full=full, quiet=quiet)
    if jobs < 2:
        yield from map(run, claims)
        return
    # spawn, not fork: torch may have threads by now
    with ProcessPoolExecutor(jobs, get_context("spawn"), _use_threads, (max(1, cores // jobs),)) as pool:
        yield from pool.map(run, claims)


def _use_threads(count: int) -> None:
    import torch

    torch.set_num_threads(count)


def _run(claim: Claim, report: Path | None, full: bool, quiet: bool) -> Result:
    def say(message: str) -> None:
        if not quiet:
            note(f"{claim.name}: {message}")

    result = claim.run(Trial(full, say))
    if report is not None:
        path = result_file(report, claim)
        path.parent.mkdir(parents=True, exist_ok=True)
        with atomic_file(path) as file:
            json.dump(result.to_dict(), file, indent=1)
    return result


def _finished(claim: Claim, report: Path | None, full: bool, again: bool) -> Result | None:
    """The result of an earlier run of the same kind, if it is there and complete."""
    result = None if report is None or again else saved_result(report, claim)
    return result if result and result.full == full and result.verdict.level != "error" else None


def _print(claim: Claim, result: Result) -> None:
    print(
        f"{claim.name:<4} {claim.title}\n     {result.verdict.words}: {result.verdict.figure} ({result.seconds:.1f} s)"
    )
