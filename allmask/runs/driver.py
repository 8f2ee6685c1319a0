"""The run driver: start a run or resume it, train, and finish; the same for every job.

Under torchrun all processes call the same functions. The first one reads and checks the data, writes the run's folder
and prints; the others read what it has written.
"""

from __future__ import annotations

import logging
import shutil
import socket
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import torch

from allmask.devices import shown
from allmask.errors import DataError, ResourceError, UsageError
from allmask.files import locked, remove_folder
from allmask.runs import folder as run_folder
from allmask.runs import sweep
from allmask.runs.folder import FINAL, START, finished_result, saved_plan
from allmask.runs.options import CHECKSUMS, CONFIG, expect_free, saved_values
from allmask.runs.plan import Plan
from allmask.training import Result, Workload, checkpoint, train
from allmask.training.loop import SINGLE_PROCESS
from allmask.training.process_group import Group

log = logging.getLogger("allmask")


def start(plan: Plan, out: Path, quiet: bool = False, group: Group = SINGLE_PROCESS) -> dict[str, Any]:
    """Start a run, train to the end and return its result.

    Nothing is written before data and model are checked, except the files that the job declares in `leaves`.
    """
    with ExitStack() as lock:

        def first() -> tuple[Plan, Any]:
            _expect_processes(plan, group)
            expect_free(out, plan.job.leaves)
            data = plan.job.read(plan, out, quiet)
            return begin(plan, data, out, lock), data

        return _continue(group.first(first, alone=True), out, quiet, group)


def resume(out: Path, quiet: bool = False, group: Group = SINGLE_PROCESS) -> dict[str, Any]:
    """Continue an interrupted run, exactly as if it had not been stopped; a finished one stays as it is.

    If the model of a finished run is damaged, it is made again from the checkpoints that are left.
    """
    group.first(lambda: run_folder.expect_plain_files(out))
    result = group.shared(finished_result(out) if group.lead else None)
    if result is not None:
        if group.lead:  # a process may have been killed while it removed what a finished run does not need
            with suppress(ResourceError), locked(out):
                checkpoint.remove_unfinished(out)
        return result
    with ExitStack() as lock:

        def first() -> tuple[Plan, Any] | dict[str, Any]:
            plan = saved_plan(out)
            _expect_processes(plan, group)
            lock.enter_context(locked(out))
            checkpoint.remove_unfinished(out)
            damage = None
            if not plan.job.several:
                rebuilt = run_folder.rebuilt_result(out)
                if rebuilt is not None:
                    return rebuilt
                damage = run_folder.final_problem(out)
                if damage is None:
                    run_folder.expect_start(out)
            if damage is None:
                data = plan.job.reopen(plan, out, quiet, trusted=False)
            else:
                data = plan.job.read(plan, out, quiet)  # as for a new run: start/ is made again
            _expect_same_data(plan, data, out)
            if damage is not None:
                run_folder.reopen_finished(plan, data, out, damage)
            return plan, data

        begun = group.first(first, alone=True)
        rebuilt = group.shared(begun if isinstance(begun, dict) else None)
        if rebuilt is not None:
            return rebuilt
        assert not isinstance(begun, dict)
        return _continue(begun, out, quiet, group)


def begin(plan: Plan, data: Any, out: Path, lock: ExitStack | None = None) -> Plan:
    """Write the model before its first step, then config.yaml, which marks the run as begun. Return the final plan.

    Before anything is written the folder is locked, until `lock` is closed. Meanwhile another process may have begun a
    run there.
    """
    plan, model = plan.job.begin(plan, data)
    if lock is not None:
        lock.enter_context(locked(out))
        expect_free(out, plan.job.leaves)
        checkpoint.remove_unfinished(out)
    if not plan.job.several:
        remove_folder(out / START)
        plan.job.save(model, data, out / START)
    run_folder.write_config(plan, plan.job.checksums(data), out)
    return plan


def _continue(begun: tuple[Plan, Any] | None, out: Path, quiet: bool, group: Group) -> dict[str, Any]:
    """Train a run that has begun. Only the first process has its plan and data; the others read the run's folder."""
    if begun is None:
        if not (out / CONFIG).is_file():
            where = f"process {group.rank} on {socket.gethostname()}"
            hint = "let all hosts share the file system of --out, under the same name"
            raise ResourceError(f"{out}: {where} does not find the run there", hint)
        plan = saved_plan(out)
        begun = plan, plan.job.reopen(plan, out, quiet, trusted=True)
    plan, data = begun
    if not plan.job.several:
        return _run(plan, data, out, quiet, group)

    def one(plan: Plan, folder: Path, watched: sweep.Watched, evaluations: int | None) -> dict[str, Any]:
        if run_folder.is_finished(folder) and finished_result(folder) is None:  # damaged, so it is made again
            shutil.rmtree(folder)
        begun = saved_plan(folder) if (folder / CONFIG).is_file() else begin(plan, data, folder)
        return finished_result(folder) or _run(begun, data, folder, quiet, group, watched, evaluations)

    return sweep.run(plan, out, one)


def _run(
    plan: Plan, data: Any, out: Path, quiet: bool, group: Group,
    watched: Callable[[Workload], Workload] = lambda work: work, evaluations: int | None = None,
) -> dict[str, Any]:  # fmt: skip
    """Train from the last checkpoint, or from the start, and finish. `watched` may wrap the workload."""
    job = plan.job
    if group.lead and group.device.type != "cpu":
        log.info("device: %s", shown(group.device))
    model = job.load(out / START, group.device)  # not from memory, so that a new run and a resumed one start alike
    work = job.workload(plan, data, model, out, quiet)
    result = train(
        model, watched(work), plan.settings, out, resume=True, quiet=quiet, group=group, evaluations=evaluations,
        held_out=job.evaluation_size(data, work), identity=run_folder.identity_of(out),
        ended=(out / run_folder.RESULT).is_file(),
    )  # fmt: skip

    def end() -> dict[str, Any]:
        whole = model
        if group.sharded:
            whole = job.load(out / START, torch.device("cpu"))
            whole.load_state_dict(result.weights)
        return _finish(plan, data, work, whole, result, out)

    return group.shared(group.first(end, alone=True)) or {}


def _finish(plan: Plan, data: Any, work: Workload, model: Any, result: Result, out: Path) -> dict[str, Any]:
    """Write the plots, the result, and then final/, which marks the run as finished."""
    plan.job.plot(out)
    job, more = plan.job.finish(plan, data, work, model, result, out)
    final = run_folder.outcome(result, out) | more
    kept = f"step {final['best_step']} of {result.steps}"
    if final.get("averaged"):
        kept = f"the mean of steps {', '.join(map(str, final['averaged']))}"
    log.info("kept: %s, because %s", kept, result.kept_because)
    run_folder.write_result(final, out)
    job.save(model, data, out / FINAL)
    run_folder.drop_spent(out, result.checkpoints, plan.settings.keep)
    return final


def _expect_processes(plan: Plan, group: Group) -> None:
    reason = "several runs follow each other" if plan.job.several else plan.job.one_process
    if reason and (group.size > 1 or group.sharded):
        raise UsageError(f"this trains in one process: {reason}", "start it without torchrun")


def _expect_same_data(plan: Plan, data: Any, out: Path) -> None:
    """Refuse to resume with other data: it would be another run, in another order."""
    then = saved_values(out)[CHECKSUMS]
    for name, now in plan.job.checksums(data).items():
        if then.get(name) != now:
            named = getattr(plan.job, name) or plan.job.data or "the data"
            files = named if isinstance(named, str) else ", ".join(named)
            raise DataError(f"{files}: changed since {out} was started", "restore it, or start a new run")
