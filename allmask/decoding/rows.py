"""What a fast writer remembers: texts, read once, and the rows that continue them, of which nothing is ever moved.

A row's own keys and values stay in the slot where they were written. Which slot that was, at each time, is its path: to
reorder beams is to reorder a few numbers.

    time        0  1  2
    row 0 path  0  0  1      beams 0 and 1 both go on from beam 0 at time 1
    row 1 path  0  0  0

Shapes: L layers, S texts of K tokens (K padded), R rows of T tokens of their own, H heads, D width of a head.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from allmask.branches import Branches, Fan

CHUNK = 32  # tokens by which the room of rows grows
KEYS = 64  # the length of texts is padded to a multiple, as the compiled step wants it


@dataclass(frozen=True)
class Texts:
    """The keys and values of texts, those of a head side by side for each kind of product."""

    keys: Tensor  # (L, S, H, D, K)
    values: Tensor  # (L, S, H, K, D)
    lengths: Tensor  # (S,) int32
    padding: Tensor | None  # (S, 1, 1, K), True where there is no token; None: nowhere

    @classmethod
    def of(cls, layers: list[Branches], lengths: Tensor, dtype: torch.dtype) -> Texts:
        space = -layers[0].text.keys.shape[2] % KEYS
        keys = torch.stack([F.pad(layer.text.keys.transpose(2, 3).to(dtype), (0, space)) for layer in layers])
        values = torch.stack([F.pad(layer.text.values.to(dtype), (0, 0, 0, space)) for layer in layers])
        padding = torch.arange(keys.shape[-1]) >= lengths[:, None]
        return cls(keys, values, lengths.int(), padding[:, None, None] if bool(padding.any()) else None)

    def keep(self, texts: Tensor) -> Texts:
        padding = None if self.padding is None else self.padding[texts]
        return Texts(self.keys[:, texts], self.values[:, texts], self.lengths[texts], padding)


@dataclass
class Own:
    """A buffer for what rows write, (L, 2, time, slots, W), and how many times are taken."""

    buffer: Tensor
    filled: int = 0

    def with_room(self, time: int, rows: int) -> Own:
        """This buffer if nobody has written at `time` and the rows fit; otherwise a copy up to then, larger if need be.

        A state that is continued twice thus never sees the other's tokens.
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
    fan: Fan
    own: Own
    path: Tensor  # (R, T) int32, the slot of each token
    place: Tensor  # (R,) of the newest token
    straight: bool = True  # every row has always had the slot of its own number

    @classmethod
    def begin(cls, texts: Texts, place: Tensor, dtype: torch.dtype) -> Rows:
        layers, count, heads, width, _ = texts.keys.shape
        own = Own(torch.zeros(layers, 2, CHUNK, count, heads * width, dtype=dtype))
        return cls(texts, Fan.of(torch.arange(count), count), own, torch.zeros(count, 0, dtype=torch.int32), place)

    @property
    def time(self) -> int:
        """When the newest token was written."""
        return self.path.shape[1] - 1

    def select(self, rows: Tensor) -> Rows:
        fan, kept = self.fan, None
        if not torch.equal(fan.owner[rows], fan.owner):
            fan, kept = fan.select(rows)
        texts = self.texts if kept is None else self.texts.keep(kept)
        return replace(self, texts=texts, fan=fan, path=self.path[rows], place=self.place[rows], straight=False)

    def longer(self) -> Rows:
        """With room for one more token a row, at `time`."""
        count, time = self.path.shape
        own = self.own.with_room(time, count)
        own.filled = time + 1
        slots = torch.arange(count, dtype=torch.int32)[:, None]
        return replace(self, own=own, path=torch.cat([self.path, slots], dim=1), place=self.place + 1)

    def written(self, layer: int) -> tuple[Tensor, Tensor]:
        """The keys and values (R, T, W) of the rows' own tokens."""
        count, times = self.path.shape
        buffer = self.own.buffer[layer, :, :times]
        if self.straight:
            keys, values = buffer[:, :, :count].transpose(1, 2).unbind()
        else:
            keys, values = buffer[:, torch.arange(times), self.path.long()].unbind()
        return keys, values
