"""Auxiliary language model loss (GPT-1): L = L_task + λ · L_lm, so that the body forgets less of its pretraining.

L_lm is the body's pretraining objective on the texts of the task. A body that reads from left to right predicts each
next token. One that reads both ways would see the answer, so its texts are read a second time with masked tokens, in a
row of their own. The same holds for the source of a title: under the prefix mask a source token sees its successor.

With --lm-text, L_lm is computed on rows of another text instead: what the body is not to forget.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from operator import itemgetter
from pathlib import Path

import numpy as np
import torch

from allmask.data import Batch, Example, pack_flat
from allmask.data.sentences import Reading, find_files, sentences
from allmask.errors import UsageError
from allmask.model import Model
from allmask.objectives import Causal, Draw, Mlm, Objective, Vocabulary
from allmask.objectives.objective import next_in_row
from allmask.objectives.ragged import Ragged
from allmask.tasks.common.writing import expect_frequencies, tokenizer_of

log = logging.getLogger("allmask")
LEFT_TO_RIGHT = "causal"
ROW = 126  # tokens of a row of --lm-text, special tokens not counted
MOST = 16 << 20  # characters of --lm-text that are read


@dataclass(frozen=True, eq=False)
class Auxiliary:
    weight: float  # λ
    seed: int
    mlm: Mlm | None  # None for a body that reads from left to right
    general: Sequence[np.ndarray] = ()  # rows of --lm-text; without any, the texts of the task are used
    objective: Objective | None = None  # on these rows

    @classmethod
    def of(cls, model: Model, weight: float, seed: int, texts: Sequence[str] = ()) -> Auxiliary | None:
        """Return the auxiliary loss for a model; None if `weight` is 0. `texts` are those of --lm-text."""
        if not weight:
            return None
        if model.config.family == "elmo":
            raise UsageError("--lm-weight cannot be combined with an ELMo", "leave it out")
        tokenizer = tokenizer_of(model)
        mlm = None if model.config.own_mask == LEFT_TO_RIGHT else Mlm(Vocabulary.of(tokenizer))
        if not texts:
            return cls(weight, seed, mlm)
        length = min(ROW, model.config.max_positions - Objective.frame)
        rows = []
        for encoded in tokenizer.encode_batch(list(texts), special=False):
            ids = np.array(encoded.ids, dtype=np.int64)
            rows += [ids[start : start + length] for start in range(0, len(ids), length)]
        return cls(weight, seed, mlm, rows, mlm or Causal(Vocabulary.of(tokenizer)))

    @property
    def one_pass(self) -> bool:
        """Whether the pass for the task computes this loss, too."""
        return self.mlm is None and not self.general

    def batch(self, texts: Sequence[Example], numbers: Sequence[int], epoch: int) -> Batch:
        """Return the texts as a batch of their own; seed, epoch and a text's number decide which tokens are masked.

        With --lm-text the batch has rows of it, about as many tokens as the texts; the same numbers choose them.
        """
        if self.objective is not None:
            chosen = Draw(self.seed, epoch, numbers).rows("general") * len(self.general)
            ends = np.cumsum([len(self.general[int(row)]) for row in chosen])
            fitting = max(1, int(ends.searchsorted(sum(map(len, texts)), side="right")))
            found = self.objective.batch(self.general, Draw(self.seed, epoch, chosen[:fitting].astype(int)))
            return replace(found, weight=self.weight)
        row = Ragged.of([example.ids for example in texts])
        segments = np.concatenate([example.segments for example in texts])
        if self.mlm is None:
            batch = pack_flat(row.lengths, row.values, row.position, segments, next_in_row(row), LEFT_TO_RIGHT)
        else:
            ids, labels = self.mlm.corrupt(row, Draw(self.seed, epoch, numbers))
            batch = pack_flat(row.lengths, ids, np.zeros_like(ids), segments, labels, self.mlm.name)
        return replace(batch, weight=self.weight)


def general_texts(file: str | Path, encoding: str | None = None, on_bad_record: str = "stop") -> list[str]:
    """Read the documents of a text file, as `allmask pretrain` does; of a large one, the beginning."""
    found, size = [], 0
    lines = sentences(find_files([file]), Reading(on_bad_record=on_bad_record, encoding=encoding))
    for _, parts in groupby(lines, itemgetter(0)):
        found.append(" ".join(line for _, line in parts))
        size += len(found[-1])
        if size > MOST:
            log.info("%s: its first %s characters are used", file, f"{size:,}")
            break
    return found


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
