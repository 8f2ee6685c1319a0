"""Tagging: a tag for each word, such as the beginning and the inside of names (CoNLL-2003 in BERT, arXiv 1810.04805).

With `crf` the tags of a text are scored together (BiLSTM-CRF, arXiv 1508.01991). Only sequences that the tag scheme
allows are predicted. The tag of a word is predicted at its first token. A text longer than a row is read in overlapping
windows; a word is tagged in the window in which it is farthest from an edge.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, overload

import numpy as np
import torch
from torch import Tensor

from allmask.config import Config
from allmask.data import Asked, Bad, Batch, DataFile, Example, Maybe, Record, list_of, read_records, text, usable
from allmask.data.source import kind as kind_of
from allmask.errors import DataError, UsageError
from allmask.model import Model, Outline
from allmask.nn.crf import CRF
from allmask.nn.heads import Labels
from allmask.objectives import answer_loss
from allmask.options import TagOptions
from allmask.tasks.common.evaluation import Evaluation, Worst, label_table, sample_lines, score_table
from allmask.tasks.common.heads import UNLIMITED, HeadPredictor, HeadTask, HeldOut, TokenWorkload, frozen, token_answers
from allmask.tasks.common.labelling import one_of
from allmask.tasks.common.reading import Frame, most_context, tokens_at, with_marks
from allmask.tasks.common.writing import log_frequencies, tokenizer_of
from allmask.tasks.metrics.entities import OUTSIDE, TagSurvey, counting, entities, scheme_of, split_tag, steps
from allmask.tasks.task import Lengths
from allmask.text import Tokenizer
from allmask.text.script import is_chinese
from allmask.text.truncate import windows
from allmask.training import Score

log = logging.getLogger("allmask")
OVERLAP = 128  # tokens that neighbouring windows share; at most half a window
Sentence = str | Sequence[str]  # a text, or its words


@dataclass(frozen=True)
class Tag(TagOptions, HeadTask):
    """The options say how words become token ids and how tags mark entities; the tags are saved with the model."""

    kinds: ClassVar[tuple[str, ...]] = ("tag", "chain")
    both_ways: ClassVar[bool] = True
    rate: ClassVar[float] = 2.0  # every word is an example

    # ---- reading -------------------------------------------------------------------------------------------

    def read_data(
        self, data: Path | DataFile, held_out: Path | DataFile | None, on_bad_record: str, skipped: Counter[str]
    ) -> tuple[Tag, list[Record], list[Record]]:
        """Also return the task with the tag scheme of the data; held-out records must have the same tags."""
        train = list(read_tagged(data, None, on_bad_record, skipped))
        if _surveyed(train).scheme != "plain":
            train = list(usable(data, train, _check_prefixes, on_bad_record, skipped))
        scheme, labels = _surveyed(train).scheme, self.labels_of(train)
        if len(labels) == 1:
            raise DataError(f"{data}: all tags are {labels.names[0]}", "at least two different tags are needed")
        others = list(read_tagged(held_out, labels, on_bad_record, skipped)) if held_out else []
        log.info("tags (%s): %s", scheme, _in_words(train, scheme))
        return replace(self, scheme=self.scheme or scheme), train, others

    def rows(self, model: Model, inputs: Sequence[Sequence[str]]) -> list[list[Window]]:
        """Return the windows of each sentence, given as words."""
        return read_words(tokenizer_of(model), model.config, inputs, self.max_length)

    def unit(self, record: Record) -> str:
        return str(record.fields["tokens"])

    def input_text(self, record: Record) -> str:
        return " ".join(record.fields["tokens"])

    def label_counts(self, records: Sequence[Record]) -> Counter[str]:
        return _counts(records, self.scheme or _surveyed(records).scheme)

    def lengths(self, model: Model | Outline, records: Sequence[Record]) -> list[Lengths]:
        sentences = [record.fields["tokens"] for record in records]
        read = read_words(tokenizer_of(model), model.config, sentences, UNLIMITED)
        tokens = [sum(len(window.example) for window in sentence) for sentence in read]
        return [Lengths("text", tokens, self.max_length, windows=True)]

    def input_of(self, record: Record) -> Sentence:
        words = record.fields.get("tokens")
        return record.fields["text"] if words is None else words

    def texts_of(self, records: Sequence[Record]) -> list[str]:
        return sorted({word for record in records for word in record.fields["tokens"]})

    def labels_of(self, records: Sequence[Record]) -> Labels:
        return Labels("chain" if self.crf else "tag", _surveyed(records).names())

    def begin_head(self, model: Model, records: Sequence[Record]) -> None:
        """Begin with how often each tag occurs: that most words have none takes long to learn."""
        found, labels = _surveyed(records).tags, model.labels
        assert labels is not None and model.task_head is not None
        model.task_head.output.bias.data.copy_(log_frequencies(torch.tensor([found[name] for name in labels.names])))

    # ---- training ------------------------------------------------------------------------------------------

    def lengths_of(self, model: Model, records: Sequence[Record]) -> Sequence[int]:
        return [len(window.example) for sentence in self.reading(model, records) for window in sentence]

    def logged(self, reading: list[list[Window]]) -> list[list[Window]]:
        split = sum(len(sentence) > 1 for sentence in reading)
        if split:
            log.info("%s of %s texts are read in windows", f"{split:,}", f"{len(reading):,}")
        return reading

    def examples(self, model: Model, records: Sequence[Record], reading: Any, **given: Any) -> TagWorkload:
        assert model.labels is not None
        place = {name: number for number, name in enumerate(model.labels.names)}
        targets = []
        for record, sentence in zip(records, reading, strict=True):
            tags = np.array([place[tag] for tag in record.fields["tags"]])
            targets += [tags[window.words] for window in sentence]
        return TagWorkload([window for sentence in reading for window in sentence], targets, **given)

    def evaluate(self, held_out: HeldOut, model: Model) -> Score:
        assert model.labels is not None
        fast, names, scheme = frozen(model, held_out.precision), model.labels.names, self.scheme or "bio"
        targets = [record.fields["tags"] for record in held_out.records]
        scores = word_scores(fast, held_out.reading, [len(tags) for tags in targets])
        predicted = [[names[tag] for tag in tags] for tags in best_tags(fast, scores, scheme)]
        count, worst = counting(scheme), Worst(held_out.shown)
        for record, tags in zip(held_out.records, predicted, strict=True):
            words, true = record.fields["tokens"], record.fields["tags"]
            worst.add(count.add(true, tags), lambda words=words, true=true, tags=tags: sample_lines(
                text=" ".join(words), **_compared(words, true, tags)
            ))  # fmt: skip
        samples = [line for lines in worst.rows() for line in lines]
        loss = None  # a CRF scores tags together
        if model.labels.kind == "tag":
            numbers = torch.tensor([names.index(tag) for tags in targets for tag in tags])
            loss = answer_loss("tag", torch.cat(scores).float(), numbers).item() / max(1, len(numbers))
        metrics, metric = count.scores(), "accuracy" if scheme == "plain" else "f1"
        stderr = _stderr(scheme, targets, predicted)
        return Score(metrics[metric], metrics, samples, loss=loss, stderr=stderr, metric=metric)

    def predictor(self, model: Model, precision: str = "auto") -> Tagger:
        return Tagger(model, self, precision)


def _check_prefixes(fields: dict[str, Any]) -> None:
    """Refuse a tag without a prefix, other than O."""
    for place, tag in enumerate(fields["tags"], 1):
        if tag != OUTSIDE and split_tag(tag)[0] == OUTSIDE:
            what = f'"tags" has an item {place} that is "{tag}"; expected O, or B-, I-, E-, S- and a type'
            raise Bad("unknown tag", what)


def _surveyed(records: Sequence[Record]) -> TagSurvey:
    survey = TagSurvey()
    for record in records:
        survey.add(record.fields["tags"])
    return survey


def _counts(records: Sequence[Record], scheme: str) -> Counter[str]:
    """Count the entities of each kind; if tags mark none, the tags themselves."""
    counts: Counter[str] = Counter()
    for record in records:
        tags = record.fields["tags"]
        counts.update(tags if scheme == "plain" else [entity.kind for entity in entities(tags)])
    return counts


def _in_words(records: Sequence[Record], scheme: str) -> str:
    listed = [f"{kind} {count:,}" for kind, count in sorted(_counts(records, scheme).items())]
    return ", ".join(listed[:12]) + (", …" if len(listed) > 12 else "")


class TagWorkload(TokenWorkload):
    """The targets of a window are the tag numbers of its words."""

    def ask(self, batch: Batch, numbers: Sequence[int]) -> Asked:
        where = tokens_at(batch, [self.windows[number].places for number in numbers])
        group = batch.mask.group[where]  # tokens of a text are adjacent and in order
        order = torch.unique_consecutive(group).tolist()
        targets = np.concatenate([self.targets[numbers[place]] for place in order])
        return Asked(where, torch.from_numpy(targets).long(), name="tag", questions=group)


def _stderr(scheme: str, targets: Sequence[Sequence[str]], predicted: Sequence[Sequence[str]]) -> float | None:
    """Return the standard error of F1 or accuracy, as a ratio of two sums over sentences."""
    rows = []
    for target, tags in zip(targets, predicted, strict=True):
        count = counting(scheme)
        count.add(target, tags)
        right, true, found = (counter.total() for counter in (count.right, count.targets, count.predicted))
        rows.append((right, true) if scheme == "plain" else (2 * right, true + found))
    above, below = np.array(rows, dtype=np.float64).T
    if len(rows) < 2 or not below.sum():
        return None
    residuals = above - below * above.sum() / below.sum()
    return float(np.sqrt(len(rows) / (len(rows) - 1) * np.square(residuals).sum()) / below.sum())


def _compared(words: Sequence[str], targets: Sequence[str], predicted: Sequence[str]) -> dict[str, str]:
    """Return the true and the predicted entities, as in `Redondo Beach (location), Compton (location)`."""

    def listed(tags: Sequence[str]) -> str:
        found = [f"{' '.join(words[start:end])} ({kind})" for kind, start, end in entities(tags)]
        return ", ".join(found) or "nothing"

    return {"true": listed(targets), "predicted": listed(predicted)}


# ---- words and windows -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Word:
    text: str
    start: int  # in characters of the text
    end: int


def split_words(tokenizer: Tokenizer, texts: Sequence[str]) -> list[list[Word]]:
    """Split each text into words as the tokenizer does: at spaces and punctuation, Chinese by character."""
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
    """A row of tokens, and the words that are tagged in it."""

    example: Example
    places: np.ndarray  # (M,) the index in the row of the first token of each word
    words: np.ndarray  # (M,) the index of each word in its sentence


def read_words(
    tokenizer: Tokenizer, config: Config, sentences: Sequence[Sequence[str]], size: int
) -> list[list[Window]]:
    """Tokenize sentences into windows of at most `size` tokens, special tokens included.

    A word without tokens, such as a control character, becomes [UNK]. Byte-level pieces mark where a word begins by the
    space before it, so words get one; Chinese is written without.
    """
    frame = Frame.of(tokenizer, config)
    words = sorted({word for sentence in sentences for word in sentence})
    unknown = [] if tokenizer.unk_id is None else [tokenizer.unk_id]
    spaced = [f" {word}" if tokenizer.kind == "byte-bpe" and not is_chinese([word]) else word for word in words]
    encoded = tokenizer.encode_batch(spaced, special=False)
    ids = {word: one.ids or unknown for word, one in zip(words, encoded, strict=True)}
    return [_windows([ids[word] for word in sentence], frame, size) for sentence in sentences]


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
        tagged = np.flatnonzero((chosen == number) & (counts > 0))
        if len(tagged):  # none: the window is inside one very long word
            made.append(Window(frame.row(ids[start:stop].tolist()), firsts[tagged] - start + offset, tagged))
    return made


# ---- scores and tags ---------------------------------------------------------------------------------------------


def word_scores(model: Model, read: Sequence[Sequence[Window]], counts: Sequence[int]) -> list[Tensor]:
    """Return the scores (words, labels) of each sentence, 0 for a word without tokens; `counts` are its words."""
    assert model.labels is not None
    flat = [window for sentence in read for window in sentence]
    answers = iter(token_answers(model, [window.example for window in flat], [window.places for window in flat]))
    scores = []
    for sentence, count in zip(read, counts, strict=True):
        row = torch.zeros(count, len(model.labels))
        for window in sentence:
            row[torch.from_numpy(window.words)] = next(answers)
        scores.append(row)
    return scores


def best_tags(model: Model, scores: Sequence[Tensor], scheme: str) -> list[list[int]]:
    """Return the tag numbers of the best sequence that the scheme allows, for each sentence.

    Without a CRF all allowed transitions score alike, so the search is needed only where the best tags of single words
    are not allowed together.
    """
    assert model.labels is not None and model.task_head is not None
    starts, allowed = steps(model.labels.names, scheme)
    if model.task_head.chain is not None:
        return model.task_head.chain.best(scores, starts, allowed)
    chosen = [row.argmax(-1) for row in scores]
    valid = [bool(starts[tags[:1]].all() and allowed[tags[:-1], tags[1:]].all()) for tags in chosen]
    invalid = [row for row, fits in zip(scores, valid, strict=True) if not fits]
    searched = iter(CRF(len(model.labels)).best(invalid, starts, allowed))
    return [tags.tolist() if fits else next(searched) for tags, fits in zip(chosen, valid, strict=True)]


# ---- files -------------------------------------------------------------------------------------------------------


def token(value: Any) -> str:
    """Check a word of a sentence; it may be a space, in Chinese given by character."""
    if isinstance(value, str) and value and not value.strip():
        return value
    return text(value)


def read_tagged(
    path: Path | DataFile, labels: Labels | None, on_bad_record: str = "stop", skipped: Counter[str] | None = None
) -> Iterator[Record]:
    """Read records with `tokens` and as many `tags`; the tags must be among the labels, if given."""
    check = token if labels is None else one_of(Labels("single", labels.names))
    fields = {"tokens": list_of(token), "tags": list_of(check)}

    def same_length(values: dict[str, Any]) -> None:
        tokens, tags = len(values["tokens"]), len(values["tags"])
        if tokens != tags:
            what = f"{tokens} tokens but {tags} tags"
            raise Bad("tokens and tags differ in length", what, "give each token one tag")

    return usable(path, read_records(path, fields, on_bad_record, skipped), same_length, on_bad_record, skipped)


def read_sentences(
    path: Path | DataFile, on_bad_record: str = "stop", skipped: Counter[str] | None = None
) -> Iterator[Record]:
    """Read records with `tokens` or, where there are none, `text`; each line of a txt file is a text."""
    if kind_of(path) == ".txt":
        return read_records(path, {"text": text}, on_bad_record, skipped)
    fields = {"tokens": Maybe(list_of(token)), "text": Maybe(text)}

    def some_text(values: dict[str, Any]) -> None:
        if values["tokens"] is None and values["text"] is None:
            raise Bad("missing field", 'neither "tokens" nor "text"')

    return usable(path, read_records(path, fields, on_bad_record, skipped), some_text, on_bad_record, skipped)


# ---- using a trained model ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Found:
    """An entity: words `first` to `last` (exclusive); in a text, characters `start` to `end` (exclusive)."""

    kind: str
    text: str
    first: int
    last: int
    start: int | None
    end: int | None
    score: float | None  # the mean probability of its tags; None with a CRF

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
        found = [entity.to_dict() for entity in self.entities]
        return {"tokens": self.words, "prediction": self.tags, "entities": found}


@dataclass
class Tagger(HeadPredictor[Sentence, Tagged]):
    does: ClassVar[str] = "tags"
    done: ClassVar[str] = "tagged"
    window = 512

    def __post_init__(self):
        super().__post_init__()
        self.scheme = self.task.scheme or scheme_of(self.labels.names)

    @overload
    def __call__(self, sentences: str | tuple[str, ...]) -> Tagged: ...
    @overload
    def __call__(self, sentences: Sequence[Sentence]) -> list[Tagged]: ...

    def __call__(self, sentences: str | tuple[str, ...] | Sequence[Sentence]) -> Tagged | list[Tagged]:
        """`sentences` is a text, a tuple of words, or a list of texts and of lists of words."""
        if isinstance(sentences, str | tuple) or not isinstance(sentences, Iterable):
            return next(self.stream([_checked(sentences)]))
        return list(self.stream(_checked(entry) for entry in sentences))

    def results(self, inputs: Sequence[Sentence]) -> Iterator[Tagged]:
        tokenizer = tokenizer_of(self.model)
        split = iter(split_words(tokenizer, [entry for entry in inputs if isinstance(entry, str)]))
        words = [next(split) if isinstance(entry, str) else [Word(word, -1, -1) for word in entry] for entry in inputs]
        texts = [[word.text for word in sentence] for sentence in words]
        scores = word_scores(self.frozen, self.task.rows(self.model, texts), [len(sentence) for sentence in words])
        chosen = best_tags(self.frozen, scores, self.scheme)
        for entry, sentence, row, tags in zip(inputs, words, scores, chosen, strict=True):
            yield self._tagged(entry, sentence, row, tags)

    def _tagged(self, entry: Sentence, words: list[Word], scores: Tensor, tags: list[int]) -> Tagged:
        names, texts = [self.labels.names[tag] for tag in tags], [word.text for word in words]
        shares = scores.softmax(-1) if self.labels.kind == "tag" else None
        found = []
        for kind, first, last in entities(names):
            if isinstance(entry, str):
                start, end = words[first].start, words[last - 1].end
                part = entry[start:end]
            else:
                start, end = None, None
                chinese = all(len(word) == 1 for word in texts[first:last])
                part = ("" if chinese else " ").join(texts[first:last])
            score = None if shares is None else float(shares[list(range(first, last)), tags[first:last]].mean())
            found.append(Found(kind, part, first, last, start, end, score))
        return Tagged(texts, names, found)

    def records(self, path: Path | DataFile, targets: bool, **how: Any) -> Iterator[Record]:
        return read_tagged(path, self.labels, **how) if targets else read_sentences(path, **how)

    def expect_lines(self) -> None:
        """A line is a text."""

    def evaluate(self, records: Iterable[Record], show: int = 0, quiet: bool = True, **options: Any) -> Evaluation:
        count, worst = counting(self.scheme), Worst(show)
        for record, found in self.stream_records(records):
            words, tags = record.fields["tokens"], record.fields["tags"]
            worst.add(count.add(tags, found.tags), lambda where=record.where, words=words, tags=tags, found=found: {
                "where": where, "tokens": words, "tags": tags, "prediction": found.tags,
                **_compared(words, tags, found.tags),
            })  # fmt: skip
        errors, types = worst.rows(), count.by_type()
        values = {"scores": count.scores(), "types": types, **({"errors": errors} if show else {})}
        lines = []
        for row in errors:
            compared = [f"  true       {row['true']}", f"  predicted  {row['predicted']}"]
            lines.append([f"{row['where']}: {' '.join(row['tokens'])}", *compared])
        unit = "words" if self.scheme == "plain" else "entities"
        tables = [score_table(count.scores()), label_table(types, of="type", unit=unit)]
        return Evaluation(worst.seen, values, tables, examples=lines)


def _checked(entry: Any) -> Sentence:
    if isinstance(entry, str):
        return entry
    if isinstance(entry, tuple | list) and all(isinstance(word, str) for word in entry):
        return list(entry)
    raise UsageError(f"tag: {entry!r} is not a sentence", 'pass "…", a tuple of words, or a list of those')
