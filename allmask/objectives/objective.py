"""What an objective is: corruption, order and targets. A model does not know which one it learns."""

from __future__ import annotations

from typing import ClassVar, Protocol

import numpy as np

from allmask.data import NO_LABEL, Batch
from allmask.errors import UsageError
from allmask.objectives.draws import Draw
from allmask.objectives.ragged import Ragged


class Samples(Protocol):
    """The rows to train on, by number: ids without the special tokens around them. A list of arrays will do."""

    def __len__(self) -> int: ...

    def __getitem__(self, number: int, /) -> np.ndarray: ...


class Passages(Samples, Protocol):
    """Samples that know their sentences and documents."""

    def sentences(self, number: int, /) -> np.ndarray:
        """Where in the sample its sentences begin; the first is 0."""
        ...

    def document(self, number: int, /) -> int:
        """Which document the sample is of."""
        ...


class Objective(Protocol):
    """Is built with a `Vocabulary`, `Mlm(vocabulary)`; options, if there are any, have defaults.

    The defaults below are those of a language model head and a row such as [CLS] text [SEP].
    """

    name: ClassVar[str]  # of its loss in metrics.jsonl
    frame: ClassVar[int] = 2  # the most special tokens it puts around a sample; they need positions, too
    heads: ClassVar[tuple[str, ...]] = ("lm",)  # that a model needs besides its body: "lm", "nsp"
    pairs: ClassVar[bool] = False  # a source and a target, for an encoder–decoder

    def batch(self, samples: Samples, draw: Draw) -> Batch:
        """The samples `draw.numbers`, corrupted, with their order and their labels; all chance comes from `draw`."""
        ...


def read(samples: Samples, draw: Draw) -> Ragged:
    """The samples of a batch, one after another."""
    text = Ragged.of([samples[int(number)] for number in draw.numbers])
    if not text.lengths.all():
        raise UsageError(f"sample {draw.numbers[int(text.lengths.argmin())]} has no tokens", "leave such samples out")
    return text


def next_in_row(text: Ragged) -> np.ndarray:
    """(N,) the value after each, none after the last of a row."""
    following = np.append(text.values[1:], NO_LABEL)
    return np.where(text.position == text.lengths[text.row] - 1, NO_LABEL, following)
