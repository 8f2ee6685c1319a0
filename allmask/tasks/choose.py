"""Choosing: which of several texts goes with a context or a question (SWAG in BERT, arXiv 1810.04805).

Each choice is read with its context as a pair; a vector against the pooled [CLS] gives it a score, and the scores of a
question's choices share a softmax.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from allmask.config import Config
from allmask.data import Asked, Batch, Record
from allmask.model import Model
from allmask.objectives import answer_loss
from allmask.tasks.auxiliary import Auxiliary
from allmask.tasks.choosing import LABELS, Tally, choices_of, numbered, read_questions, texts_of
from allmask.tasks.classifier import answers_to, frozen, hidden_all
from allmask.tasks.classify import rate_for, with_head
from allmask.tasks.reading import Reading, asking, check_lengths, read, tell_lengths
from allmask.tasks.writing import tokenizer_of
from allmask.text import Tokenizer
from allmask.training import Score

BATCH, MOST_TOKENS = 16, 8192  # questions a step, about, as long as they are not too much for the memory


@dataclass(frozen=True)
class Choose:
    """The task as it is saved with a model: how a context and a choice become ids."""

    max_length: int = 512  # tokens of a context with a choice, the special ones among them
    truncate: str = "head+tail"  # a question often stands at the end of its context
    pool_windows: str = "mean"
    prunes: ClassVar[bool] = False
    suited: ClassVar[frozenset[str]] = frozenset({"lr", "batch_tokens"})

    def __post_init__(self):
        check_lengths(self.max_length, self.truncate, self.pool_windows)

    def to_dict(self) -> dict[str, Any]:
        return {"task": "choose", **asdict(self)}

    def fitted(self, model: Model) -> Choose:
        """The same with texts no longer than the model's positions."""
        tokenizer_of(model)
        return replace(self, max_length=min(self.max_length, model.config.max_positions))

    # ---- reading -------------------------------------------------------------------------------------------

    def read_both(
        self, data: Path, held_out: Path | None, on_bad_record: str, skipped: Counter[str]
    ) -> tuple[Choose, list[Record], list[Record]]:
        train = list(read_questions(data, True, on_bad_record, skipped))
        return self, train, list(read_questions(held_out, True, on_bad_record, skipped)) if held_out else []

    def read(self, tokenizer: Tokenizer, config: Config, questions: Sequence[dict[str, Any]]) -> Reading:
        """What a model reads of all choices of all questions, one after another."""
        texts = [pair for fields in questions for pair in texts_of(fields)]
        return read(tokenizer, config, texts, self.max_length, self.truncate)

    def reading(self, model: Model, records: Sequence[Record]) -> Reading:
        made = self.read(tokenizer_of(model), model.config, [record.fields for record in records])
        tell_lengths(made, self.max_length)
        return made

    # ---- learning ------------------------------------------------------------------------------------------

    def settings(self, model: Model, records: Sequence[Record]) -> dict[str, Any]:
        """What suits this model and these texts: a learning rate, and tokens for about 16 questions a step."""
        chosen = [record.fields for record in records[:: max(1, len(records) // 300)]]
        tokens = sum(self.read(tokenizer_of(model), model.config, chosen).lengths) / len(chosen)
        return {"lr": rate_for(model), "batch_tokens": min(int(np.ceil(BATCH * tokens)), MOST_TOKENS)}

    def prepare(
        self, model: Model, records: Sequence[Record], seed: int = 0, prune: bool = False, language: bool = False
    ) -> Model:
        """A model that can choose: with a head for it, and no heads that are not used."""
        texts = [text for record in records for pair in texts_of(record.fields) for text in pair]
        return with_head(model, LABELS, list(dict.fromkeys(texts)), seed, prune, language)

    def work(
        self, model: Model, records: Sequence[Record], held_out: Sequence[Record] = (),
        auxiliary: Auxiliary | None = None, precision: str = "auto",
    ) -> ChooseWork:  # fmt: skip
        judge = Judge(list(held_out), self.reading(model, held_out), precision, self.pool_windows) if held_out else None
        reading = self.reading(model, records)
        return ChooseWork(list(records), reading, judge, auxiliary, self.pool_windows)


@dataclass
class ChooseWork:
    """What the training loop asks for: questions by number with all of their choices, and a judge."""

    records: list[Record]
    reading: Reading
    judge: Judge | None = None
    auxiliary: Auxiliary | None = None
    pool: str = "mean"  # of windows

    def __post_init__(self):
        counts = [len(record.fields["choices"]) for record in self.records]
        self.starts = np.cumsum([0, *counts])  # of the choices of each question, and the end
        self.lengths = np.add.reduceat(self.reading.lengths, self.starts[:-1]).tolist()

    def remember(self, model: Model, precision: str) -> None:
        """Of a body that does not learn: what it makes of all texts is found out once."""
        for reading in (self.reading, *([] if self.judge is None else [self.judge.reading])):
            reading.features = hidden_all(frozen(model, precision), reading.examples)

    def batch(self, numbers: Sequence[int], epoch: int) -> Batch:
        texts = np.concatenate([np.arange(self.starts[number], self.starts[number + 1]) for number in numbers])
        rows, of = self.reading.rows(texts.tolist())
        chosen = [self.records[number].fields for number in numbers]
        questions, gold = numbered(chosen), right_ones(chosen)

        def ask(where: Tensor, row: Tensor) -> Asked:
            return Asked(where, gold, None, "choose", of[row], self.pool, questions)

        return asking(self.reading, rows, ask, self.auxiliary, epoch)

    def evaluate(self, model: Model, step: int = 0) -> Score | None:
        return None if self.judge is None else self.judge(model)


def right_ones(questions: Sequence[dict[str, Any]]) -> Tensor:
    """The number of the right choice of each question among all choices, which stand one after another."""
    starts = np.cumsum([0, *(len(fields["choices"]) for fields in questions)])[:-1]
    return torch.tensor([int(start) + fields["label"] for start, fields in zip(starts, questions, strict=True)])


@dataclass
class Judge:
    """The accuracy on the held-out questions, and a few of the errors to look at."""

    records: list[Record]
    reading: Reading
    precision: str = "auto"
    pool: str = "mean"  # of windows
    shown: int = 2

    def __call__(self, model: Model) -> Score:
        questions = [record.fields for record in self.records]
        scores = self.reading.pooled(answers_to(self.reading, model, self.precision), self.pool)
        summed = answer_loss("choice", scores, right_ones(questions), questions=numbered(questions))
        tally = Tally(self.shown)
        for record, choice in zip(self.records, choices_of(questions, scores[:, 0]), strict=True):
            tally.add(record, choice)
        metrics = {"loss": summed.item() / len(questions), **tally.scores}
        return Score(metrics["accuracy"], metrics, [line for error in tally.errors() for line in _sample(error)])


def _sample(error: dict[str, Any]) -> list[str]:
    asked = " ".join(" ".join(error[name].split()) for name in ("context", "question") if name in error)
    shown = asked if len(asked) <= 100 else "…" + asked[-99:]
    right = error["choices"][error["label"]]
    return [
        f"  question   {shown}",
        f"  is         {right}, taken for {error['choice']} ({error['probability']:.0%})",
        "",
    ]
