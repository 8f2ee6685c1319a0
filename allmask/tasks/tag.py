"""Tagging: a tag for each word, such as where names begin and go on (BERT on CoNLL-2003, arXiv 1810.04805).

With `crf` the tags of a text are scored together (BiLSTM-CRF, arXiv 1508.01991). Tags that the scheme forbids are never
predicted. A word is asked at its first piece; in a text longer than a row, windows overlap, and a word is asked in the
window in which it stands farthest from the edge.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any, ClassVar, overload

import numpy as np
import torch
from torch import Tensor

from allmask.config import Config
from allmask.data import Asked, Bad, Batch, Example, Maybe, Record, list_of, pack, read_records, text, usable
from allmask.data.fields import show as _show
from allmask.errors import CheckpointError, DataError, UsageError
from allmask.model import Model
from allmask.nn.crf import CRF
from allmask.nn.heads import Labels
from allmask.objectives import answer_loss
from allmask.options import TagOptions
from allmask.tasks.common.auxiliary import Auxiliary
from allmask.tasks.common.evaluation import Evaluation, Worst, label_table, score_table, shortened
from allmask.tasks.common.heads import (
    asked_tokens,
    asking_tokens,
    expect_both_ways,
    frozen,
    rate_for,
    token_answers,
    with_head,
)
from allmask.tasks.common.labelling import one_of
from allmask.tasks.common.reading import Frame, most_context, with_marks
from allmask.tasks.common.writing import tokenizer_of
from allmask.tasks.metrics.entities import TagSurvey, counting, entities, scheme_of, steps
from allmask.tasks.task import ModelFolder, Predictor, Task
from allmask.text import Tokenizer
from allmask.text.truncate import windows
from allmask.training import Score

log = logging.getLogger("allmask")
BATCH = 32  # sentences a step, about
RATE = 2.0  # times a classifier's learning rate: every word is an example
OVERLAP = 128  # pieces that neighbouring windows share, or half a window
KINDS = ("tag", "chain")  # see Labels
Sentence = str | Sequence[str]  # a text, or its words


@dataclass(frozen=True)
class Tag(TagOptions, Task):
    """The task as it is saved with a model: how words become ids and tags are written. The tags are the model's own."""

    def fitted(self, model: Model) -> Tag:
        """The same with windows no longer than the model's positions."""
        tokenizer_of(model)
        expect_both_ways(model, "tag")
        return replace(self, max_length=min(self.max_length, model.config.max_positions))

    # ---- reading -------------------------------------------------------------------------------------------

    def read_data(
        self, data: Path, held_out: Path | None, on_bad_record: str, skipped: Counter[str]
    ) -> tuple[Tag, list[Record], list[Record]]:
        """The task with the scheme of the data, and the records; held-out ones have the same tags."""
        train = list(read_tagged(data, None, on_bad_record, skipped))
        train = list(_without_odd(train, on_bad_record, skipped))
        survey = _surveyed(train)
        labels = self.labels_of(train)
        if len(labels) == 1:
            raise DataError(f"{data}: all tags are {labels.names[0]}", "at least two different tags are needed")
        others = list(read_tagged(held_out, labels, on_bad_record, skipped)) if held_out else []
        log.info("tags (%s): %s", survey.scheme, _in_words(train, survey.scheme))
        return replace(self, scheme=self.scheme or survey.scheme), train, others

    def labels_of(self, records: Sequence[Record]) -> Labels:
        return Labels("chain" if self.crf else "tag", _surveyed(records).names())

    def read(self, model: Model, records: Sequence[Record]) -> list[list[Window]]:
        sentences = [record.fields["tokens"] for record in records]
        return read_words(tokenizer_of(model), model.config, sentences, self.max_length)

    # ---- learning ------------------------------------------------------------------------------------------

    def suggested_settings(self, model: Model, records: Sequence[Record]) -> dict[str, Any]:
        """A learning rate for the model's width, and tokens for about 32 sentences a step."""
        chosen = records[:: max(1, len(records) // 1000)]
        lengths = [len(window.example) for some in self.read(model, chosen) for window in some]
        return {"lr": RATE * rate_for(model), "batch_tokens": int(np.ceil(BATCH * np.mean(lengths)))}

    def prepare(
        self, model: Model, records: Sequence[Record], seed: int = 0, prune: bool = False, language: bool = False
    ) -> Model:
        """A model with a head for the tags of the data, without heads that are not used."""
        words = sorted({word for record in records for word in record.fields["tokens"]})
        return with_head(model, self.labels_of(records), words, seed, prune, language)

    def workload(
        self, model: Model, records: Sequence[Record], held_out: Sequence[Record] = (),
        auxiliary: Auxiliary | None = None, precision: str = "auto",
    ) -> TagWorkload:  # fmt: skip
        assert model.labels is not None
        place = {name: number for number, name in enumerate(model.labels.names)}
        read = self.read(model, records)
        several = sum(len(some) > 1 for some in read)
        if several:
            log.info("%s of %s texts are read in windows", f"{several:,}", f"{len(read):,}")
        rows, targets = [], []
        for record, some in zip(records, read, strict=True):
            tags = np.array([place[tag] for tag in record.fields["tags"]])
            rows += some
            targets += [tags[window.words] for window in some]
        evaluator = Evaluator(self, list(held_out), self.read(model, held_out), precision) if held_out else None
        return TagWorkload(rows, targets, evaluator, auxiliary)

    # ---- using ---------------------------------------------------------------------------------------------

    @classmethod
    def default_for(cls, opened: ModelFolder) -> Tag | None:
        labels = opened.model.labels
        return cls() if labels is not None and labels.kind in KINDS else None

    def predictor(self, model: Model, precision: str = "auto") -> Tagger:
        return Tagger(model, self, precision)


def _without_odd(records: Sequence[Record], on_bad_record: str, skipped: Counter[str]) -> Iterator[Record]:
    """Leave out (or refuse) records with a tag that has no prefix and is not O, where other tags have prefixes."""
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
    listed = [f"{kind} {count:,}" for kind, count in sorted(counts.items())]
    return ", ".join(listed[:12]) + (", …" if len(listed) > 12 else "")


@dataclass
class TagWorkload:
    """What the training loop asks for: windows by number, and an evaluator."""

    windows: list[Window]
    targets: list[np.ndarray]  # of each window, the number of the tag of each asked word
    evaluator: Evaluator | None = None
    auxiliary: Auxiliary | None = None

    def __post_init__(self):
        self.lengths = [len(window.example) for window in self.windows]

    def batch(self, numbers: Sequence[int], epoch: int) -> Batch:
        examples: list[Example] = [self.windows[number].example for number in numbers]
        batch = pack(examples)
        where = asked_tokens(batch, [self.windows[number].places for number in numbers])
        group = batch.mask.group[where]  # those of a text stand together, in its order
        order = torch.unique_consecutive(group).tolist()
        targets = np.concatenate([self.targets[numbers[place]] for place in order])
        asked = Asked(where, torch.from_numpy(targets).long(), name="tag", questions=group)
        return asking_tokens(batch, asked, examples, numbers, epoch, self.auxiliary)

    def evaluate(self, model: Model, step: int = 0) -> Score | None:
        return None if self.evaluator is None else self.evaluator(model)

    def cache_features(self, model: Model, precision: str) -> None:
        """Every word is asked: keeping the hidden states of all of them would take too much memory."""


@dataclass
class Evaluator:
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
        targets = [record.fields["tags"] for record in self.records]
        scores = word_scores(made, self.read, [len(tags) for tags in targets])
        found = [[model.labels.names[tag] for tag in tags] for tags in best_tags(made, scores, scheme)]
        count = counting(scheme)
        wrong = [count.add(target, tags) for target, tags in zip(targets, found, strict=True)]
        worst = sorted(range(len(wrong)), key=lambda number: -wrong[number])[: self.shown]
        metrics = count.scores()
        samples = [line for number in worst if wrong[number] for line in self._sample(number, found[number])]
        main = "accuracy" if scheme == "plain" else "f1"
        stderr = _stderr(scheme, targets, found)
        return Score(metrics[main], metrics, samples, loss=self._loss(model, scores), stderr=stderr, metric=main)

    def _loss(self, model: Model, scores: Sequence[Tensor]) -> float | None:
        """The mean loss of a tag; None where tags are scored together."""
        assert model.labels is not None
        if model.labels.kind != "tag":
            return None
        place = {name: number for number, name in enumerate(model.labels.names)}
        targets = torch.tensor([place[tag] for record in self.records for tag in record.fields["tags"]])
        return answer_loss("tag", torch.cat(list(scores)).float(), targets).item() / max(1, len(targets))

    def _sample(self, number: int, found: Sequence[str]) -> list[str]:
        words, tags = self.records[number].fields["tokens"], self.records[number].fields["tags"]
        rows = {"text": " ".join(words), "true": named(words, tags), "predicted": named(words, found)}
        return [*(f"  {name:9}  {shortened(value)}" for name, value in rows.items()), ""]


def _stderr(scheme: str, targets: Sequence[Sequence[str]], found: Sequence[Sequence[str]]) -> float | None:
    """The standard error of F1 or accuracy, as a ratio of two sums over sentences."""
    rows = []
    for target, tags in zip(targets, found, strict=True):
        count = counting(scheme)
        count.add(target, tags)
        right, there, said = (sum(one.values()) for one in (count.right, count.targets, count.predicted))
        rows.append((right, there) if scheme == "plain" else (2 * right, there + said))
    above, below = np.array(rows, dtype=np.float64).T
    if len(rows) < 2 or not below.sum():
        return None
    apart = above - below * above.sum() / below.sum()
    return float(np.sqrt(len(rows) / (len(rows) - 1) * np.square(apart).sum()) / below.sum())


def named(words: Sequence[str], tags: Sequence[str]) -> str:
    """Entities in words: `Redondo Beach (location), Compton (location)`."""
    found = [f"{' '.join(words[start:end])} ({kind})" for kind, start, end in entities(tags)]
    return ", ".join(found) or "nothing"


# ---- words and windows -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Word:
    text: str
    start: int  # in characters of the text
    end: int


def split_words(tokenizer: Tokenizer, texts: Sequence[str]) -> list[list[Word]]:
    """The words of each text as the tokenizer splits it: at spaces and punctuation, Chinese by character."""
    result = []
    for entry, encoded in zip(texts, tokenizer.encode_batch(list(texts), special=False), strict=True):
        bounds: dict[int, list[int]] = {}
        for word, (start, end) in zip(encoded.raw.word_ids, encoded.offsets, strict=True):
            if word is not None and end > start:
                found = bounds.setdefault(word, [start, end])
                found[:] = min(found[0], start), max(found[1], end)
        ends = ((start, with_marks(entry, end)) for start, end in bounds.values())
        result.append([Word(entry[start:end], start, end) for start, end in ends])
    return result


@dataclass(frozen=True, eq=False)
class Window:
    """A row, and which of its tokens are asked for which words."""

    example: Example
    places: np.ndarray  # (M,) in the row
    words: np.ndarray  # (M,) numbers of words


def read_words(
    tokenizer: Tokenizer, config: Config, sentences: Sequence[Sequence[str]], size: int
) -> list[list[Window]]:
    """The windows of each sentence, of `size` tokens at most, [CLS] and [SEP] among them."""
    frame = Frame.of(tokenizer, config)
    pieces = _pieces(tokenizer, {word for sentence in sentences for word in sentence})
    return [_windows([pieces[word] for word in sentence], frame, size) for sentence in sentences]


def _pieces(tokenizer: Tokenizer, words: Iterable[str]) -> dict[str, list[int]]:
    """The ids of each word; [UNK] for a word of which the tokenizer leaves nothing, such as a control character."""
    some = sorted(words)
    unknown = [] if tokenizer.unk_id is None else [tokenizer.unk_id]
    encoded = tokenizer.encode_batch(some, special=False)
    return {word: one.ids or unknown for word, one in zip(some, encoded, strict=True)}


def _windows(words: Sequence[list[int]], frame: Frame, size: int) -> list[Window]:
    room, offset = frame.room(size), frame.start()
    ids = np.array([id for word in words for id in word], dtype=np.int32)
    counts = np.array([len(word) for word in words], dtype=np.int64)
    firsts = counts.cumsum() - counts
    if not len(ids):
        return []
    spans = windows(len(ids), room, max(1, room - min(OVERLAP, room // 2)))
    chosen = most_context(firsts, spans)
    made = []
    for number, (start, stop) in enumerate(spans):
        asked = np.flatnonzero((chosen == number) & (counts > 0))
        if not len(asked):  # within one very long word
            continue
        made.append(Window(frame.row(ids[start:stop].tolist()), firsts[asked] - start + offset, asked))
    return made


# ---- scores and what follows from them ---------------------------------------------------------------------------


def word_scores(model: Model, read: Sequence[Sequence[Window]], counts: Sequence[int]) -> list[Tensor]:
    """Scores (words, labels) of each sentence; zeros for a word of which the tokenizer leaves nothing."""
    assert model.labels is not None
    flat = [window for some in read for window in some]
    answers = iter(token_answers(model, [window.example for window in flat], [window.places for window in flat]))
    scores = []
    for some, count in zip(read, counts, strict=True):
        row = torch.zeros(count, len(model.labels))
        for window in some:
            row[torch.from_numpy(window.words)] = next(answers)
        scores.append(row)
    return scores


def best_tags(model: Model, scores: Sequence[Tensor], scheme: str) -> list[list[int]]:
    """Numbers of the tags that score best together among those that the scheme allows.

    A head without a CRF scores all allowed transitions alike, so the best tags of single words are taken where the
    scheme allows them.
    """
    assert model.labels is not None and model.task_head is not None
    starts, allowed = steps(model.labels.names, scheme)
    if model.task_head.chain is not None:
        return model.task_head.chain.best(scores, starts, allowed)
    chosen = [row.argmax(-1) for row in scores]
    fits = [_go_together(tags, starts, allowed) for tags in chosen]
    torn = [row for row, fit in zip(scores, fits, strict=True) if not fit]
    mended = iter(CRF(len(model.labels)).best(torn, starts, allowed))
    return [tags.tolist() if fit else next(mended) for tags, fit in zip(chosen, fits, strict=True)]


def _go_together(tags: Tensor, starts: Tensor, allowed: Tensor) -> bool:
    return bool(starts[tags[:1]].all() and allowed[tags[:-1], tags[1:]].all())


# ---- files -------------------------------------------------------------------------------------------------------


def token(value: Any) -> str:
    """A word of a sentence; a space may be one, in Chinese by character."""
    if isinstance(value, str) and value and not value.strip():
        return value
    return text(value)


def read_tagged(
    path: Path, labels: Labels | None, on_bad_record: str = "stop", skipped: Counter[str] | None = None
) -> Iterator[Record]:
    """Records with `tokens` and as many `tags`, which are checked if labels are given."""
    check = token if labels is None else one_of(Labels("single", labels.names))
    fields = {"tokens": list_of(token), "tags": list_of(check)}
    return usable(path, read_records(path, fields, on_bad_record, skipped), _same_length, on_bad_record, skipped)


def read_sentences(
    path: Path, on_bad_record: str = "stop", skipped: Counter[str] | None = None, keep: Sequence[str] = ()
) -> Iterator[Record]:
    """Records with `tokens` or, where there are none, `text`; tags are not asked for. Lines of a txt file are texts."""
    others = {name: Maybe(lambda value: value) for name in keep}
    if Path(path.name.removesuffix(".gz")).suffix.lower() == ".txt":
        return read_records(path, {**others, "text": text}, on_bad_record, skipped)
    fields = {**others, "tokens": Maybe(list_of(token)), "text": Maybe(text)}
    return usable(path, read_records(path, fields, on_bad_record, skipped), _some_text, on_bad_record, skipped)


def sentence_of(record: Record) -> Sentence:
    words = record.fields.get("tokens")
    return record.fields["text"] if words is None else words


def _same_length(fields: dict[str, Any]) -> None:
    tokens, tags = fields["tokens"], fields["tags"]
    if len(tokens) != len(tags):
        what = f"{len(tokens)} tokens but {len(tags)} tags"
        raise Bad("tokens and tags differ in length", what, "give each token one tag")


def _some_text(fields: dict[str, Any]) -> None:
    if fields["tokens"] is None and fields["text"] is None:
        raise Bad("missing field", f"neither {_show('tokens')} nor {_show('text')}")


# ---- using a trained model ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Found:
    """An entity: its words, from `first` to before `last`; of a text its characters, from `start` to before `end`."""

    kind: str
    text: str
    first: int
    last: int
    start: int | None
    end: int | None
    score: float | None  # the mean probability of its tags; none where they were chosen together

    def to_dict(self) -> dict[str, Any]:
        made = {"type": self.kind, "text": self.text, "words": [self.first, self.last]}
        made |= {} if self.start is None else {"start": self.start, "end": self.end}
        return made | ({} if self.score is None else {"score": self.score})


@dataclass(frozen=True)
class Tagged:
    words: list[str]
    tags: list[str]
    entities: list[Found]

    def to_dict(self) -> dict[str, Any]:
        return {
            "tokens": self.words,
            "prediction": self.tags,
            "entities": [entity.to_dict() for entity in self.entities],
        }


@dataclass
class Tagger(Predictor):
    """A model with a head for tags, laid out for speed, and how sentences become ids for it."""

    model: Model
    task: Tag
    precision: str = "auto"  # fp32, bf16, int8; auto: bf16 where it is quick

    does: ClassVar[str] = "tags"
    done: ClassVar[str] = "tagged"
    window = 512

    def __post_init__(self):
        if self.model.labels is None or self.model.labels.kind not in KINDS:
            raise CheckpointError("this model has no head for tags", "teach it: allmask finetune --task tag")
        self.labels = self.model.labels
        self.task = self.task.fitted(self.model)
        self.scheme = self.task.scheme or scheme_of(self.labels.names)
        self.frozen = frozen(self.model, self.precision)

    @overload
    def __call__(self, sentences: str | tuple[str, ...]) -> Tagged: ...
    @overload
    def __call__(self, sentences: Sequence[Sentence]) -> list[Tagged]: ...

    def __call__(self, sentences: str | tuple[str, ...] | Sequence[Sentence]) -> Tagged | list[Tagged]:
        """A text, or a tuple of words; or a list of texts and of lists of words."""
        if isinstance(sentences, str | tuple) or not isinstance(sentences, Iterable):
            return next(self.stream([_checked(sentences)]))
        return list(self.stream(_checked(entry) for entry in sentences))

    def stream(self, sentences: Iterable[Sentence], window: int | None = None) -> Iterator[Tagged]:
        """Tags for each, in their order, with no more than a window of them in memory."""
        source = iter(sentences)
        while some := list(islice(source, window or self.window)):
            yield from self._tag(some)

    def _tag(self, sentences: Sequence[Sentence]) -> Iterator[Tagged]:
        tokenizer = tokenizer_of(self.model)
        texts = [entry for entry in sentences if isinstance(entry, str)]
        split = iter(split_words(tokenizer, texts))
        cut = [next(split) if isinstance(entry, str) else [Word(word, -1, -1) for word in entry] for entry in sentences]
        spelt = [[word.text for word in words] for words in cut]
        read = read_words(tokenizer, self.model.config, spelt, self.task.max_length)
        scores = word_scores(self.frozen, read, [len(words) for words in cut])
        chosen = best_tags(self.frozen, scores, self.scheme)
        for entry, words, row, tags in zip(sentences, cut, scores, chosen, strict=True):
            yield self._tagged(entry, words, row, tags)

    def _tagged(self, entry: Sentence, words: list[Word], scores: Tensor, tags: list[int]) -> Tagged:
        names = [self.labels.names[tag] for tag in tags]
        shares = scores.softmax(-1) if self.labels.kind == "tag" else None
        found = []
        for kind, first, last in entities(names):
            whole = isinstance(entry, str)
            start, end = (words[first].start, words[last - 1].end) if whole else (None, None)
            said = entry[start:end] if isinstance(entry, str) else _joined([word.text for word in words[first:last]])
            sure = None if shares is None else float(shares[list(range(first, last)), tags[first:last]].mean())
            found.append(Found(kind, said, first, last, start, end, sure))
        return Tagged([word.text for word in words], names, found)

    def read(
        self, path: Path, on_bad_record: str = "stop", skipped: Counter[str] | None = None, keep: Sequence[str] = (),
        targets: bool = False, limit: int | None = None,
    ) -> Iterator[Record]:  # fmt: skip
        if targets:
            return islice(read_tagged(path, self.labels, on_bad_record, skipped), limit)
        return islice(read_sentences(path, on_bad_record, skipped, ("id", "tags", *keep)), limit)

    def expect_lines(self) -> None:
        """A line is a text."""

    def predict(self, records: Sequence[Record], **options: Any) -> Iterator[dict[str, Any]]:
        return (one.to_dict() for one in self.stream((sentence_of(record) for record in records), len(records)))

    def evaluate(self, records: Iterable[Record], show: int = 0, quiet: bool = True, **options: Any) -> Evaluation:
        count, worst, source = counting(self.scheme), Worst(show), iter(records)
        while window := list(islice(source, self.window)):
            for record, found in zip(window, self.stream([one.fields["tokens"] for one in window]), strict=True):
                wrong = count.add(record.fields["tags"], found.tags)
                worst.add(wrong, lambda record=record, found=found: _error(record, found))
        errors, types = worst.rows(), count.by_type()
        values = {"scores": count.scores(), "types": types, **({"errors": errors} if show else {})}
        lines = [
            [
                f"{row['where']}: {' '.join(row['tokens'])}",
                f"  true       {row['true']}",
                f"  predicted  {row['predicted']}",
            ]
            for row in errors
        ]
        unit = "words" if self.scheme == "plain" else "entities"
        tables = [score_table(count.scores()), label_table(types, of="type", unit=unit)]
        return Evaluation(worst.seen, values, tables, examples=lines)


def _error(record: Record, found: Tagged) -> dict[str, Any]:
    words, tags = record.fields["tokens"], record.fields["tags"]
    shown = {"where": record.where, "tokens": words, "tags": tags, "prediction": found.tags}
    return shown | {"true": named(words, tags), "predicted": named(words, found.tags)}


def _joined(words: Sequence[str]) -> str:
    """Words as people write them: Chinese characters without spaces between."""
    return ("" if all(len(word) == 1 for word in words) else " ").join(words)


def _checked(entry: Any) -> Sentence:
    if isinstance(entry, str):
        return entry
    if isinstance(entry, tuple | list) and all(isinstance(word, str) for word in entry):
        return list(entry)
    raise UsageError(f"tag: {entry!r} is no sentence", 'pass "…", a tuple of words, or a list of those')
