"""Fast writers: what `MaskWriter` and `PairWriter` write, from packed weights and without work a step could do once.

writer = writer_for(model)                      # the fastest this processor has: int8, bf16 or fp32
best = generate(writer, prompts, Decoding(end=(sep,), beams=4))
writer = pair_writer_for(model)                 # of an encoder–decoder

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
from allmask.config import bert_tiny, t5_v1_1_small
from allmask.decoding import compiled
from allmask.decoding.parts import CrossParts, LayerParts, Parts, byte_linear, packed_linear
from allmask.decoding.rows import Rows, Texts
from allmask.decoding.search import Writer
from allmask.decoding.writers import MaskWriter, PairWriter, padded_prompts
from allmask.errors import UsageError
from allmask.inference.bytes import SLOW
from allmask.inference.frozen import CHOICES, PRECISIONS, computes_bf16, freeze
from allmask.layers import NORM_PLACES
from allmask.masks import Mask
from allmask.model import Model
from allmask.transformer import BranchedCache, EncoderDecoder

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
    precision, device = _chosen(model, precision), model.body.embedding.tokens.weight.device
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


def pair_writer_for(model: Model, precision: str = "auto", start: Sequence[int] | None = None) -> Writer:
    """The same for an encoder–decoder, whose texts begin with `start`: the model's own token unless given.

    fp32 writes what `PairWriter` writes. With int8 the encoder computes with bytes, too; attention does not.
    """
    if isinstance(model.body, EncoderDecoder):  # not a recurrent one
        precision = _chosen(model, precision)
    slow = PairWriter(freeze(model, precision), start)
    on_cpu = model.body.embedding.tokens.weight.device.type == "cpu"
    if not on_cpu or not isinstance(model.body, EncoderDecoder) or not model.body.tokenwise:
        return slow
    return FastPairWriter(slow, _engine(model, precision))


def _chosen(model: Model, precision: str) -> str:
    if precision not in CHOICES:
        raise UsageError(f"precision is {precision!r}; expected one of {', '.join(CHOICES)}")
    model.head("lm_head")  # or say that there is none
    if precision != "auto":
        return precision
    bf16 = computes_bf16(model.body.embedding.tokens.weight.device)
    return "int8" if _has_compiled(model) else "bf16" if bf16 else "fp32"


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
    """Whether the compiled step, on this machine, says of small models what torch says."""
    for writer in _small_writers():
        for precision in CHOICES[1:]:
            ours, torchs = (_answers(writer(make, precision)) for make in (_compiled, TorchEngine))
            if not torch.allclose(ours, torchs, atol=0.03 * float(torchs.abs().max())):
                log.warning("the compiled step in %s differs from torch's on this machine; it is not used", precision)
                return False
    return True


def _small_writers() -> list[Callable[[Callable[[Model, str], Engine], str], Writer]]:
    """Of one stack and of two: how each is made with an engine."""
    sizes = {"vocabulary": 70, "width": 32, "heads": 2, "inner": 48, "layers": 2, "max_positions": 8, "init_std": 0.2}
    rng = torch.Generator().manual_seed(0)
    one = Model.fresh(replace(bert_tiny(), **sizes), ["lm"], rng)
    two = Model.fresh(replace(t5_v1_1_small(), **sizes, decoder_layers=2, head_width=16), ["lm"], rng)
    slow, slow_pair = MaskWriter(freeze(one, "fp32")), PairWriter(freeze(two, "fp32"))
    return [
        lambda make, precision: FastWriter(slow, make(one, precision)),
        lambda make, precision: FastPairWriter(slow_pair, make(two, precision)),
    ]


def _answers(writer: Writer) -> Tensor:
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


class FastPairWriter:
    """Reads sources with a frozen encoder; steps with an engine, which reads them as the decoder's layers see them."""

    def __init__(self, slow: PairWriter, engine: Engine):
        self.slow = slow
        self.body: EncoderDecoder = slow.model.body
        self.engine = engine

    def room(self, prompt: Sequence[int]) -> int:
        return self.slow.room(prompt)

    @torch.inference_mode()
    def begin(self, prompts: Sequence[Sequence[int]]) -> tuple[Tensor, Rows]:
        ids, valid = self.slow.sources(prompts)
        mask = Mask.bidirectional(valid)
        flat, index = mask.flatten()
        memory = self.body.remember(self.body(ids.flatten()[index][None], flat), flat)
        layers = [Branches.begin(layer, mask.shape, index) for layer in memory.layers]
        texts = Texts.of(layers, valid.sum(1), self.engine.text_dtype)
        logits, rows = (
            torch.empty(0),
            Rows.begin(texts, valid.new_full((len(ids),), -1, dtype=torch.long), self.engine.dtype),
        )
        for token in self.slow.start:
            logits, rows = self.step(torch.full_like(rows.place, token), rows)
        return logits, rows

    @torch.inference_mode()
    def step(self, tokens: Tensor, state: Rows) -> tuple[Tensor, Rows]:
        rows = state.longer()
        x = self.body.embedding(tokens, rows.place, torch.zeros_like(tokens))
        return self.engine.step(x.to(self.engine.dtype), rows), rows


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
        make = byte_linear if precision == "int8" else packed_linear(self.dtype)
        self.parts = Parts.of(model, make, self.dtype)
        self.enter, self.leave = NORM_PLACES[model.config.norm_place]

    def step(self, x: Tensor, rows: Rows) -> Tensor:
        for number, part in enumerate(self.parts.layers):
            q = self._remember(part.qkv(self.enter(part.norms[0], x)), number, rows)
            read = self._attend(q, number, rows, over_text=part.cross is None)
            x = self.leave(part.norms[0], x + part.output(read))
            x = x if part.cross is None else self._read_source(part.cross, x, number, rows)
            x = self.leave(part.norms[1], x + self._feed(part, self.enter(part.norms[1], x)))
        return self.logits(self.parts.last(x))

    def logits(self, hidden: Tensor) -> Tensor:
        transform = self.parts.transform
        x = hidden if transform is None else self.parts.head_norm(transform(hidden))
        return self.parts.head(x)

    def _feed(self, part: LayerParts, h: Tensor) -> Tensor:
        wide = part.expand(h)
        return part.contract(wide if part.gated is None else wide * part.gated(h))

    def _read_source(self, cross: CrossParts, x: Tensor, layer: int, rows: Rows) -> Tensor:
        q = cross.query(self.enter(cross.norm, x)).unflatten(1, (1, self.heads, -1))
        return self.leave(cross.norm, x + cross.output(self._attend(q, layer, rows, over_own=False)))

    def _remember(self, h: Tensor, layer: int, rows: Rows) -> Tensor:
        """Keys and values go into the rows' slots; the queries (R, 1, H, D) are returned."""
        q, new = h.tensor_split([h.shape[1] // 3], dim=1)
        rows.own.buffer[layer, :, rows.time, : len(h)] = new.unflatten(1, (2, -1)).transpose(0, 1)
        return q.unflatten(1, (1, self.heads, -1))

    def _attend(self, q: Tensor, layer: int, rows: Rows, over_text: bool = True, over_own: bool = True) -> Tensor:
        """Attention of q over a row's text, over its own tokens, or over both: (R, W)."""
        texts, fan, scores, own = rows.texts, rows.fan, [], []
        if over_text:
            grid = fan.spread(q[:, 0]).transpose(1, 2) @ texts.keys[layer]  # (S, H, width, K)
            grid = grid if texts.padding is None else grid.masked_fill_(texts.padding, -torch.inf)
            scores.append(fan.gather(grid.transpose(1, 2))[:, :, None])  # (R, H, 1, K)
        if over_own:
            own = [x.unflatten(2, (self.heads, -1)).transpose(1, 2) for x in rows.written(layer)]  # (R, H, T, D) each
            scores.append(self._with_distances(q.transpose(1, 2) @ own[0].transpose(2, 3), rows.time))
        weights = torch.cat(scores, dim=-1).softmax(-1)
        read = weights[..., -own[1].shape[2] :] @ own[1] if own else 0.0
        if over_text:
            on_text = fan.spread(weights[:, :, 0, : texts.keys.shape[-1]]).transpose(1, 2) @ texts.values[layer]
            read = read + fan.gather(on_text.transpose(1, 2))[:, :, None]
        assert isinstance(read, Tensor)
        return read[:, :, 0].flatten(1)

    def _with_distances(self, scores: Tensor, time: int) -> Tensor:
        near = self.parts.near
        if near is None:
            return scores
        ago = torch.arange(time, -1, -1).clamp(max=near.shape[1] - 1)
        return scores + near[:, None, ago]
