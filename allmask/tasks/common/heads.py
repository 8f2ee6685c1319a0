"""What tasks with a task head share: the head, training on top of a body, scores for texts and for tokens."""

from __future__ import annotations

import copy
import logging
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any, ClassVar, Generic, Self, TypeVar

import numpy as np
import torch
from torch import Tensor

from allmask.data import Asked, Batch, Example, Record, pack, rows_by_length
from allmask.errors import CheckpointError, UsageError
from allmask.inference import freeze, precision_of
from allmask.model import Model, Outline
from allmask.nn.build import reads_pooler
from allmask.nn.heads import Labels, pool_answers
from allmask.options import WINDOWS
from allmask.tasks.common.auxiliary import Auxiliary, with_language
from allmask.tasks.common.reading import Reading, Text, read, tokens_at
from allmask.tasks.common.writing import tokenizer_of
from allmask.tasks.task import Lengths, ModelFolder, Predictor, Task, TaskWorkload
from allmask.text import propose_keep_tokens
from allmask.training import Score

log = logging.getLogger("allmask")
BATCH_TOKENS = 4096
UNLIMITED = 1 << 40  # tokens of a row
RATES = ((512, 1e-4), (1023, 3e-5))  # (largest width, learning rate): smaller bodies need larger steps
LARGE_RATE = 2e-5
USUAL_SPREAD = 0.36  # of hidden states, in MiniLM and bge; heads learn slowly from much smaller ones
SPREAD_TEXTS, SPREAD_TOKENS = 64, 128  # of the data, that show it
Input = TypeVar("Input")
Result = TypeVar("Result")


class HeadTask(Task):
    """A task for a task head on a pretrained body. Its options have `max_length`, the tokens of a row."""

    kinds: ClassVar[tuple[str, ...]]  # kinds of `Labels` that the head may have
    both_ways: ClassVar[bool] = False  # refuse models that read from left to right
    batch_size: ClassVar[int] = 32  # inputs per step, on average
    rate: ClassVar[float] = 1.0  # times the learning rate of a classifier
    sampled: ClassVar[int] = 1000  # records from which the length of inputs is estimated

    def labels_of(self, records: Sequence[Record]) -> Labels:
        """Return the labels of training records."""
        raise NotImplementedError

    def texts_of(self, records: Sequence[Record]) -> list[str]:
        """Return the texts of records; a pruned vocabulary keeps their tokens."""
        raise NotImplementedError

    def input_of(self, record: Record) -> Any:
        """Return the input of the predictor for a record."""
        raise NotImplementedError

    def rows(self, model: Model, inputs: Sequence[Any]) -> Any:
        """Tokenize inputs of the predictor."""
        raise NotImplementedError

    def lengths_of(self, model: Model, records: Sequence[Record]) -> Sequence[int]:
        """Return the number of tokens of each training example."""
        raise NotImplementedError

    def evaluate(self, held_out: HeldOut, model: Model) -> Score:
        """Return the metrics of a model on held-out records, and the worst errors as samples."""
        raise NotImplementedError

    def examples(self, model: Model, records: Sequence[Record], reading: Any, **given: Any) -> TaskWorkload:
        """Return the training examples; `given` has the `evaluator` and the `auxiliary` loss."""
        raise NotImplementedError

    def reading(self, model: Model, records: Sequence[Record]) -> Any:
        return self.rows(model, [*map(self.input_of, records)])

    def fitted(self, model: Model | Outline) -> Self:
        tokenizer_of(model)
        config = model.config
        known = config.is_bert or config.family in ("elmo", "xlnet")
        if self.both_ways and not (known and config.own_mask == "bidirectional"):
            raise UsageError(
                f"{self.name}: this model reads from left to right, so a word does not see what comes after it",
                "take a model that reads both ways, such as a BERT",
            )
        task: Any = self
        return replace(task, max_length=min(task.max_length, config.max_positions))

    def suggested_settings(self, model: Model, records: Sequence[Record]) -> dict[str, Any]:
        """Return a learning rate for the model's width, and batches of about `batch_size` examples."""
        width = model.config.width
        rate = next((rate for largest, rate in RATES if width <= largest), LARGE_RATE)
        lengths = self.lengths_of(model, records[:: max(1, len(records) // self.sampled)])
        return {"lr": self.rate * rate, "batch_tokens": int(np.ceil(self.batch_size * np.mean(lengths)))}

    def prepare(
        self, model: Model, records: Sequence[Record], seed: int = 0, prune: bool = False, language: bool = False
    ) -> Model:
        """Return the model with a head for the labels of the records, and without heads that are not used."""
        labels, texts = self.labels_of(records), self.texts_of(records)
        model = with_language(model, texts, seed) if language else model.without("lm")
        if prune:
            model = model.keep_tokens(propose_keep_tokens(tokenizer_of(model), texts, characters=True))
        known = model.labels
        if known is not None and self.keeps(known, labels):
            log.info("the checkpoint has a head for these labels; it is trained further")
            return model.without("nsp")
        if known is not None:
            log.info("the checkpoint has a head for other labels (%s); a new one is made", ", ".join(known.names[:6]))
        if reads_pooler(model.config, labels) and model.pooler is None:
            log.info("the checkpoint has no pooler; a new one is made")
        unused = ("nsp",) if reads_pooler(model.config, labels) else ("nsp", "task", "pooler")
        made = model.without(*unused).with_labels(labels, torch.Generator().manual_seed(seed))
        factor = enlarge_states(made, [*map(self.input_text, records[:SPREAD_TEXTS])])
        if factor > 1:
            log.info("its hidden states are small; times %g, a new head learns from them as usual", factor)
        self.begin_head(made, records)
        return made

    def begin_head(self, model: Model, records: Sequence[Record]) -> None:
        """Prepare a new head for how the labels of these records are distributed, where that saves many steps."""

    def keeps(self, known: Labels, labels: Labels) -> bool:
        """Return whether a head for `known` can be trained further for `labels`."""
        return known == labels

    def workload(
        self, model: Model, records: Sequence[Record], held_out: Sequence[Record] = (),
        auxiliary: Auxiliary | None = None, precision: str = "auto",
    ) -> Any:  # fmt: skip
        evaluator = None
        if held_out:
            evaluator = HeldOut(self, held_out, self.logged(self.reading(model, held_out)), precision)
        reading = self.logged(self.reading(model, records))
        return self.examples(model, records, reading, evaluator=evaluator, auxiliary=auxiliary)

    def logged(self, reading: Any) -> Any:
        """Log how many texts are truncated or split into windows; return the reading."""
        return reading

    @classmethod
    def default_for(cls, opened: ModelFolder) -> Self | None:
        labels = opened.model.labels
        return cls() if labels is not None and labels.kind in cls.kinds else None


@torch.no_grad()
def enlarge_states(model: Model, texts: Sequence[str]) -> float:
    """Multiply the last hidden states of a BERT by a power of 2 if they are much smaller than usual; return it.

    A language model head has a matrix of its own behind them, and cosines have no scale, so pretraining may leave them
    of any size. A new task head has not: it learns the more slowly the smaller they are. A language model head that is
    kept gets its matrix divided by the factor, so its logits stay as they are, bit for bit.
    """
    config = model.config
    plain = config.norm_place == "post" and config.parametrization == "standard" and not config.shared_layers
    if not config.is_bert or not plain:
        return 1.0
    found = _spread(model, texts)
    factor = 2.0 ** max(0, round(math.log2(USUAL_SPREAD / found))) if found else 1.0
    if factor == 1:
        return factor
    norm = model.body.layers[-1].feed_forward_norm
    for weight in norm.parameters():
        weight.mul_(factor)
    if model.lm_head is not None:
        model.lm_head.get_parameter("transform.weight").div_(factor)
    return factor


def _spread(model: Model, texts: Sequence[str]) -> float:
    """Return the standard deviation of hidden states over the tokens of texts."""
    reading = read(tokenizer_of(model), model.config, texts, min(SPREAD_TOKENS, model.config.max_length), "head")
    if not reading.examples:
        return 0.0
    batch = pack(reading.examples).to(model.device)
    training = model.training
    hidden = model.eval().body(batch.ids, batch.mask, None, batch.segments)[batch.mask.valid].float()
    model.train(training)
    return (hidden - hidden.mean(0)).square().mean().sqrt().item()


@dataclass
class HeldOut:
    """The evaluator of a workload: held-out records, and what the task has read from them."""

    task: Any
    records: Sequence[Record]
    reading: Any
    precision: str = "auto"
    shown: int = 2  # errors shown as samples

    def __call__(self, model: Model) -> Score:
        return self.task.evaluate(self, model)

    def answers(self, model: Model) -> Tensor:
        """For a `PooledTask`: return the scores (texts, labels), from cached features where the body is frozen."""
        reading = self.reading
        if reading.features is None:
            answers = answer_all(frozen(model, self.precision), reading.examples)
        else:
            answers = _head_scores(model.eval(), reading.features)
        return reading.pooled(answers, self.task.pool_windows)


@dataclass
class HeadPredictor(Predictor, Generic[Input, Result]):
    """A model with a task head, frozen for speed. Subclasses say how inputs become results, a list at a time."""

    model: Model
    task: Any
    precision: str = "auto"  # fp32, bf16, int8; auto: bf16 where the CPU computes in it
    cut: int = field(default=0, init=False)

    def __post_init__(self):
        labels = self.model.labels
        if labels is None or labels.kind not in self.task.kinds:
            raise CheckpointError(
                f'this model has no head for "{self.task.name}"',
                f"fine-tune it: allmask finetune --task {self.task.name}",
            )
        self.labels = labels
        self.task = self.task.fitted(self.model)
        self.frozen = frozen(self.model, self.precision)

    @property
    def max_tokens(self) -> int:
        return self.task.max_length

    def computes_in(self) -> str:
        return precision_of(self.frozen)

    def results(self, inputs: Sequence[Input]) -> Iterator[Result]:
        """Yield a result for each input; all of them are in memory."""
        raise NotImplementedError

    def stream(self, inputs: Iterable[Input], window: int | None = None) -> Iterator[Result]:
        """Yield a result for each input, in order; at most `window` inputs are in memory."""
        source = iter(inputs)
        while some := list(islice(source, window or self.window)):
            yield from self.results(some)

    def stream_records(self, records: Iterable[Record]) -> Iterator[tuple[Record, Result]]:
        """Yield each record with its result; at most `self.window` records are in memory."""
        source = iter(records)
        while some := list(islice(source, self.window)):
            yield from zip(some, self.results([*map(self.task.input_of, some)]), strict=True)

    def predict(self, records: Sequence[Record], **options: Any) -> Iterator[dict[str, Any]]:
        found: Iterator[Any] = self.results([*map(self.task.input_of, records)])
        return (result.to_dict() for result in found)


def frozen(model: Model, precision: str) -> Model:
    """Return a copy with the body frozen for speed; the heads, which cost next to nothing, stay in full precision."""
    fast = freeze(model, precision)
    fast.pooler, fast.task_head = copy.deepcopy(model.pooler), copy.deepcopy(model.task_head)
    return fast.eval()


# ---- scores of texts -------------------------------------------------------------------------------------------


class PooledTask(HeadTask):
    """A task whose head gives scores to texts, pooled over the windows of a long one.

    Its options also have `truncate` and `pool_windows`.
    """

    def texts(self, inputs: Sequence[Any]) -> Sequence[Text]:
        """Return the texts or pairs to score; an input may have several."""
        return inputs

    def rows(self, model: Model, inputs: Sequence[Any]) -> Reading:
        """Tokenize the texts of inputs into rows."""
        task: Any = self
        return read(tokenizer_of(model), model.config, self.texts(inputs), task.max_length, task.truncate)

    def lengths_of(self, model: Model, records: Sequence[Record]) -> Sequence[int]:
        return self.reading(model, records).lengths

    def lengths(self, model: Model | Outline, records: Sequence[Record]) -> list[Lengths]:
        task: Any = self
        texts = self.texts([*map(self.input_of, records)])
        tokens = read(tokenizer_of(model), model.config, texts, UNLIMITED, "head").lengths
        return [Lengths("text", tokens, task.max_length, task.truncate == WINDOWS)]

    def logged(self, reading: Reading) -> Reading:
        if reading.cut:
            task: Any = self
            log.info("%s of %s texts are cut to %s tokens", f"{reading.cut:,}", f"{len(reading):,}", task.max_length)
        split = int((np.diff(reading.starts) > 1).sum())
        if split:
            rows = f"{len(reading.examples) - len(reading) + split:,}"
            log.info("%s of %s texts are read in windows, %s in all", f"{split:,}", f"{len(reading):,}", rows)
        return reading


@dataclass
class PooledWorkload(TaskWorkload):
    """Training examples for a `PooledTask`."""

    task: Any
    reading: Reading
    evaluator: HeldOut | None
    auxiliary: Auxiliary | None

    def cache_features(self, model: Model, precision: str) -> None:
        log.info("the body is frozen: its output for each text is computed once")
        for reading in (self.reading, self.evaluator and self.evaluator.reading):
            if reading is not None:
                reading.features = hidden_all(frozen(model, precision), reading.examples)


class PooledPredictor(HeadPredictor[Input, Result]):
    def answers(self, inputs: Sequence[Input], batch_tokens: int = BATCH_TOKENS) -> Tensor:
        """Return the scores (texts, labels) of the task head."""
        reading = self.task.rows(self.model, inputs)
        self.cut += reading.cut
        return reading.pooled(answer_all(self.frozen, reading.examples, batch_tokens), self.task.pool_windows)


def answer_all(model: Model, examples: Sequence[Example], batch_tokens: int = BATCH_TOKENS) -> Tensor:
    """Return the scores (n, labels) of the examples."""
    return _head_scores(model, hidden_all(model, examples, batch_tokens))


@torch.no_grad()
def _head_scores(model: Model, hidden: Tensor) -> Tensor:
    assert model.task_head is not None
    return model.answers(hidden.to(model.task_head.output.weight)).float().cpu()


@torch.no_grad()
def hidden_all(model: Model, examples: Sequence[Example], batch_tokens: int = BATCH_TOKENS) -> Tensor:
    """Return the pooled hidden states (n, W): of the pooled token, or the mean if there are several."""
    hidden = torch.zeros(len(examples), model.config.features)  # stays 0 for an example without tokens
    for numbers in rows_by_length([len(example) for example in examples], batch_tokens):
        batch = pack([examples[number] for number in numbers]).to(model.device)
        where = model.asked(batch.mask)
        found = model.body.forward_at(where, batch.ids, batch.mask, batch.segments)
        hidden[torch.tensor(numbers)] = pool_answers(found.float(), batch.mask.group[where], "mean").cpu()
    return hidden


# ---- scores of tokens ------------------------------------------------------------------------------------------


@dataclass
class TokenWorkload(TaskWorkload):
    """An example is a window, a row of tokens. Features are not cached: those of all tokens would be too large."""

    windows: Sequence[Any]  # each has an `example`
    targets: Any  # of each window
    evaluator: HeldOut | None = None
    auxiliary: Auxiliary | None = None

    def __post_init__(self):
        self.lengths = [len(window.example) for window in self.windows]

    def ask(self, batch: Batch, numbers: Sequence[int]) -> Asked:
        """Return the targets of the task head in a batch of these windows."""
        raise NotImplementedError

    def batch(self, numbers: Sequence[int], epoch: int) -> Batch:
        examples = [self.windows[number].example for number in numbers]
        batch = pack(examples)
        also = None if self.auxiliary is None else self.auxiliary.batch(examples, numbers, epoch)
        return replace(batch, asked=self.ask(batch, numbers), also=also)


@torch.no_grad()
def token_answers(
    model: Model, examples: Sequence[Example], positions: Sequence[np.ndarray], batch_tokens: int = BATCH_TOKENS
) -> list[Tensor]:
    """Return for each example the scores (M, labels) of the tokens at its `positions`."""
    answers: list[Tensor] = [torch.empty(0)] * len(examples)
    for numbers in rows_by_length([len(example) for example in examples], batch_tokens):
        batch = pack([examples[number] for number in numbers])
        where = tokens_at(batch, [positions[number] for number in numbers])
        moved = batch.to(model.device)
        hidden = model.body.forward_at(where.to(model.device), moved.ids, moved.mask, moved.segments)
        scores, example = _head_scores(model, hidden), batch.mask.group[where]
        for place, number in enumerate(numbers):
            answers[number] = scores[example == place]
    return answers
