"""Long texts in segments with memory: positions continue, and earlier tokens stay readable (Transformer-XL,
arXiv 1901.02860).

In terms of masks, a memory is a cache whose tokens all have a lower order than the new ones:

    cache = Cache()
    for ids in segments:
        mask = following(cache, Mask.permutation(rank))            # or any other mask
        hidden, cache = model.body.step(ids, mask, cache)
        cache = recent(cache, 384)                                 # the length of the memory
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from allmask.errors import UsageError
from allmask.mask import Mask
from allmask.model import Model
from allmask.nn.attention import KeyValue
from allmask.nn.cache import Cache


def following(cache: Cache, mask: Mask) -> Mask:
    """Return the mask of the next segment, with a higher order and later positions than everything in the cache."""
    if cache.mask is None:
        return mask
    known = cache.mask.valid
    order, position = (
        x.masked_fill(~known, -1).amax(1, keepdim=True) + 1 for x in (cache.mask.order, cache.mask.position)
    )
    return replace(mask, order=mask.order + order - mask.order.min(), position=mask.position + position)


def recent(cache: Cache, count: int) -> Cache:
    """Return the cache of the last `count` tokens, detached from the graph."""
    if count < 1 or cache.mask is None:
        return Cache()
    layers = tuple(KeyValue(*(x[:, -count:].detach() for x in layer)) for layer in cache.layers)
    return Cache(cache.mask[:, -count:], layers, None if cache.segments is None else cache.segments[:, -count:])


@torch.no_grad()
def surprisals(model: Model, ids: Tensor, length: int, memory: int = 0, query: int | None = None) -> Tensor:
    """Return the surprisal, -log p, of each token of a text (N,) except the first: (N - 1,), by a two-stream model.

    The text is read from left to right in segments of `length` tokens. Each token is predicted from those before it in
    its segment and the last `memory` tokens of earlier segments. `query` is the token put at the predicted position,
    usually [MASK], for a model without a learned query vector.
    """
    if ids.ndim != 1 or len(ids) < 2 or length < 1:
        raise UsageError(f"surprisals: ids are {tuple(ids.shape)} and length is {length}; expected (N,) and at least 1")
    span = len(ids) if memory else min(length, len(ids))
    if model.config.max_length < span:
        what = "a memory of a text" if memory else "segments"
        raise UsageError(f"{what} of {span} tokens: this model has {model.config.max_length} positions")
    if query is None and model.body.embedding.question is None:
        raise UsageError("surprisals: this model has no learned query vector", "pass query=, the id of [MASK]")
    cache, found = Cache(), []
    for row in ids[None].split(length, dim=1):
        mask = following(cache, Mask.causal(torch.ones_like(row, dtype=torch.bool)))
        _, cache = model.body.step(row, mask, cache)
        hidden = model.body.query_stream(torch.full_like(row, query or 0), mask, cache)
        log_probability = model.logits(hidden).float().log_softmax(-1)
        found.append(-log_probability.gather(-1, row[..., None])[0, :, 0])
        cache = recent(cache, memory)
    return torch.cat(found)[1:]


def perplexity(model: Model, ids: Tensor, length: int, memory: int = 0, query: int | None = None) -> float:
    """Return the perplexity of a text; the arguments are those of `surprisals`."""
    return math.exp(float(surprisals(model, ids, length, memory, query).mean()))
