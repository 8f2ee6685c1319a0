"""LSTMs, with the interface of the Transformers, to compare with them.

    Seq2Seq    an encoder–decoder, with additive attention (arXiv 1409.0473) or without (arXiv 1409.3215)
    Elmo       two language models, one in each direction (arXiv 1802.05365)

In a recurrent model a token depends on all tokens read before it. So these models use only the order of a mask, and
refuse masks that no recurrence can follow. The cache holds the states after the latest token.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from allmask.config import Config
from allmask.errors import UsageError
from allmask.kernels.precision import native_bf16
from allmask.mask import Mask, expect_mask
from allmask.nn.attention import Table
from allmask.nn.cache import Cache
from allmask.nn.dropout import Dropout
from allmask.nn.layers import Embedding, NoEmbedding

State = tuple[Tensor, Tensor]  # the hidden and the cell state of an LSTM, (R, W) each


# ---- texts as sequences ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Sequences:
    """Some tokens of each text, by order and then position, as rows of a padded table. A text may have none."""

    index: Tensor  # (N,) of the tokens among all of the batch
    lengths: Tensor  # (D,)
    table: Table

    @classmethod
    def of(cls, mask: Mask, text: Tensor, count: int, chosen: Tensor) -> Sequences:
        """The tokens where `chosen` (B, T); `text` (B, T) is the index of a token's text, of `count` texts."""
        index = chosen.flatten().nonzero()[:, 0]
        for key in (mask.position, mask.order, text):
            index = index[key.flatten()[index].argsort(stable=True)]
        row = text.flatten()[index]
        return cls(index, row.bincount(minlength=count), Table.by_row(row, count))

    def spread(self, values: Tensor) -> Tensor:
        """Values (B·T, W) as a table (D, n, W), zeros where there is no token."""
        return self.table.spread(values[self.index])

    def put(self, table: Tensor, values: Tensor) -> Tensor:
        """Return values (B·T, W) with those of these tokens replaced from the table."""
        return values.index_copy(0, self.index, self.table.gather(table).to(values.dtype))


def flipped(x: Tensor, lengths: Tensor) -> Tensor:
    """Reverse each sequence (D, n, W) within its length; padding stays at the end."""
    column = torch.arange(x.shape[1], device=x.device)
    source = torch.where(column < lengths[:, None], lengths[:, None] - 1 - column, column)
    return x.gather(1, source[..., None].expand_as(x))


def texts_in(mask: Mask) -> tuple[Tensor, int]:
    """The index of each token's text, (B, T), and the number of texts."""
    found, text = mask.document.unique(return_inverse=True)
    padded = int(found[0] < 0)
    return (text - padded).clamp(min=0), max(1, len(found) - padded)


def _rows_in(mask: Mask) -> tuple[Tensor, int]:
    """Like `texts_in`, for a cache: each row must be one text."""
    first = mask.group.amax(1, keepdim=True)
    if bool((mask.valid & (mask.group != first)).any()):
        raise UsageError("the cache of a recurrent model has one text per row", "give each text a row of its own")
    return torch.arange(len(mask), device=mask.device)[:, None].expand(mask.shape), len(mask)


def _checked(mask: Mask, positions: Tensor | None) -> Mask:
    """The mask with these positions; refuse a window or a matrix."""
    if expect_mask(mask).window is not None or mask.matrix is not None:
        raise UsageError(
            "a recurrent model carries along all that it has read, so it supports no window and no matrix",
            "use a mask that is an order, or a Transformer",
        )
    return mask if positions is None else replace(mask, position=positions.expand(mask.shape))


@dataclass(frozen=True)
class RecurrentCache:
    """The states of all layers after the latest token and, for an encoder–decoder, the source."""

    mask: Mask  # (R, 1) of the latest token
    states: list[State]
    source: Source | None = None
    backward: bool | None = False  # whether texts are read from right to left; None: unknown after a single token

    def extend(self, new: Mask) -> Mask:
        """Return the mask of the latest of these tokens, which must come after all before."""
        later = (new.order > self.mask.order) & (new.group == self.mask.group)
        if not bool((later | ~new.valid).all()):
            raise UsageError(
                "cache: a new token is of another text or not later than all that was read",
                "append tokens of a higher order than all before, or start again with Cache()",
            )
        return _latest(self.mask.append(new))

    def select(self, rows: Tensor) -> RecurrentCache:
        """Select rows, in any order, repeated or dropped. Their sources are shared, not copied."""
        states = [(hidden[rows], cell[rows]) for hidden, cell in self.states]
        source = None if self.source is None else self.source.select(rows)
        return replace(self, mask=self.mask[rows], states=states, source=source)


def _latest(mask: Mask) -> Mask:
    """(R, 1), of the token of each row that became known last."""
    order = mask.order.masked_fill(~mask.valid, torch.iinfo(torch.long).min)
    return mask.gather(order.argmax(1, keepdim=True))


# ---- layers --------------------------------------------------------------------------------------------------


class LSTMLayer(nn.Module):
    """One LSTM layer in one direction."""

    def __init__(self, inputs: int, width: int):
        super().__init__()
        self.lstm = nn.LSTM(inputs, width, batch_first=True)

    def forward(
        self, x: Tensor, lengths: Tensor, state: State | None = None, keep: bool = False
    ) -> tuple[Tensor, State | None]:
        """Return the states (D, n, W) of sequences (D, n, inputs) and, if `keep`, the state at the end of each.

        Without `keep`, padding is computed too, which is faster and changes nothing before it.
        """
        if not native_bf16(x.device):  # torch has no emulated bf16 LSTM for CPUs
            with torch.autocast(x.device.type, enabled=False):
                return self._run(x.to(self.lstm.all_weights[0][0].dtype), lengths, state, keep)
        return self._run(x, lengths, state, keep)

    def _run(self, x: Tensor, lengths: Tensor, state: State | None, keep: bool) -> tuple[Tensor, State | None]:
        start = None if state is None else (state[0].to(x.dtype)[None], state[1].to(x.dtype)[None])
        if not keep or bool((lengths == x.shape[1]).all()):
            out, (hidden, cell) = self.lstm(x, start)
            return out, (hidden[0], cell[0]) if keep else None
        packed = pack_padded_sequence(x, lengths.clamp(min=1).cpu(), batch_first=True, enforce_sorted=False)
        out, end = self.lstm(packed, start)
        before = [torch.zeros_like(part) for part in end] if start is None else start  # of an empty sequence
        hidden, cell = (torch.where(lengths[:, None] > 0, a[0], b[0]) for a, b in zip(end, before, strict=True))
        return pad_packed_sequence(out, batch_first=True, total_length=x.shape[1])[0], (hidden, cell)


class EncoderLayer(nn.Module):
    """An LSTM from left to right or, if `both_ways`, one in each direction with half of the width."""

    def __init__(self, width: int, both_ways: bool):
        super().__init__()
        self.right = LSTMLayer(width, width // 2 if both_ways else width)
        self.left = LSTMLayer(width, width // 2) if both_ways else None

    def forward(self, x: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        """Return the states (D, n, W), and the last state of each direction, (D, W)."""
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
        """Return the states (D, n, W) of embedded sources, and the last ones (D, W) of each layer."""
        ends = []
        for layer in self.layers:
            x, end = layer(x, lengths)
            x = self.dropout(x)
            ends.append(end)
        return x, ends


@dataclass(frozen=True)
class Source:
    """The encoder states that a decoder reads, stored once for all rows that continue a text."""

    states: Tensor  # (D, S, W)
    keys: Tensor  # (D, S, A)
    lengths: Tensor  # (D,)
    text: Tensor | None = None  # (R,) the index of each row's source; None: each row has its own

    def select(self, rows: Tensor) -> Source:
        return replace(self, text=rows if self.text is None else self.text[rows])


class AdditiveAttention(nn.Module):
    """Attention whose scores come from a small network: v · tanh(Q query + K state)."""

    def __init__(self, width: int, inner: int):
        super().__init__()
        self.query = nn.Linear(width, inner)
        self.key = nn.Linear(width, inner, bias=False)
        self.score = nn.Linear(inner, 1, bias=False)
        self.width = width

    def keys_values(self, states: Tensor, lengths: Tensor) -> Source:
        return Source(states, self.key(states), lengths)

    def forward(self, queries: Tensor, source: Source) -> Tensor:
        """Return the weighted mean (R, T, W) of the source's states for each query (R, T, W)."""
        states, keys, lengths = source.states, source.keys, source.lengths
        if source.text is not None:
            states, keys, lengths = states[source.text], keys[source.text], lengths[source.text]
        scores = self.score(torch.tanh(self.query(queries)[:, :, None] + keys[:, None]))[..., 0]  # (R, T, S)
        valid = torch.arange(scores.shape[-1], device=scores.device) < lengths.clamp(min=1)[:, None]
        weights = scores.masked_fill(~valid[:, None], -torch.inf).softmax(-1)
        return weights.to(states.dtype) @ states


class NoAttention(nn.Module):
    """No attention: the decoder knows the source only from its initial states."""

    width = 0

    def keys_values(self, states: Tensor, lengths: Tensor) -> Source:
        return Source(states[:, :0, :0], states[:, :0, :0], lengths)

    def forward(self, queries: Tensor, source: Source) -> Tensor:
        return queries[..., :0]


class Bridge(nn.Linear):
    """The initial state of a decoder layer, from the last states of an encoder layer."""

    def __init__(self, width: int):
        super().__init__(width, 2 * width)

    def forward(self, end: Tensor) -> State:
        hidden, cell = super().forward(end).chunk(2, -1)
        return torch.tanh(hidden), cell.contiguous()


class Decoder(nn.Module):
    """The first layer queries the source; the layers above and the output read the result (as in arXiv 1609.08144).

    So the upper layers remember what was read, and in training all steps of a text are still computed in one call.
    """

    def __init__(self, layers: int, width: int, attention: AdditiveAttention | NoAttention, dropout: float):
        super().__init__()
        inputs = width + attention.width
        self.layers = nn.ModuleList(LSTMLayer(inputs if number else width, width) for number in range(layers))
        self.bridges = nn.ModuleList(Bridge(width) for _ in range(layers))
        self.attention = attention
        joined = nn.Sequential(nn.Linear(inputs, width), nn.Tanh(), Dropout(dropout))
        self.output = joined if attention.width else nn.Identity()
        self.dropout = Dropout(dropout)

    def begin(self, ends: list[Tensor]) -> list[State]:
        """The initial state of each layer, from the encoder layer of the same number, or from its last layer."""
        return [bridge(ends[min(number, len(ends) - 1)]) for number, bridge in enumerate(self.bridges)]

    def forward(
        self, x: Tensor, lengths: Tensor, states: list[State], source: Source, keep: bool = False
    ) -> tuple[Tensor, list[Any]]:
        """Return the hidden states (R, n, W) of embedded targets, and the states of the layers at the end."""
        x, end = self.layers[0](x, lengths, states[0], keep)
        context = self.attention(x, source)
        ends = [end]
        for layer, state in zip(list(self.layers)[1:], states[1:], strict=True):
            x, end = layer(torch.cat([self.dropout(x), context], -1), lengths, state, keep)
            ends.append(end)
        return self.output(torch.cat([self.dropout(x), context], -1)), ends


class Recurrent(nn.Module):
    """What all recurrent bodies share: an embedding of tokens, and methods that follow from `forward` and `step`."""

    recompute = False  # activation checkpointing is not supported
    tokenwise = False  # tokens depend on each other: inference engines for Transformers do not apply
    step: Callable[..., tuple[Tensor, RecurrentCache]]

    def __init__(self, config: Config):
        super().__init__()
        self.config = config
        scale, none = config.width**0.5 if config.embedding_scaled else 1.0, NoEmbedding()
        self.embedding = Embedding(config.vocab_size, config.width, none, none, nn.Identity(), config.dropout, scale)

    def embed(self, ids: Tensor) -> Tensor:
        """(B·T, W)"""
        tokens = ids.flatten()
        return self.embedding(tokens, tokens, tokens)

    def forward_at(self, where: Tensor, ids: Tensor, mask: Mask, segments: Tensor | None = None) -> Tensor:
        """Return the hidden states (M, W) where `where` (B, T) is True."""
        return self(ids, mask)[where]

    def read(self, ids: Tensor, mask: Mask, segments: Tensor | None = None) -> tuple[Tensor, RecurrentCache]:
        """Return the hidden states (B, T, W) of texts, which `step` can continue, and their cache."""
        return self.step(ids, mask, Cache())


# ---- encoder–decoder ---------------------------------------------------------------------------------------


class Seq2Seq(Recurrent):
    """A recurrent encoder–decoder with one embedding. Order, rows, batches and caches are those of `EncoderDecoder`:

               你   吃  </s>  <s>  白   鸡
        order   0    0    0     1   2    3

    The encoder reads the tokens of the lowest order, the source; the decoder reads the others, the target.
    """

    def __init__(self, config: Config):
        super().__init__(config)
        self.encoder = Encoder(config.layers, config.width, config.both_ways, config.dropout)
        attention = AdditiveAttention(config.width, config.ffn_width) if config.source_attention else NoAttention()
        self.decoder = Decoder(config.decoder_layers, config.width, attention, config.dropout)

    def forward(
        self, ids: Tensor, mask: Mask, positions: Tensor | None = None, segments: Tensor | None = None
    ) -> Tensor:
        """Return hidden states (B, T, W), zeros at padding."""
        mask = _checked(mask, positions)
        return self._read(ids, mask, *texts_in(mask))[0]

    def _read(
        self, ids: Tensor, mask: Mask, text: Tensor, count: int, keep: bool = False
    ) -> tuple[Tensor, list[State], Source]:
        """Read whole texts; return hidden states, the states of the decoder at their end, and the sources."""
        x = self.embed(ids)
        is_source = mask.first_known
        sources = Sequences.of(mask, text, count, is_source)
        memory, ends = self.encoder(sources.spread(x), sources.lengths)
        hidden = sources.put(memory, torch.zeros_like(x))
        source, states = self.decoder.attention.keys_values(memory, sources.lengths), self.decoder.begin(ends)
        targets = Sequences.of(mask, text, count, mask.valid & ~is_source)
        if len(targets.index):
            out, states = self.decoder(targets.spread(x), targets.lengths, states, source, keep)
            hidden = targets.put(out, hidden)
        return hidden.unflatten(0, ids.shape), states, source

    def step(
        self, ids: Tensor, mask: Mask, cache: Cache | RecurrentCache,
        positions: Tensor | None = None, segments: Tensor | None = None,
    ) -> tuple[Tensor, RecurrentCache]:  # fmt: skip
        """Return the hidden states of new tokens, and the extended cache.

        The first call, with `Cache()`, has the whole source and may have the first tokens of the target; later calls
        have only tokens of the target.
        """
        mask = _checked(mask, positions)
        if not isinstance(cache, RecurrentCache):
            hidden, states, source = self._read(ids, mask, *_rows_in(mask), keep=True)
            return hidden, RecurrentCache(_latest(mask), states, source)
        latest, sequences = cache.extend(mask), Sequences.of(mask, *_rows_in(mask), mask.valid)
        x = self.embed(ids)
        assert cache.source is not None
        out, states = self.decoder(sequences.spread(x), sequences.lengths, cache.states, cache.source, keep=True)
        hidden = sequences.put(out, torch.zeros_like(x)).unflatten(0, ids.shape)
        return hidden, replace(cache, mask=latest, states=states)


# ---- ELMo --------------------------------------------------------------------------------------------------


class BidirectionalLayer(nn.Module):
    """One layer of each of two language models: from left to right, and from right to left."""

    def __init__(self, width: int):
        super().__init__()
        self.right = LSTMLayer(width, width)
        self.left = LSTMLayer(width, width)

    def forward(
        self, x: Tensor, lengths: Tensor, backward: bool, state: State | None = None, keep: bool = False
    ) -> tuple[Tensor, State | None]:
        """Run the layer of one direction; x is in that direction's reading order."""
        return (self.left if backward else self.right)(x, lengths, state, keep)


class Elmo(Recurrent):
    """Two language models, one in each direction, that share embedding and output.

    The mask selects which of them reads. Under `Mask.causal` hidden states are those of the last layer from left to
    right, under `Mask.reverse` from right to left, (B, T, W): each is trained to predict the next token. Under
    `Mask.bidirectional` both read, and hidden states are features for other models, (B, T, 2W·(layers + 1)): the
    embedding, twice, and each layer in both directions, for a `ScalarMix`. A text of one token is read in both.
    """

    def __init__(self, config: Config):
        super().__init__(config)
        self.layers = nn.ModuleList(BidirectionalLayer(config.width) for _ in range(config.layers))
        self.dropout = Dropout(config.dropout)

    def forward(
        self, ids: Tensor, mask: Mask, positions: Tensor | None = None, segments: Tensor | None = None
    ) -> Tensor:
        """Return hidden states (B, T, W) or (B, T, 2W·(layers + 1)), zeros at padding."""
        mask = _checked(mask, positions)
        sequences, x = Sequences.of(mask, *texts_in(mask), mask.valid), self.embed(ids)
        table, lengths, direction = sequences.spread(x), sequences.lengths, _direction(mask, sequences)
        if direction != "both":
            out = self._run(table, lengths, direction == "backward")[0][-1]
        else:
            forwards, _ = self._run(table, lengths, backward=False)
            backwards, _ = self._run(flipped(table, lengths), lengths, backward=True)
            pairs = zip(forwards, [flipped(out, lengths) for out in backwards], strict=True)
            out = torch.cat([table, table, *(side for pair in pairs for side in pair)], -1)
        return sequences.put(out, x.new_zeros(len(x), out.shape[-1])).unflatten(0, ids.shape)

    def _run(
        self, x: Tensor, lengths: Tensor, backward: bool, states: list[State] | None = None, keep: bool = False
    ) -> tuple[list[Tensor], list[Any]]:
        """Return the output of each layer, and the states at the end; layers after the first are residual."""
        outs: list[Tensor] = []
        ends = []
        for number, layer in enumerate(self.layers):
            out, end = layer(self.dropout(x) if number else x, lengths, backward, states and states[number], keep)
            x = out + x if number else out
            outs.append(x)
            ends.append(end)
        return [*outs[:-1], self.dropout(outs[-1])], ends

    def step(
        self, ids: Tensor, mask: Mask, cache: Cache | RecurrentCache,
        positions: Tensor | None = None, segments: Tensor | None = None,
    ) -> tuple[Tensor, RecurrentCache]:  # fmt: skip
        """Return the hidden states (B, T, W) of new tokens in one direction, and the extended cache."""
        mask = _checked(mask, positions)
        sequences, x = Sequences.of(mask, *_rows_in(mask), mask.valid), self.embed(ids)
        if isinstance(cache, RecurrentCache):
            latest, backward, states = cache.extend(mask), _is_backward(mask, sequences, cache), cache.states
        else:
            latest, backward, states = _latest(mask), _is_backward(mask, sequences), None
        outs, ends = self._run(sequences.spread(x), sequences.lengths, bool(backward), states, keep=True)
        hidden = sequences.put(outs[-1], torch.zeros_like(x)).unflatten(0, ids.shape)
        return hidden, RecurrentCache(latest, ends, backward=backward)


def _direction(mask: Mask, sequences: Sequences) -> str:
    """The direction in which the tokens of a text become known: "forward", "backward" or "both"."""
    order, position = (part.flatten()[sequences.index].diff() for part in (mask.order, mask.position))
    cells = sequences.table.cells
    assert cells is not None
    inside = (cells.diff() == 1) & (cells[1:] % sequences.table.width != 0)  # both tokens are of one text
    later, onwards = order[inside] > 0, position[inside] > 0
    if not bool(later.any()):
        return "both"
    if bool(later.all()) and bool((onwards == onwards[0]).all()):
        return "forward" if bool(onwards[0]) else "backward"
    raise UsageError(
        "two language models read a text from left to right, from right to left, or both ways",
        "use Mask.causal, Mask.reverse or Mask.bidirectional, one for all texts; for other orders use a Transformer",
    )


def _is_backward(mask: Mask, sequences: Sequences, cache: RecurrentCache | None = None) -> bool | None:
    """Whether texts that may be continued are read from right to left; None if they have a single token so far."""
    direction = _direction(mask, sequences)
    if direction == "both" and sequences.table.width > 1:
        raise UsageError("nothing can follow a text that is read both ways", "read it under Mask.causal")
    if cache is None:
        return None if direction == "both" else direction == "backward"
    turned = cache.backward is None and bool((mask.position < cache.mask.position)[mask.valid].any())
    if turned or (direction != "both" and (direction == "backward") != bool(cache.backward)):
        raise UsageError("cache: the new tokens are read in the other direction", "start again with Cache()")
    return bool(cache.backward)


class ScalarMix(nn.Module):
    """The mean of all layers, weighted by learned weights, times a learned gain: the input of a task head."""

    def __init__(self, layers: int):
        super().__init__()
        self.layers_bias = nn.Parameter(torch.zeros(layers))  # at first, all layers have equal weight
        self.gain = nn.Parameter(torch.ones(1))

    def forward(self, features: Tensor) -> Tensor:
        """(…, 2W·layers) -> (…, 2W)"""
        weights = self.layers_bias.softmax(0).to(features.dtype)
        return self.gain * (weights @ features.unflatten(-1, (len(weights), -1)))
