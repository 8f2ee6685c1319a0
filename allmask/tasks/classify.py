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
from allmask.data import NO_LABEL, Asked, Batch, Example, Record, pack
from allmask.errors import UsageError
from allmask.heads import Labels, whole_text_tokens
from allmask.masks import Mask
from allmask.model import Model
from allmask.objectives import answer_loss
from allmask.tasks.auxiliary import LEFT_TO_RIGHT, Auxiliary, with_language
from allmask.tasks.classifier import Text, answer_all, frozen, predictions
from allmask.tasks.confusion import draw_confusion
from allmask.tasks.labelling import Survey, balanced, golds, read_texts
from allmask.tasks.marks import Mistake, mark, mistakes
from allmask.tasks.metrics import MAIN
from allmask.tasks.writing import tokenizer_of
from allmask.text import Tokenizer, propose_keep_tokens, truncate
from allmask.text.lengths import RULES
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
    truncate: str = "head"
    pair: bool | None = None  # two texts are compared; None: where there are two
    kind: str | None = None  # see Labels; None: as the labels of the data look
    class_weights: str = "none"
    prunes: ClassVar[bool] = False  # texts to come have words that the data has not
    suited: ClassVar[frozenset[str]] = frozenset({"lr", "batch_tokens"})  # chosen by model and data unless given

    def __post_init__(self):
        if self.max_length < 5:  # [CLS] a [SEP] b [SEP]
            raise UsageError(f"max_length is {self.max_length}; expected 5 at least")
        if self.truncate not in RULES:
            raise UsageError(f"truncate is {self.truncate!r}; expected one of {', '.join(RULES)}")
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

    def encode(self, tokenizer: Tokenizer, config: Config, texts: Sequence[Text]) -> tuple[list[Example], int]:
        """What a model reads of each text or pair, and how many were too long.

        [CLS] a [SEP], or [CLS] a [SEP] b [SEP] with segments 0 and 1; of GPT-2 just a, or a, the end of a text, b.
        """
        sides = [(entry, None) if isinstance(entry, str) else entry for entry in texts]
        flat = [side for pair in sides for side in pair if side is not None]
        ids = iter([encoded.ids for encoded in tokenizer.encode_batch(flat, special=False)])
        begin, between, end = _frame(tokenizer)
        made, cut = [], 0
        for _, second in sides:
            parts = [next(ids)] if second is None else [next(ids), next(ids)]
            frame = len(begin) + (len(between) if second is not None else 0) + len(end)
            kept = self._cut(parts, self.max_length - frame)
            cut += sum(map(len, kept)) < sum(map(len, parts))
            made.append(_example(config, [*begin, *kept[0]], between, end, kept[1:]))
        return made, cut

    def _cut(self, parts: list[list[int]], room: int) -> list[list[int]]:
        """At most `room` tokens: the longer of two texts gives way first."""
        if len(parts) == 1:
            return [truncate(parts[0], room, self.truncate)]
        half, sizes = room // 2, [len(part) for part in parts]
        first = room - sizes[1] if sizes[1] <= half else min(sizes[0], room - half)
        limits = (max(first, 1), max(room - first, 1))
        return [truncate(part, limit, self.truncate) for part, limit in zip(parts, limits, strict=True)]

    def examples(self, model: Model, records: Sequence[Record]) -> list[Example]:
        made, cut = self.encode(tokenizer_of(model), model.config, [text_of(record) for record in records])
        if cut:
            log.info("%s of %s texts are cut to %s tokens", f"{cut:,}", f"{len(made):,}", self.max_length)
        return made

    # ---- learning ------------------------------------------------------------------------------------------

    def settings(self, model: Model, records: Sequence[Record]) -> dict[str, Any]:
        """What suits this model and these texts: a learning rate, and tokens for about 32 texts a step."""
        chosen = records[:: max(1, len(records) // 1000)]
        texts = [text_of(record) for record in chosen]
        examples, _ = self.encode(tokenizer_of(model), model.config, texts)
        tokens = sum(len(example) for example in examples) / len(examples)
        rate = next((rate for width, rate in RATES if model.config.width <= width), LARGE_RATE)
        return {"lr": rate, "batch_tokens": int(np.ceil(BATCH * tokens))}

    def prepare(
        self, model: Model, records: Sequence[Record], seed: int = 0, prune: bool = False, language: bool = False
    ) -> Model:
        """A model that can answer: with a head for the labels of the data, and no heads that are not used."""
        labels = self.labels_of(records)
        texts = [part for record in records for part in (record.fields["text"], record.fields["text_b"]) if part]
        model = with_language(model, texts, seed) if language else model.without("lm")
        model = model.keep_tokens(propose_keep_tokens(tokenizer_of(model), texts)) if prune else model
        if model.labels == labels:
            log.info("the checkpoint has a head for these labels; it is trained further")
            return model.without("nsp")
        if model.config.family == "bert" and model.pooler is None:
            log.info("the checkpoint has no pooler; a new one is made")
        return model.without("nsp").with_labels(labels, torch.Generator().manual_seed(seed))

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
        texts = self.examples(model, records)
        judge = Judge(list(held_out), self.examples(model, held_out), model.labels, precision) if held_out else None
        return ClassifyWork(texts, gold, model.config, judge, weights, auxiliary)

    def draw(self, model: Model, held_out: Sequence[Record], out: Path, precision: str = "auto") -> None:
        """confusion.png: which of the held-out texts a finished model takes for what."""
        if not held_out or model.labels is None or model.labels.kind != "single":
            return
        answers = answer_all(frozen(model, precision), self.examples(model, held_out))
        gold = golds(model.labels, [record.fields["label"] for record in held_out])
        draw_confusion(mark(model.labels, answers, gold).confusion, model.labels.names, out / "confusion.png")


@dataclass
class ClassifyWork:
    """What the training loop asks for: examples by number, and a judge."""

    texts: list[Example]
    gold: Tensor
    config: Config
    judge: Judge | None = None
    weights: Tensor | None = None  # of each label
    auxiliary: Auxiliary | None = None

    def __post_init__(self):
        self.lengths = [len(example) for example in self.texts]

    def batch(self, numbers: Sequence[int], epoch: int) -> Batch:
        chosen = [self.texts[number] for number in numbers]
        batch = pack(chosen) if not self._next_tokens else pack([_predicting(example) for example in chosen])
        batch = replace(batch, asked=self._asked(batch.mask, torch.tensor(numbers)))
        if self.auxiliary is None:
            return batch
        if self._next_tokens:  # the same reading serves both: no token sees its successor
            return replace(batch, name=LEFT_TO_RIGHT, weight=self.auxiliary.weight)
        return replace(batch, also=self.auxiliary.batch(chosen, numbers, epoch))

    @property
    def _next_tokens(self) -> bool:
        return self.auxiliary is not None and self.auxiliary.hide is None

    def _asked(self, mask: Mask, numbers: Tensor) -> Asked:
        where = whole_text_tokens(mask, self.config.own_mask == "causal")
        gold = self.gold[numbers[mask.group[where]]]
        return Asked(where, gold, None if self.weights is None else self.weights[gold], "classify")

    def evaluate(self, model: Model) -> Score | None:
        return None if self.judge is None else self.judge(model)


@dataclass
class Judge:
    """All metrics on the held-out records, and a few of the errors to look at."""

    records: list[Record]
    examples: list[Example]
    labels: Labels
    precision: str = "auto"
    shown: int = 2

    def __call__(self, model: Model) -> Score:
        given = [record.fields["label"] for record in self.records]
        gold = golds(self.labels, given)
        answers = answer_all(frozen(model, self.precision), self.examples)
        loss = answer_loss(self.labels.kind, answers, gold).item() / gold.numel()
        scores = mark(self.labels, answers, gold).scores
        entries = zip(self.records, given, predictions(self.labels, answers), strict=True)
        worst = mistakes(entries, self.shown)
        return Score(scores[MAIN[self.labels.kind]], {"loss": loss, **scores}, [*_samples(worst)])


def text_of(record: Record) -> Text:
    first, second = record.fields["text"], record.fields["text_b"]
    return first if second is None else (first, second)


# ---- rows of ids ---------------------------------------------------------------------------------------------


def _frame(tokenizer: Tokenizer) -> tuple[list[int], list[int], list[int]]:
    """What stands before, between and after texts. Files of other makers were trained with just this."""
    if tokenizer.cls_id is not None and tokenizer.sep_id is not None:
        return [tokenizer.cls_id], [tokenizer.sep_id], [tokenizer.sep_id]
    return [], [] if tokenizer.eos_id is None else [tokenizer.eos_id], []


def _example(config: Config, first: list[int], between: list[int], end: list[int], rest: list[list[int]]) -> Example:
    head = [*first, *(between if rest else end)]
    tail = [*rest[0], *end] if rest else []
    ids = np.array([*head, *tail], dtype=np.int32)
    segments = np.arange(len(ids)) >= len(head) if config.segments > 1 else np.zeros(len(ids))
    order = np.arange(len(ids)) if config.own_mask == "causal" else np.zeros(len(ids))
    return Example(ids, order, segments, np.full(len(ids), NO_LABEL))


def _predicting(example: Example) -> Example:
    """Each token but the last is to predict the next one."""
    return replace(example, labels=np.append(example.ids[1:], NO_LABEL))


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
