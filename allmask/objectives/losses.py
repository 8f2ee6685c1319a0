"""From batches to losses: logits are made only where there is a target."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from allmask.data import Batch, PairBatch
from allmask.masks import Mask
from allmask.model import Model
from allmask.transformer import Cache, EncoderDecoder, Transformer

Losses = dict[str, tuple[Tensor, int]]  # of each name: the summed cross-entropy, and over how many targets


def losses_of(model: Model | EncoderDecoder, batch: Batch | PairBatch, smoothing: float = 0.0) -> Losses:
    """Summed losses by name: that of the tokens, and "nsp" where segments are related."""
    if isinstance(batch, PairBatch):
        assert isinstance(model, EncoderDecoder)
        return {batch.name: _token_loss(model, _decoded(model, batch), batch.labels, smoothing)}
    assert isinstance(model, Model)
    if batch.query is not None:
        return {batch.name: _token_loss(model, _guessed(model.body, batch), batch.labels, smoothing)}
    if batch.relations is not None:
        return _related(model, batch, smoothing)
    hidden = model.body.at(batch.labels >= 0, batch.ids, batch.mask, batch.segments)
    return {batch.name: _token_loss(model, hidden, batch.labels, smoothing)}


def _token_loss(model: Model | EncoderDecoder, hidden: Tensor, labels: Tensor, smoothing: float) -> tuple[Tensor, int]:
    labels = labels[labels >= 0]
    loss = F.cross_entropy(_full(model.logits(hidden)), labels, reduction="sum", label_smoothing=smoothing)
    return loss, len(labels)


def _full(logits: Tensor) -> Tensor:
    return logits.float() if logits.dtype == torch.bfloat16 else logits


def _related(model: Model, batch: Batch, smoothing: float) -> Losses:
    """The tokens' loss, and that of the question whether B follows A, answered at the first token of a text."""
    assert batch.relations is not None
    guessed, first = batch.labels >= 0, batch.mask.place == 0
    hidden = model.body.at(guessed | first, batch.ids, batch.mask, batch.segments)
    asked = (guessed | first)[0]
    answers = model.head("nsp_head")(model.head("pooler")(hidden[first[0][asked]][:, None]))
    relations = batch.relations[batch.mask.group[first]]
    return {
        batch.name: _token_loss(model, hidden[guessed[0][asked]], batch.labels, smoothing),
        "nsp": (F.cross_entropy(_full(answers), relations, reduction="sum"), len(relations)),
    }


def _decoded(model: EncoderDecoder, batch: PairBatch) -> Tensor:
    """The decoder's hidden states (M, W) where there is a label."""
    memory = model.encode(batch.source_ids, batch.source_mask)
    return model.step(batch.ids, batch.mask, memory, Cache())[0][batch.labels >= 0]


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
        place = torch.arange(len(text), device=text.device) - (counts.cumsum(0) - counts)[text]
        return cls((texts, width), text * width + place)

    def spread(self, values: Tensor, fill: int = 0) -> Tensor:
        return (
            values.new_full((self.shape[0] * self.shape[1],), fill).index_copy(0, self.cells, values).view(self.shape)
        )

    def mask(self, flat: Mask) -> Mask:
        return Mask(self.spread(flat.order[0]), self.spread(flat.group[0], -1), self.spread(flat.place[0]))


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
    hidden = body.peek(ids, queries.mask(batch.mask[:, asked]), memory, segments=segments)
    return hidden.flatten(0, 1)[queries.cells]
