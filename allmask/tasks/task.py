"""The task protocol, model folders, and allmask.json.

    Task           what to learn: reads records, prepares a model, makes the workload that the training loop trains on
    TaskWorkload   training examples as batches, and an evaluation on held-out records
    Predictor      a trained model in use: inputs in, predictions out
    ModelFolder    a model on disk, its task, and the predictor for it

A task is a frozen dataclass. Its fields are its options, on the command line, in config.yaml and in allmask.json, which
is saved beside the weights. A new task is one file and one line in `TASKS`; in another package, an entry point
(docs/extend.md).
"""

from __future__ import annotations

import json
import logging
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import Field, asdict, dataclass, fields
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, Self, TypeVar

from allmask.devices import expect_device, find_device, shown
from allmask.errors import CheckpointError, UsageError
from allmask.files import read_json
from allmask.options import Decoding
from allmask.registry import TASKS

if TYPE_CHECKING:
    from allmask.data import Batch, DataFile, Record
    from allmask.model import Model, Outline
    from allmask.options import Settings
    from allmask.tasks.common.auxiliary import Auxiliary
    from allmask.tasks.common.evaluation import Evaluation
    from allmask.training import Score

log = logging.getLogger("allmask")
FILE = "allmask.json"
Placed = TypeVar("Placed", bound=Any)  # a torch.nn.Module


class Task(Protocol):
    """What the commands and runs need to know about a task.

    Inherit from it and write `name`, `predictor` and, if the task can be trained, `read_data`, `prepare` and
    `workload`. Everything else has a default. Training calls the methods in this order:

        read_data -> from_start -> fitted -> suggested_settings -> prepare -> workload -> (training) -> finish
    """

    name: ClassVar[str]
    has_default_model: ClassVar[bool] = True  # allmask-en and allmask-zh are good starts for it
    use: ClassVar[str | None] = None  # what its predictor does in a server besides: a name in USES
    prunes_from: ClassVar[int | None] = None  # records from which --prune is the default, if ever
    open_settings: ClassVar[frozenset[str]] = frozenset()  # names of training settings with a suggested value

    # ---- training ------------------------------------------------------------------------------------------

    def read_data(
        self, data: Path | DataFile, held_out: Path | DataFile | None, on_bad_record: str, skipped: Counter[str]
    ) -> tuple[Self, list[Record], list[Record]]:
        """Read the training records and the held-out records; `held_out` is None without --eval.

        Also return the task itself, with the options that the data decides filled in.
        """
        raise UsageError(f"{self.name}: this task is not trained from records", "choose another --task")

    def fitted(self, model: Model | Outline) -> Self:
        """Return the task with its lengths limited to what the model can hold; refuse a model that cannot do it."""
        return self

    def unit(self, record: Record) -> str:
        """Return what must not be both learnt from and held out: by default, the first field."""
        return str(next(iter(record.fields.values())))

    def input_text(self, record: Record) -> str:
        """Return all that the model reads of a record, to find records with the same input."""
        return self.unit(record)

    def label_counts(self, records: Sequence[Record]) -> Counter[str]:
        """Count the labels of records; empty if the task has none."""
        return Counter()

    def lengths(self, model: Model | Outline, records: Sequence[Record]) -> list[Lengths]:
        """Return how many tokens the texts of records have, and how many of them are too long; for `allmask check`.

        The task is fitted to the model, of which only config and tokenizer are used.
        """
        return []

    def from_start(self, start: ModelFolder, records: Sequence[Record], settings: Settings) -> Self:
        """Return the task with the options filled in that depend on the pretrained model that a run starts from."""
        return self

    def suggested_settings(self, model: Model, records: Sequence[Record]) -> dict[str, Any]:
        """Return a value for each of `open_settings`; it is used where the user gives none."""
        return {}

    def prepare(
        self, model: Model, records: Sequence[Record], seed: int = 0, prune: bool = False, language: bool = False
    ) -> Model:
        """Return the model with the heads that the task needs.

        `prune`: reduce the vocabulary to the tokens of the records. `language`: keep or add a language model head, for
        --lm-weight.
        """
        raise UsageError(f"{self.name}: this task prepares no model")

    def workload(
        self, model: Model, records: Sequence[Record], held_out: Sequence[Record] = (),
        auxiliary: Auxiliary | None = None, precision: str = "auto",
    ) -> TaskWorkload:  # fmt: skip
        """Return the training examples, and an evaluator if there are held-out records.

        `auxiliary` is the loss that --lm-weight adds; `precision` is that of evaluations.
        """
        raise UsageError(f"{self.name}: this task has no training")

    def finish(self, model: Model, held_out: Sequence[Record], out: Path, precision: str = "auto") -> Self:
        """After training: write plots into the run's folder `out`, and tune thresholds on the held-out records."""
        return self

    # ---- using a trained model -----------------------------------------------------------------------------

    @classmethod
    def default_for(cls, opened: ModelFolder) -> Self | None:
        """Return the task for a model without allmask.json if the model has the head for it, otherwise None."""
        return None

    @classmethod
    def how_to_train(cls, source: str) -> str:
        """Return a hint for users whose model cannot do this task: the command that trains it."""
        return f"fine-tune it: allmask finetune {source} --task {cls.name} --data train.jsonl --out runs/{cls.name}"

    def load(self, opened: ModelFolder) -> Any:
        """Return the model that `predictor` takes."""
        return opened.model

    def predictor(self, model: Any, precision: str = "auto") -> Predictor:
        """Return the trained model, ready for inputs."""
        raise NotImplementedError


@dataclass(frozen=True)
class Lengths:
    """The tokens of the texts of one kind, such as sources, and what happens to those that are too long."""

    name: str
    tokens: Sequence[int]
    limit: int
    windows: bool = False  # longer texts are read in windows, not cut

    @property
    def too_long(self) -> int:
        return sum(count > self.limit for count in self.tokens)


class TaskWorkload(Protocol):
    """Training examples by number, and an evaluator of the model (see `allmask.training.Workload`)."""

    evaluator: Callable[[Model], Score] | None
    lengths: Sequence[int]  # tokens of each example

    def batch(self, numbers: Sequence[int], epoch: int) -> Batch:
        """Return these examples as one batch."""
        ...

    def evaluate(self, model: Model, step: int = 0) -> Score | None:
        return None if self.evaluator is None else self.evaluator(model)

    def cache_features(self, model: Model, precision: str) -> None:
        """With --freeze: compute the body's output for each text once. By default the body runs at each step."""


class Predictor(Protocol):
    """A trained model in use.

    `allmask.pipeline` returns it, and users call it; arguments and results are the task's own. The commands `predict`
    and `evaluate` use the methods below, which are the same for all tasks: records in, plain dictionaries out.
    """

    does: ClassVar[str]  # a verb for messages: "this model {classifies}"
    done: ClassVar[str]  # a participle for the progress bar: "{classified} 20/100"
    window: int = 256  # how many records are in memory at a time
    options: ClassVar[frozenset[str]] = frozenset()  # options of `predict`, such as "beams"
    declared: ClassVar[type] = Decoding  # the dataclass whose fields they are
    served: ClassVar[bool] = True  # its inputs are JSON, so `allmask serve` can offer it
    hidden: ClassVar[frozenset[str]] = frozenset()  # fields that are not copied by `predict`, if there are no columns
    cut: int = 0  # how many texts were truncated so far
    max_tokens: int = 0  # the length to which they were truncated
    doubtful: int = 0  # how many texts were written with less than the usual score of held-out records

    def __call__(self, *inputs: Any, **options: Any) -> Any: ...

    def computes_in(self) -> str | None:
        """Return the precision of its products, such as "int8"; None if it cannot tell."""
        return None

    def check(self, options: dict[str, Any]) -> None:
        """Raise UsageError for options that contradict each other; called before anything is read."""

    def new_tokens(self, **options: Any) -> int:
        """Return how many tokens it may write for a record, in all beams."""
        return 0

    def read(
        self, path: Path | DataFile, on_bad_record: str = "stop", skipped: Counter[str] | None = None,
        targets: bool = False, limit: int | None = None,
    ) -> Iterator[Record]:  # fmt: skip
        """Read the records of a file, at most `limit` of them; with `targets`, each must have the right answer."""
        return islice(self.records(path, targets, on_bad_record=on_bad_record, skipped=skipped), limit)

    def records(self, path: Path | DataFile, targets: bool, **how: Any) -> Iterator[Record]:
        """Read all records of a file for `read`; `how` is `on_bad_record` and `skipped`, as `read_records` has them."""
        raise UsageError(f"this model {self.does}; it does not read files")

    def expect_lines(self) -> None:
        """Raise UsageError unless a line of stdin, as the field `text`, is a complete input."""
        raise UsageError(f"this model {self.does}; a line of stdin is a text", "name a file")

    def predict(self, records: Sequence[Record], **options: Any) -> Iterator[dict[str, Any]]:
        """Yield the predicted fields of each record, in order, as values that JSON can represent."""
        ...

    def evaluate(self, records: Iterable[Record], show: int = 0, quiet: bool = True, **options: Any) -> Evaluation:
        """Score the predictions for records with targets; include the `show` most interesting examples."""
        raise UsageError(f"this model {self.does}; that has no score")


# ---- model folders ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class ModelFolder:
    """A model on disk. Its files are found when it is opened; each is parsed once, when first needed."""

    source: str  # as the user named it
    folder: Path
    device: str = "cpu"  # where the model computes: auto, cpu, cuda or mps

    @classmethod
    def open(cls, source: str | Path, device: str = "cpu") -> ModelFolder:
        """`source` is a folder or file, a run, a bundled name such as allmask-en, or org/name on the hub."""
        from allmask.checkpoints import resolve

        return cls(str(source), resolve(source), expect_device(device))

    @cached_property
    def settings(self) -> dict[str, Any]:
        """The contents of config.json; empty if there is none."""
        file = self.folder / "config.json"
        return dict(read_json(file)) if file.is_file() else {}

    @cached_property
    def saved_tasks(self) -> list[Any]:
        """The tasks in allmask.json, that is, those that the model was trained for, the main one first."""
        return load_tasks(self.folder)

    @property
    def saved_task(self) -> Any | None:
        """The main one of `saved_tasks`; None if there is none."""
        return next(iter(self.saved_tasks), None)

    @cached_property
    def model(self) -> Model:
        from allmask.model import load_folder

        return self.placed(load_folder(self.folder, self.source))

    def placed(self, network: Placed) -> Placed:
        """Move a network to the device, and say so unless that is the CPU."""
        device = find_device(self.device)
        if device.type != "cpu":
            log.info("device: %s", shown(device))
        return network.to(device)

    @cached_property
    def outline(self) -> Outline:
        """The model without its weights, which are not read."""
        from allmask.model import load_outline

        return load_outline(self.folder)

    def task(self, name: str | None = None) -> Any:
        """Return the model's task: the saved one, or the one that its head is for.

        With a `name`, return that task, or raise an error if the model cannot do it.
        """
        for saved in self.saved_tasks:
            if name in (None, saved.name):
                return saved
        for kind in TASKS.values() if name is None else [TASKS[name]]:
            task = kind.default_for(self)
            if task is not None:
                return task
        if name is None:
            problem = "has no head for a task, and no allmask.json that names the task it was trained for"
        elif self.saved_tasks:
            learnt = " and ".join(f'"{saved.name}"' for saved in self.saved_tasks)
            problem = f'was trained for {learnt}, not for "{name}"'
        else:
            problem = f'was not trained for "{name}", and has no head for it'
        hint = TASKS[name or "classify"].how_to_train(self.source)
        others = "" if name else "\nfor other tasks: allmask finetune --help"
        raise CheckpointError(f"{self.source}: {problem}", hint + others)

    def predictor(self, name: str | None = None, precision: str = "auto") -> Any:
        """Return the model ready for inputs, for its own task or for the named one."""
        task = self.task(name)
        return task.predictor(task.load(self), precision)


# ---- allmask.json ----------------------------------------------------------------------------------------------


def to_dict(task: Any) -> dict[str, Any]:
    """Return the task's name and options, as allmask.json and config.yaml have them."""
    return {"task": task.name, **asdict(task)}


def from_dict(values: dict[str, Any], where: Path | str) -> Any:
    """Make a task from what `to_dict` returned; `where` is for error messages."""
    name = values.get("task")
    if not isinstance(name, str) or name not in TASKS:
        raise CheckpointError(
            f"{where}: the task is {name!r}; known: {', '.join(TASKS)}",
            "install the package that defines it, or a newer allmask",
        )
    given = {key: value for key, value in values.items() if key != "task"}
    for entry in fields(TASKS[name]):
        if entry.name in given and not _fits(given[entry.name], entry):
            raise CheckpointError(
                f"{where}: {entry.name} is {given[entry.name]!r}; expected {entry.type}",
                "was it edited, or made by another version of allmask?",
            )
    try:
        return TASKS[name](**given)
    except (TypeError, UsageError) as error:
        raise CheckpointError(f"{where}: {error}", "was it made by another version of allmask?") from None


_JSON_TYPES: dict[str, Callable[[Any], bool]] = {
    "int": lambda value: isinstance(value, int) and not isinstance(value, bool),
    "float": lambda value: isinstance(value, int | float) and not isinstance(value, bool),
    "bool": lambda value: isinstance(value, bool),
    "str": lambda value: isinstance(value, str),
    "None": lambda value: value is None,
}


def _fits(value: Any, entry: Field[Any]) -> bool:
    """Whether a value from JSON has the type of a field, such as `int | None`; other types are not judged."""
    kinds = str(entry.type).split(" | ")
    return not _JSON_TYPES.keys() >= set(kinds) or any(_JSON_TYPES[kind](value) for kind in kinds)


def save_task(task: Any, folder: Path, also: Sequence[Any] = ()) -> None:
    """Write allmask.json: the main task and, under "also", others that the same weights were trained for."""
    values = to_dict(task) | ({"also": [to_dict(other) for other in also]} if also else {})
    (folder / FILE).write_text(json.dumps(values, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def load_tasks(folder: Path) -> list[Any]:
    """Read the tasks in a folder's allmask.json, the main one first; none if there is no such file."""
    file = folder / FILE
    if not file.is_file():
        return []
    found = read_json(file)
    also = found.pop("also", [])
    if not isinstance(also, list) or not all(isinstance(values, dict) for values in also):
        raise CheckpointError(f'{file}: "also" must be a list of tasks', "copy the folder again")
    return [from_dict(values, file) for values in (found, *also)]


def load_task(folder: Path) -> Any | None:
    """Read the main task in a folder's allmask.json; None if there is no such file."""
    return next(iter(load_tasks(folder)), None)
