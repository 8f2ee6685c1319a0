"""What `finetune`, `train` and `pretrain` share: start or resume a run, then print its result."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import typer

from allmask.cli import emit, note, show_log
from allmask.cli._options import Request
from allmask.runs.options import check_resumed, check_values, completed

if TYPE_CHECKING:
    from allmask.runs.plan import Job
    from allmask.training.process_group import ProcessGroup, SingleProcess


def drive(command: str, asked: Request) -> None:
    """Start the run that was requested, or resume it, and print its result."""
    from allmask.runs import driver
    from allmask.runs.folder import is_finished, saved_plan
    from allmask.runs.plan import Plan

    out, quiet = asked.out, asked.quiet
    with _processes(asked.shard, quiet) as group:

        def resumed() -> Plan:
            check_resumed(command, out, asked.given)
            if is_finished(out):
                note(f"{out}: this run is finished")
            return saved_plan(out)

        if asked.resume or group.shared(group.restarts > 0 and (out / "config.yaml").is_file()):
            plan = group.first(resumed)
            result = driver.resume(out, quiet, group)
        else:
            check_values(command, asked.given, asked.config, asked.flags)
            plan = Plan.from_dict(completed(command, asked.given), asked.config)
            result = driver.start(plan, out, quiet, group)
    if group.lead:
        assert plan is not None
        emit(asked.json, result, _report(result, plan.job))


@contextmanager
def _processes(shard: bool, quiet: bool) -> Iterator[SingleProcess | ProcessGroup]:
    """Join the processes of torchrun, if there are any: only the first one, and the first one that fails, print."""
    from allmask.training.process_group import PeerFailed, join_processes

    try:
        with join_processes(shard) as group:
            show_log(quiet)
            if not group.lead:
                logging.getLogger("allmask").setLevel(logging.CRITICAL)
            yield group
    except PeerFailed as error:
        raise typer.Exit(error.exit_code) from None


# ---- results -------------------------------------------------------------------------------------------------


def _report(result: Mapping[str, Any], job: Job) -> str:
    table = _seeds if "seeds" in result else _search if "tried" in result else _one_run
    return "\n".join([*table(result), *job.hints(result)])


def _one_run(result: Mapping[str, Any]) -> list[str]:
    preset = f"{result['preset']}, " if "preset" in result else ""
    early = ", stopped early" if result["stopped_early"] else ""
    metrics = "  ".join(f"{name} {value:.4g}" for name, value in result["metrics"].items())
    steps = result.get("averaged", ())
    kept = f"mean of steps {', '.join(map(str, steps))}" if steps else f"step {result['best_step']}"
    return [
        f"{result['final']}: {preset}{result['steps']} steps in {result['seconds']} s{early}",
        f"{kept}: {metrics}",
    ]


def _seeds(result: Mapping[str, Any]) -> list[str]:
    names = list(result["metrics"])
    lines = ["| seed | " + " | ".join(names) + " |", "|---" * (1 + len(names)) + "|"]
    for row in result["seeds"]:
        lines.append(f"| {row['seed']} | " + " | ".join(f"{row['metrics'][name]:.4g}" for name in names) + " |")
    spread = (f"{result['metrics'][name]:.4g} ± {result['deviation'][name]:.2g}" for name in names)
    lines.append("| mean ± deviation | " + " | ".join(spread) + " |")
    return [*lines, "", f"{result['final']}: seed {result['best_seed']}, the best of {len(result['seeds'])}"]


def _search(result: Mapping[str, Any]) -> list[str]:
    lines = ["| run | batch tokens | lr | epochs | score | |", "|---|---|---|---|---|---|"]
    for row in result["tried"]:
        score = "–" if row["score"] is None else f"{row['score']:.4g}"
        values = (row["run"], f"{row['batch_tokens']:,}", f"{row['lr']:.3g}", f"{row['epochs']:g}", score, row["how"])
        lines.append("| " + " | ".join(values) + " |")
    return [*lines, "", f"{result['final']}: {result['best_run']}, the best of {len(result['tried'])}"]
