"""The protocol of objectives, and what several of them use. An objective is a corruption, an order and targets."""

from __future__ import annotations

from typing import ClassVar, Protocol

import numpy as np

from allmask.data import NO_LABEL, Batch, pack_flat
from allmask.errors import UsageError
from allmask.objectives.draws import Draw
from allmask.objectives.ragged import Ragged


class Samples(Protocol):
    """The training rows by number: ids without special tokens. A list of arrays is one."""

    def __len__(self) -> int: ...

    def __getitem__(self, number: int, /) -> np.ndarray: ...


class Passages(Samples, Protocol):
    """Samples with sentences and documents."""

    def sentences(self, number: int, /) -> np.ndarray:
        """Return where the sentences of a sample begin; the first is 0."""
        ...

    def document(self, number: int, /) -> int:
        """Return the number of the document of a sample."""
        ...


class Objective(Protocol):
    """Created with a `Vocabulary`: `Mlm(vocabulary)`; further options have defaults.

    The defaults below are those of a language model head and a row such as [CLS] text [SEP].
    """

    name: ClassVar[str]  # of its loss in metrics.jsonl
    frame: ClassVar[int] = 2  # the most special tokens it adds to a sample; they need positions too
    heads: ClassVar[tuple[str, ...]] = ("lm",)  # that the model needs: "lm", "nsp"
    pairs: ClassVar[bool] = False  # whether it makes a source and a target for an encoder–decoder

    def batch(self, samples: Samples, draw: Draw) -> Batch:
        """Return the samples `draw.numbers`, corrupted, with order and labels; all randomness comes from `draw`."""
        ...


def read(samples: Samples, draw: Draw) -> Ragged:
    """Return the samples of a batch."""
    text = Ragged.of([samples[int(number)] for number in draw.numbers])
    if not text.lengths.all():
        raise UsageError(f"sample {draw.numbers[int(text.lengths.argmin())]} has no tokens", "leave such samples out")
    return text


def next_in_row(text: Ragged) -> np.ndarray:
    """(N,) the next value in the row; no label for the last one."""
    following = np.append(text.values[1:], NO_LABEL)
    return np.where(text.position == text.lengths[text.row] - 1, NO_LABEL, following)


def pair_batch(source: Ragged, target: Ragged, labels: Ragged, name: str, position: np.ndarray | None = None) -> Batch:
    """Make a batch for an encoder–decoder. Sources have order 0, targets 1, 2, 3, …

    `position` is that of the target tokens; default: 0, 1, 2, …
    """

    def join(of_source: np.ndarray, of_target: np.ndarray) -> np.ndarray:
        """Concatenate values of source and target tokens, row by row."""
        return Ragged.join(Ragged(of_source, source.lengths), Ragged(of_target, target.lengths)).values

    order = join(np.zeros_like(source.position), target.position + 1)
    positions = join(source.position, target.position if position is None else position)
    wanted = join(np.full(len(source.values), NO_LABEL), labels.values)
    ids = join(source.values, target.values)
    return pack_flat(source.lengths + target.lengths, ids, order, order > 0, wanted, name, position=positions)
