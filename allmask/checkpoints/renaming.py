"""Convert the names in a file to ours and back: tables of two columns, and a few named steps that change tensors.

A family is data. Its table pairs names one to one, so it works in both directions. Whatever is more than a new name
(a transposed matrix, three matrices in one) is a step with its inverse. The shapes expected in a file come from
applying the inverse to tensors on the meta device, so a file is checked by its header before anything is loaded.
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
CLASSIFIER_TABLE = (  # tables of task heads that several families share: (theirs, ours)
    ("classifier.weight", "task_head.output.weight"),
    ("classifier.bias",   "task_head.output.bias"),
)  # fmt: skip
SPAN_TABLE = (
    ("qa_outputs.weight", "task_head.output.weight"),
    ("qa_outputs.bias",   "task_head.output.bias"),
)  # fmt: skip
CRF_TABLE = (  # not in transformers; these names are our own
    ("crf.follows_bias",  "task_head.chain.follows_bias"),
    ("crf.first_bias",    "task_head.chain.first_bias"),
    ("crf.last_bias",     "task_head.chain.last_bias"),
)  # fmt: skip


@dataclass(frozen=True)
class Step:
    """A change of tensors that have our names already, and its exact inverse."""

    apply: Callable[[Tensors], Tensors]
    undo: Callable[[Tensors], Tensors]


@dataclass(frozen=True)
class TaskLayout:
    """How a class of transformers stores its task head: the name of the class, kinds of labels, names of tensors."""

    architecture: str
    kinds: tuple[str, ...]  # see Labels
    table: tuple[tuple[str, str], ...]
    marked_by: str | None = None  # a tensor that distinguishes this layout from others of the same class


@dataclass(frozen=True)
class Family:
    """How one family of checkpoints stores settings and tensors."""

    name: str
    table: tuple[tuple[str, str], ...]  # (theirs, ours), `*` is the number of a layer
    config_from: Callable[[Mapping[str, Any]], Config]
    config_to: Callable[[Config, frozenset[str]], dict[str, Any]]
    settings: Mapping[str, str]  # their names for fields of a Config, for error messages
    may_lack: tuple[str, ...]  # heads that a file may lack
    steps: tuple[Step, ...] = ()
    prefix: str = ""  # optional, before the names of the body
    old_endings: Mapping[str, str] = field(default_factory=dict)  # old suffix: new suffix
    measured: Mapping[str, str] = field(default_factory=dict)  # a setting: the tensor with as many rows
    ignored: tuple[str, ...] = ()  # tensors without information
    task_heads: tuple[str, ...] = ()  # tensors that are left out with a warning, unless a layout in `tasks` reads them
    tasks: tuple[TaskLayout, ...] = ()
    output: str | None = None  # their name of the output matrix, which may be a copy of `tokens`
    tokens: str = ""  # their name of the token embedding
    copies: tuple[str, ...] = ()  # other names of `tokens`
    second_bias: tuple[str, str] | None = None  # two names of the output bias; the first wins
    constants: Callable[[Config], Tensors] = lambda config: {}  # tensors without information that a file has, too
    tokenizer: Mapping[str, Any] = field(default_factory=dict)  # settings in tokenizer_config.json

    def with_task(self, layout: TaskLayout) -> Family:
        """The same family with the tensors of a task head in its table."""
        return replace(self, table=self.table + layout.table, may_lack=(*self.may_lack, "task"))

    def pairs(self, layers: int, decoder_layers: int = 0) -> dict[str, str]:
        """The table with every layer written out."""
        return {
            theirs.replace("*", str(n)): ours.replace("*", str(n))
            for theirs, ours in self.table
            for n in range((decoder_layers if ours.startswith("body.decoder.") else layers) if "*" in theirs else 1)
        }

    def tidy(self, name: str) -> str:
        """Return a name in a file as it is in the table: without the prefix, with current suffixes."""
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


def transpose(*patterns: str) -> Step:
    """Transpose matrices that are stored (in, out), as by TensorFlow and GPT-2's Conv1D; ours are (out, in)."""

    def turn(tensors: Tensors) -> Tensors:
        return {name: t.t().contiguous() if matches(name, patterns) else t for name, t in tensors.items()}

    return Step(turn, turn)


def split_qkv() -> Step:
    """Split query, key and value, stacked in one matrix `….qkv.weight` (3·width, width), into three."""
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
