"""A plan: all that a fine-tuning run is told, flat as it stands in config.yaml and on the command line."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_type_hints

from allmask.errors import UsageError
from allmask.tasks import values as flat
from allmask.tasks.title import Title
from allmask.training.settings import Settings, as_plain

TASKS = ("title",)


@dataclass(frozen=True)
class Plan:
    """Saved, `model` and files are named by absolute paths, so that a run can be resumed from anywhere."""

    model: str
    data: str
    task: Title = field(default_factory=Title)
    settings: Settings = field(default_factory=Settings)
    eval: str | None = None
    prune: bool = True
    on_bad_record: str = "stop"

    def __post_init__(self):
        if self.on_bad_record not in ("stop", "skip"):
            raise UsageError(f"on_bad_record is {self.on_bad_record!r}; expected stop or skip")

    def to_dict(self) -> dict[str, Any]:
        named = {name: getattr(self, name) for name in _OWN}
        paths = {name: flat.absolute(named[name]) for name in _PATHS}
        return {**named, **paths, **self.task.to_dict(), **as_plain(self.settings)}

    @classmethod
    def from_dict(cls, values: dict[str, Any], where: Path | str = "--config") -> Plan:
        """From flat values; those left out have their defaults, and a name that is none of ours is an error."""
        values = {name: flat.typed(name, value, _TYPES, where) for name, value in values.items()}
        if values.pop("task", "title") not in TASKS:
            raise UsageError(f"{where}: unknown task", f"known: {', '.join(TASKS)}")
        for name, how in (("model", "as the first argument"), ("data", "with --data")):
            if values.get(name) is None:
                raise UsageError(f"no {name} was named", f"name it {how}")
        task = Title(**flat.part(values, Title))
        return cls(task=task, settings=Settings(**flat.part(values, Settings)), **flat.part(values, cls, _OWN))

    def differences(self, given: dict[str, Any]) -> list[str]:
        """Where values given anew contradict this plan; its max_source was fitted to the model's positions."""
        return flat.differences(self.to_dict(), given, _TYPES, _PATHS, fitted="max_source")


_PATHS = ("model", "data", "eval")
_OWN = ("model", "data", "eval", "prune", "on_bad_record")
_TYPES = {
    **{name: kind for name, kind in get_type_hints(Plan).items() if name in _OWN},
    **get_type_hints(Title),
    **get_type_hints(Settings),
    "task": str,
}
