"""Small trainings that several claims share, and texts that every Python has or that are made up.

A workload has `lengths` and `batch(numbers, epoch)`: that of a task, or `Rows`, an objective on rows of tokens.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from math import log
from pydoc_data.topics import topics
from typing import Any

import numpy as np
import torch

from allmask.config import Config
from allmask.data import Batch, plan_epoch
from allmask.losses import losses_of
from allmask.model import Model
from allmask.objectives import Draw, Vocabulary
from allmask.options import Settings
from allmask.registry import OBJECTIVES
from allmask.text import Tokenizer, train_tokenizer
from allmask.training.loop import set_dropout
from allmask.training.optimizer import clip, optimizer_for
from allmask.training.schedule import linear

LENGTH, SHORTEST, HELD_OUT = 62, 8, 10  # tokens of a row, at most and at least; each tenth document is held out
STEPS = 120  # of a small language model


# ---- texts ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Text:
    """Rows of tokens, with the sentences and documents that next sentence prediction needs."""

    tokenizer: Tokenizer
    rows: list[np.ndarray]
    starts: list[np.ndarray]  # of the sentences of each row
    documents: list[int]  # of each row

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, number: int) -> np.ndarray:
        return self.rows[number]

    def sentences(self, number: int) -> np.ndarray:
        return self.starts[number]

    def document(self, number: int) -> int:
        return self.documents[number]

    def part(self, held_out: bool) -> Text:
        """The rows of each tenth document, or the others."""
        kept = [row for row, document in enumerate(self.documents) if (document % HELD_OUT == 0) == held_out]
        rows, starts, documents = ([values[row] for row in kept] for values in (self.rows, self.starts, self.documents))
        return Text(self.tokenizer, rows, starts, documents)

    def entropy(self) -> float:
        """In nats, of the held-out tokens by the frequencies of the others: the loss of a model that knows no more."""
        train, test = (np.concatenate(self.part(held_out).rows) for held_out in (False, True))
        counts = Counter(train.tolist())
        total = len(train) + self.tokenizer.size
        return -sum(log((counts[id] + 1) / total) for id in test.tolist()) / len(test)


def paragraphs() -> list[list[str]]:
    """The reference of the Python language, as its interpreter carries it: 79 documents of paragraphs."""
    return [[" ".join(part.split()) for part in re.split(r"\n\s*\n", text) if part.strip()] for text in topics.values()]


@cache
def python_reference(size: int = 1000) -> Text:
    documents = paragraphs()
    tokenizer = train_tokenizer([one for document in documents for one in document], size=size)
    return rows_of(tokenizer, documents)


def rows_of(tokenizer: Tokenizer, documents: Sequence[Sequence[str]], length: int = LENGTH) -> Text:
    """A row has as many whole paragraphs (or sentences) of a document as fit; a longer one is cut."""
    rows: list[np.ndarray] = []
    starts: list[np.ndarray] = []
    numbers: list[int] = []

    def add(parts: list[np.ndarray], number: int) -> None:
        if sum(map(len, parts)) >= SHORTEST:
            rows.append(np.concatenate(parts)[:length])
            begins = np.cumsum([0, *(len(part) for part in parts[:-1])])
            starts.append(begins[begins < len(rows[-1])])
            numbers.append(number)

    for number, document in enumerate(documents):
        row: list[np.ndarray] = []
        for encoded in tokenizer.encode_batch(list(document), special=False):
            ids = np.array(encoded.ids, dtype=np.int64)
            for piece in [ids[start : start + length] for start in range(0, len(ids), length)]:
                if sum(map(len, row)) + len(piece) > length:
                    add(row, number)
                    row = []
                row.append(piece)
        if row:
            add(row, number)
    return Text(tokenizer, rows, starts, numbers)


# ---- trainings -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Rows:
    """An objective on the rows of a text."""

    text: Text
    objective: str
    seed: int = 0

    @cached_property
    def lengths(self) -> list[int]:
        return [len(row) for row in self.text.rows]

    @cached_property
    def _objective(self) -> Any:
        return OBJECTIVES[self.objective](Vocabulary.of(self.text.tokenizer))

    def batch(self, numbers: Sequence[int], epoch: int) -> Batch:
        return self._objective.batch(self.text, Draw(self.seed, epoch, numbers))


def small_model(tokenizer: Tokenizer, seed: int, heads: Sequence[str] = ("lm",), **changes: Any) -> Model:
    sizes = {"width": 64, "layers": 2, "heads": 4, "ffn_width": 256, "max_positions": 64, "dropout": 0.0}
    config = Config(**{"vocab_size": tokenizer.size, "attention_dropout": 0.0, **sizes, **changes})
    model = Model.fresh(config, heads, torch.Generator().manual_seed(seed))
    model.tokenizer = tokenizer
    return model


def train_on(
    model: Model, work: Any, steps: int, seed: int, each: Callable[[int], None] = lambda step: None,
    optimizer: Callable[[Model, Settings], torch.optim.Optimizer] = optimizer_for, **settings: Any,
) -> None:  # fmt: skip
    """Train for some steps in fp32 without dropout, with the optimizer of the library; call `each` after each step."""
    usual = {"lr": 3e-3, "batch_tokens": 512, "betas": (0.9, 0.98), "dropout": 0.0, **settings}
    chosen = Settings(seed=seed, steps=steps, **usual)
    if chosen.dropout is not None:
        set_dropout(model, chosen.dropout)
    torch.manual_seed(seed)
    stepper, done, epoch = optimizer(model, chosen), 0, 0
    while done < steps:
        for numbers in plan_epoch(work.lengths, chosen.batch_tokens, seed, epoch)[: steps - done]:
            model.train()
            for group in stepper.param_groups:
                group["lr"] = chosen.lr * linear(done, steps, chosen.warmup_steps(steps))
            found = losses_of(model, work.batch(numbers, epoch), chosen.label_smoothing)
            torch.stack([loss / max(1, count) for loss, count in found.values()]).sum().backward()
            clip(model, chosen.clip)
            stepper.step()
            stepper.zero_grad()
            done += 1
            each(done)
        epoch += 1


@torch.no_grad()
def loss_on(model: Model, work: Any, name: str | None = None, tokens: int = 8192) -> float:
    """The mean loss of a target; `name` chooses one of several losses."""
    model.eval()
    total, count = 0.0, 0
    for numbers in plan_epoch(work.lengths, tokens, 0, 0):
        for found, (loss, targets) in losses_of(model, work.batch(numbers, 0)).items():
            if name in (None, found):
                total, count = total + float(loss), count + targets
    return total / max(1, count)


@torch.no_grad()
def accuracy_on(model: Model, work: Any, tokens: int = 8192) -> float:
    """The share of targets that are the likeliest token, in percent."""
    model.eval()
    right, count = 0, 0
    for numbers in plan_epoch(work.lengths, tokens, 0, 0):
        batch = work.batch(numbers, 0)
        wanted = batch.labels >= 0
        logits = model.logits(model.body.forward_at(wanted, batch.ids, batch.mask, batch.segments))
        right += int((logits.argmax(-1) == batch.labels[wanted]).sum())
        count += int(wanted.sum())
    return 100 * right / max(1, count)


@dataclass(frozen=True)
class Learnt:
    """What a small language model has learnt of the Python reference."""

    gained: tuple[float, ...]  # of the unigram entropy, in percent, after each sixth of the steps
    loss: float
    accuracy: float


@cache
def language_model(
    seed: int, steps: int, objective: str = "causal", norm: str = "layer", smoothing: float = 0.0
) -> Learnt:
    """Train one. Several claims compare with the usual one, which is trained once for all of them."""
    text = python_reference()
    train, test = (Rows(text.part(held_out), objective) for held_out in (False, True))
    model, gained = small_model(text.tokenizer, seed, norm=norm), []
    looks = {steps * look // 6 for look in range(1, 7)}

    def look(step: int) -> None:
        if step in looks:
            gained.append(100 * (1 - loss_on(model, test) / text.entropy()))

    train_on(model, train, steps, seed, look, label_smoothing=smoothing)
    return Learnt(tuple(gained), loss_on(model, test), accuracy_on(model, test))
