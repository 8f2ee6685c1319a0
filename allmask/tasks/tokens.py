"""Task heads that are asked at tokens: what they say of rows packed by length, and batches to learn it from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from allmask.data import Asked, Batch, Example, pack
from allmask.errors import UsageError
from allmask.model import Model
from allmask.tasks.auxiliary import Auxiliary
from allmask.tasks.classifier import BATCH_TOKENS, rows_by_length


def expect_both_ways(model: Model, task: str) -> None:
    if model.config.family not in ("bert", "elmo", "xlnet") or model.config.own_mask != "bidirectional":
        raise UsageError(
            f"{task}: this model reads from left to right, so a word does not see what comes after it",
            "take a model that reads both ways, such as a BERT",
        )


@torch.no_grad()
def token_answers(
    model: Model, examples: Sequence[Example], places: Sequence[np.ndarray], batch_tokens: int = BATCH_TOKENS
) -> list[Tensor]:
    """Scores (M, labels) of the tokens at the places of each example, whatever stands beside it."""
    assert model.task_head is not None
    dtype = model.task_head.output.weight.dtype
    answers: list[Tensor] = [torch.empty(0)] * len(examples)
    for numbers in rows_by_length([len(example) for example in examples], batch_tokens):
        batch = pack([examples[number] for number in numbers])
        where = asked_tokens(batch, [places[number] for number in numbers])
        hidden = model.body.at(where, batch.ids, batch.mask, batch.segments)
        said, text = model.answers(hidden.to(dtype)).float(), batch.mask.group[where]
        for place, number in enumerate(numbers):
            answers[number] = said[text == place]
    return answers


def asked_tokens(batch: Batch, places: Sequence[np.ndarray]) -> Tensor:
    """(1, N), True at the places of each example, by its number in the batch."""
    mask = batch.mask
    lengths = mask.group[0].bincount(minlength=len(places))
    starts = lengths.cumsum(0) - lengths
    asked = torch.zeros(int(lengths.sum()), dtype=torch.bool)
    for start, some in zip(starts.tolist(), places, strict=True):
        asked[torch.from_numpy(some) + start] = True
    return asked[starts[mask.group] + mask.place]


def asking_tokens(
    batch: Batch, asked: Asked, examples: Sequence[Example], numbers: Sequence[int], epoch: int,
    auxiliary: Auxiliary | None,
) -> Batch:  # fmt: skip
    """The batch with its questions and, with a weight for it, the same texts with tokens hidden."""
    batch = replace(batch, asked=asked)
    return batch if auxiliary is None else replace(batch, also=auxiliary.batch(examples, numbers, epoch))
