"""A classifier at work: texts or pairs in, labels with their probabilities out, a window of texts at a time."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING, Any, overload

import torch
from torch import Tensor

from allmask.data import Example, pack
from allmask.errors import CheckpointError, UsageError
from allmask.heads import Labels, pool_answers
from allmask.inference import freeze
from allmask.model import Model
from allmask.tasks.reading import Reading, Text
from allmask.tasks.writing import tokenizer_of

if TYPE_CHECKING:
    from allmask.tasks.classify import Classify

WINDOW = 1024  # texts in memory, sorted by length
BATCH_TOKENS = 4096


@dataclass(frozen=True)
class Prediction:
    """`label` is a name, a list of names, or a number; a number has no probabilities."""

    label: str | list[str] | float
    probabilities: dict[str, float]

    @property
    def probability(self) -> float | None:
        """Of the label, where one of several was chosen."""
        return self.probabilities[self.label] if isinstance(self.label, str) else None

    def to_dict(self) -> dict[str, Any]:
        if isinstance(self.label, float):
            return {"prediction": self.label}
        share = {} if self.probability is None else {"probability": self.probability}
        return {"prediction": self.label, **share, "probabilities": self.probabilities}


@dataclass
class Classifier:
    """A model with a task head, laid out for speed, and how texts become ids for it."""

    model: Model
    task: Classify
    precision: str = "auto"  # fp32, bf16; auto is the fastest here
    cut: int = field(default=0, init=False)  # texts so far that were longer than the model reads

    def __post_init__(self):
        if self.model.labels is None:
            raise CheckpointError("this model has no task head, so it cannot classify", "teach it: allmask finetune")
        self.labels = self.model.labels
        if self.labels.kind == "number" and len(self.labels) > 1:
            raise CheckpointError(f"this model tells {len(self.labels)} numbers of a text; only one is supported")
        self.task = self.task.fitted(self.model)
        self.frozen = frozen(self.model, self.precision)

    @overload
    def __call__(self, texts: Text) -> Prediction: ...
    @overload
    def __call__(self, texts: Sequence[Text]) -> list[Prediction]: ...

    def __call__(self, texts: Text | Sequence[Text]) -> Prediction | list[Prediction]:
        """A text, or a tuple of two; or a list of them."""
        if isinstance(texts, str | tuple) or not isinstance(texts, Iterable):
            return next(self.stream([_checked(texts)]))
        return list(self.stream(_checked(entry) for entry in texts))

    def stream(self, texts: Iterable[Text], window: int = WINDOW) -> Iterator[Prediction]:
        """A prediction for each, in their order, with no more than a window of them in memory."""
        source = iter(texts)
        while some := list(islice(source, window)):
            yield from predictions(self.labels, self.answers(some))

    def answers(self, texts: Sequence[Text], batch_tokens: int = BATCH_TOKENS) -> Tensor:
        """Scores (n, labels) of the task head, all texts at once."""
        reading = self.task.read(tokenizer_of(self.model), self.model.config, texts)
        self.cut += reading.cut
        return reading.pooled(answer_all(self.frozen, reading.examples, batch_tokens), self.task.pool_windows)


def _checked(entry: Any) -> Text:
    if isinstance(entry, str):
        return entry
    if isinstance(entry, tuple | list) and len(entry) == 2 and all(isinstance(part, str) for part in entry):
        return entry[0], entry[1]
    raise UsageError(f"classify: {entry!r} is no text", 'pass "…", a pair ("…", "…"), or a list of those')


def frozen(model: Model, precision: str) -> Model:
    """A copy laid out for speed. The few products of the heads stay in full precision: there it shows."""
    made = freeze(model, precision)
    made.pooler, made.task_head = copy.deepcopy(model.pooler), copy.deepcopy(model.task_head)
    return made.eval()


def answer_all(model: Model, examples: Sequence[Example], batch_tokens: int = BATCH_TOKENS) -> Tensor:
    """Scores (n, labels) of all examples."""
    return _answered(model, hidden_all(model, examples, batch_tokens))


def answers_to(reading: Reading, model: Model, precision: str) -> Tensor:
    """Scores (rows, labels) of all that is read, for a body that does not learn from what is remembered of it."""
    if reading.features is None:
        return answer_all(frozen(model, precision), reading.examples)
    return _answered(model.eval(), reading.features)


@torch.no_grad()
def _answered(model: Model, hidden: Tensor) -> Tensor:
    assert model.task_head is not None
    return model.answers(hidden.to(model.task_head.output.weight.dtype)).float()


@torch.no_grad()
def hidden_all(model: Model, examples: Sequence[Example], batch_tokens: int = BATCH_TOKENS) -> Tensor:
    """Hidden states (n, W) of the token of each example that stands for it, or the mean of all that do.

    Examples of about one length share a row.
    """
    hidden = torch.empty(len(examples), model.config.features)
    for numbers in rows_by_length([len(example) for example in examples], batch_tokens):
        batch = pack([examples[number] for number in numbers])
        asked = model.asked(batch.mask)
        found = model.body.at(asked, batch.ids, batch.mask, batch.segments)
        hidden[torch.tensor(numbers)] = pool_answers(found.float(), batch.mask.group[asked], "mean")
    return hidden


def rows_by_length(lengths: Sequence[int], batch_tokens: int) -> Iterator[list[int]]:
    """Numbers of examples of about one length, in rows of so many tokens at most, or of one example."""
    row: list[int] = []
    tokens = 0
    for number in sorted(range(len(lengths)), key=lengths.__getitem__):
        if row and tokens + lengths[number] > batch_tokens:
            yield row
            row, tokens = [], 0
        row.append(number)
        tokens += lengths[number]
    if row:
        yield row


def predictions(labels: Labels, answers: Tensor) -> Iterator[Prediction]:
    """What scores (n, labels) say."""
    if labels.kind == "number":
        yield from (Prediction(float(row[0]), {}) for row in answers.tolist())
        return
    shares = answers.softmax(-1) if labels.kind == "single" else answers.sigmoid()
    for row in shares.tolist():
        told = dict(zip(labels.names, row, strict=True))
        best = max(told, key=told.__getitem__)
        chosen = best if labels.kind == "single" else [name for name, share in told.items() if share > 0.5]
        yield Prediction(chosen, told)
