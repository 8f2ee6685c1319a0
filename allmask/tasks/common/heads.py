"""Task heads: how a model gets one, and what it answers about texts and tokens, in rows packed by length."""

from __future__ import annotations

import copy
import logging
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from allmask.data import Asked, Batch, Example, pack, rows_by_length
from allmask.errors import UsageError
from allmask.inference import freeze
from allmask.model import Model
from allmask.nn.heads import Labels, pool_answers
from allmask.tasks.common.auxiliary import Auxiliary, with_language
from allmask.tasks.common.reading import Reading
from allmask.tasks.common.writing import tokenizer_of
from allmask.text import propose_keep_tokens

log = logging.getLogger("allmask")
BATCH_TOKENS = 4096
RATES = ((512, 1e-4), (1023, 3e-5))  # up to a width: the smaller the body, the larger the steps it needs
LARGE_RATE = 2e-5


def with_head(model: Model, labels: Labels, texts: Sequence[str], seed: int, prune: bool, language: bool) -> Model:
    """The model with a head for these labels, without heads that are not used.

    `prune` reduces the vocabulary to that of the texts; `language` keeps or makes a language model head.
    """
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
    """The learning rate for a classifier."""
    return next((rate for width, rate in RATES if model.config.width <= width), LARGE_RATE)


def frozen(model: Model, precision: str) -> Model:
    """A copy laid out for speed; the heads, which cost next to nothing, stay in full precision."""
    made = freeze(model, precision)
    made.pooler, made.task_head = copy.deepcopy(model.pooler), copy.deepcopy(model.task_head)
    return made.eval()


# ---- answers about texts ---------------------------------------------------------------------------------------


def answer_all(model: Model, examples: Sequence[Example], batch_tokens: int = BATCH_TOKENS) -> Tensor:
    """Scores (n, labels) of all examples."""
    return _answered(model, hidden_all(model, examples, batch_tokens))


def answers_to(reading: Reading, model: Model, precision: str) -> Tensor:
    """Scores (rows, labels) of all rows; those of a frozen body are computed from its cached features."""
    if reading.features is None:
        return answer_all(frozen(model, precision), reading.examples)
    return _answered(model.eval(), reading.features)


@torch.no_grad()
def _answered(model: Model, hidden: Tensor) -> Tensor:
    assert model.task_head is not None
    return model.answers(hidden.to(model.task_head.output.weight.dtype)).float()


@torch.no_grad()
def hidden_all(model: Model, examples: Sequence[Example], batch_tokens: int = BATCH_TOKENS) -> Tensor:
    """Hidden states (n, W) of the token that each example is pooled from, or the mean of all such tokens."""
    hidden = torch.empty(len(examples), model.config.features)
    for numbers in rows_by_length([len(example) for example in examples], batch_tokens):
        batch = pack([examples[number] for number in numbers])
        asked = model.asked(batch.mask)
        found = model.body.forward_at(asked, batch.ids, batch.mask, batch.segments)
        hidden[torch.tensor(numbers)] = pool_answers(found.float(), batch.mask.group[asked], "mean")
    return hidden


def cache_features(model: Model, precision: str, *readings: Reading | None) -> None:
    """Compute what a frozen body makes of each text, once for the whole run."""
    log.info("the body is frozen; what it makes of each text is computed once")
    for reading in readings:
        if reading is not None:
            reading.features = hidden_all(frozen(model, precision), reading.examples)


# ---- answers about tokens --------------------------------------------------------------------------------------


def expect_both_ways(model: Model, task: str) -> None:
    if model.config.family not in ("bert", "elmo", "xlnet") or model.config.own_mask != "bidirectional":
        raise UsageError(
            f"{task}: this model reads from left to right, so a word does not see what comes after it",
            "take a model that reads both ways, such as a BERT",
        )


@torch.no_grad()
def token_answers(
    model: Model, examples: Sequence[Example], places: Sequence[np.ndarray], batch_tokens: int = BATCH_TOKENS
) -> list[Tensor]:
    """Scores (M, labels) of the tokens at the places of each example, whatever stands beside it."""
    assert model.task_head is not None
    dtype = model.task_head.output.weight.dtype
    answers: list[Tensor] = [torch.empty(0)] * len(examples)
    for numbers in rows_by_length([len(example) for example in examples], batch_tokens):
        batch = pack([examples[number] for number in numbers])
        where = asked_tokens(batch, [places[number] for number in numbers])
        hidden = model.body.forward_at(where, batch.ids, batch.mask, batch.segments)
        said, text = model.answers(hidden.to(dtype)).float(), batch.mask.group[where]
        for place, number in enumerate(numbers):
            answers[number] = said[text == place]
    return answers


def asked_tokens(batch: Batch, places: Sequence[np.ndarray]) -> Tensor:
    """(1, N), True at the places of each example, by its number in the batch."""
    mask = batch.mask
    lengths = mask.group[0].bincount(minlength=len(places))
    starts = lengths.cumsum(0) - lengths
    asked = torch.zeros(int(lengths.sum()), dtype=torch.bool)
    for start, some in zip(starts.tolist(), places, strict=True):
        asked[torch.from_numpy(some) + start] = True
    return asked[starts[mask.group] + mask.position]


def asking_tokens(
    batch: Batch, asked: Asked, examples: Sequence[Example], numbers: Sequence[int], epoch: int,
    auxiliary: Auxiliary | None,
) -> Batch:  # fmt: skip
    """The batch with its questions and, for an auxiliary loss, the same texts with tokens hidden."""
    batch = replace(batch, asked=asked)
    return batch if auxiliary is None else replace(batch, also=auxiliary.batch(examples, numbers, epoch))
