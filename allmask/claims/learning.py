"""Small trainings that several claims share, and texts that every Python has or that are made up.

A workload has `lengths` and `batch(numbers, epoch)`: that of a task, or `Rows`, an objective on rows of tokens.
"""

from __future__ import annotations

import copy
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import islice
from math import log
from pydoc_data.topics import topics as python_topics
from random import Random
from typing import Any

import numpy as np
import torch

from allmask.config import Config
from allmask.data import Batch, Record, plan_epoch
from allmask.losses import losses_of
from allmask.model import Model
from allmask.objectives import Draw, Vocabulary
from allmask.options import Settings
from allmask.registry import OBJECTIVES
from allmask.tasks.classify import Classify
from allmask.tasks.common.auxiliary import Auxiliary
from allmask.tasks.seq2seq import Title
from allmask.text import Tokenizer, train_tokenizer
from allmask.training.loop import set_dropout
from allmask.training.optimizer import clip, optimizer_for
from allmask.training.schedule import linear

LENGTH, SHORTEST, HELD_OUT = 62, 8, 10  # tokens of a row, at most and at least; each tenth document is held out
STEPS, PRETRAINING = 120, 350  # of a small language model, and of a model of stories


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
        rows, starts = ([values[row] for row in kept] for values in (self.rows, self.starts))
        return Text(self.tokenizer, rows, starts, [self.documents[row] for row in kept])

    @cached_property
    def entropy(self) -> float:
        """In nats, of the held-out tokens by the frequencies of the others: the loss of a model that knows no more."""
        train, test = (np.concatenate(self.part(held_out).rows) for held_out in (False, True))
        counts = Counter(train.tolist())
        total = len(train) + self.tokenizer.size
        return -sum(log((counts[id] + 1) / total) for id in test.tolist()) / len(test)


def paragraphs() -> list[list[str]]:
    """The reference of the Python language, as its interpreter carries it: 79 documents of paragraphs."""
    return [
        [" ".join(part.split()) for part in re.split(r"\n\s*\n", text) if part.strip()]
        for text in python_topics.values()
    ]


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


# ---- a made-up language --------------------------------------------------------------------------------------------
# Each character is a token. A text is about a person and a thing of a topic, and both recur in it, as in real texts.

TOPICS = {
    "海": "船鱼浪帆岛港潮贝", "食": "饭菜汤面肉盐糖茶", "天": "风雨雪云雷霜雾虹",
    "音": "琴鼓歌笛曲弦钟舞", "武": "兵剑弓盾军城旗甲", "学": "书笔纸字课师题墨",
}  # fmt: skip
PEOPLE, COMMON = "赵钱孙李周吴郑王冯陈", "的了是在有和不也这那就都"


@dataclass(frozen=True)
class Words:
    """What stories are written with."""

    topics: tuple[tuple[str, str], ...] = tuple(TOPICS.items())  # with their things
    people: str = PEOPLE
    common: str = COMMON
    recurring: bool = True  # the same person and thing in all sentences of a story, or others in each
    stories: int = 1500  # to pretrain with

    @classmethod
    def many(cls, topics: int = 60, things: int = 60, people: int = 300, common: int = 100) -> Words:
        """By default 4,060 characters instead of 76."""
        left = map(chr, range(0x4E00, 0x9FFF))
        return cls(
            tuple((next(left), "".join(islice(left, things))) for _ in range(topics)),
            "".join(islice(left, people)),
            "".join(islice(left, common)),
            stories=16_000,
        )


FEW = Words()


@dataclass(frozen=True)
class Story:
    sentences: list[str]
    topic: str
    title: str  # the person, the thing, the topic

    @property
    def text(self) -> str:
        return "".join(self.sentences)


def stories(
    count: int, seed: int, sentences: int = 4, topics: Sequence[str] | None = None, words: Words = FEW
) -> list[Story]:
    rng = Random(seed)
    things_of, found = dict(words.topics), []
    for _ in range(count):
        topic, person = rng.choice(topics or tuple(things_of)), rng.choice(words.people)
        things = things_of[topic]
        thing = rng.choice(things)
        written = []
        for number in range(sentences):
            if number and not words.recurring:
                person, thing = rng.choice(words.people), rng.choice(things)
            middle = [thing, *(rng.choice(things if rng.random() < 0.4 else words.common) for _ in range(3))]
            rng.shuffle(middle)
            written.append(f"{person}{''.join(middle)}。")
        found.append(Story(written, topic, f"{person}{thing}{topic}"))
    return found


@cache
def story_tokenizer(words: Words = FEW) -> Tokenizer:
    characters = [words.people, words.common, "。", *(character for topic in words.topics for character in topic)]
    return train_tokenizer(["".join(characters)] * 3, size=100 + 4 * sum(map(len, characters)))


@cache
def story_text(words: Words = FEW) -> Text:
    return rows_of(story_tokenizer(words), [story.sentences for story in stories(words.stories, 0, words=words)])


def title_work(model: Model, count: int, seed: int, words: Words = FEW, **options: Any) -> Any:
    """Writing the titles of stories, as a workload."""
    task = Title(max_source=48, max_target=6, quote=0, **options).fitted(model)
    written = stories(count, seed, words=words)
    return task.workload(model, [Record({"source": story.text, "target": story.title}, "") for story in written])


def pretrained_story_model(seed: int, steps: int, objective: str = "mlm", words: Words = FEW, **changes: Any) -> Model:
    """A small model that has read stories without their titles. The caller gets a model to copy, not to train."""
    return _pretrained(seed, steps, objective, words, tuple(changes.items()))


@cache
def _pretrained(seed: int, steps: int, objective: str, words: Words, changes: tuple[tuple[str, Any], ...]) -> Model:
    model = small_model(story_tokenizer(words), seed, ("lm", "nsp"), **dict(changes))
    train_on(model, Rows(story_text(words).part(False), objective, seed), steps, seed)
    return model.eval()


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
    """A new one. Its `init_std` is larger than BERT's 0.02, which suits a width of 768 and would be slow here."""
    sizes = {"width": 64, "layers": 2, "heads": 4, "ffn_width": 256, "max_positions": 64, "init_std": 0.1}
    config = Config(**{"vocab_size": tokenizer.size, "dropout": 0.0, "attention_dropout": 0.0, **sizes, **changes})
    model = Model.fresh(config, heads, torch.Generator().manual_seed(seed))
    model.tokenizer = tokenizer
    return model


def train_on(
    model: Model, work: Any, steps: int, seed: int, each: Callable[[int], bool | None] = lambda step: None,
    optimizer: Callable[[Model, Settings], torch.optim.Optimizer] = optimizer_for, **settings: Any,
) -> None:  # fmt: skip
    """Train for some steps in fp32 without dropout, with the optimizer of the library.

    `each` is called after each step; if it returns True, the training ends.
    """
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
            if each(done):
                return
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


def finetuned(
    body: Model, train: Sequence[Record], test: Sequence[Record], steps: int, seed: int, *, freeze: bool = False,
    task: Classify | None = None, lm_weight: float = 0.0, lm_text: Sequence[str] = (), **settings: Any,
) -> tuple[Model, float]:  # fmt: skip
    """Train a classifier on a copy of a body; return it with its accuracy, in percent. Options as of `finetune`."""
    task = (task or Classify(kind="single")).fitted(body)
    model = task.prepare(copy.deepcopy(body), train, seed, language=body.lm_head is not None)
    auxiliary = Auxiliary.of(model, lm_weight, seed, lm_text)
    work = task.workload(model, train, test, auxiliary, "fp32")
    if freeze:
        model.body.requires_grad_(False)
        work.cache_features(model, "fp32")
    train_on(model, work, steps, seed, **{"lr": 1e-3, **settings})
    return model, 100 * work.evaluator(model.eval()).value


@dataclass(frozen=True)
class Learnt:
    """What a small language model has learnt of the Python reference."""

    gained: tuple[float, ...]  # of the unigram entropy, in percent, after each sixth of the steps
    loss: float


def language_model(seed: int, steps: int, objective: str = "causal", norm: str = "layer") -> Learnt:
    """Train one. Several claims compare with the usual one, which is trained once for all of them."""
    return _language_model(seed, steps, objective, norm)


@cache
def _language_model(seed: int, steps: int, objective: str, norm: str) -> Learnt:
    text = python_reference()
    train, test = (Rows(text.part(held_out), objective) for held_out in (False, True))
    model, losses = small_model(text.tokenizer, seed, norm=norm), []
    looks = {steps * look // 6 for look in range(1, 7)}

    def look(step: int) -> None:
        if step in looks:
            losses.append(loss_on(model, test))

    train_on(model, train, steps, seed, look)
    return Learnt(tuple(100 * (1 - loss / text.entropy) for loss in losses), losses[-1])
