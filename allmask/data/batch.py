"""Examples and batches: the input ids, the order in which tokens become known, and the labels.

A batch is one flat row without padding. Its documents cannot attend to each other, because they are different groups of
the mask. So the cost of a batch is the cost of its tokens, whatever the lengths of the documents.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from allmask.errors import UsageError
from allmask.mask import Mask

NO_LABEL = -1  # the `ignore_index` of a loss


@dataclass(frozen=True, eq=False)
class Example:
    """One document. Accepts any sequences of numbers and stores them as int32 arrays.

                [CLS]   你    吃  [SEP]   白    鸡  [SEP]
    order         0     0     0     0     1     2     3
    segments      0     0     0     0     1     1     1
    labels       -1    -1    -1    白    鸡  [SEP]   -1
    """

    ids: np.ndarray
    order: np.ndarray  # when each token becomes known, see Mask
    segments: np.ndarray
    labels: np.ndarray  # the token to predict at each position; -1 for none
    position: np.ndarray | None = None  # default: 0, 1, 2, …

    @classmethod
    def pair(cls, source: Sequence[int], target: Sequence[int], labels: Sequence[int]) -> Example:
        """Make an example for an encoder–decoder: the inputs of encoder and decoder, and the decoder's labels.

                     你    吃  </s>   <s>   白    鸡
        order         0     0     0     1     2     3
        position      0     1     2     0     1     2
        labels       -1    -1    -1    白    鸡  </s>
        """
        read, written = np.arange(len(source)), np.arange(len(target))
        order = np.append(np.zeros_like(read), written + 1)
        none = np.full(len(source), NO_LABEL)
        ids = np.concatenate([source, target])
        return cls(ids, order, order > 0, np.append(none, labels), np.append(read, written))

    def __post_init__(self):
        if self.position is None:
            object.__setattr__(self, "position", np.arange(np.asarray(self.ids).size))
        for field in fields(self):
            object.__setattr__(self, field.name, np.asarray(getattr(self, field.name), dtype=np.int32))
        shapes = {field.name: getattr(self, field.name).shape for field in fields(self)}
        if self.ids.ndim != 1 or len(set(shapes.values())) > 1:
            raise UsageError(f"example: all fields must be rows of one length, not {shapes}")
        if len(self) == 0:
            raise UsageError("example: it has no tokens")

    def __len__(self) -> int:
        return len(self.ids)


@dataclass(frozen=True, eq=False)
class Asked:
    """The targets of the task head in a batch: the tokens it is applied to, and the gold labels.

    By default each selected token stands for one text, in the order of the row. Multiple choice: each text is a choice,
    and `gold` is the index of the right choice of each question. Tagging: each token counts as a text, and the tokens
    of one sentence have the same question. Extractive answers: `gold` is the first and last token of each answer.
    """

    where: Tensor  # (1, N) booleans: the selected tokens
    gold: Tensor  # (texts,) label indices, or (texts, labels) floats
    weights: Tensor | None = None  # (texts,) weights of the texts, 1 on average over the data set; default: equal
    name: str = "task"  # of its loss
    texts: Tensor | None = None  # (M,) the text of each selected token, where long texts are read in windows
    pool: str = "mean"  # how the scores of the windows of a text are combined; or "max"
    questions: Tensor | None = None  # (texts,) the question that each text belongs to

    @property
    def count(self) -> int:
        """The divisor of a mean loss."""
        return self.gold.numel()

    def to(self, device: torch.device | str) -> Asked:
        return _moved(self, device)


@dataclass(frozen=True, eq=False)
class Batch:
    """Examples in one row. `mask.group` is the index of the example that each token belongs to.

    For an encoder–decoder the row is the same: in each example the tokens of order 0 are the source, the others the
    target. With `query`, labels are predicted by XLNet's second stream: it embeds this id at each position and attends
    to strictly older tokens, so never to the token it predicts. `also` is a second batch for the same training step.
    """

    ids: Tensor  # (1, N)
    mask: Mask  # (1, N)
    segments: Tensor  # (1, N)
    labels: Tensor  # (1, N), -1 where nothing is predicted
    name: str = "lm"  # of its loss
    query: int | None = None
    relations: Tensor | None = None  # (examples,) 0: segment 1 follows segment 0; 1: it is from another document
    weight: float = 1.0  # of the language model loss relative to the others
    asked: Asked | None = None
    also: Batch | None = None
    hidden: Tensor | None = None  # (M, W) cached hidden states of the selected tokens, if the body is frozen

    @property
    def tokens(self) -> int:
        return self.ids.numel() + (0 if self.also is None else self.also.tokens)

    @property
    def targets(self) -> int:
        """The number of positions with a label: the divisor of a mean loss."""
        return int((self.labels != NO_LABEL).sum())

    @property
    def counts(self) -> dict[str, int]:
        """The divisor of each of its losses, by name."""
        tokens = {self.name: self.targets} if self.asked is None or self.targets else {}
        related = {} if self.relations is None else {"nsp": len(self.relations)}
        asked = {} if self.asked is None else {self.asked.name: self.asked.count}
        return {**asked, **tokens, **related, **({} if self.also is None else self.also.counts)}

    def to(self, device: torch.device | str) -> Batch:
        return _moved(self, device)


def pack(examples: Sequence[Example]) -> Batch:
    """Pack examples into one row, shortest first, so that those of equal length are one call of a kernel.

    Within an example, tokens are sorted by order and keep their positions, as in `Mask.flatten` of a padded batch.
    """
    if not examples:
        raise UsageError("pack: there are no examples to make a batch of")
    lengths = np.array([len(example) for example in examples])
    names = ("ids", "order", "segments", "labels", "position")
    ids, order, segments, labels, position = (
        np.concatenate([getattr(example, name) for example in examples]) for name in names
    )
    return pack_flat(lengths, ids, order, segments, labels, position=position)


def packs(examples: Sequence[Example], tokens: int = 4096) -> list[Batch]:
    """Pack examples of similar length into batches of at most `tokens` tokens each, counted as if padded."""
    rows = rows_by_length([len(example) for example in examples], tokens, padded=True)
    return [pack([examples[number] for number in row]) for row in rows]


def rows_by_length(lengths: Sequence[int], batch_tokens: int, padded: bool = False) -> Iterator[list[int]]:
    """Yield rows of text numbers, of at most `batch_tokens` tokens each, shortest first; a longer text is alone.

    Texts without tokens are left out. With `padded`, each text counts as many tokens as the longest of its row.
    """
    row: list[int] = []
    total = 0
    for number in sorted((n for n, length in enumerate(lengths) if length), key=lengths.__getitem__):
        size = lengths[number]
        if row and ((len(row) + 1) * size if padded else total + size) > batch_tokens:
            yield row
            row, total = [], 0
        row.append(number)
        total += size
    if row:
        yield row


def pack_flat(
    lengths: np.ndarray, ids: np.ndarray, order: np.ndarray, segments: np.ndarray, labels: np.ndarray,
    name: str = "lm", query: int | None = None, relations: np.ndarray | None = None, position: np.ndarray | None = None,
) -> Batch:  # fmt: skip
    """Pack examples that are already concatenated into flat arrays, see `pack`."""
    row = np.arange(len(lengths)).repeat(lengths)
    rank = np.empty_like(lengths)
    rank[lengths.argsort(kind="stable")] = np.arange(len(lengths))
    position = np.arange(len(row)) - (np.cumsum(lengths) - lengths)[row] if position is None else position
    order = order.astype(np.int64)
    lowest = order.min()
    # Stable sort by the rank of the example, then by order
    sort = (rank[row] * (order.max() - lowest + 1) + (order - lowest)).argsort(kind="stable")

    def tokens(values: np.ndarray) -> Tensor:
        return torch.from_numpy(values[sort].astype(np.int64))[None]

    mask = Mask(tokens(order), tokens(row), tokens(position))
    related = None if relations is None else torch.from_numpy(relations.astype(np.int64))
    return Batch(tokens(ids), mask, tokens(segments), tokens(labels), name, query, related)


AnyBatch = TypeVar("AnyBatch", Batch, Asked)


def _moved(batch: AnyBatch, device: torch.device | str) -> AnyBatch:
    values = {field.name: getattr(batch, field.name) for field in fields(batch)}
    movable = {name: value for name, value in values.items() if isinstance(value, Tensor | Mask | Asked | Batch)}
    return replace(batch, **{name: value.to(device) for name, value in movable.items()})
