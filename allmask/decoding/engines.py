"""Fast writers: the same texts as `MaskWriter` writes, from packed weights and without work a step could do once.

writer = writer_for(model)                      # the fastest this processor has: int8, bf16 or fp32
best = generate(writer, prompts, Decoding(end=(sep,), beams=4))

That a new token reads everything before it is found out once, from the mask of the prompt; where a window or a matrix
says otherwise, `MaskWriter` writes. Shapes are those of rows.py.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from typing import Protocol

import torch
from torch import Tensor

from allmask.attention import Route
from allmask.branches import Branches
from allmask.config import bert_tiny
from allmask.decoding import compiled
from allmask.decoding.parts import Parts, packed_linear
from allmask.decoding.rows import Rows, Texts
from allmask.decoding.search import Writer
from allmask.decoding.writers import MaskWriter, padded_prompts
from allmask.errors import UsageError
from allmask.inference.bytes import SLOW, Int8Linear
from allmask.inference.frozen import CHOICES, PRECISIONS, computes_bf16, freeze
from allmask.masks import Mask
from allmask.model import Model
from allmask.transformer import BranchedCache

log = logging.getLogger("allmask")


def writer_for(
    model: Model, precision: str = "auto", mask: Callable[[Tensor], Mask] | None = None,
    segments: tuple[int, int] | None = None,
) -> Writer:  # fmt: skip
    """A writer with the weights of a model as they are now, for this processor.

    fp32 writes what `MaskWriter` writes; bf16 and int8 round in their own way, the same for every batch. `auto` is int8
    where the compiled step runs, then bf16 where the processor computes in it, then fp32. With int8, attention over a
    prompt and its projections stay in bf16 or fp32, which costs little and keeps most of what bytes would lose.
    """
    if precision not in CHOICES:
        raise UsageError(f"precision is {precision!r}; expected one of {', '.join(CHOICES)}")
    model.head("lm_head")  # or say that there is none
    device = model.body.embedding.tokens.weight.device
    if precision == "auto":
        precision = "int8" if _has_compiled(model) else "bf16" if computes_bf16(device) else "fp32"
    reading = ("bf16" if computes_bf16(device) else "fp32") if precision == "int8" else precision
    slow = MaskWriter(freeze(model, reading), mask, segments)
    compares = model.config.position_kind in ("relative", "shifted")  # how far tokens stand from each other
    if device.type != "cpu" or compares or not model.body.tokenwise:
        return slow
    engine = _engine(model, precision)
    if precision == "int8" and isinstance(engine, compiled.CompiledEngine):
        for number, layer in enumerate(slow.model.body.layers):
            layer.feed_forward = engine.feed_forward(number)
    elif precision == "int8":
        log.warning(SLOW)
    return FastWriter(slow, engine)


class Engine(Protocol):
    """What computes a step. `dtype` is that of the hidden states it takes, `text_dtype` that of the texts it reads."""

    dtype: torch.dtype
    text_dtype: torch.dtype

    def step(self, x: Tensor, rows: Rows) -> Tensor:
        """The logits (R, V) after one more embedded token (R, W) a row, whose keys and values are kept in the rows."""
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """(R, V) of hidden states (R, W)."""
        ...


def _engine(model: Model, precision: str) -> Engine:
    return _compiled(model, precision) if _has_compiled(model) else TorchEngine(model, precision)


def _compiled(model: Model, precision: str) -> Engine:
    return compiled.CompiledEngine(model, PRECISIONS.get(precision, torch.uint8))


def _has_compiled(model: Model) -> bool:
    return compiled.fits(model) and _compiled_is_right()


@cache
def _compiled_is_right() -> bool:
    """Whether the compiled step, on this machine, says of a small model what torch says."""
    sizes = {"vocabulary": 70, "width": 32, "heads": 2, "inner": 48, "layers": 2, "max_positions": 8}
    model = Model.fresh(replace(bert_tiny(), **sizes, init_std=0.2), ["lm"], torch.Generator().manual_seed(0))
    slow = MaskWriter(freeze(model, "fp32"))
    for precision in CHOICES[1:]:
        ours, torchs = (_answers(FastWriter(slow, make(model, precision))) for make in (_compiled, TorchEngine))
        if not torch.allclose(ours, torchs, atol=0.03 * float(torchs.abs().max())):
            log.warning("the compiled step in %s differs from torch's on this machine; it is not used", precision)
            return False
    return True


def _answers(writer: FastWriter) -> Tensor:
    """Some logits: of two texts, and of three rows that go on from them."""
    first, state = writer.begin([[1, 2, 3], [4]])
    second, state = writer.step(torch.tensor([5, 6, 7]), state.select(torch.tensor([1, 0, 0])))
    third, _ = writer.step(torch.tensor([9, 8]), state.select(torch.tensor([2, 1])))
    return torch.cat([first, second, third]).float()


class FastWriter:
    """Reads prompts with a frozen model, all of its last layer left out but the last token; steps with an engine."""

    def __init__(self, slow: MaskWriter, engine: Engine):
        self.slow = slow
        self.body = slow.model.body
        self.engine = engine

    def room(self, prompt: Sequence[int]) -> int:
        return self.slow.room(prompt)

    @torch.inference_mode()
    def begin(self, prompts: Sequence[Sequence[int]]) -> tuple[Tensor, Rows | BranchedCache]:
        ids, valid = padded_prompts(prompts, self.slow.model)
        mask = self.slow.mask(valid)
        if not _new_tokens_see_all(mask, valid):
            return self.slow.begin(prompts)
        hidden, layers = self._read(ids, mask, valid.sum(1))
        texts = Texts.of(layers, valid.sum(1), self.engine.text_dtype)
        place = mask.place.masked_fill(~valid, -1).amax(1)
        return self.engine.logits(hidden.to(self.engine.dtype)), Rows.begin(texts, place, self.engine.dtype)

    @torch.inference_mode()
    def step(self, tokens: Tensor, state: Rows | BranchedCache) -> tuple[Tensor, Rows | BranchedCache]:
        if isinstance(state, BranchedCache):
            return self.slow.step(tokens, state)
        rows = state.longer()
        x = self.body.embedding(tokens, rows.place, torch.full_like(tokens, self.slow.segments[1]))
        return self.engine.step(x.to(self.engine.dtype), rows), rows

    def _read(self, ids: Tensor, mask: Mask, lengths: Tensor) -> tuple[Tensor, list[Branches]]:
        """The hidden state (S, W) of each text's last token, and the keys and values of all tokens in each layer."""
        flat, index = mask.flatten()
        flat_ids, route, layers = ids.flatten()[index][None], Route.find(flat), []
        x = self.body.embed(flat_ids, flat, None, torch.full_like(flat_ids, self.slow.segments[0]))
        for layer in self.body.layers[:-1]:
            x, read = layer(x, route)
            layers.append(Branches.begin(read, mask.shape, index))
        top, last = self.body.layers[-1], lengths[:, None] - 1
        read = top.attention.remember(top.enter(top.attention_norm, x))
        layers.append(Branches.begin(read, mask.shape, index))
        query = replace(mask, **{name: getattr(mask, name).gather(1, last) for name in ("order", "group", "place")})
        where = torch.empty(ids.numel(), dtype=torch.long).index_copy(0, index, torch.arange(len(index)))
        x = x[0, where.view(ids.shape).gather(1, last)]  # (S, 1, W)
        return self.body.norm(top.peek(x, Route.find(query, mask), layers[-1]))[:, 0], layers


def _new_tokens_see_all(mask: Mask, valid: Tensor) -> bool:
    """Whether a token younger than all others reads all of its prompt, and each prompt has a token."""
    plain = mask.window is None and mask.matrix is None
    return plain and bool(valid[:, 0].all()) and torch.equal(mask.group, valid.long() - 1)


class TorchEngine:
    """A step in a few torch calls a layer, in fp32, bf16 or int8. The specification of the compiled one."""

    def __init__(self, model: Model, precision: str):
        self.dtype = PRECISIONS.get(precision, torch.float32)
        self.text_dtype = self.dtype
        self.heads = model.config.heads
        make = Int8Linear if precision == "int8" else packed_linear(self.dtype)
        self.parts = Parts.of(model, make, self.dtype)
        self.enter, self.leave = model.body.layers[0].enter, model.body.layers[0].leave

    def step(self, x: Tensor, rows: Rows) -> Tensor:
        for number, part in enumerate(self.parts.layers):
            h = part.qkv(self.enter(part.norms[0], x))
            q = self._remember(h, number, rows)
            x = self.leave(part.norms[0], x + part.output(self._attend(q, number, rows)))
            h = part.contract(part.expand(self.enter(part.norms[1], x)))
            x = self.leave(part.norms[1], x + h)
        return self.logits(self.parts.last(x))

    def logits(self, hidden: Tensor) -> Tensor:
        transform = self.parts.transform
        x = hidden if transform is None else self.parts.head_norm(transform(hidden))
        return self.parts.head(x)

    def _remember(self, h: Tensor, layer: int, rows: Rows) -> Tensor:
        """Keys and values go into the rows' slots; the queries (R, 1, H, D) are returned."""
        q, new = h.tensor_split([h.shape[1] // 3], dim=1)
        rows.own.buffer[layer, :, rows.time, : len(h)] = new.unflatten(1, (2, -1)).transpose(0, 1)
        return q.unflatten(1, (1, self.heads, -1))

    def _attend(self, q: Tensor, layer: int, rows: Rows) -> Tensor:
        """Attention of q over a row's text and its own tokens, (R, W)."""
        texts, fan = rows.texts, rows.fan
        grid = fan.spread(q[:, 0]).transpose(1, 2) @ texts.keys[layer]  # (S, H, width, K)
        grid = grid if texts.padding is None else grid.masked_fill_(texts.padding, -torch.inf)
        over_text = fan.gather(grid.transpose(1, 2))[:, :, None]  # (R, H, 1, K)
        keys, values = (x.unflatten(2, (self.heads, -1)).transpose(1, 2) for x in rows.written(layer))  # (R, H, T, D)
        scores = torch.cat([over_text, q.transpose(1, 2) @ keys.transpose(2, 3)], dim=-1)
        on_text, on_own = scores.softmax(-1).split([over_text.shape[-1], keys.shape[2]], dim=-1)
        read = fan.gather((fan.spread(on_text[:, :, 0]).transpose(1, 2) @ texts.values[layer]).transpose(1, 2))
        return (read + (on_own @ values)[:, :, 0]).flatten(1)
