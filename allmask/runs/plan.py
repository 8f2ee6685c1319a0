"""What a run is to do: a job, which says what to train on what data, and the settings of its training.

A plan is flat in config.yaml and on the command line: the options of the job, then those of `Settings`. Its job follows
from its values: `objective` means pretraining, `task` one of `JOBS` or any task that a model is fine-tuned for.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self

from allmask.options import RunOptions, Settings
from allmask.registry import JOBS
from allmask.runs.options import as_saved, part_of, run_in
from allmask.training.log import plot_run

if TYPE_CHECKING:
    import torch

    from allmask.training import Result, Workload


class Job(RunOptions, ABC):
    """A base for jobs: frozen dataclasses whose fields are options. The run driver treats all jobs alike.

    The type of `data` in the methods is whatever `read` returns; the driver only passes it on.
    """

    one_process: ClassVar[str] = ""  # the reason why several processes cannot train it
    several: Any = False  # whether it takes several runs; see allmask/runs/sweep.py
    data: Any

    # ---- options -------------------------------------------------------------------------------------------

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> Self:
        """Create the job from typed values."""
        return cls(**part_of(values, cls))

    def options(self) -> dict[str, Any]:
        """Return the options as they are saved."""
        own = {entry.name: getattr(self, entry.name) for entry in fields(self)}  # type: ignore[arg-type]
        return ({"task": self.task_name} if self.task_name else {}) | own

    # ---- a run ---------------------------------------------------------------------------------------------

    @abstractmethod
    def read(self, plan: Plan, out: Path, quiet: bool) -> Any:
        """Read and check the data of a new run."""

    def reopen(self, plan: Plan, out: Path, quiet: bool, trusted: bool) -> Any:
        """Read the data of a run that has begun. `trusted`: another process has just checked it."""
        return self.read(plan, out, quiet)

    @abstractmethod
    def checksums(self, data: Any) -> dict[str, str]:
        """Return checksums of the data by the option that names it: a resumed run must have the same data."""

    @abstractmethod
    def begin(self, plan: Plan, data: Any) -> tuple[Plan, Any]:
        """Return the plan with all settings chosen, and the model before its first step."""

    @abstractmethod
    def save(self, model: Any, data: Any, folder: Path) -> None:
        """Write a model folder, completely or not at all."""

    @abstractmethod
    def load(self, folder: Path, device: torch.device) -> Any:
        """Load the model from such a folder."""

    @abstractmethod
    def workload(self, plan: Plan, data: Any, model: Any, out: Path, quiet: bool) -> Workload:
        """Return the training examples and the evaluation for the training loop."""

    def evaluation_size(self, data: Any, work: Workload) -> int:
        """Return the number of tokens (or images) of an evaluation: large ones are made less often."""
        return 0

    def plot(self, out: Path) -> None:
        """Draw loss.png from metrics.jsonl."""
        plot_run(out)

    @abstractmethod
    def finish(
        self, plan: Plan, data: Any, work: Workload, model: Any, result: Result, out: Path
    ) -> tuple[Job, dict[str, Any]]:
        """After training, return the job to save with the model, and what it adds to result.json."""

    def hints(self, result: Mapping[str, Any]) -> list[str]:
        """Say what can be done with the trained model, a line each."""
        return []


@dataclass(frozen=True)
class Plan:
    """A job and the settings of its training. The job has yet to choose the settings in `open`.

    It is saved with absolute paths, so that a run can be resumed from any folder.
    """

    job: Job
    settings: Settings = field(default_factory=Settings)
    open: frozenset[str] = frozenset()

    def __post_init__(self):
        self.job.check(self.settings)

    def to_dict(self) -> dict[str, Any]:
        """Return its values as they are in config.yaml."""
        return as_saved(self.job.options() | self.job.flat_settings(self.settings), self.job.paths)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any], where: Path | str = "--config") -> Plan:
        """Create a plan from flat values, with defaults for those left out; an unknown name is an error."""
        run = run_in(values)
        given = run.parse(values, where)
        known = run.kind.usual(given) | given
        job = JOBS[run.task if run.task in JOBS else run.command].of(known)
        return cls(job, run.settings(known), job.open_settings - given.keys())
