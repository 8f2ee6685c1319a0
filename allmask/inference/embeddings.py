"""Sentence vectors. Texts are sorted by length and packed into rows without padding."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from allmask.data import rows_by_length
from allmask.errors import UsageError
from allmask.mask import Mask
from allmask.model import Model
from allmask.nn.transformer import Transformer
from allmask.text import Encoded, truncate_tokens

log = logging.getLogger("allmask")

BATCH_TOKENS = 4096  # measured: larger is faster until the activations no longer fit into the CPU's cache


def embed(
    model: Model, texts: Sequence[str], pool: str = "mean", normalize: bool = False,
    batch_tokens: int = BATCH_TOKENS, progress: Callable[[int], None] | None = None,
) -> Tensor:  # fmt: skip
    """Return a vector for each text, (n, W) in fp32: the mean of its hidden states, or the first one (`pool="cls"`).

    Texts longer than the model's positions are truncated. `progress` is called with the number of texts done.
    """
    if isinstance(texts, str):
        raise UsageError("embed takes a list of texts, not one", 'pass ["…"]')
    if model.tokenizer is None:
        raise UsageError("this model has no tokenizer", "pass ids to embed_ids, or load a folder with one")
    encoded = model.tokenizer.encode_batch(texts)
    limit = model.config.max_positions
    for number, text in enumerate(encoded):
        if len(text) > limit:
            log.warning("text %d has %d tokens; only the first %d are read", number, len(text), limit)
    return embed_ids(model, [fit(text, limit) for text in encoded], pool, normalize, batch_tokens, progress)


def embed_ids(
    model: Model, ids: Sequence[Sequence[int]], pool: str = "mean", normalize: bool = False,
    batch_tokens: int = BATCH_TOKENS, progress: Callable[[int], None] | None = None,
) -> Tensor:  # fmt: skip
    """Like `embed`, for texts given as token ids. The vector of an empty text is zeros."""
    if pool not in POOLS:
        raise UsageError(f"pool is {pool!r}; expected one of {', '.join(POOLS)}")
    device = model.device
    vectors = torch.zeros(len(ids), model.config.features, device=device)
    done = sum(len(text) == 0 for text in ids)
    with torch.inference_mode():
        for numbers in rows_by_length([len(text) for text in ids], batch_tokens):
            vectors[numbers] = _embed_row(model, [ids[number] for number in numbers], POOLS[pool], device)
            done += len(numbers)
            if progress is not None:
                progress(done)
        return F.normalize(vectors, dim=-1) if normalize else vectors


def _embed_row(model: Model, texts: list[Sequence[int]], pool: Callable, device: torch.device) -> Tensor:
    flat = torch.tensor([id for text in texts for id in text], device=device)
    lengths = np.array([len(text) for text in texts])
    hidden = model.body.forward_texts(flat, lengths) if _is_allowed(model, flat, lengths) else None
    if hidden is None:
        document = torch.arange(len(texts), device=device).repeat_interleave(torch.tensor(lengths, device=device))[None]
        mask = Mask.packed(model.own_mask(torch.ones_like(flat[None], dtype=torch.bool)), document)
        hidden = model(flat[None], mask).hidden[0]
    return pool(hidden, torch.from_numpy(lengths).to(device))


def _is_allowed(model: Model, flat: Tensor, lengths: np.ndarray) -> bool:
    """Whether the body is a Transformer that knows these tokens and has positions for them."""
    if not isinstance(model.body, Transformer) or lengths.max() > model.config.max_length:
        return False
    least, most = torch.aminmax(flat)
    return int(least) >= 0 and int(most) < model.config.vocab_size


def _mean(hidden: Tensor, lengths: Tensor) -> Tensor:
    document = torch.arange(len(lengths), device=lengths.device).repeat_interleave(lengths)
    sums = hidden.new_zeros(len(lengths), hidden.shape[-1], dtype=torch.float32)
    return sums.index_add_(0, document, hidden.float()) / lengths[:, None]


def _first(hidden: Tensor, lengths: Tensor) -> Tensor:
    return hidden[lengths.cumsum(0) - lengths].float()


POOLS = {"mean": _mean, "cls": _first}


def fit(text: Encoded, limit: int) -> list[int]:
    """Truncate a text to `limit` ids; its special tokens are kept."""
    if len(text) <= limit:
        return text.ids
    special = text.raw.special_tokens_mask
    before, after = special.index(0), special[::-1].index(0)
    kept = truncate_tokens(text.ids[before : len(text) - after], limit - before - after, "head")
    return [*text.ids[:before], *kept, *text.ids[len(text) - after :]]
