"""The cache of a fast writer: texts, which are read once, and rows that continue them.

The keys and values of a row's own tokens stay in the slot where they were written. Its path lists that slot for each
of its tokens, so reordering beams copies a few integers and no keys or values.

    time        0  1  2
    row 0 path  0  0  1      beams 0 and 1 both continue beam 0 at time 1
    row 1 path  0  0  0

Shapes: L layers, S texts of K tokens (K padded), R rows of T tokens of their own, H heads, D width of a head.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from allmask.kernels.int8 import KEYS
from allmask.nn.beam_cache import BeamKeyValue, BeamLayout

CHUNK = 32  # tokens by which the buffer of rows grows
LARGEST = 1 << 26  # numbers in a buffer that has room for all tokens at once


@dataclass(frozen=True)
class Texts:
    """Keys and values of texts, contiguous per head in the layout of the product they are used in."""

    keys: Tensor  # (L, S, H, D, K)
    values: Tensor  # (L, S, H, K, D)
    lengths: Tensor  # (S,) int32
    padding: Tensor | None  # (S, 1, 1, K), True where there is no token; None without padding

    @classmethod
    def of(cls, layers: list[BeamKeyValue], lengths: Tensor, dtype: torch.dtype) -> Texts:
        space = -layers[0].text.keys.shape[2] % KEYS
        keys = torch.stack([F.pad(layer.text.keys.transpose(2, 3).to(dtype), (0, space)) for layer in layers])
        values = torch.stack([F.pad(layer.text.values.to(dtype), (0, 0, 0, space)) for layer in layers])
        return cls.padded(keys, values, lengths)

    @classmethod
    def padded(cls, keys: Tensor, values: Tensor, lengths: Tensor) -> Texts:
        padding = torch.arange(keys.shape[-1]) >= lengths[:, None]
        return cls(keys, values, lengths.int(), padding[:, None, None] if bool(padding.any()) else None)

    def keep(self, texts: Tensor) -> Texts:
        padding = None if self.padding is None else self.padding[texts]
        return Texts(self.keys[:, texts], self.values[:, texts], self.lengths[texts], padding)


@dataclass
class Own:
    """A buffer for the keys and values of the rows' own tokens, (L, 2, time, slots, W), and how many times are used."""

    buffer: Tensor
    filled: int = 0

    def with_room(self, time: int, rows: int) -> Own:
        """This buffer if `time` is still unused and the rows fit; otherwise a copy up to `time`, larger if necessary.

        So the two continuations of a state that is continued twice do not share tokens.
        """
        layers, two, room, slots, width = self.buffer.shape
        if self.filled == time and time < room and rows <= slots:
            return self
        room, rows = room if time < room else room + CHUNK, max(rows, slots)
        copy = self.buffer.new_zeros(layers, two, room, rows, width)
        copy[:, :, :time, :slots] = self.buffer[:, :, :time]
        return Own(copy, time)


@dataclass(frozen=True)
class Rows:
    """The state of R rows."""

    texts: Texts
    fan: BeamLayout
    own: Own
    path: Tensor  # (R, T) int32, the slot of each token
    position: Tensor  # (R,) of the newest token
    straight: bool = True  # rows were never reordered: slot r is row r

    @classmethod
    def begin(cls, texts: Texts, position: Tensor, dtype: torch.dtype) -> Rows:
        layers, count, heads, width, _ = texts.keys.shape
        own = Own(torch.zeros(layers, 2, CHUNK, count, heads * width, dtype=dtype))
        return cls(
            texts, BeamLayout.of(torch.arange(count), count), own, torch.zeros(count, 0, dtype=torch.int32), position
        )

    @property
    def time(self) -> int:
        """The index of the newest token among those that the rows wrote."""
        return self.path.shape[1] - 1

    def select(self, rows: Tensor) -> Rows:
        fan, kept = self.fan, None
        if not torch.equal(fan.owner[rows], fan.owner):
            fan, kept = fan.select(rows)
        texts = self.texts if kept is None else self.texts.keep(kept)
        return replace(self, texts=texts, fan=fan, path=self.path[rows], position=self.position[rows], straight=False)

    def longer(self) -> Rows:
        """Return the state with room for one more token per row, at `time`."""
        count, time = self.path.shape
        own = self.own.with_room(time, count)
        own.filled = time + 1
        slots = torch.arange(count, dtype=torch.int32)[:, None]
        return replace(self, own=own, path=torch.cat([self.path, slots], dim=1), position=self.position + 1)

    def with_room(self, times: int, beams: int = 1) -> Rows | None:
        """Return a copy with room for more tokens and for beams of each row, to be written in C; None if very large."""
        layers, two, _, _, width = self.own.buffer.shape
        count, time = self.path.shape
        if layers * two * (time + times) * count * beams * width > LARGEST:
            return None
        own = Own(self.own.buffer.new_empty(layers, two, time + times, count * beams, width), time)
        own.buffer[:, :, :time, :count] = self.own.buffer[:, :, :time, :count]
        path = torch.zeros(count, time + times, dtype=torch.int32)
        path[:, :time] = self.path
        return replace(self, own=own, path=path)

    def written(self, layer: int) -> tuple[Tensor, Tensor]:
        """The keys and values (R, T, W) of the rows' own tokens."""
        count, times = self.path.shape
        buffer = self.own.buffer[layer, :, :times]
        if self.straight:
            keys, values = buffer[:, :, :count].transpose(1, 2).unbind()
        else:
            keys, values = buffer[:, torch.arange(times), self.path.long()].unbind()
        return keys, values
