"""Answering: the piece of a context that answers a question, or none (SQuAD in BERT, arXiv 1810.04805)."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch

from allmask.data import Asked, Bad, Batch, Record, pack, usable
from allmask.errors import UsageError
from allmask.heads import SPAN
from allmask.model import Model
from allmask.tasks.answerer import Asking, Replies, reply_all
from allmask.tasks.auxiliary import Auxiliary
from allmask.tasks.classifier import frozen
from allmask.tasks.classify import rate_for, with_head
from allmask.tasks.exact import AnswerCount, best_threshold, marks, units
from allmask.tasks.questions import learnable, read_questions
from allmask.tasks.scores import is_chinese
from allmask.tasks.spans import Context, View, read_contexts, read_views
from allmask.tasks.tokens import asking_tokens, expect_both_ways
from allmask.tasks.writing import tokenizer_of
from allmask.training import Score

log = logging.getLogger("allmask")
BATCH = 16  # windows a step, about
RATE = 2.0  # times a classifier's learning rate
MAX_ANSWER = 30


@dataclass(frozen=True)
class Answer:
    """The task as it is saved with a model: how questions and contexts become ids, and which spans may be answers."""

    max_length: int = 384  # tokens of a row, the special ones among them
    max_question: int = 64
    stride: int = 128  # tokens that neighbouring windows share, as transformers counts it
    max_answer: int | None = None  # tokens; None: as the data has them, 30 at least
    threshold: float | None = None  # how much better no answer must score; None: there always is one
    prunes: ClassVar[bool] = False
    suited: ClassVar[frozenset[str]] = frozenset({"lr", "batch_tokens"})  # chosen by model and data unless given

    def __post_init__(self):
        least = {"max_length": 8, "max_question": 1, "stride": 0, "max_answer": 1}
        for name, limit in least.items():
            value = getattr(self, name)
            if value is not None and value < limit:
                raise UsageError(f"{name} is {value}; expected {limit} at least")

    def to_dict(self) -> dict[str, Any]:
        return {"task": "answer", **asdict(self)}

    def fitted(self, model: Model) -> Answer:
        """The same with rows no longer than the model's positions, half of them for the question at most."""
        tokenizer_of(model)
        expect_both_ways(model, "answer")
        size = min(self.max_length, model.config.max_positions)
        return replace(self, max_length=size, max_question=min(self.max_question, size // 2))

    # ---- reading -------------------------------------------------------------------------------------------

    def read_both(
        self, data: Path, held_out: Path | None, on_bad_record: str, skipped: Counter[str]
    ) -> tuple[Answer, list[Record], list[Record]]:
        """The task as the data has it, and the questions; those to learn from must have an answer at its place."""
        asked = read_questions(data, True, on_bad_record, skipped)
        train = list(usable(data, asked, learnable, on_bad_record, skipped))
        others = list(read_questions(held_out, True, on_bad_record, skipped)) if held_out else []
        none = sum(not record.fields["answers"] for record in train)
        log.info("questions: %s, %s of them without an answer", f"{len(train):,}", f"{none:,}")
        tell_misplaced(others)
        lengths = [len(units(record.fields["answers"][0][0])) for record in train if record.fields["answers"]]
        longest = max(MAX_ANSWER, int(np.percentile(lengths or [0], 99)))
        threshold = 0.0 if none and self.threshold is None else self.threshold
        return replace(self, max_answer=self.max_answer or longest, threshold=threshold), train, others

    def read(self, model: Model, asked: Sequence[Asking]) -> tuple[list[Context], list[list[View]]]:
        tokenizer = tokenizer_of(model)
        contexts = read_contexts(tokenizer, [context for _, context in asked])
        views = read_views(
            tokenizer, model.config, [question for question, _ in asked], contexts, self.max_length, self.max_question,
            self.stride,
        )  # fmt: skip
        return contexts, views

    # ---- learning ------------------------------------------------------------------------------------------

    def settings(self, model: Model, records: Sequence[Record]) -> dict[str, Any]:
        """What suits this model and these texts: a learning rate, and tokens for about 16 windows a step."""
        chosen = records[:: max(1, len(records) // 300)]
        _, views = self.read(model, [asked_of(record) for record in chosen])
        lengths = [len(view.example) for some in views for view in some]
        return {"lr": RATE * rate_for(model), "batch_tokens": int(np.ceil(BATCH * np.mean(lengths)))}

    def prepare(
        self, model: Model, records: Sequence[Record], seed: int = 0, prune: bool = False, language: bool = False
    ) -> Model:
        """A model that can answer: with a head for starts and ends, and no heads that are not used."""
        texts = dict.fromkeys(part for record in records for part in asked_of(record))
        return with_head(model, SPAN, list(texts), seed, prune, language)

    def work(
        self, model: Model, records: Sequence[Record], held_out: Sequence[Record] = (),
        auxiliary: Auxiliary | None = None, precision: str = "auto",
    ) -> AnswerWork:  # fmt: skip
        contexts, views = self.read(model, [asked_of(record) for record in records])
        gold = []
        for record, context, some in zip(records, contexts, views, strict=True):
            right = learnable(record.fields)
            span = None if right is None else context.span_of(right[1], right[1] + len(right[0]))
            gold += [view.place(span) for view in some]
        rows = [view for some in views for view in some]
        log.info("%s questions in %s windows", f"{len(records):,}", f"{len(rows):,}")
        judge = Judge(self, list(held_out), *self.read(model, [asked_of(one) for one in held_out]), precision)
        return AnswerWork(rows, np.array(gold), judge if held_out else None, auxiliary)

    def tuned(self, model: Model, held_out: Sequence[Record], precision: str = "auto") -> Answer:
        """The same with the threshold that suits a finished model best, where some of the held-out have no answer."""
        if self.threshold is None or all(record.fields["answers"] for record in held_out):
            return self
        judge = Judge(self, list(held_out), *self.read(model, [asked_of(one) for one in held_out]), precision)
        threshold = judge.threshold(judge.replies(model))
        log.info("no answer is told where it scores %.3g better than the best one", threshold)
        return replace(self, threshold=threshold)


def asked_of(record: Record) -> Asking:
    return record.fields["question"], record.fields["context"]


def tell_misplaced(records: Sequence[Record]) -> None:
    """Scoring goes by texts alone, so an answer that is not at its place does no harm there; it is told."""
    wrong = 0
    for record in records:
        try:
            learnable(record.fields)
        except Bad:
            wrong += 1
    if wrong:
        log.warning("%s questions have no answer at its offset; they are scored by its text", f"{wrong:,}")


@dataclass
class AnswerWork:
    """What the training loop asks for: windows by number, and a judge."""

    views: list[View]
    gold: np.ndarray  # (windows, 2) where in its row the answer starts and ends
    judge: Judge | None = None
    auxiliary: Auxiliary | None = None

    def __post_init__(self):
        self.lengths = [len(view.example) for view in self.views]

    def batch(self, numbers: Sequence[int], epoch: int) -> Batch:
        examples = [self.views[number].example for number in numbers]
        batch = pack(examples)
        text, place = batch.mask.group[0], batch.mask.place[0]
        starts = torch.empty(len(numbers), dtype=torch.long)
        starts[text[place == 0]] = torch.arange(len(text))[place == 0]  # where in the row each text begins
        gold = torch.from_numpy(self.gold[list(numbers)]) + starts[:, None]
        asked = Asked(torch.ones_like(batch.ids, dtype=torch.bool), gold, name="answer", questions=text)
        return asking_tokens(batch, asked, examples, numbers, epoch, self.auxiliary)

    def evaluate(self, model: Model, step: int = 0) -> Score | None:
        return None if self.judge is None else self.judge(model)


@dataclass
class Judge:
    """Exact match and F1 on the held-out questions, and a few of the errors to look at."""

    task: Answer
    records: list[Record]
    contexts: list[Context]
    views: list[list[View]]
    precision: str = "auto"
    shown: int = 2

    def __call__(self, model: Model) -> Score:
        found = self.replies(model)
        golds = [texts_of(record) for record in self.records]
        threshold = self.threshold(found)
        said = [choose(one, threshold if self.task.threshold is not None else None) for one in found]
        count = AnswerCount(self.chinese)
        each = [count.add(text, gold)[1] for text, gold in zip(said, golds, strict=True)]
        worst = sorted(range(len(each)), key=lambda number: each[number])[: self.shown]
        samples = [line for number in worst if each[number] < 1.0 for line in self._sample(number, said[number])]
        told = count.scores()
        return Score(told["f1"], told, samples)

    @property
    def chinese(self) -> bool:
        return is_chinese([text for record in self.records for text in texts_of(record)])

    def replies(self, model: Model) -> list[Replies]:
        return list(reply_all(frozen(model, self.precision), self.task, self.contexts, self.views))

    def threshold(self, found: Sequence[Replies]) -> float:
        """The best one here; as it is, where all have an answer."""
        golds = [texts_of(record) for record in self.records]
        if all(golds) or self.task.threshold is None:
            return self.task.threshold or 0.0
        chinese = self.chinese
        right = [marks(choose(one, None), gold, chinese)[1] for one, gold in zip(found, golds, strict=True)]
        return best_threshold([one.null for one in found], right, [bool(gold) for gold in golds])

    def _sample(self, number: int, said: str) -> list[str]:
        fields = self.records[number].fields
        rows = {"question": fields["question"], "is": " / ".join(texts_of(self.records[number])) or "nothing"}
        rows["answered"] = said or "nothing"
        return [*(f"  {name:9}  {_short(value)}" for name, value in rows.items()), ""]


def texts_of(record: Record) -> list[str]:
    return list(dict.fromkeys(text for text, _ in record.fields["answers"]))


def choose(found: Replies, threshold: float | None) -> str:
    """The best answer, or nothing if that is more than `threshold` better."""
    if threshold is not None and found.null > threshold:
        return ""
    return next((reply.text for reply in found.best if reply.text), "")


def _short(text: str, limit: int = 100) -> str:
    text = " ".join(text.split())
    return text if len(text) <= limit else text[: limit - 1] + "…"
