"""Tagging: a tag for each word, such as where names begin and go on (BERT on CoNLL-2003, arXiv 1810.04805).

With `crf` the tags of a text are scored together (BiLSTM-CRF, arXiv 1508.01991), and none that the scheme forbids is
ever told.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch

from allmask.data import Asked, Batch, Example, Record, pack
from allmask.errors import DataError, UsageError
from allmask.heads import Labels
from allmask.model import Model
from allmask.tasks.auxiliary import Auxiliary
from allmask.tasks.classifier import frozen
from allmask.tasks.classify import rate_for, with_head
from allmask.tasks.entities import SCHEMES, TagSurvey, counting, entities
from allmask.tasks.tagger import best_tags, read_tagged, word_scores
from allmask.tasks.tokens import asked_tokens, asking_tokens, expect_both_ways
from allmask.tasks.words import Window, read_words
from allmask.tasks.writing import tokenizer_of
from allmask.training import Score

log = logging.getLogger("allmask")
BATCH = 32  # sentences a step, about
RATE = 2.0  # times a classifier's learning rate: every word is an example


@dataclass(frozen=True)
class Tag:
    """The task as it is saved with a model: how words become ids and tags are written. The tags are the model's own."""

    max_length: int = 512  # tokens of a window, the special ones among them
    crf: bool = False
    scheme: str | None = None  # bio, iob1, bioes or plain; None: as the tags look
    prunes: ClassVar[bool] = False  # texts to come have words that the data has not
    suited: ClassVar[frozenset[str]] = frozenset({"lr", "batch_tokens"})  # chosen by model and data unless given

    def __post_init__(self):
        if self.max_length < 4:  # [CLS], two pieces, [SEP]
            raise UsageError(f"max_length is {self.max_length}; expected 4 at least")
        if self.scheme is not None and self.scheme not in SCHEMES:
            raise UsageError(f"scheme is {self.scheme!r}; expected one of {', '.join(SCHEMES)}")

    def to_dict(self) -> dict[str, Any]:
        return {"task": "tag", **asdict(self)}

    def fitted(self, model: Model) -> Tag:
        """The same with windows no longer than the model's positions."""
        tokenizer_of(model)
        expect_both_ways(model, "tag")
        return replace(self, max_length=min(self.max_length, model.config.max_positions))

    # ---- reading -------------------------------------------------------------------------------------------

    def read_both(
        self, data: Path, held_out: Path | None, on_bad_record: str, skipped: Counter[str]
    ) -> tuple[Tag, list[Record], list[Record]]:
        """The task as the data has it, and the records; what is held out must have the same tags."""
        train = list(read_tagged(data, None, on_bad_record, skipped))
        train = list(_without_odd(train, on_bad_record, skipped))
        survey = _surveyed(train)
        labels = self.labels_of(train)
        if len(labels) == 1:
            raise DataError(f"{data}: all tags are {labels.names[0]}", "there must be two at least to tell apart")
        others = list(read_tagged(held_out, labels, on_bad_record, skipped)) if held_out else []
        log.info("tags (%s): %s", survey.scheme, _in_words(train, survey.scheme))
        return replace(self, scheme=self.scheme or survey.scheme), train, others

    def labels_of(self, records: Sequence[Record]) -> Labels:
        return Labels("chain" if self.crf else "tag", _surveyed(records).names())

    def read(self, model: Model, records: Sequence[Record]) -> list[list[Window]]:
        sentences = [record.fields["tokens"] for record in records]
        return read_words(tokenizer_of(model), model.config, sentences, self.max_length)

    # ---- learning ------------------------------------------------------------------------------------------

    def settings(self, model: Model, records: Sequence[Record]) -> dict[str, Any]:
        """What suits this model and these texts: a learning rate, and tokens for about 32 sentences a step."""
        chosen = records[:: max(1, len(records) // 1000)]
        lengths = [len(window.example) for windows in self.read(model, chosen) for window in windows]
        return {"lr": RATE * rate_for(model), "batch_tokens": int(np.ceil(BATCH * np.mean(lengths)))}

    def prepare(
        self, model: Model, records: Sequence[Record], seed: int = 0, prune: bool = False, language: bool = False
    ) -> Model:
        """A model that can answer: with a head for the tags of the data, and no heads that are not used."""
        words = sorted({word for record in records for word in record.fields["tokens"]})
        return with_head(model, self.labels_of(records), words, seed, prune, language)

    def work(
        self, model: Model, records: Sequence[Record], held_out: Sequence[Record] = (),
        auxiliary: Auxiliary | None = None, precision: str = "auto",
    ) -> TagWork:  # fmt: skip
        assert model.labels is not None
        place = {name: number for number, name in enumerate(model.labels.names)}
        read = self.read(model, records)
        several = sum(len(windows) > 1 for windows in read)
        if several:
            log.info("%s of %s texts are read in windows", f"{several:,}", f"{len(read):,}")
        rows, gold = [], []
        for record, windows in zip(records, read, strict=True):
            tags = np.array([place[tag] for tag in record.fields["tags"]])
            rows += windows
            gold += [tags[window.words] for window in windows]
        judge = Judge(self, list(held_out), self.read(model, held_out), precision) if held_out else None
        return TagWork(rows, gold, judge, auxiliary)


def _without_odd(records: Sequence[Record], on_bad_record: str, skipped: Counter[str]) -> Iterator[Record]:
    """Without those in which a tag marks nothing, where others do: a slip of the pen."""
    odd = _surveyed(records).odd()
    if odd is None:
        yield from records
        return
    for record in records:
        survey = _surveyed([record])
        survey.tags["B-X"] += 1  # as if among others that mark
        strange = survey.odd()
        if strange is None:
            yield record
        elif on_bad_record == "stop":
            what = f'"tags" has an item {record.fields["tags"].index(strange) + 1} that is "{strange}"'
            hint = "fix the line, or pass --on-bad-record skip"
            raise DataError(f"{record.where}: {what}; expected O, or B-, I-, E-, S- and a type", hint)
        else:
            skipped["unknown tag"] += 1


def _surveyed(records: Sequence[Record]) -> TagSurvey:
    survey = TagSurvey()
    for record in records:
        survey.add(record.fields["tags"])
    return survey


def _in_words(records: Sequence[Record], scheme: str) -> str:
    counts: Counter[str] = Counter()
    for record in records:
        tags = record.fields["tags"]
        counts.update(tags if scheme == "plain" else [entity.kind for entity in entities(tags)])
    told = [f"{kind} {count:,}" for kind, count in sorted(counts.items())]
    return ", ".join(told[:12]) + (", …" if len(told) > 12 else "")


@dataclass
class TagWork:
    """What the training loop asks for: windows by number, and a judge."""

    windows: list[Window]
    gold: list[np.ndarray]  # of each window, the number of the tag of each asked word
    judge: Judge | None = None
    auxiliary: Auxiliary | None = None

    def __post_init__(self):
        self.lengths = [len(window.example) for window in self.windows]

    def batch(self, numbers: Sequence[int], epoch: int) -> Batch:
        examples: list[Example] = [self.windows[number].example for number in numbers]
        batch = pack(examples)
        where = asked_tokens(batch, [self.windows[number].places for number in numbers])
        text = batch.mask.group[where]  # those of a text stand together, in its order
        order = torch.unique_consecutive(text).tolist()
        gold = np.concatenate([self.gold[numbers[place]] for place in order])
        asked = Asked(where, torch.from_numpy(gold).long(), name="tag", questions=text)
        return asking_tokens(batch, asked, examples, numbers, epoch, self.auxiliary)

    def evaluate(self, model: Model, step: int = 0) -> Score | None:
        return None if self.judge is None else self.judge(model)


@dataclass
class Judge:
    """All metrics on the held-out records, and a few of the errors to look at."""

    task: Tag
    records: list[Record]
    read: list[list[Window]]
    precision: str = "auto"
    shown: int = 2

    def __call__(self, model: Model) -> Score:
        assert model.labels is not None
        made = frozen(model, self.precision)
        scheme = self.task.scheme or "bio"
        golds = [record.fields["tags"] for record in self.records]
        scores = word_scores(made, self.read, [len(tags) for tags in golds])
        found = [[model.labels.names[tag] for tag in tags] for tags in best_tags(made, scores, scheme)]
        count = counting(scheme)
        wrong = [count.add(gold, tags) for gold, tags in zip(golds, found, strict=True)]
        worst = sorted(range(len(wrong)), key=lambda number: -wrong[number])[: self.shown]
        told = count.scores()
        samples = [line for number in worst if wrong[number] for line in self._sample(number, found[number])]
        return Score(told["accuracy" if scheme == "plain" else "f1"], told, samples)

    def _sample(self, number: int, found: Sequence[str]) -> list[str]:
        fields = self.records[number].fields
        rows = {"text": " ".join(fields["tokens"]), "is": named(fields["tokens"], fields["tags"])}
        rows["taken for"] = named(fields["tokens"], found)
        return [*(f"  {name:9}  {_short(value)}" for name, value in rows.items()), ""]


def named(words: Sequence[str], tags: Sequence[str]) -> str:
    """Entities in words: `Redondo Beach (location), Compton (location)`."""
    told = [f"{' '.join(words[start:end])} ({kind})" for kind, start, end in entities(tags)]
    return ", ".join(told) or "nothing"


def _short(text: str, limit: int = 100) -> str:
    return text if len(text) <= limit else text[: limit - 1] + "…"
