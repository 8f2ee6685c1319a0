"""What a run is to do: a job, which says what is learnt and from what, and the settings of its training.

A plan is flat in config.yaml and on the command line: the options of the job, then those of `Settings`. Which job it is
of is told by `objective` (pretraining) or by `task`: one of `JOBS`, or any task that a model is fine-tuned for.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self

from allmask.options import RunOptions, Settings, flat_settings
from allmask.registry import JOBS
from allmask.runs import values as flat
from allmask.runs.options import part_of, run_in
from allmask.training.log import plot_run

if TYPE_CHECKING:
    import torch

    from allmask.training import Result, Workload


class Job(RunOptions):
    """A base for jobs: frozen dataclasses whose fields are options. The run driver knows no job by name.

    `Data` below is whatever `read` returns; the driver only passes it on.
    """

    commands: ClassVar[tuple[str, ...]] = ("train",)  # that start and resume it
    task_name: ClassVar[str] = ""  # `task` in config.yaml
    leaves: ClassVar[Collection[str]] = ()  # what `read` may leave in the run's folder before the run has begun
    one_process: ClassVar[str] = ""  # why it cannot be trained by several
    data: Any

    # ---- options -------------------------------------------------------------------------------------------

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> Self:
        """The job with these options, which are of the right types."""
        return cls(**part_of(values, cls))

    def options(self) -> dict[str, Any]:
        """The options as they are saved."""
        own = {entry.name: getattr(self, entry.name) for entry in fields(self)}  # type: ignore[arg-type]
        return ({"task": self.task_name} if self.task_name else {}) | own

    @property
    def open_settings(self) -> frozenset[str]:
        """Settings that `begin` chooses to suit the model and the data, unless they are given."""
        return frozenset()

    @property
    def several(self) -> bool:
        """Whether it takes several runs, see allmask/runs/sweep.py."""
        return False

    # ---- a run ---------------------------------------------------------------------------------------------

    def read(self, plan: Plan, out: Path, quiet: bool) -> Any:
        """Read and check the data of a new run."""
        raise NotImplementedError

    def reopen(self, plan: Plan, out: Path, quiet: bool, trusted: bool) -> Any:
        """Read the data of a run that has begun. `trusted`: another process has just checked it."""
        return self.read(plan, out, quiet)

    def checksums(self, data: Any) -> dict[str, str]:
        """Of what was read, by the option that names it: a resumed run must have the same data."""
        raise NotImplementedError

    def begin(self, plan: Plan, data: Any) -> tuple[Plan, Any]:
        """The plan with nothing left open, and the model before its first step."""
        raise NotImplementedError

    def save(self, model: Any, data: Any, folder: Path) -> None:
        """Write a model folder, whole or not at all."""
        raise NotImplementedError

    def load(self, folder: Path, device: torch.device) -> Any:
        """The model in such a folder."""
        raise NotImplementedError

    def workload(self, plan: Plan, data: Any, model: Any, out: Path, quiet: bool) -> Workload:
        """What the training loop trains on, and how it evaluates."""
        raise NotImplementedError

    def evaluation_size(self, data: Any, work: Workload) -> int:
        """Tokens (or images) of an evaluation: how often is too often depends on it."""
        return 0

    def plot(self, out: Path) -> None:
        """Draw loss.png from metrics.jsonl."""
        plot_run(out)

    def finish(
        self, plan: Plan, data: Any, work: Workload, model: Any, result: Result, out: Path
    ) -> tuple[Job, dict[str, Any]]:
        """After training, the job as it is saved with the model, and what it adds to result.json."""
        raise NotImplementedError

    def hints(self, result: Mapping[str, Any]) -> list[str]:
        """What can be done with the model now, a line each."""
        return []


@dataclass(frozen=True)
class Plan:
    """A job and the settings of its training. Settings that are `open` are still to be chosen by the job.

    Saved, files are named by absolute paths, so that a run can be resumed from anywhere.
    """

    job: Job
    settings: Settings = field(default_factory=Settings)
    open: frozenset[str] = frozenset()

    def __post_init__(self):
        self.job.check(self.settings)

    def to_dict(self) -> dict[str, Any]:
        """As it is in config.yaml."""
        values = self.job.options() | flat_settings(type(self.job), self.settings)
        paths = {name: flat.absolute(values[name]) for name in self.job.paths if name in values}
        return {name: flat.plain(value) for name, value in (values | paths).items()}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any], where: Path | str = "--config") -> Plan:
        """From flat values; those left out have their defaults, and an unknown name is an error."""
        run = run_in(values)
        given = run.parse(values, where)
        known = run.kind.usual(given) | given
        job = kind_of(values).of(known)
        return cls(job, run.settings(known), job.open_settings - given.keys())

    def differences(self, given: Mapping[str, Any]) -> list[str]:
        """List in words where given values contradict this plan."""
        run = run_in(self.job.options())
        run.expect_own(given, "--config", given)
        return flat.differences(self.to_dict(), given, run.types, self.job.paths, self.job.fitted)


def kind_of(values: Mapping[str, Any]) -> type[Job]:
    """The job that these values are of."""
    task = str(values.get("task"))
    return JOBS["pretrain" if "objective" in values else task if task in JOBS else "finetune"]
