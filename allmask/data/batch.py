"""Examples and batches: what a model reads, when each token becomes known, and what it must predict from it.

A batch is one flat row without padding. Its documents do not see each other, because they are different groups of the
mask; so a batch costs what its tokens cost, whatever their lengths.
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
    """One document, token by token. Any sequences of numbers will do; they are kept as int32 arrays.

                [CLS]   你    吃  [SEP]   白    鸡  [SEP]
    order         0     0     0     0     1     2     3
    segments      0     0     0     0     1     1     1
    labels       -1    -1    -1    白    鸡  [SEP]   -1
    """

    ids: np.ndarray
    order: np.ndarray  # when a token becomes known, see Mask
    segments: np.ndarray
    labels: np.ndarray  # the token that a position must predict; -1 is none
    position: np.ndarray | None = None  # where a token stands; counted if not given

    @classmethod
    def pair(cls, source: Sequence[int], target: Sequence[int], labels: Sequence[int]) -> Example:
        """What an encoder reads, what its decoder reads, and what that must predict, see `Mask.encoder_decoder`.

                     你    吃  </s>   <s>   白    鸡
        order         0     0     0     1     2     3
        position         0     1     2     0     1     2
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
            raise UsageError(
                f"example: ids, order, segments, labels, position must be rows of one length, not {shapes}"
            )
        if len(self) == 0:
            raise UsageError("example: it has no tokens")

    def __len__(self) -> int:
        return len(self.ids)


@dataclass(frozen=True, eq=False)
class Asked:
    """What the task head is asked in a batch: at which tokens, and what it should say there.

    Without `texts` each asked token stands for a text, in the order of the row. Where texts are choices, `gold` is the
    number of the right text of each question. Where tokens are asked, each is a text to itself: tagged ones are of the
    same question if they are of the same text, and of a span `gold` is the first and the last token of each question.
    """

    where: Tensor  # (1, N) booleans
    gold: Tensor  # (texts,) numbers of labels, or (texts, labels) of any numbers
    weights: Tensor | None = None  # (texts,) how much each counts, 1 on average over all there are; none: all alike
    name: str = "task"  # what its loss is called
    texts: Tensor | None = None  # (M,) of which text each asked token is, where a text is read in parts
    pool: str = "mean"  # how what is said of the parts becomes what is said of a text; or "max"
    questions: Tensor | None = None  # (texts,) to which question each text is a choice

    @property
    def count(self) -> int:
        """What a mean loss is divided by."""
        return self.gold.numel()

    def to(self, device: torch.device | str) -> Asked:
        return _moved(self, device)


@dataclass(frozen=True, eq=False)
class Batch:
    """Examples in one row. `mask.group` is the number of the example that a token came from.

    For an encoder–decoder the row is the same: it reads what is known first in an example, its source, and writes the
    rest. With `query`, labels are predicted by a second stream that embeds this id at each position and reads strictly
    older tokens only, so never the one it guesses (XLNet). `also` is a row of its own, learnt in the same step.
    """

    ids: Tensor  # (1, N)
    mask: Mask  # (1, N)
    segments: Tensor  # (1, N)
    labels: Tensor  # (1, N), -1 where nothing is predicted
    name: str = "lm"  # what its loss is called
    query: int | None = None
    relations: Tensor | None = None  # (examples,) 0: segment 1 follows segment 0; 1: it comes from elsewhere
    weight: float = 1.0  # of the tokens' loss among the others
    asked: Asked | None = None
    also: Batch | None = None
    hidden: Tensor | None = None  # (M, W) of the asked tokens, where the body does not learn and was asked before

    @property
    def tokens(self) -> int:
        return self.ids.numel() + (0 if self.also is None else self.also.tokens)

    @property
    def targets(self) -> int:
        """How many positions have a label: what a mean loss is divided by."""
        return int((self.labels != NO_LABEL).sum())

    @property
    def counts(self) -> dict[str, int]:
        """The same for each of its losses by name."""
        tokens = {self.name: self.targets} if self.asked is None or self.targets else {}
        related = {} if self.relations is None else {"nsp": len(self.relations)}
        asked = {} if self.asked is None else {self.asked.name: self.asked.count}
        return {**asked, **tokens, **related, **({} if self.also is None else self.also.counts)}

    def to(self, device: torch.device | str) -> Batch:
        return _moved(self, device)


def pack(examples: Sequence[Example]) -> Batch:
    """One row of all examples, shortest first, so that those of equal length are one call of a kernel.

    Within an example tokens stand by their order, and carry their place: it is the row that `Mask.flatten` makes of a
    padded batch.
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
    """Rows of all examples, those of similar length together: at most so many tokens each, counted as if padded."""
    rows = rows_by_length([len(example) for example in examples], tokens, padded=True)
    return [pack([examples[number] for number in row]) for row in rows]


def rows_by_length(lengths: Sequence[int], batch_tokens: int, padded: bool = False) -> Iterator[list[int]]:
    """Numbers of texts of similar length that share a row of at most `batch_tokens` tokens; a longer text is alone.

    Shortest first, so that those of equal length are neighbours; texts without tokens are left out. With `padded` each
    text counts as many tokens as the longest of its row.
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
    """The same of examples that already stand in flat arrays, one after another."""
    row = np.arange(len(lengths)).repeat(lengths)
    rank = np.empty_like(lengths)
    rank[lengths.argsort(kind="stable")] = np.arange(len(lengths))
    position = np.arange(len(row)) - (np.cumsum(lengths) - lengths)[row] if position is None else position
    order = order.astype(np.int64)
    lowest = order.min()
    # stable: by the rank of the example, then by order
    sort = (rank[row] * (order.max() - lowest + 1) + (order - lowest)).argsort(kind="stable")

    def tokens(values: np.ndarray) -> Tensor:
        return torch.from_numpy(values[sort].astype(np.int64))[None]

    mask = Mask(tokens(order), tokens(row), tokens(position))
    labelled = None if relations is None else torch.from_numpy(relations.astype(np.int64))
    return Batch(tokens(ids), mask, tokens(segments), tokens(labels), name, query, labelled)


AnyBatch = TypeVar("AnyBatch", Batch, Asked)


def _moved(batch: AnyBatch, device: torch.device | str) -> AnyBatch:
    values = {field.name: getattr(batch, field.name) for field in fields(batch)}
    movable = {name: value for name, value in values.items() if isinstance(value, Tensor | Mask | Asked | Batch)}
    return replace(batch, **{name: value.to(device) for name, value in movable.items()})
