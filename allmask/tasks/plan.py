"""A plan: all that a run that learns a task is told, flat as it stands in config.yaml and on the command line."""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_type_hints

from allmask.errors import UsageError
from allmask.tasks import values as flat
from allmask.tasks.answer import Answer
from allmask.tasks.auxiliary import check_weight
from allmask.tasks.choose import Choose
from allmask.tasks.classify import Classify
from allmask.tasks.fresh import USUAL, Fresh
from allmask.tasks.tag import Tag
from allmask.tasks.title import Title
from allmask.tasks.translate import Translate
from allmask.training.settings import Settings, as_plain

if TYPE_CHECKING:
    from collections.abc import Sequence

    from allmask.data import Record
    from allmask.model import Model

FROZEN_RATE = 1e-3  # heads alone learn faster than a body would bear
TaskOfPlan = Title | Translate | Classify | Choose | Tag | Answer
TASKS: dict[str, type[TaskOfPlan]] = {
    "title": Title,
    "translate": Translate,
    "classify": Classify,
    "choose": Choose,
    "tag": Tag,
    "answer": Answer,
}


@dataclass(frozen=True)
class Plan:
    """Saved, `model` and files are named by absolute paths, so that a run can be resumed from anywhere.

    It begins with a pretrained `model`, or with a `fresh` one. Settings that are `open` are still to be chosen, to suit
    the model and the data.
    """

    model: str | None
    data: str
    task: TaskOfPlan = field(default_factory=Title)
    settings: Settings = field(default_factory=Settings)
    eval: str | None = None
    prune: bool | None = None  # None: as is usual for the task
    lm_weight: float = 0.0  # of the language model's loss beside the task's
    freeze: bool = False  # the body stays as it is, only heads learn
    seeds: int = 1  # the run is repeated with so many seeds
    search: bool = False  # batch, rate and epochs are searched for
    average: int = 0  # the mean of so many checkpoints, the last ones, is kept, if it is better
    on_bad_record: str = "stop"
    fresh: Fresh | None = None
    open: frozenset[str] = frozenset()

    def __post_init__(self):
        if self.prune is None:
            object.__setattr__(self, "prune", self.task.prunes)
        check_weight(self.lm_weight)
        self._check_several()
        self._check_average()
        if (self.model is None) == (self.fresh is None):
            raise UsageError("a run begins with a model or with a preset", "name one of them")
        if self.freeze and self.lm_weight:
            raise UsageError("a frozen body learns no language", "leave --freeze or --lm-weight out")
        if self.on_bad_record not in ("stop", "skip"):
            raise UsageError(f"on_bad_record is {self.on_bad_record!r}; expected stop or skip")

    def _check_several(self) -> None:
        if self.seeds < 1:
            raise UsageError(f"seeds is {self.seeds}; expected 1 or more, such as 5")
        if self.seeds > 1 and self.search:
            raise UsageError("--seeds and --search exclude each other", "search first, then repeat what was found")
        if self.several and self.eval is None:
            raise UsageError("several runs are compared by held-out records", "name them with --eval")
        if self.search and self.settings.steps is not None:
            raise UsageError("--search tries numbers of epochs", "leave --steps out")

    def _check_average(self) -> None:
        if self.average < 0 or self.average == 1:
            raise UsageError(f"average is {self.average}; expected a number of checkpoints, such as 5")
        if self.average > self.settings.keep:
            raise UsageError(
                f"the mean of {self.average} checkpoints cannot be taken of {self.settings.keep}", "raise --keep"
            )

    @property
    def several(self) -> bool:
        """Whether it takes more than one run."""
        return self.seeds > 1 or self.search

    def settled(self, model: Model, records: Sequence[Record]) -> Plan:
        """The same with nothing left open."""
        task = self.task.fitted(model)
        chosen = task.settings(model, records) if self.open else {}
        chosen |= {"lr": FROZEN_RATE} if self.freeze else {}
        chosen |= self.fresh.settings(model, records, self.settings) if self.fresh and self.open else {}
        settings = replace(self.settings, **{name: chosen[name] for name in self.open})
        return replace(self, task=task, settings=settings, open=frozenset())

    def to_dict(self) -> dict[str, Any]:
        named = {name: getattr(self, name) for name in _OWN}
        paths = {name: flat.absolute(named[name]) for name in _PATHS}
        fresh = {} if self.fresh is None else self.fresh.to_dict()
        return {**named, **paths, **fresh, **self.task.to_dict(), **as_plain(self.settings)}

    @classmethod
    def from_dict(cls, values: dict[str, Any], where: Path | str = "--config") -> Plan:
        """From flat values; those left out have their defaults, and a name that is none of ours is an error."""
        values = {name: flat.typed(name, value, _TYPES, where) for name, value in values.items()}
        kind = values.pop("task", "title")
        if kind not in TASKS:
            raise UsageError(f"{where}: unknown task {kind}", f"known: {', '.join(TASKS)}")
        _expect_own(kind, values)
        fresh = _fresh(values)
        if fresh is None:
            _expect_named("model", "as the first argument", values)
        _expect_named("data", "with --data", values)
        kept = max(Settings.keep, values.get("average", 0))
        values = {"model": None, "keep": kept, **(USUAL if fresh else {}), **values}
        task = TASKS[kind](**flat.part(values, TASKS[kind]))
        settings = Settings(**flat.part(values, Settings))
        suited = task.suited | (fresh.suited if fresh else frozenset())
        return cls(
            task=task, settings=settings, fresh=fresh, open=suited - values.keys(), **flat.part(values, cls, _OWN)
        )  # fmt: skip

    def differences(self, given: dict[str, Any]) -> list[str]:
        """Where values given anew contradict this plan; lengths were fitted to the model's positions."""
        paths = (*_PATHS, "tokenizer")
        return flat.differences(self.to_dict(), given, _TYPES, paths, fitted=("max_source", "max_target", "max_length"))


def _expect_named(name: str, how: str, values: dict[str, Any]) -> None:
    if values.get(name) is None:
        raise UsageError(f"no {name} was named", f"name it {how}")


def _fresh(values: dict[str, Any]) -> Fresh | None:
    """What is told of a new model, which a preset asks for."""
    told = flat.part(values, Fresh)
    if told and told.get("preset") is None:
        raise UsageError(f"{', '.join(told)}: for a new model", "leave it out, or name a --preset")
    return Fresh(**told) if told else None


def _expect_own(task: str, values: dict[str, Any]) -> None:
    """An option of another task would change nothing, which nobody who gives it expects."""
    own = {entry.name for entry in fields(TASKS[task])}
    for other, kind in TASKS.items():
        strange = sorted({entry.name for entry in fields(kind)} & values.keys() - own)
        if strange:
            raise UsageError(
                f"{', '.join(strange)}: for {other}, not for {task}", "leave it out, or name another --task"
            )


_PATHS = ("model", "data", "eval")
_OWN = ("model", "data", "eval", "prune", "lm_weight", "freeze", "seeds", "search", "average", "on_bad_record")
_TYPES = {
    **{name: kind for name, kind in get_type_hints(Plan).items() if name in _OWN},
    **{entry.name: get_type_hints(kind)[entry.name] for kind in TASKS.values() for entry in fields(kind)},
    **{entry.name: get_type_hints(Fresh)[entry.name] for entry in fields(Fresh)},
    **get_type_hints(Settings),
    "task": str,
}
