"""What `finetune`, `train` and `pretrain` share: parse a command line, start or resume a run, print its result.

They declare no options of their own: theirs are the fields of the dataclasses in allmask/options.py, merged over the
tasks of the command.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from allmask.cli import emit, markdown_table, note, show_log
from allmask.cli._options import command_options, declare, merged
from allmask.cli._program import as_called
from allmask.devices import expect_device
from allmask.errors import AllmaskError, UsageError
from allmask.options import CommandOptions
from allmask.runs.options import (
    TASKS_OF,
    check_resumed,
    check_values,
    completed,
    expect_free,
    read_yaml,
    run_of,
    tasks_of,
)

if TYPE_CHECKING:
    from allmask.runs.plan import Job
    from allmask.training.process_group import ProcessGroup, SingleProcess


ABOUT_RUNS = """Writes a folder with config.yaml, metrics.jsonl, loss.png, checkpoints and the trained model (final).
Ctrl-C saves the run; the same command with --resume continues it, with bit-identical results. With torchrun, several
processes share each batch of texts (docs/scale.md). """


# ---- the command line ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Request:
    """The command line of a command that trains: the values of its plan that were given, and how to run it."""

    given: dict[str, Any]
    flags: frozenset[str]  # those of `given` that are flags; the others are from the file `config`
    out: Path
    config: str = "--config"
    resume: bool = False
    quiet: bool = False
    json: bool = False
    device: str = "auto"
    shard: bool = False
    timeout: float = CommandOptions.timeout
    timeout_alone: float = CommandOptions.timeout_alone


class Training:
    """A command that trains: its command line is made from the options of its tasks; `help` is its description."""

    def __init__(self, name: str, help: str):
        self.name, self.help = name, help

    def function(self, argv: Sequence[str] = ()) -> Callable[..., None]:
        """Return the command for typer. With both a task and --help in `argv`, it has the options of that task only."""
        task, tasks = _task_in(argv), list(TASKS_OF[self.name])
        if task in tasks_of(self.name):
            asks_help = bool({"--help", "-h"} & set(argv))
            tasks = [task] if asks_help else list(dict.fromkeys([*tasks, task]))  # perhaps of another package
        options = [*command_options(self.name), *merged([run_of(self.name, task) for task in tasks])]

        def command(**flags: Any) -> None:
            drive(self.name, _request(self.name, flags))

        one_task = f'"allmask {self.name} --task TASK --help" shows the options of one task.' * (
            self.name != "pretrain"
        )
        command.__doc__ = f"{self.help}\n\n{ABOUT_RUNS}{as_called(one_task)}"
        return declare(command, options)


def _task_in(argv: Sequence[str]) -> str:
    """Return the task that a command line names, itself or by its --config file; "" if it names none."""
    words = [part for word in argv for part in (word.split("=", 1) if word.startswith("--") else [word])]
    values = {flag: value for flag, value in pairwise(words) if flag in ("--task", "--config")}
    if "--config" in values and "--task" not in values:
        try:
            return str(read_yaml(Path(values["--config"])).get("task"))
        except AllmaskError:
            pass  # reported when the command runs
    return values.get("--task", "")


def _request(command: str, flags: dict[str, Any]) -> Request:
    """Join flags and the --config file, and check the values as far as that is possible without torch."""
    flags = {name: value for name, value in flags.items() if value is not None and value != []}
    own = {entry.name: flags.pop(entry.name) for entry in fields(CommandOptions) if entry.name in flags}
    if "files" in flags:
        flags["data"] = [*flags.get("data", ()), *flags.pop("files")]
    given = {name: list(value) if isinstance(value, tuple) else value for name, value in flags.items()}
    if "config" in own:
        values = read_yaml(Path(own["config"]))
        values.pop("checksums", None)  # in the config.yaml of a run
        given = values | given
    expect_device(own.get("device", "auto"))
    if "out" not in own:
        raise UsageError("no folder for the run was named", "name a new folder with --out")
    asked = Request(given, frozenset(flags), **{**own, "out": Path(own["out"])})
    if "momentum" in flags and not asked.resume and given.get("optimizer") != "sgd":
        raise UsageError("--momentum is for --optimizer sgd", "leave it out, or add that")
    if "WORLD_SIZE" in os.environ:  # one of several processes; the first one checks for all, see _run.py
        return asked
    if asked.shard:
        raise UsageError("--shard needs several processes", "torchrun --nproc-per-node 8 -m allmask …")
    if own.keys() & {"timeout", "timeout_alone"}:
        raise UsageError("--timeout and --timeout-alone are for several processes", "leave them out, or use torchrun")
    if asked.resume:
        check_resumed(command, asked.out, given)
    else:
        check_values(command, given, asked.config, asked.flags)
        _check_files(given)
        run = run_of(command, completed(command, given).get("task", ""))
        expect_free(asked.out, run.kind.leaves)
    return asked


def _check_files(given: Mapping[str, Any]) -> None:
    """Refuse a model that is not there, and held-out files that are also trained on."""
    from allmask.checkpoints import resolve
    from allmask.data import expect_held_out

    data, held_out = ([paths] if isinstance(paths, str) else paths or () for paths in map(given.get, ("data", "eval")))
    expect_held_out(data, held_out)
    model = Path(given.get("model") or ".").expanduser()
    if not model.exists() and model.parent.is_dir():  # otherwise it may be a name on the hub
        resolve(given["model"])


# ---- the run -------------------------------------------------------------------------------------------------


def drive(command: str, asked: Request) -> None:
    """Start the run that was requested, or resume it, and print its result."""
    from allmask.runs import driver
    from allmask.runs.folder import final_problem, is_finished, saved_plan
    from allmask.runs.plan import Plan

    out, quiet = asked.out, asked.quiet
    with _processes(asked) as group:

        def resumed() -> Plan:
            check_resumed(command, out, asked.given)
            if is_finished(out) and final_problem(out) is None:
                note(f"{out}: this run is finished")
            return saved_plan(out)

        if asked.resume or group.shared(group.restarts > 0 and (out / "config.yaml").is_file()):
            plan = group.first(resumed, alone=True)
            result = driver.resume(out, quiet, group)
        else:
            check_values(command, asked.given, asked.config, asked.flags)
            plan = Plan.from_dict(completed(command, asked.given), asked.config)
            result = driver.start(plan, out, quiet, group)
    if group.lead:
        assert plan is not None
        emit(asked.json, result, _report(result, plan.job))


@contextmanager
def _processes(asked: Request) -> Iterator[SingleProcess | ProcessGroup]:
    """Join the processes of torchrun, if there are any: only the first one, and the first one that fails, print."""
    from allmask.training.process_group import PeerFailed, join_processes

    try:
        with join_processes(asked.shard, asked.device, asked.timeout, asked.timeout_alone) as group:
            show_log(asked.quiet)
            if not group.lead:
                logging.getLogger("allmask").setLevel(logging.CRITICAL)
            yield group
    except PeerFailed as error:
        raise typer.Exit(error.exit_code) from None


# ---- results -------------------------------------------------------------------------------------------------


def _report(result: Mapping[str, Any], job: Job) -> str:
    table = _seeds if "seeds" in result else _search if "tried" in result else _one_run
    return "\n".join([*table(result), *map(as_called, job.hints(result))])


def _one_run(result: Mapping[str, Any]) -> list[str]:
    preset = f"{result['preset']}, " if "preset" in result else ""
    early = ", stopped early" if result["stopped_early"] else ""
    metrics = "  ".join(f"{name} {value:.4g}" for name, value in result["metrics"].items())
    steps = result.get("averaged", ())
    kept = f"mean of steps {', '.join(map(str, steps))}" if steps else f"step {result['best_step']}"
    if result["best_step"] is None:
        kept = "last evaluation"
    time = "" if result["seconds"] is None else f" in {result['seconds']} s"
    return [f"{result['final']}: {preset}{result['steps']} steps{time}{early}", f"{kept}: {metrics}"]


def _seeds(result: Mapping[str, Any]) -> list[str]:
    names = list(result["metrics"])
    rows = [[str(row["seed"]), *(f"{row['metrics'][name]:.4g}" for name in names)] for row in result["seeds"]]
    spread = (f"{result['metrics'][name]:.4g} ± {result['deviation'][name]:.2g}" for name in names)
    lines = markdown_table(["seed", *names], [*rows, ["mean ± deviation", *spread]])
    return [*lines, "", f"{result['final']}: seed {result['best_seed']}, the best of {len(result['seeds'])}"]


def _search(result: Mapping[str, Any]) -> list[str]:
    rows = []
    for row in result["tried"]:
        score = "–" if row["score"] is None else f"{row['score']:.4g}"
        numbers = (f"{row['batch_tokens']:,}", f"{row['lr']:.3g}", f"{row['epochs']:g}", score)
        rows.append([row["run"], *numbers, row["how"]])
    lines = markdown_table(["run", "batch tokens", "lr", "epochs", "score", ""], rows)
    return [*lines, "", f"{result['final']}: {result['best_run']}, the best of {len(result['tried'])}"]
