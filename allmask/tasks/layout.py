"""How the plan of a run with images stands in config.yaml: its own fields and those of `Settings`, flat."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, get_type_hints

from allmask.tasks import values as flat
from allmask.tasks.folders import CHECKSUMS, saved_values
from allmask.training import Settings
from allmask.training.settings import as_plain

BATCH = "batch_images"  # what batch_tokens is called here
# A running mean of weights would need running statistics of its own; the others are of Transformers
_OF_TEXTS = ("dropout", "ema", "recompute", "layer_decay", "batch_tokens")


class Layout:
    """Of one kind of plan, a dataclass whose `settings` are those of the loop.

    Fields in `paths` name files or folders; settings in `unused` are not there, and those of texts neither.
    """

    def __init__(self, task: str, plan: type, paths: Collection[str], unused: Collection[str] = ()):
        self.task, self.paths, self.unused = task, paths, (*_OF_TEXTS, *unused)
        self.own = tuple(entry.name for entry in fields(plan) if entry.name != "settings")
        hints = get_type_hints(plan)
        settings = {name: kind for name, kind in get_type_hints(Settings).items() if name not in self.unused}
        self.types = {"task": str, **{name: hints[name] for name in self.own}, BATCH: int, **settings}

    def to_dict(self, plan: Any) -> dict[str, Any]:
        own = {name: getattr(plan, name) for name in self.own}
        paths = {name: flat.absolute(own[name]) for name in self.paths}
        settings = {name: value for name, value in as_plain(plan.settings).items() if name not in self.unused}
        return {"task": self.task, **own, **paths, BATCH: plan.settings.batch_tokens, **settings}

    def typed(self, values: dict[str, Any], where: Path | str) -> dict[str, Any]:
        """Flat values as their fields have them; a name that is none of ours is an error."""
        return {name: flat.typed(name, value, self.types, where) for name, value in values.items() if name != "task"}

    def fields_of(self, values: dict[str, Any], usual: Settings) -> dict[str, Any]:
        """What a plan is made of, from typed values; settings left out are the usual ones."""
        batch = {"batch_tokens": values[BATCH]} if BATCH in values else {}
        own = {name: values[name] for name in self.own if name in values}
        return own | {"settings": replace(usual, **flat.part(values, Settings), **batch)}

    def differences(self, plan: Any, given: dict[str, Any]) -> list[str]:
        """Where values given anew contradict a plan."""
        return flat.differences(self.to_dict(plan), given, self.types, self.paths)


def begun(out: Path) -> dict[str, Any]:
    """The values of a plan in the folder of a run that was begun."""
    return {name: value for name, value in saved_values(out).items() if name != CHECKSUMS}
