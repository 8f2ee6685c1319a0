"""The labels of a task head in a `config.json`: id2label, label2id and problem_type, as transformers writes them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from allmask.checkpoints.renaming import Family, TaskLayout
from allmask.config import Config
from allmask.errors import CheckpointError
from allmask.nn.heads import SPAN, Labels

PROBLEMS = {
    "single": "single_label_classification",
    "multi": "multi_label_classification",
    "number": "regression",
}


def layouts_named(family: Family, settings: Mapping[str, Any]) -> list[TaskLayout]:
    """The layouts of the class that the settings name. A layout with `marked_by` precedes others of its class."""
    named = settings.get("architectures")
    first = named[0] if isinstance(named, list) and named else None
    return [layout for layout in family.tasks if layout.architecture == first]


def layout_for(family: Family, config: Config, labels: Labels) -> TaskLayout | None:
    """The layout for these labels, or None. A causal BERT has none: transformers would classify by its [CLS]."""
    if config.is_bert and config.own_mask == "causal":
        return None
    return next((layout for layout in family.tasks if labels.kind in layout.kinds), None)


def labels_from(layout: TaskLayout, settings: Mapping[str, Any], outputs: int) -> Labels:
    """The labels of a head with this many outputs. Without names they are LABEL_0, LABEL_1, … as in transformers."""
    if layout.kinds == ("choice",):  # its one output has no name
        return Labels("choice", ("choice",))
    if layout.kinds == ("span",):
        if outputs != len(SPAN):
            raise CheckpointError(f"the head for answers has {outputs} outputs; expected 2, for a start and an end")
        return SPAN
    if layout.kinds in (("tag",), ("chain",)):
        return Labels(layout.kinds[0], _names(settings.get("id2label"), outputs))
    problem = settings.get("problem_type")
    kinds = {word: kind for kind, word in PROBLEMS.items()} | {None: "number" if outputs == 1 else "single"}
    if not isinstance(problem, str | None) or problem not in kinds:
        raise CheckpointError(f"problem_type is {problem!r}; expected null or one of {', '.join(PROBLEMS.values())}")
    return Labels(kinds[problem], _names(settings.get("id2label"), outputs))


def _names(given: Any, outputs: int) -> tuple[str, ...]:
    if given is None:
        return tuple(f"LABEL_{number}" for number in range(outputs))
    if not isinstance(given, Mapping):
        raise CheckpointError(f'id2label is {given!r}; expected an object {{"0": "name", …}}')
    by_number = {str(number): name for number, name in given.items()}
    names = tuple(by_number.get(str(number)) for number in range(outputs))
    if len(by_number) != outputs or not all(isinstance(name, str) for name in names):
        raise CheckpointError(
            f"id2label names {len(by_number)} labels; the head has {outputs}, numbered from 0",
            "the settings and the weights belong to different models",
        )
    return tuple(str(name) for name in names)


def labels_to(layout: TaskLayout, labels: Labels) -> dict[str, Any]:
    """The settings of a task head in `config.json`."""
    if labels.kind in ("choice", "span"):
        return {"architectures": [layout.architecture]}
    problem = {"problem_type": PROBLEMS[labels.kind]} if labels.kind in PROBLEMS else {}
    return {
        "architectures": [layout.architecture],
        **problem,
        "num_labels": len(labels),
        "id2label": {str(number): name for number, name in enumerate(labels.names)},
        "label2id": {name: number for number, name in enumerate(labels.names)},
    }


def own_labels_from(given: Any) -> Labels:
    """Read labels in our own layout: {"kind": "single", "names": ["negative", "positive"]}."""
    if not isinstance(given, Mapping) or not isinstance(given.get("names"), list):
        raise CheckpointError(f"labels is {given!r}; expected a kind and names")
    return Labels(given.get("kind", ""), tuple(given["names"]))
