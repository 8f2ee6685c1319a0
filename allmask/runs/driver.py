"""One run from its first step to its end, whatever its job: start, resume, see it through, finish.

Under torchrun all processes call the same functions. The first one reads and checks the data, writes the run's folder,
and speaks for all; the others read what it has written.
"""

from __future__ import annotations

import logging
import shutil
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from allmask.errors import DataError, ResourceError, UsageError
from allmask.runs import sweep
from allmask.runs.folder import (
    CHECKSUMS,
    CONFIG,
    FINAL,
    START,
    drop_spent,
    expect_free,
    finished_result,
    outcome,
    saved_plan,
    saved_values,
    write_config,
    write_result,
)
from allmask.runs.plan import Plan
from allmask.training import Result, Workload, train
from allmask.training.loop import SINGLE_PROCESS
from allmask.training.process_group import ProcessGroup, SingleProcess

log = logging.getLogger("allmask")
Group = SingleProcess | ProcessGroup


def start(plan: Plan, out: Path, quiet: bool = False, group: Group = SINGLE_PROCESS) -> dict[str, Any]:
    """Start a run and see it through. Nothing is written before data and model are checked, but what the job leaves."""

    def first() -> tuple[Plan, Any]:
        _expect_processes(plan, group)
        expect_free(out, plan.job.leaves)
        data = plan.job.read(plan, out, quiet)
        return begin(plan, data, out), data

    return _see_through(group.first(first), out, quiet, group)


def resume(out: Path, quiet: bool = False, group: Group = SINGLE_PROCESS) -> dict[str, Any]:
    """Go on with an interrupted run, exactly as if it had not been; a finished one is left as it is."""
    result = group.shared(finished_result(out) if group.lead else None)
    if result is not None:
        return result

    def first() -> tuple[Plan, Any]:
        plan = saved_plan(out)
        _expect_processes(plan, group)
        data = plan.job.reopen(plan, out, quiet, trusted=False)
        _expect_same_data(plan, data, out)
        return plan, data

    return _see_through(group.first(first), out, quiet, group)


def begin(plan: Plan, data: Any, out: Path) -> Plan:
    """Write the model as it starts, and last the plan with nothing left open: where that is, a run has begun."""
    plan, model = plan.job.begin(plan, data)
    if not plan.job.several:
        shutil.rmtree(out / START, ignore_errors=True)
        plan.job.save(model, data, out / START)
    write_config(plan, plan.job.checksums(data), out)
    return plan


def _see_through(begun: tuple[Plan, Any] | None, out: Path, quiet: bool, group: Group) -> dict[str, Any]:
    plan, data = begun or _join(out, quiet, group)
    if not plan.job.several:
        return _run(plan, data, out, quiet, group)

    def one(plan: Plan, folder: Path, watched: sweep.Watched, evaluations: int | None) -> dict[str, Any]:
        begun = saved_plan(folder) if (folder / CONFIG).is_file() else begin(plan, data, folder)
        return finished_result(folder) or _run(begun, data, folder, quiet, group, watched, evaluations)

    return sweep.run(plan, out, one)


def _run(
    plan: Plan, data: Any, out: Path, quiet: bool, group: Group,
    watched: Callable[[Workload], Workload] = lambda work: work, evaluations: int | None = None,
) -> dict[str, Any]:  # fmt: skip
    """Train from the last checkpoint, or the start, to the end, unless what watches the workload stops it."""
    job = plan.job
    model = job.load(out / START, group.device)  # in a run's first session, too, so that all begin from the same bytes
    work = job.workload(plan, data, model, out, quiet)
    result = train(
        model, watched(work), plan.settings, out, resume=True, quiet=quiet, group=group, evaluations=evaluations,
        held_out=job.evaluation_size(data, work),
    )  # fmt: skip

    def end() -> dict[str, Any]:
        whole = model
        if group.sharded:
            whole = job.load(out / START, torch.device("cpu"))
            whole.load_state_dict(result.weights)
        return _finish(plan, data, work, whole, result, out)

    return group.shared(group.first(end)) or {}


def _finish(plan: Plan, data: Any, work: Workload, model: Any, result: Result, out: Path) -> dict[str, Any]:
    """Write plots, the result and last the model: where there is a final/, the run is finished."""
    plan.job.plot(out)
    job, more = plan.job.finish(plan, data, work, model, result, out)
    final = outcome(result, out) | more
    kept = f"step {final['best_step']} of {result.steps}"
    if final.get("averaged"):
        kept = f"the mean of steps {', '.join(map(str, final['averaged']))}"
    log.info("kept: %s, because %s", kept, result.kept_because)
    write_result(final, out)
    job.save(model, data, out / FINAL)
    drop_spent(out, plan.settings.keep)
    return final


def _join(out: Path, quiet: bool, group: Group) -> tuple[Plan, Any]:
    """What a process other than the first needs of a run that the first has just begun or reopened."""
    if not (out / CONFIG).is_file():
        hint = "let all hosts share the file system of --out, and name it alike"
        raise ResourceError(f"{out}: process {group.rank} on {socket.gethostname()} does not see the run there", hint)
    plan = saved_plan(out)
    return plan, plan.job.reopen(plan, out, quiet, trusted=True)


def _expect_processes(plan: Plan, group: Group) -> None:
    reason = "several runs follow each other" if plan.job.several else plan.job.one_process
    if reason and (group.size > 1 or group.sharded):
        raise UsageError(f"this trains in one process: {reason}", "start it without torchrun")


def _expect_same_data(plan: Plan, data: Any, out: Path) -> None:
    """Other data would make another run, in another order."""
    then = saved_values(out).get(CHECKSUMS, {})
    for name, now in plan.job.checksums(data).items():
        if then.get(name) != now:
            named = getattr(plan.job, name) or plan.job.data or "the data"
            files = named if isinstance(named, str) else ", ".join(named)
            raise DataError(f"{files}: changed since {out} was started", "restore it, or start a new run")
