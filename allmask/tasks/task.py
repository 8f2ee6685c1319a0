"""What a task is, which there are, how one is saved beside the weights of a model (allmask.json), and how it is used.

A task is a frozen dataclass: its fields are its options, on the command line and in config.yaml. A new task is one file
and one line in `TASKS`; in another package, an entry point (see docs/extend.md).
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, Self

from allmask.errors import CheckpointError, UsageError
from allmask.registry import TASKS

if TYPE_CHECKING:
    from allmask.data import Record
    from allmask.model import Model
    from allmask.tasks.common.auxiliary import Auxiliary
    from allmask.tasks.common.evaluation import Evaluation
    from allmask.training.loop import Workload

    class TaskWorkload(Workload, Protocol):
        def cache_features(self, model: Model, precision: str) -> None:
            """Compute what a frozen body makes of each text, once; does nothing where that cannot be reused."""


FILE = "allmask.json"


class Task(Protocol):
    """What the runs and commands ask of a task; they know no task by name.

    A task that inherits from it needs a name, the methods that raise errors here, and what differs from the rest.
    """

    name: ClassVar[str]
    prunes: ClassVar[bool] = False  # the vocabulary is cut down to what the data needs, unless the user says otherwise
    open_settings: ClassVar[frozenset[str]] = frozenset()  # training settings that suit model and data unless given

    # ---- training ------------------------------------------------------------------------------------------

    def read_data(
        self, data: Path, held_out: Path | None, on_bad_record: str, skipped: Counter[str]
    ) -> tuple[Self, list[Record], list[Record]]:
        """The records to train on and those held out, and the task with what depends on the data."""
        raise UsageError(f"{self.name}: this task is not trained from records", "choose another --task")

    def fitted(self, model: Model) -> Self:
        """The same task with lengths that the model can hold; a model that cannot do it is refused."""
        return self

    def suggested_settings(self, model: Model, records: Sequence[Record]) -> dict[str, Any]:
        """Values for the open settings."""
        return {}

    def prepare(
        self, model: Model, records: Sequence[Record], seed: int = 0, prune: bool = False, language: bool = False
    ) -> Model:
        """The model with the heads and the vocabulary that the task needs."""
        raise UsageError(f"{self.name}: this task prepares no model")

    def workload(
        self, model: Model, records: Sequence[Record], held_out: Sequence[Record] = (),
        auxiliary: Auxiliary | None = None, precision: str = "auto",
    ) -> TaskWorkload:  # fmt: skip
        """What the training loop trains on, and how it evaluates."""
        raise UsageError(f"{self.name}: this task has no training")

    def finish(self, model: Model, held_out: Sequence[Record], out: Path, precision: str = "auto") -> Self:
        """After training: draw pictures into the run's folder, choose thresholds on the held-out records."""
        return self

    # ---- using a trained model -----------------------------------------------------------------------------

    @classmethod
    def default_for(cls, opened: ModelFolder) -> Self | None:
        """The task for a model without allmask.json, where its head shows that it can do it; None otherwise."""
        return None

    @classmethod
    def how_to_train(cls, source: str) -> str:
        """A command that makes a model for this task from one that cannot do it."""
        return f"fine-tune it: allmask finetune {source} --task {cls.name} --data train.jsonl --out runs/{cls.name}"

    def load(self, opened: ModelFolder) -> Any:
        """The model that `predictor` takes."""
        return opened.model

    def predictor(self, model: Any, precision: str = "auto") -> Predictor:
        """The trained model ready for inputs."""
        raise NotImplementedError


class Predictor(Protocol):
    """A trained model at work: inputs in, predictions out.

    Users of `allmask.pipeline` call it, each kind with its own arguments and result objects. The commands `predict` and
    `evaluate` use the methods below, which are the same for all kinds: records in, plain dictionaries out.
    """

    does: ClassVar[str]  # for messages: "this model {classifies}"
    done: ClassVar[str]  # for the progress bar: "{classified} 20/100"
    window: int = 256  # records in memory
    options: ClassVar[frozenset[str]] = frozenset()  # decoding options that `predict` and `evaluate` take
    hidden: ClassVar[frozenset[str]] = frozenset()  # fields that `predict` needs but that are written only if kept
    cut: int = 0  # texts so far that were longer than the model reads
    max_tokens: int = 0  # tokens of a text that the model reads

    def __call__(self, *inputs: Any, **options: Any) -> Any: ...

    def check(self, options: dict[str, Any]) -> None:
        """Refuse options that contradict each other, before anything is read."""

    def read(
        self, path: Path, on_bad_record: str = "stop", skipped: Counter[str] | None = None, keep: Sequence[str] = (),
        targets: bool = False, limit: int | None = None,
    ) -> Iterator[Record]:  # fmt: skip
        """The records of a file, with the fields of `keep`; with `targets`, what should be predicted is required."""
        ...

    def expect_lines(self) -> None:
        """Refuse lines of stdin as inputs, unless a line is all that a prediction needs."""
        raise UsageError(f"this model {self.does}; a line of stdin is a text", "name a file")

    def predict(self, records: Sequence[Record], **options: Any) -> Iterator[dict[str, Any]]:
        """Fields for each record, in order, as JSON can write them."""
        ...

    def evaluate(self, records: Iterable[Record], show: int = 0, quiet: bool = True, **options: Any) -> Evaluation:
        """Scores of the predictions for records with targets, and `show` examples worth reading."""
        ...


# ---- model folders ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class ModelFolder:
    """A model folder as a command opens it: found, parsed and loaded once, each when first needed."""

    source: str  # as the user named it
    folder: Path

    @classmethod
    def open(cls, source: str | Path) -> ModelFolder:
        """From a folder or file, a run, a bundled name, or org/name on the hub."""
        from allmask.checkpoints import resolve

        return cls(str(source), resolve(source))

    @cached_property
    def settings(self) -> dict[str, Any]:
        """What config.json says; nothing where there is none."""
        from allmask.checkpoints.config_json import read_json

        file = self.folder / "config.json"
        return dict(read_json(file)) if file.is_file() else {}

    @cached_property
    def saved_task(self) -> Any | None:
        """The task that the model was trained for, as allmask.json has it."""
        return load_task(self.folder)

    @cached_property
    def model(self) -> Model:
        from allmask.model import load_folder

        return load_folder(self.folder, self.source)

    def task(self, name: str | None = None) -> Any:
        """The task of the model, saved with it or evident from its head; with a name, that task or an error."""
        saved = self.saved_task
        if saved is not None and name in (None, saved.name):
            return saved
        kinds = [TASKS[name]] if name is not None else (TASKS[each] for each in TASKS)
        found = next((task for kind in kinds if (task := kind.default_for(self)) is not None), None)
        if found is None:
            raise self._untrained(name)
        return found

    def predictor(self, name: str | None = None, precision: str = "auto") -> Any:
        """The model ready for inputs, for its own task or for a named one."""
        task = self.task(name)
        return task.predictor(task.load(self), precision)

    def _untrained(self, name: str | None) -> CheckpointError:
        saved = self.saved_task
        if name is None:
            what = "has no head for a task, and no allmask.json that names the task it was trained for"
        elif saved is not None:
            what = f'was trained for "{saved.name}", not for "{name}"'
        else:
            what = f'was not trained for "{name}", and has no head for it'
        others = "" if name else "\nfor other tasks: allmask finetune --help"
        return CheckpointError(f"{self.source}: {what}", TASKS[name or "classify"].how_to_train(self.source) + others)


# ---- allmask.json ----------------------------------------------------------------------------------------------


def to_dict(task: Any) -> dict[str, Any]:
    """A task as plain values, as it stands in allmask.json and config.yaml."""
    return {"task": task.name, **asdict(task)}


def from_dict(values: dict[str, Any], where: Path | str) -> Any:
    name = values.get("task")
    if not isinstance(name, str) or name not in TASKS:
        raise CheckpointError(
            f"{where}: the task is {name!r}; known: {', '.join(TASKS)}",
            "install the package that it is of, or a newer allmask",
        )
    try:
        return TASKS[name](**{key: value for key, value in values.items() if key != "task"})
    except (TypeError, UsageError) as error:
        raise CheckpointError(f"{where}: {error}", "was it made by another version of allmask?") from None


def save_task(task: Any, folder: Path) -> None:
    text = json.dumps(to_dict(task), indent=2, ensure_ascii=False) + "\n"
    (folder / FILE).write_text(text, encoding="utf-8")


def load_task(folder: Path) -> Any | None:
    """The task that a model folder was trained for; None if its files do not say."""
    file = folder / FILE
    if not file.is_file():
        return None
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{file}: cannot be read: {error}", "copy the folder again") from None
    return from_dict(found if isinstance(found, dict) else {}, file)
