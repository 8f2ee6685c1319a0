"""Losses of a batch, for tokens and for tasks; logits are computed only at positions with a target."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from allmask.data import Asked, Batch
from allmask.mask import Mask
from allmask.model import Model
from allmask.nn.attention import Table
from allmask.nn.cache import Cache
from allmask.nn.crf import CRF
from allmask.nn.heads import grouped_log_softmax, pool_answers
from allmask.nn.transformer import Transformer

Losses = dict[str, tuple[Tensor, int]]  # by name: the weighted sum of the loss, and the number of targets


def losses_of(model: Model, batch: Batch, smoothing: float = 0.0) -> Losses:
    """The losses of a batch by name: of its tokens, its task and "nsp", and those of the row in `batch.also`."""
    if batch.query is not None:
        return {batch.name: _token_loss(model, _query_states(model.body, batch), batch.labels, smoothing)}
    losses = _losses_of_row(model, batch, smoothing)
    return losses if batch.also is None else {**losses, **losses_of(model, batch.also, smoothing)}


def _losses_of_row(model: Model, batch: Batch, smoothing: float) -> Losses:
    """All losses of a row, from one forward pass."""
    if batch.hidden is not None and batch.asked is not None:
        return {batch.asked.name: _task_loss(model, batch.hidden, batch.asked, smoothing)}
    predicted, first = batch.labels >= 0, batch.mask.position == 0
    wanted = predicted if batch.relations is None else predicted | first
    wanted = wanted if batch.asked is None else wanted | batch.asked.where
    hidden = model.body.forward_at(wanted, batch.ids, batch.mask, batch.segments)

    def at(where: Tensor) -> Tensor:
        return hidden if where is wanted else hidden[where[wanted]]

    losses: Losses = {}
    if batch.asked is not None:
        losses[batch.asked.name] = _task_loss(model, at(batch.asked.where), batch.asked, smoothing)
    if batch.asked is None or bool(predicted.any()):
        loss, count = _token_loss(model, at(predicted), batch.labels, smoothing)
        losses[batch.name] = loss * batch.weight, count
    if batch.relations is not None:
        logits = _fp32(model.head("nsp_head")(model.head("pooler")(at(first))))
        relations = batch.relations[batch.mask.group[first]]
        losses["nsp"] = F.cross_entropy(logits, relations, reduction="sum"), len(relations)
    return losses


def _token_loss(model: Model, hidden: Tensor, labels: Tensor, smoothing: float) -> tuple[Tensor, int]:
    labels = labels[labels >= 0]
    return model.token_loss(hidden, labels, smoothing), len(labels)


def _fp32(logits: Tensor) -> Tensor:
    return logits.float() if logits.dtype == torch.bfloat16 else logits


def _task_loss(model: Model, hidden: Tensor, asked: Asked, smoothing: float) -> tuple[Tensor, int]:
    assert model.labels is not None
    answers = _fp32(model.answers(hidden))
    if model.labels.kind == "chain":  # one CRF loss per text, whose words are neighbours in the row
        crf = model.head("task_head").get_submodule("chain")
        assert isinstance(crf, CRF) and asked.questions is not None
        lengths = torch.unique_consecutive(asked.questions, return_counts=True)[1]
        return crf.loss(answers, asked.gold, lengths), asked.count
    answers = answers if asked.texts is None else pool_answers(answers, asked.texts, asked.pool)
    loss = answer_loss(model.labels.kind, answers, asked.gold, asked.weights, smoothing, asked.questions)
    return loss, asked.count


def answer_loss(
    kind: str, answers: Tensor, gold: Tensor, weights: Tensor | None = None, smoothing: float = 0.0,
    questions: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """The summed loss of scores (texts, labels) for a kind of labels, see `Labels`; `Asked` explains the arguments.

    Label smoothing applies to single labels, tags and choices.
    """
    if kind == "choice":  # cross-entropy over the choices of each question, of any number
        assert questions is not None
        log_probability = grouped_log_softmax(answers[:, 0], questions)
        loss = -log_probability[gold].sum()
        if not smoothing:
            return loss
        choices = questions.bincount(minlength=len(gold))
        return (1 - smoothing) * loss - smoothing * (log_probability / choices[questions]).sum()
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


# ---- two streams -------------------------------------------------------------------------------------------


def _query_states(body: Transformer, batch: Batch) -> Tensor:
    """The query stream's hidden states (M, W) where there is a label; it reads the cache of the content stream.

    The content stream reads the flat row. The queries of each text are then a row of their own, which reads its text.
    """
    assert batch.query is not None
    _, content = body.step(batch.ids, batch.mask, Cache(), segments=batch.segments)
    predicted, group = batch.labels[0] >= 0, batch.mask.group[0]
    text = torch.cat([group.new_zeros(1), (group[1:] != group[:-1]).long().cumsum(0)])
    texts = int(text[-1]) + 1
    known, queries = Table.by_row(text, texts), Table.by_row(text[predicted], texts)
    assert known.cells is not None
    ids = queries.spread(torch.full_like(text[predicted], batch.query))
    segments = queries.spread(batch.segments[0, predicted])
    memory = content.branch(_spread(known, batch.mask), known.cells)
    hidden = body.query_stream(ids, _spread(queries, batch.mask[:, predicted]), memory, segments=segments)
    return queries.gather(hidden)


def _spread(table: Table, flat: Mask) -> Mask:
    """The mask of a flat row as a table with a row for each text; the rest of it is padding."""
    order, shifted_group, position = (table.spread(x[0]) for x in (flat.order, flat.group + 1, flat.position))
    return Mask(order, shifted_group - 1, position)
