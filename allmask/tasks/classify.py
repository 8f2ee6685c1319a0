"""Classification: a label, several, or a number for a text or a pair (BERT fine-tuning, arXiv 1810.04805)."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from allmask.config import Config
from allmask.data import Asked, Batch, Record
from allmask.errors import UsageError
from allmask.heads import Labels
from allmask.model import Model
from allmask.objectives import answer_loss
from allmask.tasks.auxiliary import Auxiliary, with_language
from allmask.tasks.classifier import answer_all, answers_to, frozen, hidden_all, predictions
from allmask.tasks.confusion import draw_confusion
from allmask.tasks.labelling import Survey, balanced, golds, read_texts
from allmask.tasks.marks import Mistake, mark, mistakes
from allmask.tasks.metrics import MAIN
from allmask.tasks.reading import Reading, Text, asking, check_lengths, read, tell_lengths
from allmask.tasks.writing import tokenizer_of
from allmask.text import Tokenizer, propose_keep_tokens
from allmask.training import Score

log = logging.getLogger("allmask")
BATCH = 32  # texts a step, about
RATES = ((512, 1e-4), (1023, 3e-5))  # up to a width: the smaller the body, the larger the steps it needs
LARGE_RATE = 2e-5
KINDS = ("single", "multi", "number")  # see Labels


@dataclass(frozen=True)
class Classify:
    """The task as it is saved with a model: how texts become ids. The labels are the model's own."""

    max_length: int = 512  # tokens, the special ones among them
    truncate: str = "head"  # or windows over all of a text
    pool_windows: str = "mean"
    pair: bool | None = None  # two texts are compared; None: where there are two
    kind: str | None = None  # see Labels; None: as the labels of the data look
    class_weights: str = "none"
    prunes: ClassVar[bool] = False  # texts to come have words that the data has not
    suited: ClassVar[frozenset[str]] = frozenset({"lr", "batch_tokens"})  # chosen by model and data unless given

    def __post_init__(self):
        check_lengths(self.max_length, self.truncate, self.pool_windows)
        if self.kind is not None and self.kind not in KINDS:
            raise UsageError(f"kind is {self.kind!r}; expected one of {', '.join(KINDS)}")
        if self.class_weights not in ("none", "balanced"):
            raise UsageError(f"class_weights is {self.class_weights!r}; expected none or balanced")

    def to_dict(self) -> dict[str, Any]:
        return {"task": "classify", **asdict(self)}

    def fitted(self, model: Model) -> Classify:
        """The same with texts no longer than the model's positions."""
        tokenizer_of(model)
        return replace(self, max_length=min(self.max_length, model.config.max_positions))

    # ---- reading -------------------------------------------------------------------------------------------

    def read_both(
        self, data: Path, held_out: Path | None, on_bad_record: str, skipped: Counter[str]
    ) -> tuple[Classify, list[Record], list[Record]]:
        """The task as the data has it, and the records; what is held out must have the same labels."""
        survey = Survey.of(data, on_bad_record)
        labels = survey.labels(data, self.kind)
        pair = survey.pairs > survey.records / 2 if self.pair is None else self.pair
        if self.class_weights == "balanced" and labels.kind != "single":
            raise UsageError("class weights are for one label a text", "leave --class-weights out")
        train = list(read_texts(data, labels, pair, on_bad_record, skipped))
        others = list(read_texts(held_out, labels, pair, on_bad_record, skipped)) if held_out else []
        log.info("labels: %s", _in_words(labels, train))
        return replace(self, pair=pair, kind=labels.kind), train, others

    def read(self, tokenizer: Tokenizer, config: Config, texts: Sequence[Text]) -> Reading:
        """What a model reads of each text or pair."""
        return read(tokenizer, config, texts, self.max_length, self.truncate)

    def reading(self, model: Model, records: Sequence[Record]) -> Reading:
        made = self.read(tokenizer_of(model), model.config, [text_of(record) for record in records])
        tell_lengths(made, self.max_length)
        return made

    # ---- learning ------------------------------------------------------------------------------------------

    def settings(self, model: Model, records: Sequence[Record]) -> dict[str, Any]:
        """What suits this model and these texts: a learning rate, and tokens for about 32 texts a step."""
        chosen = records[:: max(1, len(records) // 1000)]
        texts = [text_of(record) for record in chosen]
        reading = self.read(tokenizer_of(model), model.config, texts)
        return {"lr": rate_for(model), "batch_tokens": int(np.ceil(BATCH * np.mean(reading.lengths)))}

    def prepare(
        self, model: Model, records: Sequence[Record], seed: int = 0, prune: bool = False, language: bool = False
    ) -> Model:
        """A model that can answer: with a head for the labels of the data, and no heads that are not used."""
        texts = [part for record in records for part in (record.fields["text"], record.fields["text_b"]) if part]
        return with_head(model, self.labels_of(records), texts, seed, prune, language)

    def labels_of(self, records: Sequence[Record]) -> Labels:
        """Of records as `read_both` gives them."""
        survey = Survey()
        for record in records:
            label = record.fields["label"]
            survey.add("list" if isinstance(label, list) else "name" if isinstance(label, str) else "fraction", label)
        return survey.labels(Path("data"), self.kind)

    def work(
        self, model: Model, records: Sequence[Record], held_out: Sequence[Record] = (),
        auxiliary: Auxiliary | None = None, precision: str = "auto",
    ) -> ClassifyWork:  # fmt: skip
        assert model.labels is not None
        gold = golds(model.labels, [record.fields["label"] for record in records])
        weights = balanced(gold, len(model.labels)) if self.class_weights == "balanced" else None
        judge = None
        if held_out:
            others = self.reading(model, held_out)
            judge = Judge(list(held_out), others, model.labels, precision, self.pool_windows)
        reading = self.reading(model, records)
        return ClassifyWork(reading, gold, judge, weights, auxiliary, self.pool_windows)

    def draw(self, model: Model, held_out: Sequence[Record], out: Path, precision: str = "auto") -> None:
        """confusion.png: which of the held-out texts a finished model takes for what."""
        if not held_out or model.labels is None or model.labels.kind != "single":
            return
        reading = self.read(tokenizer_of(model), model.config, [text_of(record) for record in held_out])
        answers = reading.pooled(answer_all(frozen(model, precision), reading.examples), self.pool_windows)
        gold = golds(model.labels, [record.fields["label"] for record in held_out])
        draw_confusion(mark(model.labels, answers, gold).confusion, model.labels.names, out / "confusion.png")


@dataclass
class ClassifyWork:
    """What the training loop asks for: examples by number, and a judge."""

    reading: Reading
    gold: Tensor
    judge: Judge | None = None
    weights: Tensor | None = None  # of each label
    auxiliary: Auxiliary | None = None
    pool: str = "mean"  # of windows

    def __post_init__(self):
        self.lengths = self.reading.lengths

    def remember(self, model: Model, precision: str) -> None:
        """Of a body that does not learn: what it makes of all texts is found out once."""
        for reading in (self.reading, *([] if self.judge is None else [self.judge.reading])):
            reading.features = hidden_all(frozen(model, precision), reading.examples)

    def batch(self, numbers: Sequence[int], epoch: int) -> Batch:
        texts = torch.tensor(numbers)
        rows, of = self.reading.rows(numbers)

        def ask(where: Tensor, row: Tensor) -> Asked:
            parts = len(row) > len(texts)
            gold = self.gold[texts if parts else texts[of[row]]]
            weights = None if self.weights is None else self.weights[gold]
            return Asked(where, gold, weights, "classify", of[row] if parts else None, self.pool)

        return asking(self.reading, rows, ask, self.auxiliary, epoch)

    def evaluate(self, model: Model, step: int = 0) -> Score | None:
        return None if self.judge is None else self.judge(model)


@dataclass
class Judge:
    """All metrics on the held-out records, and a few of the errors to look at."""

    records: list[Record]
    reading: Reading
    labels: Labels
    precision: str = "auto"
    pool: str = "mean"  # of windows
    shown: int = 2

    def __call__(self, model: Model) -> Score:
        given = [record.fields["label"] for record in self.records]
        gold = golds(self.labels, given)
        answers = self.reading.pooled(answers_to(self.reading, model, self.precision), self.pool)
        loss = answer_loss(self.labels.kind, answers, gold).item() / gold.numel()
        scores = mark(self.labels, answers, gold).scores
        entries = zip(self.records, given, predictions(self.labels, answers), strict=True)
        worst = mistakes(entries, self.shown)
        return Score(scores[MAIN[self.labels.kind]], {"loss": loss, **scores}, [*_samples(worst)])


def with_head(model: Model, labels: Labels, texts: Sequence[str], seed: int, prune: bool, language: bool) -> Model:
    """A model with a head for these labels and, perhaps, for the language of the texts, which may be all it knows."""
    model = with_language(model, texts, seed) if language else model.without("lm")
    model = model.keep_tokens(propose_keep_tokens(tokenizer_of(model), texts)) if prune else model
    if model.labels == labels:
        log.info("the checkpoint has a head for these labels; it is trained further")
        return model.without("nsp")
    if model.config.family == "bert" and model.pooler is None and not labels.of_tokens:
        log.info("the checkpoint has no pooler; a new one is made")
    idle = ("nsp", "task", "pooler") if labels.of_tokens else ("nsp",)
    return model.without(*idle).with_labels(labels, torch.Generator().manual_seed(seed))


def rate_for(model: Model) -> float:
    return next((rate for width, rate in RATES if model.config.width <= width), LARGE_RATE)


def text_of(record: Record) -> Text:
    first, second = record.fields["text"], record.fields["text_b"]
    return first if second is None else (first, second)


# ---- words ---------------------------------------------------------------------------------------------------


def _in_words(labels: Labels, records: Iterable[Record]) -> str:
    given = [record.fields["label"] for record in records]
    if labels.kind == "number":
        return f"numbers from {min(given):g} to {max(given):g}"
    names = given if labels.kind == "single" else [name for label in given for name in label]
    counts = Counter(names)
    told = ", ".join(f"{name} {counts[name]:,}" for name in labels.names[:12]) + (", …" if len(labels) > 12 else "")
    return told if labels.kind == "single" else f"any of {told}"


def _samples(worst: Sequence[Mistake]) -> Iterable[str]:
    for one in worst:
        yield f"  text       {one.shortened()}"
        yield f"  is         {one.said(one.gold)}, taken for {one.said(one.prediction.label)}{one.sure()}"
        yield ""
