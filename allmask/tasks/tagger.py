"""A tagger at work: texts, or sentences in words, in; tags and the entities they mark out.

Also what is read from files: records with `tokens` and `tags`, columns, or plain text.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, overload

import torch
from torch import Tensor

from allmask.chains import Chain
from allmask.data import Bad, Maybe, Record, list_of, read_records, text, usable
from allmask.data.fields import show
from allmask.errors import CheckpointError, UsageError
from allmask.heads import Labels
from allmask.model import Model
from allmask.tasks.classifier import frozen
from allmask.tasks.entities import entities, scheme_of, steps
from allmask.tasks.labelling import one_of
from allmask.tasks.tokens import expect_both_ways, token_answers
from allmask.tasks.words import Window, Word, read_words, split_words
from allmask.tasks.writing import tokenizer_of

if TYPE_CHECKING:
    from allmask.tasks.tag import Tag

Sentence = str | Sequence[str]  # a text, or its words
WINDOW = 512  # sentences in memory


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
        told = {"type": self.kind, "text": self.text, "words": [self.first, self.last]}
        told |= {} if self.start is None else {"start": self.start, "end": self.end}
        return told | ({} if self.score is None else {"score": self.score})


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
class Tagger:
    """A model with a head for tags, laid out for speed, and how sentences become ids for it."""

    model: Model
    task: Tag
    precision: str = "auto"  # fp32, bf16, int8; auto: bf16 where it is quick

    def __post_init__(self):
        if self.model.labels is None or self.model.labels.kind not in ("tag", "chain"):
            raise CheckpointError("this model has no head for tags", "teach it: allmask finetune --task tag")
        expect_both_ways(self.model, "tag")
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

    def stream(self, sentences: Iterable[Sentence], window: int = WINDOW) -> Iterator[Tagged]:
        """Tags for each, in their order, with no more than a window of them in memory."""
        source = iter(sentences)
        while some := list(islice(source, window)):
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
            yield self._told(entry, words, row, tags)

    def _told(self, entry: Sentence, words: list[Word], scores: Tensor, tags: list[int]) -> Tagged:
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


def _joined(words: Sequence[str]) -> str:
    """Words as people write them: Chinese characters without spaces between."""
    return ("" if all(len(word) == 1 for word in words) else " ").join(words)


def _checked(entry: Any) -> Sentence:
    if isinstance(entry, str):
        return entry
    if isinstance(entry, tuple | list) and all(isinstance(word, str) for word in entry):
        return list(entry)
    raise UsageError(f"tag: {entry!r} is no sentence", 'pass "…", a tuple of words, or a list of those')


# ---- scores and what follows from them -------------------------------------------------------------------------


def word_scores(model: Model, read: Sequence[Sequence[Window]], counts: Sequence[int]) -> list[Tensor]:
    """(words, labels) of each sentence; a word of which the tokenizer leaves nothing has none of its own: zeros."""
    assert model.labels is not None
    flat = [window for windows in read for window in windows]
    answers = iter(token_answers(model, [window.example for window in flat], [window.places for window in flat]))
    scores = []
    for windows, count in zip(read, counts, strict=True):
        row = torch.zeros(count, len(model.labels))
        for window in windows:
            row[torch.from_numpy(window.words)] = next(answers)
        scores.append(row)
    return scores


def best_tags(model: Model, scores: Sequence[Tensor], scheme: str) -> list[list[int]]:
    """Numbers of the tags: the best together of those that the scheme allows. To a head without a chain all steps that
    are allowed are alike, so where the best of each word go together, it is they."""
    assert model.labels is not None and model.task_head is not None
    starts, allowed = steps(model.labels.names, scheme)
    if model.task_head.chain is not None:
        return model.task_head.chain.best(scores, starts, allowed)
    chosen = [row.argmax(-1) for row in scores]
    fits = [_go_together(tags, starts, allowed) for tags in chosen]
    torn = [row for row, fit in zip(scores, fits, strict=True) if not fit]
    mended = iter(Chain(len(model.labels)).best(torn, starts, allowed))
    return [tags.tolist() if fit else next(mended) for tags, fit in zip(chosen, fits, strict=True)]


def _go_together(tags: Tensor, starts: Tensor, allowed: Tensor) -> bool:
    return bool(starts[tags[:1]].all() and allowed[tags[:-1], tags[1:]].all())


# ---- files -----------------------------------------------------------------------------------------------------


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
        raise Bad("missing field", f"neither {show('tokens')} nor {show('text')}")
