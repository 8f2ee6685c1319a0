"""From batches to losses, of tokens and of tasks: logits are made only where there is a target."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from allmask.data import Asked, Batch
from allmask.mask import Mask
from allmask.model import Model
from allmask.nn.cache import Cache
from allmask.nn.crf import CRF
from allmask.nn.heads import grouped_log_softmax, pool_answers
from allmask.nn.transformer import Transformer

Losses = dict[str, tuple[Tensor, int]]  # of each name: the summed loss, by its weight, and over how many targets


def losses_of(model: Model, batch: Batch, smoothing: float = 0.0) -> Losses:
    """Summed losses by name: of the tokens, of the task, "nsp" where segments are related; of another row beside it."""
    if batch.query is not None:
        return {batch.name: _token_loss(model, _guessed(model.body, batch), batch.labels, smoothing)}
    losses = _losses_of_row(model, batch, smoothing)
    return losses if batch.also is None else {**losses, **losses_of(model, batch.also, smoothing)}


def _losses_of_row(model: Model, batch: Batch, smoothing: float) -> Losses:
    """One reading of a row, and all that is asked about it."""
    if batch.hidden is not None and batch.asked is not None:
        return {batch.asked.name: _answer_loss(model, batch.hidden, batch.asked, smoothing)}
    guessed = batch.labels >= 0
    wanted = guessed if batch.relations is None else guessed | (batch.mask.position == 0)
    wanted = wanted if batch.asked is None else wanted | batch.asked.where
    hidden = model.body.forward_at(wanted, batch.ids, batch.mask, batch.segments)

    def at(where: Tensor) -> Tensor:
        return hidden if where is wanted else hidden[where[wanted]]

    losses: Losses = {}
    if batch.asked is not None:
        losses[batch.asked.name] = _answer_loss(model, at(batch.asked.where), batch.asked, smoothing)
    if batch.asked is None or bool(guessed.any()):
        loss, count = _token_loss(model, at(guessed), batch.labels, smoothing)
        losses[batch.name] = loss * batch.weight, count
    if batch.relations is not None:
        losses["nsp"] = _relation_loss(model, at(batch.mask.position == 0), batch)
    return losses


def _token_loss(model: Model, hidden: Tensor, labels: Tensor, smoothing: float) -> tuple[Tensor, int]:
    labels = labels[labels >= 0]
    return model.token_loss(hidden, labels, smoothing), len(labels)


def _full(logits: Tensor) -> Tensor:
    return logits.float() if logits.dtype == torch.bfloat16 else logits


def _relation_loss(model: Model, hidden: Tensor, batch: Batch) -> tuple[Tensor, int]:
    """Of the question whether B follows A, answered at the first token of a text."""
    assert batch.relations is not None
    answers = model.head("nsp_head")(model.head("pooler")(hidden))
    relations = batch.relations[batch.mask.group[batch.mask.position == 0]]
    return F.cross_entropy(_full(answers), relations, reduction="sum"), len(relations)


def _answer_loss(model: Model, hidden: Tensor, asked: Asked, smoothing: float) -> tuple[Tensor, int]:
    assert model.labels is not None
    answers = _full(model.answers(hidden))
    if model.labels.kind == "chain":
        return _chain_loss(model, answers, asked), asked.count
    answers = answers if asked.texts is None else pool_answers(answers, asked.texts, asked.pool)
    loss = answer_loss(model.labels.kind, answers, asked.gold, asked.weights, smoothing, asked.questions)
    return loss, asked.count


def answer_loss(
    kind: str, answers: Tensor, gold: Tensor, weights: Tensor | None = None, smoothing: float = 0.0,
    questions: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """The summed loss of answers (texts, labels) to a question of a kind, see Labels, and Asked for the others.

    Smoothing is for single labels, tags and choices.
    """
    if kind == "choice":
        assert questions is not None
        return _choice_loss(grouped_log_softmax(answers[:, 0], questions), gold, questions, smoothing)
    if kind == "span":
        assert questions is not None
        start, end = (grouped_log_softmax(answers[:, side], questions)[gold[:, side]] for side in (0, 1))
        return -(start + end).sum()
    if kind in ("single", "tag"):
        each = F.cross_entropy(answers, gold, reduction="none", label_smoothing=smoothing)
        return each.sum() if weights is None else (each * weights).sum()
    if kind == "multi":
        return F.binary_cross_entropy_with_logits(answers, gold, reduction="sum")
    return F.mse_loss(answers, gold, reduction="sum")


def _chain_loss(model: Model, answers: Tensor, asked: Asked) -> Tensor:
    """Of the tags of each text as a whole; those of a text stand together in the row."""
    chain = model.head("task_head").get_submodule("chain")
    assert isinstance(chain, CRF) and asked.questions is not None
    return chain.loss(answers, asked.gold, torch.unique_consecutive(asked.questions, return_counts=True)[1])


def _choice_loss(shares: Tensor, gold: Tensor, questions: Tensor, smoothing: float) -> Tensor:
    """Cross-entropy over the choices of each question, of which there may be any number."""
    loss = -shares[gold].sum()
    if not smoothing:
        return loss
    choices = questions.bincount(minlength=len(gold))
    return (1 - smoothing) * loss - smoothing * (shares / choices[questions]).sum()


# ---- two streams -------------------------------------------------------------------------------------------


class _Grid(NamedTuple):
    """A row for each text, and which of its cells the tokens of a flat row go to."""

    shape: tuple[int, int]
    cells: Tensor  # (M,)

    @classmethod
    def of(cls, text: Tensor, texts: int) -> _Grid:
        """`text` (M,) is the number of the text that a token is of; those of a text are neighbours."""
        counts = text.bincount(minlength=texts)
        width = max(1, int(counts.max()))
        position = torch.arange(len(text), device=text.device) - (counts.cumsum(0) - counts)[text]
        return cls((texts, width), text * width + position)

    def spread(self, values: Tensor, fill: int = 0) -> Tensor:
        return (
            values.new_full((self.shape[0] * self.shape[1],), fill).index_copy(0, self.cells, values).view(self.shape)
        )

    def mask(self, flat: Mask) -> Mask:
        return Mask(self.spread(flat.order[0]), self.spread(flat.group[0], -1), self.spread(flat.position[0]))


def _guessed(body: Transformer, batch: Batch) -> Tensor:
    """The query stream's hidden states (M, W) where there is a label: it reads what the content stream remembers.

    The content is read in the flat row. The queries of a text are then a row of their own, which reads that text.
    """
    assert batch.query is not None
    _, content = body.step(batch.ids, batch.mask, Cache(), segments=batch.segments)
    asked, group = batch.labels[0] >= 0, batch.mask.group[0]
    text = torch.cat([group.new_zeros(1), (group[1:] != group[:-1]).long().cumsum(0)])
    texts = int(text[-1]) + 1
    known, queries = _Grid.of(text, texts), _Grid.of(text[asked], texts)
    ids = queries.spread(torch.full_like(text[asked], batch.query))
    segments = queries.spread(batch.segments[0, asked])
    memory = content.branch(known.mask(batch.mask), known.cells)
    hidden = body.query_stream(ids, queries.mask(batch.mask[:, asked]), memory, segments=segments)
    return hidden.flatten(0, 1)[queries.cells]
