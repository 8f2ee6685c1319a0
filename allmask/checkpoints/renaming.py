"""From the names in a file to ours and back: tables of two columns, and a few named steps of tensor surgery.

A family is data. Its table pairs names one to one, so it reads in both directions; what is more than a new name
(a transposed matrix, three matrices in one) is a step with its own undoing. Expected shapes in a file come from
running the way back on tensors without data, so a file is judged by its header before anything is loaded.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor

from allmask.config import Config

Tensors = dict[str, Tensor]


@dataclass(frozen=True)
class Step:
    """Surgery on tensors that already bear our names, and its exact undoing."""

    apply: Callable[[Tensors], Tensors]
    undo: Callable[[Tensors], Tensors]


@dataclass(frozen=True)
class TaskLayout:
    """How a class of transformers writes the head of a task: its name, what it may be asked, its names for tensors."""

    architecture: str
    kinds: tuple[str, ...]  # see Labels
    table: tuple[tuple[str, str], ...]
    marked_by: str | None = None  # their name of a tensor that only this one of a class's layouts has


@dataclass(frozen=True)
class Family:
    """How one family of checkpoints writes names, shapes and settings."""

    name: str
    table: tuple[tuple[str, str], ...]  # (theirs, ours), `*` is the number of a layer
    config_from: Callable[[Mapping[str, Any]], Config]
    config_to: Callable[[Config, frozenset[str]], dict[str, Any]]
    settings: Mapping[str, str]  # their words for the fields of a Config
    may_lack: tuple[str, ...]  # heads a file may come without
    steps: tuple[Step, ...] = ()
    prefix: str = ""  # may or may not stand before the names of the body
    old_endings: Mapping[str, str] = field(default_factory=dict)  # renamed at the end of a name
    ignored: tuple[str, ...] = ()  # extras that carry nothing
    task_heads: tuple[str, ...] = ()  # extras that carry something we leave out, and say so, unless it is one of
    tasks: tuple[TaskLayout, ...] = ()
    output: str | None = None  # their name of an output matrix that may be a copy of `tokens`
    tokens: str = ""
    copies: tuple[str, ...] = ()  # other names of `tokens`
    second_bias: tuple[str, str] | None = None  # (their name that wins when both are there, their usual name)

    def with_task(self, layout: TaskLayout) -> Family:
        """The same family with the head of a task among what it can name."""
        return replace(self, table=self.table + layout.table, may_lack=(*self.may_lack, "task"))

    def pairs(self, layers: int, decoder_layers: int = 0) -> dict[str, str]:
        """The table with every layer written out."""
        return {
            theirs.replace("*", str(n)): ours.replace("*", str(n))
            for theirs, ours in self.table
            for n in range((decoder_layers if ours.startswith("body.decoder.") else layers) if "*" in theirs else 1)
        }

    def tidy(self, name: str) -> str:
        """A name in a file as the table writes it: without the prefix, with today's endings."""
        name = name.removeprefix(self.prefix)
        for old, new in self.old_endings.items():
            name = name.removesuffix(old) + new if name.endswith(old) else name
        return name

    def to_ours(self, tensors: Tensors, layers: int, decoder_layers: int = 0) -> Tensors:
        names = self.pairs(layers, decoder_layers)
        tensors = {names[theirs]: tensor for theirs, tensor in tensors.items()}
        for step in self.steps:
            tensors = step.apply(tensors)
        return tensors

    def to_theirs(self, tensors: Tensors, layers: int, decoder_layers: int = 0) -> Tensors:
        for step in reversed(self.steps):
            tensors = step.undo(tensors)
        names = {ours: theirs for theirs, ours in self.pairs(layers, decoder_layers).items()}
        return {names[ours]: tensor for ours, tensor in tensors.items()}


def matches(name: str, patterns: Iterable[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def without_data(shapes: Mapping[str, tuple[int, ...]]) -> Tensors:
    """Tensors that have a shape and nothing else: they cost no memory whatever a config says."""
    return {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}


def transpose(*patterns: str) -> Step:
    """Matrices stored (in, out), as TensorFlow and GPT-2's Conv1D do; ours are (out, in)."""

    def turn(tensors: Tensors) -> Tensors:
        return {name: t.t().contiguous() if matches(name, patterns) else t for name, t in tensors.items()}

    return Step(turn, turn)


def split_qkv() -> Step:
    """Query, key and value stacked in one matrix, `….qkv.weight` (3·width, width), become three."""
    thirds = ("query", "key", "value")

    def split(tensors: Tensors) -> Tensors:
        result: Tensors = {}
        for name, tensor in tensors.items():
            if ".qkv." not in name:
                result[name] = tensor
                continue
            for third, part in zip(thirds, tensor.chunk(3), strict=True):
                result[name.replace(".qkv.", f".{third}.")] = part.clone()
        return result

    def join(tensors: Tensors) -> Tensors:
        result: Tensors = {}
        for name, tensor in tensors.items():
            third = re.search(r"\.(query|key|value)\.", name)
            if third is None:
                result[name] = tensor
            elif third[1] == "query":
                parts = [tensors[name.replace(".query.", f".{word}.")] for word in thirds]
                result[name.replace(".query.", ".qkv.")] = torch.cat(parts)
        return result

    return Step(split, join)
