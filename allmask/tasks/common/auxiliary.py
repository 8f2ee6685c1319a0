"""Auxiliary language model loss (GPT-1): L = L_task + λ · L_lm, so that the body forgets less of its pretraining.

L_lm is the body's pretraining objective on the texts of the task. A body that reads from left to right predicts each
next token. One that reads both ways would see the answer, so its texts are read a second time with masked tokens, in a
row of their own. The same holds for the source of a title: under the prefix mask a source token sees its successor.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from allmask.data import Batch, Example, pack_flat
from allmask.errors import UsageError
from allmask.model import Model
from allmask.objectives import Draw, Mlm, Vocabulary
from allmask.objectives.objective import next_in_row
from allmask.objectives.ragged import Ragged
from allmask.tasks.common.writing import expect_frequencies, tokenizer_of

log = logging.getLogger("allmask")
LEFT_TO_RIGHT = "causal"


@dataclass(frozen=True, eq=False)
class Auxiliary:
    weight: float  # λ
    seed: int
    mlm: Mlm | None  # None for a body that reads from left to right

    @classmethod
    def of(cls, model: Model, weight: float, seed: int) -> Auxiliary | None:
        """Return the auxiliary loss for a model; None if `weight` is 0."""
        if not weight:
            return None
        if model.config.family == "elmo":
            raise UsageError("--lm-weight cannot be combined with an ELMo", "leave it out")
        if model.config.own_mask == "causal":
            return cls(weight, seed, None)
        return cls(weight, seed, Mlm(Vocabulary.of(tokenizer_of(model))))

    def batch(self, texts: Sequence[Example], numbers: Sequence[int], epoch: int) -> Batch:
        """Return the texts as a batch of their own; seed, epoch and a text's number decide which tokens are masked."""
        row = Ragged.of([example.ids for example in texts])
        segments = np.concatenate([example.segments for example in texts])
        if self.mlm is None:
            batch = pack_flat(row.lengths, row.values, row.position, segments, next_in_row(row), LEFT_TO_RIGHT)
        else:
            ids, labels = self.mlm.corrupt(row, Draw(self.seed, epoch, numbers))
            batch = pack_flat(row.lengths, ids, np.zeros_like(ids), segments, labels, self.mlm.name)
        return replace(batch, weight=self.weight)


def with_language(model: Model, texts: Sequence[str], seed: int) -> Model:
    """Return the model with a language model head; the output bias of a new one starts at the token frequencies."""
    if model.lm_head is not None:
        return model
    log.info("the checkpoint has no language model head; one is made from the token embedding")
    model = model.with_language_model(torch.Generator().manual_seed(seed))
    if model.config.is_bert:
        encoded = tokenizer_of(model).encode_batch(list(texts), special=False)
        ids = torch.tensor([id for one in encoded for id in one.ids], dtype=torch.long)
        expect_frequencies(model, torch.bincount(ids, minlength=model.config.vocab_size))
    return model
