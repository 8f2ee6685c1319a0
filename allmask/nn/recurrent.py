"""What was there before attention was all: LSTMs, with the interface of the Transformers.

    Seq2Seq    an encoder–decoder, with additive attention (arXiv 1409.0473) or without (arXiv 1409.3215)
    Elmo       two language models, one from each end of a text: elmo.py

A recurrence is a mask that nobody chose: a token sees those that were read before it. So these bodies need the order of
a mask, and refuse what no recurrence can keep. A cache is what the latest token left behind.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from allmask.config import Config
from allmask.errors import UsageError
from allmask.kernels.precision import native_bf16
from allmask.mask import Mask, expect_mask
from allmask.nn.cache import Cache
from allmask.nn.dropout import Dropout
from allmask.nn.layers import Embedding, NoEmbedding

State = tuple[Tensor, Tensor]  # (R, W) each: what a recurrence says, and what it keeps to itself


# ---- texts as lines ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Lines:
    """Some tokens of each text, by their order and then their place, as a line of a table: what a recurrence runs over.

    Each text has a line, which may be empty.
    """

    index: Tensor  # (N,) where the tokens stand among all of a batch
    cells: Tensor  # (N,) where they go in the table
    lengths: Tensor  # (D,)

    @classmethod
    def of(cls, mask: Mask, text: Tensor, count: int, chosen: Tensor) -> Lines:
        """`text` (B, T) is the number of the text that a token is of; there are `count` of them."""
        index = chosen.flatten().nonzero()[:, 0]
        for key in (mask.position, mask.order, text):
            index = index[key.flatten()[index].argsort(stable=True)]
        line = text.flatten()[index]
        lengths = line.bincount(minlength=count)
        column = torch.arange(len(index), device=index.device) - (lengths.cumsum(0) - lengths)[line]
        return cls(index, line * max(1, int(lengths.max())) + column, lengths)

    @property
    def width(self) -> int:
        return max(1, int(self.lengths.max()))

    def spread(self, values: Tensor) -> Tensor:
        """Values (B·T, W) as a table (D, n, W), zeros where there is no token."""
        table = values.new_zeros(len(self.lengths) * self.width, values.shape[-1])
        return table.index_copy(0, self.cells, values[self.index]).unflatten(0, (len(self.lengths), self.width))

    def put(self, table: Tensor, values: Tensor) -> Tensor:
        """Values (B·T, W) with those of the table where they belong."""
        return values.index_copy(0, self.index, table.flatten(0, 1)[self.cells].to(values.dtype))


def flipped(x: Tensor, lengths: Tensor) -> Tensor:
    """Each line (D, n, W) from its end to its beginning; what comes after its end stays there."""
    column = torch.arange(x.shape[1], device=x.device)
    turned = torch.where(column < lengths[:, None], lengths[:, None] - 1 - column, column)
    return x.gather(1, turned[..., None].expand_as(x))


def texts_in(mask: Mask) -> tuple[Tensor, int]:
    """(B, T) the number of the text that each token is of, and how many there are."""
    found, text = mask.document.unique(return_inverse=True)
    padded = int(found[0] < 0)
    return (text - padded).clamp(min=0), max(1, len(found) - padded)


def rows_of(mask: Mask) -> tuple[Tensor, int]:
    """The same where each row is a text."""
    first = mask.group.amax(1, keepdim=True)
    if bool((mask.valid & (mask.group != first)).any()):
        raise UsageError("a recurrence remembers one text a row", "give each text a row of its own")
    return torch.arange(len(mask), device=mask.device)[:, None].expand(mask.shape), len(mask)


def readable(mask: Mask, positions: Tensor | None) -> Mask:
    """The mask with tokens where positions say; one that narrows the order is refused."""
    if expect_mask(mask).window is not None or mask.matrix is not None:
        raise UsageError(
            "a recurrence carries along all that it has read, so it keeps no window and no matrix",
            "give a mask that is an order, or take a Transformer",
        )
    return mask if positions is None else replace(mask, position=positions.expand(mask.shape))


def embedding_of(config: Config) -> Embedding:
    scale = config.width**0.5 if config.embedding_scaled else 1.0
    return Embedding(
        config.vocab_size, config.width, NoEmbedding(), NoEmbedding(), nn.Identity(), config.dropout, scale
    )  # fmt: skip


def embedded(embedding: Embedding, ids: Tensor) -> Tensor:
    """(B·T, W)."""
    tokens = ids.flatten()
    return embedding(tokens, tokens, tokens)


# ---- recurrences -------------------------------------------------------------------------------------------


class LSTMLayer(nn.Module):
    """One LSTM layer in one direction."""

    def __init__(self, inputs: int, width: int):
        super().__init__()
        self.lstm = nn.LSTM(inputs, width, batch_first=True)

    def forward(
        self, x: Tensor, lengths: Tensor, state: State | None = None, keep: bool = False
    ) -> tuple[Tensor, State | None]:
        """States (D, n, W) of lines (D, n, inputs), and if they are to `keep` those that lines end with.

        What comes after the end of a line is read too, where that is the fastest way: nothing in it comes from there.
        """
        if not native_bf16(x.device):  # without it torch has no LSTM in bf16 for CPUs
            with torch.autocast(x.device.type, enabled=False):
                return self._read(x.to(self.lstm.all_weights[0][0].dtype), lengths, state, keep)
        return self._read(x, lengths, state, keep)

    def _read(self, x: Tensor, lengths: Tensor, state: State | None, keep: bool) -> tuple[Tensor, State | None]:
        began = None if state is None else (state[0].to(x.dtype)[None], state[1].to(x.dtype)[None])
        if not keep or bool((lengths == x.shape[1]).all()):
            out, (said, kept) = self.lstm(x, began)
            return out, (said[0], kept[0]) if keep else None
        return self._to_the_end(x, lengths, began)

    def _to_the_end(self, x: Tensor, lengths: Tensor, began: State | None) -> tuple[Tensor, State]:
        """An empty line leaves its state as it was."""
        some = lengths.clamp(min=1).cpu()
        packed = pack_padded_sequence(x, some, batch_first=True, enforce_sorted=False)
        out, ended = self.lstm(packed, began)
        before = [torch.zeros_like(part) for part in ended] if began is None else began
        said, kept = (torch.where(lengths[:, None] > 0, a[0], b[0]) for a, b in zip(ended, before, strict=True))
        return pad_packed_sequence(out, batch_first=True, total_length=x.shape[1])[0], (said, kept)


class EncoderLayer(nn.Module):
    """From left to right and, with half of the width each, from right to left."""

    def __init__(self, width: int, both_ways: bool):
        super().__init__()
        self.right = LSTMLayer(width, width // 2 if both_ways else width)
        self.left = LSTMLayer(width, width // 2) if both_ways else None

    def forward(self, x: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        """States (D, n, W), and the last of each way, (D, W)."""
        out, _ = self.right(x, lengths)
        rows, last = torch.arange(len(x), device=x.device), (lengths - 1).clamp(min=0)
        if self.left is None:
            return out, out[rows, last]
        back, _ = self.left(flipped(x, lengths), lengths)
        return torch.cat([out, flipped(back, lengths)], -1), torch.cat([out[rows, last], back[rows, last]], -1)


class Encoder(nn.Module):
    def __init__(self, layers: int, width: int, both_ways: bool, dropout: float):
        super().__init__()
        self.layers = nn.ModuleList(EncoderLayer(width, both_ways) for _ in range(layers))
        self.dropout = Dropout(dropout)

    def forward(self, x: Tensor, lengths: Tensor) -> tuple[Tensor, list[Tensor]]:
        """States (D, n, W) of embedded sources, and the last ones (D, W) of each layer."""
        ends = []
        for layer in self.layers:
            x, end = layer(x, lengths)
            x = self.dropout(x)
            ends.append(end)
        return x, ends


# ---- attention ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Source:
    """What a decoder looks at, kept once for all rows that go on from a text."""

    states: Tensor  # (D, S, W)
    keys: Tensor  # (D, S, A)
    lengths: Tensor  # (D,)
    text: Tensor | None = None  # (R,) which of them each row looks at; None: each at its own

    def select(self, rows: Tensor) -> Source:
        return replace(self, text=rows if self.text is None else self.text[rows])

    def of_each_row(self) -> Source:
        if self.text is None:
            return self
        return Source(self.states[self.text], self.keys[self.text], self.lengths[self.text])


class AdditiveAttention(nn.Module):
    """A score is what a small network says of a query and a state: v · tanh(Q q + K s)."""

    def __init__(self, width: int, inner: int):
        super().__init__()
        self.query = nn.Linear(width, inner)
        self.key = nn.Linear(width, inner, bias=False)
        self.score = nn.Linear(inner, 1, bias=False)
        self.width = width

    def keys_values(self, states: Tensor, lengths: Tensor) -> Source:
        return Source(states, self.key(states), lengths)

    def forward(self, queries: Tensor, source: Source) -> Tensor:
        """The mean (R, T, W) of a source's states by how much each query (R, T, W) wants of each."""
        source = source.of_each_row()
        scores = self.score(torch.tanh(self.query(queries)[:, :, None] + source.keys[:, None]))[..., 0]  # (R, T, S)
        there = torch.arange(scores.shape[-1], device=scores.device) < source.lengths.clamp(min=1)[:, None]
        weights = scores.masked_fill(~there[:, None], -torch.inf).softmax(-1)
        return weights.to(source.states.dtype) @ source.states


class NoAttention(nn.Module):
    """Looks at nothing: what is known of the source is what the decoder began with."""

    width = 0

    def keys_values(self, states: Tensor, lengths: Tensor) -> Source:
        return Source(states[:, :0, :0], states[:, :0, :0], lengths)

    def forward(self, queries: Tensor, source: Source) -> Tensor:
        return queries[..., :0]


# ---- encoder–decoder ---------------------------------------------------------------------------------------


class Bridge(nn.Linear):
    """How a decoder's layer begins, from what the ends of a source say."""

    def __init__(self, width: int):
        super().__init__(width, 2 * width)

    def forward(self, end: Tensor) -> State:
        said, kept = super().forward(end).chunk(2, -1)
        return torch.tanh(said), kept.contiguous()


class Decoder(nn.Module):
    """The first layer asks, all above it and the output hear the answer too (as in arXiv 1609.08144).

    So what was looked at is remembered, and yet all steps of a text are computed together while it learns.
    """

    def __init__(self, layers: int, width: int, attention: AdditiveAttention | NoAttention, dropout: float):
        super().__init__()
        heard = width + attention.width
        self.layers = nn.ModuleList(LSTMLayer(heard if number else width, width) for number in range(layers))
        self.bridges = nn.ModuleList(Bridge(width) for _ in range(layers))
        self.attention = attention
        joined = nn.Sequential(nn.Linear(heard, width), nn.Tanh(), Dropout(dropout))
        self.output = joined if attention.width else nn.Identity()
        self.dropout = Dropout(dropout)

    def begin(self, ends: list[Tensor]) -> list[State]:
        """Each layer goes on from that of the encoder; where there are more of them, from its last."""
        return [bridge(ends[min(number, len(ends) - 1)]) for number, bridge in enumerate(self.bridges)]

    def forward(
        self, x: Tensor, lengths: Tensor, states: list[State], source: Source, keep: bool = False
    ) -> tuple[Tensor, list[Any]]:
        """Hidden states (R, n, W) of embedded targets, and the states that the layers end with."""
        x, ended = self.layers[0](x, lengths, states[0], keep)
        context = self.attention(x, source)
        after = [ended]
        for layer, state in zip(list(self.layers)[1:], states[1:], strict=True):
            x, ended = layer(torch.cat([self.dropout(x), context], -1), lengths, state, keep)
            after.append(ended)
        return self.output(torch.cat([self.dropout(x), context], -1)), after


@dataclass(frozen=True)
class RecurrentCache:
    """What a recurrence remembers: the states of its layers and, of an encoder–decoder, the source."""

    mask: Mask  # (R, 1) of the latest token
    states: list[State]
    source: Source | None = None
    left: bool | None = False  # the text is read from its end; None: of one token, nobody knows

    def extend(self, new: Mask) -> Mask:
        """The mask of the latest token when these have been read; they must come after all before."""
        later = (new.order > self.mask.order) & (new.group == self.mask.group)
        if not bool((later | ~new.valid).all()):
            raise UsageError(
                "cache: a new token is not of the same text or not later than all that was read",
                "append tokens of a higher order than all before, or start again with Cache()",
            )
        return latest_of(self.mask.append(new))

    def select(self, rows: Tensor) -> RecurrentCache:
        """Some of the rows, in any order, repeated or dropped. Their sources are shared, not copied."""
        states = [(said[rows], kept[rows]) for said, kept in self.states]
        return replace(
            self, mask=self.mask[rows], states=states, source=None if self.source is None else self.source.select(rows)
        )


def latest_of(mask: Mask) -> Mask:
    """(R, 1) of each row's token that became known last."""
    order = mask.order.masked_fill(~mask.valid, torch.iinfo(torch.long).min)
    return mask.gather(order.argmax(1, keepdim=True))


class Seq2Seq(nn.Module):
    """Two recurrences over one embedding: the order is that of `EncoderDecoder`, and so are rows, batches and caches.

               你   吃  </s>  <s>  白   鸡
        order   0    0    0     1   2    3

    What is known first in a text, its source, is read by the encoder; the rest, its target, by the decoder.
    """

    recompute = False  # nothing is computed again
    tokenwise = False  # a token is not computed alone: no engine for Transformers fits

    def __init__(self, config: Config):
        super().__init__()
        self.config = config
        self.embedding = embedding_of(config)
        self.encoder = Encoder(config.layers, config.width, config.both_ways, config.dropout)
        attention = AdditiveAttention(config.width, config.ffn_width) if config.source_attention else NoAttention()
        self.decoder = Decoder(config.decoder_layers, config.width, attention, config.dropout)

    def forward(
        self, ids: Tensor, mask: Mask, positions: Tensor | None = None, segments: Tensor | None = None
    ) -> Tensor:
        """Hidden states (B, T, W), zeros at padding."""
        mask = readable(mask, positions)
        return self._read(ids, mask, *texts_in(mask))[0]

    def forward_at(self, where: Tensor, ids: Tensor, mask: Mask, segments: Tensor | None = None) -> Tensor:
        """Hidden states (M, W) where `where` (B, T) is True."""
        return self(ids, mask)[where]

    def _read(
        self, ids: Tensor, mask: Mask, text: Tensor, count: int, keep: bool = False
    ) -> tuple[Tensor, list[State], Source]:
        """Whole texts: hidden states, and what is left behind for tokens to come."""
        x = embedded(self.embedding, ids)
        is_source = mask.first_known
        read = Lines.of(mask, text, count, is_source)
        memory, ends = self.encoder(read.spread(x), read.lengths)
        hidden = read.put(memory, torch.zeros_like(x))
        source, states = self.decoder.attention.keys_values(memory, read.lengths), self.decoder.begin(ends)
        written = Lines.of(mask, text, count, mask.valid & ~is_source)
        if len(written.index):
            out, states = self.decoder(written.spread(x), written.lengths, states, source, keep)
            hidden = written.put(out, hidden)
        return hidden.unflatten(0, ids.shape), states, source

    def step(
        self, ids: Tensor, mask: Mask, cache: Cache | RecurrentCache,
        positions: Tensor | None = None, segments: Tensor | None = None,
    ) -> tuple[Tensor, RecurrentCache]:  # fmt: skip
        """Hidden states of new tokens, and the cache that holds them. The first call has the whole source; with
        `Cache()` it begins, and may have the first of the target. What comes later is of the target."""
        mask = readable(mask, positions)
        if not isinstance(cache, RecurrentCache):
            hidden, states, source = self._read(ids, mask, *rows_of(mask), keep=True)
            return hidden, RecurrentCache(latest_of(mask), states, source)
        latest, lines = cache.extend(mask), Lines.of(mask, *rows_of(mask), mask.valid)
        x = embedded(self.embedding, ids)
        assert cache.source is not None
        out, states = self.decoder(lines.spread(x), lines.lengths, cache.states, cache.source, keep=True)
        hidden = lines.put(out, torch.zeros_like(x)).unflatten(0, ids.shape)
        return hidden, replace(cache, mask=latest, states=states)

    def read(self, ids: Tensor, mask: Mask, segments: Tensor | None = None) -> tuple[Tensor, RecurrentCache]:
        """Sources, and the first of their targets: hidden states (B, T, W) and a cache to branch from."""
        return self.step(ids, mask, Cache())
